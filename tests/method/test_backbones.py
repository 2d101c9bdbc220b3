"""Networks by name, and weights that fit or are refused."""

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torchvision import models

from pencil_scale.method.backbones import build_backbone
from pencil_scale.storage.errors import PencilError


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_preact_resnet32_has_the_size_of_the_papers() -> None:
    model = build_backbone("preact_resnet32", 10)
    assert num_parameters(model) == 1_860_138
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar_resnet18", "cifar_resnet34"])
def test_a_resnet_for_cifar_keeps_the_resolution_of_small_images(name: str) -> None:
    model = build_backbone(name, 100)
    seen: list[torch.Size] = []
    model.get_submodule("layer1").register_forward_hook(lambda _m, _i, out: seen.append(out.shape))
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 100)
    assert seen == [(2, 64, 32, 32)]


def test_the_small_convnet_takes_images_of_8_by_8() -> None:
    assert build_backbone("small_convnet", 10)(torch.randn(2, 3, 8, 8)).shape == (2, 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "googlenet", "inception_v3", "squeezenet1_1", "vit_b_16"])
def test_a_torchvision_classifier_gives_one_row_of_logits_per_sample(name: str) -> None:
    size = 299 if name == "inception_v3" else 224
    with torch.device("meta"):
        model = build_backbone(name, 14).train()
        assert model(torch.empty(2, 3, size, size)).shape == (2, 14)


FAMILIES = [
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "googlenet",
    "inception_v3",
    "maxvit_t",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "regnet_x_400mf",
    "resnet18",
    "shufflenet_v2_x0_5",
    "squeezenet1_0",
    "swin_t",
    "swin_v2_t",
    "vgg11",
    "vit_b_16",
]


def test_no_family_of_torchvision_is_missing_from_the_list() -> None:
    families = {name[:4] for name in models.list_models(module=models)}
    resnets = {"resn", "wide"}  # resnext and wide resnets are resnets
    assert families - resnets == {name[:4] for name in FAMILIES} - resnets


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_of_torchvision_can_change_its_head(name: str, tmp_path: Path) -> None:
    # Constants are written faster than random weights, and no network starts with them.
    with torch.device("cpu" if "regnet" in name else "meta"):  # a regnet computes its widths with tensors
        donor = models.get_model(name, weights=None, num_classes=20)
    given = donor.to_empty(device="cpu").state_dict()
    for number, tensor in enumerate(given.values(), start=2):
        tensor.fill_(number)
    torch.save(given, tmp_path / "weights.pt")
    model = build_backbone(name, 14, weights=str(tmp_path / "weights.pt"))
    taken = [k for k, tensor in model.state_dict().items() if torch.equal(tensor, given[k])]
    assert len(taken) >= len(model.state_dict()) - 2  # all but the head's weight and bias


def test_a_factory_of_the_user_is_called() -> None:
    model = build_backbone("pencil_scale.method.backbones:small_convnet", 7)
    assert isinstance(model, nn.Sequential)
    assert model[-1].out_features == 7


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet5O", "no network 'resnet5O'; pooled_convnet, preact_resnet32"),
        ("no.such:thing", "'no.such:thing' cannot be imported: No module named 'no'"),
        ("math:no_such", "cannot be imported: .*no_such"),
        (":x", "cannot be imported"),
        ("builtins:iter", r"builtins:iter\(10\) failed with TypeError: .*; a function that takes the number"),
        ("builtins:str", r"builtins:str\(10\) returned str; a torch Module"),
    ],
)
def test_an_unknown_network_is_refused(name: str, message: str) -> None:
    with pytest.raises(PencilError, match=message):
        build_backbone(name, 10)


# --- weights -----------------------------------------------------------------------------------------


def saved(tmp_path: Path, state: object) -> str:
    path = tmp_path / "weights.pt"
    torch.save(state, path)
    return str(path)


