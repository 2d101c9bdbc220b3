"""Measure how right repaired labels are, beside cleanlab on cross-validated predictions of the same network.

    python benchmarks/label_quality.py --digits --noise symmetric:0.3
    python benchmarks/label_quality.py --parquet cifar10=train-*.parquet --given cifar10n.npz#random1 \\
        --clean cifar10=test-*.parquet
    python benchmarks/label_quality.py --folders clothes=PHOTOS --noise symmetric:0.2 symmetric:0.4 \\
        --set model.head=linear model.backbone=pipelines.demo_photos:efficientnet_lite0

`ours` is `pipelines.init` and `pencil_scale.train`, as a new user runs them. For cleanlab the same network is
trained by the same command, without the pencil stage: once for as many epochs as ours in all (`trained as
long`), once until it stops improving (`stopped early`). The labels that `find_label_issues` finds get the
most likely class. All its ways to filter are tried, and the best is shown: it is chosen by the truth, which
no user has. The last line gives cleanlab the predictions of our run.

With `--clean`, ours has these images to prove errors with (evidence.clean).

Precision and recall are those of the labels found wrong; `right` is the share of right labels after repair.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from cleanlab.filter import find_label_issues
from no_harm import Classes, Images, command, draw, read_digits, read_idx, read_parquet, spoil, write_shards

from pencil_scale.labels.published import PublishedLabels, find_published
from pencil_scale.method.evidence import Predictions
from pencil_scale.storage.errors import PencilError

FILTERS = (
    *("prune_by_noise_rate", "prune_by_class", "both", "confident_learning"),
    *("predicted_neq_given", "low_normalized_margin", "low_self_confidence"),
)
FOLDS = 4


class Found(NamedTuple):
    """Labels after a repair, and a name for it."""

    how: str
    repaired: Classes


def read_folders(name: str, folder: str) -> Images:
    """Photos in one folder per class."""
    names = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
    paths = [
        (path, number) for number, one in enumerate(names) for path in sorted(Path(folder, one).iterdir())
    ]
    return Images(name, [path.read_bytes() for path, _ in paths], np.array([n for _, n in paths]), len(names))


def repairs(
    images: Images, given: Classes, seed: int, more: Sequence[str], clean: Images | None = None
) -> Iterator[Found]:
    """Repair the labels with ours, then with cleanlab."""
    home = Path(tempfile.mkdtemp(prefix="label-quality-"))
    try:
        write_shards(home, images, given)
        command(home, "pipelines.init", "shards/train-*.tar", "--storage", "storage", "--output", "own.yaml")
        if clean is not None:
            write_shards(home, clean, clean.classes, "test")
            more = [*more, f"data.test={home}/shards/test-*.tar", "evidence.clean=test"]
            command(home, "pipelines.index_shards", "own.yaml", *more)
        outcome = train(home, "ours", seed, more)
        facts = json.loads((home / "storage" / "runs" / "ours" / "summary.json").read_text())
        if (used := facts["samples"] + facts["watched"]) != len(given):
            raise PencilError(f"{images.name}: {used:,} of {len(given):,} samples were used, not all")
        labels = PublishedLabels(find_published(str(home / "storage"), "ours", held=True).manifest)
        decided = np.concatenate([part.decide().corrected_class for part in labels.batches()])
        yield Found(f"ours ({outcome})", decided.astype(np.int64))
        plain = [*more, "stages.pencil.epochs=0", f"evidence.folds={FOLDS}"]
        epochs = num_epochs(home, "ours")
        for name, last in (("trained as long", epochs), ("stopped early", 0)):
            first = [f"stages.backbone.epochs={epochs - last // 2}"] if last else []
            train(home, name.replace(" ", "-"), seed, [*plain, *first, f"stages.finetune.epochs={last // 2}"])
            yield cleaned(name, home, name.replace(" ", "-"), images.classes, given)
        yield cleaned("our predictions", home, "ours", images.classes, given)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def train(home: Path, name: str, seed: int, more: Sequence[str]) -> str:
    """Run the product; return whether its labels were published or held."""
    code, output = command(
        home, "pencil_scale.train", "own.yaml", f"run.name={name}", f"run.seed={seed}", *more
    )
    if code not in (0, 3):
        raise PencilError(f"pencil_scale.train run.name={name} failed: {output[-2000:]}")
    return "held" if code else "published"


def num_epochs(home: Path, name: str) -> int:
    """How many epochs a training of this run took."""
    return len(json.loads((home / "storage" / "runs" / name / "epochs.json").read_text()))


def cleaned(how: str, home: Path, run: str, true: Classes, given: Classes) -> Found:
    """Repair the labels by what cleanlab finds with the predictions of a run, and its best filter."""
    manifest = find_published(str(home / "storage"), run, held=True).manifest
    likely = probabilities(
        Predictions.join([part.predictions() for part in PublishedLabels(manifest).batches()])
    )
    found = []
    for filter_by in FILTERS:
        issues = find_label_issues(given, likely, filter_by=filter_by, n_jobs=1)
        found.append(Found(f"cleanlab, {how} ({filter_by})", np.where(issues, likely.argmax(1), given)))
    return max(found, key=lambda one: float((one.repaired == true).mean()))


def probabilities(predictions: Predictions) -> npt.NDArray[np.float64]:
    """The probabilities of all classes; those that were not kept share what is left.   [N, C]"""
    kept = np.exp(predictions.log_p)
    num_left = predictions.num_classes - kept.shape[1]
    left = np.clip(1 - kept.sum(1), 0, None) / max(num_left, 1)
    shares = np.repeat(left[:, None], predictions.num_classes, axis=1)
    np.put_along_axis(shares, predictions.classes, kept, axis=1)
    normalised: npt.NDArray[np.float64] = shares / shares.sum(1, keepdims=True)
    return normalised


def show(found: Found, true: Classes, given: Classes) -> None:
    """Print one line of the table."""
    changed, wrong = found.repaired != given, given != true
    precision = (changed & wrong).sum() / max(changed.sum(), 1)
    recall = (changed & wrong).sum() / max(wrong.sum(), 1)
    right = (found.repaired == true).mean()
    print(f"  {found.how:55} {precision:9.3f} {recall:7.3f} {right:7.3f}", flush=True)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--digits", action="store_true", help="the digits of scikit-learn")
    parser.add_argument("--parquet", metavar="NAME=GLOB", action="append", default=[])
    parser.add_argument("--idx", metavar="NAME=FOLDER", action="append", default=[], help="as MNIST")
    parser.add_argument("--folders", metavar="NAME=FOLDER", action="append", default=[], help="one per class")
    parser.add_argument("--size", type=int, help="samples drawn; default: all")
    parser.add_argument("--noise", nargs="+", default=["symmetric:0.3"], help="as in no_harm.py")
    parser.add_argument("--given", metavar="FILE.npz#NAME", help="given labels, instead of --noise")
    parser.add_argument("--clean", metavar="NAME=GLOB", help="clean images for ours, as Parquet")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", metavar="KEY=VALUE", nargs="+", default=[], help="for every training")
    given = parser.parse_args()
    named = [*given.parquet, *given.idx, *given.folders]
    if not given.digits and not named:
        parser.error("no dataset; name one with --digits, --parquet, --idx or --folders")
    if odd := [one for one in [*named, *filter(None, [given.clean])] if "=" not in one]:
        parser.error(f"{odd[0]}: NAME=PLACE was expected")
    if given.given and given.size is not None:
        parser.error("--size: not with --given, whose labels are those of all samples in order")
    return given


def main() -> int:
    """Repair the labels of every dataset with every noise, and print what was right."""
    words = parse()
    sets = [read_digits()] if words.digits else []
    sets += [read_parquet(*one.split("=", 1)) for one in words.parquet]
    sets += [read_idx(*one.split("=", 1)) for one in words.idx]
    sets += [read_folders(*one.split("=", 1)) for one in words.folders]
    clean = read_parquet(*words.clean.split("=", 1)) if words.clean else None
    for images in sets:
        for noise in [words.given] if words.given else words.noise:
            some = images if words.given else draw(images, words.size or len(images.classes), words.seed)
            given = labels_of(words.given) if words.given else spoil(some, noise, words.seed)
            share = (given == some.classes).mean()
            print(f"{images.name}, {len(given):,} samples, {Path(noise).name}: {share:.3f} right as given")
            print(f"  {'':55} precision  recall   right")
            for found in repairs(some, given, words.seed, words.set, clean):
                show(found, some.classes, given)
    return 0


def labels_of(named: str) -> Classes:
    """Labels that are stored in a NumPy archive."""
    file, _, name = named.partition("#")
    with np.load(file) as stored:
        return np.asarray(stored[name], np.int64)


if __name__ == "__main__":
    sys.exit(main())
