"""Index rules: what the config says about identity, labels and images, ready for reading shards.

Rules have a name that changes with everything that would change what is read: the policies, the class list,
the aliases, and the version of the label table. Shards that were indexed under another name are read again.
Lists of excluded and held-out ids are not rules: they are applied to samples that have been read.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import read_label_classes, read_lines, read_lookup
from pencil_scale.catalogue.duplicates import Keys, contains, hashes_of
from pencil_scale.catalogue.schema import from_stored
from pencil_scale.catalogue.shard_index import IndexRules
from pencil_scale.storage.errors import PencilError, sample_key
from pencil_scale.storage.urls import version_of


def make_rules(
    identity: str,
    label: str,
    classes_url: str,
    aliases_url: str | None = None,
    truth: str | None = None,
    decode_images: bool = False,
) -> IndexRules:
    """Read the tables that the rules need."""
    classes = read_label_classes(classes_url, aliases_url)
    if truth not in (None, "cls", "txt") and not truth.startswith(("json:", "file:", "table:")):
        if "#" not in truth:
            raise PencilError(
                f"data.truth: {truth!r} names no columns; write table:URL#id,class or json:FIELD"
            )
        truth = f"table:{truth}"
    names = [source for source in (label, truth) if source is not None]
    tables = {name: read_lookup(name) for name in names if name.startswith(("file:", "table:"))}
    urls = [name.partition(":")[2] for name in tables]
    versions = [str(version_of(url.rpartition("#")[0] or url)) for url in urls]
    words = [identity, *names, str(decode_images), *versions]
    text = json.dumps([words, classes.names, sorted(classes.numbers.items())])
    name = _digest(text.encode("utf-8", "surrogatepass"))
    return IndexRules(identity, label, classes, truth, decode_images, tables, name)


@dataclass(frozen=True)
class Overlay:
    """Sorted hashes of the ids that are excluded or held out."""

    excluded: Keys
    held_out: Keys
    num_listed: int = 0  # different lines on the exclude list

    @property
    def name(self) -> str:
        """A name for both lists."""
        return _digest(self.excluded.tobytes() + b"|" + self.held_out.tobytes())

    @property
    def exclude(self) -> str:
        """A name for the exclude list alone."""
        return _digest(self.excluded.tobytes())

    def statuses(self, table: pa.Table) -> pa.ChunkedArray:
        """What the shards say of some samples, replaced for listed ids."""
        hashes, found = hashes_of(table["sample_key"]), table["found_status"]
        found = pc.if_else(pa.array(contains(self.held_out, hashes)), "held_out", found)
        return pc.if_else(pa.array(contains(self.excluded, hashes)), "excluded", found)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def make_overlay(exclude_url: str | None, held_out: Sequence[Catalogue] = ()) -> Overlay:
    """Hash the ids to exclude, and those of the validation and test shards."""
    lines = read_lines(exclude_url, "data.exclude", "surrogateescape") if exclude_url is not None else []
    lines = [line for line in lines if line.strip()]
    # An id may be listed as it is, or as our own tables write it.
    keys = [sample_key(name) for line in lines for name in {line, from_stored(line)}]
    excluded = np.unique(np.array(keys, "S16"))
    columns = [table["sample_key"] for each in held_out for table in each.batches(["sample_key"])]
    clean = np.unique(np.concatenate([np.empty(0, "S16"), *map(hashes_of, columns)]))
    return Overlay(excluded, clean, len(set(lines)))


def newly_excluded(catalogue: Catalogue, exclude_url: str | None) -> npt.NDArray[np.int64]:
    """Find the ok rows of a catalogue that were added to the exclude list since it was indexed."""
    overlay = make_overlay(exclude_url)
    if overlay.exclude == catalogue.manifest["exclude"] or not len(overlay.excluded):
        return np.empty(0, np.int64)
    found = [np.empty(0, np.int64)]
    for table in catalogue.batches(["row", "sample_key", "status"]):
        listed = contains(overlay.excluded, hashes_of(table["sample_key"]))
        found.append(table["row"].to_numpy()[listed & pc.equal(table["status"], "ok").to_numpy()])
    return np.concatenate(found)
