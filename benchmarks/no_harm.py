"""Measure whether a repair can do harm: the real commands over datasets, noise, sizes and settings.

    python benchmarks/no_harm.py --digits --seeds 5
    python benchmarks/no_harm.py --parquet cifar10=train.parquet --idx fashion=DIR --jobs 8 --out all.jsonl
    python benchmarks/no_harm.py --parquet cifar10=train.parquet --classes 1 9 --sizes 400 1000
    python benchmarks/no_harm.py --out all.jsonl --only-show

Each trial draws samples, spoils labels, writes shards, and runs `pipelines.init` and `pencil_scale.train` as
a new user would: the truth is known to this script only. It prints the share of right labels as given and as
repaired, the gain that the run estimated itself, and whether its labels were published, held, or the settings
refused. The exit code is 1 if any published labels are worse than the given ones by more than chance. Results
name the state of the code; trials whose results for this state are in the file are not repeated.
"""

import argparse
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import webdataset as wds
from PIL import Image

from pencil_scale.labels.published import PublishedLabels, find_published
from pencil_scale.storage.errors import PencilError

Classes = npt.NDArray[np.int64]
REPOSITORY = Path(__file__).resolve().parents[1]
NOISE = (
    *("none", "symmetric:0.02", "symmetric:0.05", "symmetric:0.1", "symmetric:0.3", "symmetric:0.5"),
    *("pairs:0.2", "human:0.1", "human:0.3"),
)
SETTINGS = {  # what a user might set beyond paths
    "automatic": [],
    "short": ["stages.backbone.epochs=2", "stages.pencil.epochs=6", "stages.finetune.epochs=2"],
    "hot": ["stages.backbone.rate=0.3", "stages.pencil.rate=0.3"],
    "cold": ["stages.backbone.rate=0.0003", "stages.pencil.rate=0.0003"],
    "long": ["stages.backbone.epochs=60"],
    "tiny network": ["model.backbone=small_convnet"],
    "fast labels": ["stages.pencil.lambda=30000", "stages.pencil.allow_fast_labels=true"],
}
OUTCOMES = {0: "published", 3: "held"}
Z99 = 2.33


class Images(NamedTuple):
    """A dataset whose labels are right."""

    name: str
    files: Sequence[bytes]
    classes: Classes
    num_classes: int


class Trial(NamedTuple):
    """One run of the product."""

    data: str
    size: int
    noise: str
    settings: str
    seed: int


def state_of_the_code() -> str:
    """A hash of the product's sources."""
    sources = sorted(
        path for room in ("pencil_scale", "pipelines") for path in REPOSITORY.glob(f"{room}/**/*.py")
    )
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:8]


def read_parquet(name: str, pattern: str) -> Images:
    """Images in a column of bytes or {bytes, path}, as Hugging Face stores them, and a class column."""
    folder, _, names = pattern.rpartition("/")
    tables = [pq.read_table(file) for file in sorted(Path(folder).glob(names))]
    columns = tables[0].schema.names
    image = next(column for column in columns if column in ("image", "img", "png", "jpg"))
    label = next(column for column in columns if column in ("label", "labels", "class", "fine_label"))
    found = [cell for table in tables for cell in table[image].to_pylist()]
    files = [cell["bytes"] if isinstance(cell, dict) else cell for cell in found]
    classes = np.concatenate([table[label].to_numpy() for table in tables]).astype(np.int64)
    return Images(name, files, classes, int(classes.max()) + 1)


def read_idx(name: str, folder: str) -> Images:
    """The training set of MNIST or one of its successors, in the format of the original."""

    def values(kind: str) -> npt.NDArray[np.uint8]:
        path = next(Path(folder).glob(f"train-{kind}*"))
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        shape = np.frombuffer(raw, ">u4", raw[3], 4)
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)

    classes = values("labels").astype(np.int64)
    return Images(name, [as_png(image) for image in values("images")], classes, int(classes.max()) + 1)


def read_digits() -> Images:
    """The digits of scikit-learn."""
    from sklearn.datasets import load_digits

    found = load_digits()
    files = [as_png((image * 15.9).astype(np.uint8)) for image in found.images]
    return Images("digits", files, found.target.astype(np.int64), 10)


