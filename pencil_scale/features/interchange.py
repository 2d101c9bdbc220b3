"""Interchange: vectors by sample id, in and out, as Parquet or as a .npy file with a file of ids.

found = read_vectors("clip.parquet", None, "features")     # some thousand ids and vectors at a time
found = read_vectors("clip.npy", "ids.txt", "features")    # one id per line, in the order of the vectors
write_vectors("out.parquet", None, num_samples, width, found)
"""

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.parquet as pq

from pencil_scale.catalogue.class_names import read_lines
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import written_beside
from pencil_scale.storage.urls import filesystem_of, is_local, open_url, store_errors

BATCH_ROWS = 8192
NPY = ".npy"


class Vectors(NamedTuple):
    """Some samples and their vectors."""

    sample_ids: list[str]
    features: npt.NDArray[Any]  # [samples, numbers]


# --- in ----------------------------------------------------------------------------------------------


def read_vectors(file: str, ids: str | None, column: str) -> Iterator[Vectors]:
    """Read a file of vectors, some thousand at a time; vectors that are not finite or differ are refused."""
    if file.endswith(NPY) == (ids is None):
        raise PencilError(
            f"features.ids: {ids or 'not set'}, for {file}; a .npy file needs a file with one sample id per "
            "line, and Parquet has the ids in its column sample_id"
        )
    filesystem, path = filesystem_of(file)
    if not filesystem.exists(path):
        raise PencilError(
            f"features.file: {file}: no such file (a relative path starts at the current folder)"
        )
    batches = _from_parquet(file, column) if ids is None else _from_npy(file, ids)
    dimension = None
    for names, vectors in batches:
        dimension = dimension or vectors.shape[1]
        if vectors.shape[1] != dimension:
            raise PencilError(
                f"{file}: vectors of {vectors.shape[1]} numbers, such as that of {names[0]!r}, among vectors "
                f"of {dimension}; all must have the same length"
            )
        bad = ~np.isfinite(vectors).all(1)
        if bad.any():
            raise PencilError(
                f"{file}: the vector of {names[int(bad.argmax())]!r} has numbers that are not finite; "
                "remove such samples"
            )
        yield Vectors(names, vectors)


def _from_parquet(file: str, column: str) -> Iterator[Vectors]:
    filesystem, path = filesystem_of(file)
    try:
        with store_errors(f"{file} cannot be read"):
            data = pyarrow.dataset.dataset(path, format="parquet", filesystem=filesystem)
            for name in ("sample_id", column):
                if name not in data.schema.names:
                    raise PencilError(
                        f"{file}: no column {name}; it has {', '.join(data.schema.names)}: name the "
                        "column of the vectors in features.column"
                    )
            for batch in data.to_batches(columns=["sample_id", column], batch_size=BATCH_ROWS):
                if len(batch):
                    yield _vectors(batch, file, column)
    except pa.ArrowInvalid as error:
        raise PencilError(f"{file}: not a Parquet file: {' '.join(str(error).split())}") from error


def _vectors(batch: pa.RecordBatch, file: str, column: str) -> Vectors:
    """View a column of lists as an array; all lists must have the length of the first."""
    names, lists = batch["sample_id"].to_pylist(), batch[column]
    kind = lists.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not (pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)):
        raise PencilError(f"{file}: column {column} holds {kind}; lists of numbers were expected")
    if lists.null_count or lists.flatten().null_count or None in names:
        raise PencilError(f"{file}: {column} or sample_id has nulls; remove these samples")
    lengths = pc.list_value_length(lists).to_numpy()
    odd = np.flatnonzero(lengths != lengths[0])
    if len(odd) or not lengths[0]:
        number = int(odd[0]) if len(odd) else 0
        raise PencilError(
            f"{file}: the vector of {names[number]!r} has {lengths[number]} numbers, that of {names[0]!r} "
            f"{lengths[0]}; all must have the same length"
        )
    return Vectors(list(map(str, names)), lists.flatten().to_numpy().reshape(len(names), -1))


def _from_npy(file: str, ids: str) -> Iterator[Vectors]:
    names = read_lines(ids, "features.ids", "surrogateescape")
    with ExitStack() as stack:
        path = stack.enter_context(_local_copy(file))
        try:
            vectors = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise PencilError(f"{file}: not a .npy file of numbers: {error}") from error
        if vectors.ndim != 2 or vectors.dtype.kind not in "fiu" or not vectors.shape[1]:
            raise PencilError(
                f"{file}: {vectors.dtype} of shape {vectors.shape}; numbers of shape [samples, dimension] "
                "were expected"
            )
        if len(names) != len(vectors):
            raise PencilError(
                f"{ids}: {len(names):,} ids for the {len(vectors):,} vectors of {file}; one per line was "
                "expected, in the order of the vectors"
            )
        for first in range(0, len(names), BATCH_ROWS):
            yield Vectors(names[first : first + BATCH_ROWS], np.asarray(vectors[first : first + BATCH_ROWS]))


@contextmanager
def _local_copy(url: str) -> Iterator[Path]:
    """Give a path that can be mapped."""
    filesystem, path = filesystem_of(url)
    with store_errors(f"{url} cannot be read"), tempfile.TemporaryDirectory() as folder:
        if is_local(filesystem):
            yield Path(path)
            return
        copy = Path(folder, "vectors.npy")
        with open_url(url) as source, copy.open("wb") as sink:
            shutil.copyfileobj(source, sink)
        yield copy


# --- out ---------------------------------------------------------------------------------------------


def write_vectors(
    file: str, ids: str | None, num_samples: int, width: int, batches: Iterable[Vectors]
) -> None:
    """Write vectors as float32 in Parquet, or as float16 in a .npy file beside a file of ids."""
    if not file.endswith(NPY):
        fields = [("sample_id", pa.string()), ("features", pa.list_(pa.float32(), width))]
        with _sink(file) as sink, pq.ParquetWriter(sink, pa.schema(fields), compression="zstd") as writer:
            for names, vectors in batches:
                values = pa.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
                lists = pa.FixedSizeListArray.from_arrays(values, width)
                writer.write_table(pa.table([pa.array(names, pa.string()), lists], schema=writer.schema))
        return
    with _sink(ids or ids_beside(file)) as lines, _sink(file) as sink:
        header = {"descr": "<f2", "fortran_order": False, "shape": (num_samples, width)}
        np.lib.format.write_array_header_1_0(sink, header)
        for names, vectors in batches:
            if odd := [name for name in names if len(name.splitlines()) != 1]:
                raise PencilError(
                    f"{file}: the id {odd[0]!r} does not fit on one line of a file of ids; export to Parquet"
                )
            sink.write(np.ascontiguousarray(vectors, np.float16).data)
            lines.write("".join(f"{name}\n" for name in names).encode())


def ids_beside(file: str) -> str:
    """Where the ids of a .npy file are written unless the config says so."""
    return f"{file.removesuffix(NPY)}.ids.txt"


@contextmanager
def _sink(url: str) -> Iterator[IO[bytes]]:
    """Open a file for writing that appears when it is complete."""
    filesystem, path = filesystem_of(url)
    try:
        with store_errors(f"{url} cannot be written"), ExitStack() as stack:
            if is_local(filesystem):
                beside = stack.enter_context(written_beside(Path(path), durable=True))
                yield stack.enter_context(beside.open("wb"))
            else:
                yield stack.enter_context(open_url(url, "wb"))
    except FileNotFoundError as error:
        raise PencilError(f"{url} cannot be written: {error}; check the folder") from error