def test_all_weights_of_the_same_network_are_loaded(tmp_path: Path) -> None:
    donor = build_backbone("small_convnet", 10)
    model = build_backbone("small_convnet", 10, saved(tmp_path, donor.state_dict()))
    for name, tensor in donor.state_dict().items():
        assert_close(model.state_dict()[name], tensor)


def test_a_head_of_another_class_count_is_left_out(tmp_path: Path) -> None:
    donor = build_backbone("small_convnet", 1000)
    url = "file://" + saved(tmp_path, {f"module.{name}": value for name, value in donor.state_dict().items()})
    model = build_backbone("small_convnet", 10, url)
    assert_close(model.state_dict()["0.weight"], donor.state_dict()["0.weight"])
    assert model.state_dict()["11.weight"].shape == (10, 64)


def test_weights_of_another_network_are_refused_by_name(tmp_path: Path) -> None:
    url = saved(tmp_path, build_backbone("preact_resnet32", 10).state_dict())
    misfit = r"weights.pt does not fit the network: \d+ of another shape \(1.norm1"
    with pytest.raises(PencilError, match=misfit):
        build_backbone("small_convnet", 10, url)


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("executed",)


def test_nothing_in_a_weights_file_is_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "weights.pt").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(PencilError, match="not a file of plain weights"):
        build_backbone("small_convnet", 10, str(tmp_path / "weights.pt"))
    with pytest.raises(PencilError, match="not a file of plain weights"):
        build_backbone("small_convnet", 10, saved(tmp_path, {"0.weight": Trap()}))
    assert "executed" not in capsys.readouterr().out


def test_files_that_are_not_weights_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(PencilError) as absent:
        build_backbone("small_convnet", 10, str(tmp_path / "absent.pt"))
    assert str(absent.value).startswith(f"model.weights: there is no file {tmp_path}/absent.pt; save")
    assert len(str(absent.value).splitlines()) == 1
    with pytest.raises(PencilError, match="cannot be read"):
        build_backbone("small_convnet", 10, str(tmp_path))
    with pytest.raises(PencilError, match="contains a list"):
        build_backbone("small_convnet", 10, saved(tmp_path, [1, 2]))
    (tmp_path / "empty.pt").touch()
    with pytest.raises(PencilError, match="not a file of plain weights"):
        build_backbone("small_convnet", 10, str(tmp_path / "empty.pt"))


def test_a_pooled_network_suits_images_from_16_to_128_pixels() -> None:
    network = build_backbone("pooled_convnet", 10)
    for side in (16, 28, 64, 128):
        assert network(torch.zeros(2, 3, side, side)).shape == (2, 10)


def test_imagenet_weights_come_from_the_cache_and_offline_the_error_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))

    def offline(*arguments: object, **options: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    file = tmp_path / "checkpoints" / "resnet18-f37072fd.pth"
    with pytest.raises(PencilError, match=rf"download.pytorch.org.*no route to host.*here as {file}"):
        build_backbone("resnet18", 5, "imagenet")
    original = build_backbone("resnet18", 1000).state_dict()
    torch.save(original, file)
    found = build_backbone("resnet18", 5, "imagenet").state_dict()
    assert torch.equal(found["conv1.weight"], original["conv1.weight"])
    assert found["fc.weight"].shape == (5, 512)
    with pytest.raises(PencilError, match="no ImageNet weights for small_convnet"):
        build_backbone("small_convnet", 5, "imagenet")


def test_networks_of_timm_are_built_and_cached_with_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create_model(name: str, pretrained: bool = False, num_classes: int = 7) -> torch.nn.Module:
        assert name == "tiny"
        network = build_backbone("small_convnet", num_classes)
        if pretrained:
            torch.nn.init.constant_(network[0].weight, 0.5)  # type: ignore[index]
        return network

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))
    for _ in range(2):  # downloaded, then from the cache
        found = build_backbone("timm:tiny", 5, "imagenet").state_dict()
        assert bool((found["0.weight"] == 0.5).all())
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(PencilError, match="timm:tiny needs timm; pip install timm"):
        build_backbone("timm:tiny", 5)
