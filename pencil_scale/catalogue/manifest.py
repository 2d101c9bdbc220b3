"""Catalogue manifest: what a catalogue contains, measured in one pass over all rows.

The recommended shuffle window follows from how much chunks differ. Let chunk k have share p_kc of class c,
and P_c be the overall share. The class shares of a window of w random chunks have variance V/w with
V = mean_k sum_c (p_kc - P_c)^2; those of a random batch of B samples have sum_c P_c (1 - P_c) / B. A window
is large enough when its variance is no larger than that of such a batch.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.catalogue.catalogue import FORMAT, Catalogue
from pencil_scale.catalogue.duplicates import Classes, Keys, find_equal_content, hashes_of
from pencil_scale.catalogue.rules import Overlay
from pencil_scale.catalogue.schema import (
    CHUNK_ROWS,
    DAMAGED_STATUSES,
    damage_line,
    put_table,
)
from pencil_scale.catalogue.shard_index import IndexRules
from pencil_scale.storage.folder import Folder

TEXTS_KEPT = 1000
SIZES_KEPT = 100
EXAMPLES = 5  # rows of each damaged status
FEWEST_KNOWN = 10  # true classes of samples, to say what most samples of a label are
REFERENCE_BATCH = 256
COLUMNS = ["row", "status", "noisy_class", "true_class", "image_bytes", "content_key"]


def describe(
    store: Folder,
    written: dict[str, Any],
    rules: IndexRules,
    overlay: Overlay,
    version: int,
    catalogue_id: str,
) -> dict[str, Any]:
    """Measure what `CatalogueUpdate` wrote, and return the manifest that publishes it."""
    draft = {
        "format": FORMAT,
        "version": version,
        "id": catalogue_id,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "identity": rules.identity,
        "label": rules.label,
        "classes": list(rules.classes.names),
        "num_classes": len(rules.classes),
        "num_ok": 0,
        "overlay": overlay.name,
        "exclude": overlay.exclude,
        **written,
    }
    catalogue = Catalogue(store.url, draft)
    measured = Measured(catalogue)
    sizes = pa.array(measured.num_ok, pa.int32()), pa.array(measured.ok_bytes, pa.int64())
    indexed = [shard for shard in catalogue.shards if shard.state == "indexed"]
    return {
        **draft,
        **measured.figures(),
        "num_samples": sum(shard.num_samples for shard in indexed),
        "num_lost_samples": sum(shard.num_lost for shard in indexed),
        "damage": _most_common(
            [*(shard.damage for shard in indexed), {"shard_missing": len(written["missing"])}]
        ),
        "oddities": _most_common([shard.oddities for shard in indexed]),
        "skipped_members": _most_common([shard.skipped for shard in indexed]),
        "json_fields": {k: v for shard in reversed(indexed) for k, v in shard.json_fields.items()},
        "suffixes": _most_common([shard.suffixes for shard in indexed], TEXTS_KEPT),
        "sizes": _most_common([shard.sizes for shard in indexed], SIZES_KEPT),
        "unknown_labels": _most_common([shard.unknown_labels for shard in indexed], TEXTS_KEPT),
        "chunks": put_table(store, "chunks", pa.table(sizes, names=["num_ok", "ok_bytes"])),
    }


def _most_common(counts: Sequence[dict[str, int]], num: int | None = None) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict((+total).most_common(num))


class Measured:
    """The figures of a catalogue; reads all rows once, and their content hashes once per range of hashes."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self.class_counts = np.zeros(catalogue.num_classes, np.int64)
        self.num_ok: list[int] = []  # by chunk
        self.ok_bytes: list[int] = []  # by chunk
        self._statuses: Counter[str] = Counter()
        self._examples: dict[str, list[int]] = {}  # the first rows of each status
        self._num_other_content = 0
        self._pairs = np.zeros((2, 0), np.int64)  # given << 32 | true class, and how often it occurs
        self._squares = 0.0  # sum over the chunks of n_k * sum_c p_kc^2
        aliases = catalogue.aliases()
        aliases = aliases.filter(pc.is_valid(aliases["content_key"])).sort_by("row")
        self._twins = aliases["row"].to_numpy(), hashes_of(aliases["content_key"])
        for table in catalogue.batches(COLUMNS):
            self._add_statuses(table)
            self._add_other_content(table)
            self._add_ok(table)

    def figures(self) -> dict[str, Any]:
        """The entries of the manifest that describe the rows."""
        num_ok = sum(self.num_ok)
        num_chunks = self._window_chunks(num_ok)
        window_mb = num_chunks * sum(self.ok_bytes) / max(1, len(self.ok_bytes)) / 1e6
        unlabelled = self._example("unlabelled", 1)  # to compare with the ids of the label source
        return {
            "num_ok": num_ok,
            "status": dict(self._statuses.most_common()),
            "num_duplicates_of_other_content": self._num_other_content,
            "class_counts": self.class_counts.tolist(),
            "equal_content": find_equal_content(num_ok, self._contents),
            "truth": self._truth(),
            "window": {"num_chunks": num_chunks, "mb": round(window_mb, 3)},
            "damaged_samples": [
                one for status in DAMAGED_STATUSES for one in self._example(status, EXAMPLES)
            ],
            "unlabelled_id": unlabelled[0]["id"] if unlabelled else None,
        }

    def _truth(self) -> dict[str, Any]:
        """How many labels differ from the truth, and the classes of which most samples are of another one."""
        names, (pairs, num) = self._catalogue.class_names, self._pairs
        given, true = pairs >> 32, pairs & 0xFFFFFFFF
        known = np.bincount(given, num, len(names))[given]
        most = (given != true) & (2 * num > known) & (known >= FEWEST_KNOWN)
        mostly = {names[label]: names[one] for label, one in zip(given[most], true[most], strict=True)}
        num_wrong = int(num[given != true].sum())
        return {"num_known": int(num.sum()), "num_wrong": num_wrong, "mostly": mostly}

    def _contents(self) -> Iterator[tuple[Keys, Classes]]:
        """The content hashes and classes of all ok rows and aliases."""
        rows = self._catalogue.batches(["status", "content_key", "noisy_class"])
        for table in chain(rows, self._catalogue.small_tables("alias_tables")):
            ok = table.filter(pc.equal(table["status"], "ok"))
            yield hashes_of(ok["content_key"]), ok["noisy_class"].to_numpy()

    def _add_ok(self, table: pa.Table) -> None:
        """Count the ok rows by class and chunk."""
        first_chunk, num_chunks = table["row"][0].as_py() // CHUNK_ROWS, -(-len(table) // CHUNK_ROWS)
        ok = table.filter(pc.equal(table["status"], "ok"))
        classes = ok["noisy_class"].to_numpy().astype(np.int64)
        chunks = ok["row"].to_numpy() // CHUNK_ROWS - first_chunk
        shape = (num_chunks, len(self.class_counts))
        mix = np.bincount(chunks * shape[1] + classes, minlength=shape[0] * shape[1]).reshape(shape)
        num_ok = mix.sum(axis=1)
        self.class_counts += mix.sum(axis=0)
        self.num_ok.extend(num_ok.tolist())
        sizes = np.bincount(chunks, weights=ok["image_bytes"].to_numpy(), minlength=num_chunks)
        self.ok_bytes.extend(int(size) for size in sizes)
        self._squares += float(np.sum((mix**2).sum(axis=1) / np.maximum(num_ok, 1)))
        both = ok.filter(pc.is_valid(ok["true_class"]))
        given, true = (both[name].to_numpy().astype(np.int64) for name in ("noisy_class", "true_class"))
        all_pairs = np.hstack([self._pairs, [given << 32 | true, np.ones_like(given)]])
        pairs, where = np.unique(all_pairs[0], return_inverse=True)
        self._pairs = np.stack([pairs, np.bincount(where, all_pairs[1], len(pairs)).astype(np.int64)])

    def _add_statuses(self, table: pa.Table) -> None:
        for found in pc.value_counts(table["status"]).to_pylist():
            status = found["values"]
            self._statuses[status] += found["counts"]
            rows = self._examples.setdefault(status, [])
            if len(rows) < EXAMPLES:
                same = table.filter(pc.equal(table["status"], status))["row"]
                rows += same.slice(0, EXAMPLES - len(rows)).to_pylist()

    def _add_other_content(self, table: pa.Table) -> None:
        """Count aliases whose image differs from their row's: ids that name more than one image."""
        rows, contents = self._twins
        first = table["row"][0].as_py()
        low, high = np.searchsorted(rows, [first, first + len(table)])
        own = table["content_key"].take(pa.array(rows[low:high] - first))
        known = pc.is_valid(own).to_numpy()
        differs = hashes_of(own)[known] != contents[low:high][known]
        self._num_other_content += int(np.count_nonzero(differs))

    def _window_chunks(self, num_ok: int) -> int:
        """The number of chunks in a window whose class mix is as good as a random batch's."""
        overall = float(np.sum((self.class_counts / num_ok) ** 2)) if num_ok else 1.0
        if overall >= 1:
            return 1
        needed = math.ceil(REFERENCE_BATCH * max(self._squares / num_ok - overall, 0.0) / (1.0 - overall))
        return min(max(1, needed), len(self.num_ok))

    def _example(self, status: str, num: int) -> list[dict[str, Any]]:
        """The first rows of a status, with their place and what to do."""
        found, shards = [], self._catalogue.shards
        for row in self._examples.get(status, [])[:num]:
            columns = ["shard", "sample_id", "key", "image_offset"]
            (one,) = self._catalogue.read(row, row + 1, columns).to_pylist()
            line = damage_line(shards[one["shard"]].url, one["image_offset"], status)
            found.append({"status": status, "row": row, "key": one["key"][:200], "detail": line})
            found[-1]["id"] = one["sample_id"][:200]
        return found
