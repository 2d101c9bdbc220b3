"""All that can be checked of a run before a worker starts, and what to say of it.

Whether a config still says of its data what the catalogue was made from.

Training reads the catalogue, not `data.shards` or `data.exclude`. A config that has changed since would be
trained as it was before, without a word: samples that must vanish, other shards, classes in another order.

    require_agreement(config)      # else an error names the key, and the command that brings them together
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, cast

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


@dataclass(frozen=True)
class Checked:
    """A run that may start."""

    class_names: tuple[str, ...]
    schedule: Schedule
    catalogue: Catalogue
    subset: Rows | None
    lines: list[str]


def check_run(config: Config, version: int | None = None) -> Checked:
    """Look at the server, the classes, the network, the labels' outlook and the catalogue.

    `version` is that of the catalogue a run started with; without, the newest.
    """
    uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if uri:
        check_server(uri)
    names = read_class_names(config.data.classes)
    batch = config.optimizer.batch_per_worker * config.optimizer.accumulation * config.workers.count[1]
    schedule = Schedule.from_config(config.stages, config.optimizer, len(names), batch)
    if schedule.epochs == 0:
        raise PencilError("stages: backbone, pencil and finetune have 0 epochs; nothing would be trained")
    model = build_backbone(config.model.backbone, len(names), config.model.weights)
    size = sum(parameter.numel() for parameter in model.parameters())
    outlook = check_outlook(schedule, len(names))
    catalogue = Catalogue.open(config.run.storage, version)
    if catalogue.class_names != names:
        remedy = "run pipelines.index_shards again"
        if version is not None:
            remedy = f"put back the list of catalogue version {version} and index again, or choose another"
            remedy += " run.name"
        raise PencilError(
            f"data.classes: {config.data.classes} {difference(names, catalogue.class_names)}, "
            f"compared with the catalogue; {remedy}"
        )
    subset = None
    if config.data.subset is not None:
        subset = read_members(config.data.subset, catalogue, config.run.storage)
    subset, num_taken_down = _without_taken_down(config, catalogue, subset)
    stages = schedule.stages
    lengths = (("backbone", stages.backbone), ("pencil", stages.pencil), ("finetune", stages.finetune))
    lines = [
        f"run {config.run.name}: {_samples(config, catalogue, subset)} of {len(names)} classes, "
        f"{config.model.backbone} with {size:,} parameters",
        "stages: " + ", ".join(f"{name} {stage.epochs} epochs" for name, stage in lengths),
        outlook,
    ]
    if num_taken_down:
        lines.append(f"data.exclude: {num_taken_down:,} more samples are taken down and trained on no more")
    return Checked(names, schedule, catalogue, subset, lines)


def check_clean(
    config: Config, versions: Mapping[str, int], class_names: Sequence[str]
) -> dict[str, StreamSpec]:
    """Look at the clean sets a run is evaluated on, in these versions, and say how to read them."""
    specs = {}
    for part, version in versions.items():
        catalogue = Catalogue.open(config.run.storage, version, part)
        if differs := difference(catalogue.class_names, class_names):
            raise PencilError(
                f"data.{part}: the class list of its catalogue, version {version}, {differs}, compared with "
                "the training samples'; run pipelines.index_shards again"
            )
        subset, _ = _without_taken_down(config, catalogue, None)
        specs[part] = StreamSpec.from_config(config, version, cast(Any, part), subset)
    return specs


def _without_taken_down(config: Config, catalogue: Catalogue, subset: Rows | None) -> tuple[Rows | None, int]:
    """Leave out what was taken down since the catalogue was made; also say how much that is."""
    taken_down = newly_excluded(catalogue, config.data.exclude)
    if not len(taken_down):
        return subset, 0
    known = catalogue.ok_rows() if subset is None else subset
    return np.setdiff1d(known, taken_down), len(taken_down)


def _samples(config: Config, catalogue: Catalogue, subset: Rows | None) -> str:
    if subset is None:
        return f"{catalogue.num_ok:,} samples"
    named = f" ({config.data.subset})" if config.data.subset else ""
    return f"{len(subset):,} samples{named} out of {catalogue.num_ok:,}"


REMEDY = "run pipelines.index_shards again with this config, or take the change back"


def require_agreement(config: Config) -> None:
    """Refuse a config whose words on its data are not those the catalogue was indexed with."""
    data, catalogue = config.data, Catalogue.open(config.run.storage)
    found = catalogue.manifest
    _require("data.identity", data.identity, found["identity"])
    _require("data.label", data.label, found["label"])
    names = read_class_names(data.classes)
    if list(names) != found["classes"]:
        raise PencilError(f"data.classes: {data.classes} {_other_classes(names, found['classes'])}; {REMEDY}")
    exclude = make_overlay(data.exclude).exclude
    if found.get("exclude", exclude) != exclude:
        raise PencilError(
            f"data.exclude: {data.exclude} is not the list the catalogue was indexed with, so what it names "
            f"would still be trained on; {REMEDY}"
        )
    _require_shards(data.shards, [entry.url for entry in catalogue.shards if entry.state == "indexed"])


def _require(key: str, wanted: str, indexed: str) -> None:
    if wanted != indexed:
        raise PencilError(f"{key}: found {wanted}, the catalogue was indexed with {indexed}; {REMEDY}")


def _other_classes(names: Iterable[str], indexed: list[str]) -> str:
    names = list(names)
    if len(names) != len(indexed):
        return f"names {len(names)} classes, the catalogue was indexed with {len(indexed)}"
    number = next(n for n, name in enumerate(names) if name != indexed[n])
    return f"calls class {number} '{names[number]}', the catalogue was indexed with '{indexed[number]}' there"


def _require_shards(patterns: Iterable[str], indexed: list[str]) -> None:
    """The patterns must name shards of the catalogue; the store is not asked for any.

    A shard that left the list keeps its rows as long as it stands in its store: indexing again changes
    nothing about that, so it is only told.
    """
    wanted = {_bare(path) for path in _paths(patterns)}
    globs = [path for path in wanted if any(sign in path for sign in "*?[")]
    others = [
        url
        for url in indexed
        if _bare(url) not in wanted and not any(fnmatchcase(_bare(url), glob) for glob in globs)
    ]
    if not others:
        return
    such_as = f"such as {without_passwords(others[0])}"
    if len(others) == len(indexed):
        raise PencilError(
            f"data.shards: names none of the catalogue's {len(indexed):,} shards, {such_as}; {REMEDY}"
        )
    print(
        f"data.shards: {len(others):,} of the catalogue's {len(indexed):,} shards are not named here, "
        f"{such_as}; they keep their rows and are trained on, too; to leave them out, set data.subset, "
        "or index into another run.storage",
        flush=True,
    )


def _paths(patterns: Iterable[str]) -> Iterator[str]:
    for pattern in patterns:
        for line in lines_of(pattern[1:]) if pattern.startswith("@") else [pattern]:
            for url in expand_braces(line):
                yield filesystem_of(url)[1]


def _bare(url: str) -> str:
    """One spelling for a URL, a path and what a filesystem makes of them."""
    return url.rpartition("://")[2].lstrip("/")
