"""What the bytes of an image say about it: compared with PIL for intact images, and tried on damaged ones."""

import io
import struct
import subprocess
import sys
import threading
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from pencil_scale.images.inspect import MAX_PIXELS, ImageFacts, inspect_image, load_image

PROBLEMS = (None, "image_empty", "image_unreadable", "image_bomb")


def picture(mode: str = "RGB", size: tuple[int, int] = (48, 40)) -> Image.Image:
    """A gradient with some texture, so that every encoder has something to write."""
    grey = Image.linear_gradient("L").resize(size)
    texture = Image.frombytes("L", size, bytes(i * i * 7 // 3 % 251 for i in range(size[0] * size[1])))
    coloured = Image.merge("RGB", (grey, grey.rotate(90), texture))
    if mode.startswith("I;16"):
        return grey.convert("I").point(lambda value: value * 256).convert("I;16")
    return coloured.convert(mode)


def encoded(format: str, mode: str = "RGB", size: tuple[int, int] = (48, 40), **options: object) -> bytes:
    target = io.BytesIO()
    picture(mode, size).save(target, format, **options)
    return target.getvalue()


def animated(format: str) -> bytes:
    target = io.BytesIO()
    frames = [picture("RGB").rotate(angle) for angle in (90, 180)]
    picture("RGB").save(target, format, save_all=True, append_images=frames, duration=50)
    return target.getvalue()


def rotated_exif() -> bytes:
    exif = Image.Exif()
    exif[274] = 6
    return exif.tobytes()


USUAL = [
    ("jpeg", encoded("JPEG")),
    ("jpeg", encoded("JPEG", progressive=True, optimize=True)),
    ("jpeg", encoded("JPEG", "L")),
    ("jpeg", encoded("JPEG", "CMYK")),
    ("png", encoded("PNG")),
    ("png", encoded("PNG", "RGBA")),
    ("png", encoded("PNG", "LA")),
    ("png", encoded("PNG", "P")),
    ("png", encoded("PNG", "1")),
    ("png", encoded("PNG", "I;16")),
    ("webp", encoded("WEBP")),
    ("webp", encoded("WEBP", lossless=True)),
    ("webp", encoded("WEBP", "RGBA", lossless=True)),
    ("webp", encoded("WEBP", "RGBA")),
    ("gif", encoded("GIF", "P")),
    ("bmp", encoded("BMP")),
    ("bmp", encoded("BMP", "P")),
    ("tiff", encoded("TIFF")),
    ("tiff", encoded("TIFF", "CMYK")),
    ("tiff", encoded("TIFF", "P")),
    ("tiff", encoded("TIFF", "L", compression="tiff_deflate")),
    ("avif", encoded("AVIF")),
    ("jpeg2000", encoded("JPEG2000")),
]


@pytest.mark.parametrize(("format", "data"), USUAL)
def test_inspecting_the_header_finds_what_pil_finds(format: str, data: bytes) -> None:
    with Image.open(io.BytesIO(data)) as image:
        expected = (format, image.width, image.height, image.mode, None)
    facts = inspect_image(data)
    assert (facts.format, facts.width, facts.height, facts.mode, facts.problem) == expected


@pytest.mark.parametrize(("format", "data"), USUAL)
def test_decoding_an_intact_image_finds_no_problem(format: str, data: bytes) -> None:
    assert inspect_image(data, decode=True) == inspect_image(data)


@pytest.mark.parametrize(
    ("data", "oddities"),
    [
        (encoded("JPEG"), ()),
        (encoded("JPEG", "CMYK"), ("cmyk",)),
        (encoded("TIFF", "CMYK"), ("cmyk",)),
        (encoded("JPEG", "L"), ("grey",)),
        (encoded("PNG", "I;16"), ("grey", "16-bit")),
        (encoded("TIFF", "I;16"), ("grey", "16-bit")),
        (encoded("PNG", "P"), ("palette",)),
        (encoded("PNG", "RGBA"), ("alpha",)),
        (animated("GIF"), ("palette", "animated")),
        (animated("WEBP"), ("animated",)),
        (animated("PNG"), ("animated",)),
        (animated("AVIF"), ("animated",)),
        (animated("TIFF"), ("multipage",)),
        (encoded("PNG", size=(1, 1)), ("1x1",)),
        (encoded("JPEG", exif=rotated_exif()), ("exif-rotated",)),
        (encoded("WEBP", exif=rotated_exif()), ("exif-rotated",)),
        (encoded("PNG", exif=rotated_exif()), ("exif-rotated",)),
        (encoded("JPEG")[:-200], ("truncated",)),
        (encoded("PNG")[:-200], ("truncated",)),
        (encoded("BMP")[:-200], ("truncated",)),
        (encoded("GIF", "P")[:-200], ("palette", "truncated")),
    ],
)
def test_an_odd_but_usable_image_is_ok_and_counted_by_kind(data: bytes, oddities: tuple[str, ...]) -> None:
    for decode in (False, True):
        facts = inspect_image(data, decode=decode)
        assert (facts.oddities, facts.problem) == (oddities, None)


def test_bytes_that_are_not_an_image_are_refused() -> None:
    assert inspect_image(b"") == ImageFacts(problem="image_empty")
    assert inspect_image(b"\0") == ImageFacts(problem="image_unreadable")
    assert inspect_image(b"<html>Not found</html>").problem == "image_unreadable"
    assert inspect_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n").problem == "image_unreadable"
    assert inspect_image(encoded("JPEG")[:100]).problem == "image_unreadable"
    assert (
        inspect_image(encoded("WEBP")[:-10]).problem == "image_unreadable"
    )  # libwebp needs the complete file
    assert inspect_image(encoded("PNG")[:33]).problem == "image_unreadable"  # a header without pixels


def test_only_decoding_finds_damage_after_the_header() -> None:
    intact = encoded("PNG")
    at = intact.index(b"IDAT") + 8
    damaged = intact[:at] + bytes(40) + intact[at + 40 :]
    assert inspect_image(damaged).problem is None
    assert inspect_image(damaged, decode=True).problem == "image_unreadable"


def png_declaring(width: int, height: int) -> bytes:
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b""))]
    body = [struct.pack(">I", len(c)) + n + c + struct.pack(">I", zlib.crc32(n + c)) for n, c in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def gif_with_a_frame_beyond_its_screen() -> bytes:
    return (
        b"GIF89a"
        + struct.pack("<HHBBB", 8, 8, 0, 0, 0)
        + b","
        + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0)
        + b"\x08\x01\0\0;"
    )


