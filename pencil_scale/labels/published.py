"""Published labels: the manifests that finished runs left, found by the run's name or by URL.

published = find_published("s3://lake/clothing1m", "night-12")
published.name, published.manifest, published.history
"""

from dataclasses import dataclass
from pathlib import PurePosixPath

from pencil_scale.labels.label_study import history_folder
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.part_files import TableDamagedError
from pencil_scale.labels.part_store import PartStore
from pencil_scale.schema import PencilError


class NotPublishedError(PencilError):
    """Labels that nobody has published."""


@dataclass(frozen=True)
class Published:
    """The labels of one finished run."""

    name: str
    url: str
    manifest: Manifest
    history: str  # folder of what its labels were after each epoch; may hold nothing


def find_published(storage: str, named: str) -> Published:
    """Read the labels that a run of this name published, or those of a manifest's URL."""
    is_url = "/" in named or named.endswith(".json")
    name = PurePosixPath(named).name.removesuffix(".json")
    url = named if is_url else published_url(storage, named)
    try:
        manifest = Manifest.load(url)
    except TableDamagedError as error:
        if "missing" not in str(error):
            raise
        raise NotPublishedError(f"{url}: no published labels; {_known(storage)}") from None
    manifest.require_whole()
    return Published(name, url, manifest, history_folder(storage, manifest.run))


def published_url(storage: str, name: str) -> str:
    """Where a run of this name publishes its labels."""
    return f"{storage.rstrip('/')}/labels/published/{name}.json"


def _known(storage: str) -> str:
    names = [
        PurePosixPath(name).stem for name in PartStore(f"{storage.rstrip('/')}/labels").names("published")
    ]
    return f"published are {', '.join(names[:10])}" if names else "train first"
