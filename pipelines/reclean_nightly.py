"""Re-clean a growing crawl: index what is new, carry every known label over, train a little, publish.

    python -m pipelines.reclean_nightly configs/nightly.yaml
    ray job submit --working-dir . -- python -m pipelines.reclean_nightly configs/nightly.yaml

One command for cron. It starts from the night that <storage>/nights/CURRENT names, and moves CURRENT last. A
night that looks wrong, by the limits under `nightly:` or by those of any run (`gate.hold`), is kept but held:
CURRENT stays, the exit code is 3, and `python -m pipelines.promote` releases it, or goes back to an older
one. Killed at any step, the same command resumes it.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import read_class_names
from pencil_scale.catalogue.rules import make_overlay
from pencil_scale.config.command import HELD, command, run_job, say
from pencil_scale.config.loader import describe
from pencil_scale.config.settings import Config
from pencil_scale.features.takedown import forget_gone
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.pins import now
from pencil_scale.labels.published import held_names
from pencil_scale.labels.run_record import read_record, results_of
from pencil_scale.nights.crawl import class_mapping, first_classes
from pencil_scale.nights.record import (
    CARRIED,
    Night,
    NightFiles,
    night_name,
    remove_old,
    remove_taken_down,
)
from pencil_scale.nights.start import (
    Prepared,
    abandon,
    adopt,
    clean_accuracy,
    clean_set,
    inherited,
    keep_undecided,
    night_config,
    prepare,
    resumable,
    run_facts,
)
from pencil_scale.storage.cleanup import LIMIT_S, clean_up
from pencil_scale.storage.errors import PencilError, ResumableError, many, new_id
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.retries import limited_to
from pencil_scale.storage.storage import Storage
from pipelines import index_shards
from pipelines.tasks import print_table

if TYPE_CHECKING:
    from pencil_scale.nights.guard_rails import Findings

Status = Literal["current", "held", "kept", "nothing new"]


@dataclass(frozen=True)
class Summary:
    """How the night ended."""

    status: Status
    night: Night  # the new night, or the newest if nothing is new
    current: str | None
    facts: Mapping[str, str] = field(default_factory=dict)  # what changed since its parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on the config that the command line names; exit code 3: the night is held."""
    ended: list[Summary] = []
    code = run_job(
        lambda config: ended.append(run(config)),
        argv,
        module="pipelines.reclean_nightly",
        what=(__doc__ or "").splitlines()[0],
    )
    return HELD if code == 0 and ended[-1].status == "held" else code


def run(config: Config) -> Summary:
    """Make one night of what is new, and print its summary."""
    if config.data.subset is not None:
        raise PencilError("data.subset: a night chooses its rows itself; leave it out")
    from pencil_scale.train.checks import Problems, check_settings

    problems = Problems()
    check_settings(config, problems)  # before anything is indexed
    problems.require_none()
    nights = NightFiles(config.run.storage)
    config = config.model_copy(update={"run": config.run.model_copy(update={"storage": nights.storage})})
    with nights.leased() as nights:
        summary = _night(config, nights)
    print_summary(summary)
    return summary


def _night(config: Config, nights: NightFiles) -> Summary:
    current, class_names = nights.current(), read_class_names(config.data.classes)
    passed = [night.name for night in nights.nights() if night.number and night.status == "passed"]
    if current is None and passed:
        raise PencilError(
            f"{nights.storage}/nights/CURRENT is gone, but {passed[-1]} is there; the next night would start "
            f"from nothing: choose the night to start from with `{command('pipelines.promote')} "
            f"{passed[-1]}`"
        )
    if current is not None:  # before indexing with a class list that cannot be followed
        class_mapping(current.class_names, class_names, config.nightly.remap)
    night = resumable(nights, describe(config), class_names)
    catalogue = None
    if night is not None and night.status == "refused":
        # It would be refused again, unless something is new: that makes another night.
        catalogue = index_shards.run(config).catalogue
        if catalogue.version != night.catalogue_version:
            abandon(nights, night, "it was refused, and the crawl has changed since")
            night = None
    if night is None:
        catalogue = catalogue or index_shards.run(config).catalogue
        current = current or adopt(nights, config.nightly.start_from)
        known = [night for night in nights.nights() if night.catalogue_version == catalogue.version]
        if known:
            name = None if current is None else current.name
            waits = known[-1].status == "held" and known[-1].name != name
            return Summary("held" if waits else "nothing new", known[-1], name)
        night = nights.start(_new_night(config, nights, catalogue, current))
    facts: Mapping[str, str] = {}
    if not night.is_made:
        try:
            night, facts = _make(config, nights, night)
        except ResumableError:
            raise  # nothing is wrong with the night
        except PencilError as error:
            nights.save(night, status="refused", reasons=(str(error),))
            raise
    in_numbers = {name.replace("_", " "): f"{value:,.6g}" for name, value in night.figures.items()}
    return _close(config, nights, night, facts or in_numbers)


