"""Journal: records for MLflow, in order, kept in the storage of the run until they are delivered.

    <folder>/segments/000000000001.jsonl    records 1, 2, 3, ..., one per line; never changed
    <folder>/blobs/ID                       the bytes of a picture or a model, which its record names
    <folder>/delivered.json                 the acknowledgement: all records up to this one were delivered
    <folder>/refused/000000000007.json      a record that MLflow will never accept, and why

`add` keeps a record in memory and returns at once. A thread writes what has gathered as a segment, every
second or as soon as it is some MB: a killed process loses the records of its last second at most. `flush`
writes them now. Acknowledged segments are deleted. An object store, which cannot append, can hold all this.

    journal = Journal("s3://lake/clothing1m/runs/demo/journal/ab12")
    journal.add("tag", {"stage": "parent", "name": "warning.labels", "value": "none moved"})
    journal.add_values("pencil", step=7, values={"loss": 0.3})      # a repeated step is left out
    for record in journal.first(): ...
    journal.drop(record)

The process that opened a journal last owns it: the acknowledgement is replaced only by compare-and-swap. A
former owner that is still alive stops delivering; the new owner also delivers what that one still writes.
"""

import json
import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from pencil_scale.storage.errors import DamagedError, PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.urls import without_passwords

log = logging.getLogger(__name__)

DELIVERED, SEGMENTS = "delivered.json", "segments"
SEGMENT_BYTES = 4 << 20  # written at once, before the second has passed
MOST_WAITING_BYTES = 256 << 20  # kept in memory while the storage cannot be written
MOST_RECORDS = 500  # returned at once


class AwayError(PencilError):
    """The server or the storage cannot be reached now; the same records may be accepted later."""


class RefusedError(PencilError):
    """The first of these records will never be accepted."""


class Record(NamedTuple):
    """One thing to deliver; `read` gives the bytes that belong to it."""

    number: int
    kind: str
    body: dict[str, Any]
    read: Callable[[], bytes] = bytes
    blob: str = ""


