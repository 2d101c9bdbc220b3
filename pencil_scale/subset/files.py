"""Subset files: the rows of a subset, published by a manifest.

`<storage>/subsets/NAME/` has a file `members-<hash>.parquet` (row, sample_key, class) for every time the
subset was drawn, and `manifest.json`, replaced last, which names the newest. A subset stays valid when its
catalogue grows, and is refused for a catalogue in which its rows are other samples.

    write_subset(folder, SubsetWords(storage, catalogue.version, ...), members)
    rows = read_members("s3://lake/clothing1m/subsets/260k", catalogue)      # int64, in ascending order
"""

import hashlib
import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.command import program
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder

KIND = "pencil_scale subset"
FORMAT = 2
MANIFEST = "manifest.json"
MEMBERS = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("sample_key", pa.binary(16), nullable=False),
        pa.field("class", pa.int32(), nullable=False),
    ]
)


@dataclass(frozen=True)
class SubsetWords:
    """The manifest of a subset."""

    storage: str
    catalogue: str  # id
    catalogue_version: int
    num_members: int
    class_names: tuple[str, ...]
    class_counts: tuple[int, ...]  # members of each class
    drawn_with: Mapping[str, Any]  # every setting that affects the choice of members
    shards: str | None = None  # folder of new shards with only these samples
    members: str = ""  # the file, named by its content
    format: int = FORMAT
    kind: str = field(default=KIND)


def write_subset(folder: str, words: SubsetWords, members: pa.Table) -> SubsetWords:
    """Write the members, then the manifest that publishes them."""
    sink = io.BytesIO()
    pq.write_table(members.select(MEMBERS.names).cast(MEMBERS), sink, compression="zstd")
    data, store = sink.getvalue(), Folder(folder)
    words = replace(words, members=_name(data))
    if not store.holds(words.members, len(data)):
        store.put(words.members, data)
    store.put_json(MANIFEST, asdict(words))
    return words


def _name(data: bytes) -> str:
    return f"members-{hashlib.sha256(data).hexdigest()[:16]}.parquet"


def read_words(folder: str) -> SubsetWords | None:
    """Read the manifest of a subset; None if there is no subset."""
    found = Folder(folder).read_json(MANIFEST)
    if found is None:
        return None
    if not isinstance(found, dict) or (found.get("kind"), found.get("format")) != (KIND, FORMAT):
        raise PencilError(f"subset {folder}: {MANIFEST} is not a subset of format {FORMAT}; check the URL")
    lists = {name: tuple(found[name]) for name in ("class_names", "class_counts")}
    return SubsetWords(**{**found, **lists})


def read_table(folder: str, words: SubsetWords) -> pa.Table:
    """Read the members; refuse a file whose content is not what the manifest names."""
    data = Folder(folder).get(words.members)
    if _name(data) != words.members:
        raise PencilError(f"subset {folder}: {words.members} is damaged; draw it again")
    return pq.read_table(pa.BufferReader(data), schema=MEMBERS)


def read_members(folder: str, catalogue: Catalogue) -> npt.NDArray[np.int64]:
    """Read the rows of a subset for training, after checking that they belong to this catalogue."""
    words = read_words(folder)
    if words is None:
        command = program("pipelines.balance_subset")
        raise PencilError(f"data.subset: {folder} has no subset; make one with `{command}`")
    members = read_table(folder, words).sort_by("row")
    if len(members) == 0:
        raise PencilError(f"data.subset: {folder} has no members; draw it again")
    if words.catalogue != catalogue.id:
        _require_same_samples(folder, words, members, catalogue)
    elif words.catalogue_version > catalogue.version:
        raise PencilError(
            f"data.subset: {folder} was drawn from catalogue version {words.catalogue_version}, this run has "
            f"version {catalogue.version}; use the newer catalogue in a new run, or an older subset"
        )
    rows: npt.NDArray[np.int64] = members["row"].to_numpy()
    return rows


def _require_same_samples(folder: str, words: SubsetWords, members: pa.Table, catalogue: Catalogue) -> None:
    """Compare the members with the samples in their rows: the catalogue may differ, or was rebuilt."""
    rows, keys, found = members["row"].to_numpy(), members["sample_key"].to_pylist(), []
    first = 0
    for table in catalogue.batches(["sample_key"]):
        here = slice(*np.searchsorted(rows, [first, first + len(table)]).tolist())
        found += table["sample_key"].take(pa.array(rows[here] - first)).to_pylist()
        first += len(table)
    if found != keys:
        raise PencilError(
            f"data.subset: {folder} was drawn from {words.storage}, and its rows are other samples in "
            f"{catalogue.folder}, which is a different catalogue or was rebuilt; draw the subset again"
        )


def fingerprint(folder: str) -> str:
    """A name for the current members: it changes when they do."""
    words = read_words(folder)
    return "" if words is None else words.members