def _new_night(config: Config, nights: NightFiles, catalogue: Catalogue, parent: Night | None) -> Night:
    if parent is None and config.nightly.first_epochs is None:
        held = held_names(nights.storage)
        raise PencilError(
            f"{nights.storage}: no night to start from, and no finished run"
            + (f" ({held[0]} is held: look at its labels, and promote it if they are good)" if held else "")
            + "; train one with pencil_scale.train, or set nightly.first_epochs, as in "
            "nightly.first_epochs=[5,10,10]"
        )
    number = nights.next_number()
    storage, name = nights.storage, night_name(number)
    while read_record(storage, name) is not None or results_of(storage, name):
        number += 1  # a training run has, or had, this name
        name = night_name(number)
    return Night(
        name=name,
        number=number,
        parent=None if parent is None else parent.name,
        catalogue_version=catalogue.version,
        id=new_id(),
        settings=describe(config),
    )


def _make(config: Config, nights: NightFiles, night: Night) -> tuple[Night, Mapping[str, str]]:
    """Train, check, export and show one night; its record is written last."""
    # Ray takes seconds to import; --help and a broken config answer at once. Below likewise.
    from pipelines.night_outputs import show_night

    prepared = prepare(config, nights, night)
    _forget_features(config, night)
    _learn(config, nights, night, prepared)
    storage, name = Storage(nights.storage), night.name
    run, parent = read_record(storage.url, name), prepared.parent if prepared else None
    # If nothing was to train, the model and the clean set of its accuracy are those of the parent.
    clean = clean_set(storage.url, run.clean) if run else parent.clean if parent else ""
    findings = _check(config, storage, name, prepared, run is not None, clean)
    if prepared is not None and (run is None or run_facts(storage.url, name).get("unmoved")):
        keep_undecided(nights, night, prepared)
    catalogue = Catalogue.open(storage.url, night.catalogue_version)
    since = None  # the labels to compare with: the parent's, or those carried over to a new class list
    if prepared is not None:
        since = prepared.parent.labels if prepared.same_classes else nights.path(name, CARRIED)
    made = nights.save(
        night,
        status="held" if findings.reasons else "passed",
        reasons=findings.reasons,
        class_names=catalogue.class_names,
        labels=storage.path(storage.published(name)),
        model=storage.path(storage.model(name)),
        trained_by=parent.trained_by if parent and not run else name,
        finished=now(),  # pins that are made from now on may not be in the export
        **show_night(config, name, since),
        figures=findings.figures,
        clean=clean,
        overlay=catalogue.manifest["overlay"],
    )
    return made, findings.facts


def _forget_features(config: Config, night: Night) -> None:
    """Remove the features of samples that are excluded or have vanished."""
    storage = Storage(config.run.storage)
    catalogue = Catalogue.open(storage.url, night.catalogue_version)
    num_rows = forget_gone(storage, catalogue, make_overlay(config.data.exclude).excluded)
    if num_rows:
        say(f"the features of {many(num_rows, 'sample')} that are gone were removed")


def _learn(config: Config, nights: NightFiles, night: Night, prepared: Prepared | None) -> None:
    """Train on what is new; if nothing is, the night has its parent's model and labels."""
    from pencil_scale.train.run import Start, train

    storage, name = Storage(nights.storage), night.name
    record = read_record(storage.url, name)
    if record is not None and record.status == "finished":
        return
    if prepared is None or len(prepared.rows):
        what, labels = "all samples", None
        if prepared is not None:
            labels, fresh = prepared.labels, prepared.crawl.fresh["row"].to_numpy()
            what = f"{many(len(prepared.rows), 'row')}, {np.isin(prepared.rows, fresh).sum():,} new"
            if left := np.isin(prepared.rows, np.setdiff1d(prepared.undecided, fresh)).sum():
                what += f", {left:,} left undecided by earlier nights"
        say(f"{name} starts from {night.parent or 'nothing'} and trains on {what}")
        if prepared is not None and prepared.only_learns:
            names = ", ".join(first_classes(prepared.crawl))
            say(f"{name} has the first samples of {names}: it learns them, and the next night decides labels")
        start = Start(night.id, night.catalogue_version, labels, inherited(storage.url, prepared))
        train(night_config(config, night, prepared), start, alias=None, hold=False)
        return
    say(f"{name} has nothing to train on: model and labels stay those of {night.parent}")
    home, _, file = prepared.weights.rpartition("/")  # under the night's own class list
    nights.put(storage.model(name), Folder(home).get(file))
    nights.put(storage.published(name), prepared.labels.encode())


