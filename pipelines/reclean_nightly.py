"""Re-clean a growing crawl: index what is new, carry every known label over, train a little, publish.

    python -m pipelines.reclean_nightly configs/nightly.yaml
    ray job submit --working-dir . -- python -m pipelines.reclean_nightly configs/nightly.yaml

One command for cron. It begins from the night that <storage>/nights/CURRENT names, and moves CURRENT last. A
night that looks wrong, by the limits under `nightly:` or by those of any run (`gate.hold`), is kept but held:
CURRENT stays, the exit code is 3, and `python -m pipelines.promote` releases it, or goes back to an older
one. Killed at any step, the same command resumes it.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import read_class_names
from pencil_scale.config.command import HELD, run_job, say
from pencil_scale.config.settings import Config
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.published import held_names, published_url
from pencil_scale.labels.run_record import read_record, results_of
from pencil_scale.nights.crawl import class_mapping
from pencil_scale.nights.record import Night, NightFiles, Plan, night_name, now
from pencil_scale.nights.retention import remove_old, remove_taken_down
from pencil_scale.nights.start import (
    abandon,
    adopt,
    clean_accuracy,
    clean_set,
    decisive_settings,
    resumable,
    run_facts,
)
from pencil_scale.storage.errors import PencilError, new_id
from pencil_scale.storage.folder import Folder
from pipelines import index_shards

if TYPE_CHECKING:
    from pencil_scale.nights.guard_rails import Findings
    from pencil_scale.nights.prepare import Prepared

Status = Literal["current", "held", "kept", "nothing new"]


@dataclass(frozen=True)
class Summary:
    """How the night ended."""

    status: Status
    night: Night  # the one made; where nothing is new, the newest
    current: str | None
    facts: Mapping[str, str] = field(default_factory=dict)  # what changed since the night before


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on the config that the command line names; 3 says that a night waits for a person."""
    ended: list[Summary] = []
    code = run_job(
        lambda config: ended.append(run(config)),
        argv,
        module="pipelines.reclean_nightly",
        what=(__doc__ or "").splitlines()[0],
    )
    return HELD if code == 0 and ended[-1].status == "held" else code


def run(config: Config) -> Summary:
    """Make one night of whatever is new, and say what came of it."""
    if config.data.subset is not None:
        raise PencilError("data.subset: a night chooses its rows itself; leave it out")
    nights = NightFiles(config.run.storage)
    config = config.model_copy(update={"run": config.run.model_copy(update={"storage": nights.storage})})
    with nights.held() as nights:
        summary = _night(config, nights)
    print_summary(summary)
    return summary


def _night(config: Config, nights: NightFiles) -> Summary:
    current, class_names = nights.current(), read_class_names(config.data.classes)
    passed = [night.name for night in nights.nights() if night.number and not night.held]
    if current is None and passed:
        raise PencilError(
            f"{nights.storage}/nights/CURRENT is gone, but {passed[-1]} is there; the next night would start "
            "from nothing: choose the night to start from with python -m pipelines.promote CONFIG "
            f"{passed[-1]}"
        )
    if current is not None:  # before indexing by a class list that nobody can follow
        class_mapping(current.class_names, class_names, config.nightly.remap)
    plan = resumable(nights, decisive_settings(config), class_names, say)
    catalogue = None
    if plan is not None and nights.refusal(plan.name):
        # It would be refused again, unless something is new: then that makes another night.
        catalogue = index_shards.run(config).catalogue
        if catalogue.version != plan.catalogue_version:
            abandon(nights, plan, "it was refused, and the crawl has changed since", say)
            plan = None
    if plan is None:
        catalogue = catalogue or index_shards.run(config).catalogue
        current = current or adopt(nights, config.nightly.start_from)
        known = [night for night in nights.nights() if night.catalogue_version == catalogue.version]
        if known:
            return _nothing_new(known[-1], current)
        plan = nights.begin(_plan(config, nights, catalogue, current))
    night = nights.find(plan.name)
    facts: Mapping[str, str] = {}
    if night is None:
        try:
            night, facts = _make(config, nights, plan)
        except PencilError as error:
            nights.refuse(plan.name, str(error))
            raise
    in_numbers = {name.replace("_", " "): f"{value:,.6g}" for name, value in night.figures.items()}
    return _close(config, nights, night, facts or in_numbers)


