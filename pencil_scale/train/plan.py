"""Plan: a run from its config, with everything checked and counted that can be before a worker starts.

    plan = make_plan(config)                # server, classes, network, outlook of the labels, catalogues
    print(table(estimate(plan, run_trial(plan))))

What can be counted is counted for every run and stored with it. Hours are estimated by `--dry-run` in a trial
that writes nothing: one worker trains for some seconds, with its CPUs and its GPU, and reads in threads of
its process.
"""

import itertools
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import ray
import torch
from torch import nn

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import difference, read_class_names
from pencil_scale.catalogue.rules import newly_excluded
from pencil_scale.config.command import program
from pencil_scale.config.settings import FEATURES, Config, Evidence
from pencil_scale.features.head import NUM_HIDDEN, require_kind
from pencil_scale.features.manifest import FeatureManifest
from pencil_scale.features.stream import FeatureStream
from pencil_scale.images.augment import require_sizes
from pencil_scale.labels.columns import NARROW_BYTES
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.pins import read_pins
from pencil_scale.labels.roles import ROLES, Roles, choose_roles
from pencil_scale.labels.run_record import RunRecord
from pencil_scale.method.automatic import Facts, choose, filled
from pencil_scale.method.backbones import MlpHead, build_backbone, find_head
from pencil_scale.method.evidence import TOP
from pencil_scale.method.outlook import check_outlook
from pencil_scale.method.schedule import Schedule, Stage
from pencil_scale.storage.errors import PencilError, many
from pencil_scale.storage.storage import Storage
from pencil_scale.stream.stream import Stream, StreamSpec
from pencil_scale.stream.window_reader import LeftOut
from pencil_scale.subset.files import read_members
from pencil_scale.tracking.receiver import check_server
from pencil_scale.train.checks import Problems, require_other_images, require_same_shards
from pencil_scale.train.preparation import Preparation, build_network, has_average, open_features

Rows: TypeAlias = npt.NDArray[np.int64]
CleanName: TypeAlias = Literal["validation", "test"]
TRIAL_S = 30.0
PARTS = {2: "half", 3: "third", 4: "quarter"}
FIRST_STEPS = 8  # not timed: they choose kernels and fill caches
WAIT_EVERY = 4  # steps


@dataclass(frozen=True)
class RunPlan:
    """A run that can start."""

    config: Config  # filled in
    automatic: dict[str, Any]  # the values that were filled in, to be stored with the run
    class_names: tuple[str, ...]
    schedule: Schedule
    catalogue: Catalogue
    stream: StreamSpec
    clean: dict[str, StreamSpec]  # "validation", "test"
    roles: Roles  # samples that are watched or have a planted error
    num_samples: int  # to train on
    weight_bytes: int  # of the network
    lines: list[str]


