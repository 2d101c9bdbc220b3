"""Takedown: samples that were excluded or have vanished lose their features, under every key.

num_rows = forget_gone(storage, catalogue, excluded)    # rows that became zeros
"""

from dataclasses import replace

import numpy as np

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.duplicates import Keys
from pencil_scale.features.extraction import COLUMNS, content_keys, hash_of, sweep
from pencil_scale.features.manifest import (
    ABSENT,
    FOLDER,
    LEASE,
    MANIFEST,
    UNFINISHED,
    FeatureManifest,
    FeaturePart,
)
from pencil_scale.features.similar import remove_outdated
from pencil_scale.storage.lease import Lease
from pencil_scale.storage.storage import Storage


def forget_gone(storage: Storage, catalogue: Catalogue, excluded: Keys) -> int:
    """Turn the features of rows that may not have any into zeros; return how many rows had some."""
    num_rows = 0
    for key in [path.rpartition("/")[2] for path in storage.names(FOLDER)]:
        what = f"{storage.path(storage.features(key))} is being written"
        with Lease.hold(storage.url, storage.features(key, LEASE), what=what) as lease:
            kept = []
            for file in (UNFINISHED, MANIFEST):
                found = FeatureManifest.find(storage, key, file)
                if found is None or found.catalogue != catalogue.id:
                    continue
                changed = {
                    number: part
                    for number in found.parts
                    if (part := _without_gone(storage, found, number, catalogue, excluded)) is not None
                }
                num_rows += sum(found.parts[n].num_ready - part.num_ready for n, part in changed.items())
                found = replace(found, parts={**found.parts, **changed})
                kept.append(found)
                if changed:
                    lease.put(storage.features(key, file), found.encode())
                    remove_outdated(storage, found)
            if kept:
                sweep(storage, key, *kept)
    return num_rows


def _without_gone(
    storage: Storage, manifest: FeatureManifest, number: int, catalogue: Catalogue, excluded: Keys
) -> FeaturePart | None:
    """Write a part again without rows that are gone; None if there are none."""
    rows = manifest.layout.rows_of(number)
    keys = content_keys(catalogue.read(rows.start, rows.stop, COLUMNS), excluded)
    if manifest.parts[number].inputs == hash_of(keys):
        return None
    columns = manifest.part(storage, number)
    gone = np.flatnonzero((columns["state"] != ABSENT) & ~keys.any(1))
    if not len(gone):
        return None
    for name in ("content_key", "state", "features"):
        columns[name] = columns[name].copy()
        columns[name][gone] = 0
    return manifest.put_part(storage, columns)
