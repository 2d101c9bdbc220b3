"""Pins: labels that people decided. A pinned label never moves, and every run starts from it.

Each call of `add_pins` writes one immutable Parquet file under `<storage>/labels/pins/`, so people and jobs
may add pins at the same time and no decision is lost. Readers merge the files: the newest decision on a
sample wins. A pin names its class and its sample; `resolve` translates it into the numbers of a class list.

    add_pins(storage, table)                                 # row, sample_id, sample_key, class, by, at, note
    pins = read_pins(storage).resolve(class_names)           # rows and class numbers; or void

Decisions are read from a file that the review page, a spreadsheet or a program wrote. JSON is a list of
objects, or an object with that list under `decisions`; CSV and Parquet have a header with `sample_id` and
`class`, and may have `by` and `note`. A class is a name, an alias or a number.

    decisions = read_decisions("decisions.json", classes)
    decisions.known                # one Decision per sample: sample_id, class, by, note
    decisions.dropped              # ids of entries without a class, by the reason
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import LabelClasses
from pencil_scale.labels.columns import KeyBytes, key_bytes
from pencil_scale.storage.errors import PencilError, many, new_id
from pencil_scale.storage.folder import BESIDE, Folder
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import open_source, version_of

PINS = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("sample_key", pa.binary(16), nullable=False),
        pa.field("class", pa.string(), nullable=False),
        pa.field("by", pa.string()),
        pa.field("at", pa.string(), nullable=False),
        pa.field("note", pa.string()),
    ]
)

# Verdicts of the review page that name no class.
WITHOUT_CLASS = {"reject": "judged wrong, no other class chosen", "none": "judged to be none of the classes"}


@dataclass(frozen=True)
class Pinned:
    """Pins in the class numbers of one class list, sorted by row."""

    rows: npt.NDArray[np.int64]
    keys: KeyBytes
    classes: npt.NDArray[np.int32]
    void: pa.Table  # pins to classes that this list does not have

    def between(self, rows: range) -> "Pinned":
        """The pins of some rows."""
        some = slice(*np.searchsorted(self.rows, [rows.start, rows.stop]).tolist())
        return Pinned(self.rows[some], self.keys[some], self.classes[some], self.void)

    def void_warning(self) -> str:
        """Say which pins have no effect; empty if there are none."""
        if not len(self.void):
            return ""
        entries = self.void.slice(0, 3).to_pylist()
        some = ", ".join(f"{entry['sample_id']!r} to {entry['class']!r}" for entry in entries)
        return (
            f"{many(len(self.void), 'pin')} without effect, because the class list does not have the class: "
            f"{some}; the sample keeps its given class (pin it again, or name the new class in nightly.remap)"
        )


@dataclass(frozen=True)
class Pins:
    """The newest decision on every pinned sample, sorted by row."""

    table: pa.Table

    def resolve(self, class_names: Sequence[str], moved: Mapping[str, str | None] | None = None) -> Pinned:
        """Translate into the numbers of a class list; `moved` has the new names of classes that left it."""
        numbers = {name: number for number, name in enumerate(class_names)}
        names, moved = self.table["class"].to_pylist(), moved or {}
        for _ in moved:  # a class may have been renamed several times
            names = [name if name in numbers else moved.get(name) or name for name in names]
        classes = np.array([numbers.get(name, -1) for name in names], np.int32)
        known = self.table.filter(pa.array(classes >= 0))
        return Pinned(
            known["row"].to_numpy(),
            key_bytes(known["sample_key"]),
            classes[classes >= 0],
            self.table.filter(pa.array(classes < 0)),
        )


def read_pins(storage: str) -> Pins:
    """Merge all files of decisions; there may be none."""
    store = Folder(Storage(storage).path(Storage.pins))
    tables = [PINS.empty_table()]
    for name in sorted(PurePosixPath(path).name for path in store.names("")):
        if name.endswith(BESIDE):
            continue
        try:
            tables.append(pq.read_table(pa.BufferReader(store.get(name)), schema=PINS))
        except (pa.ArrowException, OSError) as error:
            reason = " ".join(str(error).split())
            raise PencilError(
                f"{store.path(name)}: damaged file of pins ({reason}); restore it, or remove it and pin its "
                "decisions again"
            ) from error
    merged = pa.concat_tables(tables).combine_chunks()
    merged = merged.take(pa.array(np.argsort(merged["at"].to_numpy(zero_copy_only=False), kind="stable")))
    newest = {key: number for number, key in enumerate(merged["sample_key"].to_pylist())}
    return Pins(merged.take(pa.array(list(newest.values()), pa.int64())).sort_by("row"))


def add_pins(storage: str, pins: pa.Table) -> None:
    """Write one file of decisions, which never changes."""
    sink = io.BytesIO()
    pq.write_table(pins.select(PINS.names).cast(PINS), sink, compression="zstd")
    at = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
    Storage(storage).put(f"{Storage.pins}/{at}-{new_id()}.parquet", sink.getvalue())


def now() -> str:
    """The time of a decision, fine enough to order two calls."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def check_pins(pins: Pins, catalogue: Catalogue) -> None:
    """Refuse pins whose rows are other samples in this catalogue."""
    resolved = pins.resolve(sorted(set(pins.table["class"].to_pylist())))
    done = 0
    for table in catalogue.batches(["sample_key"]) if len(resolved.rows) else ():
        some = resolved.between(range(done, done + len(table)))
        require_same_samples(some, key_bytes(table["sample_key"].take(pa.array(some.rows - done))))
        done += len(table)


