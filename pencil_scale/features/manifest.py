"""Feature parts: the output of a frozen network for every catalogue row, as immutable files and a manifest.

Parts are Arrow files named by the hash of their content, in `<storage>/features/KEY/`; the key is a hash of
what made the features, so features of other weights or other pixels are never mixed. The manifest is written
last. A row without features is all zeros, and its state says why.

    manifest = FeatureManifest.load(storage, key)
    manifest.made_by["backbone"], manifest.views, manifest.dimension
    columns = manifest.part(storage, 3)           # row, content_key, state and features of its rows
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.config.command import command, program
from pencil_scale.labels.columns import Parts, fixed_list, part_rows, to_batch, to_columns
from pencil_scale.labels.manifest import StoredFile, file_name, get_batch, put_batch
from pencil_scale.storage.errors import DamagedError, PencilError, many
from pencil_scale.storage.storage import Storage

KIND = "pencil_scale features"
VERSION = 1
FOLDER = "features"
MANIFEST, UNFINISHED, LEASE = "manifest.json", "unfinished.json", "lease"
NARROW_BYTES = 8 + 16 + 1  # row, content_key, state
# The state of a row: no features (it has no image, is excluded, or has vanished), features, or an image that
# cannot be decoded.
ABSENT, READY, UNREADABLE = range(3)
VECTORS = "vectors"  # of what made imported features: a hash of them, which their key leaves out
Columns = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class FeaturePart:
    """The file of one part."""

    file: StoredFile
    inputs: str  # hash of which rows should have features, and of their images
    num_ready: int
    num_unreadable: int


@dataclass(frozen=True)
class FeatureManifest:
    """The features that one network, or one import, gave the rows of a catalogue."""

    made_by: Mapping[str, Any]
    views: int  # vectors per row
    dimension: int  # numbers per vector
    catalogue: str  # id of the catalogue
    num_rows: int
    parts: Mapping[int, FeaturePart] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A hash of what made the features: it names their folder."""
        made_by = {**self.made_by, "views": self.views, "dimension": self.dimension}
        made_by.pop(VECTORS, None)
        return hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def width(self) -> int:
        """How many numbers a row has."""
        return self.views * self.dimension

    @property
    def layout(self) -> Parts:
        """Which rows are in which part; the same as of labels, unless such parts would be too large."""
        return Parts(self.num_rows, part_rows(NARROW_BYTES + 2 * self.width))

    @property
    def counts(self) -> dict[str, int]:
        """Count the rows by state."""
        ready = sum(part.num_ready for part in self.parts.values())
        unreadable = sum(part.num_unreadable for part in self.parts.values())
        absent = self.num_rows - ready - unreadable
        return {"ready": ready, "unreadable": unreadable, "absent": absent}

    # -- parts --------------------------------------------------------------------------------------

    @property
    def schema(self) -> pa.Schema:
        """The columns of a part."""
        columns = [("row", pa.int64()), ("content_key", pa.binary(16)), ("state", pa.uint8())]
        columns += [("features", fixed_list(pa.float16(), self.width))]
        return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])

    def empty_part(self, part: int) -> Columns:
        """The columns of a part without features."""
        rows = np.array(self.layout.rows_of(part), np.int64)
        return {
            "row": rows,
            "content_key": np.zeros((len(rows), 16), np.uint8),
            "state": np.zeros(len(rows), np.uint8),
            "features": np.zeros((len(rows), self.width), np.float16),
        }

    def put_part(self, storage: Storage, columns: Columns, inputs: str = "") -> FeaturePart:
        """Write a part, unless the same one is stored already."""
        bad = ~np.isfinite(columns["features"]).all(1)
        if bad.any():
            raise PencilError(
                f"features of {many(int(bad.sum()), 'row')}, such as row {columns['row'][bad][0]:,}, "
                "are not finite as float16, whose largest number is 65,504; scale them, or check the weights"
            )
        file = put_batch(storage, FOLDER, to_batch(self.schema, columns), self.key)
        states = np.bincount(columns["state"], minlength=3)
        return FeaturePart(file, inputs, int(states[READY]), int(states[UNREADABLE]))

    def part(self, storage: Storage, part: int) -> Columns:
        """Read a part, and refuse one that is damaged."""
        file, num_rows = self.parts[part].file, len(self.layout.rows_of(part))
        batch = get_batch(storage, FOLDER, file)
        if not batch.schema.equals(self.schema) or batch.num_rows != num_rows:
            raise DamagedError(
                f"{storage.path(file_name(FOLDER, file))}: {batch.num_rows:,} rows of "
                f"{batch.schema.types[-1]}; the manifest names {num_rows:,} of {self.width} numbers: remove "
                f"the folder, and run `{program('pipelines.extract_features')}` again"
            )
        return to_columns(batch)

    # -- files --------------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """As JSON."""
        parts = {number: asdict(part) for number, part in sorted(self.parts.items())}
        head = {"kind": KIND, "version": VERSION, "key": self.key}
        return json.dumps(head | vars(self) | {"parts": parts}, indent=1).encode()

    @property
    def digest(self) -> str:
        """A hash of these features, which differs as soon as one of them does."""
        found = json.dumps(json.loads(self.encode()), sort_keys=True)
        return hashlib.sha256(found.encode()).hexdigest()[:32]

    @classmethod
    def find(cls, storage: Storage, key: str, file: str = MANIFEST) -> "FeatureManifest | None":
        """Read the manifest of a folder of features; None if there is none."""
        name = storage.features(key, file)
        found = storage.read_json(name)
        if found is None:
            return None
        if not isinstance(found, dict) or found.pop("kind", None) != KIND:
            raise PencilError(
                f"{storage.path(name)}: JSON, but not a manifest of features; check the address"
            )
        version = found.pop("version")
        if version != VERSION:
            raise PencilError(
                f"{storage.path(name)}: a manifest of version {version}; this program reads version "
                f"{VERSION}: use the program that wrote it"
            )
        if found.pop("key") != key:
            raise PencilError(
                f"{storage.path(name)}: of another key: the folder was renamed, or the file edited; "
                f"remove the folder, and run `{program('pipelines.extract_features')}` again"
            )
        found["parts"] = {
            int(number): FeaturePart(**{**part, "file": StoredFile(**part["file"])})
            for number, part in found["parts"].items()
        }
        return cls(**found)

    @property
    def about(self) -> str:
        """What made the features, in a few words."""
        if "imported" in self.made_by:
            return f"{self.made_by['imported']} ({self.views} x {self.dimension:,})"
        side = self.made_by.get("images", {}).get("crop")
        return f"{self.made_by['backbone']} ({self.views} x {self.dimension:,}, images of {side} pixels)"

    @classmethod
    def choose(cls, storage: Storage, name: str | None) -> "FeatureManifest":
        """Find features by their key, or by the name they were imported under; None: the only ones."""
        keys = [path.rpartition("/")[2] for path in storage.names(FOLDER)]
        known = [found for key in keys if (found := cls.find(storage, key)) is not None]
        wanted = [one for one in known if name in (None, one.key, one.made_by.get("imported"))]
        if len(wanted) != 1:
            listed = ", ".join(f"{one.key} by {one.about}" for one in known) or "none"
            raise PencilError(
                f"features.name: {name or 'not set'}; {storage.path(FOLDER)} has {listed}: give the key of "
                "one of them, or the name of an import"
            )
        return wanted[0]

    @classmethod
    def load(cls, storage: Storage, key: str) -> "FeatureManifest":
        """Read a manifest that must be there, and complete."""
        found = cls.find(storage, key)
        if found is None:
            raise PencilError(
                f"{storage.path(storage.features(key))}: no features; run "
                f"`{command('pipelines.extract_features')}` first"
            )
        return found