def _check(
    config: Config, storage: Storage, name: str, prepared: Prepared | None, is_trained: bool, clean: str
) -> "Findings":
    """Compare a night with its parent, and take over the reasons for which its run would be held."""
    from pencil_scale.nights.guard_rails import Findings, check_night

    facts = run_facts(storage.url, name) if is_trained else {}
    reasons = tuple(facts.get("held_because", ()))
    if prepared is None:
        num_samples = facts["samples"] + facts["watched"]
        counts = {"new_samples": num_samples, "new_repaired": facts["corrected"]}
        return Findings({**counts, **clean_accuracy(facts)}, reasons)
    figures = clean_accuracy(facts) if is_trained else prepared.parent.figures
    labels = Manifest.load(storage.path(storage.published(name)))
    findings = check_night(config.nightly, prepared, labels, figures.get("clean_accuracy"), clean)
    return replace(findings, reasons=(*findings.reasons, *reasons))


def _close(config: Config, nights: NightFiles, night: Night, facts: Mapping[str, str]) -> Summary:
    """Hold the night, or move CURRENT to it; then remove what is no longer needed."""
    from pipelines.night_outputs import track_current, track_night

    current = nights.current()
    status: Status = "held" if night.status == "held" else "current"
    if current is not None and current.name not in (night.parent, night.name):
        say(f"CURRENT is {current.name} and stays: {night.name} started from {night.parent}")
        status = "kept"
    if status == "current":
        track_current(config, night, current)
        nights.move_current(night, expected=night.parent)
        current = night
    elif status == "held":
        track_night(config, night, "held")
    if current is not None:
        with limited_to(LIMIT_S):
            _tidy(config, nights, night, current)
    # The night has its result; if this fails, the next command closes it.
    clean_up("the mark of an open night", lambda: nights.save(night, closed=True))
    return Summary(status, night, None if current is None else current.name, facts)


def _tidy(config: Config, nights: NightFiles, night: Night, current: Night) -> None:
    """Remove what is no longer needed, and what shows ids that are excluded now, from exports and pages.

    Excluded ids must not wait until another night is used. CURRENT has moved, or stays: a failure here does
    not fail the night.
    """
    from pipelines.night_outputs import shown_again

    try:
        if current.name == night.name:
            for name in remove_old(nights, config.nightly.keep_nights):
                say(f"{name} is removed: nightly.keep_nights is {config.nightly.keep_nights}")
        elif current.overlay == night.overlay:
            return
        else:
            shown_again(config, nights, current)
        for name in remove_taken_down(nights, night.overlay):
            say(f"the export of {name} is removed: data.exclude has changed since")
    except Exception as error:
        say(f"WARNING: outdated files, which may show excluded ids, were not removed: {error}")


def print_summary(summary: Summary) -> None:
    """Print the end table."""
    night = summary.night
    if summary.status == "nothing new":
        print(f"nothing new since {night.name}; CURRENT is {summary.current}")
        if summary.current != night.name:
            again = f"{command('pipelines.promote')} {night.name}"
            say(f"what came after {summary.current} is added when the crawl changes, or at once by {again}")
        return
    rows = {**summary.facts, "CURRENT": summary.current or "-"}
    print_table(f"{night.name}: {summary.status}", rows)
    for what in ("labels", "model", "export", "report"):
        say(f"{what:<8} {getattr(night, what) or '-'}")
    for reason in night.reasons if summary.status == "held" else ():
        print(f"HELD: {reason}")
    if summary.status == "held":
        print(f"these labels are not in use: CURRENT stays {summary.current or 'unset'}")
        print("review it, best with the blind audit of its page: judge 100 to 200 changed samples")
        print(f"to use it all the same: {command('pipelines.promote')} {night.name}")


if __name__ == "__main__":
    sys.exit(main())
