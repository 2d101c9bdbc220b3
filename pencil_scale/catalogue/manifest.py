"""Catalogue manifest: what a catalogue says of itself, from what an update wrote and measured."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.catalogue.catalogue import FORMAT, Catalogue, ShardEntry
from pencil_scale.catalogue.files import put_table
from pencil_scale.catalogue.rules import Overlay
from pencil_scale.catalogue.schema import DAMAGE, DAMAGED_STATUSES, SUFFIXES_SHOWN, damage_line, status_line
from pencil_scale.catalogue.shard_index import IndexRules
from pencil_scale.catalogue.statistics import Statistics, measure
from pencil_scale.catalogue.update import Written
from pencil_scale.storage.folder import Folder

UNKNOWN_LABELS_SHOWN = 1000
LEAST_MIXED_SHOWN = 10


def describe(
    store: Folder,
    written: Written,
    shards: Sequence[ShardEntry],
    rules: IndexRules,
    overlay: Overlay,
    version: int,
    catalogue_id: str,
) -> dict[str, Any]:
    """Measure what was written, and give the manifest that will publish it."""
    draft = {
        "format": FORMAT,
        "version": version,
        "id": catalogue_id,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "identity": rules.identity,
        "label": rules.label.source,
        "classes": list(rules.classes.names),
        "num_rows": written.num_rows,
        "num_ok": 0,
        "num_classes": len(rules.classes),
        "overlay": overlay.name,
        "exclude": overlay.exclude,
        "shards": [asdict(entry) for entry in shards],
        "segments": [asdict(segment) for segment in written.segments],
        "alias_tables": list(written.alias_tables),
        "damage_tables": list(written.damage_tables),
    }
    catalogue = Catalogue(store.url, draft)
    statistics = measure(catalogue, len(rules.classes))
    chunks = put_table(store, "chunks", statistics.chunk_table())
    figures = _figures(catalogue, statistics) | _found_in_shards(shards)
    head = ("num_rows", "num_ok", "num_classes", "status", "damage")
    manifest = {**draft, **figures, "chunks": chunks}
    return {**{name: manifest[name] for name in head}, **manifest}


def _figures(catalogue: Catalogue, statistics: Statistics) -> dict[str, Any]:
    damage, num_lost = _damage_counts(catalogue.small_tables("damage_tables"))
    duplicates = sum(len(table) for table in catalogue.small_tables("alias_tables"))
    equal = statistics.equal_content
    return {
        "num_ok": statistics.total_ok,
        "status": dict(statistics.statuses.most_common()),
        "damage": damage,
        "num_lost_samples": num_lost,
        "num_duplicates": duplicates,
        "num_duplicates_of_other_content": statistics.num_other_content,
        "class_counts": statistics.class_counts.tolist(),
        "equal_content": {**asdict(equal), "proven_noise": equal.proven_noise},
        "truth": {"num_known": statistics.num_true, "num_wrong": statistics.num_wrong},
        "window": {"num_chunks": statistics.window_chunks(), "mb": round(statistics.window_mb(), 3)},
        "shard_mix": _shard_mix(statistics),
        "least_mixed": _least_mixed(catalogue, statistics),
        "damaged_samples": _damaged_samples(catalogue, statistics),
        "unlabelled_id": _unlabelled_id(catalogue, statistics),
    }


def _damage_counts(tables: Iterable[pa.Table]) -> tuple[dict[str, int], int]:
    kinds: Counter[str] = Counter()
    num_lost = 0
    for table in tables:
        kinds.update(table["kind"].to_pylist())
        num_lost += pc.sum(table["num_samples"]).as_py() or 0
    return dict(kinds.most_common()), num_lost


def _shard_mix(statistics: Statistics) -> dict[str, Any]:
    """How even the classes lie in a shard: the share of its largest class, beside that of the whole."""
    rows = statistics.shard_mix.sum(axis=1)
    mix = statistics.shard_mix[rows > 0]
    if len(mix) == 0:
        return {"num_shards": 0}
    largest = mix.max(axis=1) / mix.sum(axis=1)
    return {
        "num_shards": len(mix),
        "num_single_class": int((largest == 1).sum()),
        "mean_largest_share": round(float(largest.mean()), 4),
        "largest_share_overall": round(
            float(statistics.class_counts.max() / statistics.class_counts.sum()), 4
        ),
        "mean_num_classes": round(float((mix > 0).sum(axis=1).mean()), 2),
    }


def _least_mixed(catalogue: Catalogue, statistics: Statistics) -> list[dict[str, Any]]:
    """The shards in which one class takes the largest share."""
    totals = statistics.shard_mix.sum(axis=1)
    shares = statistics.shard_mix.max(axis=1) / np.maximum(totals, 1)
    return [
        {
            "url": catalogue.shards[number].url,
            "num_ok": int(totals[number]),
            "num_classes": int((statistics.shard_mix[number] > 0).sum()),
            "largest": catalogue.manifest["classes"][int(statistics.shard_mix[number].argmax())],
            "share": round(float(shares[number]), 4),
        }
        for number in np.argsort(-shares, kind="stable")[:LEAST_MIXED_SHOWN]
        if totals[number]
    ]


def _unlabelled_id(catalogue: Catalogue, statistics: Statistics) -> str | None:
    """The id of a sample without label, to be compared with what the label source calls its samples."""
    for row in statistics.examples.get("unlabelled", [])[:1]:
        return str(catalogue.read(row, row + 1, ["sample_id"])["sample_id"][0])[:200]
    return None


def _damaged_samples(catalogue: Catalogue, statistics: Statistics) -> list[dict[str, Any]]:
    """Some rows of each damaged status, with their place and what to do."""
    found = []
    for status, row in ((status, row) for status, rows in statistics.examples.items() for row in rows):
        if status in DAMAGED_STATUSES:
            (place,) = catalogue.read(row, row + 1, ["shard", "key", "image_offset"]).to_pylist()
            line = status_line(catalogue.shards[place["shard"]].url, place["image_offset"], status)
            found.append({"status": status, "row": row, "key": place["key"][:200], "detail": line})
    return found


def _found_in_shards(shards: Sequence[ShardEntry]) -> dict[str, Any]:
    oddities: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    suffixes: Counter[str] = Counter()
    num_samples = 0
    for entry in shards:
        if entry.state == "indexed":
            num_samples += entry.num_samples
            oddities.update(entry.oddities)
            skipped.update(entry.skipped)
            unknown.update(entry.unknown_labels)
            suffixes.update(entry.suffixes)
    return {
        "num_samples": num_samples,
        "oddities": dict(oddities.most_common()),
        "skipped_members": dict(skipped.most_common()),
        "suffixes": dict(suffixes.most_common(SUFFIXES_SHOWN + 1)),
        "unknown_labels": dict(unknown.most_common(UNKNOWN_LABELS_SHOWN)),
    }


def missing_damage(urls: Sequence[str]) -> pa.Table:
    """Damage of shards that were listed and are not there; they have no number, so -1."""
    rows = [
        {
            "shard": -1,
            "start": 0,
            "end": 0,
            "kind": "shard_missing",
            "key": None,
            "num_samples": 0,
            "detail": damage_line(url, 0, "shard_missing", "listed, but not there"),
        }
        for url in urls
    ]
    return pa.Table.from_pylist(rows, schema=DAMAGE)
