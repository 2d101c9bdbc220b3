"""Plan: a run from its config, with everything checked that can be checked before a worker starts.

    require_agreement(config)               # the config describes the data that was indexed
    plan = make_plan(config)                # server, classes, network, outlook of the labels, catalogues

Training reads the catalogue, not `data.shards` or `data.exclude`. Without `require_agreement`, a config that
changed after indexing would silently train on the old data: samples that were taken down since, other shards,
classes in another order. The error names the key and the command to run.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import difference, read_class_names
from pencil_scale.catalogue.rules import make_overlay, newly_excluded
from pencil_scale.catalogue.shard_urls import expand_braces, lines_of
from pencil_scale.config.settings import Config
from pencil_scale.labels.run_record import RunRecord
from pencil_scale.method.backbones import build_backbone
from pencil_scale.method.outlook import check_outlook
from pencil_scale.method.schedule import Schedule
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import filesystem_of, without_passwords
from pencil_scale.stream.stream import StreamSpec
from pencil_scale.subset.files import read_members
from pencil_scale.tracking.receiver import check_server

Rows: TypeAlias = npt.NDArray[np.int64]
CleanName: TypeAlias = Literal["validation", "test"]
REMEDY = "run pipelines.index_shards again with this config, or undo the change"


@dataclass(frozen=True)
class RunPlan:
    """A run that can start."""

    config: Config
    class_names: tuple[str, ...]
    schedule: Schedule
    catalogue: Catalogue
    stream: StreamSpec
    clean: dict[str, StreamSpec]  # "validation", "test"
    num_samples: int
    weight_bytes: int  # of the network
    lines: list[str]


def make_plan(config: Config, version: int | None = None, record: RunRecord | None = None) -> RunPlan:
    """Check the MLflow server, the classes, the network, the outlook of the labels and the catalogues.

    A run that resumes has a `record`, whose catalogue versions and weights count. Otherwise `version` is the
    catalogue version to start with; None is the newest.
    """
    uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if uri:
        check_server(uri)
    names = read_class_names(config.data.classes)
    batch = config.optimizer.batch_per_worker * config.optimizer.accumulation * config.workers.count[1]
    schedule = Schedule.from_config(config.stages, config.optimizer, len(names), batch)
    if schedule.epochs == 0:
        raise PencilError("stages: backbone, pencil and finetune have 0 epochs; nothing would be trained")
    weights = record.weights if record else config.model.weights
    model = build_backbone(config.model.backbone, len(names), weights)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    outlook = check_outlook(schedule, len(names))
    version = record.catalogue_version if record else version
    catalogue = Catalogue.open(config.run.storage, version)
    if differs := difference(names, catalogue.class_names):
        raise PencilError(
            f"data.classes: {config.data.classes} {differs}, compared with the catalogue; restore the list "
            f"of catalogue version {catalogue.version} and index again, or choose another run.name"
        )
    subset, num_taken_down = _rows_to_train(config, catalogue)
    num_samples = catalogue.num_ok if subset is None else len(subset)
    samples = f"{num_samples:,} samples"
    if subset is not None:
        named = f" ({config.data.subset})" if config.data.subset else ""
        samples += f"{named} out of {catalogue.num_ok:,}"
    lines = [
        f"run {config.run.name}: {samples} of {len(names)} classes, "
        f"{config.model.backbone} with {num_parameters:,} parameters",
        "stages: " + ", ".join(f"{name} {stage.epochs} epochs" for name, stage in config.stages),
        outlook,
    ]
    if num_taken_down:
        lines.append(f"data.exclude: {num_taken_down:,} more samples were taken down and are left out")
    return RunPlan(
        config=config,
        class_names=names,
        schedule=schedule,
        catalogue=catalogue,
        stream=StreamSpec.from_config(config, catalogue.version, subset=subset),
        clean=_check_clean(config, record, names),
        num_samples=num_samples,
        weight_bytes=sum(tensor.nbytes for tensor in model.state_dict().values()),
        lines=lines,
    )


def _check_clean(
    config: Config, record: RunRecord | None, class_names: tuple[str, ...]
) -> dict[str, StreamSpec]:
    """Check the clean sets that a run is evaluated on: their newest versions, or those it started with."""
    given: dict[CleanName, object] = {"validation": config.data.validation, "test": config.data.test}
    specs: dict[str, StreamSpec] = {}
    for name in (name for name in given if (name in record.clean if record else given[name])):
        catalogue = Catalogue.open(config.run.storage, record.clean[name] if record else None, name)
        if differs := difference(catalogue.class_names, class_names):
            raise PencilError(
                f"data.{name}: the class list of its catalogue, version {catalogue.version}, {differs}, "
                "compared with the training samples'; run pipelines.index_shards again"
            )
        subset, _ = _rows_to_train(config, catalogue, is_clean=True)
        specs[name] = StreamSpec.from_config(config, catalogue.version, name, subset)
    return specs


def _rows_to_train(config: Config, catalogue: Catalogue, is_clean: bool = False) -> tuple[Rows | None, int]:
    """The rows of the subset, if there is one, without what was taken down since the catalogue was made.

    None are all rows. Also return how many rows were taken down.
    """
    rows = None
    if config.data.subset is not None and not is_clean:
        rows = read_members(config.data.subset, catalogue, config.run.storage)
    taken_down = newly_excluded(catalogue, config.data.exclude)
    if len(taken_down):
        rows = np.setdiff1d(catalogue.ok_rows() if rows is None else rows, taken_down)
    return rows, len(taken_down)


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
