"""Similar rows: near-duplicates, outliers and neighbours of all rows, as a table beside the features.

`<storage>/features/KEY/similar.json` names a Parquet file with one entry per row that has features, and the
features and catalogue version that it was made from. Results of other features, or for another version of the
catalogue, are never used.

    entries, facts = describe(vectors, found, classes)
    put_results(storage, lease, manifest, catalogue, entries, facts)
    results = find_results(storage, catalogue)          # None if there are none for this version
    results.read(range(0, 4096))                        # the entries of some rows
"""

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.command import program
from pencil_scale.features.manifest import FOLDER, FeatureManifest
from pencil_scale.features.neighbours import NONE, Int64s, Neighbours, Vectors
from pencil_scale.features.outliers import outlier_scores
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.lease import Lease
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import filesystem_of

KIND, VERSION = "pencil_scale similar", 1
RESULTS = "similar.json"
ROW_GROUP = 4096
NEIGHBOURS = 12  # per row
COPIES = 6  # of them, rows with exactly the same features
ENTRIES = pa.schema(
    [
        ("row", pa.int64()),
        ("sample_id", pa.string()),
        ("outlier_score", pa.float32()),
        ("is_outlier", pa.bool_()),
        ("duplicate_group", pa.int64()),  # the first row of the group; null: not in a group
        ("nearest_similarity", pa.float32()),
        ("neighbours", pa.list_(pa.int64())),  # rows, the most similar first
    ]
)


@dataclass(frozen=True)
class Facts:
    """What was found, in numbers."""

    num_rows: int
    num_vectors: int  # distinct ones
    duplicate_similarity: float
    num_groups: int
    num_in_groups: int
    num_mixed_groups: int  # with several given classes
    largest_group: int
    outlier_threshold: float
    num_outliers: int
    is_exact: bool


def describe(
    vectors: Vectors, found: Neighbours, classes: Int64s, threshold: float, is_exact: bool
) -> tuple[pa.Table, Facts]:
    """Make entries of all rows, without their ids; `classes` are the given ones, -1 without a label."""
    rows, group = vectors.rows, found.groups[vectors.place]
    _, firsts, number, sizes = np.unique(group, return_index=True, return_inverse=True, return_counts=True)
    grouped = sizes[number] > 1
    scores, limit = outlier_scores(vectors, _one_per_group(vectors, found, classes))
    scores = scores[vectors.place]
    pairs = np.unique(np.stack([number[classes >= 0], classes[classes >= 0]]), axis=1)
    num_classes = np.bincount(pairs[0], minlength=len(sizes))
    facts = Facts(
        num_rows=len(rows),
        num_vectors=len(vectors),
        duplicate_similarity=threshold,
        num_groups=int(np.count_nonzero(sizes > 1)),
        num_in_groups=int(grouped.sum()),
        num_mixed_groups=int(np.count_nonzero(num_classes > 1)),
        largest_group=int(sizes[sizes > 1].max(initial=0)),
        outlier_threshold=limit,
        num_outliers=int(np.count_nonzero(scores > limit)),
        is_exact=is_exact,
    )
    copies = _copies(vectors)
    nearest = np.where(copies[:, 0] != NONE, np.float32(1), found.similarity[vectors.place, 0])
    entries = {
        "row": rows,
        "outlier_score": scores,
        "is_outlier": scores > limit,
        "duplicate_group": pa.array(rows[firsts][number], mask=~grouped),
        "nearest_similarity": pa.array(nearest, mask=nearest < -1.5),
        "neighbours": _neighbours(vectors, found, copies),
    }
    return pa.table(entries), facts


def _one_per_group(vectors: Vectors, found: Neighbours, classes: Int64s) -> Int64s:
    """The class of each vector's first row; -1 for all but the first vector of a group of near-duplicates.

    A placeholder that occurs a thousand times would otherwise be the mean of its class.
    """
    given = classes[np.searchsorted(vectors.rows, vectors.first_rows)]
    only = np.full(len(vectors), NONE, np.int64)
    firsts = np.unique(np.where(given >= 0, found.groups, NONE), return_index=True)[1]
    only[firsts] = given[firsts]
    return only


def _copies(vectors: Vectors) -> Int64s:
    """The next few rows with the same vector as each row, [rows, COPIES]; -1: no more."""
    order = np.argsort(vectors.place, kind="stable")
    sizes = np.bincount(vectors.place, minlength=len(vectors))
    starts = np.cumsum(sizes) - sizes
    start, size = np.repeat(starts, sizes), np.repeat(sizes, sizes)
    turn, copies = np.arange(len(order)) - start, np.full((len(order), COPIES), NONE, np.int64)
    for step in range(1, COPIES + 1):
        other = vectors.rows[order[start + (turn + step) % np.maximum(size, 1)]]
        copies[order, step - 1] = np.where(step < size, other, NONE)
    return copies


