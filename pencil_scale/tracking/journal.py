"""Journal: entries for MLflow, kept in the storage of the run until a thread has delivered them.

    <folder>/segments/000000000001-ID-42.jsonl   42 entries in order, one per line; never changed
    <folder>/blobs/ID                            the bytes of a picture or a model, which its entry names
    <folder>/owner                               the id of the process that delivers
    <folder>/refused/                            entries that MLflow will never accept, and damaged segments

`add` keeps an entry in memory. A thread writes what has gathered as a segment every second: a killed process
loses the entries of its last second at most. Another thread sends the oldest segments and then deletes them:
a crash in between sends them again, which must do no harm. Object stores, which cannot append, suffice.

    journal = Journal("s3://lake/clothing1m/runs/demo/journal/ab12")
    delivery = Delivery(journal, send, receiver="MLflow http://tracking:5000")
    journal.add("tag", {"stage": "parent", "name": "warning.labels", "value": "none moved"})
    all_delivered = delivery.finish(wait_s=30)     # the journal keeps the rest, for `deliver_records`

The process that opened a journal last owns it. A former owner that is still alive stops delivering, and the
new owner also delivers what that one still writes. Nothing here ends a run.
"""

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from pencil_scale.config.command import command
from pencil_scale.storage.errors import PencilError, many
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.retries import limited_to
from pencil_scale.storage.urls import without_passwords

log = logging.getLogger(__name__)

OWNER = "owner"
MOST_SEGMENTS = 100  # delivered together after an outage
RETRY_S = 10.0
SHORT_S = 0.1  # between attempts once the run has ended
AWAY_S = 5.0  # how long a run that has ended waits for a receiver that was unreachable before


class AwayError(PencilError):
    """The server or the storage cannot be reached now; the same entries may be accepted later."""


class StorageAwayError(AwayError):
    """It is the storage of the journal."""


class Entry(NamedTuple):
    """One thing to deliver, with the bytes that belong to it."""

    id: str
    kind: str
    body: dict[str, Any]
    blob: str = ""  # the name of the file that holds the bytes
    data: bytes = b""