def tiff_with_a_huge_tile() -> bytes:
    entries = [
        (256, 8),
        (257, 8),
        (258, 8),
        (259, 1),
        (262, 1),
        (277, 1),
        (322, 60000),
        (323, 60000),
        (324, 8),
        (325, 8),
    ]
    body = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + body + bytes(4)


def jpeg_with_thousands_of_scans() -> bytes:
    data = encoded("JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + scan * 3000 + data[-2:]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("pil_limit", [None, 10, 89_478_485])
def test_a_bomb_is_recognised_by_its_header_whatever_pils_own_limit(
    monkeypatch: pytest.MonkeyPatch, pil_limit: int | None
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pil_limit)
    bombs = (
        png_declaring(2**31 - 1, 2**31 - 1),
        png_declaring(MAX_PIXELS + 1, 1),
        gif_with_a_frame_beyond_its_screen(),
        tiff_with_a_huge_tile(),
        jpeg_with_thousands_of_scans(),
    )
    for bomb in bombs:
        assert [inspect_image(bomb, decode=decode).problem for decode in (False, True)] == ["image_bomb"] * 2
    assert inspect_image(png_declaring(MAX_PIXELS, 1)).problem is None
    assert inspect_image(encoded("PNG"), decode=True).problem is None


@pytest.mark.slow
def test_a_truncated_image_leaves_other_threads_strict() -> None:
    truncated, stop, seen = encoded("PNG", size=(256, 256))[:-2000], threading.Event(), set()

    def watch() -> None:
        while not stop.is_set():
            seen.add(ImageFile.LOAD_TRUNCATED_IMAGES)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(20):
        assert inspect_image(truncated, decode=True).problem is None
    stop.set()
    watcher.join()
    assert seen == {False}


@pytest.mark.slow
def test_a_truncated_png_cannot_unpack_more_than_it_declares() -> None:
    flood = zlib.compress(bytes(200 * 2**20), 9)
    header = png_declaring(8, 8)[:33]
    cut = header + struct.pack(">I", len(flood)) + b"IDAT" + flood[:-5]
    facts = inspect_image(cut, decode=True)
    assert (facts.oddities, facts.problem) == (("truncated",), None)
    assert load_image(cut).tobytes() == bytes(8 * 8 * 3)


def test_no_other_plugin_of_pil_is_loaded() -> None:
    code = (
        "import sys; from pencil_scale.images.inspect import inspect_image;"
        "inspect_image(b'%!PS-Adobe', decode=True); inspect_image(b'8BPS' + bytes(40), decode=True);"
        "bad = [m for m in sys.modules if m.startswith('PIL.') and ('Eps' in m or 'Fpx' in m or 'Psd' in m)];"
        "sys.exit(str(bad) if bad else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


INTACT = [data for _, data in USUAL] + [animated("GIF"), animated("WEBP"), animated("TIFF")]


@st.composite
def damaged_images(draw: st.DrawFn) -> bytes:
    """An intact image with some bytes overwritten, removed, or cut off."""
    data = bytearray(draw(st.sampled_from(INTACT)))
    near_the_start = st.integers(0, min(len(data) - 1, 200))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(near_the_start | st.integers(0, len(data) - 1))
        data[at : at + draw(st.integers(0, 4))] = draw(st.binary(min_size=0, max_size=4))
        if not data:
            break
    return bytes(data[: draw(st.integers(0, len(data)))]) if draw(st.booleans()) else bytes(data)


def check_any(data: bytes) -> None:
    header, decoded = inspect_image(data), inspect_image(data, decode=True)
    assert header.problem in PROBLEMS
    assert decoded.problem in PROBLEMS
    if header.problem is not None:
        assert decoded == header  # decoding never accepts an image whose header was refused
    else:
        assert 0 < header.width * header.height <= MAX_PIXELS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # PIL warns about broken TIFF tags
@settings(max_examples=400)
@given(damaged_images())
def test_no_damage_crashes_the_inspection(data: bytes) -> None:
    check_any(data)


@settings(max_examples=200)
@given(
    st.sampled_from(
        [
            b"\xff\xd8\xff",
            b"\x89PNG\r\n\x1a\n",
            b"GIF89a",
            b"BM",
            b"II*\0",
            b"MM\0+",
            b"RIFF\x20\0\0\0WEBPVP8X",
        ]
    ),
    st.binary(max_size=300),
)
def test_no_random_bytes_after_a_signature_crash_the_inspection(signature: bytes, noise: bytes) -> None:
    check_any(signature + noise)
