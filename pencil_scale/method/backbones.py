"""Networks by name: torchvision's and timm's classifiers, ours for small images, or your own factory.

    model = build_backbone("resnet50", num_classes=14, weights="imagenet")
    model = build_backbone("resnet50", num_classes=14, weights="s3://models/resnet50.pt")
    model = build_backbone("my_package.nets:make_net", num_classes=14)       # make_net(num_classes) -> Module

A frozen network gives features: what its last linear layer would receive.

    model = build_features("resnet50", weights="imagenet")                   # images -> [B, 2048]

A head that was trained on imported features has no network: `features:768` is a head that takes 768 numbers.

Weights are a plain state dict and are loaded with `weights_only`: nothing in the file is ever executed.
`imagenet` is a file in torch's cache (`TORCH_HOME`), which is downloaded if it is not there.
"""

import importlib
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pencil_scale.config.settings import FEATURES
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import open_url


def build_backbone(name: str, num_classes: int, weights: str | None = None) -> nn.Module:
    """Build the network named in the config, starting from `weights` if given."""
    if name.startswith(FEATURES):
        model: nn.Module = HeadAlone(int(name.removeprefix(FEATURES)), num_classes)
    elif name.startswith(TIMM):
        model = _from_timm(name, num_classes=num_classes)
    elif ":" in name:
        model = _from_factory(name, num_classes)
    elif name in OURS:
        model = OURS[name](num_classes)
    elif name in _torchvision().list_models(module=_torchvision()):
        model = _from_torchvision(name, num_classes)
    else:
        raise PencilError(
            f"model.backbone: no network '{name}'; {', '.join(OURS)}, a torchvision classifier such as "
            "resnet50, timm:NAME, or package.module:factory was expected"
        )
    if weights is not None:
        load_weights(model, find_weights(name, weights))
    return model


PROBED_CLASSES = 1009  # a prime number, so that no layer but the head has as many outputs


def build_features(name: str, weights: str | None = None) -> nn.Module:
    """Build a network without its head, for inference; a factory may also return one that has no head."""
    model = build_backbone(name, PROBED_CLASSES, weights)
    if path := _head_of(model):
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, nn.Identity())
    return model.eval().requires_grad_(False)


def find_head(name: str) -> str:
    """The path of a network's last linear layer, as in `fc`."""
    path = _head_of(build_backbone(name, PROBED_CLASSES))
    if not path:
        raise PencilError(
            f"model.head: {name} has no linear layer with one output per class, which could be trained "
            "alone; choose another model.backbone, or leave model.head out"
        )
    return path


def _head_of(model: nn.Module) -> str:
    heads = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == PROBED_CLASSES
    ]
    return heads[-1].removesuffix(MLP_OUTPUT) if heads else ""


class MlpHead(nn.Module):
    """A head with one hidden layer, in place of a network's last linear layer."""

    def __init__(self, num_features: int, num_hidden: int, num_classes: int) -> None:
        super().__init__()
        self.mlp_hidden = nn.Linear(num_features, num_hidden)
        self.mlp_output = nn.Linear(num_hidden, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        class_logits: Tensor = self.mlp_output(self.mlp_hidden(features).relu())
        return class_logits


class HeadAlone(nn.Module):
    """A head that was trained on features of another program: it takes these, not images."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.head: nn.Module = nn.Linear(num_features, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        class_logits: Tensor = self.head(features)
        return class_logits


MLP_HIDDEN, MLP_OUTPUT = ".mlp_hidden", ".mlp_output"


def fit_head(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give the network an MLP head if these weights have one."""
    modules = dict(model.named_modules())
    for name, hidden in weights.items():
        path, found, _ = name.rpartition(f"{MLP_HIDDEN}.weight")
        if found and isinstance(layer := modules.get(path), nn.Linear):
            parent, _, child = path.rpartition(".")
            mlp = MlpHead(hidden.shape[1], hidden.shape[0], layer.out_features)
            setattr(model.get_submodule(parent), child, mlp)


# --- networks for small images -----------------------------------------------------------------------


class PreActBlock(nn.Module):
    """Norm, ReLU, convolution, twice; a 1x1 shortcut where width or stride changes."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(width_in)
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        changes = stride != 1 or width_in != width
        self.shortcut = nn.Conv2d(width_in, width, 1, stride, bias=False) if changes else None

    def forward(self, images: Tensor) -> Tensor:
        active = self.norm1(images).relu()
        kept = images if self.shortcut is None else self.shortcut(active)
        moved: Tensor = self.conv2(self.norm2(self.conv1(active)).relu())
        return moved + kept


def preact_resnet32(num_classes: int) -> nn.Module:
    """Three groups of five pre-activation blocks of widths 32, 64, 128: the paper's network for CIFAR-10."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1, bias=False)]
    width_in = 32
    for width, first_stride in ((32, 1), (64, 2), (128, 2)):
        for stride in (first_stride, 1, 1, 1, 1):
            layers.append(PreActBlock(width_in, width, stride))
            width_in = width
    head = [
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, num_classes),
    ]
    return nn.Sequential(*layers, *head)