def _nothing_new(newest: Night, current: Night | None) -> Summary:
    name = None if current is None else current.name
    waits = newest.held and newest.name != name
    return Summary("held" if waits else "nothing new", newest, name)


def _plan(config: Config, nights: NightFiles, catalogue: Catalogue, parent: Night | None) -> Plan:
    if parent is None and config.nightly.first_epochs is None:
        held = held_names(nights.storage)
        raise PencilError(
            f"{nights.storage}: no night to start from, and no finished run"
            + (f" ({held[0]} is held: promote it)" if held else "")
            + "; train one with pencil_scale.train, or set nightly.first_epochs, as in "
            "nightly.first_epochs=[5,10,10]"
        )
    number = nights.next_number()
    while _is_taken(nights.storage, night_name(number)):
        number += 1  # a training run of somebody's has, or had, this name
    name = None if parent is None else parent.name
    return Plan(night_name(number), new_id(), number, name, catalogue.version, decisive_settings(config))


def _is_taken(storage: str, name: str) -> bool:
    return read_record(storage, name) is not None or bool(results_of(storage, name))


# --- one night ---------------------------------------------------------------------------------------


def _make(config: Config, nights: NightFiles, plan: Plan) -> tuple[Night, Mapping[str, str]]:
    """Train, examine, export and show one night; its manifest is written last."""
    # Ray takes seconds to import; --help and a broken config answer at once. Below likewise.
    from pencil_scale.nights.prepare import prepare
    from pipelines.night_outputs import export_night, report_night

    prepared = prepare(config, nights, plan)
    _learn(config, nights, plan, prepared)
    findings = _examine(config, nights, plan, prepared)
    storage, name = nights.storage, plan.name
    catalogue = Catalogue.open(storage, plan.catalogue_version)
    trained = prepared is None or read_record(storage, name) is not None
    since = None if prepared is None else _since(nights, plan, prepared)
    night = Night(
        name=name,
        number=plan.number,
        parent=plan.parent,
        catalogue_version=plan.catalogue_version,
        class_names=tuple(catalogue.manifest["classes"]),
        labels=published_url(storage, name),
        model=f"{storage}/models/{name}.pt",
        trained_by=name if trained or prepared is None else prepared.parent.trained_by,
        export=export_night(config, name),
        report=report_night(config, name, since),
        verdict="held" if findings.reasons else "passed",
        reasons=findings.reasons,
        figures=findings.figures,
        clean=_clean(nights, plan, prepared),
        overlay=catalogue.manifest["overlay"],
        finished=now(),
    )
    return nights.save(night), findings.facts


def _learn(config: Config, nights: NightFiles, plan: Plan, prepared: "Prepared | None") -> None:
    """Train on what is new; where nothing is, the night has its parent's model and labels."""
    from pencil_scale.nights.prepare import night_config
    from pencil_scale.train.run import Start, train

    storage = nights.storage
    record = read_record(storage, plan.name)
    if record is not None and record.status == "finished":
        return
    if prepared is None or len(prepared.rows):
        what = (
            "all samples" if prepared is None else f"{len(prepared.rows):,} rows, {prepared.num_fresh:,} new"
        )
        say(f"{plan.name} starts from {plan.parent or 'nothing'} and trains on {what}")
        labels = None if prepared is None else prepared.labels
        start = Start(plan.id, plan.catalogue_version, labels)
        train(night_config(config, plan, prepared), start, alias=None, hold=False)
        return
    say(f"{plan.name} has nothing to train on: model and labels stay those of {plan.parent}")
    home, _, name = prepared.weights.rpartition("/")  # under the night's own class list
    nights.put(f"models/{plan.name}.pt", Folder(home).get(name))
    nights.put(f"labels/published/{plan.name}.json", prepared.labels.encode())


