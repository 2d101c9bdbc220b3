"""Writing shards: whole under their final name, or not there at all.

A shard is written beside its place and renamed last, so one that exists is finished and is never
written again. The bytes of a shard depend on its samples alone: no clock, no user, no machine.

    out = OutFolder("s3://lake/shards")
    result = write_shard(ShardPlan("train-000000.tar", piece, given, None), classes, "s3://lake/shards")
"""

import json
import os
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pencil_scale.images.inspect import format_of
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import filesystem_of, is_local
from pipelines.shard_making.shard_samples import IMAGE_SUFFIXES, Classes, Piece, RawSample

SUFFIX_OF = {"jpeg": "jpg", "tiff": "tif", "jpeg2000": "jp2"}

# Stores in which an object shows up only when all of it has arrived; elsewhere a rename does that.
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss"}


@dataclass(frozen=True)
class ShardPlan:
    """One shard to be written: where its images lie and what they are labelled."""

    name: str
    piece: Piece
    given_class: Classes
    true_class: Classes | None  # -1 where the truth is not known
    key_prefix: str = ""


@dataclass(frozen=True)
class ShardResult:
    """One shard as it was written."""

    name: str
    num_bytes: int
    num_unrecognised: int  # images whose first bytes announce no known format: copied all the same


class OutFolder:
    """A folder for shards: local, or any URL that fsspec can write to."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._filesystem, path = filesystem_of(url)
        self._path = path.rstrip("/")
        self._local = is_local(self._filesystem)

    def files(self) -> dict[str, int]:
        """List the files that are here, with their sizes; unfinished ones are not here."""
        self._filesystem.invalidate_cache()
        if not self._filesystem.exists(self._path):
            return {}
        entries = self._filesystem.ls(self._path, detail=True)
        found = {entry["name"].rstrip("/").rsplit("/", 1)[-1]: entry for entry in entries}
        return {
            name: int(entry["size"])
            for name, entry in found.items()
            if entry["type"] == "file" and not name.startswith(".")
        }

    def read_text(self, name: str) -> str:
        text: str = self._filesystem.cat_file(f"{self._path}/{name}").decode("utf-8")
        return text

    def write_text(self, name: str, text: str) -> None:
        with self.new_file(name) as file:
            file.write(text.encode("utf-8"))

    @contextmanager
    def new_file(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file that takes its name when the block ends well, and leaves nothing when it does not."""
        partial = f".{name}.{uuid.uuid4().hex}.partial"
        try:
            with self._place() as place:
                path = Path(place) / partial
                try:
                    with path.open("wb") as file:
                        yield file
                        file.flush()
                        os.fsync(file.fileno())
                    self._publish(path, name, partial)
                finally:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise PencilError(
                f"{self.url}/{name}: cannot be written ({error}); check space and access"
            ) from error

    def sweep(self, prefix: str) -> None:
        """Remove what killed writers of these shards left beside them."""
        if self._local:
            for path in Path(self._path).glob(f".{prefix}-*.partial"):
                path.unlink(missing_ok=True)

    @contextmanager
    def _place(self) -> Iterator[str]:
        """Give the folder to write in: this one, or one of this machine for what is sent elsewhere."""
        if self._local:
            Path(self._path).mkdir(parents=True, exist_ok=True)
            yield self._path
        else:
            with tempfile.TemporaryDirectory() as folder:
                yield folder

    def _publish(self, path: Path, name: str, partial: str) -> None:
        target = f"{self._path}/{name}"
        protocol = self._filesystem.protocol
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        if self._local:
            path.replace(target)
        elif protocols & OBJECT_STORES:
            self._filesystem.put_file(str(path), target)
        else:
            self._filesystem.makedirs(self._path, exist_ok=True)
            self._filesystem.put_file(str(path), f"{self._path}/{partial}")
            self._filesystem.mv(f"{self._path}/{partial}", target)


def write_shard(plan: ShardPlan, classes: Sequence[str], out: str) -> ShardResult:
    """Write one shard: each image bit for bit, its class number, and what is known about it as JSON."""
    from webdataset import TarWriter  # brings torch along, which the driver can do without

    num_unrecognised, truth = 0, plan.true_class
    with OutFolder(out).new_file(plan.name) as file:
        with TarWriter(file, encoder=False, mtime=0) as writer:
            place = -1
            for place, sample in enumerate(plan.piece.samples()):
                true = -1 if truth is None else int(truth[place])
                suffix, known = image_suffix(sample)
                about = describe(sample, classes, int(plan.given_class[place]), true)
                num_unrecognised += not known
                writer.write({"__key__": plan.key_prefix + sample.key, suffix: sample.image, **about})
        if place + 1 != len(plan.given_class):
            raise PencilError(
                f"shard {plan.name}: {place + 1:,} samples were found where {len(plan.given_class):,} were "
                "counted before; the source changes while it is read: run again when it stands still"
            )
        num_bytes = file.tell()
    return ShardResult(plan.name, num_bytes, num_unrecognised)


def describe(sample: RawSample, classes: Sequence[str], given: int, true: int) -> dict[str, bytes]:
    """Make the members beside the image: `cls` in WebDataset's convention, `json` with the rest."""
    about: dict[str, Any] = {"label": classes[given], "source": sample.source, "index": sample.row}
    if true >= 0:
        about |= {"true_class": true, "true_label": classes[true]}
    return {"cls": str(given).encode(), "json": json.dumps(about, sort_keys=True).encode()}


def image_suffix(sample: RawSample) -> tuple[str, bool]:
    """Name the image member by what the bytes are; where they are nothing known, by the file's own name."""
    kind = format_of(sample.image)
    if kind != "unknown":
        return SUFFIX_OF.get(kind, kind), True
    suffix = Path(sample.source).suffix.lower()
    return suffix[1:] if suffix in IMAGE_SUFFIXES else "jpg", False
