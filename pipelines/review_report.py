"""Show what became of the labels on one page that opens from disk, to look at and to overrule.

    python -m pipelines.review_report configs/demo.yaml
    python -m pipelines.review_report CONFIG report.labels=night-12 report.since=night-11
    python -m pipelines.review_report CONFIG report.judged=decisions.json        # what an audit came to

Labels of a run that is held are shown too: look at them before you promote the run.

The page needs no server and no network. Decisions made there are saved as a file for pipelines.pin_labels.
Its audit asks for a judgement on labels drawn at random, and tells how many repairs are right and how much
noise was missed, with 95 % intervals; report.judged tells the same from a saved file.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any
from zlib import crc32

import numpy as np
from rich.console import Console
from rich.table import Table

from pencil_scale.catalogue.class_names import difference
from pencil_scale.config.command import refuse_lost, run_job, say
from pencil_scale.config.settings import Config
from pencil_scale.export.rows import Source, find_source, stretches
from pencil_scale.labels.history import Traces, read_traces
from pencil_scale.labels.published import Published, find_published
from pencil_scale.labels.run_record import read_record, run_folder
from pencil_scale.review.audit import Findings, read_judged, study
from pencil_scale.review.headline import headline, notes
from pencil_scale.review.page import Heading, page_data, review_page, samples_of
from pencil_scale.review.scan import Rules, Tally, merged, scan
from pencil_scale.review.thumbnails import Thumbnails, make_thumbnails
from pencil_scale.storage.errors import DamagedError, PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.urls import without_passwords
from pipelines.tasks import all_of, is_in_memory

TOP_K = 5
MOST_EPOCHS = 40  # of a trace: more than a line of a few pixels can show
OURS = b'content="pencil_scale review"'
HEAD_BYTES = 4096  # in which a page says what made it
THUMBNAILS_A_TASK = 2500  # fewer than these are not worth starting a cluster for


@dataclass(frozen=True)
class Summary:
    """The page that was written, or what an audit came to."""

    page: str | None
    counts: dict[str, int]
    num_listed: int = 0
    num_drawn: int = 0
    copied: str = "not asked for"  # into MLflow
    findings: Findings | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on the config that the command line names."""
    return run_job(run, argv, module="pipelines.review_report", what=(__doc__ or "").splitlines()[0])


def run(config: Config) -> Summary:
    """Scan all labels once, gather what is shown of the samples chosen, and write the page."""
    if config.report.judged is not None:
        return _tell_audit(config.report.judged)
    if config.report.page is not None and not config.report.page.endswith(".html"):
        raise PencilError(f"report.page: {config.report.page} is no page; name a file that ends in .html")
    refuse_lost("report.page", config.report.page)
    storage = Folder(config.run.storage).url  # tasks stand in other folders
    named = config.report.labels or config.run.name
    source = find_source(storage, named, config.data.exclude, TOP_K, None, config.nightly.remap, held=True)
    rules, warnings = _rules(config, source, storage)
    warnings = [*_held_because(storage, source.published), *warnings]
    here = is_in_memory(storage)
    tally = _scan(source, rules, here)
    html = _page(config, storage, source, tally, warnings, rules.since, here)
    url = config.report.page or f"{storage}/reports/{source.published.name}.html"
    folder, name = url[: -len(PurePosixPath(url).name)] or ".", PurePosixPath(url).name
    store = Folder(folder)
    _refuse_strangers(store, name)
    store.put(name, html.encode())
    copied = _copy(config, storage, source.published.name, html)
    summary = Summary(store.path(name), dict(tally.counts), len(tally.listed), len(tally.drawn), copied)
    print_summary(summary)
    return summary


def _refuse_strangers(store: Folder, name: str) -> None:
    """Refuse to write over a page that is none of ours."""
    try:
        found = store.get(name)
    except DamagedError:
        return
    if OURS not in found[:HEAD_BYTES]:
        raise PencilError(
            f"report.page: {store.path(name)} is there, and no review page; nothing was overwritten: "
            "name another file"
        )


def _rules(config: Config, source: Source, storage: str) -> tuple[Rules, list[str]]:
    """What to keep of the scan. Each night draws an audit of its own."""
    seed = config.run.seed ^ crc32(source.published.name.encode())
    rules = Rules(config.report.listed, config.report.audit, seed)
    if config.report.since is None:
        return rules, []
    since = find_published(storage, config.report.since, held=True)
    differs = difference(since.manifest.class_names, source.words.class_names)
    if set(since.manifest.class_names) != set(source.words.class_names):
        return rules, [
            f"{since.name}: its class list {differs}, compared with these labels: nothing to compare."
        ]
    return rules._replace(since=since), []


