"""Whether the rows of a label table are the rows of a catalogue, by the keys of the samples themselves.

A catalogue that was deleted and indexed again may give a row number to another sample. Labels of the one
before would then repair the wrong samples.

    require_same_rows(manifest, catalogue)
"""

import numpy as np

from pencil_scale.catalogue import Catalogue
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.part_files import TableMismatchError
from pencil_scale.labels.pins import key_bytes
from pencil_scale.labels.snapshot import LABELS_FOLDER, get_parts


def require_same_rows(manifest: Manifest, catalogue: Catalogue) -> None:
    """Refuse labels of another catalogue, unless every row is the same sample in both.

    Rows are only ever appended to a catalogue, so its id vouches for them. Another id, of a catalogue that
    was deleted and indexed again, makes the keys of all rows be compared.
    """
    layout = manifest.layout
    if layout.num_rows > catalogue.num_rows:
        raise TableMismatchError(
            f"labels over {layout.num_rows:,} rows, {catalogue.folder} version {catalogue.version} has "
            f"{catalogue.num_rows:,}; use labels made over this catalogue"
        )
    if manifest.catalogue == catalogue.id:
        return
    parts = range(layout.num_parts)
    for part, batch in zip(parts, get_parts(manifest, parts, LABELS_FOLDER), strict=True):
        rows = layout.rows_of(part)
        found = key_bytes(batch.column("sample_key"))
        expected = key_bytes(catalogue.read(rows.start, rows.stop, ["sample_key"])["sample_key"])
        differs = (found != expected).any(axis=1) & found.any(axis=1)  # a table made without keys has zeros
        if differs.any():
            raise TableMismatchError(
                f"{catalogue.folder}: row {rows.start + int(np.argmax(differs)):,} is another sample than "
                "the one these labels were learned for; the catalogue was rebuilt since: train again under "
                "another run.name, or restore the catalogue"
            )