def cifar_resnet18(num_classes: int) -> nn.Module:
    """ResNet-18 for 32x32 images."""
    return _for_small_images(_torchvision().resnet18(num_classes=num_classes))


def cifar_resnet34(num_classes: int) -> nn.Module:
    """ResNet-34 for 32x32 images: the paper's network for CIFAR-100."""
    return _for_small_images(_torchvision().resnet34(num_classes=num_classes))


def _for_small_images(model: nn.Module) -> nn.Module:
    """A 3x3 stem, and no pooling before the first group."""
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def small_convnet(num_classes: int) -> nn.Module:
    """Three 3x3 convolutions (32, 64, 64) with norms: enough for 8x8 digits, in seconds on a CPU."""
    layers: list[nn.Module] = []
    for width_in, width, stride in ((3, 32, 1), (32, 64, 2), (64, 64, 1)):
        convolution = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))


def pooled_convnet(num_classes: int) -> nn.Module:
    """Three 3x3 convolutions (32, 64, 128) with norms and pooling: for 16 to 128 pixels, fast on a CPU."""
    layers: list[nn.Module] = []
    for width_in, width in ((3, 32), (32, 64), (64, 128)):
        convolution = nn.Conv2d(width_in, width, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, num_classes))


OURS: dict[str, Callable[[int], nn.Module]] = {
    "pooled_convnet": pooled_convnet,
    "preact_resnet32": preact_resnet32,
    "cifar_resnet18": cifar_resnet18,
    "cifar_resnet34": cifar_resnet34,
    "small_convnet": small_convnet,
}


# --- other networks ----------------------------------------------------------------------------------

TIMM = "timm:"


def _torchvision() -> Any:
    """Import torchvision on first use: it takes seconds, and many processes do not need it."""
    from torchvision import models

    return models


def _from_torchvision(name: str, num_classes: int) -> nn.Module:
    # In training mode these two would also return the outputs of their auxiliary heads.
    aside = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    model: nn.Module = _torchvision().get_model(name, weights=None, num_classes=num_classes, **aside)
    return model


def _from_timm(name: str, **options: Any) -> nn.Module:
    try:
        timm = importlib.import_module("timm")
    except ImportError:
        raise PencilError(f"model.backbone: {name} needs timm; pip install timm") from None
    try:
        model: nn.Module = timm.create_model(name.removeprefix(TIMM), **options)
    except RuntimeError as error:
        raise PencilError(f"model.backbone: timm has no network for {name}: {error}") from error
    return model


def _from_factory(name: str, num_classes: int) -> nn.Module:
    module_name, _, factory_name = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PencilError(f"model.backbone: '{name}' cannot be imported: {error}") from error
    try:
        model = factory(num_classes)
    except Exception as error:
        raise PencilError(
            f"model.backbone: {name}({num_classes}) failed with {type(error).__name__}: {error}; a function "
            "that takes the number of classes and returns a torch Module was expected"
        ) from error
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise PencilError(
            f"model.backbone: {name}({num_classes}) returned {kind}; a torch Module was expected"
        )
    return model


