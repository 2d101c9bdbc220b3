"""Thumbnails: small pictures of samples, as data URLs that a page can hold.

shown = make_thumbnails(catalogue, rows, side=112)          # rows rising; {row: "data:image/webp;base64,..."}
shown.pictures, shown.problems                              # what could not be shown, and why
"""

import base64
import io
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from PIL import Image

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.ranges import RangeReader
from pencil_scale.catalogue.schema import CHUNK_ROWS
from pencil_scale.images.decode import UndecodableError, decode
from pencil_scale.storage.errors import PencilError

PLACES = ["row", "shard", "image_offset", "image_bytes"]
AT_ONCE = 64
SMALL = 48  # pixels a side: of so few none is lost
QUALITY = 62


@dataclass
class Thumbnails:
    """Pictures by row, and by row why there is none."""

    pictures: dict[int, str] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)


def make_thumbnails(catalogue: Catalogue, rows: npt.NDArray[np.int64], side: int) -> Thumbnails:
    """Make thumbnails of rows, given rising; one bad picture, or one changed shard, costs no other."""
    found = Thumbnails()
    places = places_of(catalogue, rows)
    for first in range(0, len(places), AT_ONCE):
        _add(found, catalogue, places.slice(first, AT_ONCE), side)
    return found


def thumbnail(data: bytes, side: int) -> tuple[str, bytes]:
    """Make a picture no larger than `side`; gives its kind, "png" or "webp", and its bytes."""
    picture = Image.fromarray(decode(data))
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    sink = io.BytesIO()
    kind = "png" if max(picture.size) <= SMALL else "webp"
    picture.save(sink, kind, **({"optimize": True} if kind == "png" else {"quality": QUALITY, "method": 4}))
    return kind, sink.getvalue()


def places_of(catalogue: Catalogue, rows: npt.NDArray[np.int64]) -> pa.Table:
    """Look up where the images of rows, given rising, lie."""
    found = []
    for chunk in np.unique(rows // CHUNK_ROWS).tolist():
        first = chunk * CHUNK_ROWS
        here = rows[slice(*np.searchsorted(rows, [first, first + CHUNK_ROWS]))]
        table = catalogue.read(first, min(first + CHUNK_ROWS, catalogue.num_rows), PLACES)
        found.append(table.take(pa.array(here - first)))
    return pa.concat_tables(found) if found else catalogue.read(0, 0, PLACES)


def read_images(catalogue: Catalogue, places: pa.Table) -> list[bytes]:
    """Read the bytes of images."""
    columns = [places[name].to_numpy() for name in PLACES[1:]]
    return RangeReader(catalogue.shards).read(*columns)


def _add(found: Thumbnails, catalogue: Catalogue, places: pa.Table, side: int) -> None:
    try:
        images = read_images(catalogue, places)
    except PencilError as error:
        if len(places) == 1:
            found.problems[places["row"][0].as_py()] = str(error)
            return
        half = len(places) // 2  # look for the shard that is at fault
        _add(found, catalogue, places.slice(0, half), side)
        _add(found, catalogue, places.slice(half), side)
        return
    for row, data in zip(places["row"].to_pylist(), images, strict=True):
        try:
            kind, small = thumbnail(data, side)
            found.pictures[row] = f"data:image/{kind};base64,{base64.b64encode(small).decode()}"
        except UndecodableError as error:
            found.problems[row] = str(error)
