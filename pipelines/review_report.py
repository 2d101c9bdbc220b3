"""Make the review page: one HTML file that shows the most doubtful labels, to check and to overrule them.

    python -m pipelines.review_report configs/demo.yaml
    python -m pipelines.review_report CONFIG report.labels=night-0012 report.since=night-0011
    python -m pipelines.review_report CONFIG report.judged=decisions.json        # results of an audit

It also shows the labels of a held run: check them before you promote the run.

The page starts with how good the network is, and ranks labels by doubt, changed or kept. It needs no server
and no network. Decisions made there are saved as a file for pin_labels. After find_similar it also shows
outliers and, beside each sample, those most like it, to be judged together. Its audit asks for a
judgement on random labels, and estimates how many repairs are right and how many labels are still wrong, with
95 % intervals. report.judged prints the same estimates from a saved file, beside the gain that the run itself
estimated, and how well the confidence of labels is calibrated.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.catalogue.class_names import difference
from pencil_scale.catalogue.shards import IMAGE_SUFFIXES
from pencil_scale.config.command import command, refuse_lost, run_job, say
from pencil_scale.config.settings import Config
from pencil_scale.export.rows import Source, find_source, stretches
from pencil_scale.features.similar import Results, find_results
from pencil_scale.labels.published import find_published, held_names, published_names
from pencil_scale.labels.report import Traces, read_traces
from pencil_scale.labels.run_record import read_record
from pencil_scale.nights.record import labels_in_use
from pencil_scale.review.audit import read_audit, reliability, study
from pencil_scale.review.network import GAIN, network_facts, network_notes
from pencil_scale.review.page import page_data, review_page, samples_of
from pencil_scale.review.scan import Rules, Tally, gather, merged, scan
from pencil_scale.review.similar import rows_to_add, similar_of
from pencil_scale.review.thumbnails import Thumbnails, make_thumbnails
from pencil_scale.storage.errors import PencilError, many
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import without_passwords
from pipelines.tasks import all_of, is_in_memory, print_table

TOP_K = 5
MOST_EPOCHS = 40  # of a trace: more than a small chart can show
OURS = b'content="pencil_scale review"'
HEAD_BYTES = 4096  # which contain the generator of a page
THUMBNAILS_PER_TASK = 2500  # not worth starting a cluster for fewer


@dataclass(frozen=True)
class Summary:
    """The page that was written, or the results of an audit."""

    page: str | None
    counts: dict[str, int]
    num_listed: int = 0
    num_drawn: int = 0
    copied: str = "not requested"  # to MLflow


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on the config that the command line names."""
    return run_job(run, argv, module="pipelines.review_report", what=__doc__ or "")


def run(config: Config) -> Summary:
    """Scan all labels once, gather what is shown about the chosen samples, and write the page."""
    if config.report.judged is not None:
        return _print_audit(config.report.judged, Storage(config.run.storage))
    if config.report.page is not None and not config.report.page.endswith(".html"):
        raise PencilError(f"report.page: {config.report.page} is not a page; name a file that ends in .html")
    refuse_lost("report.page", config.report.page)
    storage = Storage(config.run.storage)
    named = config.report.labels or labels_in_use(storage.url, config.run.name)
    source = find_source(
        storage.url, named, config.data.exclude, TOP_K, None, config.nightly.remap, held=True
    )
    rules, warnings = _rules(config, source, storage)
    shared, pieces = (source, rules), [(rows,) for rows in stretches(source)]
    scanned = all_of("scanning labels", _scan_stretch, pieces, shared, is_in_memory(storage.url))
    tally = merged(scanned, rules)
    similar = find_results(storage, source.catalogue, config.features.name)
    if similar is not None:
        tally = _with_similar(config, tally, similar, (source, rules), is_in_memory(storage.url))
    html = _page(config, storage, source, tally, rules, warnings, similar)
    url = config.report.page or storage.path(storage.report(source.published.name))
    name = url.rpartition("/")[2]
    store = Folder(url.removesuffix(name) or ".")
    found = store.find(name)
    if found is not None and OURS not in found[:HEAD_BYTES]:
        raise PencilError(
            f"report.page: {store.path(name)} exists and is not a review page; nothing was overwritten: name "
            "another file"
        )
    store.put(name, html.encode())
    copied = _copy(config, storage, source.published.name, html)
    summary = Summary(store.path(name), dict(tally.counts), len(tally.listed), len(tally.drawn), copied)
    print_summary(summary)
    return summary


def _rules(config: Config, source: Source, storage: Storage) -> tuple[Rules, list[str]]:
    """What to keep from the scan, and warnings for the page. Each night has its own audit sample."""
    seed = config.run.seed ^ crc32(source.published.name.encode())
    rules = Rules(config.report.listed, config.report.audit, seed)
    if config.report.since is None:
        return rules, []
    since = find_published(storage.url, config.report.since, held=True)
    if set(since.manifest.class_names) == set(source.words.class_names):
        return rules._replace(since=since), []
    differs = difference(since.manifest.class_names, source.words.class_names)
    return rules, [f"No comparison with {since.name}: its class list {differs}."]


def _scan_stretch(shared: tuple[Source, Rules], rows: range) -> Tally:
    return scan(*shared, rows)


def _with_similar(
    config: Config, tally: Tally, similar: Results, shared: tuple[Source, Rules], here: bool
) -> Tally:
    """Add outliers and samples like the listed ones."""
    listed = tally.listed["row"].to_numpy()
    wanted = rows_to_add(similar, listed, config.report.outliers, config.report.similar)
    pieces = [
        (rows, wanted[slice(*np.searchsorted(wanted, [rows.start, rows.stop]))])
        for rows in stretches(shared[0])
    ]
    pieces = [(rows, some) for rows, some in pieces if len(some)]
    return replace(
        tally,
        added=pa.concat_tables(
            [tally.added, *all_of("reading similar samples", _gather_stretch, pieces, shared, here)]
        ),
    )


