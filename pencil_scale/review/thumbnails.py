"""Thumbnails: small pictures of samples, as data URLs that a page can contain.

found = make_thumbnails(catalogue, rows, side=112)          # rows in ascending order
found.pictures, found.problems                              # by row: a data URL, or why there is none
"""

import base64
import io
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from PIL import Image

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.schema import CHUNK_ROWS
from pencil_scale.export.rows import IMAGE_COLUMNS, read_images
from pencil_scale.images.decode import UndecodableError, decode
from pencil_scale.storage.errors import PencilError

BATCH = 64
SMALL = 48  # pixels per side, up to which a picture is stored without loss
QUALITY = 62


@dataclass
class Thumbnails:
    """Pictures by row, and the reason by row if there is none."""

    pictures: dict[int, str] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)


def make_thumbnails(catalogue: Catalogue, rows: npt.NDArray[np.int64], side: int) -> Thumbnails:
    """Make thumbnails of rows in ascending order; a bad picture or a changed shard affects no other."""
    found, columns = Thumbnails(), ["row", *IMAGE_COLUMNS]
    for chunk in np.unique(rows // CHUNK_ROWS).tolist():
        first = chunk * CHUNK_ROWS
        here = rows[slice(*np.searchsorted(rows, [first, first + CHUNK_ROWS]))]
        table = catalogue.read(first, min(first + CHUNK_ROWS, catalogue.num_rows), columns)
        places = table.take(pa.array(here - first))
        for start in range(0, len(places), BATCH):
            _add(found, catalogue, places.slice(start, BATCH), side)
    return found


def thumbnail(data: bytes, side: int) -> tuple[str, bytes]:
    """Make a picture no larger than `side`; return its kind, "png" or "webp", and its bytes."""
    picture = Image.fromarray(decode(data))
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    sink = io.BytesIO()
    kind = "png" if max(picture.size) <= SMALL else "webp"
    picture.save(sink, kind, **({"optimize": True} if kind == "png" else {"quality": QUALITY, "method": 4}))
    return kind, sink.getvalue()


def _add(found: Thumbnails, catalogue: Catalogue, places: pa.Table, side: int) -> None:
    try:
        images = read_images(catalogue, places)
    except PencilError as error:
        if len(places) == 1:
            found.problems[places["row"][0].as_py()] = str(error)
            return
        half = len(places) // 2  # find the shard that causes the error
        _add(found, catalogue, places.slice(0, half), side)
        _add(found, catalogue, places.slice(half), side)
        return
    for row, data in zip(places["row"].to_pylist(), images, strict=True):
        try:
            kind, small = thumbnail(data, side)
            found.pictures[row] = f"data:image/{kind};base64,{base64.b64encode(small).decode()}"
        except UndecodableError as error:
            found.problems[row] = str(error)
