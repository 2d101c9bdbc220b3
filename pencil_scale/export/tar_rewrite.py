"""Tar rewrite: a shard with new labels, and everything else bit for bit.

The archive is copied as raw bytes, headers included. Only the members that state a label which must change
get new contents, and a header with the new size and checksum: the one that `data.label` names, `.cls`, and
the label in the JSON member, which keeps the old value as `given_label`. Samples that are not listed are left
out, and so are damaged bytes, which cannot be assigned to a sample.

    labels = {"000017": NewLabel(3, "cat", given=1), "000018": None}         # None: unchanged
    rewrite_shard(source, sink, labels, LabelMember("cls"))
"""

import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from pencil_scale.catalogue.shards import split_name
from pencil_scale.catalogue.tar_headers import BLOCK, padded
from pencil_scale.catalogue.tar_walk import Damage, Filler, Member, TarWalk
from pencil_scale.storage.urls import ByteSource, Window

GIVEN_LABEL = "given_label"  # the field of a sample's JSON that keeps its old label


class NewLabel(NamedTuple):
    """A class by number and by name: a number is replaced by a number, a name by a name."""

    number: int
    name: str
    given: int | None = None  # the class in the shard; None: it has no label

    def like(self, old: Any) -> Any:
        """This label in the form of an old one; text that is a class name is read as one, even if digits."""
        if isinstance(old, str):
            return str(self.number) if old.strip().isdigit() and not self.name.isdigit() else self.name
        return self.number if isinstance(old, int | float) else self.name


@dataclass(frozen=True)
class LabelMember:
    """Where the label of a sample is stored: a suffix, and a field if the member is JSON."""

    suffix: str  # cls, txt or json
    field: str = "label"  # of the JSON member: the given label, or a copy of it
    add: bool = False  # labels came from a file beside the shards: add a member to each sample

    @classmethod
    def of(cls, source: str) -> "LabelMember":
        """Read `data.label` of the config: `cls`, `txt`, `json:FIELD`, `file:URL` or `table:URL`."""
        if source.startswith("json:"):
            return cls("json", source.removeprefix("json:"))
        return cls(source) if source in ("cls", "txt") else cls("cls", add=True)

    def states_label(self, suffix: str) -> bool:
        """Whether a member with this suffix may state the label of its sample."""
        return suffix in (self.suffix, "cls", "json")

    def replaced(self, suffix: str, data: bytes, label: NewLabel) -> bytes:
        """Write the new label in the form of the old one, as a number or as a name."""
        if suffix != "json":
            old = data.decode("utf-8", "surrogateescape")
            return str(label.like(old)).encode("utf-8", "surrogateescape")
        try:
            fields = json.loads(data.decode("utf-8", "surrogateescape"))
        except (ValueError, RecursionError):  # the label is elsewhere, or there would be none to replace
            return data
        return data if (new := self._relabelled(fields, label)) is None else new

    def _relabelled(self, fields: Any, label: NewLabel) -> bytes | None:
        """The JSON with the new label and the old one as `given_label`; None if it stays as it is."""
        holder, name = fields, self.field  # of a field, or a dotted path
        while isinstance(holder, dict) and name not in holder and "." in name:
            head, _, name = name.partition(".")
            holder = holder.get(head)
        if isinstance(holder, dict) and isinstance(old := holder.get(name), str | int | float | list):
            if (new := label.like(old)) == old:
                return None
            holder.setdefault(GIVEN_LABEL, old)  # a shard that was corrected before keeps the first one
            holder[name] = new
        elif isinstance(fields, dict) and label.given not in (None, label.number):
            fields.setdefault(GIVEN_LABEL, label.given)
        else:
            return None
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
    window.keep = 0
    for piece in TarWalk(window).pieces():
        window.keep = piece.start  # what is before it was copied
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
            label = labels[key] if key and where.states_label(suffix) else None
            if isinstance(piece, Member) and piece.kind == "file" and key and label:
                done |= {key} if suffix == where.suffix else set()
                old = window.at(piece.offset, piece.size)
                if (new := where.replaced(suffix, old, label)) != old:
                    _replace(window, sink, piece, new)
                    continue
            sink.write(window.at(piece.start, piece.end - piece.start))
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
