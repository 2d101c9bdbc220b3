"""A head on features: it predicts what the network's last layer does, and becomes that layer again."""

from pathlib import Path

import numpy as np
import pytest
import torch
from feature_making import classifier
from stream_making import Shards, five_shards
from torch import nn

from pencil_scale.features.head import build_head, joined
from pencil_scale.features.manifest import READY, UNREADABLE, FeatureManifest
from pencil_scale.features.network import load_classifier
from pencil_scale.features.stream import FeatureStream
from pencil_scale.features.table import FILE, FeatureTable
from pencil_scale.method.backbones import build_backbone, build_features, find_head
from pencil_scale.storage.errors import PencilError
from pencil_scale.stream.stream import Stream
from pencil_scale.stream.window_reader import LeftOut

NUM = 500


def make_table(folder: Path, features: np.ndarray) -> FeatureTable:
    """A table of these features [rows, views, dimension]; all rows are ready."""
    num, views, dimension = features.shape
    np.save(folder / FILE, features.astype(np.float16))
    manifest = FeatureManifest({"imported": "test"}, views, dimension, "catalogue", num)
    return FeatureTable(manifest, folder / FILE, np.full(num, READY, np.uint8))


@pytest.fixture
def table(tmp_path: Path) -> FeatureTable:
    """Two views of each row, whose first number is the row, and the second differs by view."""
    rows = np.arange(NUM)[:, None, None] * np.ones((1, 2, 6))
    rows[:, 1, 1] = -1
    return make_table(tmp_path, rows + np.random.default_rng(1).normal(size=(1, 1, 6)).round(1))


def test_a_head_starts_as_the_layer_and_is_published_as_one(tmp_path: Path) -> None:
    network, images = classifier(4).eval(), torch.rand(64, 3, 8, 8)
    features = network[0](images).detach()
    head = build_head(make_table(tmp_path, features.numpy()[:, None]), 4, network[1])
    torch.testing.assert_close(head(features), network(images), atol=1e-3, rtol=1e-3)
    nn.init.normal_(head.linear.weight)
    nn.init.normal_(head.linear.bias)
    network.load_state_dict(joined(network.state_dict(), "1", head.state_dict()))
    torch.testing.assert_close(network(images), head(features), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_head_has_the_gradients_of_layers_on_standardised_features(tmp_path: Path, kind: str) -> None:
    table = make_table(tmp_path, np.random.default_rng(1).normal(3, 2, (64, 1, 6)))
    head = build_head(table, 4, kind=kind).double()
    features = torch.from_numpy(table.features[:, 0].astype(np.float64))
    given = torch.arange(64) % 4
    nn.functional.cross_entropy(head(features), given).backward()
    layers = [head.linear, nn.ReLU(), head.output] if head.output else [head.linear]
    found = [weight.grad.clone() for weight in head.parameters() if weight.grad is not None]
    head.zero_grad()
    plain = nn.Sequential(*layers)((features - head.mean) / head.spread)
    nn.functional.cross_entropy(plain, given).backward()
    assert len(found) == 2 * len(layers[::2])
    for gradient, weight in zip(found, head.parameters(), strict=True):
        torch.testing.assert_close(gradient, weight.grad)


def test_a_head_with_a_hidden_layer_is_published_loaded_and_continued(tmp_path: Path) -> None:
    name, images = "feature_making:classifier", torch.rand(64, 3, 8, 8)
    plain = build_backbone(name, 4).eval()
    features = plain[0](images).detach()
    table = make_table(tmp_path, features.numpy()[:, None])
    head = build_head(table, 4, plain[1], "mlp")
    weights = str(tmp_path / "weights.pt")
    torch.save(joined(plain[0].state_dict(prefix="0."), find_head(name), head.state_dict()), weights)
    network = build_backbone(name, 4, weights).eval()
    torch.testing.assert_close(network(images), head(features), atol=1e-3, rtol=1e-3)
    again = build_head(table, 4, network[1], "mlp")
    torch.testing.assert_close(again(features), head(features), atol=1e-3, rtol=1e-3)
    assert torch.equal(build_features(name, weights)(images), features)
    assert build_backbone(name, 7, weights)(images).shape == (64, 7)  # other classes: a new last layer
    with pytest.raises(PencilError, match=r"set model.head=mlp"):
        build_head(table, 4, network[1])


def test_a_head_alone_takes_features_and_no_images(tmp_path: Path) -> None:
    features = torch.rand(64, 6)
    head = build_head(make_table(tmp_path, features.numpy()[:, None]), 4, kind="mlp")
    weights = str(tmp_path / "weights.pt")
    torch.save(joined({}, find_head("features:6"), head.state_dict()), weights)
    network = build_backbone("features:6", 4, weights)
    torch.testing.assert_close(network(features), head(features), atol=1e-3, rtol=1e-3)
    with pytest.raises(PencilError, match="takes features, not images"):
        load_classifier("features:6", 4, weights)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return five_shards(tmp_path_factory.mktemp("features"))


@pytest.mark.parametrize("world", [1, 3])
def test_every_row_is_visited_once_with_its_own_features(
    shards: Shards, table: FeatureTable, world: int
) -> None:
    left_out = LeftOut(np.arange(0, 50), np.full(50, 100))
    visited = np.zeros(NUM, np.bool_)
    visited[50:90] = True
    seen = []
    for rank in range(world):
        stream = FeatureStream(shards.spec(left_out=left_out, num_epochs=3), table, rank, world)
        batches = list(stream.batches(0, visited))
        assert len(batches) == stream.num_steps(visited)
        again = [batch.rows for batch in stream.batches(1)]
        assert sum(map(len, again)) >= (NUM - 50) // world
        for batch in batches:
            assert np.array_equal(batch.images.numpy(), table.features[batch.rows.numpy()])
            seen.append(batch.rows.numpy())
        stream.close()
    assert sorted(np.concatenate(seen).tolist()) == list(range(90, NUM))


def test_the_order_does_not_depend_on_how_many_read(shards: Shards, table: FeatureTable) -> None:
    one, three = (
        [FeatureStream(shards.spec(), table, rank, world).plan(0)[0] for rank in range(world)]
        for world in (1, 3)
    )
    assert {piece.key for share in one for piece in share} == {
        piece.key for share in three for piece in share
    }


def test_evaluation_has_the_given_classes_in_order(shards: Shards, table: FeatureTable) -> None:
    spec = shards.spec(shuffle=False, subset=np.arange(7, 400, 3))
    images, features = Stream(spec, in_process=True), FeatureStream(spec, table)
    for expected, found in zip(images.batches(0), features.batches(0), strict=True):
        assert torch.equal(expected.rows, found.rows)
        assert torch.equal(expected.noisy_class, found.noisy_class)
    images.close()


def test_a_row_without_features_is_named_or_refused(shards: Shards, table: FeatureTable) -> None:
    table.state[3] = UNREADABLE
    (batch,) = [batch for batch in FeatureStream(shards.spec(), table).batches(0) if 3 in batch.rows]
    assert batch.weight[batch.rows == 3] == 0
    assert "could not be decoded" in batch.problems[0]
    assert "row 3 " in batch.problems[0]
    table.state[3] = 0
    with pytest.raises(PencilError, match=r"1 sample of 500 without features; run extract_features"):
        FeatureStream(shards.spec(), table)
