"""Exchange: vectors of other programs become features of catalogue rows, and features become vectors by id.

manifest, found = import_vectors(storage, manifest, batches, catalogue, excluded, lease, folder)
found.num_unknown, found.num_missing         # ids without a row, and rows without a vector
chosen = rows_to_export(storage, manifest, catalogue, excluded)
for sample_ids, features in vectors_of(storage, manifest, catalogue, chosen):
    ...
"""

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.duplicates import Keys, contains, hashes_of
from pencil_scale.catalogue.schema import from_stored
from pencil_scale.features.extraction import COLUMNS, content_keys, sweep
from pencil_scale.features.interchange import Vectors
from pencil_scale.features.manifest import FOLDER, MANIFEST, READY, VECTORS, FeatureManifest
from pencil_scale.features.similar import remove_outdated
from pencil_scale.labels.manifest import ahead
from pencil_scale.storage.errors import PencilError, sample_key
from pencil_scale.storage.lease import Lease
from pencil_scale.storage.storage import Storage

EXAMPLES = 3
HASHED_ROWS = 4096
Mask = npt.NDArray[np.bool_]


@dataclass
class Found:
    """What an import found; each list has the first few ids."""

    num_unknown: int = 0  # ids that the catalogue does not have
    unknown: list[str] = field(default_factory=list)
    num_missing: int = 0  # rows that should have features and have no vector
    missing: list[str] = field(default_factory=list)
    num_left_out: int = 0  # vectors of samples that are excluded, have vanished, or have no image


class RowsById:
    """Finds the rows of sample ids, which may be spelled as they are, or as our tables write them."""

    def __init__(self, catalogue: Catalogue) -> None:
        columns = [hashes_of(table["sample_key"]) for table in catalogue.batches(["sample_key"])]
        keys = np.concatenate([np.empty(0, "S16"), *columns])
        self._rows = np.argsort(keys, kind="stable")
        self._keys = keys[self._rows]

    def find(self, names: Sequence[str]) -> npt.NDArray[np.int64]:
        """The row of each id; -1 if there is none."""
        rows = np.full(len(names), -1, np.int64)
        for spelled in (names, list(map(from_stored, names))):
            keys = np.array([sample_key(name) for name in spelled], "S16")
            new = contains(self._keys, keys) & (rows < 0)
            rows[new] = self._rows[np.searchsorted(self._keys, keys[new])]
        return rows


def import_vectors(
    storage: Storage,
    manifest: FeatureManifest,
    batches: Iterator[Vectors],
    catalogue: Catalogue,
    excluded: Keys,
    lease: Lease,
    folder: Path,
) -> tuple[FeatureManifest, Found]:
    """Give rows the vectors of their ids, in place of all earlier ones of this name, and publish.

    Vectors come in any order, so they are gathered in a file in a local folder first.
    """
    found, parts = Found(), {}
    gathered, given = _gather(manifest, batches, RowsById(catalogue), found, folder)
    manifest = replace(manifest, made_by={**manifest.made_by, VECTORS: _hash_of(gathered, given)})
    for part in range(manifest.layout.num_parts):
        columns, rows = manifest.empty_part(part), manifest.layout.rows_of(part)
        table = catalogue.read(rows.start, rows.stop, ["sample_id", *COLUMNS])
        keys, has_vector = content_keys(table, excluded), given[rows.start : rows.stop]
        usable = keys.any(1)
        ready = usable & has_vector
        columns["features"][ready] = gathered[rows.start : rows.stop][ready]
        columns["state"][ready], columns["content_key"][ready] = READY, keys[ready]
        parts[part] = manifest.put_part(storage, columns)
        missing = np.flatnonzero(usable & ~has_vector)
        found.num_missing += len(missing)
        found.missing += table["sample_id"].take(missing[: EXAMPLES - len(found.missing)]).to_pylist()
        found.num_left_out += int(np.count_nonzero(has_vector & ~usable))
    manifest = replace(manifest, parts=parts)
    if not manifest.counts["ready"]:
        raise PencilError(
            f"no vector is that of a usable sample; their ids are such as {_listed(found.unknown)}, those of "
            f"the catalogue such as {_listed(found.missing)}: check data.identity"
        )
    lease.put(storage.features(manifest.key, MANIFEST), manifest.encode())
    sweep(storage, manifest.key, manifest)
    remove_outdated(storage, manifest)
    _remove_replaced(storage, manifest)
    return manifest, found


