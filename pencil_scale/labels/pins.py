"""Pins: what people decided, kept for good. A pinned label never moves, and every run starts from it.

`<storage>/labels/pins/` holds the whole list as one Parquet file, named by its content, and `manifest.json`,
replaced last, that names the newest. The newest word on a row wins.

    add_pins(storage, table)                # row, sample_id, class, by, at, note
    pins = read_pins(storage)               # sorted by row
    apply_pins(label_table, pins)
"""

import hashlib
import io
import json

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pencil_scale.label_table import LabelTable
from pencil_scale.labels.part_files import TableDamagedError
from pencil_scale.labels.part_store import PartStore
from pencil_scale.schema import PencilError

PINS = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("class", pa.int32(), nullable=False),
        pa.field("by", pa.string()),
        pa.field("at", pa.string(), nullable=False),
        pa.field("note", pa.string()),
    ]
)
MANIFEST = "manifest.json"


class PinsError(PencilError):
    """A list of pins that cannot be read or used."""


def pins_folder(storage: str) -> str:
    """Where a storage keeps what people decided."""
    return f"{storage.rstrip('/')}/labels/pins"


def read_pins(storage: str) -> pa.Table:
    """Read the newest list, sorted by row; empty where nobody has decided anything."""
    store = PartStore(pins_folder(storage))
    name = newest_pins(storage)
    if name is None:
        return PINS.empty_table()
    data = store.get(name)
    if name != _name(data):
        raise PinsError(f"{store.path(name)}: damaged; restore it, or name an older file in {MANIFEST}")
    return pq.read_table(pa.BufferReader(data), schema=PINS)


def newest_pins(storage: str) -> str | None:
    """The file that holds the newest list; None where there is none."""
    store = PartStore(pins_folder(storage))
    try:
        return str(json.loads(store.get(MANIFEST))["pins"])
    except TableDamagedError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise PinsError(
            f"{store.path(MANIFEST)}: damaged ({error}); name the newest file there again"
        ) from error


def add_pins(storage: str, pins: pa.Table) -> pa.Table:
    """Lay newer words over the list and publish it; gives the whole list."""
    whole = pa.concat_tables([read_pins(storage), pins.select(PINS.names).cast(PINS)]).combine_chunks()
    rows = whole["row"].to_numpy()
    newest = len(rows) - 1 - np.unique(rows[::-1], return_index=True)[1]
    return _publish(storage, whole.take(pa.array(newest)).sort_by("row"))


def renumber_pins(storage: str, new_numbers: npt.NDArray[np.int32]) -> pa.Table:
    """Spell the list in another class list; what was pinned to a class that is gone is pinned no more."""
    pins = read_pins(storage)
    classes = new_numbers[pins["class"].to_numpy()]
    place = pins.schema.get_field_index("class")
    spelled = pins.set_column(place, PINS.field("class"), pa.array(classes, pa.int32()))
    return _publish(storage, spelled.filter(pa.array(classes >= 0)))


def _publish(storage: str, whole: pa.Table) -> pa.Table:
    sink = io.BytesIO()
    pq.write_table(whole, sink, compression="zstd")
    store, data = PartStore(pins_folder(storage)), sink.getvalue()
    store.put(_name(data), data)
    store.put(MANIFEST, json.dumps({"pins": _name(data), "num_pins": len(whole)}, indent=1).encode())
    return whole


def apply_pins(table: LabelTable, pins: pa.Table) -> int:
    """Pin the rows that a table, open for writing, has; gives how many."""
    rows, classes = rows_and_classes(pins)
    within = rows < table.layout.num_rows
    if within.any():
        table.pin(rows[within], classes[within])
    return int(within.sum())


def rows_and_classes(pins: pa.Table) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """The pinned rows, rising, and what each was pinned to."""
    return pins["row"].to_numpy(), pins["class"].to_numpy()


def _name(data: bytes) -> str:
    return f"pins-{hashlib.sha256(data).hexdigest()[:16]}.parquet"
