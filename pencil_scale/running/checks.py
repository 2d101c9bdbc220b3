"""All that can be checked of a run before a worker starts, and what to say of it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from pencil_scale.backbones import build_backbone
from pencil_scale.catalogue import Catalogue
from pencil_scale.class_names import difference, read_class_names
from pencil_scale.indexing.index_rules import newly_excluded
from pencil_scale.outlook import check_outlook
from pencil_scale.schedule import Schedule
from pencil_scale.schema import PencilError
from pencil_scale.settings import Config
from pencil_scale.stream import StreamSpec
from pencil_scale.subset_files import read_members
from pencil_scale.tracking import check_server

Rows: TypeAlias = npt.NDArray[np.int64]


class RunRefusedError(PencilError):
    """A run that cannot start as it is written."""


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
        raise RunRefusedError("stages: backbone, pencil and finetune have 0 epochs; nothing would be trained")
    model = build_backbone(config.model.backbone, len(names), config.model.weights)
    size = sum(parameter.numel() for parameter in model.parameters())
    outlook = check_outlook(schedule, len(names))
    catalogue = Catalogue.open(config.run.storage, version)
    if catalogue.class_names != names:
        remedy = "run pipelines.index_shards again"
        if version is not None:
            remedy = f"put back the list of catalogue version {version} and index again, or choose another"
            remedy += " run.name"
        raise RunRefusedError(
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
            raise RunRefusedError(
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
    known = catalogue.ok_rows().row.astype(np.int64) if subset is None else subset
    return np.setdiff1d(known, taken_down), len(taken_down)


def _samples(config: Config, catalogue: Catalogue, subset: Rows | None) -> str:
    if subset is None:
        return f"{catalogue.num_ok:,} samples"
    named = f" ({config.data.subset})" if config.data.subset else ""
    return f"{len(subset):,} samples{named} out of {catalogue.num_ok:,}"
