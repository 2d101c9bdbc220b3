"""Review page: one HTML file that contains its data, style and script, and fetches nothing.

A content security policy allows only this script and this style, by their hashes, and pictures inside the
page. Text from shards is data to the script, which only ever sets it as text. Columns of numbers are packed,
so that 100,000 samples with their traces are a few megabytes, not a few hundred. The figures at the top and
all sentences are in `assets/page.html`.

    data = page_data(words, tally, traces, thumbnails, figures)
    html = review_page(data, run="night-0012", created="2026-01-01", catalogue_version=7)
"""

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from markupsafe import Markup

from pencil_scale.config.command import command
from pencil_scale.export.table import Words
from pencil_scale.labels.report import Traces
from pencil_scale.review.audit import CHANGED, UNCHANGED
from pencil_scale.review.network import network_facts
from pencil_scale.review.scan import Cells, Tally
from pencil_scale.review.similar import Similar
from pencil_scale.review.thumbnails import Thumbnails
from pencil_scale.storage.errors import many
from pencil_scale.storage.urls import without_passwords

MOST_CELLS = 100_000
TRUTH = ("given_label_accuracy", "corrected_label_accuracy", "label_accuracy_n")
SCRIPTS = (
    "base.js",
    "charts.js",
    "matrix.js",
    "decisions.js",
    "similar.js",
    "gallery.js",
    "audit.js",
    "main.js",
)


def samples_of(tally: Tally) -> pa.Table:
    """All samples of the page, each once: the listed ones, those drawn only for the audit, those added."""
    only_drawn = pc.invert(pc.is_in(tally.drawn["row"], tally.listed["row"]))
    found = pa.concat_tables([tally.listed, tally.drawn.filter(only_drawn)])
    only_added = pc.invert(pc.is_in(tally.added["row"], found["row"]))
    return pa.concat_tables([found, tally.added.filter(only_added)]).combine_chunks()


def page_data(
    words: Words,
    tally: Tally,
    traces: Traces,
    thumbnails: Thumbnails,
    figures: Sequence[Mapping[str, Any]],
    known: Mapping[str, Any] | None = None,
    suffixes: Mapping[str, str] | None = None,
    similar: Similar | None = None,
) -> dict[str, Any]:
    """Put together what the page shows; `traces` are those of `samples_of(tally)`, in the same order.

    `figures` are those of each epoch, `known` those of the labels, `suffixes` are the extensions of the
    images in each shard, and `similar` is in the order of the samples, too.
    """
    samples = samples_of(tally)
    pictures = {
        row: f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        for row, (kind, data) in thumbnails.pictures.items()
    }
    return {
        "classes": words.class_names,
        "counts": tally.counts,
        "transitions": _cells(tally.transitions),
        "top_change": _top_change(tally.transitions),
        "moves": _cells(tally.moves),
        "scores": tally.scores.tolist(),
        "reliability": tally.reliability.tolist() if tally.reliability.any() else None,
        "network": network_facts(known or {}, len(words.class_names)),
        "truth": {name: _known((known or {}).get(name)) for name in TRUTH},
        "epochs": [{name: _known(value) for name, value in epoch.items()} for epoch in figures],
        "num_listed": len(tally.listed),
        "samples": _columns(samples, suffixes or {}),
        "traces": {
            "epochs": list(traces.epochs),
            "classes": packed(traces.classes.ravel(), "u2"),
            "confidence": packed(np.rint(traces.confidence.astype(np.float32) * 255).ravel(), "u1"),
        },
        "thumbnails": [pictures.get(row) for row in samples["row"].to_pylist()],
        "largest_px": thumbnails.largest_px,
        "num_unreadable": len(thumbnails.problems),
        "unreadable": without_passwords(next(iter(thumbnails.problems.values()), "")),
        "audit": _audit(tally, samples),
        "similar": None
        if similar is None
        else {
            "num": similar.places.shape[1],
            "places": packed(similar.places.ravel(), "i4"),
            "outlier": packed(similar.is_outlier, "u1"),
            "score": _shares(similar.score / 2),
        },
    }


def packed(values: npt.NDArray[Any], kind: str) -> dict[str, str]:
    """Encode numbers for a typed array of the browser: "u1", "u2", "u4" or "i4", little-endian."""
    return {"kind": kind, "data": base64.b64encode(values.astype(f"<{kind}").tobytes()).decode()}