def _examine(config: Config, nights: NightFiles, plan: Plan, prepared: "Prepared | None") -> "Findings":
    from pencil_scale.nights.guard_rails import Findings, examine

    storage = nights.storage
    trained = read_record(storage, plan.name) is not None
    found = run_facts(storage, plan.name) if trained else {}
    reasons = tuple(found.get("held_because", ()))
    if prepared is None:
        counts = {"new_samples": found["samples"], "new_repaired": found["corrected"]}
        return Findings({**counts, **clean_accuracy(found)}, reasons)
    figures = clean_accuracy(found) if trained else prepared.parent.figures
    labels = Manifest.load(published_url(storage, plan.name))
    clean = _clean(nights, plan, prepared)
    findings = examine(config.nightly, prepared, labels, figures.get("clean_accuracy"), clean)
    return replace(findings, reasons=(*findings.reasons, *reasons))


def _clean(nights: NightFiles, plan: Plan, prepared: "Prepared | None") -> str:
    """The clean set on which the accuracy of a night was measured; its parent's, if it trained nothing."""
    record = read_record(nights.storage, plan.name)
    if record is None:
        return "" if prepared is None else prepared.parent.clean
    return clean_set(nights.storage, record.clean)


def _since(nights: NightFiles, plan: Plan, prepared: "Prepared") -> str:
    """The labels to compare with: the parent's, or what they are under another class list."""
    return prepared.parent.labels if prepared.same_classes else nights.carried(plan.name)


# --- its end -----------------------------------------------------------------------------------------


def _close(config: Config, nights: NightFiles, night: Night, facts: Mapping[str, str]) -> Summary:
    """Hold the night, or move CURRENT to it; then remove what nobody needs any more."""
    from pencil_scale.nights.tracking import tell, tell_current

    current = nights.current()
    status: Status = "held" if night.held else "current"
    if current is not None and current.name not in (night.parent, night.name):
        say(f"CURRENT is {current.name} and stays: {night.name} began from {night.parent}")
        status = "kept"
    if status == "current":
        tell_current(config, night, current)
        nights.move_current(night, expected=night.parent)
    elif status == "held":
        tell(config, night, "held")
    if status != "current" and current is not None and current.overlay != night.overlay:
        _take_down(config, nights, current, night.overlay)
    nights.close(night.name, night.verdict)
    if status == "current":
        _tidy(config, nights, night)
    current = nights.current()
    return Summary(status, night, None if current is None else current.name, facts)


def _take_down(config: Config, nights: NightFiles, current: Night, overlay: str) -> None:
    """Ids that must vanish do not wait for a night that is used: what is in use is made without them."""
    from pipelines.night_outputs import export_night, report_night

    try:
        if current.export is not None:
            export, report = export_night(config, current.name), report_night(config, current.name, None)
            nights.save(replace(current, export=export, report=report, overlay=overlay))
            say(f"{current.name} is exported again: ids were taken down, or put back, since")
        for name in remove_taken_down(nights, overlay):
            say(f"{name} keeps no export: ids were taken down, or put back, since")
    except (PencilError, OSError) as error:
        say(f"WARNING: {current.export} still holds ids that were taken down: {error}")


def _tidy(config: Config, nights: NightFiles, night: Night) -> None:
    """Remove what nobody needs any more; CURRENT has moved, so a night never fails by it."""
    try:
        for name in remove_old(nights, config.nightly.keep_nights):
            say(f"{name} is removed: nightly.keep_nights is {config.nightly.keep_nights}")
        for name in remove_taken_down(nights, night.overlay):
            say(f"{name} keeps no export: ids were taken down, or put back, since")
    except (PencilError, OSError) as error:
        say(f"what is outdated was left: {error}")


def print_summary(summary: Summary) -> None:
    """Print the end table."""
    night = summary.night
    if summary.status == "nothing new":
        print(f"nothing new since {night.name}; CURRENT is {summary.current}")
        return
    table = Table(title=f"{night.name}: {summary.status}", show_header=False)
    for what, told in summary.facts.items():
        table.add_row(what, told)
    table.add_row("CURRENT", str(summary.current or "-"))
    Console(markup=False, highlight=False).print(table)
    for what in ("labels", "model", "export", "report"):
        say(f"{what:<8} {getattr(night, what) or '-'}")
    for reason in night.reasons if summary.status == "held" else ():
        print(f"HELD: {reason}")
    if summary.status == "held":
        print(f"look at it; to use it all the same: python -m pipelines.promote CONFIG {night.name}")


if __name__ == "__main__":
    sys.exit(main())
