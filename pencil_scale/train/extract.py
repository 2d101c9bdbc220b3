"""Compute features: a frozen network over all images of the catalogue that have none yet.

    found = compute_features(config)               # resumes; after indexing, only new images are computed
    found.manifest.key, found.num_computed

Windows of rows are Ray tasks on CPUs or GPUs; results are stored in row order as they arrive.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pyarrow.compute as pc

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.ranges import IMAGE_COLUMNS
from pencil_scale.catalogue.rules import make_overlay
from pencil_scale.config.command import say
from pencil_scale.config.settings import FEATURES, Config, Images
from pencil_scale.features.extraction import Extracted, Extraction, Job, extract
from pencil_scale.features.manifest import LEASE, FeatureManifest
from pencil_scale.method.automatic import Facts, images_for_features
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.lease import Lease
from pencil_scale.storage.storage import Storage

LOG_EVERY_S = 5.0
TRIED_ROWS = 64
TASKS_PER_GPU = 4  # so that some decode while another computes


@dataclass(frozen=True)
class Summary:
    """The features as they are published, and what this job did."""

    folder: str
    manifest: FeatureManifest
    num_computed: int
    seconds: float
    problems: tuple[str, ...]  # the first images that could not be decoded


def compute_features(config: Config) -> Summary:
    """Load the network, find the rows without features, compute them, and publish."""
    storage, started_at = Storage(config.run.storage), time.monotonic()
    catalogue = Catalogue.open(storage.url)
    job, manifest = prepare(config, catalogue)
    _warn_of_weak_features(config, job)
    folder = storage.path(storage.features(manifest.key))
    excluded = make_overlay(config.data.exclude).excluded
    with Lease.hold(
        storage.url, storage.features(manifest.key, LEASE), what=f"{folder} is being written"
    ) as lease:
        extraction = Extraction(storage, manifest, catalogue, excluded, lease)
        try:
            for number, found in _progress(extraction, _results(config, extraction, job)):
                extraction.add(number, found)
            _refuse_many_unreadable(extraction, config.data.max_damaged_share)
        except BaseException:
            extraction.save()
            raise
        manifest = extraction.publish()
    seconds = time.monotonic() - started_at
    return Summary(folder, manifest, extraction.num_rows, seconds, tuple(extraction.problems))


def estimate_features(config: Config) -> dict[str, Any]:
    """Compute the features of some images, and say how long all would take this machine; store nothing."""
    storage = Storage(config.run.storage)
    catalogue = Catalogue.open(storage.url)
    job, manifest = prepare(config, catalogue)
    _warn_of_weak_features(config, job)
    first = next((int(row) for row in catalogue.ok_rows()[:1]), 0)
    table = catalogue.read(
        first, min(catalogue.num_rows, first + TRIED_ROWS), ["row", "status", *IMAGE_COLUMNS]
    )
    table = table.filter(pc.equal(table["status"], "ok"))
    if not len(table):
        raise PencilError(f"{catalogue.folder}: no row has a usable image to try")
    started_at = time.monotonic()
    extract(job, table)
    rate = len(table) / (time.monotonic() - started_at)
    known = FeatureManifest.find(storage, manifest.key)
    num_known = known.counts["ready"] + known.counts["unreadable"] if known else 0
    num = max(0, catalogue.num_ok - num_known)
    return {
        "samples": catalogue.num_ok,
        "without_features": num,
        "features_per_s": rate,
        "hours": num / rate / 3600,
    }


def _warn_of_weak_features(config: Config, job: Job) -> None:
    if job.weights is None and (":" not in job.backbone or job.backbone.startswith("timm:")):
        key = "features.weights" if config.model.head is None else "model.weights"
        say(f"WARNING: {key} is not set: {job.backbone} has random weights, which give weak features")
    if config.images.crop is None and config.images.resize is None and job.images.resize is None:
        say(
            f"WARNING: the features are those of images of {job.images.crop} pixels, as they are stored; a "
            "network that was trained on photos gives better ones with images.resize=256 images.crop=224"
        )


def prepare(config: Config, catalogue: Catalogue) -> tuple[Job, FeatureManifest]:
    """Load the network, and describe what will make the features; the manifest names no parts yet."""
    from pencil_scale.features.network import load_frozen
    from pencil_scale.images.augment import require_sizes
    from pencil_scale.images.decode import decoders

    backbone, weights = config.features.backbone, config.features.weights
    if backbone is None or config.model.head is not None:
        backbone, weights = config.model.backbone, config.model.weights
    if backbone is None:
        raise PencilError(
            "features.backbone is not set; name a frozen network, as in features.backbone=resnet50 "
            "features.weights=imagenet"
        )
    sizes = catalogue.manifest.get("sizes", {})
    images: Images = images_for_features(config, Facts(catalogue.num_ok, catalogue.num_classes, sizes))
    require_sizes(images, sizes, config.data.max_damaged_share)
    network, sha256 = load_frozen(backbone, weights, images.crop, config.run.seed)
    made_by: dict[str, Any] = {"backbone": backbone, "weights_sha256": sha256, "decoders": decoders()}
    made_by["images"] = images.model_dump(mode="json", include={"resize", "crop", "mean", "std"})
    views = config.features.views
    job = Job(catalogue, backbone, weights, sha256, images, views, config.run.seed)
    return job, FeatureManifest(made_by, views, network.width, catalogue.id, catalogue.num_rows)


def on_named_features(config: Config, computed_before: bool = False) -> Config:
    """Check that a head can be trained on `features.name`; without a network, they must be imported.

    A run that resumes has checked those that were `computed_before` it started.
    """
    storage, name, backbone = Storage(config.run.storage), config.features.name, config.model.backbone
    found = FeatureManifest.choose(storage, name)
    if "imported" in found.made_by:
        alone = f"{FEATURES}{found.dimension}"
        if backbone not in (None, alone):
            raise PencilError(
                f"features.name: {name} was imported, so nothing says that {backbone} gave these features; "
                "leave model.backbone out to train a head alone, or features.name to compute features"
            )
        return config.model_copy(update={"model": config.model.model_copy(update={"backbone": alone})})
    if backbone is None:
        raise PencilError(
            f"features.name: {name} was computed by {found.made_by['backbone']}; name it as model.backbone, "
            "with its model.weights"
        )
    if computed_before:
        return config
    features = config.features.model_copy(update={"views": found.views})
    _, expected = prepare(config.model_copy(update={"features": features}), Catalogue.open(storage.url))
    if expected.key != found.key:
        raise PencilError(
            f"features.name: {name} was computed by {found.about}, with other weights, image settings or "
            "decoders than those of this config; leave features.name out"
        )
    return config


def _results(config: Config, extraction: Extraction, job: Job) -> Iterator[tuple[int, Extracted]]:
    """Compute the windows as Ray tasks; very few images, or a storage in memory, in this process."""
    if config.run.storage.startswith("memory:") or extraction.is_small:
        yield from ((number, extract(job, *window)) for number, window in enumerate(extraction.windows()))
        return
    from pencil_scale.stream.ray_tasks import cluster_resource, num_processors, run_tasks
    from pencil_scale.train.local_ray import ensure_ray

    ensure_ray()
    options: dict[str, Any] = {}
    if config.workers.gpu:
        num_gpus = int(cluster_resource("GPU"))
        if not num_gpus:
            raise PencilError("workers.gpu: true, but Ray has no GPU; set workers.gpu=false")
        num_cpus = num_processors() / (TASKS_PER_GPU * num_gpus)
        # Without max_calls Ray ends a process with a GPU after one task: the next would load the network.
        options = {
            "num_gpus": 1 / TASKS_PER_GPU,
            "num_cpus": min(num_cpus, int(num_cpus) or 1),
            "max_calls": 0,
        }
        job = replace(job, num_threads=max(1, int(num_cpus)))
    yield from run_tasks(extract, extraction.windows(), job, options)


def _progress(
    extraction: Extraction, results: Iterator[tuple[int, Extracted]]
) -> Iterator[tuple[int, Extracted]]:
    """Pass results on, and print on stderr now and then how far the job is."""
    started_at = said_at = time.monotonic()
    num_done, num_rows = 0, extraction.num_rows
    for number, found in results:
        yield number, found
        num_done, now = num_done + len(found.features), time.monotonic()
        if now - said_at > LOG_EVERY_S or num_done == num_rows:
            said_at, rate = now, num_done / max(now - started_at, 1e-9)
            left = timedelta(seconds=round((num_rows - num_done) / rate))
            line = f"features: {num_done:,} of {num_rows:,} images  {rate:,.0f} img/s  ETA {left}"
            print(line, file=sys.stderr, flush=True)


def _refuse_many_unreadable(extraction: Extraction, most: float) -> None:
    counts = extraction.result.counts
    num_images = counts["ready"] + counts["unreadable"]
    if counts["unreadable"] > most * num_images:
        raise PencilError(
            f"{counts['unreadable']:,} of {num_images:,} images cannot be decoded, such as "
            f"{'; '.join(extraction.problems) or 'in an earlier attempt'}; fetch them again, or raise "
            "data.max_damaged_share"
        )
