"""Preflight: everything that can be checked before a worker starts.

    require_agreement(config)               # the config describes the data that was indexed
    checked = check_run(config)             # server, classes, network, outlook of the labels, catalogue
    clean = check_clean(config, versions, checked.class_names)

Training reads the catalogue, not `data.shards` or `data.exclude`. Without `require_agreement`, a config that
changed after indexing would silently train on the old data: samples that were taken down since, other shards,
classes in another order. The error names the key and the command to run.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import difference, read_class_names
from pencil_scale.catalogue.rules import make_overlay, newly_excluded
from pencil_scale.catalogue.shard_urls import expand_braces, lines_of
from pencil_scale.config.settings import Config
from pencil_scale.method.backbones import build_backbone
from pencil_scale.method.outlook import check_outlook
from pencil_scale.method.schedule import Schedule
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import filesystem_of, without_passwords
from pencil_scale.stream.stream import StreamSpec
from pencil_scale.subset.files import read_members
from pencil_scale.tracking.receiver import check_server

Rows: TypeAlias = npt.NDArray[np.int64]
REMEDY = "run pipelines.index_shards again with this config, or undo the change"


@dataclass(frozen=True)
class Checked:
    """A run that can start."""

    class_names: tuple[str, ...]
    schedule: Schedule
    catalogue: Catalogue
    subset: Rows | None
    weight_bytes: int  # of the network
    lines: list[str]


def check_run(config: Config, version: int | None = None) -> Checked:
    """Check the MLflow server, the classes, the network, the outlook of the labels and the catalogue.

    `version` is the catalogue version that the run started with; None is the newest.
    """
    uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if uri:
        check_server(uri)
    names = read_class_names(config.data.classes)
    batch = config.optimizer.batch_per_worker * config.optimizer.accumulation * config.workers.count[1]
    schedule = Schedule(config.stages, config.optimizer, len(names), batch)
    if schedule.epochs == 0:
        raise PencilError("stages: backbone, pencil and finetune have 0 epochs; nothing would be trained")
    model = build_backbone(config.model.backbone, len(names), config.model.weights)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    weight_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    outlook = check_outlook(schedule)
    catalogue = Catalogue.open(config.run.storage, version)
    if differs := difference(names, catalogue.class_names):
        remedy = "run pipelines.index_shards again"
        if version is not None:
            remedy = (
                f"restore the list of catalogue version {version} and index again, or choose another run.name"
            )
        raise PencilError(
            f"data.classes: {config.data.classes} {differs}, compared with the catalogue; {remedy}"
        )
    subset = None
    if config.data.subset is not None:
        subset = read_members(config.data.subset, catalogue)
    subset, num_taken_down = _without_taken_down(config, catalogue, subset)
    samples = f"{catalogue.num_ok:,} samples"
    if subset is not None:
        named = f" ({config.data.subset})" if config.data.subset else ""
        samples = f"{len(subset):,} samples{named} out of {catalogue.num_ok:,}"
    lines = [
        f"run {config.run.name}: {samples} of {len(names)} classes, "
        f"{config.model.backbone} with {num_parameters:,} parameters",
        "stages: " + ", ".join(f"{name} {stage.epochs} epochs" for name, stage in config.stages),
        outlook,
    ]
    if num_taken_down:
        lines.append(f"data.exclude: {num_taken_down:,} more samples were taken down and are left out")
    return Checked(names, schedule, catalogue, subset, weight_bytes, lines)


def check_clean(
    config: Config, versions: Mapping[str, int], class_names: Sequence[str]
) -> dict[str, StreamSpec]:
    """Check the clean sets that a run is evaluated on, in these versions, and say how to read them."""
    specs = {}
    for part, version in versions.items():
        catalogue = Catalogue.open(config.run.storage, version, part)
        if differs := difference(catalogue.class_names, class_names):
            raise PencilError(
                f"data.{part}: the class list of its catalogue, version {version}, {differs}, compared with "
                "the training samples'; run pipelines.index_shards again"
            )
        subset, _ = _without_taken_down(config, catalogue, None)
        specs[part] = StreamSpec.from_config(config, version, part, subset)
    return specs


def _without_taken_down(config: Config, catalogue: Catalogue, subset: Rows | None) -> tuple[Rows | None, int]:
    """Leave out what was taken down since the catalogue was made; also return how many rows that is."""
    taken_down = newly_excluded(catalogue, config.data.exclude)
    if not len(taken_down):
        return subset, 0
    known = catalogue.ok_rows() if subset is None else subset
    return np.setdiff1d(known, taken_down), len(taken_down)


def require_agreement(config: Config) -> None:
    """Refuse a config that describes other data than the catalogue was indexed with."""
    data, catalogue = config.data, Catalogue.open(config.run.storage)
    found = catalogue.manifest
    for key, wanted in (("identity", data.identity), ("label", data.label)):
        if wanted != found[key]:
            raise PencilError(
                f"data.{key}: found {wanted}, the catalogue was indexed with {found[key]}; {REMEDY}"
            )
    if differs := difference(read_class_names(data.classes), found["classes"]):
        raise PencilError(f"data.classes: {data.classes} {differs}, compared with the catalogue; {REMEDY}")
    exclude = make_overlay(data.exclude).exclude
    if found.get("exclude", exclude) != exclude:
        raise PencilError(
            f"data.exclude: {data.exclude} is not the list the catalogue was indexed with; its samples "
            f"would still be trained on; {REMEDY}"
        )
    _require_shards(data.shards, [entry.url for entry in catalogue.shards if entry.state == "indexed"])


def _require_shards(patterns: Iterable[str], indexed: list[str]) -> None:
    """Require that the patterns name shards of the catalogue; the storage of the shards is not read.

    A shard that was removed from the list keeps its rows as long as it exists, and indexing again would not
    change that; so this is only a note.
    """
    files = (lines_of(pattern[1:]) if pattern.startswith("@") else [pattern] for pattern in patterns)
    urls = (url for lines in files for line in lines for url in expand_braces(line))
    wanted = {_bare(filesystem_of(url)[1]) for url in urls}
    globs = [path for path in wanted if any(sign in path for sign in "*?[")]
    others = [url for url in indexed if _bare(url) not in wanted]
    others = [url for url in others if not any(fnmatchcase(_bare(url), glob) for glob in globs)]
    if not others:
        return
    such_as = f"such as {without_passwords(others[0])}"
    if len(others) == len(indexed):
        raise PencilError(
            f"data.shards: names none of the catalogue's {len(indexed):,} shards, {such_as}; {REMEDY}"
        )
    print(
        f"data.shards: {len(others):,} of the catalogue's {len(indexed):,} shards are not named here, "
        f"{such_as}; they keep their rows and are trained on too; to leave them out, set data.subset, "
        "or index into another run.storage",
        flush=True,
    )


def _bare(url: str) -> str:
    """One spelling for a URL and for the path that a filesystem makes of it."""
    return url.rpartition("://")[2].lstrip("/")