def as_png(image: npt.NDArray[np.uint8]) -> bytes:
    """Encode an image without loss."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    return file.getvalue()


def spoil(images: Images, noise: str, seed: int) -> Classes:
    """Make some labels wrong; the rate is the share of wrong labels that results, or nearly."""
    kind, _, number = noise.partition(":")
    rate, random = float(number or 0), np.random.default_rng(seed)
    true, num, c = images.classes, len(images.classes), images.num_classes
    wrong = random.random(num) < rate
    if kind == "symmetric":
        to = (true + random.integers(1, c, num)) % c
    elif kind == "pairs":  # half of the classes lose twice as many to one other class
        wrong = (random.random(num) < 2 * rate) & (true % 2 == 0)
        to = (true + 1) % c
    elif kind == "human":
        return confuse(images, rate, random)
    elif kind == "none":
        to = true
    else:
        raise SystemExit(
            f"error: --noise {noise}: symmetric, pairs or human was expected, as in human:0.3; or none"
        )
    return np.where(wrong, to, true).astype(np.int64)


def confuse(images: Images, rate: float, random: np.random.Generator) -> Classes:
    """Errors that depend on the image: those of a linear classifier that is as bad as the rate asks."""
    small = [Image.open(io.BytesIO(file)).convert("L").resize((14, 14)) for file in images.files]
    pixels = np.stack([np.asarray(image) for image in small]).reshape(len(small), -1) / 255.0
    pixels = np.concatenate([pixels, np.ones((len(small), 1))], axis=1)
    true, rows = np.eye(images.num_classes)[images.classes], np.arange(len(small))
    ridge = pixels.T @ pixels + 0.01 * len(small) * np.eye(pixels.shape[1])
    scores = pixels @ np.linalg.solve(ridge, pixels.T @ true)
    scores[rows, images.classes] += 0.3  # people know more than a linear classifier
    drawn = random.gumbel(size=scores.shape)
    for temperature in np.geomspace(0.01, 3, 100):
        given: Classes = (scores + temperature * drawn).argmax(axis=1).astype(np.int64)
        if (given != images.classes).mean() >= rate:
            break
    return given


def only(images: Images, classes: Sequence[int]) -> Images:
    """The images of some classes; the dataset is named after them."""
    here = np.flatnonzero(np.isin(images.classes, classes))
    numbers = np.searchsorted(sorted(classes), images.classes[here])
    name = f"{images.name}({','.join(map(str, sorted(classes)))})"
    return Images(name, [images.files[row] for row in here.tolist()], numbers, len(classes))


def draw(images: Images, size: int, seed: int) -> Images:
    """Some of the images, in random order."""
    some = np.random.default_rng(seed).permutation(len(images.classes))[:size]
    files = [images.files[number] for number in some]
    return Images(images.name, files, images.classes[some], images.num_classes)


def run_trial(trial: Trial, images: Images, more: Sequence[str], code_state: str) -> dict[str, Any]:
    """Write shards, run the commands, and compare the labels with the truth."""
    sample = draw(images, trial.size, trial.seed)
    given = spoil(sample, trial.noise, trial.seed)
    home = Path(tempfile.mkdtemp(prefix="no-harm-"))
    try:
        write_shards(home, sample, given)
        result: dict[str, Any] = {**trial._asdict(), "code": code_state}
        result["given"] = float((given == sample.classes).mean())
        command(home, "pipelines.init", "shards/train-*.tar", "--storage", "storage", "--output", "own.yaml")
        overrides = [f"run.seed={trial.seed}", "run.name=trial", *SETTINGS[trial.settings], *more]
        code, output = command(home, "pencil_scale.train", "own.yaml", *overrides)
        result |= {"outcome": OUTCOMES.get(code, "refused"), "last": last_words(output)}
        if code in OUTCOMES:
            result |= measure(home / "storage", sample.classes, given)
        return result
    finally:
        shutil.rmtree(home, ignore_errors=True)


def write_shards(home: Path, images: Images, given: Classes, prefix: str = "train") -> None:
    """Write a class list, and shards of a thousand samples."""
    (home / "shards").mkdir(exist_ok=True)
    names = "".join(f"class{number:02d}\n" for number in range(images.num_classes))
    (home / "shards" / "classes.txt").write_text(names)
    with wds.ShardWriter(f"{home}/shards/{prefix}-%06d.tar", maxcount=1000, verbose=0) as writer:
        for number, (file, label) in enumerate(zip(images.files, given, strict=True)):
            kind = "png" if file.startswith(b"\x89PNG") else "jpg"
            writer.write({"__key__": f"{prefix}{number:08d}", kind: file, "cls": int(label)})


def command(home: Path, module: str, *words: str) -> tuple[int, str]:
    """Run one of the product's commands; return its exit code and what it printed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path[1:]])}
    ran = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if module == "pipelines.init" and ran.returncode:
        raise PencilError(f"{module} failed: {ran.stdout[-1000:]}{ran.stderr[-2000:]}")
    return ran.returncode, ran.stdout + ran.stderr


def last_words(output: str) -> str:
    """The lines that say why labels are held or settings refused, else the last line."""
    lines = [line for line in output.splitlines() if line.strip()]
    return " | ".join([line for line in lines if line.startswith(("HELD", "WARNING"))] or lines[-1:])


