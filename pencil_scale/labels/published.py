"""Published labels: the manifests that finished runs left, found by the run's name or by URL.

    <storage>/labels/published/NAME.json     labels that may be used
    <storage>/labels/held/NAME.json          labels that wait for a person (`pencil_scale.train.gate`)

    published = find_published("s3://lake/clothing1m", "night-12")
    published.name, published.manifest, published.history

Held labels are found only by those who ask for them, to look: everybody else gets an error that says why
they are held.

Whether the rows of a label table are the rows of a catalogue, by the keys of the samples themselves.

A catalogue that was deleted and indexed again may give a row number to another sample. Labels of the one
before would then repair the wrong samples.

    require_same_rows(manifest, catalogue)
"""

from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.pins import key_bytes
from pencil_scale.labels.report import history_folder
from pencil_scale.labels.run_record import read_record, run_folder, why_held
from pencil_scale.labels.snapshot import LABELS_FOLDER, get_parts
from pencil_scale.storage.errors import DamagedError, PencilError
from pencil_scale.storage.folder import Folder


@dataclass(frozen=True)
class Published:
    """The labels of one finished run."""

    name: str
    url: str
    manifest: Manifest
    history: str  # folder of what its labels were after each epoch; may hold nothing
    held: bool = False


def find_published(storage: str, named: str, held: bool = False) -> Published:
    """Read the labels that a run of this name published, or those of a manifest's URL.

    With `held`, also find those of a run that is held: to look at them, not to use them.
    """
    urls = [named] if "/" in named else [published_url(storage, named), held_url(storage, named)]
    urls += [named] if "/" not in named and named.endswith(".json") else []
    found = ((url, manifest) for url in urls if (manifest := _load(url)) is not None)
    url, manifest = next(found, (urls[0], None))
    name = PurePosixPath(url).name.removesuffix(".json")
    if manifest is None:
        raise PencilError(f"{url}: no published labels; {_known(storage)}")
    is_held = PurePosixPath(url).parts[-3:-1] == ("labels", "held")
    if is_held and not held:
        record = read_record(storage, name)
        if record is None:
            raise PencilError(
                f"{url}: the labels of this run are held, and its record ({run_folder(storage, name)}) is "
                "gone; restore it to promote them, or remove them and train again"
            )
        raise PencilError(f"{url}: the labels of this run are held: {why_held(name, record.held_because)}")
    manifest.require_whole()
    return Published(name, url, manifest, history_folder(storage, manifest.run), is_held)


def _load(url: str) -> Manifest | None:
    try:
        return Manifest.load(url)
    except DamagedError as error:
        if "missing" not in str(error):
            raise
        return None


def published_url(storage: str, name: str) -> str:
    """Where a run of this name publishes its labels."""
    return f"{storage.rstrip('/')}/labels/published/{name}.json"


def held_url(storage: str, name: str) -> str:
    """Where the labels of a held run wait."""
    return f"{storage.rstrip('/')}/labels/held/{name}.json"


def published_names(storage: str) -> list[str]:
    """The runs and nights whose labels are published."""
    return _names(storage, "published")


def held_names(storage: str) -> list[str]:
    """The runs whose labels are held."""
    return sorted(set(_names(storage, "held")) - set(published_names(storage)))


def _names(storage: str, folder: str) -> list[str]:
    found = Folder(f"{storage.rstrip('/')}/labels").names(folder)
    return [PurePosixPath(name).stem for name in found]


def _known(storage: str) -> str:
    names = published_names(storage)
    return f"published are {', '.join(names[:10])}" if names else "train first"


def require_same_rows(manifest: Manifest, catalogue: Catalogue) -> None:
    """Refuse labels of another catalogue, unless every row is the same sample in both.

    Rows are only ever appended to a catalogue, so its id vouches for them. Another id, of a catalogue that
    was deleted and indexed again, makes the keys of all rows be compared.
    """
    layout = manifest.layout
    if layout.num_rows > catalogue.num_rows:
        raise PencilError(
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
            raise PencilError(
                f"{catalogue.folder}: row {rows.start + int(np.argmax(differs)):,} is another sample than "
                "the one these labels were learned for; the catalogue was rebuilt since: train again under "
                "another run.name, or restore the catalogue"
            )