def _gather_stretch(shared: tuple[Source, Rules], rows: range, wanted: npt.NDArray[np.int64]) -> pa.Table:
    return gather(*shared, rows, wanted)


def _page(
    config: Config,
    storage: Storage,
    source: Source,
    tally: Tally,
    rules: Rules,
    warnings: list[str],
    similar: Results | None,
) -> str:
    name = source.published.name
    # Labels may come from elsewhere, without a run.
    figures = storage.read_json(storage.run(name, "epochs.json")) or []
    known = {
        **(figures[-1] if figures else {}),
        **(storage.read_json(storage.run(name, "summary.json")) or {}),
    }
    warnings = [*network_notes(known, name, source.published.held_because), *warnings]
    thumbnails = _thumbnails(config, source, tally, is_in_memory(storage.url))
    rows = samples_of(tally)["row"].to_numpy()
    order = np.argsort(rows, kind="stable")
    back = np.argsort(order, kind="stable")
    found = read_traces(source.published, rows[order], MOST_EPOCHS)
    classes = source.order.classes(found.classes[back]).astype(np.uint16)
    traces = Traces(found.epochs, classes, found.confidence[back])
    like = similar_of(similar, rows) if similar is not None else None
    data = page_data(source.words, tally, traces, thumbnails, figures, known, _suffixes(source), like)
    return review_page(
        data,
        run=name,
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        catalogue_version=source.catalogue.version,
        since=rules.since.name if rules.since else None,
        warnings=warnings,
    )


def _suffixes(source: Source) -> dict[str, str]:
    """The extension of the images in each shard, or * if there are several."""
    found = {shard.url: sorted(IMAGE_SUFFIXES & set(shard.suffixes)) for shard in source.catalogue.shards}
    return {url: suffixes[0] if len(suffixes) == 1 else "*" for url, suffixes in found.items()}


def _thumbnails(config: Config, source: Source, tally: Tally, here: bool) -> Thumbnails:
    """Pictures of the first listed samples, and of all samples that are drawn or added."""
    found = Thumbnails()
    if config.report.thumbnails == 0:
        return found
    listed = tally.listed["row"].to_numpy()[: config.report.thumbnails]
    others = (table["row"].to_numpy() for table in (tally.drawn, tally.added))
    rows, step = np.unique(np.concatenate([listed, *others])), THUMBNAILS_PER_TASK
    pieces = [(rows[first : first + step], config.report.thumbnail_px) for first in range(0, len(rows), step)]
    for some in all_of("making thumbnails", make_thumbnails, pieces, source.catalogue, here):
        found.pictures |= some.pictures
        found.problems |= some.problems
        found.largest_px = max(found.largest_px, some.largest_px)
    return found


def _copy(config: Config, storage: Storage, name: str, html: str) -> str:
    if not config.report.mlflow:
        return "not requested"
    from pencil_scale.tracking.tracker import copy_page

    record = read_record(storage.url, name)
    reason = copy_page(config, record.tracking if record else {}, "report.html", html)
    return "report.html, in the run" if reason is None else f"none: {reason}"


def _print_audit(url: str, storage: Storage) -> Summary:
    audit = read_audit(url)
    changed, unchanged, run = audit.changed, audit.unchanged, audit.run
    findings = study(changed, unchanged)
    is_known = run in (*published_names(storage.url), *held_names(storage.url))
    known = (storage.read_json(storage.run(run, "summary.json")) if is_known else None) or {}
    estimated = [fact for fact in network_facts(known, 2) if fact.name == GAIN]
    wrong = unchanged.num_judged - unchanged.num_right
    rows = {
        "correct repairs": f"{findings.precision.spelled()}\n"
        f"{changed.num_right:,} of {changed.num_judged:,} judged; {changed.num_all:,} changed",
        "wrong, unchanged": f"{findings.missed.spelled()}\n"
        f"{wrong:,} of {unchanged.num_judged:,} judged; {unchanged.num_all:,} unchanged",
        "wrong after repair": findings.remaining.spelled(),
        GAIN: f"{findings.gain.spelled('+')}\nof all labels, put right minus spoiled",
        "  estimated by the run": "\n".join(f"{one.value}\n{one.detail}" for one in estimated) or "unknown",
    }
    print_table(f"audit {without_passwords(url)}", rows)
    shown = {
        f"confidence {one.low:.2f} to {one.high:.2f}": f"{one.confidence:.3f} on average, {one.right:.3f} of "
        f"{many(one.num, 'judged label')} right"
        for one in reliability([changed, unchanged])
    }
    print_table("calibration", shown)
    say(f"to recalibrate an export by it: {command('pipelines.export_labels')} export.judged={url}")
    return Summary(None, {})


def print_summary(summary: Summary) -> None:
    """Print the summary table."""
    counts = summary.counts
    rows = {name: f"{counts.get(name, 0):,}" for name in ("labels", "changed")}
    if counts.get("moved") or counts.get("new"):
        rows["changed since"] = f"{counts.get('moved', 0):,}, and {counts.get('new', 0):,} new"
    rows["listed"] = f"{summary.num_listed:,}"
    rows["drawn for the audit"] = f"{summary.num_drawn:,}"
    print_table("review", rows | {"copy in MLflow": summary.copied})
    say(f"page: {summary.page}")  # a table would cut a long path


if __name__ == "__main__":
    sys.exit(main())
