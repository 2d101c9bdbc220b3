"""Run record: what a run of some name was begun with, so that the same name goes on or is refused.

`<storage>/runs/<name>/run.json` is written before anything trains. The same command again goes on where the
run stopped, with any number of workers. A name that is finished, or was begun with other settings, is
refused: a reused name must never quietly continue something else.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pencil_scale.labels.part_files import TableDamagedError
from pencil_scale.labels.part_store import PartStore
from pencil_scale.schema import PencilError
from pencil_scale.storage.lease import Lease

# What may differ when a run goes on: how it is executed, not what it computes.
FREE = (
    "workers.",
    "checkpoint.",
    "tracking.",
    "cost.",
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
    status: str = "running"  # running | stopped | finished
    tracking: Mapping[str, Any] = field(default_factory=dict)
    estimate: Mapping[str, float] = field(default_factory=dict)
    attempt: int = 0  # of the run's lease: which of its commands wrote this


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


def read_record(storage: str, name: str) -> RunRecord | None:
    """Read the record of a run, if there is one."""
    try:
        found = json.loads(PartStore(run_folder(storage, name)).get("run.json"))
    except TableDamagedError:
        return None
    return RunRecord(**found)


def write_record(storage: str, record: RunRecord, lease: Lease | None = None, **changes: Any) -> RunRecord:
    """Write the record, with some of it changed; who trains the run writes it under the run's lease."""
    if lease is None:
        record = replace(record, **changes)
        PartStore(run_folder(storage, record.name)).put("run.json", _encoded(record))
    else:
        record = replace(record, attempt=lease.attempt, **changes)
        lease.put(f"runs/{record.name}/run.json", _encoded(record))
    return record


def _encoded(record: RunRecord) -> bytes:
    return json.dumps(asdict(record), indent=2).encode()
