"""Run record: what a run of some name was begun with, so that the same name goes on or is refused.

`<storage>/runs/<name>/run.json` is written before anything trains. The same command again goes on where the
run stopped, with any number of workers. A name that is finished or held, or was begun with other settings, is
refused: a reused name must never quietly continue something else.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pencil_scale.labels.part_files import TableDamagedError
from pencil_scale.labels.part_store import PartStore
from pencil_scale.schema import PencilError

# What may differ when a run goes on: how it is executed, not what it computes.
FREE = (
    "workers.",
    "checkpoint.",
    "tracking.",
    "cost.",
    "gate.",
    "subset.",
    "export.",
    "pin.",
    "nightly.",
    "report.",
    "optimizer.batch_per_worker",
    "optimizer.accumulation",
)


class RunNameError(PencilError):
    """A run name that cannot be used again."""


@dataclass(frozen=True)
class RunRecord:
    """What a run was begun with, and how it stands."""

    name: str
    settings: Mapping[str, str]
    catalogue_version: int
    labels: str  # the label manifest it starts from
    status: str = "running"  # running | stopped | held | finished
    held_because: Sequence[str] = ()  # also once a person has released it
    tracking: Mapping[str, Any] = field(default_factory=dict)
    estimate: Mapping[str, float] = field(default_factory=dict)


def run_folder(storage: str, name: str) -> str:
    """Where a run keeps its record, summary and starting labels."""
    return f"{storage.rstrip('/')}/runs/{name}"


def find_record(storage: str, name: str, settings: Mapping[str, str]) -> RunRecord | None:
    """Find the run to go on with; None if the name is new; refuse a name that means something else."""
    record = read_record(storage, name)
    if record is None:
        return None
    if record.status == "finished":
        raise RunNameError(
            f"run {name} is finished ({run_folder(storage, name)}/summary.json); choose another run.name"
        )
    if record.status == "held":
        raise RunNameError(
            f"run {name} is held, its labels are not published: {why_held(name, record.held_because)}"
        )
    differing = [
        key for key in {**record.settings, **settings} if record.settings.get(key) != settings.get(key)
    ]
    changed = [key for key in sorted(differing) if not key.startswith(FREE)]
    if changed:
        key = changed[0]
        was, now = record.settings.get(key), settings.get(key)
        more = f" and {len(changed) - 1} more keys" if len(changed) > 1 else ""
        raise RunNameError(
            f"run {name} was begun with {key}={was}, now it is {now}{more}; "
            "set it back to go on, or choose another run.name"
        )
    return record


def why_held(name: str, reasons: Sequence[str]) -> str:
    """Say why a run is held, and what a person can do about it."""
    return f"{'; '.join(reasons) or 'its record gives no reason'}. {ways_on(name)}"


def ways_on(name: str) -> str:
    """Say how to look at the labels of a held run, and the two ways on."""
    return (
        f"Look at them with `python -m pipelines.review_report CONFIG report.labels={name}`, then release "
        f"them with `python -m pipelines.promote CONFIG {name}`, or train again under another run.name"
    )


def read_record(storage: str, name: str) -> RunRecord | None:
    """Read the record of a run, if there is one."""
    try:
        found = json.loads(PartStore(run_folder(storage, name)).get("run.json"))
    except TableDamagedError:
        return None
    return RunRecord(**found)


def write_record(storage: str, record: RunRecord, **changes: Any) -> RunRecord:
    """Write the record, with some of it changed."""
    record = replace(record, **changes)
    PartStore(run_folder(storage, record.name)).put("run.json", json.dumps(asdict(record), indent=2).encode())
    return record
