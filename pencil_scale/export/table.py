"""Export table: learned labels in the terms and files of other tools.

Each sample has `given_label`, `predicted_label`, `label_score` (in [0, 1], lower is worse) and
`is_label_issue`, with the names and meanings of cleanlab's Datalab, the names of the classes, and more. The
Parquet files contain Hugging Face features, so that labels are loaded there as ClassLabel.

    table = export_table(rows, labels, predicted_by, last_change, words)           # one row per sample
    data = parquet_bytes(table, words.class_names)
    digest(table)                                  # of the labels, whichever night exported them
"""

import hashlib
import io
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pencil_scale.labels.published import LabelRows
from pencil_scale.method.calibration import Calibration
from pencil_scale.method.decisions import UNLABELLED, label_distribution

# Where a predicted label comes from: a person, what was learned of the sample, a network that was never
# trained on the sample though it has a label, the network for a sample without one, or only the shard.
PERSON, LABELS, WATCHED, MODEL, GIVEN = "person", "labels", "watched", "model", "given"
LEARNED = (LABELS, WATCHED)
JUDGED = (PERSON, *LEARNED)  # may contradict the given label
LAST_CHANGE = (
    "epoch of the run, counted from 0 (the console counts from 1), in which the learned label last changed "
    "its class; null: it never changed, was never trained on, or no history was kept"
)
LEARNED_LABEL = (
    "class on which most of the label was when training ended, whether or not the evidence proves it; as "
    "given for a planted error; null: never trained on"
)
MARGIN = (
    "confidence minus the probability, or share, of the next best class, from 0 to 1; 0: a tie, or the label "
    "was kept although another class is more likely, because not enough labels are surely wrong"
)
SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("sample_id", pa.string()),
        ("shard", pa.string()),
        ("key", pa.string()),
        ("given_label", pa.int64()),
        ("predicted_label", pa.int64()),
        ("label_score", pa.float32()),
        ("is_label_issue", pa.bool_()),
        ("given_class", pa.string()),
        ("predicted_class", pa.string()),
        ("confidence", pa.float32()),
        pa.field("margin", pa.float32(), metadata={"description": MARGIN}),
        ("top_labels", pa.list_(pa.int64())),
        ("top_shares", pa.list_(pa.float32())),
        pa.field("learned_label", pa.int64(), metadata={"description": LEARNED_LABEL}),
        pa.field("last_change_epoch", pa.int32(), metadata={"description": LAST_CHANGE}),
        ("pinned", pa.bool_()),
        ("status", pa.string()),
        ("predicted_by", pa.string()),
        ("catalogue_version", pa.int32()),
        ("model_version", pa.string()),
    ]
)
# Where find_similar has results for the catalogue version; null for a sample without features.
SIMILAR = pa.schema(
    [("outlier_score", pa.float32()), ("is_outlier", pa.bool_()), ("duplicate_group", pa.int64())]
)
CLASS_COLUMNS = ("given_label", "predicted_label", "learned_label")
ROW_GROUP = 4096
MOST_DOUBTFUL = 1000


@dataclass(frozen=True)
class Words:
    """What is the same for all rows of an export."""

    class_names: tuple[str, ...]
    shard_urls: tuple[str, ...]
    catalogue_version: int
    model_version: str
    top_k: int
    calibration: Calibration | None = None  # of what was learned; None: as the run claims


def export_table(
    rows: pa.Table,
    labels: LabelRows,
    predicted_by: npt.NDArray[np.object_],
    last_change: npt.NDArray[np.int32],
    words: Words,
) -> pa.Table:
    """Put what is known about some rows of the catalogue into the columns of an export.

    `predicted_by` is PERSON, LABELS, WATCHED, MODEL, GIVEN, or None if there is no prediction; `labels`, in
    the classes of the rows, count for the first four. `last_change` is an epoch, from 0, or -1 if unknown.
    """
    given = rows["noisy_class"].fill_null(UNLABELLED).to_numpy().astype(np.int64)
    scored = np.isin(predicted_by.astype(str), (*JUDGED, MODEL))
    found = labels.decide()
    if words.calibration is not None:
        found = words.calibration.applied(found, np.isin(predicted_by, LEARNED))
    predicted = np.where(predicted_by == GIVEN, given, UNLABELLED)
    predicted[scored] = found.corrected_class[scored]
    issue = (predicted != given) & (given != UNLABELLED) & np.isin(predicted_by, JUDGED)
    top_labels, top_shares = _top(labels, found.corrected_class, words.top_k)
    if_scored = pa.array(np.arange(len(given)), mask=~scored)  # null for the other rows
    columns = {
        "row": rows["row"],
        "sample_id": rows["sample_id"],
        "shard": _named(words.shard_urls, rows["shard"].to_numpy()),
        "key": rows["key"],
        "given_label": pa.array(given, mask=given == UNLABELLED),
        "predicted_label": pa.array(predicted, mask=predicted == UNLABELLED),
        "label_score": pa.array(found.score, from_pandas=True).take(if_scored),
        "is_label_issue": pa.array(issue),
        "given_class": _named(words.class_names, given),
        "predicted_class": _named(words.class_names, predicted),
        "confidence": pa.array(found.confidence, from_pandas=True).take(if_scored),
        "margin": pa.array(found.margin, from_pandas=True).take(if_scored),
        "top_labels": _lists(top_labels).take(if_scored),
        "top_shares": _lists(top_shares).take(if_scored),
        "learned_label": pa.array(labels.logits.argmax(1), mask=(labels.last_epoch <= 0) | ~scored),
        "last_change_epoch": pa.array(last_change, mask=last_change < 0),
        "pinned": pa.array(labels.pinned),
        "status": rows["status"],
        "predicted_by": pa.array(predicted_by, pa.string()),
        "catalogue_version": pa.array(np.full(len(given), words.catalogue_version, np.int32)),
        "model_version": pa.array([words.model_version] * len(given), pa.string()),
    }
    return pa.table(columns, schema=SCHEMA)