def _known(value: Any) -> Any:
    """JSON has no NaN: a figure that is not finite is unknown."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _columns(samples: pa.Table, suffixes: Mapping[str, str]) -> dict[str, Any]:
    shards = samples["shard"].combine_chunks().dictionary_encode()
    is_id = pc.equal(samples["key"], samples["sample_id"])
    top_labels, top_shares = (samples[name].combine_chunks() for name in ("top_labels", "top_shares"))
    return {
        "id": samples["sample_id"].to_pylist(),
        "key": pc.if_else(is_id, None, samples["key"]).to_pylist(),
        "shards": [without_passwords(url) for url in shards.dictionary.to_pylist()],
        "suffixes": [suffixes.get(url, "*") for url in shards.dictionary.to_pylist()],
        "shard": packed(shards.indices.to_numpy(), "u4"),
        "row": samples["row"].to_pylist(),
        **{name: packed(samples[name].to_numpy(), "u4") for name in ("given_label", "predicted_label")},
        **{name: _shares(samples[name].to_numpy()) for name in ("label_score", "confidence", "margin")},
        "last_change_epoch": packed(samples["last_change_epoch"].fill_null(-1).to_numpy(), "i4"),
        "before": packed(samples["before"].fill_null(-1).to_numpy(), "i4"),
        "top_k": pc.max(pc.list_value_length(top_labels)).as_py() or 0,
        "top_labels": packed(top_labels.flatten().to_numpy(), "u4"),
        "top_shares": _shares(top_shares.flatten().to_numpy()),
    }


def _shares(values: npt.NDArray[np.floating]) -> dict[str, str]:
    return packed(np.rint(values.astype(np.float64) * 65535), "u2")


def _cells(cells: Cells) -> dict[str, Any]:
    """The largest cells in descending order, and how many are left out."""
    order = np.argsort(-cells.num, kind="stable")[:MOST_CELLS]
    columns = {name: packed(column[order], "u4") for name, column in cells._asdict().items()}
    return {**columns, "num_left_out": len(cells.num) - len(order)}


def _top_change(cells: Cells) -> dict[str, int] | None:
    """The most frequent change, and how many labels were given its first class; None if none changed."""
    num = np.where(cells.first != cells.second, cells.num, 0)
    if not num.any():
        return None
    given, now = cells.first[num.argmax()], cells.second[num.argmax()]
    of = cells.num[cells.first == given].sum()
    return {"given": int(given), "now": int(now), "num": int(num.max()), "of": int(of)}


def _audit(tally: Tally, samples: pa.Table) -> dict[str, Any]:
    """The samples drawn for the audit, in an order that mixes the two strata evenly."""
    positions = pc.index_in(tally.drawn["row"], samples["row"]).to_numpy()
    changed = pc.not_equal(tally.drawn["given_label"], tally.drawn["predicted_label"]).to_numpy()
    sizes = np.bincount(~changed, minlength=2)
    order = np.argsort(np.concatenate([np.arange(num) / max(num, 1) for num in sizes]), kind="stable")
    return {
        "order": positions[order].tolist(),
        "stratum": np.where(changed, CHANGED, UNCHANGED)[order].tolist(),
        CHANGED: tally.counts["learned_changed"],
        UNCHANGED: tally.counts["learned_unchanged"],
    }


def review_page(
    data: dict[str, Any],
    run: str,
    created: str,
    catalogue_version: int,
    since: str | None = None,
    warnings: Sequence[str] = (),
) -> str:
    """Render the page; `since` names the labels to compare with."""
    style = _read("page.css")
    script = "(() => {\n'use strict';\n" + "\n".join(_read(name) for name in SCRIPTS) + "\n})();\n"
    known = {"run": run, "created": created, "since": since}
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(_read("page.html")).render(
        data | known,
        catalogue_version=catalogue_version,
        warnings=warnings,
        many=many,
        pin_labels=command("pipelines.pin_labels"),
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
    style_hash, script_hash = (hashlib.sha256(text.encode()).digest() for text in (style, script))
    return (
        f"default-src 'none'; script-src 'sha256-{base64.b64encode(script_hash).decode()}'; "
        f"style-src 'sha256-{base64.b64encode(style_hash).decode()}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _read(name: str) -> str:
    return (resources.files("pencil_scale.review") / "assets" / name).read_text()