def make_plan(
    config: Config,
    version: int | None = None,
    record: RunRecord | None = None,
    parent: Manifest | None = None,
    problems: Problems | None = None,
    features: FeatureManifest | None = None,
) -> RunPlan:
    """Check the MLflow server, the catalogues, the classes, the images, the network and the labels' outlook.

    All that is wrong is reported at once, together with `problems` that were found before.

    A run that resumes has a `record`, whose catalogue versions, weights and automatic settings count.
    Otherwise `version` is the catalogue version to start with (None is the newest), and `parent` the labels
    that the run continues. `features` are those that will be computed for it, if it has none yet.
    """
    problems = problems or Problems()
    uri = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if uri:
        with problems.noted():
            check_server(uri)
    names = read_class_names(config.data.classes)
    catalogue = Catalogue.open(config.run.storage, record.catalogue_version if record else version)
    if differs := difference(names, catalogue.class_names):
        raise PencilError(
            f"data.classes: {config.data.classes} {differs}, compared with the catalogue; restore the list "
            f"of catalogue version {catalogue.version} and index again, or choose another run.name"
        )
    subset, taken_down = _rows_to_read(config, catalogue, config.data.subset)
    num_samples = catalogue.num_ok if subset is None else len(subset)
    if not num_samples:
        found = ", ".join(f"{num:,} {status}" for status, num in catalogue.manifest["status"].items())
        raise PencilError(
            f"{catalogue.folder}, version {catalogue.version}: no sample to train on ({found or 'no rows'}); "
            "its summary.html says what to do about each status: correct the data keys, then index again"
        )
    facts = Facts(num_samples, len(names), catalogue.manifest.get("sizes", {}), parent is not None)
    config, automatic = fill_in(config, facts, record)
    features = features or _features(config, catalogue)
    with problems.noted():
        require_sizes(config.images, facts.sizes, config.data.max_damaged_share)
    batch = config.optimizer.batch_per_worker * config.optimizer.accumulation * config.workers.count[1]
    schedule = Schedule(config.stages, config.optimizer, len(names), batch)
    if schedule.epochs == 0:
        problems.add("stages: backbone, pencil and finetune have 0 epochs; nothing would be trained")
    model, outlook, clean = nn.Module(), "", dict[str, StreamSpec]()
    with problems.noted():
        model = _build(config, len(names), record.weights if record else config.model.weights, features)
    with problems.noted():
        outlook = check_outlook(schedule)
    with problems.noted():
        clean = _check_clean(config, record, names)
        if (proves := config.evidence.clean) in clean and record is None and parent is None:
            proving = Catalogue.open(config.run.storage, clean[proves].version, proves)
            require_other_images(proves, proving, catalogue, subset)
    problems.require_none()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    lines = [_headline(config, facts, catalogue, num_parameters), *_settings_lines(config, automatic)]
    lines.append(outlook)
    roles = _roles(config, catalogue, subset, record, parent).but(taken_down)
    lines += _evidence_lines(config.evidence, roles)
    if len(taken_down):
        lines.append(f"data.exclude: left out {many(len(taken_down), 'more sample')}, taken down since")
    # A night also watches samples that are not among its rows.
    here = slice(None) if subset is None else np.isin(roles.watched, subset)
    left_out = LeftOut(roles.watched[here], roles.watched_bytes[here])
    num_samples -= len(left_out.rows)
    stream = StreamSpec.from_config(config, catalogue.version, subset=subset)
    stream = replace(stream, left_out=left_out) if len(left_out.rows) else stream
    weight_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    counted = (num_samples, weight_bytes)
    return RunPlan(config, automatic, names, schedule, catalogue, stream, clean, roles, *counted, lines)


def _build(
    config: Config, num_classes: int, weights: str | None, features: FeatureManifest | None
) -> nn.Module:
    """Build what is trained: the network, or a head on features."""
    network = build_backbone(config.model.backbone, num_classes, weights)
    if features is None:
        return network
    require_kind(network.get_submodule(find_head(config.model.backbone)), config.model.head)
    if config.model.head == "mlp":
        return MlpHead(features.dimension, NUM_HIDDEN, num_classes)
    return nn.Linear(features.dimension, num_classes)


def _features(config: Config, catalogue: Catalogue) -> FeatureManifest | None:
    """The features that a head is trained on."""
    if config.model.head is None:
        return None
    found = FeatureManifest.choose(Storage(config.run.storage), config.features.name)
    if found.catalogue != catalogue.id:
        raise PencilError(
            f"features {found.key}: of another catalogue, {found.catalogue}; run "
            f"`{program('pipelines.extract_features')}` again"
        )
    return found


def _roles(
    config: Config,
    catalogue: Catalogue,
    subset: Rows | None,
    record: RunRecord | None,
    parent: Manifest | None,
) -> Roles:
    """Choose the samples that measure the run; a run that resumes has those it started with."""
    storage = Storage(config.run.storage)
    if record is not None:
        stored = storage.find(storage.run(record.name, ROLES))
        return Roles.none() if stored is None else Roles.decode(stored)
    pins = read_pins(storage.url).resolve(catalogue.class_names, config.nightly.remap)
    return choose_roles(catalogue, subset, pins.rows, config.evidence, config.run.seed, parent)


def _evidence_lines(evidence: Evidence, roles: Roles) -> Iterator[str]:
    """Say what the run measures without clean data, or what it cannot."""
    if evidence.watched == 0:
        yield f"evidence is off: the run does not measure {roles.unmeasured}"
        return
    if (trainings := roles.trainings) > 1:
        part = f"{PARTS.get(trainings, f'1/{trainings}')} of the samples"
        yield f"evidence: {trainings} trainings, each watching another {part} (evidence.folds=1 trains once)"
    missing = f"; too few to measure {roles.unmeasured}" if roles.unmeasured else ""
    if evidence.planted == 0 and len(roles.watched):
        missing = "; without any, what the repair gains is not measured (evidence.planted is 0)"
    yield (
        f"evidence: {len(roles.watched):,} samples are watched and not trained on, "
        f"{len(roles.planted):,} labels are wrong on purpose while the run trains{missing}"
    )
    if evidence.clean is not None and len(roles.watched):
        yield f"evidence: data.{evidence.clean} shows which of the contradicted labels are wrong"
    elif evidence.clean is not None:
        yield "evidence: evidence.clean is not used, because it is compared with watched samples"


