"""Index rules: the config's words on identity, labels and images, made ready for reading shards.

A rule set has a name that changes with anything that would change a record: the policies, the class list,
the aliases, and the version of the label table. Shards indexed under another name are read again.
"""

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.duplicates import Keys, contains
from pencil_scale.catalogue.label_sources import LabelClasses, read_label_classes, read_lookup
from pencil_scale.catalogue.schema import from_stored
from pencil_scale.catalogue.shard_index import IndexRules, LabelSource
from pencil_scale.catalogue.update import Overlay, hashes_of
from pencil_scale.storage.errors import PencilError, sample_key
from pencil_scale.storage.urls import open_source, version_of


def make_rules(
    identity: str,
    label: str,
    classes_url: str,
    aliases_url: str | None = None,
    truth: str | None = None,
    decode_images: bool = False,
) -> tuple[IndexRules, str]:
    """Read the tables the rules need; gives the rules and their name."""
    classes = read_label_classes(classes_url, aliases_url)
    rules = IndexRules(
        identity,
        _source(label),
        classes,
        None if truth is None else _source(_spelled_out(truth)),
        decode_images,
    )
    return rules, _name(rules, classes)


def make_overlay(exclude_url: str | None, held_out: Sequence[Catalogue] = ()) -> Overlay:
    """Hash the ids to exclude, and those of the validation and test shards."""
    lines = _ids(exclude_url)
    # An id may be listed as it is, or as our own tables spell it.
    excluded = _sorted([sample_key(name) for line in lines for name in {line, from_stored(line)}])
    columns = [table["sample_key"] for each in held_out for table in each.batches(["sample_key"])]
    held = np.unique(np.concatenate([np.empty(0, "S16"), *(hashes_of(column) for column in columns)]))
    digest = hashlib.sha256(excluded.tobytes() + b"|" + held.tobytes()).hexdigest()[:32]
    return Overlay(excluded, held, digest, len(set(lines)))


def newly_excluded(catalogue: Catalogue, exclude_url: str | None) -> npt.NDArray[np.int64]:
    """The ok rows of a catalogue that the list of ids to exclude names now, and did not at indexing."""
    overlay = make_overlay(exclude_url)
    if overlay.exclude == catalogue.manifest["exclude"] or not len(overlay.excluded):
        return np.empty(0, np.int64)
    found = [np.empty(0, np.int64)]
    for table in catalogue.batches(["row", "sample_key", "status"]):
        listed = contains(overlay.excluded, hashes_of(table["sample_key"]))
        found.append(table["row"].to_numpy()[listed & pc.equal(table["status"], "ok").to_numpy()])
    return np.concatenate(found)


def _source(label: str) -> LabelSource:
    return LabelSource(label, read_lookup(label) if label.startswith(("file:", "table:")) else None)


def _spelled_out(truth: str) -> str:
    """A truth without a scheme is a table, `URL#id,class`."""
    if truth in ("cls", "txt") or truth.startswith(("json:", "file:", "table:")):
        return truth
    if "#" not in truth:
        raise PencilError(f"data.truth: {truth!r} names no columns; write table:URL#id,class or json:FIELD")
    return f"table:{truth}"


def _name(rules: IndexRules, classes: LabelClasses) -> str:
    sources = [rules.label, *([rules.truth] if rules.truth else [])]
    tables = [str(version_of(_url(each.source))) for each in sources if each.lookup is not None]
    words = [rules.identity, *(each.source for each in sources), str(rules.decode_images), *tables]
    text = json.dumps([words, classes.names, sorted(classes.numbers.items())])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _url(source: str) -> str:
    return source.partition(":")[2].rpartition("#")[0] or source.partition(":")[2]


def _ids(url: str | None) -> list[str]:
    if url is None:
        return []
    if version_of(url) is None:
        raise PencilError(f"data.exclude: {url}: no such file, seen from the folder you are in")
    with open_source(url) as source:
        text = source.read(0, source.num_bytes).decode("utf-8", "surrogateescape")
    # Not `splitlines`: an id may hold what Unicode also calls the end of a line.
    return [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]


def _sorted(keys: Sequence[bytes]) -> Keys:
    return np.unique(np.array(list(keys), dtype="S16"))
