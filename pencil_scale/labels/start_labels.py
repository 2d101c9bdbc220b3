"""The labels a run starts with: every catalogue row at its given class, in the run's label store.

Sweeping: label parts that a run wrote and that nothing names any more are found and removed.

A run removes only what it wrote itself, under its own id, and only while it writes nothing: a part is written
before the manifest that names it, so a part without a manifest may belong to a run that is just writing. What
every manifest of the storage names stays: labels of another run may rest on parts of this one.

    swept = sweep_run("s3://lake/clothing1m", run_id)
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.labels.manifest import KIND, Manifest
from pencil_scale.labels.pins import Pinned, apply_pins
from pencil_scale.labels.snapshot import sweep
from pencil_scale.labels.table import LabelTable
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import filesystem_of


def label_store(storage: str) -> str:
    """Where a dataset keeps the parts of all its label tables."""
    return f"{storage.rstrip('/')}/labels"


def start_labels(
    catalogue: Catalogue,
    storage: str,
    scale: float,
    scratch: str | None,
    pins: Pinned | None = None,
    run: str | None = None,
) -> Manifest:
    """Make a fresh table over all rows of the catalogue and put it into the label store.

    A row without a usable class has one all the same, with no class preferred: rows keep their numbers.
    What people have pinned starts, and stays, as they decided.
    """
    if scratch is not None:
        Path(scratch).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pencil_scale-", dir=scratch) as folder:
        table = fresh_table(catalogue, folder, scale, run)
        if pins is not None:
            apply_pins(table, pins)
        return replace(table.snapshot(label_store(storage)), catalogue=catalogue.id)


def fresh_table(catalogue: Catalogue, folder: str, scale: float = 10.0, run: str | None = None) -> LabelTable:
    """Make a table in which every row of the catalogue has the class it was given."""
    keys, classes = _keys(catalogue), _classes(catalogue)
    return LabelTable.create(Path(folder) / "table", classes, catalogue.class_names, keys, scale, run)


def _classes(catalogue: Catalogue) -> Iterator[npt.NDArray[np.int32]]:
    for table in catalogue.batches(["noisy_class"]):
        yield table["noisy_class"].fill_null(-1).to_numpy()


def _keys(catalogue: Catalogue) -> Iterator[pa.Array]:
    for table in catalogue.batches(["sample_key"]):
        yield table["sample_key"].combine_chunks()


# Every place in a storage that may hold a manifest of labels: folder, how deep below it, and the file's name.
PLACES: tuple[tuple[str, int | None, str], ...] = (
    ("labels/published", 1, ".json"),
    ("labels/held", 1, ".json"),
    ("runs", 2, "/labels.json"),
    ("nights", 2, "/carried.json"),
    ("checkpoints", None, "/labels.json"),
)


def sweep_run(storage: str, run: str) -> list[str]:
    """Remove the label parts of a run that no manifest in the storage names; return their names."""
    return sweep(label_store(storage), run, manifests_of(storage))


def manifests_of(storage: str) -> list[Manifest]:
    """Read every manifest of labels in a storage: published, held, of runs, of nights, of checkpoints."""
    filesystem, root = filesystem_of(storage.rstrip("/"))
    filesystem.invalidate_cache()
    found = ((path, filesystem.cat_file(path)) for path in _paths(filesystem, root))
    return [Manifest.decode(data, path) for path, data in found if _is_manifest(path, data)]


def _paths(filesystem: Any, root: str) -> Iterator[str]:
    for folder, depth, name in PLACES:
        yield from (path for path in filesystem.find(f"{root}/{folder}", depth) if path.endswith(name))


def _is_manifest(path: str, data: bytes) -> bool:
    try:
        found = json.loads(data)
    except ValueError as error:  # it may have been a manifest: what it named is not known
        raise PencilError(
            f"{path}: not an intact JSON file ({error}); nothing is swept until it is gone"
        ) from None
    return isinstance(found, dict) and found.get("kind") == KIND
