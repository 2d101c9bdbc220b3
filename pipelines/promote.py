"""Release a held training run or night, or go back to an older night.

    python -m pipelines.promote configs/clothing1m.yaml clothing1m
    python -m pipelines.promote configs/nightly.yaml night-0012

The labels of a held run are published. To any night that is kept, <storage>/nights/CURRENT is moved, and the
next night starts from it; an export or a page of it that was removed, or is outdated, is made again first.
Both move the registered model's alias. The job may be run again. Review the labels first: review_report also
shows held ones.
"""

import sys
from collections.abc import Sequence

from pencil_scale.config.command import command, run_job, say
from pencil_scale.config.settings import Config
from pencil_scale.labels.published import find_published, held_names
from pencil_scale.labels.run_record import RunRecord, read_record, write_record
from pencil_scale.nights.record import Night, NightFiles
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.lease import Lease
from pencil_scale.storage.storage import Storage
from pipelines.tasks import print_table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on the config and the run or night that the command line names."""
    return run_job(
        run,
        argv,
        module="pipelines.promote",
        what=(__doc__ or "").splitlines()[0],
        words={"name": "the held run to release, or the night to use from now on, such as night-0012"},
    )


def run(config: Config, name: str) -> None:
    """Release a held run, or move CURRENT to a night, held or not."""
    nights = NightFiles(config.run.storage)
    config = config.model_copy(update={"run": config.run.model_copy(update={"storage": nights.storage})})
    record = _held_run(nights, name)
    if record is not None:
        what = f"run {name} is being trained or released"
        with Lease.hold(nights.storage, Storage(nights.storage).run(name, "lease"), what=what) as lease:
            _release(config, record, lease)
    else:
        with nights.leased() as nights:
            _promote(config, nights, nights.must_find(name))


def _held_run(nights: NightFiles, name: str) -> RunRecord | None:
    """Find the held run of a name, or one whose release was interrupted; None if it names a night."""
    record = read_record(nights.storage, name)
    night = next((night for night in nights.nights() if night.name == name), None)
    is_held = record is not None and record.status == "held"
    if night is not None and is_held:
        raise PencilError(f"{name}: both a night and a held run of {nights.storage}; {_known(nights)}")
    if night is not None:
        return None
    if record is None or not record.held_because:
        raise PencilError(f"{name}: no held run and no finished night of {nights.storage}; {_known(nights)}")
    return record


def _known(nights: NightFiles) -> str:
    held, kept = held_names(nights.storage), [night.name for night in nights.nights()]
    return f"held runs: {', '.join(held) or 'none'}; nights: {', '.join(kept) or 'none'}"


def _release(config: Config, record: RunRecord, lease: Lease) -> None:
    """Publish the labels of a held run; steps that were done before an interruption are repeated."""
    from pencil_scale.nights.start import run_facts
    from pencil_scale.train.summary import Summary, write_facts
    from pipelines.night_outputs import track_released

    storage, name = Storage(config.run.storage), record.name
    published = storage.path(storage.published(name))
    if record.status == "finished":
        say(f"{name} was released before, its labels are {published}; nothing is changed")
        return
    labels = find_published(storage.url, name, held=True).manifest
    lease.put(storage.published(name), labels.encode())
    storage.delete(storage.held(name))
    summary = Summary({**run_facts(storage.url, name), "status": "finished", "labels": published})
    write_facts(storage.url, name, summary.facts, lease)
    write_record(storage.url, track_released(config, record), lease, status="finished")
    print(f"released: the labels of {name} are published")
    for reason in record.held_because:
        print(f"  held because {reason}")
    say(summary.table())


def _promote(config: Config, nights: NightFiles, night: Night) -> None:
    # Ray, torch and MLflow take seconds to import; --help and a broken config answer at once.
    from pipelines.night_outputs import holds_export, shown_again, track_current

    before, night = nights.current(), nights.save(night, promoted=True)
    night = shown_again(config, nights, night)
    # A night that was killed before its last step would otherwise take CURRENT back when it resumes.
    for other in nights.nights():
        if not other.closed:
            nights.save(other, closed=True)
    track_current(config, night, before)
    nights.move_current(night, expected=before.name if before else None)
    rows = {"before": before.name if before else "-", "verdict of that night": night.status}
    if night.reasons:
        rows["  held because"] = "\n".join(night.reasons)
    print_table(f"CURRENT is {night.name}", rows)
    # The export of a training run that nights continue was made by hand, if at all.
    storage = Storage(config.run.storage)
    folders = (night.export, storage.path(storage.export(night.name)), config.export.folder)
    export = next((folder for folder in folders if folder and holds_export(folder, night)), None)
    for what, url in (
        ("labels", night.labels),
        ("model", night.model),
        ("export", export),
        ("report", night.report),
    ):
        say(f"{what:<8} {url or '-'}")
    if export is None:
        export_it = f"{command('pipelines.export_labels')} export.labels={night.name}"
        print(f"no export of these labels was found; to make one: {export_it}")


if __name__ == "__main__":
    sys.exit(main())
