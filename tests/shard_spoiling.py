"""Shards of several writers, spoiled at random, with the origin of every byte kept to compare with."""

import io
import random
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tar_making import python_tar

Origin = np.ndarray[Any, np.dtype[np.int64]]
Place = tuple[int, int, int]  # where a member's first header starts, its data start, and its data end


@dataclass(frozen=True)
class Original:
    """An intact shard, and where Python's own reader finds each sample's members."""

    data: bytes
    samples: dict[str, dict[str, Place]]

    @classmethod
    def of(cls, data: bytes) -> "Original":
        samples: dict[str, dict[str, Place]] = {}
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for info in archive:
                dot = info.name.index(".", info.name.rfind("/") + 1)
                place = (info.offset, info.offset_data, info.offset_data + info.size)
                samples.setdefault(info.name[:dot], {})[info.name[dot + 1 :]] = place
        return cls(data, samples)


@dataclass(frozen=True)
class Spoiled:
    """A damaged copy of a shard: for each byte its offset in the original, -1 if it was changed or added."""

    data: bytes
    origin: Origin
    what: str

    def where(self, place: Place) -> int | None:
        """Find a member whose headers and data are all there, in one stretch, and the zeros after them.

        It cannot be known whether bytes right after the data were added there or before.
        """
        start, _, end = place
        end += min(8, -end % 512)
        for first in np.flatnonzero(self.origin == start):
            if np.array_equal(self.origin[first : first + end - start], np.arange(start, end)):
                return int(first)
        return None


def noisy_members(seed: int, num_samples: int, folder: str = "") -> list[tuple[str, bytes]]:
    """Samples of images that do not compress, so that their sizes and bytes all differ."""
    chance = random.Random(seed)
    members = []
    for number in range(num_samples):
        size = chance.randrange(6, 36)
        pixels = np.frombuffer(chance.randbytes(size * size * 3), np.uint8).reshape(size, size, 3)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG" if number % 2 else "JPEG")
        key = f"{folder}{number:05d}"
        text = b'{"text": "%s"}' % (b"z" * chance.randrange(900))
        members += [
            (f"{key}.{'png' if number % 2 else 'jpg'}", buffer.getvalue()),
            (f"{key}.cls", b"%d" % (number % 3)),
            (f"{key}.json", text),
        ]
    return members


def originals(folder: Path) -> Iterator[tuple[str, Original]]:
    """The same kind of shard by Python in its three formats, by webdataset, and by GNU tar where it is."""
    plain, deep = noisy_members(1, 8), noisy_members(2, 8, "d" * 95 + "/sub/")
    yield "ustar", Original.of(python_tar(plain))
    yield "gnu", Original.of(python_tar(deep, tarfile.GNU_FORMAT))
    yield "pax", Original.of(python_tar(noisy_members(3, 8, "é/"), tarfile.PAX_FORMAT))
    yield "webdataset", Original.of(_by_webdataset(plain, folder / "w.tar"))
    if shutil.which("tar"):
        for form in ("gnu", "pax"):
            yield f"tar --format={form}", Original.of(_by_tar(deep, form, folder / form))


def _by_webdataset(members: list[tuple[str, bytes]], path: Path) -> bytes:
    import webdataset

    with webdataset.TarWriter(str(path), encoder=False, mtime=1.5) as writer:
        for first in range(0, len(members), 3):
            parts = [(name.partition("."), data) for name, data in members[first : first + 3]]
            key = parts[0][0][0]
            writer.write({"__key__": key, **{suffix: data for (_, _, suffix), data in parts}})
    return path.read_bytes()


def _by_tar(members: list[tuple[str, bytes]], form: str, folder: Path) -> bytes:
    for name, data in members:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    nobody = ["--mtime=@0", "--owner=0", "--group=0", "--numeric-owner"]
    command = ["tar", f"--format={form}", *nobody, "-cf", "out", *(name for name, _ in members)]
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "out").read_bytes()


def spoil(data: bytes, seed: str) -> Spoiled:
    """Do one to three things to a shard."""
    chance = random.Random(seed)
    raw, origin = np.frombuffer(data, np.uint8), np.arange(len(data))
    done = []
    for _ in range(chance.choice([1, 1, 2, 3])):
        if len(raw) < 2048:
            break
        action = chance.choice(["flip", "cut", "insert", "delete", "swap", "zero", "garble"])
        at = chance.choice([chance.randrange(len(raw)), chance.randrange(len(raw) // 512) * 512])
        length = chance.choice(
            [chance.randrange(1, 20), chance.randrange(1, 5000), chance.randrange(1, 5) * 512]
        )
        raw, origin = _changed(chance, action, raw, origin, at, length)
        done.append(f"{action} {at} {length}")
    return Spoiled(raw.tobytes(), origin, ", ".join(done))


def _changed(
    chance: random.Random, action: str, raw: Any, origin: Origin, at: int, length: int
) -> tuple[Any, Origin]:
    if action == "cut":
        return raw[:at], origin[:at]
    if action == "delete":
        return np.delete(raw, slice(at, at + length)), np.delete(origin, slice(at, at + length))
    if action == "insert":
        more = np.frombuffer(chance.choice([chance.randbytes(length), bytes(length)]), np.uint8)
        return np.insert(raw, at, more), np.insert(origin, at, np.full(length, -1))
    raw, origin = raw.copy(), origin.copy()
    if action == "flip":
        raw[at] ^= 1 << chance.randrange(8)
        origin[at] = -1
    elif action == "swap":
        one, two = (slice(number, number + 512) for number in _two_blocks(chance, len(raw)))
        raw[one], raw[two] = raw[two].copy(), raw[one].copy()
        origin[one] = origin[two] = -1
    else:
        first = at // 512 * 512
        here = slice(first, first + -(-length // 512) * 512)
        length = len(raw[here])
        raw[here] = np.frombuffer(bytes(length) if action == "zero" else chance.randbytes(length), np.uint8)
        origin[here] = -1
    return raw, origin


def _two_blocks(chance: random.Random, num_bytes: int) -> tuple[int, int]:
    one, two = chance.sample(range(num_bytes // 512), 2)
    return one * 512, two * 512
