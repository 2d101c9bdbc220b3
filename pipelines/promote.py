"""Use another night: release one that is held, or go back to an older one.

    python -m pipelines.promote configs/nightly.yaml night-0012

Moves <storage>/nights/CURRENT, and the registered model's alias, to any night that is kept; the next night
begins from there. It takes seconds, and may be run again.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from pencil_scale.command import run_job
from pencil_scale.export_files import ExportError, read_manifest
from pencil_scale.nights.night_files import Night, NightFiles
from pencil_scale.settings import Config


@dataclass(frozen=True)
class Summary:
    """Which night is in use now, and which was before."""

    night: Night
    before: str | None
    export: str | None  # of these labels, by the night itself or by hand


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on the config and the night that the command line names."""
    return run_job(
        run,
        argv,
        module="pipelines.promote",
        what=(__doc__ or "").splitlines()[0],
        words={"night": "the night to use from now on, such as night-0012"},
    )


def run(config: Config, night: str) -> Summary:
    """Move CURRENT to a night, whatever its verdict was."""
    nights = NightFiles(config.run.storage)
    config = config.model_copy(update={"run": config.run.model_copy(update={"storage": nights.storage})})
    with nights.held() as nights:
        summary = _promote(config, nights, nights.must_find(night))
    print_summary(summary)
    return summary


def _promote(config: Config, nights: NightFiles, night: Night) -> Summary:
    # Ray, torch and MLflow take seconds to import; --help and a broken config answer at once.
    from pencil_scale.nights.night_tracking import tell_current

    before = nights.current()
    name = None if before is None else before.name
    # A night that was killed before its last step would otherwise take CURRENT back when it goes on.
    for other in nights.nights():
        nights.close(other.name, other.verdict)
    nights.move_current(night, expected=name)
    tell_current(config, night, before)
    return Summary(night, name, _find_export(config, night))


def _find_export(config: Config, night: Night) -> str | None:
    """A training run that nights go on from made no export itself; somebody may have made one since."""
    folders = (night.export, f"{config.run.storage}/exports/{night.name}", config.export.folder)
    for folder in filter(None, folders):
        with suppress(ExportError):  # CURRENT has moved: what else lies there is no reason to fail
            found = read_manifest(folder)
            if found is not None and found.labels == night.labels:
                return folder
    return None


def print_summary(summary: Summary) -> None:
    """Print the end table."""
    night = summary.night
    table = Table(title=f"CURRENT is {night.name}", show_header=False)
    table.add_row("before", summary.before or "-")
    table.add_row("verdict of that night", night.verdict)
    for reason in night.reasons:
        table.add_row("  held because", reason)
    Console(markup=False, highlight=False).print(table)
    for what in ("labels", "model", "export", "report"):
        print(f"{what:<8} {getattr(summary if what == 'export' else night, what) or '-'}")
    if summary.export is None:
        command = f"python -m pipelines.export_labels CONFIG export.labels={night.name}"
        print(f"no export of these labels was found; to make one: {command}")


if __name__ == "__main__":
    sys.exit(main())
