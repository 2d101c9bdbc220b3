"""Feature table: the features of every catalogue row, memory-mapped, float16.

The parts of a manifest are copied to one file on local disk, and their hashes are checked on the way. Row
numbers are those of the catalogue, so a range of rows is a view of the mapped file.

    table = FeatureTable.open(storage, key, folder)
    table.read(range(0, 4096))              # float16 [4096, views, dimension], not copied
    table.take(rows)                        # any rows, copied
    table.state[rows]                       # READY, ABSENT or UNREADABLE; rows that are not READY are zeros
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.features.manifest import ABSENT, Columns, FeatureManifest
from pencil_scale.labels.columns import key_bytes
from pencil_scale.labels.manifest import ahead
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import written_beside
from pencil_scale.storage.storage import Storage

FILE = "features.npy"


class FeatureTable:
    """All features of a manifest, in a mapped file that is never changed."""

    def __init__(self, manifest: FeatureManifest, file: Path, state: npt.NDArray[np.uint8]) -> None:
        """Map a local copy; use `open`."""
        self.manifest, self.state = manifest, state
        self.features: npt.NDArray[np.float16] = np.load(file, mmap_mode="r", allow_pickle=False)
        self._rows = np.asarray(self.features).reshape(len(self.features), -1)

    @classmethod
    def open(
        cls, storage: Storage, key: str, folder: Path, catalogue: Catalogue | None = None
    ) -> "FeatureTable":
        """Copy the features to `features.npy` in a local folder, and map them.

        With a catalogue, rows whose images have changed since count as rows without features.
        """
        manifest = FeatureManifest.load(storage, key)
        shape, states = (manifest.num_rows, manifest.views, manifest.dimension), [np.zeros(0, np.uint8)]
        parts = range(manifest.layout.num_parts)
        # Every block is written, so a full disk fails here and not when a page of a hole is read.
        with written_beside(folder / FILE, durable=False) as beside, beside.open("wb") as sink:
            header = {"descr": "<f2", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(sink, header)
            for columns in ahead(lambda part: manifest.part(storage, part), parts):
                sink.write(columns["features"].data)
                states.append(columns["state"] if catalogue is None else _fitting(columns, catalogue))
        return cls(manifest, folder / FILE, np.concatenate(states))

    def take(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float16]:
        """Copy the features of some rows, in their order: [rows, views, dimension]."""
        # One block of memory per row, which NumPy copies at once.
        found: npt.NDArray[np.float16] = np.take(self._rows, rows, axis=0)
        return found.reshape(len(rows), *self.features.shape[1:])

    def read(self, rows: range) -> npt.NDArray[np.float16]:
        """View the features of consecutive rows: [rows, views, dimension]."""
        if rows.step != 1 or not 0 <= rows.start <= rows.stop <= len(self.features):
            raise PencilError(f"{rows} is not within the table's {len(self.features):,} rows")
        return self.features[rows.start : rows.stop]


def _fitting(columns: Columns, catalogue: Catalogue) -> npt.NDArray[np.uint8]:
    """The states of the rows of a part, ABSENT where the catalogue has another image."""
    first, stop = int(columns["row"][0]), int(columns["row"][-1]) + 1
    table = catalogue.read(first, min(stop, catalogue.num_rows), ["content_key"])
    keys = np.zeros((stop - first, 16), np.uint8)
    keys[: len(table)] = key_bytes(table["content_key"].fill_null(bytes(16)))
    same = (columns["content_key"] == keys).all(1) | ~keys.any(1)
    return np.where(same, columns["state"], np.uint8(ABSENT))
