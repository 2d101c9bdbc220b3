"""Whether the rows of a label table are the rows of a catalogue, by the keys of the samples themselves.

A catalogue that was deleted and indexed again may give a row number to another sample. Labels of the one
before would then repair the wrong samples.

    require_same_rows(manifest, catalogue)
"""

import numpy as np

from pencil_scale.catalogue import Catalogue
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.part_files import TableMismatchError
from pencil_scale.labels.part_store import PartStore
from pencil_scale.labels.pins import key_bytes
from pencil_scale.labels.snapshot import LABELS_FOLDER, get_part


def require_same_rows(manifest: Manifest, catalogue: Catalogue) -> None:
    """Compare the keys of the first and the last part: rows are only ever appended."""
    layout = manifest.layout
    if layout.num_rows > catalogue.num_rows:
        raise TableMismatchError(
            f"labels over {layout.num_rows:,} rows, {catalogue.folder} version {catalogue.version} has "
            f"{catalogue.num_rows:,}; use labels made over this catalogue"
        )
    for part in sorted({0, layout.num_parts - 1} if layout.num_rows else ()):
        rows = layout.rows_of(part)
        batch = get_part(manifest, PartStore(manifest.store), part, LABELS_FOLDER)
        found = key_bytes(batch.column("sample_key"))
        expected = key_bytes(catalogue.read(rows.start, rows.stop, ["sample_key"])["sample_key"])
        differs = (found != expected).any(axis=1) & found.any(axis=1)  # a table made without keys has zeros
        if differs.any():
            raise TableMismatchError(
                f"{catalogue.folder}: row {rows.start + int(np.argmax(differs)):,} is another sample than "
                "the one these labels were learned for; the catalogue was rebuilt since: train again under "
                "another run.name, or restore the catalogue"
            )
