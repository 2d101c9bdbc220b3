"""How a night starts: from the night in use, from a finished training run, or where a killed job left it.

parent = nights.current() or adopt(nights, named=None)       # None: nothing was ever trained here
plan = resumable(nights, settings, class_names, say) or nights.begin(...)
"""

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Any

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import difference
from pencil_scale.config.loader import describe
from pencil_scale.config.settings import Config
from pencil_scale.labels.published import published_url
from pencil_scale.labels.run_record import FREE, RunRecord, read_record, run_folder, why_held
from pencil_scale.nights.record import CURRENT, LEASE, Night, NightFiles, Plan, now
from pencil_scale.nights.retention import remove_made
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.urls import versions_of

Say = Callable[[str], None]


def decisive_settings(config: Config) -> dict[str, str]:
    """The settings that decide what a night computes: with others it is another night."""
    return {name: text for name, text in describe(config).items() if not name.startswith(FREE)}


def adopt(nights: NightFiles, named: str | None) -> Night | None:
    """Take a finished training run for the night before the first; None where none is finished.

    A held run is not finished: nights start from it only once a person has promoted it.
    """
    storage = nights.storage
    runs = [record for record in _runs(storage) if nights.plan(record.name) is None]
    records = {record.name: record for record in runs if record.status == "finished"}
    if named is not None and named not in records:
        record = read_record(storage, named)
        if record is not None and record.status == "held":
            raise PencilError(f"nightly.start_from: {named} is held: {why_held(named, record.held_because)}")
        raise PencilError(f"nightly.start_from: {named} is no finished run of {storage}; {_listed(records)}")
    if named is None and len(records) > 1:
        raise PencilError(f"nightly.start_from: which run? {_listed(records)}")
    if not records:
        return None
    record = records[named or next(iter(records))]
    if record.name in (CURRENT, LEASE):
        raise PencilError(f"nightly.start_from: a run called {record.name} cannot be followed by nights")
    night = nights.save(_as_night(storage, record))
    nights.move_current(night, expected=None)
    return night


def _as_night(storage: str, record: RunRecord) -> Night:
    catalogue = Catalogue.open(storage, record.catalogue_version)
    return Night(
        name=record.name,
        number=0,
        parent=None,
        catalogue_version=record.catalogue_version,
        class_names=catalogue.class_names,
        labels=published_url(storage, record.name),
        model=f"{storage}/models/{record.name}.pt",
        trained_by=record.name,
        figures=clean_accuracy(run_facts(storage, record.name)),
        clean=clean_set(storage, record.clean),
        overlay=catalogue.manifest["overlay"],
        finished=now(),
    )


def _runs(storage: str) -> list[RunRecord]:
    names = [PurePosixPath(name).name for name in Folder(storage).names("runs")]
    return [record for name in names if (record := read_record(storage, name)) is not None]


def _listed(records: Mapping[str, RunRecord]) -> str:
    return f"finished are {', '.join(sorted(records))}" if records else "none is finished"


# --- after a kill ------------------------------------------------------------------------------------


def resumable(
    nights: NightFiles, settings: Mapping[str, str], class_names: Sequence[str], say: Say
) -> Plan | None:
    """Find the night that was started and not finished; one that can no longer be finished is abandoned."""
    plan = nights.unclosed()
    if plan is None:
        return None
    reason = _outdated(nights, plan, settings, class_names)
    if reason:
        abandon(nights, plan, reason, say)
        return None
    say(f"{plan.name} resumes")
    return plan


def abandon(nights: NightFiles, plan: Plan, reason: str, say: Say) -> None:
    """Give up a night that was not finished, with all that it made; its number is not given again."""
    say(f"{plan.name} was not finished, and is abandoned: {reason}")
    remove_made(nights, plan)
    nights.close(plan.name, "abandoned")


def _outdated(nights: NightFiles, plan: Plan, settings: Mapping[str, str], class_names: Sequence[str]) -> str:
    current = nights.current()
    name = None if current is None else current.name
    if nights.find(plan.name) is not None:  # all but the last step is done
        return ""
    if name != plan.parent:
        return f"it started from {plan.parent}, and CURRENT is {name} now"
    changed = [key for key in {**plan.settings, **settings} if plan.settings.get(key) != settings.get(key)]
    if changed:
        return f"{sorted(changed)[0]} has changed"
    catalogue = Catalogue.open(nights.storage, plan.catalogue_version)
    if differs := difference(class_names, catalogue.class_names):
        return f"the class list has changed: it {differs}"
    return _changed_shard(catalogue)


def _changed_shard(catalogue: Catalogue) -> str:
    """Bytes that were written anew cannot be read by offsets of the version before."""
    entries = [entry for entry in catalogue.shards if entry.state == "indexed"]
    versions = versions_of([entry.url for entry in entries])
    for entry, version in zip(entries, versions, strict=True):
        if version != entry.version:
            return f"{entry.url} changed since it was indexed"
    return ""


# --- figures of a training run -----------------------------------------------------------------------


def run_facts(storage: str, name: str) -> dict[str, Any]:
    """What a finished run says of itself."""
    facts: dict[str, Any] = json.loads(Folder(run_folder(storage, name)).get("summary.json"))
    return facts


def clean_accuracy(facts: Mapping[str, Any]) -> dict[str, float]:
    """Accuracy on the clean set: validation's, else test's; empty where there is none."""
    known = [facts[name] for name in ("validation_accuracy", "test_accuracy") if name in facts]
    return {"clean_accuracy": float(known[0])} if known else {}


def clean_set(storage: str, versions: Mapping[str, int]) -> str:
    """Name the clean set of a run by its content, so that nights are compared on the same one.

    `versions` are the catalogue versions of the clean sets that the run was evaluated on.
    """
    part = next((part for part in ("validation", "test") if part in versions), "")
    if not part:
        return ""
    # Not the version: an id taken down from the training shards alone gives the clean set a new one too, and
    # that night would not be compared. Segments hold all that is said of the rows.
    segments = Catalogue.open(storage, versions[part], part).manifest["segments"]
    files = "\n".join(segment["file"] for segment in segments)
    return f"{part} {sha256(files.encode()).hexdigest()[:16]}"
