"""Neighbours and groups: as if all pairs were compared, whatever the blocks; copies cost nothing."""

import io
import sys
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images

from pencil_scale.features import neighbours
from pencil_scale.features.neighbours import Neighbours, Vectors, compare_all, compare_indexed
from pencil_scale.features.outliers import FEWEST, outlier_scores
from pencil_scale.features.similar import describe
from pencil_scale.storage.errors import PencilError


def vectors_of(features: Any, rows: Any = None) -> Vectors:
    """Vectors of a table in memory, [rows, dimension] or [rows, views, dimension]."""
    wide = np.asarray(features, np.float16)
    wide = wide[:, None] if wide.ndim == 2 else wide
    table: Any = SimpleNamespace(features=wide, manifest=SimpleNamespace(dimension=wide.shape[2]))
    return Vectors.of(table, np.arange(len(wide)) if rows is None else np.asarray(rows))


def compared(vectors: Vectors, k: int = 5, threshold: float = 0.9, compare: Any = compare_all) -> Neighbours:
    found: Neighbours = compare(vectors, k, threshold, lambda done, num: None)
    return found


def photo_patches(side: int = 48) -> list[Image.Image]:
    """Pieces of two real photos, a temple and a flower, without those that show little but the sky."""
    pieces = [
        pixels[top : top + side, left : left + side]
        for pixels in load_sample_images().images
        for top in range(0, pixels.shape[0] - side, side)
        for left in range(0, pixels.shape[1] - side, side)
    ]
    return [Image.fromarray(piece) for piece in pieces if piece.std() > 20]


def thumbnail(picture: Image.Image) -> Any:
    """A simple feature of a picture: its pixels at 8 x 8, without their mean."""
    pixels = np.asarray(picture.resize((8, 8)), np.float32).ravel()
    return (pixels - pixels.mean()) / 255


def as_jpeg(picture: Image.Image, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer)


@pytest.mark.parametrize("block", [7, 64, 2048])
def test_neighbours_are_those_of_all_pairs_whatever_the_blocks(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "BLOCK", block)
    features = load_digits().data[:200]
    features[50] = 0.0  # has no direction, and is similar to nothing
    found = compared(vectors_of(features))
    units = features.astype(np.float16).astype(np.float64)
    units /= np.maximum(np.linalg.norm(units, axis=1, keepdims=True), 1e-9)
    expected = units @ units.T
    np.fill_diagonal(expected, -2)
    assert np.allclose(found.similarity, -np.sort(-expected, axis=1)[:, :5], atol=1e-5)
    assert np.allclose(np.take_along_axis(expected, found.places, 1), found.similarity, atol=1e-5)
    reachable = np.linalg.matrix_power((expected > 0.9) + np.eye(200), 200) > 0
    assert np.array_equal(found.groups[:, None] == found.groups, reachable)


def test_copies_of_photos_are_grouped_and_other_photos_are_not() -> None:
    patches = photo_patches()
    copies = [as_jpeg(patches[number], 60) for number in range(0, len(patches), 5)]
    features = [thumbnail(picture) for picture in [*patches, *copies]]
    found = compared(vectors_of(features), threshold=0.99)
    originals = np.arange(0, len(patches), 5)
    paired = found.groups[originals] == found.groups[len(patches) :]
    assert paired.mean() > 0.9
    assert len(set(found.groups[: len(patches)].tolist())) > 0.9 * len(patches)


