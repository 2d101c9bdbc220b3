"""Run record: what a run was started with, so that the same name resumes it or is refused.

`<storage>/runs/<name>/run.json` is written before training starts. It gives the run a random id, and all the
run writes is stored under that id: a name can be reused, an id cannot. The same command resumes the run, with
any number of workers. A name that is finished or held, or was started with other settings, is refused.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pencil_scale.config.command import command
from pencil_scale.storage.errors import HeldError, PencilError, many
from pencil_scale.storage.lease import Lease
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import filesystem_of

MOST_AUDITED = 100  # changed samples, which can all be judged
# What may differ when a run is resumed: how it is executed, not what it computes.
FREE = (
    "storage.",
    "workers.",
    "checkpoint.",
    "tracking.",
    "cost.",
    "gate.",
    "features.backbone",
    "features.weights",
    "features.views",
    "features.file",
    "features.ids",
    "features.column",
    "features.duplicate_similarity",
    "features.exact_rows",
    "subset.",
    "export.",
    "pin.",
    "nightly.",
    "report.",
    "optimizer.batch_per_worker",
    "optimizer.accumulation",
    "data.keep_mb",
    "data.exclude",  # samples may be taken down at any time
)


@dataclass(frozen=True)
class RunRecord:
    """What a run was started with, and its status."""

    name: str
    id: str
    settings: Mapping[str, str]
    catalogue_version: int
    class_names: tuple[str, ...]
    clean: Mapping[str, int]  # catalogue versions of the clean sets it is evaluated on
    labels: str  # the label manifest it starts from
    weights: str | None = None  # what the network starts from: a copy, so the original may be removed
    automatic: Mapping[str, Any] = field(default_factory=dict)  # values of keys that the config leaves open
    decoders: str = ""  # libraries that decode the images, with their versions: others give other pixels
    status: str = "running"  # running | stopped | failed | held | finished
    held_because: Sequence[str] = ()  # kept after a person has released it
    tracking: Mapping[str, Any] = field(default_factory=dict)
    estimate: Mapping[str, float] = field(default_factory=dict)
    attempt: int = 0  # of the run's lease: which of the run's commands wrote this

    @property
    def fingerprint(self) -> str:
        """A hash of the settings that decide what the run computes."""
        decisive = {key: text for key, text in self.settings.items() if not key.startswith(FREE)}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def find_record(
    storage: str,
    name: str,
    settings: Mapping[str, str],
    is_saved: Callable[[RunRecord], bool] = lambda _: True,
) -> RunRecord | None:
    """Find the run to resume; refuse a name that is in use for something else.

    None if the name is new, or if its run failed before it saved anything and the settings have changed
    since: it then starts again.
    """
    files, record = Storage(storage), read_record(storage, name)
    folder = files.path(files.run(name))
    if record is None:
        for result in results_of(storage, name):
            raise PencilError(
                f"run {name}: {storage}/{result} exists, left by an earlier run of this name whose record "
                f"({folder}/run.json) is missing; nothing is overwritten: choose another run.name, or remove "
                "what it left (labels/published, labels/held and models)"
            )
        return None
    if record.status == "finished":
        raise PencilError(f"run {name} is finished ({folder}/summary.json); choose another run.name")
    if record.status == "held":
        raise HeldError(f"run {name} is held, its labels are not published: {why_held(storage, record)}")
    keys = sorted(key for key in {*record.settings, *settings} if not key.startswith(FREE))
    changed = [key for key in keys if record.settings.get(key) != settings.get(key)]
    if changed and not is_saved(record):
        return None
    if changed:
        was, now = record.settings.get(changed[0]), settings.get(changed[0])
        more = f" and {many(len(changed) - 1, 'more key')}" if len(changed) > 1 else ""
        raise PencilError(
            f"run {name} was started with {changed[0]}={was}, now it is {now}{more}; "
            "set it back to resume, or choose another run.name"
        )
    return record


def results_of(storage: str, name: str) -> list[str]:
    """What is stored under the name of a run: its labels and its model."""
    files = Storage(storage)
    filesystem, root = filesystem_of(files.url)
    filesystem.invalidate_cache()
    names = (files.published(name), files.held(name), files.model(name))
    return [result for result in names if filesystem.exists(f"{root}/{result}")]


def why_held(storage: str, record: RunRecord) -> str:
    """Say why a run is held, and what a person can do about it."""
    files = Storage(storage)
    facts = files.read_json(files.run(record.name, "summary.json")) or {}
    reasons = "; ".join(record.held_because) or "its record gives no reason"
    return f"{reasons}. {' '.join(ways_on(record.name, facts.get('corrected')))}".removesuffix(".")


def ways_on(name: str, num_changed: int | None = None) -> list[str]:
    """Say what to do about the labels of a held run, one way per line; `num_changed` is of its labels."""
    review, promote = command("pipelines.review_report"), command("pipelines.promote")
    page = f"review page (`{review} report.labels={name}`)"
    train = (
        "Weak network or heavy noise: these cannot be told apart. For better labels, train again under "
        "another run.name, with what it has not had yet: a clean set (evidence.clean), for photos pretrained "
        "weights (model.weights) and larger images (images.resize), more epochs, no numbers of your own "
        "under evidence, optimizer and stages."
    )
    if num_changed == 0:
        given = "No label changed: to release them would publish the labels as given"
        return [train, f"{given}. The {page} ranks them by doubt."]
    some = "100 to 200" if num_changed is None or num_changed > MOST_AUDITED else "the"
    return [
        train,
        f"To find out how good these labels are, judge {some} changed samples in the blind audit of the "
        f"{page}, the only test without assumptions.",
        f"If the audit finds them good, release them: `{promote} {name}`",
    ]


def read_record(storage: str, name: str) -> RunRecord | None:
    """Read the record of a run, if there is one."""
    files = Storage(storage)
    found = files.read_json(files.run(name, "run.json"))
    if found is None:
        return None
    return RunRecord(**found | {key: tuple(found[key]) for key in ("class_names", "held_because")})


def write_record(storage: str, record: RunRecord, lease: Lease | None = None, **changes: Any) -> RunRecord:
    """Write the record, with some of it changed; while the run trains, under the run's lease."""
    files = Storage(storage)
    record = replace(record, attempt=lease.attempt if lease else record.attempt, **changes)
    data = json.dumps(asdict(record), indent=2).encode()
    (lease or files).put(files.run(record.name, "run.json"), data)
    return record
