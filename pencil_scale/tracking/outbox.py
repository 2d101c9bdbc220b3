"""Outbox: records in order, on disk from the moment they are said until somebody took them.

    outbox = Outbox(folder)
    outbox.add("tag", {"name": "warning.labels", "value": "none moved"})
    outbox.add_values("metrics", "run/pencil", step=7, values={"loss": 0.3})   # a repeated step is left out
    for record in outbox.first(): ...
    outbox.drop(record.number)

An SQLite file with a write-ahead log: it survives its process at any moment (a power cut may cost the last
second), and memory does not grow with it. Saying something costs tens of microseconds and never a network.
"""

import fcntl
import hashlib
import json
import logging
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

log = logging.getLogger(__name__)

MOST_RECORDS = 500  # given at once
MOST_BYTES = 8 << 20

TABLES = """
create table if not exists records
    (number integer primary key autoincrement, kind text, body text, blob blob);
create table if not exists refused
    (number integer primary key, kind text, body text, blob blob, reason text);
create table if not exists steps (series text primary key, step integer) without rowid;
create table if not exists notes (name text primary key, value text) without rowid;
"""
ADD = "insert into records (kind, body, blob) values (?, ?, ?)"
COME_TO_STEP = """
insert into steps values (?, ?)
    on conflict (series) do update set step = excluded.step where excluded.step > step
"""


class Record(NamedTuple):
    """One thing to say."""

    number: int
    kind: str
    body: dict[str, Any]
    blob: bytes


def open_outbox(folder: str | Path) -> "Outbox":
    """Open the outbox of a folder, or one on this machine where the folder's disk cannot hold a database."""
    try:
        return Outbox(folder)
    except (OSError, sqlite3.Error) as error:
        name = hashlib.blake2b(str(folder).encode(), digest_size=8).hexdigest()
        local = Path(tempfile.gettempdir()) / f"pencil_scale-outbox-{name}"
        log.warning("%s cannot hold records for MLflow (%s): they wait in %s instead", folder, error, local)
        return Outbox(local)


class Outbox:
    """Records in order, and short notes about them, in one file of a local folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "outbox.sqlite"
        self.num_lost = 0
        self._lock = threading.Lock()
        self._claim = (self.folder / "outbox.lock").open("w")
        try:
            self._database = self._open()
        except sqlite3.OperationalError:
            raise  # the disk's fault, not the file's
        except sqlite3.DatabaseError as error:
            damaged = self.path.with_suffix(f".damaged-{time.time_ns()}")
            self.path.rename(damaged)
            log.warning("%s is damaged (%s): moved to %s, begun anew", self.path, error, damaged.name)
            self._database = self._open()

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path, timeout=30, check_same_thread=False)
        database.execute("pragma journal_mode = wal")
        database.execute("pragma synchronous = normal")
        database.executescript(TABLES)
        return database

    # --- saying ----------------------------------------------------------------------------------------

    def add(self, kind: str, body: Mapping[str, Any], blob: bytes = b"") -> None:
        """Keep a record until it is dropped. A full disk costs the record, never the caller."""
        with self._writing() as database:
            database.execute(ADD, (kind, json.dumps(body), blob))

    def add_values(
        self, kind: str, owner: str, step: int, values: Mapping[str, float], **more: Any
    ) -> list[str]:
        """Keep the values of a step as one record, and give the names left out as not new.

        Work that is repeated after a crash says its steps a second time. A receiver that only appends would
        show two values where there was one step; so what stands at or behind the last step of its series is
        left out. Both are written in one transaction.
        """
        repeated: list[str] = []
        with self._writing() as database:
            for name in values:
                if database.execute(COME_TO_STEP, (f"{owner}/{name}", step)).rowcount == 0:
                    repeated.append(name)
            new = {name: value for name, value in values.items() if name not in repeated}
            if new:
                body = {"owner": owner, "step": step, "values": new, **more}
                database.execute(ADD, (kind, json.dumps(body), b""))
        return repeated

    def note(self, name: str, value: str) -> None:
        """Keep a short text under a name, over whatever stood there."""
        with self._writing() as database:
            database.execute("insert or replace into notes values (?, ?)", (name, value))

    def noted(self, name: str) -> str | None:
        """Give the text kept under a name."""
        found = self._read("select value from notes where name = ?", name)
        return found[0][0] if found else None

    def forget(self, owner: str) -> None:
        """Forget how far this owner's series came."""
        with self._writing() as database:
            prefix = f"{owner}/"
            database.execute("delete from steps where substr(series, 1, ?) = ?", (len(prefix), prefix))

    # --- handing over ----------------------------------------------------------------------------------

    def first(self, most: int = MOST_RECORDS) -> list[Record]:
        """Give the oldest records, no more than fit well into memory, at least one if there is any."""
        last, num_bytes = 0, 0
        for number, size in self._read(
            "select number, length(body) + length(blob) from records order by number limit ?", most
        ):
            num_bytes += size
            if last and num_bytes > MOST_BYTES:
                break
            last = number
        rows = self._read("select number, kind, body, blob from records where number <= ? order by 1", last)
        return [Record(number, kind, json.loads(body), blob) for number, kind, body, blob in rows]

    def drop(self, number: int) -> None:
        """Let go of all records up to this one."""
        with self._writing() as database:
            database.execute("delete from records where number <= ?", (number,))

    def set_aside(self, record: Record, reason: str) -> None:
        """Keep a record that nobody takes apart from those still to be handed over."""
        with self._writing() as database:
            database.execute(
                "insert into refused select *, ? from records where number = ?", (reason, record.number)
            )
            database.execute("delete from records where number = ?", (record.number,))

    def __len__(self) -> int:
        return int(self._read("select count(*) from records")[0][0])

    def num_refused(self) -> int:
        """Count the records set aside."""
        return int(self._read("select count(*) from refused")[0][0])

    def claim(self) -> bool:
        """Become the one process that hands over from this folder; false while another is."""
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:  # some network disks know no locks
            log.warning(
                "%s cannot be locked (%s): records are delivered from there on the assumption that no other "
                "process does",
                self.folder,
                error,
            )
        return True

    def release(self) -> None:
        """Let another process, or the next start, hand over."""
        with suppress(OSError):  # where no lock could be taken, none can be released
            fcntl.flock(self._claim, fcntl.LOCK_UN)

    def close(self) -> None:
        with self._lock:
            self._database.close()
        self._claim.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                with self._database:
                    yield self._database
            except Exception as error:  # a full disk, a damaged file, a value that JSON does not know
                self.num_lost += 1
                if self.num_lost == 1:
                    log.warning("%s cannot be written (%s): what is said now is lost", self.path, error)

    def _read(self, statement: str, *values: object) -> list[Any]:
        with self._lock:
            return self._database.execute(statement, values).fetchall()
