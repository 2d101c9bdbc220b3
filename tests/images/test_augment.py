"""Augmentation: crops, mirroring and normalisation, which depend only on seed, epoch and row."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pencil_scale.config.settings import Images
from pencil_scale.images.augment import (
    ImageSizeError,
    _bits,
    augment,
    centre,
    require_sizes,
    strengthen,
)

PLAIN = Images(crop=8, pad=0, flip=False, mean=(0, 0, 0), std=(1, 1, 1))


def photos(num_samples: int, side: int = 8) -> torch.Tensor:
    return torch.randint(
        256, (num_samples, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )


def test_without_cropping_and_mirroring_an_image_is_only_scaled() -> None:
    images = photos(4)
    assert torch.equal(augment(images, torch.arange(4), 1, 0, PLAIN), images.float() / 255)
    assert torch.equal(centre(images, PLAIN), images.float() / 255)


def test_the_mean_is_subtracted_and_the_deviation_divided_out() -> None:
    recipe = Images(crop=8, flip=False, mean=(0.5, 0.25, 0.0), std=(0.5, 1.0, 2.0))
    shown = centre(torch.full((1, 3, 8, 8), 255, dtype=torch.uint8), recipe)
    assert shown[0, :, 0, 0].tolist() == [1.0, 0.75, 0.5]


@given(st.permutations(range(12)), st.integers(1, 11), st.integers(0, 5))
def test_what_happens_to_an_image_does_not_depend_on_its_batch(
    order: list[int], cut: int, epoch: int
) -> None:
    images, rows = photos(12), torch.arange(100, 112)
    recipe = Images(crop=8, pad=4, flip=True, mean=(0.5, 0.5, 0.5), std=(1, 1, 1))
    together = augment(images, rows, 1, epoch, recipe)
    mixed = torch.tensor(order)
    batches = [augment(images[some], rows[some], 1, epoch, recipe) for some in mixed.split([cut, 12 - cut])]
    assert torch.equal(torch.cat(batches), together[mixed])


def test_every_crop_is_a_window_of_the_padded_image_or_its_mirror() -> None:
    images, recipe = photos(50), Images(crop=8, pad=2, flip=True, mean=(0, 0, 0), std=(1, 1, 1))
    padded = np.pad(images.numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)))
    shown = (augment(images, torch.arange(50), 1, 0, recipe) * 255).round().byte().numpy()
    found = set()
    for image, crop in zip(padded, shown, strict=True):
        windows = {
            (y, x, way): image[:, y : y + 8, x : x + 8][:, :, ::way]
            for y in range(5)
            for x in range(5)
            for way in (1, -1)
        }
        found |= {where for where, window in windows.items() if np.array_equal(window, crop)}
    assert {way for _, _, way in found} == {1, -1}
    assert len(found) > 25  # of 50 possible crops, with 50 images


def test_crops_and_mirrors_are_drawn_evenly_and_redrawn_each_epoch() -> None:
    rows = np.arange(100_000)
    first, second = _bits(rows, seed=1, epoch=0), _bits(rows, seed=1, epoch=1)
    assert (first != second).mean() > 0.999
    assert (_bits(rows, seed=2, epoch=0) != first).mean() > 0.999
    assert np.bincount((first & 0xFFFFF) % 9) / 1e5 == pytest.approx([1 / 9] * 9, abs=0.005)
    assert (first >> 40 & 1).mean() == pytest.approx(0.5, abs=0.01)


def test_images_too_small_for_their_crop_are_refused() -> None:
    with pytest.raises(
        ImageSizeError, match=r"images of 8x8 pixels with images.pad 1 are too small for images.crop 12"
    ):
        augment(photos(1), torch.arange(1), 1, 0, Images(crop=12, pad=1))


@pytest.mark.parametrize(
    ("recipe", "sizes", "says"),
    [
        (Images(crop=224), {"28x28": 9}, "images.crop: 224, but the images have 28x28 pixels"),
        (
            Images(crop=8),
            {"28x28": 9, "8x40": 3},
            "3 of 12 are not 28x28 pixels, such as 8x40; set images.resize",
        ),
        (Images(crop=32, pad=4), {"40x28": 9}, "set a crop of at most 28, or images.resize"),
    ],
)
def test_a_crop_that_does_not_fit_the_catalogue_is_refused(
    recipe: Images, sizes: dict[str, int], says: str
) -> None:
    with pytest.raises(ImageSizeError, match=says):
        require_sizes(recipe, sizes, max_odd_share=0.01)


def test_one_image_of_another_size_among_many_is_no_reason_to_refuse() -> None:
    require_sizes(Images(crop=28), {"28x28": 999, "3x3": 1}, max_odd_share=0.01)
    require_sizes(Images(crop=224, resize=256), {"28x28": 9, "3x3": 9}, max_odd_share=0.01)
    require_sizes(Images(crop=224), {}, max_odd_share=0.01)  # indexed before sizes were counted


def test_strong_augmentation_depends_on_seed_epoch_and_row_alone() -> None:
    images, rows = torch.randn(12, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.arange(12)
    together = strengthen(images, rows, seed=1, epoch=2)
    assert together.shape == images.shape
    assert together.isfinite().all()
    apart = torch.cat([strengthen(images[n : n + 1], rows[n : n + 1], 1, 2) for n in range(12)])
    torch.testing.assert_close(apart, together)
    for seed, epoch in ((2, 2), (1, 3)):
        assert not torch.equal(strengthen(images, rows, seed, epoch), together)


def test_strong_augmentation_moves_and_covers_parts_of_an_image() -> None:
    bright, rows = torch.ones(400, 3, 32, 32), torch.arange(400)
    covered = (strengthen(bright, rows, 1, 0) == 0).all(1)
    share = covered.float().mean((1, 2))
    assert 0.05 < share.mean() < 0.2
    often = covered.float().mean(0)
    assert 0 < often.min() < often.max() < 1  # any place of some images, no place of all


def test_each_part_of_the_strong_augmentation_leaves_half_of_the_images_alone() -> None:
    images, rows = torch.randn(800, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.arange(800)
    kept = torch.isclose(strengthen(images, rows, 1, 0), images, atol=1e-4).flatten(1).float().mean(1)
    assert 0.08 < (kept > 0.999).float().mean() < 0.17  # neither moved nor recoloured nor covered: an eighth
    assert 0.08 < ((kept > 0.5) & (kept < 0.999)).float().mean() < 0.17  # covered alone
