"""Tar rewrite: a shard with new labels, and everything else bit for bit.

The archive is copied as raw bytes, headers included. Only a label member that must change gets new contents,
and a header with the new size and checksum. Samples that are not listed are left out, and so are damaged
bytes, which cannot be assigned to a sample.

    labels = {"000017": NewLabel(3, "cat"), "000018": None}         # None: unchanged
    rewrite_shard(source, sink, labels, LabelMember("cls"))
"""

import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, NamedTuple

from pencil_scale.catalogue.shards import split_name
from pencil_scale.catalogue.tar_headers import BLOCK, padded
from pencil_scale.catalogue.tar_walk import Damage, Filler, Member, TarWalk
from pencil_scale.storage.urls import ByteSource, Window


class NewLabel(NamedTuple):
    """A class by number and by name: a number is replaced by a number, a name by a name."""

    number: int
    name: str


@dataclass(frozen=True)
class LabelMember:
    """Where the label of a sample is stored: a suffix, and a field if the member is JSON."""

    suffix: str  # cls, txt or json
    field: str | None = None
    add: bool = False  # labels came from a file beside the shards: add a member to each sample

    @classmethod
    def of(cls, source: str) -> "LabelMember":
        """Read `data.label` of the config: `cls`, `txt`, `json:FIELD`, `file:URL` or `table:URL`."""
        if source.startswith("json:"):
            return cls("json", source.removeprefix("json:"))
        return cls(source) if source in ("cls", "txt") else cls("cls", add=True)

    def replaced(self, data: bytes, label: NewLabel) -> bytes:
        """Write the new label in the form of the old one: as a number or as a name."""
        if self.field is None:
            is_number = data.strip().removeprefix(b"-").isdigit()
            return str(label.number if is_number else label.name).encode("utf-8", "surrogateescape")
        fields = holder = json.loads(data)
        name = self.field  # of a field, or a dotted path
        while name not in holder and "." in name:
            head, _, name = name.partition(".")
            holder = holder[head]
        holder[name] = label.number if isinstance(holder[name], int) else label.name
        return json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")


class Rewritten(NamedTuple):
    """How many samples of a shard were changed."""

    num_replaced: int
    num_left_out: int
    num_damaged: int  # ranges of bytes


def rewrite_shard(
    source: ByteSource, sink: IO[bytes], labels: Mapping[str, NewLabel | None], where: LabelMember
) -> Rewritten:
    """Copy a shard with new labels, and count what is left out."""
    done: set[str] = set()
    left_out: set[str] = set()
    current: str | None = None
    num_damaged, is_ended = 0, False
    window = Window(source)
    for piece in TarWalk(window).pieces():
        name = piece.name if isinstance(piece, Member | Damage) else None
        if name is None or (isinstance(piece, Member) and piece.kind in ("directory", "other")):
            key, suffix = None, ""
        else:
            key, suffix = split_name(name) or (None, "")
        if current is not None and key != current:
            _add_label(sink, current, labels.get(current), where, done)
        current = key
        is_ended = isinstance(piece, Filler) and piece.end == source.num_bytes
        if key is not None and key not in labels:
            left_out.add(key)
        if isinstance(piece, Damage):
            num_damaged += piece.end > piece.start
        elif key is None or key in labels:
            label = labels[key] if key and suffix == where.suffix and key not in done else None
            if isinstance(piece, Member) and key and label:
                done.add(key)
                _replace(window, sink, piece, where.replaced(window.at(piece.offset, piece.size), label))
            else:
                sink.write(window.peek(piece.start, piece.end - piece.start))
                sink.write(bytes((piece.start - piece.end) % BLOCK))  # padding that is missing in the shard
    if not is_ended:
        sink.write(bytes(2 * BLOCK))
    return Rewritten(len(done), len(left_out), num_damaged)


def _replace(window: Window, sink: IO[bytes], member: Member, data: bytes) -> None:
    """Write a member with its old headers and new contents."""
    headers = bytearray(window.peek(member.start, member.offset - member.start))
    header = headers[-BLOCK:]  # after those of long names and the like
    header[124:136] = b"%011o\0" % len(data)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    sink.write(headers[:-BLOCK] + header + data + bytes(padded(len(data)) - len(data)))


def _add_label(sink: IO[bytes], key: str, label: NewLabel | None, where: LabelMember, done: set[str]) -> None:
    """Add a label after the members of a sample that has none."""
    if not where.add or label is None or key in done:
        return
    done.add(key)
    data = str(label.number).encode()
    info = tarfile.TarInfo(f"{key}.{where.suffix}")
    info.size, info.mode = len(data), 0o444
    sink.write(info.tobuf(tarfile.PAX_FORMAT) + data + bytes(padded(len(data)) - len(data)))
