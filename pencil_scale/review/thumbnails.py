"""Thumbnails: small pictures of samples.

found = make_thumbnails(catalogue, rows, side=224)          # rows in ascending order
found.pictures, found.problems                              # by row: kind and bytes, or why there is none
"""

import io
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.ranges import IMAGE_COLUMNS, read_images
from pencil_scale.catalogue.schema import CHUNK_ROWS
from pencil_scale.images.decode import UndecodableError, decode
from pencil_scale.storage.errors import PencilError

BATCH = 64
SMALL = 64  # pixels per side, up to which a picture is stored without loss
QUALITY = 75


@dataclass
class Thumbnails:
    """Pictures by row, as ("png" or "webp", bytes), and the reason by row if there is none."""

    pictures: dict[int, tuple[str, bytes]] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)
    largest_px: int = 0  # the longer side of the largest picture


def make_thumbnails(catalogue: Catalogue, rows: npt.NDArray[np.int64], side: int) -> Thumbnails:
    """Make thumbnails of rows in ascending order; a bad picture or a changed shard affects no other."""
    found, columns = Thumbnails(), ["row", *IMAGE_COLUMNS]
    for chunk in np.unique(rows // CHUNK_ROWS).tolist():
        first = chunk * CHUNK_ROWS
        here = rows[slice(*np.searchsorted(rows, [first, first + CHUNK_ROWS]))]
        table = catalogue.read(first, min(first + CHUNK_ROWS, catalogue.num_rows), columns)
        table = table.take(pa.array(here - first))
        for shard in table["shard"].unique():
            of_shard = table.filter(pc.equal(table["shard"], shard))
            for start in range(0, len(of_shard), BATCH):
                _add(found, catalogue, of_shard.slice(start, BATCH), side)
    return found


def _add(found: Thumbnails, catalogue: Catalogue, some: pa.Table, side: int) -> None:
    rows = some["row"].to_pylist()
    try:
        images = read_images(catalogue, some)
    except PencilError as error:
        found.problems |= dict.fromkeys(rows, str(error))
        return
    for row, data in zip(rows, images, strict=True):
        try:
            picture = Image.fromarray(decode(data))
        except UndecodableError as error:
            found.problems[row] = str(error)
            continue
        picture.thumbnail((side, side), Image.Resampling.LANCZOS)  # never larger than it is
        found.largest_px = max(found.largest_px, *picture.size)
        kind = "png" if max(picture.size) <= SMALL else "webp"
        options = {"optimize": True} if kind == "png" else {"quality": QUALITY, "method": 2}
        sink = io.BytesIO()
        picture.save(sink, kind, **options)
        found.pictures[row] = kind, sink.getvalue()