def measure(storage: Path, true: Classes, given: Classes) -> dict[str, Any]:
    """What the run says of its labels, and what they are."""
    facts = json.loads((storage / "runs/trial/summary.json").read_text())
    labels = PublishedLabels(find_published(str(storage), "trial", held=True).manifest)
    repaired = np.concatenate([part.decide().corrected_class for part in labels.batches()])
    noisy = np.concatenate([part.noisy_class for part in labels.batches()])
    if not np.array_equal(noisy, given):
        raise PencilError("the rows of the catalogue are not in the order of the shards")
    known = ("wrong_labels", "wrong_labels_low", "gain", "gain_low", "gain_high", "planted_found", "seconds")
    return {
        "repaired": float((repaired == true).mean()),
        "changed": float((repaired != given).mean()),
        "fixed": int(((repaired == true) & (given != true)).sum()),
        "broken": int(((repaired != true) & (given == true)).sum()),
        **{name: facts[name] for name in known if name in facts},
        "agreement": facts.get("watch_agreement"),
    }


def harmful(result: dict[str, Any]) -> bool:
    """Whether published labels are worse than the given ones by more than chance."""
    if result["outcome"] != "published":
        return False
    fixed, broken = result["fixed"], result["broken"]
    return bool(broken - fixed > Z99 * math.sqrt(max(broken + fixed, 1)))


def show(results: Sequence[dict[str, Any]]) -> int:
    """Print the table; return the exit code."""
    print(
        f"{'data':10} {'size':>6} {'noise':15} {'settings':13} {'seed':>4} {'given':>6} {'after':>6}", end=""
    )
    print(f" {'gain':>7} {'estimated':>26}  {'code':8}  outcome")
    for result in sorted(results, key=lambda one: tuple(one[name] for name in Trial._fields)):
        gain = result.get("repaired", result["given"]) - result["given"]
        interval = "-"
        if "gain" in result:
            interval = f"{result['gain']:+.3f} ({result['gain_low']:+.3f} to {result['gain_high']:+.3f})"
        print(
            f"{result['data']:10} {result['size']:6} {result['noise']:15} {result['settings']:13} "
            f"{result['seed']:4} {result['given']:6.3f} {result['given'] + gain:6.3f} {gain:+7.3f} "
            f"{interval:>26}  {result.get('code', '-'):8}  {result['outcome']}"
            f"{' HARM' if harmful(result) else ''}"
        )
        if result["outcome"] != "published":
            print(f"{'':12}{result['last'][:220]}")
    print()
    for settings, some in itertools.groupby(
        sorted(results, key=lambda one: one["settings"]), lambda one: one["settings"]
    ):
        ended = list(some)
        counts = Counter(one["outcome"] for one in ended)
        gains = [one["repaired"] - one["given"] for one in ended if one["outcome"] == "published"]
        mean = f", mean gain of those published {np.mean(gains):+.3f}" if gains else ""
        print(f"{settings}: " + ", ".join(f"{num} {name}" for name, num in counts.items()) + mean)
    num_harmful = sum(map(harmful, results))
    print(f"published and worse than given by more than chance: {num_harmful} of {len(results)}")
    return int(num_harmful > 0)


def trials(given: argparse.Namespace, names: Sequence[str]) -> Iterator[Trial]:
    """All combinations that were asked for."""
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        for combination in itertools.product(names, given.sizes, given.noise, given.settings):
            yield Trial(*combination, seed)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--digits", action="store_true", help="the digits of scikit-learn")
    parser.add_argument("--parquet", metavar="NAME=GLOB", action="append", default=[])
    parser.add_argument("--idx", metavar="NAME=FOLDER", action="append", default=[], help="as MNIST")
    parser.add_argument("--classes", type=int, nargs="+", help="only samples of these classes")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2000])
    parser.add_argument("--noise", nargs="+", default=NOISE)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--set", metavar="KEY=VALUE", nargs="+", default=[], help="for every trial")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    parser.add_argument("--out", metavar="FILE", help="JSON lines: what was measured so far")
    parser.add_argument("--only-show", action="store_true", help="run nothing")
    return parser.parse_args()


def main() -> int:
    """Run the trials that are missing, and print all."""
    given = parse()
    results: list[dict[str, Any]] = []
    if given.out and Path(given.out).exists():
        results = [json.loads(line) for line in Path(given.out).read_text().splitlines()]
    if given.only_show:
        return show(results)
    sets = [read_digits()] if given.digits else []
    sets += [read_parquet(*one.split("=", 1)) for one in given.parquet]
    sets += [read_idx(*one.split("=", 1)) for one in given.idx]
    sets = [only(images, given.classes) for images in sets] if given.classes else sets
    by_name = {images.name: images for images in sets}
    state = state_of_the_code()
    done = {Trial(*(one[name] for name in Trial._fields)) for one in results if one.get("code") == state}
    missing = [trial for trial in trials(given, list(by_name)) if trial not in done]
    with ThreadPoolExecutor(given.jobs) as pool:
        begun = [pool.submit(run_trial, trial, by_name[trial.data], given.set, state) for trial in missing]
        for ended in as_completed(begun):
            results.append(result := ended.result())
            if given.out:
                with Path(given.out).open("a") as file:
                    file.write(json.dumps(result) + "\n")
            print(json.dumps(result), flush=True)
    return show(results)


if __name__ == "__main__":
    sys.exit(main())