class Journal:
    """The records of one run."""

    def __init__(self, url: str, every_s: float = 1.0) -> None:
        self.url = str(without_passwords(url))
        self.runs: dict[str, str] = {}  # stage -> id of its MLflow run; the receiver adds them
        self.num_lost = 0
        self._folder = self._objects = Folder(url)
        self._owner, self._is_owner = uuid.uuid4().hex, True
        self._lock = threading.Lock()  # for what is in memory; never held while the storage works
        self._storing = threading.Lock()
        self._steps: dict[str, int] = {}  # the last step of each series
        self._waiting: list[tuple[bytes, str, bytes]] = []  # line, name of the blob, blob
        self._num_waiting_bytes = 0
        self._is_failing = False
        self._number = self._acknowledged = 0  # the last record that was delivered
        self._delivered_steps: dict[str, int] = {}
        self._done: list[str] = []  # files to delete after the next acknowledgement
        self._segments: deque[int] = deque()  # those to deliver, by the number of their first record
        self._loaded: tuple[int, list[Record]] = (0, [])  # the first of them
        self._take_over()
        self._next = self._number + 1
        self._find_segments()
        self._wake, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._write_often, args=(every_s,), daemon=True)
        self._thread.start()

    def _take_over(self) -> None:
        while True:
            found = self._objects.read(DELIVERED)
            try:
                if found:
                    known = json.loads(found[0])
                    self._number = self._acknowledged = int(known["number"])
                    self._delivered_steps, self.runs = dict(known["steps"]), dict(known["runs"])
            except (ValueError, TypeError, KeyError) as error:
                log.warning("%s/%s is damaged (%r): records may be repeated", self.url, DELIVERED, error)
            if self._objects.replace(DELIVERED, self._acknowledgement(), found and found[1]):
                return

    def _find_segments(self) -> None:
        """Find what an earlier process left to deliver."""
        self._steps = dict(self._delivered_steps)
        names = [PurePosixPath(name) for name in self._folder.names(SEGMENTS)]
        firsts = [int(name.stem) for name in names if name.suffix == ".jsonl"]
        with ThreadPoolExecutor(16) as pool:
            for first, records in zip(firsts, pool.map(self._load, firsts), strict=True):
                for record in records:
                    self._steps |= _series(record.kind, record.body)
                self._next = max(self._next, first + len(records))
                if first + len(records) > self._number + 1:
                    self._segments.append(first)
                elif records:  # acknowledged; a damaged one is kept
                    self._done.append(_segment(first))

    # --- adding ----------------------------------------------------------------------------------------

    def add(self, kind: str, body: Mapping[str, Any], blob: bytes | None = None) -> None:
        """Keep a record until it is delivered. One that cannot be kept is lost; the call never fails."""
        with self._lock:
            self._add(kind, body, blob)

    def add_values(self, stage: str, step: int, values: Mapping[str, float], **more: Any) -> list[str]:
        """Keep the values of a step as one record; return the names left out because they are not new.

        Work that is repeated after a crash reports its steps again. MLflow appends, so it would show two
        values for one step: values at or before the last step of their series are left out.
        """
        with self._lock:
            repeated = [name for name in values if step <= self._steps.get(f"{stage}/{name}", step - 1)]
            new = {name: value for name, value in values.items() if name not in repeated}
            if new:
                self._add("metrics", {"stage": stage, "step": step, "values": new, **more}, None)
        return repeated

    def _add(self, kind: str, body: Mapping[str, Any], blob: bytes | None) -> None:
        name = "" if blob is None else uuid.uuid4().hex
        try:
            if self._is_failing and self._num_waiting_bytes > MOST_WAITING_BYTES:
                raise PencilError(f"{self._num_waiting_bytes:,} bytes wait in memory to be written")
            line = json.dumps([kind, body, name]).encode() + b"\n"
        except Exception as error:  # a value that JSON does not know, for example
            self.num_lost += 1
            if self.num_lost == 1:
                log.warning("%s: a record of kind '%s' is lost (%s)", self.url, kind, error)
            return
        self._steps |= _series(kind, body)
        self._waiting.append((line, name, blob or b""))
        self._num_waiting_bytes += len(line) + len(blob or b"")
        if self._num_waiting_bytes > SEGMENT_BYTES:
            self._wake.set()

    # --- storing ---------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write what was added, and acknowledge what was delivered. A failure is logged and retried."""
        with self._storing:
            with self._lock:
                waiting, self._waiting, self._num_waiting_bytes = self._waiting, [], 0
            try:
                if waiting:
                    self._write(waiting)
                waiting = []
                self._acknowledge()
                self._is_failing = False
            except Exception as error:  # the libraries of stores raise classes of their own
                if not self._is_failing:
                    log.warning("%s cannot be written (%s): records wait in memory", self.url, error)
                self._is_failing = True
                with self._lock:
                    self._waiting = waiting + self._waiting
                    self._num_waiting_bytes += sum(len(line) + len(blob) for line, _, blob in waiting)

    def flush_soon(self) -> None:
        """Have the thread flush now; a storage that does not answer delays only the thread."""
        self._wake.set()

    def _write(self, waiting: list[tuple[bytes, str, bytes]]) -> None:
        for _, name, blob in waiting:
            if name:
                self._folder.put(f"blobs/{name}", blob)
        data = b"".join(line for line, _, _ in waiting)
        while not self._objects.create(_segment(self._next), data):  # a former owner is still alive
            self._count_segment(len(self._load(self._next)) or 1)
        self._count_segment(len(waiting))

    def _count_segment(self, num_records: int) -> None:
        with self._lock:
            self._segments.append(self._next)
            self._next += num_records

    def _acknowledge(self) -> None:
        with self._lock:
            number, done, data = self._number, list(self._done), self._acknowledgement()
        if not self._is_owner or (number == self._acknowledged and not done):
            return
        found = self._objects.read(DELIVERED)
        is_ours = found is not None and json.loads(found[0]).get("owner") == self._owner
        self._is_owner = is_ours and self._objects.replace(DELIVERED, data, found and found[1])
        if not self._is_owner:
            return
        self._acknowledged = number
        for name in done:
            self._folder.delete(name)
        with self._lock:
            self._done = self._done[len(done) :]

    def _acknowledgement(self) -> bytes:
        known = {"number": self._number, "steps": self._delivered_steps, "runs": self.runs}
        return json.dumps({"owner": self._owner, **known}).encode()

    def _write_often(self, every_s: float) -> None:
        while not self._closed.is_set():
            self._wake.wait(every_s)
            self._wake.clear()
            self.flush()

    def close(self) -> None:
        """Write the rest and end; what cannot be written now is lost."""
        self._closed.set()
        self._wake.set()
        self._thread.join(10)
        self.flush()
        self.num_lost += len(self._waiting)

    # --- delivering ------------------------------------------------------------------------------------

    def first(self, most: int = MOST_RECORDS) -> list[Record]:
        """Return the oldest records that are written and not delivered."""
        while self._segments:
            if not self._is_owner:
                raise PencilError(f"{self.url}: another process delivers its records now")
            first = self._segments[0]
            if self._loaded[0] != first:
                self._loaded = first, self._load(first)
            num_delivered = max(self._number + 1 - first, 0)
            left = self._loaded[1][num_delivered : num_delivered + most]
            if left:
                return left
            with self._lock:
                self._leave_segment()
        return []

    def drop(self, last: Record, refused: str = "") -> None:
        """Mark all records up to this one as delivered, or, with a reason, this one as refused."""
        if refused:
            text = {"kind": last.kind, "body": last.body, "blob": last.blob, "reason": refused}
            try:
                self._folder.put_json(f"refused/{last.number:012d}.json", text)
            except Exception as error:
                raise AwayError(f"{self.url}/refused cannot be written: {error}") from error
        with self._lock:
            for record in self._loaded[1]:
                if self._number < record.number <= last.number:
                    self._delivered_steps |= _series(record.kind, record.body)
                    self._done += [f"blobs/{record.blob}"] if record.blob and not refused else []
            self._number = last.number
            if last.number == self._loaded[1][-1].number:
                self._leave_segment()

    def _leave_segment(self) -> None:
        first = self._segments.popleft()
        self._done += [_segment(first)] if self._loaded[1] else []  # a damaged one is kept
        self._number = (self._segments[0] if self._segments else self._next) - 1

    def _load(self, first: int) -> list[Record]:
        name = _segment(first)
        try:
            lines = [json.loads(line) for line in self._get(name).splitlines()]
            return [
                Record(number, kind, body, partial(self._get, f"blobs/{blob}"), blob)
                for number, (kind, body, blob) in enumerate(lines, first)
            ]
        except (ValueError, TypeError, RefusedError) as error:
            log.warning("%s/%s is damaged (%s): its records are not delivered", self.url, name, error)
            return []

    def _get(self, name: str) -> bytes:
        try:
            return self._folder.get(name)
        except DamagedError as error:
            raise RefusedError(f"{self.url}/{name} is gone") from error
        except Exception as error:
            raise AwayError(f"{self.url}/{name} cannot be read: {error}") from error

    def __len__(self) -> int:
        with self._lock:
            return self._next - 1 - self._number + len(self._waiting)


def _series(kind: str, body: Mapping[str, Any]) -> dict[str, int]:
    return {f"{body['stage']}/{name}": body["step"] for name in body["values"]} if kind == "metrics" else {}


def _segment(first: int) -> str:
    return f"{SEGMENTS}/{first:012d}.jsonl"
