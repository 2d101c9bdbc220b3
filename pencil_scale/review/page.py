"""Review page: one HTML file that contains its data, style and script, and fetches nothing.

A content security policy allows only this script and this style, by their hashes, and pictures inside the
page. Text from shards is data to the script, which only ever sets it as text. Columns of numbers are packed,
so that 100,000 samples with their traces are a few megabytes, not a few hundred.

    data = page_data(words, tally, traces, thumbnails, figures)
    html = review_page(data, Heading(...))
"""

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from markupsafe import Markup

from pencil_scale.export.table import Words
from pencil_scale.labels.report import Traces
from pencil_scale.review.audit import CHANGED, UNCHANGED
from pencil_scale.review.scan import LISTED, Cells, Tally
from pencil_scale.review.thumbnails import Thumbnails
from pencil_scale.storage.urls import without_passwords

MOST_CELLS = 100_000
SCRIPTS = ("base.js", "charts.js", "matrix.js", "decisions.js", "gallery.js", "audit.js", "main.js")
FIGURES = (
    "epoch",
    "stage",
    "corrected_share",
    "label_entropy",
    "given_label_accuracy",
    "corrected_label_accuracy",
    "corrected_label_accuracy_low",
    "corrected_label_accuracy_high",
    "validation_accuracy",
    "test_accuracy",
)


def samples_of(tally: Tally) -> pa.Table:
    """All samples of the page, each once: the listed ones, then those drawn only for the audit."""
    listed = tally.listed
    more = tally.drawn.filter(pa.array(~np.isin(tally.drawn["row"].to_numpy(), listed["row"].to_numpy())))
    return pa.concat_tables([listed, more.select(LISTED.names)]).combine_chunks()