class Journal:
    """The entries of one run, in its storage."""

    def __init__(self, url: str, every_s: float = 1.0) -> None:
        self.url = str(without_passwords(url))
        self.waiting: list[tuple[bytes, str, bytes]] = []  # to be written: line, name of the blob, blob
        self._url, self._folder, self._id = url, Folder(url), uuid.uuid4().hex
        self._done: list[str] = []  # files to delete once they are delivered
        self._folder.put(OWNER, self._id.encode())
        names = self._segments()
        self._number = int(PurePosixPath(names[-1]).stem.partition("-")[0]) if names else 0
        self._empty_at = -1  # the number at which the last list of segments was empty
        self._is_failing = self._is_closed = False
        self._writing, self._wake = threading.Lock(), threading.Event()
        threading.Thread(target=self._write_often, args=(every_s,), daemon=True).start()

    # --- writing ---------------------------------------------------------------------------------------

    def add(self, kind: str, body: dict[str, Any], blob: bytes | None = None) -> None:
        """Keep an entry until it is delivered."""
        name = "" if blob is None else uuid.uuid4().hex
        line = json.dumps([kind, body, name], default=str).encode() + b"\n"
        self.waiting.append((line, name, blob or b""))

    def flush(self) -> None:
        """Write what was added. A failure is logged, and the thread tries again."""
        with self._writing, limited_to(0):
            some = self.waiting.copy()
            try:
                if some:
                    self._write(some)
                    del self.waiting[: len(some)]
                self._is_failing = False
            except Exception as error:  # the libraries of stores raise many classes
                if not self._is_failing:
                    log.warning("%s cannot be written (%s): entries wait in memory", self.url, error)
                self._is_failing = True

    def flush_soon(self) -> None:
        """Have the thread flush now; a storage that does not answer delays only the thread."""
        self._wake.set()

    def close(self) -> None:
        """Write the rest and end; what still waits afterwards is lost."""
        self._is_closed = True
        self._wake.set()
        self.flush()

    def _write(self, some: list[tuple[bytes, str, bytes]]) -> None:
        for _, name, blob in some:
            if name:
                self._folder.put(f"blobs/{name}", blob)
        # A former owner that is still alive may write a segment of the same number, so names have an id.
        name = f"segments/{self._number + 1:012d}-{self._id}-{len(some)}.jsonl"
        self._folder.put(name, b"".join(line for line, _, _ in some))
        self._number += 1

    def _write_often(self, every_s: float) -> None:
        while not self._is_closed:
            self._wake.wait(every_s)
            self._wake.clear()
            self.flush()

    # --- delivering ------------------------------------------------------------------------------------

    def first(self, thorough: bool = True) -> list[Entry] | None:
        """Read the entries of the oldest segments; None if all were delivered.

        Unless it is to be thorough, it asks the storage only if this process has written since: an object
        store charges for every list.
        """
        number = self._number
        if number == self._empty_at and not thorough:
            return None
        with self._away_errors():
            names = self._segments()[:MOST_SEGMENTS]
            if not names:
                self._empty_at = number
                return None
            entries = [entry for name in names for entry in self._load(name)]
            owner = self._folder.find(OWNER)
        if owner != self._id.encode():
            raise PencilError(f"{self.url}: another process delivers its entries now")
        self._done = names + [f"blobs/{entry.blob}" for entry in entries if entry.blob]
        return entries

    def drop(self) -> None:
        """Delete all that `first` returned: it is delivered."""
        with self._away_errors():
            for name in self._done:
                self._folder.delete(name)

    def refuse(self, entry: Entry, reason: str) -> None:
        """Keep an entry and its blob, so that a person can find out why it was refused."""
        text = {"kind": entry.kind, "body": entry.body, "blob": entry.blob, "reason": reason}
        with self._away_errors():
            self._folder.put_json(f"refused/{entry.id}.json", text)
        self._done = [name for name in self._done if name != f"blobs/{entry.blob}"]

    def count(self) -> int:
        """Count the entries that were written and not delivered; reads only the names of the segments."""
        with self._away_errors():
            return sum(int(PurePosixPath(name).stem.rpartition("-")[2]) for name in self._segments())

    def _segments(self) -> list[str]:
        # A new Folder, since s3fs may have cached a list that it made while a segment was being written.
        return [name for name in Folder(self._url).names("segments") if name.endswith(".jsonl")]

    def _load(self, name: str) -> list[Entry]:
        path, text, entries = PurePosixPath(name), self._folder.find(name) or b"", []
        try:
            for number, line in enumerate(text.splitlines()):
                kind, body, blob = json.loads(line)
                data = self._folder.find(f"blobs/{blob}") if blob else b""
                if data is not None:  # None: a former owner has just delivered it
                    entries.append(Entry(f"{path.stem}-{number}", kind, body, blob, data))
        except (ValueError, TypeError) as error:
            log.warning("%s/%s is damaged (%s): it is moved to refused/", self.url, name, error)
            self._folder.put(f"refused/{path.name}", text)
            return []
        return entries

    @contextmanager
    def _away_errors(self) -> Iterator[None]:
        try:
            with limited_to(0):  # the delivery tries again
                yield
        except Exception as error:
            raise StorageAwayError(str(error)) from error


