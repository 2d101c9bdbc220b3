"""Decoding gives the upright colours that a person sees, for every format and for damaged files."""

import contextlib
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from pencil_scale.images.decode import UndecodableError, decode

RED, GREEN, BLUE, WHITE = (200, 30, 30), (30, 160, 40), (20, 40, 190), (255, 255, 255)


def quarters(width: int = 64, height: int = 48) -> Image.Image:
    """Red and green above, blue and white below, so that every rotation and reflection looks different."""
    image = Image.new("RGB", (width, height), RED)
    image.paste(GREEN, (width // 2, 0, width, height // 2))
    image.paste(BLUE, (0, height // 2, width // 2, height))
    image.paste(WHITE, (width // 2, height // 2, width, height))
    return image


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def corners(pixels: np.ndarray) -> np.ndarray:
    """The colours in the middle of the four quarters, in reading order."""
    height, width = pixels.shape[:2]
    return np.array(
        [pixels[y, x] for y in (height // 4, 3 * height // 4) for x in (width // 4, 3 * width // 4)], int
    )


def assert_quarters(pixels: np.ndarray, tolerance: int = 12) -> None:
    assert pixels.dtype == np.uint8
    assert np.abs(corners(pixels) - np.array([RED, GREEN, BLUE, WHITE])).max() <= tolerance


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {"quality": 95}),
        ("JPEG", {"quality": 95, "progressive": True}),
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"quality": 95}),
        ("GIF", {}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
    ],
)
def test_every_format_gives_its_colours(kind: str, options: dict[str, Any]) -> None:
    data = encoded(quarters(), kind, **options)
    assert decode(data).shape == (48, 64, 3)
    assert_quarters(decode(data))
    assert decode(data, 32).shape == (32, 32, 3)
    assert_quarters(decode(data, 32))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_photo_from_a_rotated_camera_is_turned_upright(orientation: int, kind: str) -> None:
    rotations = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = quarters() if orientation == 1 else quarters().transpose(rotations[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(stored, kind, exif=exif, **options)
    assert decode(data).shape == (48, 64, 3)
    assert_quarters(decode(data), 20)
    assert_quarters(decode(data, 16), 20)


def test_cmyk_grey_palette_and_16_bit_images_become_rgb() -> None:
    assert_quarters(decode(encoded(quarters().convert("CMYK"), "JPEG", quality=95)))
    assert_quarters(decode(encoded(quarters().convert("P", palette=Image.Palette.ADAPTIVE), "PNG")))
    grey = decode(encoded(quarters().convert("L"), "JPEG", quality=95))
    assert np.ptp(grey.astype(int), axis=2).max() == 0
    assert np.abs(grey.astype(int)[..., 0] - np.asarray(quarters().convert("L"), int)).max() <= 8
    deep = np.full((8, 8), 0x9C40, np.uint16)
    assert np.all(decode(encoded(Image.fromarray(deep), "PNG")) == 0x9C)
    assert np.all(decode(encoded(Image.fromarray(deep), "TIFF")) == 0x9C)
    assert np.all(decode(encoded(Image.new("1", (8, 8), 1), "PNG")) == 255)


def test_transparency_is_laid_over_white() -> None:
    see_through = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    assert np.all(decode(encoded(see_through, "PNG")) == 255)
    assert np.all(decode(encoded(see_through, "WEBP", lossless=True)) == 255)
    half = decode(encoded(Image.new("LA", (8, 8), (0, 128)), "PNG"))
    assert np.all(np.abs(half.astype(int) - 127) <= 1)
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([9, 9, 9, 200, 0, 0])
    palette.paste(1, (4, 0, 8, 8))
    decoded = decode(encoded(palette, "PNG", transparency=0))
    assert decoded[0, 0].tolist() == [255, 255, 255]
    assert decoded[0, 7].tolist() == [200, 0, 0]
    keyed = encoded(Image.new("RGB", (4, 4), (1, 2, 3)), "PNG", transparency=(1, 2, 3))
    assert np.all(decode(keyed) == 255)


def test_of_an_animation_the_first_frame_is_used() -> None:
    frames = [quarters(), Image.new("RGB", (64, 48), (0, 0, 0))]
    for kind in ("GIF", "WEBP", "TIFF", "PNG"):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        assert_quarters(decode(data), 24)


def test_a_colour_profile_is_ignored() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert_quarters(decode(encoded(quarters(), "JPEG", quality=95, icc_profile=profile)))


@pytest.mark.parametrize("size", [(1600, 1200), (640, 480), (400, 533), (300, 300), (3000, 300), (90, 200)])
def test_a_photo_of_any_size_is_scaled_alike(size: tuple[int, int]) -> None:
    """A large JPEG is first decoded at a part of its size: compare with scaling the full photo."""
    noise = np.random.default_rng(0).normal(0, 1, (75, 100, 3)).cumsum(0).cumsum(1)
    scaled = (127 + 100 * noise / np.abs(noise).max()).astype(np.uint8)
    photo = Image.fromarray(scaled).resize(size, Image.Resampling.BICUBIC)
    data = encoded(photo, "JPEG", quality=92)
    full = np.asarray(
        Image.open(io.BytesIO(data)).convert("RGB").resize((256, 256), Image.Resampling.BILINEAR)
    )
    assert np.abs(decode(data, 256).astype(int) - full).mean() < 1.0


@pytest.mark.parametrize(
    ("size", "found"), [((400, 533), (400, 533)), ((640, 480), (400, 300)), ((1600, 1200), (400, 300))]
)
def test_a_photo_is_decoded_at_a_part_of_its_size_only_where_that_is_faster(
    size: tuple[int, int], found: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """6/8 of 400 x 533 would be enough pixels, but takes longer than all of them."""
    simplejpeg, sizes = pytest.importorskip("simplejpeg"), []
    plain = simplejpeg.decode_jpeg

    def noted(*arguments: Any, **options: Any) -> Any:
        pixels = plain(*arguments, **options)
        sizes.append(pixels.shape[1::-1])
        return pixels

    monkeypatch.setattr(simplejpeg, "decode_jpeg", noted)
    decode(encoded(quarters(*size), "JPEG"), 256)
    assert sizes == [found]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP"])
def test_a_truncated_file_keeps_the_pixels_that_arrived(kind: str) -> None:
    texture = np.random.default_rng(1).integers(0, 60, (240, 320, 3), dtype=np.uint8)
    image = Image.fromarray(np.asarray(quarters(320, 240)) // 2 + texture)
    data = encoded(image, kind, **({"interlace": False} if kind == "GIF" else {}))
    truncated = data[: len(data) * 6 // 10]
    with pytest.raises(OSError, match="truncated"):
        Image.open(io.BytesIO(truncated)).load()
    complete, found = decode(data), decode(truncated)
    arrived = slice(140, None) if kind == "BMP" else slice(100)  # BMP stores the bottom row first
    assert np.array_equal(found[arrived], complete[arrived])
    missing = found[:50] if kind == "BMP" else found[-50:]
    assert np.ptp(missing, axis=(0, 1)).max() == 0


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "0 bytes"),
        (b"<html>not found</html>", "no image format"),
        (b"\xff\xd8\xff\xe0" + bytes(500), "jpeg of 504 bytes"),
        (encoded(quarters(), "PNG")[:30], "png of 30 bytes"),
        (encoded(quarters(), "WEBP")[:60], "webp of 60 bytes"),
        (
            b"GIF89a\x08\0\x08\0\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\x08\x01\0\0;",
            "4294836225 pixels|65535 x 65535",
        ),
    ],
)
def test_bytes_that_give_no_pixels_are_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(UndecodableError, match=reason):
        decode(data, 32)


def test_damaged_bytes_give_pixels_or_a_reason_and_nothing_else() -> None:
    generator = np.random.default_rng(3)
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        data = np.frombuffer(encoded(quarters(), kind), np.uint8)
        for _ in range(60):
            damaged = data.copy()
            damaged[generator.integers(0, len(damaged), 5)] = generator.integers(0, 256, 5)
            with contextlib.suppress(UndecodableError):
                assert decode(damaged.tobytes(), 16).shape == (16, 16, 3)