def require_same_samples(pins: Pinned, keys: KeyBytes) -> None:
    """Refuse pins whose rows are other samples by now: the catalogue was rebuilt since."""
    differs = (pins.keys != keys).any(axis=1) & keys.any(axis=1)  # a table made without keys has zeros
    if differs.any():
        raise PencilError(
            f"pins: row {pins.rows[differs][0]:,} is a different sample now ({int(differs.sum()):,} of "
            f"{len(pins.rows):,} pins); the catalogue was rebuilt since they were made: move labels/pins "
            "away and pin again"
        )


@dataclass(frozen=True)
class Decision:
    """One sample and the class a person gave it."""

    sample_id: str
    number: int
    by: str | None
    note: str | None


@dataclass(frozen=True)
class Decisions:
    """The decisions of a file, one per sample."""

    known: tuple[Decision, ...]
    dropped: Mapping[str, Sequence[str]]  # the ids of entries without a class, by the reason


def read_decisions(url: str, classes: LabelClasses) -> Decisions:
    """Read a file of decisions; refuse all of it if one entry cannot be understood."""
    found: dict[str, Decision] = {}
    dropped: dict[str, list[str]] = {}
    for nth, entry in enumerate(_entries(url), 1):
        if not isinstance(entry, dict) or not isinstance(entry.get("sample_id"), str):
            raise PencilError(
                f"{url}: entry {nth:,} has no text under sample_id; columns sample_id, class expected"
            )
        if entry.get("class") in (None, ""):
            reason = WITHOUT_CLASS.get(str(entry.get("verdict")), "no class given")
            dropped.setdefault(reason, []).append(entry["sample_id"])
            continue
        number, _ = classes.classify(entry["class"])
        if number is None:
            raise PencilError(
                f"{url}: entry {nth:,}, sample {entry['sample_id']!r}: {entry['class']!r} is none of the "
                f"{len(classes):,} classes; give a name or a number of data.classes"
            )
        by, note = (None if entry.get(name) in (None, "") else str(entry[name]) for name in ("by", "note"))
        before = found.setdefault(entry["sample_id"], Decision(entry["sample_id"], number, by, note))
        if before.number != number:
            raise PencilError(
                f"{url}: sample {before.sample_id!r} is decided twice, as {classes.names[before.number]!r} "
                f"and as {classes.names[number]!r}; keep one"
            )
    return Decisions(tuple(found.values()), dropped)


def _entries(url: str) -> list[Any]:
    if version_of(url) is None:
        raise PencilError(f"{url}: no such file (a relative path starts in the current folder)")
    with open_source(url) as source:
        data = source.read(0, source.num_bytes)
    try:
        if url.endswith(".parquet"):
            entries: Any = pq.read_table(pa.BufferReader(data)).to_pylist()
        elif url.endswith(".csv"):
            entries = list(csv.DictReader(io.StringIO(data.decode("utf-8-sig"))))
        else:
            entries = json.loads(data)
            entries = entries.get("decisions") if isinstance(entries, dict) else entries
    except (ValueError, csv.Error, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise PencilError(f"{url}: damaged JSON, CSV or Parquet file ({reason}); save it again") from error
    if not isinstance(entries, list):
        raise PencilError(f"{url}: expected a list of decisions, or an object with one under 'decisions'")
    return entries
