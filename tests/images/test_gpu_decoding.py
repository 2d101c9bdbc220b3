"""Decoding on the GPU gives what the CPU gives; what nvJPEG cannot decode goes to the CPU."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from pencil_scale.images.decode import decode
from pencil_scale.images.gpu_decode import decode_on_gpu, fits_nvjpeg, scaled

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def photo(width: int = 200, height: int = 150, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).normal(0, 1, (15, 20, 3)).cumsum(0).cumsum(1)
    small = (127 + 110 * noise / np.abs(noise).max()).astype(np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(photo(seed=5), exif=exif)


def mixed_batch() -> list[bytes]:
    jpegs = [encoded(photo(180 + 10 * n, 150, n), quality=92) for n in range(4)]
    complete = encoded(photo(seed=8), quality=92)
    odd = [
        encoded(photo(seed=4).convert("CMYK"), quality=92),
        rotated(),
        encoded(photo(seed=6), "PNG"),
        encoded(photo(seed=7).convert("L"), quality=92),
        encoded(photo(seed=3), quality=92, progressive=True),
        complete[: len(complete) // 2],
        b"not an image",
        complete[:300] + bytes(len(complete) - 302) + complete[-2:],  # damaged after the header
    ]
    return jpegs + odd


def decoded(images: list[bytes], device: str, side: int) -> tuple[torch.Tensor, dict[int, str]]:
    none = torch.empty(0, 3, side, side, dtype=torch.uint8)
    return decode_on_gpu(dict(enumerate(images)), none, device, side)


def assert_as_on_the_cpu(device: str, tolerance: float) -> None:
    images = mixed_batch()
    pixels, problems = decoded(images, device, 64)
    assert pixels.shape == (len(images), 3, 64, 64)
    assert pixels.dtype == torch.uint8
    assert pixels.is_contiguous(memory_format=torch.channels_last)
    assert "no image format" in problems[10]
    assert np.all(pixels[10].cpu().numpy() == 0)
    for number in range(10):
        assert number not in problems
        expected = decode(images[number], 64).transpose(2, 0, 1).astype(int)
        difference = np.abs(pixels[number].cpu().numpy() - expected)
        # Inverse cosine transforms and chroma upsampling may differ by a few levels between libraries.
        assert difference.mean() < tolerance, f"image {number}: {difference.mean():.2f} levels apart"


def test_without_a_gpu_the_cpu_decodes_all_images() -> None:
    assert_as_on_the_cpu("cpu", 0.01)


def test_only_plain_upright_complete_jpegs_go_to_nvjpeg() -> None:
    fit = [fits_nvjpeg(data) for data in mixed_batch()]
    assert fit[:4] == [True] * 4
    assert fit[4:11] == [False, False, False, True, True, False, False]


@pytest.mark.parametrize("size", [(533, 400), (40, 300), (64, 64), (65, 7), (1, 1)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])])
def test_images_are_scaled_as_pytorch_scales_them(size: tuple[int, int], device: str) -> None:
    images = torch.randint(256, (3, 3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    images[1] = 255
    expected = interpolate(images.float(), size=(64, 64), mode="bilinear", antialias=True)
    found = scaled(images.to(device), 64).cpu().float()
    assert (found - expected).abs().max() < (0.51 if device == "cpu" else 0.75)


def test_an_empty_batch_stays_empty() -> None:
    pixels, problems = decoded([], "cpu", 32)
    assert pixels.shape == (0, 3, 32, 32)
    assert not problems


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])])
def test_decoded_images_are_put_among_the_rest_of_their_batch(device: str) -> None:
    images = mixed_batch()
    rest = torch.full((3, 3, 64, 64), 7, dtype=torch.uint8)
    rest += torch.arange(3, dtype=torch.uint8)[:, None, None, None]
    numbers = [0, 2, 3, *range(6, 6 + len(images) - 3)]  # the rest has numbers 1, 4 and 5
    encoded = dict(zip(numbers, images, strict=True))
    pixels, problems = decode_on_gpu(encoded, rest, device, 64)
    alone, problems_alone = decoded(images, device, 64)
    assert torch.equal(pixels[[1, 4, 5]].cpu(), rest)
    assert torch.equal(pixels[numbers], alone)
    assert problems == {numbers[number]: reason for number, reason in problems_alone.items()}


@pytest.mark.gpu
@needs_cuda
def test_nvjpeg_gives_what_the_cpu_gives() -> None:
    assert_as_on_the_cpu("cuda", 2.0)


@pytest.mark.gpu
@needs_cuda
def test_nvjpeg_does_not_overwrite_what_a_running_step_still_reads() -> None:
    images = [encoded(photo(400, 533, n), quality=92) for n in range(224)]
    expected = decoded(images, "cuda", 256)[0]
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    sizes = [200_000 * (1 + n % 9) for n in range(len(images))]  # in bytes, like photos of different sizes
    for _ in range(5):
        ones = [torch.ones(size, dtype=torch.uint8, device="cuda") for size in sizes]
        product = matrix
        for _ in range(30):  # tens of milliseconds, during which the sums have to wait
            product = product @ matrix
        totals = torch.stack([one.sum() for one in ones])
        del ones
        pixels = decoded(images, "cuda", 256)[0]
        assert totals.tolist() == sizes
        assert torch.equal(pixels, expected)
