"""Networks that only predict: the bytes of images in, the network's outputs out.

    network = load_classifier("resnet50", num_classes=14, weights="s3://lake/models/night-0012.pt")
    network = load_frozen("resnet50", "imagenet", seed=1)            # without its head: gives features
    outputs, problems = outputs_of(network, images, recipe, views=2)     # float32 [N, 2, width]

A network is loaded once per process. An image that gives no pixels has outputs of 0, and `problems` has the
reason under its number.
"""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pencil_scale.config.settings import FEATURES, Images
from pencil_scale.images.augment import ImageSizeError, centre_crop, normalise
from pencil_scale.images.decode import UndecodableError, decode
from pencil_scale.method.backbones import PROBED_CLASSES, build_backbone, build_features
from pencil_scale.storage.errors import PencilError

BATCH = 64
Outputs = tuple[npt.NDArray[np.float32], dict[int, str]]


class Network(NamedTuple):
    """A network in evaluation mode, on the GPU if there is one."""

    module: nn.Module
    device: torch.device
    width: int  # of its output


@lru_cache(maxsize=1)  # once per process
def load_classifier(backbone: str, num_classes: int, weights: str) -> Network:
    """Load a trained network."""
    if backbone.startswith(FEATURES):
        raise PencilError(f"{weights}: takes features, not images: it is a head without a network")
    return _placed(build_backbone(backbone, num_classes, weights), num_classes)


@lru_cache(maxsize=1)
def load_frozen(backbone: str, weights: str | None, side: int, seed: int) -> tuple[Network, str]:
    """Load a network that gives features of images of this side, and hash its weights.

    Random weights depend on the seed alone, so all processes have the same.
    """
    torch.manual_seed(seed)
    with _errors_of_features():
        module = build_features(backbone, weights)
    sha256 = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        sha256.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return _placed(module, _width(module, backbone, side)), sha256.hexdigest()


@contextmanager
def _errors_of_features() -> Iterator[None]:
    """Name the keys of the section `features` where an error names those of `model`."""
    try:
        yield
    except PencilError as error:
        raise PencilError(str(error).replace("model.", "features.", 1)) from error


def _width(module: nn.Module, backbone: str, side: int) -> int:
    """Run the network on a blank image, and refuse one that does not give a vector."""
    try:
        with torch.inference_mode():
            found = module(torch.zeros(1, 3, side, side))
        shape = tuple(found.shape)
    except Exception as error:  # a network may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PencilError(
            f"features.backbone: {backbone} fails on an image of {side} x {side} pixels: {reason}; set "
            "images.resize and images.crop to the size that it was made for"
        ) from error
    if len(shape) != 2 or shape[1] == PROBED_CLASSES:
        what = "classes" if shape[1:] == (PROBED_CLASSES,) else f"an output of shape {shape}"
        raise PencilError(
            f"features.backbone: {backbone} gives {what} for an image, as its head is not a linear layer; "
            "choose another network, or package.module:factory with a network that gives [images, numbers]"
        )
    return int(shape[1])


def _placed(module: nn.Module, width: int) -> Network:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        module = module.to(memory_format=torch.channels_last)
    return Network(module.to(device).eval(), device, width)


@torch.inference_mode()
def outputs_of(
    network: Network, images: Sequence[bytes], recipe: Images, views: int = 1, num_threads: int = 1
) -> Outputs:
    """Decode images, take the centre of each, and run the network; the second view is mirrored."""
    outputs, problems = np.zeros((len(images), views, network.width), np.float32), dict[int, str]()
    with ThreadPoolExecutor(num_threads) as pool:
        # A single thread would only take turns with the network.
        decoded = (pool.map if num_threads > 1 else map)(lambda data: _pixels(data, recipe), images)
        readable, pixels = list[int](), list[Tensor]()
        for number, found in enumerate(decoded):
            if isinstance(found, str):
                problems[number] = found
            else:
                readable.append(number)
                pixels.append(found)
            if len(pixels) == BATCH or (pixels and number == len(images) - 1):
                inputs = normalise(torch.stack(pixels).to(network.device), recipe)
                for view in range(views):
                    seen = inputs.flip(-1) if view else inputs
                    outputs[readable, view] = network.module(seen).float().cpu().numpy()
                readable, pixels = [], []
    return outputs, problems


def _pixels(data: bytes, recipe: Images) -> Tensor | str:
    """Decode the centre of an image, uint8 [3, crop, crop]; or say why it cannot be decoded."""
    try:
        pixels = torch.from_numpy(decode(data, recipe.resize).copy())
        return centre_crop(pixels.permute(2, 0, 1), recipe)
    except (UndecodableError, ImageSizeError) as problem:
        return str(problem)