def test_ten_thousand_equal_rows_are_one_vector_and_one_group() -> None:
    features = np.random.default_rng(1).normal(size=(10_300, 32)).astype(np.float16)
    features[300:] = features[7]
    tracemalloc.start()
    vectors = vectors_of(features)
    found = compared(vectors)
    entries, facts = describe(vectors, found, np.zeros(10_300, np.int64), 0.9, True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * 2**20  # all pairs would be 400 MiB
    assert (len(vectors), facts.num_groups, facts.largest_group) == (300, 1, 10_001)
    groups = entries["duplicate_group"]
    assert groups.null_count == 299
    assert set(groups.drop_null().to_pylist()) == {7}
    assert entries["neighbours"][7].as_py()[:6] == [300, 301, 302, 303, 304, 305]
    assert 7 in entries["neighbours"][10_299].as_py()
    assert all(row not in some for row, some in enumerate(entries["neighbours"].to_pylist()))


def test_views_of_a_row_count_as_their_mean() -> None:
    mirrored = np.array([[[1, 0], [0, 1]], [[0, 1], [1, 0]], [[1, 0], [1, 0]]])
    found = compared(vectors_of(mirrored), k=2, threshold=0.99)
    assert found.groups[0] == found.groups[1] != found.groups[2]
    assert found.similarity[0, 1] == pytest.approx(np.sqrt(0.5), abs=1e-3)


def test_a_table_of_one_row_has_no_neighbours() -> None:
    vectors = vectors_of([[1.0, 2.0]], rows=[0])
    entries, facts = describe(vectors, compared(vectors), np.zeros(1, np.int64), 0.9, True)
    assert entries["neighbours"].to_pylist() == [[]]
    assert entries["nearest_similarity"].to_pylist() == [None]
    assert (facts.num_groups, facts.num_outliers) == (0, 0)


def test_an_index_finds_nearly_the_same_neighbours_and_groups() -> None:
    pytest.importorskip("faiss")
    vectors = vectors_of(load_digits().data)
    exact, fast = (compared(vectors, 10, 0.98, compare) for compare in (compare_all, compare_indexed))
    same = [len(set(a) & set(b)) for a, b in zip(exact.places, fast.places, strict=True)]
    assert np.mean(same) > 9.5
    assert np.mean(exact.similarity[:, 0] - fast.similarity[:, 0]) < 1e-3
    num_exact, num_fast = (len(set(found.groups.tolist())) for found in (exact, fast))
    assert num_fast == pytest.approx(num_exact, rel=0.02)


def test_a_missing_index_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(PencilError, match=r"pip install 'pencil_scale\[index\]'"):
        compared(vectors_of(load_digits().data[:100]), compare=compare_indexed)


# --- outliers ----------------------------------------------------------------------------------------


def digits_and_patches(num_patches: int) -> tuple[Vectors, Any]:
    """Handwritten digits with a fifth of their labels wrong, then pieces of photos with random labels."""
    digits, chance = load_digits(), np.random.default_rng(1)
    grey = [np.asarray(patch.convert("L").resize((8, 8))) / 16 for patch in photo_patches()]
    patches = np.array(grey[:num_patches]).reshape(num_patches, 64)
    classes = np.r_[digits.target, chance.integers(0, 10, num_patches)]
    wrong = chance.random(len(classes)) < 0.2
    classes[wrong] = chance.integers(0, 10, np.count_nonzero(wrong))
    vectors = vectors_of(np.vstack([digits.data, patches]))
    assert len(vectors) == len(classes)
    return vectors, classes


@pytest.mark.parametrize("num_patches", [0, 20, 100])
def test_photos_among_digits_are_outliers_however_many_they_are(num_patches: int) -> None:
    vectors, classes = digits_and_patches(num_patches)
    scores, threshold = outlier_scores(vectors, classes)
    is_outlier, num_digits = scores > threshold, len(classes) - num_patches
    assert is_outlier[:num_digits].mean() < 0.06
    assert num_patches == 0 or is_outlier[num_digits:].mean() > 0.9


def test_a_picture_that_occurs_a_thousand_times_is_no_class_of_its_own() -> None:
    digits = load_digits()
    placeholder = np.zeros((1000, 64))
    placeholder[:, ::3] = 16 + np.arange(1000)[:, None] / 500  # nearly the same, each
    vectors = vectors_of(np.vstack([digits.data, placeholder]))
    classes = np.r_[digits.target, np.full(1000, 3)]
    entries, facts = describe(vectors, compared(vectors, threshold=0.999), classes, 0.999, True)
    assert facts.largest_group == 1000
    assert all(entries["is_outlier"].to_pylist()[-1000:])


def test_too_few_labels_say_nothing_about_outliers() -> None:
    vectors, classes = digits_and_patches(20)
    classes[FEWEST - 1 :] = -1
    scores, threshold = outlier_scores(vectors, classes)
    assert not (scores > threshold).any()
