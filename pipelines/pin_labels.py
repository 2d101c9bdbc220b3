"""Pin the decisions of people: pinned labels never change, training uses them, and exports mark them.

    python -m pipelines.pin_labels configs/demo.yaml pin.file=decisions.json pin.by=ada

Reads the file that the review page saves, or a CSV or Parquet table with `sample_id` and `class`. If an id or
a class is unknown, nothing is pinned; entries without a class are dropped, and counted by reason. The newest
decision on a sample wins. Several people may pin at the same time. A running training ignores new pins; the
next one uses them, and so does every export.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import read_label_classes
from pencil_scale.catalogue.schema import from_stored
from pencil_scale.config.command import command, run_job, say
from pencil_scale.config.settings import Config
from pencil_scale.labels.pins import (
    PINS,
    Decision,
    Decisions,
    add_pins,
    check_pins,
    now,
    read_decisions,
    read_pins,
)
from pencil_scale.storage.errors import PencilError, sample_key
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import without_passwords
from pipelines.tasks import print_table

SHOWN = 3


@dataclass(frozen=True)
class Summary:
    """The pins as they are now, and what this run changed."""

    folder: str
    num_pins: int
    num_new: int
    num_changed: int  # pinned before, to another class
    num_dropped: int  # entries without a class


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on the config that the command line names."""
    return run_job(run, argv, module="pipelines.pin_labels", what=__doc__ or "")


def run(config: Config) -> Summary:
    """Read the decisions, find their rows, and add them to the pins."""
    if config.pin.file is None:
        raise PencilError("pin.file is not set; name the file of decisions, as in pin.file=decisions.json")
    storage = config.run.storage
    catalogue = Catalogue.open(storage)
    classes = read_label_classes(config.data.classes, config.data.aliases)
    decisions = read_decisions(config.pin.file, classes)
    nameless = [decision.sample_id for decision in decisions.known if not (decision.by or config.pin.by)]
    if nameless:
        raise PencilError(
            f"{config.pin.file}: {len(nameless):,} of {len(decisions.known):,} decisions do not say who made "
            f"them, such as {nameless[0]!r}; nothing was pinned: set pin.by=NAME"
        )
    found = _find_rows(catalogue, decisions.known, config.pin.file)
    pins_before = read_pins(storage)
    check_pins(pins_before, catalogue)
    pinned = pins_before.table
    before = dict(zip(pinned["row"].to_pylist(), pinned["class"].to_pylist(), strict=True))
    known = decisions.known
    columns = {
        "row": found["row"],
        "sample_id": [decision.sample_id for decision in known],
        "sample_key": found["sample_key"],
        "class": [classes.names[decision.number] for decision in known],
        "by": [decision.by or config.pin.by for decision in known],
        "at": [now()] * len(known),
        "note": [decision.note for decision in known],
    }
    pins = pa.table(columns, schema=PINS)
    news = list(zip(pins["row"].to_pylist(), pins["class"].to_pylist(), strict=True))
    fresh = [number for number, (row, name) in enumerate(news) if before.get(row) != name]
    if fresh:
        add_pins(storage, pins.take(pa.array(fresh, pa.int64())))
    num_new = sum(row not in before for row, _ in news)
    num_pins = len(read_pins(storage).table)
    num_dropped = sum(map(len, decisions.dropped.values()))
    num_changed = len(fresh) - num_new
    summary = Summary(Storage(storage).path(Storage.pins), num_pins, num_new, num_changed, num_dropped)
    print_summary(summary, decisions, len(known) - len(fresh))
    return summary


def print_summary(summary: Summary, decisions: Decisions, num_known: int) -> None:
    """Print the summary table, what was dropped and why, and what to run next."""
    shown = {
        "new pins": f"{summary.num_new:,}",
        "pins with a new class": f"{summary.num_changed:,}",
        "pinned before": f"{num_known:,}",
        "dropped": f"{summary.num_dropped:,}",
        "all pins": f"{summary.num_pins:,}",
    }
    print_table(f"pins {without_passwords(summary.folder)}", shown)
    for reason, ids in decisions.dropped.items():
        say(f"dropped: {len(ids):,} {reason}, such as {', '.join(map(repr, ids[:SHOWN]))}")
    say("The next training run or night starts from these pins. To write them now, run export_labels again:")
    say(f"  {command('pipelines.export_labels')}")


def _find_rows(catalogue: Catalogue, decisions: Sequence[Decision], file: str) -> pa.Table:
    """Find the row and key of every sample by the hash of its id, in one pass over the catalogue."""
    # An id may be spelled as it is, or as in our own tables.
    spelled = [{decision.sample_id, from_stored(decision.sample_id)} for decision in decisions]
    owners = {sample_key(name): number for number, names in enumerate(spelled) for name in names}
    keys = pa.array(list(owners), pa.binary(16))
    rows, found_keys = np.full(len(decisions), -1, np.int64), [b""] * len(decisions)
    for table in catalogue.batches(["row", "sample_key"]):
        found = table.filter(pc.is_in(table["sample_key"], keys)).to_pydict()
        for row, key in zip(found["row"], found["sample_key"], strict=True):
            rows[owners[key]], found_keys[owners[key]] = row, key
    unknown = [decisions[number].sample_id for number in np.flatnonzero(rows < 0).tolist()]
    if unknown:
        raise PencilError(
            f"{file}: {len(unknown):,} of {len(decisions):,} samples are not in {catalogue.folder}, such as "
            f"{', '.join(map(repr, unknown[:SHOWN]))}; nothing was pinned: remove them, or index again"
        )
    return pa.table({"row": rows, "sample_key": pa.array(found_keys, pa.binary(16))})


if __name__ == "__main__":
    sys.exit(main())