def _hash_of(gathered: npt.NDArray[np.float16], given: Mask) -> str:
    """A hash of all vectors in row order, and of which rows have one."""
    sha256 = hashlib.sha256(given.tobytes())
    for first in range(0, len(gathered), HASHED_ROWS):
        sha256.update(gathered[first : first + HASHED_ROWS].tobytes())
    return sha256.hexdigest()


def _remove_replaced(storage: Storage, manifest: FeatureManifest) -> None:
    """Remove vectors of another length that were imported under this name before."""
    name = manifest.made_by["imported"]
    for key in [path.rpartition("/")[2] for path in storage.names(FOLDER)]:
        other = FeatureManifest.find(storage, key) if key != manifest.key else None
        if other is not None and other.made_by.get("imported") == name:
            for file in storage.names(storage.features(key)):
                storage.delete(file)


def _gather(
    manifest: FeatureManifest, batches: Iterator[Vectors], rows_by_id: RowsById, found: Found, folder: Path
) -> tuple[npt.NDArray[np.float16], Mask]:
    """Write vectors to a mapped file, in row order; also return which rows have one."""
    num_bytes = 2 * manifest.num_rows * manifest.width
    if shutil.disk_usage(folder).free < num_bytes:
        raise PencilError(f"{folder}: {num_bytes:,} bytes are needed; name a larger disk in workers.scratch")
    gathered = np.memmap(folder / "vectors", np.float16, "w+", shape=(manifest.num_rows, manifest.width))
    given = np.zeros(manifest.num_rows, np.bool_)
    for names, vectors in batches:
        rows = rows_by_id.find(names)
        known, unknown = rows >= 0, np.flatnonzero(rows < 0)
        found.num_unknown += len(unknown)
        found.unknown += [names[number] for number in unknown[: EXAMPLES - len(found.unknown)]]
        _refuse_repeated(names, rows, given)
        given[rows[known]] = True
        with np.errstate(over="ignore", under="ignore"):  # the part refuses what is infinite
            halved = vectors.astype(np.float16)
        vanished = vectors.any(1) & ~halved.any(1)
        if vanished.any():
            raise PencilError(
                f"the vector of {names[int(vanished.argmax())]!r} has only numbers that are 0 as float16, "
                "whose smallest is 6e-8; scale the vectors"
            )
        gathered[rows[known]] = halved[known]
    return gathered, given


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _refuse_repeated(names: Sequence[str], rows: npt.NDArray[np.int64], given: Mask) -> None:
    known, counts = np.unique(rows[rows >= 0], return_counts=True)
    twice = known[given[known] | (counts > 1)]
    if len(twice):
        name = names[int(np.flatnonzero(rows == twice[0])[-1])]
        raise PencilError(f"sample {name!r} has more than one vector; keep one of them")


def first_of(batches: Iterator[Vectors], file: str) -> tuple[int, Iterator[Vectors]]:
    """Find the length of the vectors, and give all batches."""
    first = next(batches, None)
    if first is None:
        raise PencilError(f"{file}: no vectors; check the file")
    return first.features.shape[1], chain([first], batches)


def rows_to_export(
    storage: Storage, manifest: FeatureManifest, catalogue: Catalogue, excluded: Keys
) -> list[Mask]:
    """Which rows of each part have features of the image that the catalogue names, and may be exported."""
    if manifest.catalogue != catalogue.id:
        raise PencilError(
            f"{storage.path(storage.features(manifest.key))}: features of another catalogue, which was "
            "rebuilt since; compute or import them again"
        )
    chosen = []
    for columns in ahead(lambda part: manifest.part(storage, part), range(manifest.layout.num_parts)):
        rows = columns["row"]
        keys = content_keys(catalogue.read(int(rows[0]), int(rows[-1]) + 1, COLUMNS), excluded)
        chosen.append((columns["state"] == READY) & (columns["content_key"] == keys).all(1))
    return chosen


def vectors_of(
    storage: Storage, manifest: FeatureManifest, catalogue: Catalogue, chosen: Sequence[Mask]
) -> Iterator[Vectors]:
    """Give the chosen rows of every part, in row order; the views of a row follow each other."""
    parts = ahead(lambda part: manifest.part(storage, part), range(manifest.layout.num_parts))
    for columns, mask in zip(parts, chosen, strict=True):
        first = int(columns["row"][0])
        names = catalogue.read(first, first + len(mask), ["sample_id"])["sample_id"]
        yield Vectors(names.take(np.flatnonzero(mask)).to_pylist(), columns["features"][mask])