def with_similar(table: pa.Table, entries: pa.Table) -> pa.Table:
    """Append the columns of SIMILAR, given the entries of some rows."""
    places = pc.index_in(table["row"], entries["row"].combine_chunks())
    for field in SIMILAR:
        table = table.append_column(field, entries[field.name].take(places).cast(field.type))
    return table


def most_doubtful(table: pa.Table) -> pa.Table:
    """The labels that no person decided and that are least likely right as given, in the order of doubt."""
    learned = pc.is_in(table["predicted_by"], pa.array(LEARNED))
    judged = pc.and_(learned, pc.is_valid(table["label_score"]))
    order = [("label_score", "ascending"), ("row", "ascending")]
    return table.filter(judged).sort_by(order).slice(0, MOST_DOUBTFUL)


def alias_table(aliases: pa.Table, labels: pa.Table, words: Words) -> pa.Table:
    """Give duplicates the label of the sample they repeat, under their own shard, key and given label."""
    known = {entry["row"]: entry for entry in labels.to_pylist()}
    entries = []
    for alias in aliases.to_pylist():
        if (entry := known.get(alias["row"])) is None:
            continue
        given, score = alias["noisy_class"], entry["label_score"]
        if given != entry["given_label"]:  # the table has only the shares of the first few classes
            score = dict(zip(entry["top_labels"] or [], entry["top_shares"] or [], strict=True)).get(given)
        judged = given is not None and entry["predicted_by"] in JUDGED
        entries.append(
            entry
            | {
                "shard": words.shard_urls[alias["shard"]],
                "key": alias["key"],
                "given_label": given,
                "given_class": None if given is None else words.class_names[given],
                "label_score": score,
                "is_label_issue": judged and entry["predicted_label"] != given,
                "status": "duplicate" if alias["status"] == "ok" else alias["status"],
            }
        )
    return pa.Table.from_pylist(entries, schema=labels.schema)


def parquet_bytes(table: pa.Table, class_names: tuple[str, ...]) -> bytes:
    """Encode an export as a Parquet file that Hugging Face datasets reads with its class names."""
    label = {"names": list(class_names), "_type": "ClassLabel"}
    features = {"info": {"features": dict.fromkeys(CLASS_COLUMNS, label)}}
    table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=ROW_GROUP, compression="zstd")
    return sink.getvalue()


def digest(table: pa.Table) -> str:
    """Hash the labels of an export, without the catalogue and model versions."""
    sink = io.BytesIO()
    labels = table.drop_columns(["catalogue_version", "model_version"])
    pq.write_table(labels, sink, compression="none", use_dictionary=False)
    return hashlib.sha256(sink.getvalue()).hexdigest()[:16]


def without(table: pa.Table, status: str) -> pa.Table:
    """Leave out rows of a status."""
    return table.filter(pc.not_equal(table["status"], status))


def _top(
    labels: LabelRows, first: npt.NDArray[np.int64], top_k: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The largest shares of each label in descending order; in a tie the decided class is first.

    Where there is evidence, these are the most likely classes. Then there are at most as many of them, for
    every label, as a prediction keeps.
    """
    if not labels.noise:
        return _top_of_logits(labels.logits, first, top_k)
    predictions = labels.predictions()
    likely = predictions.classes[:, :top_k]
    found, shares = _top_of_logits(labels.logits, first, likely.shape[1])
    for noise, some in labels.by_noise():
        found[some] = likely[some]
        shares[some] = predictions.calibrated(noise.temperature, noise.power)[0][some, :top_k]
    return found, shares


def _top_of_logits(
    logits: npt.NDArray[np.float32], first: npt.NDArray[np.int64], top_k: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    shares = label_distribution(logits) if len(logits) else logits
    falling = -shares
    falling[np.arange(len(falling)), first] = -2.0
    # Sorting a thousand classes would take most of an export's time. Ties go to the lower class.
    near = np.sort(np.argpartition(falling, top_k - 1, axis=1)[:, :top_k], axis=1)
    rank = np.argsort(np.take_along_axis(falling, near, axis=1), axis=1, kind="stable")
    order = np.take_along_axis(near, rank, axis=1)
    return order, np.take_along_axis(shares, order, axis=1)


def _lists(values: npt.NDArray[Any]) -> pa.Array:
    """The rows of an array [B, K] as lists."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def _named(names: tuple[str, ...], numbers: npt.NDArray[np.integer]) -> pa.Array:
    """Names of classes or shards by number; null for numbers below 0."""
    return pa.array(names, pa.string()).take(pa.array(numbers.astype(np.int64), mask=numbers < 0))
