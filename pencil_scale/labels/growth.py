"""Growth: a published table gains the rows that the catalogue gained, and no old file is touched.

Rows are never renumbered, so new rows only follow old ones. The last part, if it was short, gains a piece of
its own; further rows make further parts. When there would be more than 4,096 parts, two old parts become one
of twice the size, which names the files of both. Files are joined only when a part moves and is snapshot.

    manifest = grow(Manifest.load(url), noisy_class_of_the_new_rows, their_sample_keys)
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from pencil_scale.labels.manifest import Manifest, PartEntry, Piece
from pencil_scale.labels.part_files import Header, Layout, grown_layout
from pencil_scale.labels.snapshot import LABELS_FOLDER, LEDGER_FOLDER, put_piece
from pencil_scale.labels.working_copy import (
    ClassSource,
    KeySource,
    class_column,
    key_column,
    new_marks,
    new_rows,
)
from pencil_scale.storage.folder import Folder

NO_PIECES = PartEntry((), ())


def grow(manifest: Manifest, noisy_class: ClassSource, sample_keys: KeySource | None = None) -> Manifest:
    """Put the new rows into the manifest's store, and name them after the old ones in a new manifest."""
    manifest.require_whole()
    old = manifest.layout
    with tempfile.TemporaryDirectory() as spool:
        classes = class_column(noisy_class, old.num_classes, Path(spool), first_row=old.num_rows)
        keys = key_column(sample_keys, len(classes), Path(spool))
        layout = grown_layout(old, old.num_rows + len(classes))
        parts_held = tuple(range(layout.num_parts))
        identity = manifest.class_names, manifest.run
        header = Header(layout, parts_held, manifest.first_epoch, manifest.scale, *identity)
        parts = _join_parts(manifest, layout)
        store = Folder(manifest.store)
        for part in range(old.num_rows // layout.part_rows, layout.num_parts):
            rows = range(max(layout.rows_of(part).start, old.num_rows), layout.rows_of(part).stop)
            here = slice(rows.start - old.num_rows, rows.stop - old.num_rows)
            batch = new_rows(rows, classes[here], None if keys is None else keys[here], header)
            labels = put_piece(store, LABELS_FOLDER, batch, manifest.run)
            ledger = put_piece(store, LEDGER_FOLDER, new_marks(len(rows)), manifest.run)
            parts[part] = _append(parts.get(part, NO_PIECES), labels, ledger)
    return replace(manifest, layout=layout, parts=parts)


def _append(entry: PartEntry, labels: Piece, ledger: Piece) -> PartEntry:
    return PartEntry((*entry.labels, labels), (*entry.ledger, ledger))


def _join_parts(manifest: Manifest, layout: Layout) -> dict[int, PartEntry]:
    """The old parts under the numbers they have in the new layout."""
    factor = layout.part_rows // manifest.layout.part_rows
    joined: dict[int, PartEntry] = {}
    for part, entry in sorted(manifest.parts.items()):
        before = joined.get(part // factor, NO_PIECES)
        joined[part // factor] = PartEntry(before.labels + entry.labels, before.ledger + entry.ledger)
    return joined