def _neighbours(vectors: Vectors, found: Neighbours, copies: Int64s) -> pa.Array:
    places = found.places[vectors.place]
    others = np.where(places == NONE, NONE, vectors.first_rows[places])
    both = np.hstack([copies, others])
    order = np.argsort(both == NONE, axis=1, kind="stable")[:, :NEIGHBOURS]
    both = np.take_along_axis(both, order, 1)
    lengths = np.count_nonzero(both != NONE, axis=1)
    offsets = np.r_[0, np.cumsum(lengths)].astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(both[both != NONE]))


# --- files -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """Results that are stored."""

    url: str
    made_at: str
    facts: Mapping[str, Any]

    def read(self, rows: range, columns: list[str] | None = None) -> pa.Table:
        """Read the entries of some rows; a row without features has none."""
        return self.where((pc.field("row") >= rows.start) & (pc.field("row") < rows.stop), columns)

    def where(self, condition: pc.Expression, columns: list[str] | None = None) -> pa.Table:
        """Read the entries that meet a condition, in the order of their rows."""
        filesystem, path = filesystem_of(self.url)
        return pq.read_table(
            path, columns=columns, filesystem=filesystem, filters=condition, partitioning=None
        )


def put_results(
    storage: Storage,
    lease: Lease,
    manifest: FeatureManifest,
    catalogue: Catalogue,
    entries: pa.Table,
    facts: Facts,
    made_at: str,
) -> str:
    """Write the entries, then the file that names them; remove earlier ones. Return the address."""
    sink = io.BytesIO()
    pq.write_table(
        entries.select(ENTRIES.names).cast(ENTRIES), sink, row_group_size=ROW_GROUP, compression="zstd"
    )
    data = sink.getvalue()
    file = f"similar-{hashlib.sha256(data).hexdigest()[:16]}.parquet"
    storage.put(storage.features(manifest.key, file), data)
    record = {
        "kind": KIND,
        "version": VERSION,
        "features": manifest.digest,
        "catalogue": catalogue.id,
        "catalogue_version": catalogue.version,
        "made_at": made_at,
        "file": file,
        "facts": asdict(facts),
    }
    lease.put(storage.features(manifest.key, RESULTS), json.dumps(record, indent=1).encode())
    _remove(storage, manifest.key, keep=file)
    return storage.path(storage.features(manifest.key, file))


def _remove(storage: Storage, key: str, keep: str = "") -> None:
    for name in storage.names(storage.features(key)):
        file = name.rpartition("/")[2]
        if file.startswith("similar-") and file != keep:
            storage.delete(name)


def remove_outdated(storage: Storage, manifest: FeatureManifest) -> None:
    """Remove results of other features than these: they may name samples that were excluded since."""
    name = storage.features(manifest.key, RESULTS)
    found = storage.read_json(name)
    if found is not None and found.get("features") != manifest.digest:
        storage.delete(name)
        _remove(storage, manifest.key)


def find_results(storage: Storage, catalogue: Catalogue, name: str | None = None) -> Results | None:
    """Find the newest results for a version of the catalogue; `name` is a key, or that of an import."""
    known, outdated = list[Results](), list[str]()
    for key in (path.rpartition("/")[2] for path in storage.names(FOLDER)):
        record = storage.read_json(storage.features(key, RESULTS))
        manifest = FeatureManifest.find(storage, key) if record is not None else None
        if record is None or manifest is None or name not in (None, key, manifest.made_by.get("imported")):
            continue
        if (record.get("kind"), record.get("version")) != (KIND, VERSION):
            raise PencilError(
                f"{storage.path(storage.features(key, RESULTS))}: not results of version {VERSION}; remove "
                f"the file, and run `{program('pipelines.find_similar')}` again"
            )
        made_from = (record["features"], record["catalogue"], record["catalogue_version"])
        if made_from == (manifest.digest, catalogue.id, catalogue.version):
            url = storage.path(storage.features(key, record["file"]))
            known.append(Results(url, record["made_at"], record["facts"]))
        else:
            outdated.append(storage.path(storage.features(key, RESULTS)))
    if outdated and not known:
        print(
            f"WARNING: {outdated[0]}: of other features, or not of catalogue version {catalogue.version}; "
            f"without outliers and near-duplicates: run `{program('pipelines.find_similar')} CONFIG` again",
            flush=True,
        )
    return max(known, key=lambda one: one.made_at, default=None)
