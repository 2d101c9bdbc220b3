"""Small tars made by hand, such as no correct writer would make."""

import io
import tarfile

BLOCK = 512


def block(
    name: bytes, length: int, typeflag: bytes = b"0", *, magic: bytes = b"ustar\x0000", **fields: bytes
) -> bytes:
    """One header block with a right checksum; any field can be overridden by its raw bytes."""
    parts = {
        "name": name[:100].ljust(100, b"\0"),
        "mode": b"0000644\0",
        "uid": b"0000000\0",
        "gid": b"0000000\0",
        "size": b"%011o\0" % length,
        "mtime": b"00000000000\0",
        "chksum": b" " * 8,
        "typeflag": typeflag,
        "linkname": bytes(100),
        "magic": magic,
        "rest": bytes(247),
    }
    raw = b"".join({**parts, **fields}.values()).ljust(BLOCK, b"\0")
    return with_checksum(raw)


def with_checksum(raw: bytes) -> bytes:
    raw = raw[:148] + b" " * 8 + raw[156:]
    return raw[:148] + b"%06o\0 " % sum(raw) + raw[156:]


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def member(name: bytes, data: bytes, typeflag: bytes = b"0", **fields: bytes) -> bytes:
    return block(name, len(data), typeflag, **fields) + padded(data)


def pax(records: dict[bytes, bytes], typeflag: bytes = b"x") -> bytes:
    return member(b"pax", b"".join(pax_record(key, value) for key, value in records.items()), typeflag)


def pax_record(key: bytes, value: bytes) -> bytes:
    body = b" " + key + b"=" + value + b"\n"
    length = len(body) + 1
    while len(b"%d" % length) + len(body) != length:
        length += 1
    return b"%d" % length + body


END = bytes(2 * BLOCK)


def python_tar(members: list[tuple[str, bytes]], tar_format: int = tarfile.USTAR_FORMAT) -> bytes:
    """A tar as Python's own writer makes it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def simple_members(num_samples: int, image: bytes = b"image") -> list[tuple[str, bytes]]:
    return [
        (f"{number:06d}.{suffix}", data)
        for number in range(num_samples)
        for suffix, data in (("jpg", image), ("cls", b"1"), ("json", b'{"url": "u%d"}' % number))
    ]