def _held_because(storage: str, published: Published) -> list[str]:
    """What to say on the page of a run that is held: a person decides by this page whether to release it."""
    record = read_record(storage, published.name) if published.held else None
    return [f"These labels are held: {reason}." for reason in record.held_because] if record else []


def _scan(source: Source, rules: Rules, here: bool) -> Tally:
    pieces = [(rows,) for rows in stretches(source)]
    return merged(all_of("scanning labels", _scan_stretch, pieces, (source, rules), here), rules)


def _scan_stretch(shared: tuple[Source, Rules], rows: range) -> Tally:
    return scan(*shared, rows)


def _page(
    config: Config,
    storage: str,
    source: Source,
    tally: Tally,
    warnings: list[str],
    since: Published | None,
    here: bool,
) -> str:
    figures = _figures(storage, source.published.name)
    thumbnails = _thumbnails(config, source, tally, here)
    data = page_data(source.words, tally, _traces(source, tally), thumbnails, figures)
    heading = Heading(
        run=source.published.name,
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        catalogue_version=source.catalogue.version,
        facts=headline(source.words, tally, figures),
        since=since.name if since else None,
        notes=(*warnings, *notes(tally, thumbnails)),
    )
    return review_page(data, heading)


def _figures(storage: str, name: str) -> list[dict[str, Any]]:
    """What the run noted after each epoch; labels that no run of ours made have none."""
    try:
        found: list[dict[str, Any]] = json.loads(Folder(run_folder(storage, name)).get("epochs.json"))
    except DamagedError:
        return []
    return found


def _traces(source: Source, tally: Tally) -> Traces:
    rows = samples_of(tally)["row"].to_numpy()
    order = np.argsort(rows, kind="stable")
    back = np.argsort(order, kind="stable")
    traces = read_traces(source.published, rows[order], MOST_EPOCHS)
    classes = source.order.classes(traces.classes[back]).astype(np.uint16)
    return Traces(traces.epochs, classes, traces.confidence[back])


def _thumbnails(config: Config, source: Source, tally: Tally, here: bool) -> Thumbnails:
    """Pictures of the first so many listed, and of all that are drawn for the audit."""
    if config.report.thumbnails == 0:
        return Thumbnails()
    listed = tally.listed["row"].to_numpy()[: config.report.thumbnails]
    rows = np.unique(np.concatenate([listed, tally.drawn["row"].to_numpy()]))
    pieces = [(rows[first : first + THUMBNAILS_A_TASK],) for first in range(0, len(rows), THUMBNAILS_A_TASK)]
    found = Thumbnails()
    shared = (source.catalogue, config.report.thumbnail_px)
    for some in all_of("making thumbnails", _some_thumbnails, pieces, shared, here):
        found.pictures |= some.pictures
        found.problems |= some.problems
    return found


def _some_thumbnails(shared: tuple[Any, int], rows: Any) -> Thumbnails:
    return make_thumbnails(shared[0], rows, shared[1])


def _copy(config: Config, storage: str, name: str, html: str) -> str:
    if not config.report.mlflow:
        return "not asked for"
    from pencil_scale.tracking.tracker import copy_page

    record = read_record(storage, name)
    reason = copy_page(config, record.tracking if record else {}, "report.html", html)
    return "report.html, with its run" if reason is None else f"none: {reason}"


def _tell_audit(url: str) -> Summary:
    changed, unchanged = read_judged(url)
    findings = study(changed, unchanged)
    table = Table(title=f"audit {without_passwords(url)}", show_header=False)
    table.add_row("repairs that are right", str(findings.precision))
    table.add_row(
        "", f"{changed.num_right:,} of {changed.num_judged:,} judged, of {changed.num_all:,} changed"
    )
    wrong = unchanged.num_judged - unchanged.num_right
    table.add_row("noise that was missed", str(findings.missed))
    table.add_row("", f"{wrong:,} of {unchanged.num_judged:,} judged, of {unchanged.num_all:,} unchanged")
    table.add_row("noise that is left", str(findings.left))
    Console(markup=False, highlight=False).print(table)
    return Summary(None, {}, findings=findings)


def print_summary(summary: Summary) -> None:
    """Print the end table."""
    counts = summary.counts
    table = Table(title="review", show_header=False)
    table.add_row("labels studied", f"{counts.get('labels', 0):,}")
    table.add_row("changed", f"{counts.get('changed', 0):,}")
    if counts.get("moved") or counts.get("new"):
        table.add_row("moved since", f"{counts.get('moved', 0):,}, and {counts.get('new', 0):,} new")
    table.add_row("listed to look at", f"{summary.num_listed:,}")
    table.add_row("drawn for an audit", f"{summary.num_drawn:,}")
    table.add_row("copy in MLflow", summary.copied)
    Console(markup=False, highlight=False).print(table)
    say(f"page: {summary.page}")  # a path is never cut to the width of a table


if __name__ == "__main__":
    sys.exit(main())