class Delivery:
    """A thread that sends the entries of a journal, in order and in batches, and retries.

    `send` gets the next entries, sends one or more from the front, and returns their number. If it fails with
    anything but AwayError, the first entry counts as refused. The log says once that the receiver or the
    storage is unreachable, and once that it is back.
    """

    def __init__(
        self, journal: Journal, send: Callable[[list[Entry]], int], receiver: str, every_s: float = 1.0
    ) -> None:
        self._journal, self._send, self._receiver, self._every_s = journal, send, receiver, every_s
        self._finishing, self._deadline = threading.Event(), float("inf")
        self._away = ""  # why the receiver cannot be reached
        self._num_refused = 0
        self._is_done, self._waits = False, True
        self._thread = threading.Thread(target=self._run, name="delivery", daemon=True)
        self._thread.start()

    def finish(self, wait_s: float | None) -> bool:
        """Deliver the rest for this long at most, and close the journal; return whether all was delivered.

        None: take as long as needed, but do not wait for a receiver that is unreachable.
        """
        self._journal.flush()
        self._waits = wait_s is not None
        if wait_s is not None and self._away:
            wait_s = min(wait_s, AWAY_S)
        self._deadline = time.monotonic() + (float("inf") if wait_s is None else wait_s)
        self._finishing.set()
        self._thread.join(wait_s)
        self._journal.close()
        url, receiver = self._journal.url, self._receiver
        if not self._is_done:
            log.warning(
                "%s has not received %s of this run (%s). They are in %s; to deliver them: %s",
                *(receiver, self._num_left(), self._away or "no time remained", url),
                command("pipelines.deliver_records"),
            )
        if self._num_refused:
            log.warning("%s refused %d entries: see %s/refused", receiver, self._num_refused, url)
        if num_lost := len(self._journal.waiting):
            log.warning("%d entries could not be written to %s and are lost", num_lost, url)
        return self._is_done

    def _num_left(self) -> str:
        try:
            return many(self._journal.count(), "record")
        except AwayError:
            return "some records"

    def _run(self) -> None:
        try:
            while not self._is_done:
                is_last = self._finishing.is_set() and not self._journal.waiting
                entries = self._retry(partial(self._journal.first, thorough=is_last))
                if entries is not None:
                    self._send_all(entries)
                    self._retry(self._journal.drop)
                elif is_last:
                    self._is_done = True
                else:
                    self._finishing.wait(self._every_s)
                    time.sleep(SHORT_S)
        except AwayError:
            return  # no time remained
        except Exception as error:  # a thread that dies does so silently
            self._away = f"{type(error).__name__}: {error}"
            log.warning("delivery to %s ended (%s); the run continues", self._receiver, self._away)

    def _send_all(self, entries: list[Entry]) -> None:
        most = len(entries)
        while entries:
            try:
                num_sent = self._retry(partial(self._send, entries[:most]))
            except AwayError:
                raise
            except Exception as error:  # refused, or a bug, which must not stop the other entries
                if most > 1:
                    most = 1  # sent one by one, the entry to blame shows
                    continue
                self._refuse(entries[0], str(error) or repr(error))
                num_sent = 1
            entries = entries[num_sent:]

    def _refuse(self, entry: Entry, reason: str) -> None:
        self._retry(partial(self._journal.refuse, entry, reason))
        if not self._num_refused:
            text = "%s refuses a %s (%s): kept in %s/refused"
            log.warning(text, self._receiver, entry.kind, reason, self._journal.url)
        self._num_refused += 1

    def _retry(self, call: Callable[[], Any]) -> Any:
        """Call until the receiver and the storage can be reached, or no time remains."""
        away = self._receiver
        while time.monotonic() < self._deadline:
            try:
                result = call()
            except AwayError as error:
                is_storage = isinstance(error, StorageAwayError)
                away = self._journal.url if is_storage else self._receiver
                if not self._away:
                    where = "memory" if is_storage else self._journal.url
                    text = "%s is unreachable (%s): the run continues, entries wait in %s"
                    log.warning(text, away, error, where)
                self._away = str(error)
                if not self._waits:
                    raise
                self._finishing.wait(RETRY_S)
                time.sleep(SHORT_S)
            else:
                if self._away:
                    log.warning("%s is back: the entries that waited are delivered", away)
                self._away = ""
                return result
        raise AwayError("no time remained")