def page_data(
    words: Words, tally: Tally, traces: Traces, thumbnails: Thumbnails, figures: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Put together what the page shows; `traces` are those of `samples_of(tally)`, in the same order."""
    samples = samples_of(tally)
    return {
        "classes": words.class_names,
        "counts": dict(tally.counts),
        "transitions": _cells(tally.transitions),
        "moves": _cells(tally.moves),
        "scores": tally.scores.tolist(),
        "epochs": [{name: _known(figure.get(name)) for name in FIGURES} for figure in figures],
        "num_listed": len(tally.listed),
        "samples": _columns(samples),
        "traces": {
            "epochs": list(traces.epochs),
            "classes": packed(traces.classes.ravel(), "u2"),
            "confidence": packed(np.rint(traces.confidence.astype(np.float32) * 255).ravel(), "u1"),
        },
        "thumbnails": [thumbnails.pictures.get(row) for row in samples["row"].to_pylist()],
        "audit": _audit(tally, samples),
    }


def packed(values: npt.NDArray[Any], kind: str) -> dict[str, str]:
    """Encode numbers for a typed array of the browser: "u1", "u2", "u4" or "i4", little-endian."""
    return {"kind": kind, "data": base64.b64encode(values.astype(f"<{kind}").tobytes()).decode()}


def _known(value: Any) -> Any:
    """JSON has no NaN: a figure that is not finite is unknown."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _columns(samples: pa.Table) -> dict[str, Any]:
    ids, keys = samples["sample_id"].to_pylist(), samples["key"].to_pylist()
    shards = samples["shard"].combine_chunks().dictionary_encode()
    top_k = max((len(labels) for labels in samples["top_labels"].to_pylist()), default=0)
    return {
        "id": ids,
        "key": [None if key == sample_id else key for sample_id, key in zip(ids, keys, strict=True)],
        "shards": [without_passwords(url) for url in shards.dictionary.to_pylist()],
        "shard": packed(shards.indices.to_numpy(), "u4"),
        "row": samples["row"].to_pylist(),
        **{name: packed(samples[name].to_numpy(), "u4") for name in ("given_label", "predicted_label")},
        **{name: _shares(samples[name].to_numpy()) for name in ("label_score", "confidence", "margin")},
        "last_change_epoch": packed(samples["last_change_epoch"].fill_null(-1).to_numpy(), "i4"),
        "before": packed(samples["before"].fill_null(-1).to_numpy(), "i4"),
        "top_k": top_k,
        "top_labels": packed(samples["top_labels"].combine_chunks().flatten().to_numpy(), "u4"),
        "top_shares": _shares(samples["top_shares"].combine_chunks().flatten().to_numpy()),
    }


def _shares(values: npt.NDArray[np.floating]) -> dict[str, str]:
    return packed(np.rint(values.astype(np.float64) * 65535), "u2")


def _cells(cells: Cells) -> dict[str, Any]:
    """The largest cells in descending order, and how many are left out."""
    order = np.argsort(-cells.num, kind="stable")[:MOST_CELLS]
    return {
        **{name: packed(getattr(cells, name)[order], "u4") for name in ("first", "second", "num")},
        "num_left_out": len(cells.num) - len(order),
    }


def _audit(tally: Tally, samples: pa.Table) -> dict[str, Any]:
    """The samples drawn for the audit, in an order that mixes the two strata evenly."""
    place_of = {row: place for place, row in enumerate(samples["row"].to_pylist())}
    strata, rows = tally.drawn["stratum"].to_pylist(), tally.drawn["row"].to_pylist()
    seen = {CHANGED: 0, UNCHANGED: 0}
    total = {stratum: max(strata.count(stratum), 1) for stratum in seen}
    turns = []
    for stratum, row in zip(strata, rows, strict=True):
        turns.append((seen[stratum] / total[stratum], stratum, place_of[row]))
        seen[stratum] += 1
    turns.sort()
    return {
        "order": [place for _, _, place in turns],
        "stratum": [stratum for _, stratum, _ in turns],
        CHANGED: tally.counts["learned_changed"],
        UNCHANGED: tally.counts["learned_unchanged"],
    }


# --- the page ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fact:
    """One of the figures at the top."""

    name: str
    value: str
    detail: str


@dataclass(frozen=True)
class Heading:
    """What the page shows without its script."""

    run: str
    created: str
    catalogue_version: int
    facts: tuple[Fact, ...]
    since: str | None = None  # the labels to compare with
    notes: tuple[str, ...] = ()


def review_page(data: dict[str, Any], heading: Heading) -> str:
    """Render the page."""
    style = _read("page.css")
    script = "(() => {\n'use strict';\n" + "\n".join(_read(name) for name in SCRIPTS) + "\n})();\n"
    known = {"run": heading.run, "created": heading.created, "since": heading.since}
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(_read("page.html")).render(
        **asdict(heading),
        policy=content_policy(style, script),
        style=Markup(style),
        script=Markup(script),
        data=as_json(data | known),
    )


def as_json(data: dict[str, Any]) -> Markup:
    """Encode data for a script element: without `<` and `&`, so that nothing in it can be markup."""
    return jinja2.utils.htmlsafe_json_dumps(data, separators=(",", ":"), allow_nan=False)


def content_policy(style: str, script: str) -> str:
    """Allow this style, this script, and pictures inside the page; nothing else."""
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _read(name: str) -> str:
    return (resources.files("pencil_scale.review") / "assets" / name).read_text()


# --- the figures at the top --------------------------------------------------------------------------


def headline(words: Words, tally: Tally, figures: Sequence[Mapping[str, Any]]) -> tuple[Fact, ...]:
    """The most important figures; unknown ones are left out."""
    counts, last = tally.counts, figures[-1] if figures else {}
    labels, changed = counts["labels"], counts["changed"]
    facts = [
        Fact("labels", f"{labels:,}", f"of {counts['rows']:,} samples in the catalogue"),
        Fact("changed", _percent(changed, labels), f"{changed:,} labels have a new class"),
    ]
    before, after = last.get("given_label_accuracy"), last.get("corrected_label_accuracy")
    if before is not None and after is not None:
        known = f"{int(last['label_accuracy_n']):,}"
        detail = f"{100 * before:.1f} % before; the true class is known for {known} labels"
        facts.append(Fact("correct after repair", f"{100 * after:.1f} %", detail))
    given, now, num = tally.transitions
    moved = np.flatnonzero(given != now)
    if len(moved):
        top = moved[num[moved].argmax()]
        names = f"{words.class_names[given[top]]} → {words.class_names[now[top]]}"
        share = _percent(num[top], num[given == given[top]].sum())
        facts.append(Fact("most frequent change", names, f"{num[top]:,} labels, {share} of their class"))
    if counts["pinned"]:
        facts.append(Fact("decided by people", f"{counts['pinned']:,}", "labels are pinned and never change"))
    return tuple(facts)


def notes(tally: Tally, thumbnails: Thumbnails) -> tuple[str, ...]:
    """What a person should know before trusting the page."""
    found = []
    if tally.counts["untouched"]:
        found.append(
            f"{tally.counts['untouched']:,} usable samples were not trained on: they keep the given labels, "
            "and are not counted here."
        )
    if thumbnails.problems:
        reason = next(iter(thumbnails.problems.values()))
        found.append(f"{len(thumbnails.problems):,} pictures cannot be shown; the first one: {reason}")
    return tuple(found)


def _percent(num: int, of: int) -> str:
    return f"{100 * num / of:.1f} %" if of else "none"
