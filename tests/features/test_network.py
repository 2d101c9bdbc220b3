"""Networks that only predict: views, threads, and images that give no pixels."""

import io

import numpy as np
from PIL import Image

from pencil_scale.config.settings import Images
from pencil_scale.features.network import BATCH, load_frozen, outputs_of

RECIPE = Images(crop=4, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


def half_red(value: int) -> bytes:
    """An image whose left half is red."""
    pixels = np.zeros((6, 6, 3), np.uint8)
    pixels[:, :3, 0] = value
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def test_the_second_view_is_mirrored() -> None:
    network, _ = load_frozen("feature_making:colours", None, 4, 1)
    outputs, problems = outputs_of(network, [half_red(255)], RECIPE, views=2)
    red, red_of_left_half = 0, 3
    assert not problems
    assert outputs[0, :, red].tolist() == [0.5, 0.5]
    assert outputs[0, :, red_of_left_half].tolist() == [1.0, 0.0]


def test_outputs_keep_the_order_of_the_images_with_any_number_of_threads() -> None:
    network, _ = load_frozen("feature_making:colours", None, 4, 1)
    images = [half_red(number) for number in range(BATCH + 10)]
    images[3] = images[-1] = b"no image"
    alone, problems = outputs_of(network, images, RECIPE)
    together, same = outputs_of(network, images, RECIPE, num_threads=4)
    expected = np.arange(len(images)) / 510
    expected[[3, -1]] = 0
    assert np.allclose(alone[:, 0, 0], expected)
    assert np.array_equal(alone, together)
    assert problems == same
    assert list(problems) == [3, len(images) - 1]


def test_random_weights_are_the_same_in_every_process() -> None:
    first, sha256 = load_frozen("small_convnet", None, 8, 1)
    load_frozen.cache_clear()
    again, same = load_frozen("small_convnet", None, 8, 1)
    assert again.module is not first.module
    assert same == sha256
    assert load_frozen("small_convnet", None, 8, 2)[1] != sha256
    assert first.width == 64
