"""Catalogue statistics: one pass over all rows, for the counts, the chunks and the class mix.

The window a good shuffle needs follows from how far chunks differ. Let chunk k hold share p_kc of class c,
and P_c be the share overall. A window of w chunks drawn at random has a class share with variance
V/w, V = mean_k sum_c (p_kc - P_c)^2; a batch of B samples drawn at random from everything has
sum_c P_c (1 - P_c) / B. The window is large enough when it adds no more than such a batch has anyway.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.duplicates import Classes, EqualContent, Keys, find_equal_content, hashes_of
from pencil_scale.catalogue.schema import CHUNK_ROWS, DAMAGED_STATUSES

REFERENCE_BATCH = 256
EXAMPLES = 5
MAX_MIX_ENTRIES = 50_000_000
COLUMNS = ["row", "shard", "status", "noisy_class", "true_class", "image_bytes", "content_key"]

Counts = np.ndarray[Any, np.dtype[np.int64]]


@dataclass
class Statistics:
    """What is in the catalogue, in numbers."""

    num_classes: int
    statuses: Counter[str] = field(default_factory=Counter)
    class_counts: Counts = field(default_factory=lambda: np.zeros(0, np.int64))
    shard_mix: Counts = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # of the first shards
    num_ok: list[int] = field(default_factory=list)  # by chunk
    ok_bytes: list[int] = field(default_factory=list)  # by chunk
    num_true: int = 0
    num_wrong: int = 0
    num_other_content: int = 0
    examples: dict[str, list[int]] = field(
        default_factory=dict
    )  # the first rows that are damaged or unlabelled
    equal_content: EqualContent = field(default_factory=EqualContent)
    mean_square_share: float = 0.0

    @property
    def total_ok(self) -> int:
        return sum(self.num_ok)

    def window_chunks(self) -> int:
        """How many chunks a window needs so that its class mix is as good as a random batch's."""
        if self.total_ok == 0:
            return 1
        shares = self.class_counts / self.total_ok
        batch_variance = 1.0 - float(np.sum(shares**2))
        chunk_variance = self.mean_square_share - float(np.sum(shares**2))
        if batch_variance <= 0:
            return 1
        needed = math.ceil(REFERENCE_BATCH * max(chunk_variance, 0.0) / batch_variance)
        return min(max(1, needed), len(self.num_ok))

    def window_mb(self) -> float:
        """The same in megabytes of images."""
        return self.window_chunks() * sum(self.ok_bytes) / max(1, len(self.ok_bytes)) / 1e6

    def chunk_table(self) -> pa.Table:
        """The table that planning an epoch reads."""
        num_ok = pa.array(self.num_ok, pa.int32())
        return pa.table({"num_ok": num_ok, "ok_bytes": pa.array(self.ok_bytes, pa.int64())})


def measure(catalogue: Catalogue, num_classes: int) -> Statistics:
    """Read all rows once, and their content hashes once more for each range."""
    found = Statistics(num_classes, class_counts=np.zeros(num_classes, np.int64))
    num_shards = min(len(catalogue.shards), max(1, MAX_MIX_ENTRIES // num_classes))
    found.shard_mix = np.zeros((num_shards, num_classes), np.int64)
    twins = _twins(catalogue)
    squares = 0.0
    for table in catalogue.batches(COLUMNS):
        found.statuses.update(dict(zip(*_value_counts(table["status"]), strict=True)))
        found.num_other_content += _other_content(table, twins)
        _add_examples(found.examples, table)
        ok = table.filter(pc.equal(table["status"], "ok"))
        squares += _add_ok(found, ok, table["row"][0].as_py() // CHUNK_ROWS, len(table))
    found.mean_square_share = squares / max(1, found.total_ok)
    found.equal_content = find_equal_content(found.total_ok, lambda: _contents(catalogue))
    return found


def _add_ok(found: Statistics, ok: pa.Table, first_chunk: int, num_rows: int) -> float:
    """Add some rows to the counts; gives the sum over their chunks of n_k * sum_c p_kc^2."""
    num_chunks = -(-num_rows // CHUNK_ROWS)
    classes = ok["noisy_class"].to_numpy().astype(np.int64)
    chunks = ok["row"].to_numpy() // CHUNK_ROWS - first_chunk
    mix = np.bincount(chunks * found.num_classes + classes, minlength=num_chunks * found.num_classes)
    mix = mix.reshape(num_chunks, found.num_classes)
    num_ok = mix.sum(axis=1)
    found.class_counts += mix.sum(axis=0)
    found.num_ok.extend(num_ok.tolist())
    sizes = np.bincount(chunks, weights=ok["image_bytes"].to_numpy(), minlength=num_chunks)
    found.ok_bytes.extend(int(size) for size in sizes)
    shards = ok["shard"].to_numpy()
    known = shards < len(found.shard_mix)
    np.add.at(found.shard_mix, (shards[known], classes[known]), 1)
    both = ok.filter(pc.is_valid(ok["true_class"]))
    found.num_true += len(both)
    found.num_wrong += pc.sum(pc.not_equal(both["true_class"], both["noisy_class"])).as_py() or 0
    return float(np.sum((mix**2).sum(axis=1) / np.maximum(num_ok, 1)))


def _add_examples(examples: dict[str, list[int]], table: pa.Table) -> None:
    words = (*DAMAGED_STATUSES, "unlabelled")
    wanted = [status for status in words if len(examples.get(status, [])) < EXAMPLES]
    table = table.filter(pc.is_in(table["status"], pa.array(wanted, pa.string())))
    for status in wanted if len(table) else ():
        rows = table.filter(pc.equal(table["status"], status))["row"].slice(0, EXAMPLES).to_pylist()
        if rows:
            examples[status] = [*examples.get(status, []), *rows][:EXAMPLES]


def _value_counts(column: Any) -> tuple[list[str], list[int]]:
    counts = pc.value_counts(column)
    return counts.field("values").to_pylist(), counts.field("counts").to_pylist()


def _twins(catalogue: Catalogue) -> tuple[Counts, Keys]:
    """The rows that have aliases, and the aliases' content, sorted by row."""
    aliases = catalogue.aliases()
    aliases = aliases.filter(pc.is_valid(aliases["content_key"])).sort_by("row")
    return aliases["row"].to_numpy(), hashes_of(aliases["content_key"])


def _other_content(table: pa.Table, twins: tuple[Counts, Keys]) -> int:
    """Count aliases whose bytes differ from their row's: ids that name more than one image."""
    rows, contents = twins
    first = table["row"][0].as_py()
    low, high = np.searchsorted(rows, [first, first + len(table)])
    own = table["content_key"].take(pa.array(rows[low:high] - first))
    known = pc.is_valid(own).to_numpy()
    return int(np.count_nonzero(hashes_of(own)[known] != contents[low:high][known]))


def _contents(catalogue: Catalogue) -> Iterator[tuple[Keys, Classes]]:
    for table in catalogue.batches(["status", "content_key", "noisy_class"]):
        ok = table.filter(pc.equal(table["status"], "ok"))
        yield hashes_of(ok["content_key"]), ok["noisy_class"].to_numpy()
    for table in catalogue.small_tables("alias_tables"):
        ok = table.filter(pc.equal(table["status"], "ok"))
        yield hashes_of(ok["content_key"]), ok["noisy_class"].to_numpy()