# --- weights -----------------------------------------------------------------------------------------

IMAGENET = "imagenet"


def find_weights(backbone: str, weights: str) -> str:
    """The path or URL of a state dict; `imagenet` becomes a file in torch's cache, downloaded if absent."""
    if weights != IMAGENET:
        return weights
    url, file = imagenet_file(backbone)
    if file.exists():
        return str(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if backbone.startswith(TIMM):
            torch.save(_from_timm(backbone, pretrained=True).state_dict(), file)
        else:
            torch.hub.download_url_to_file(url, str(file), progress=False)
    except Exception as error:  # the hubs' clients raise nearly every class
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PencilError(
            f"model.weights: {url} cannot be downloaded ({reason}); fetch it on another machine, and place "
            f"its state dict here as {file}, or under another TORCH_HOME"
        ) from error
    return str(file)


def imagenet_file(backbone: str) -> tuple[str, Path]:
    """Where the ImageNet weights of a network come from, and the file that caches them."""
    cache = Path(torch.hub.get_dir()) / "checkpoints"
    if backbone.startswith(TIMM):
        name = backbone.removeprefix(TIMM)
        return f"https://huggingface.co/timm/{name}", cache / f"timm-{name.replace('/', '-')}.pt"
    models = _torchvision()
    if backbone in OURS or ":" in backbone or backbone not in models.list_models(module=models):
        raise PencilError(
            f"model.weights: there are no ImageNet weights for {backbone}; choose a torchvision classifier "
            "such as resnet50, or timm:NAME, or give the path of a state dict"
        )
    url: str = models.get_model_weights(backbone).DEFAULT.url
    return url, cache / url.rpartition("/")[2]


def load_weights(model: nn.Module, url: str) -> None:
    """Load a state dict from a path or URL; a last layer with another class count is skipped."""
    found = _read_weights(url)
    fit_head(model, found)
    wanted = model.state_dict()
    head = list(wanted)[-1].rpartition(".")[0] + "."
    left_out = {name for name in found if name.startswith(head) and not _fits(found[name], wanted.get(name))}
    if left_out:
        found = {name: tensor for name, tensor in found.items() if not name.startswith(head)}
        wanted = {name: tensor for name, tensor in wanted.items() if not name.startswith(head)}
    odd = [name for name in found if "aux" not in name.lower() and not _fits(found[name], wanted.get(name))]
    missing = [name for name in wanted if name not in found]
    if odd or missing:
        raise PencilError(
            f"model.weights: {url} does not fit the network: {_listed(odd, 'of another shape')}"
            f"{_listed(missing, 'missing')}give the weights of the same backbone"
        )
    state = model.state_dict()  # filled in place: some networks read its version metadata
    state.update({name: found[name] for name in wanted})
    model.load_state_dict(state)


def _read_weights(url: str) -> dict[str, Tensor]:
    try:
        with open_url(url) as file:
            found = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise PencilError(
            f"model.weights: there is no file {url}; save the network's state dict there, as with "
            "torch.save(model.state_dict(), FILE), or set model.weights=imagenet to download one"
        ) from error
    except (OSError, ImportError, ValueError) as error:
        raise PencilError(f"model.weights: {url} cannot be read: {error}") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = (str(error).splitlines() or ["it is empty"])[0]
        raise PencilError(f"model.weights: {url} is not a file of plain weights: {reason}") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        kind = type(found).__name__
        raise PencilError(
            f"model.weights: {url} contains a {kind}; a state dict, name -> tensor, was expected"
        )
    return {name.removeprefix("module."): tensor for name, tensor in found.items()}


def _fits(found: Tensor, wanted: Tensor | None) -> bool:
    return wanted is not None and found.shape == wanted.shape


def _listed(names: list[str], what: str) -> str:
    return f"{len(names)} {what} ({', '.join(names[:3])}); " if names else ""