def _headline(config: Config, facts: Facts, catalogue: Catalogue, num_parameters: int) -> str:
    samples = many(facts.num_samples, "sample")
    if facts.num_samples < catalogue.num_ok or config.data.subset:
        named = f" ({config.data.subset})" if config.data.subset else ""
        samples += f"{named} out of {catalogue.num_ok:,}"
    head, backbone = config.model.head, config.model.backbone
    network = f"{backbone}, of which the {head} head is trained," if head else backbone
    if backbone.startswith(FEATURES):
        network = f"a {head} head on the imported features {config.features.name}, without a network,"
    network += f" with {num_parameters:,} parameters"
    return f"run {config.run.name}: {samples} of {facts.num_classes} classes, {network}"


def _settings_lines(config: Config, automatic: Mapping[str, Any]) -> list[str]:
    stages, rounds = config.stages, config.stages.pencil.rounds
    lines = ["stages: " + ", ".join(f"{name} {many(stage.epochs, 'epoch')}" for name, stage in stages)]
    if rounds > 1:
        lines[0] += f"; pencil and finetune {rounds} times, {stages.num_epochs:,} epochs in all"
    if automatic:
        shown = ", ".join(f"{key} {value}" for key, value in automatic.items())
        lines.append(f"automatic: {shown} (set any of these keys in the config to change it)")
    return lines


def fill_in(config: Config, facts: Facts, record: RunRecord | None = None) -> tuple[Config, dict[str, Any]]:
    """Fill in what the config leaves open: as the run started, or newly chosen; also return these values.

    The batch of a worker is chosen at every start, so that the global batch stays with other workers.
    """
    stored = dict(record.automatic) if record else {}
    stored.pop("optimizer.batch_per_worker", None)
    config = filled(config, stored)
    chosen = choose(config, facts)
    return filled(config, chosen), stored | chosen


def _check_clean(
    config: Config, record: RunRecord | None, class_names: tuple[str, ...]
) -> dict[str, StreamSpec]:
    """Check the clean sets that a run is evaluated on: their newest versions, or those it started with."""
    given: dict[CleanName, object] = {"validation": config.data.validation, "test": config.data.test}
    specs: dict[str, StreamSpec] = {}
    if config.model.backbone.startswith(FEATURES) and any(given.values()):
        raise PencilError(
            f"data.{next(name for name in given if given[name])}: clean sets have images, and a head on "
            "imported features takes none; leave clean sets out, or name the network as model.backbone"
        )
    for name in (name for name in given if (name in record.clean if record else given[name])):
        catalogue = Catalogue.open(config.run.storage, record.clean[name] if record else None, name)
        if record is None:
            require_same_shards(name, getattr(config.data, name), catalogue)
        if differs := difference(catalogue.class_names, class_names):
            raise PencilError(
                f"data.{name}: the class list of its catalogue, version {catalogue.version}, {differs}, "
                f"compared with the training samples'; run `{program('pipelines.index_shards')}` again"
            )
        require_sizes(config.images, catalogue.manifest.get("sizes", {}), config.data.max_damaged_share)
        subset, _ = _rows_to_read(config, catalogue)
        specs[name] = StreamSpec.from_config(config, catalogue.version, name, subset)
    return specs


def _rows_to_read(
    config: Config, catalogue: Catalogue, subset: str | None = None
) -> tuple[Rows | None, Rows]:
    """The rows of a subset, or None for all, without what was taken down since the catalogue was made.

    Also return the rows that were taken down.
    """
    rows = None if subset is None else read_members(subset, catalogue)
    taken_down = newly_excluded(catalogue, config.data.exclude)
    if len(taken_down):
        rows = np.setdiff1d(catalogue.ok_rows() if rows is None else rows, taken_down)
    return rows, taken_down


# --- what a run will take ---------------------------------------------------------------------------


