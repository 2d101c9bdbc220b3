"""Decision files: what people decided about samples, as the review page, a spreadsheet or a program wrote it.

    decisions = read_decisions("decisions.json", classes)
    decisions.known                # one Decision a sample: sample_id, class, by, note
    decisions.num_undecided        # entries without a class

JSON is a list of objects, or an object with that list under `decisions`; CSV and Parquet have a header with
`sample_id` and `class`, and may have `by` and `note`. A class is a name, an alias or a number.
"""

import csv
import io
import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pencil_scale.indexing.label_classes import LabelClasses
from pencil_scale.labels.pins import PinsError
from pencil_scale.reading.byte_source import open_source, version_of


@dataclass(frozen=True)
class Decision:
    """One sample and the class a person gave it."""

    sample_id: str
    number: int
    by: str | None
    note: str | None


@dataclass(frozen=True)
class Decisions:
    """A whole file; every sample stands in it once."""

    known: tuple[Decision, ...]
    num_undecided: int


def read_decisions(url: str, classes: LabelClasses) -> Decisions:
    """Read a file of decisions, and refuse it whole where one entry cannot be understood."""
    found: dict[str, Decision] = {}
    num_undecided = 0
    for place, entry in enumerate(_entries(url), 1):
        if not isinstance(entry, dict) or not isinstance(entry.get("sample_id"), str):
            raise PinsError(
                f"{url}: entry {place:,} has no text under sample_id; columns sample_id, class expected"
            )
        if entry.get("class") in (None, ""):
            num_undecided += 1
            continue
        decision = _decision(url, place, entry, classes)
        before = found.setdefault(decision.sample_id, decision)
        if before.number != decision.number:
            raise PinsError(
                f"{url}: sample {decision.sample_id!r} is decided twice, as {classes.names[before.number]!r} "
                f"and as {classes.names[decision.number]!r}; keep one"
            )
    return Decisions(tuple(found.values()), num_undecided)


def _decision(url: str, place: int, entry: dict[str, Any], classes: LabelClasses) -> Decision:
    number, _ = classes.classify(entry["class"])
    if number is None:
        raise PinsError(
            f"{url}: entry {place:,}, sample {entry['sample_id']!r}: {entry['class']!r} is none of the "
            f"{len(classes):,} classes; give a name or a number of data.classes"
        )
    by, note = (None if entry.get(name) in (None, "") else str(entry[name]) for name in ("by", "note"))
    return Decision(entry["sample_id"], number, by, note)


def _entries(url: str) -> list[Any]:
    if version_of(url) is None:
        raise PinsError(f"{url}: no such file, seen from the folder you are in")
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
        raise PinsError(f"{url}: no whole JSON, CSV or Parquet file ({reason}); save it again") from error
    if not isinstance(entries, list):
        raise PinsError(f"{url}: a list of decisions was expected, or an object with one under 'decisions'")
    return entries
