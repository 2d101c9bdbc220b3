"""Writing shards: a shard is complete under its final name, or absent.

A shard is written under a temporary name and renamed last, so a shard that exists is finished and is never
written again. Its bytes depend only on its samples: not on the clock, the user or the machine.

    result = write_shard(ShardPlan("train-000000.tar", piece, given, None), classes, "s3://lake/shards")
"""

import json
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pencil_scale.images.inspect import format_of
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import BESIDE, written_beside
from pencil_scale.storage.urls import filesystem_of, is_local, store_errors
from pipelines.shard_making.samples import IMAGE_SUFFIXES, Classes, Piece, RawSample

SUFFIX_OF = {"jpeg": "jpg", "tiff": "tif", "jpeg2000": "jp2"}

# Stores in which an object appears only when it is complete; elsewhere a rename does that.
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss"}


@dataclass(frozen=True)
class ShardPlan:
    """One shard to write: where its images are, and their labels."""

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
    num_unrecognised: int  # images of an unknown format, which are copied all the same


def file_sizes(folder: str) -> dict[str, int]:
    """List the finished files of a folder, with their sizes."""
    filesystem, root = filesystem_of(folder.rstrip("/"))
    filesystem.invalidate_cache()
    if not filesystem.exists(root):
        return {}
    files = [entry for entry in filesystem.ls(root, detail=True) if entry["type"] == "file"]
    sizes = {entry["name"].rpartition("/")[2]: int(entry["size"]) for entry in files}
    return {name: size for name, size in sizes.items() if not name.startswith(".") and BESIDE not in name}


@contextmanager
def new_file(folder: str, name: str) -> Iterator[IO[bytes]]:
    """Open a file that gets its name when the block succeeds; if it fails, nothing is left behind."""
    filesystem, root = filesystem_of(folder.rstrip("/"))
    if is_local(filesystem):
        with written_beside(Path(root) / name, durable=True) as beside, beside.open("wb") as file:
            yield file
        return
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / name
        with path.open("wb") as file:
            yield file
        protocol, target = filesystem.protocol, f"{root}/{name}"
        with store_errors(f"{folder}/{name}: cannot be written"):
            if OBJECT_STORES & ({protocol} if isinstance(protocol, str) else set(protocol)):
                filesystem.put_file(str(path), target)
                return
            filesystem.makedirs(root, exist_ok=True)
            unfinished = f"{target}.{uuid.uuid4().hex}{BESIDE}"
            filesystem.put_file(str(path), unfinished)
            filesystem.mv(unfinished, target)


def write_shard(plan: ShardPlan, classes: Sequence[str], out: str) -> ShardResult:
    """Write one shard: each image bit for bit, its class number, and what is known about it as JSON."""
    from webdataset import TarWriter  # imports torch, which the main process does not need

    num_samples = num_unrecognised = 0
    with new_file(out, plan.name) as file:
        with TarWriter(file, encoder=False, mtime=0) as writer:
            for num_samples, sample in enumerate(plan.piece.samples(), start=1):
                true = -1 if plan.true_class is None else int(plan.true_class[num_samples - 1])
                suffix, is_known = image_suffix(sample)
                about = describe(sample, classes, int(plan.given_class[num_samples - 1]), true)
                num_unrecognised += not is_known
                writer.write({"__key__": plan.key_prefix + sample.key, suffix: sample.image, **about})
        if num_samples != len(plan.given_class):
            raise PencilError(
                f"shard {plan.name}: {num_samples:,} samples were found, {len(plan.given_class):,} were "
                "expected; the source changed while it was read: run again when it no longer changes"
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
    """Name the image member by its format; if the bytes are of no known format, by the file's name."""
    kind = format_of(sample.image)
    if kind != "unknown":
        return SUFFIX_OF.get(kind, kind), True
    suffix = Path(sample.source).suffix.lower()
    return suffix[1:] if suffix in IMAGE_SUFFIXES else "jpg", False