def count(plan: RunPlan) -> dict[str, Any]:
    """Count what follows from the catalogue and the network."""
    config, catalogue, epochs = plan.config, plan.catalogue, plan.schedule.epochs
    chunks, share = catalogue.chunks(), plan.num_samples / max(catalogue.num_ok, 1)
    num_classes = len(plan.class_names)
    batch = config.optimizer.batch_per_worker * config.workers.count[1]
    trainings = plan.roles.trainings
    return {
        "samples": plan.num_samples,
        "epochs": epochs,
        "trainings": trainings,
        "steps_per_epoch": -(-plan.num_samples // batch),
        "table_bytes": catalogue.num_rows * (NARROW_BYTES + 4 + 4 * num_classes + 4 * min(TOP, num_classes)),
        # The weights, their momentum, and their average.
        "checkpoint_bytes": (2 + has_average(config)) * plan.weight_bytes,
        "read_gb": float(chunks.ok_bytes.sum()) * share * epochs * trainings / 1e9,
        "requests": int((chunks.num_ok > 0).sum()) * epochs * trainings,
    }


def estimate(plan: RunPlan, images_per_s: float) -> dict[str, Any]:
    """Add to what is counted the time and the cost, if a worker trains this many images per second."""
    counted, rate = count(plan), plan.config.workers.count[1] * images_per_s
    hours = counted["samples"] * counted["epochs"] * counted["trainings"] / rate / 3600
    return {**counted, "images_per_s": rate, "hours": hours, "cost": price_of(plan.config, hours)}


def price_of(config: Config, hours: float) -> float | None:
    """What this many hours of all workers cost, if the config says."""
    price = config.cost.gpu_hour
    return None if price is None else config.workers.count[1] * hours * price


def table(found: Mapping[str, Any]) -> str:
    """Spell an estimate, one line per item; the cost is left out if the config gives no price."""
    known = {name.replace("_", " "): value for name, value in found.items() if value is not None}
    return "\n".join(f"{name:<24} {round(value, 2):,}" for name, value in known.items())


def run_trial(plan: RunPlan) -> float:
    """Train for some seconds on a node that has what a worker needs; return images per second."""
    workers, num_classes = plan.config.workers, len(plan.class_names)
    task = ray.remote(num_cpus=workers.cpus, num_gpus=1 if workers.gpu else 0)(train_briefly)
    # After the first stage, where an average of the network may predict as well; most epochs are there.
    epoch = min(plan.config.stages.backbone.epochs, plan.schedule.epochs - 1)
    return float(ray.get(task.remote(plan.config, plan.stream, num_classes, plan.schedule.stage_at(epoch))))


def train_briefly(config: Config, spec: StreamSpec, num_classes: int, stage: Stage) -> float:
    """Read and train as one worker does, with zeros as labels; return images per second."""
    # Not compiled: compilation takes longer than the trial.
    options = config.optimizer.model_copy(update={"compile": "off"})
    config = config.model_copy(update={"optimizer": options})
    device = torch.device("cuda" if config.workers.gpu else "cpu")
    preparation = Preparation(config, device, lambda row, reason: reason)
    with TemporaryDirectory() as folder:
        found = open_features(config, spec.version, Path(folder))
        _, stepper = build_network(config, num_classes, device, world=1, table=found)
        stream = Stream(spec, in_process=True) if found is None else FeatureStream(spec, found)
    epochs = (preparation.ahead(stream.batches(epoch)) for epoch in itertools.count())
    num_done, started = 0, time.perf_counter()
    for nth, batch in enumerate(itertools.chain.from_iterable(epochs)):
        prepared = preparation.prepare(batch, 0, stage)
        classes = torch.zeros(len(prepared.weight), dtype=torch.int64, device=device)
        label_logits = torch.zeros(len(classes), num_classes, device=device)
        labelled = replace(prepared, label_logits=label_logits, noisy_class=classes)
        sums = stepper.step(labelled, stage, 0, 1).sums
        num_done += len(batch.rows)
        if nth % WAIT_EVERY == 0:
            sums.cpu()  # waits for the device
        if nth == FIRST_STEPS:
            num_done, started = 0, time.perf_counter()
        elif nth > FIRST_STEPS and time.perf_counter() - started > TRIAL_S:
            break
    stream.close()
    return num_done / (time.perf_counter() - started)
