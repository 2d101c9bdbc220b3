"""Shards: WebDataset tars read strictly, sample by sample, without unpacking and without losing anything.

Members are grouped by webdataset's rule: the key is the name up to the first dot of its last part, the
suffix is the rest, lower-cased; consecutive members with one key are one sample. Bytes that cannot be read,
files without a key and repeated keys come as `Damage`.

    with open_source(url) as source:
        for found in ShardReader(source).read():
            ...                              # Sample | Damage, which comes as soon as it is found
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from pencil_scale.catalogue.tar_walk import Damage, Member, TarWalk
from pencil_scale.storage.urls import ByteSource, Window

IMAGE_SUFFIXES = frozenset(
    ("jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "jp2", "j2k", "heic")
)
PICKLE_SUFFIXES = frozenset(("pickle", "pkl", "pyd", "pth", "pt", "pt2", "joblib", "dill"))

# webdataset skips members such as `__info__` and everything in `__MACOSX__/`.
_META = re.compile(r"__[^/]*__($|/)")
_NO_FILES = frozenset(("directory", "other"))


@dataclass(slots=True)
class Sample:
    """Consecutive members with one key; `has_repeated_member` if two have the same suffix."""

    key: str
    start: int
    end: int
    members: dict[str, Member] = field(default_factory=dict)
    has_repeated_member: bool = False
    near_damage: bool = False
    ends_in_zeros: bool = False  # set for a shard's last sample only: bytes may have been lost before its end

    def image(self) -> tuple[Member | None, str | None]:
        """Find the image member, or say why there is not exactly one: `image_missing`, `several_images`.

        A suffix of one part (`jpg`) is the image; `seg.png` is only used if there is no other.
        """
        found = [member for suffix, member in self.members.items() if suffix in IMAGE_SUFFIXES]
        if not found:
            named = self.members.items()
            found = [member for suffix, member in named if suffix.rpartition(".")[2] in IMAGE_SUFFIXES]
        if len(found) == 1:
            return found[0], None
        return None, "several_images" if found else "image_missing"


class ShardReader:
    """Reads one shard from start to end. `skipped` counts members that belong to no sample, by kind."""

    def __init__(self, source: ByteSource) -> None:
        self.window = Window(source)
        self.skipped: Counter[str] = Counter()
        self._suffixes_of: dict[str, set[str]] = {}

    def read(self) -> Iterator[Sample | Damage]:
        """Yield samples and damage; the bytes of a sample are available while it is the latest one."""
        current: Sample | None = None
        damaged = False
        for piece in TarWalk(self.window).pieces():
            member = piece if isinstance(piece, Member) else None
            if isinstance(piece, Damage):
                yield piece
                damaged = True
                if current is not None:
                    current.near_damage = True
                if piece.name is not None:
                    member = Member(piece.start, piece.end, piece.name, "cut", piece.offset, piece.size)
            if member is None:
                continue
            name = None if member.kind in _NO_FILES else split_name(member.name)
            if name is None:
                yield from self._without_key(member)
                continue
            key, suffix = name
            if current is None or key != current.key:
                if current is not None:
                    yield self._finished(current)
                current = Sample(key, member.start, member.end, near_damage=damaged)
                self.window.keep = member.start
            damaged = member is not piece
            if suffix in current.members:
                current.has_repeated_member = True
            else:
                current.members[suffix] = member
            current.end = member.end
        if current is not None:
            last = max(current.members.values(), key=lambda member: member.offset)
            if last.kind == "file" and last.size > 0:
                current.ends_in_zeros = self.window.peek(last.offset + last.size - 1, 1) == b"\x00"
            yield self._finished(current)

    def data(self, member: Member) -> bytes:
        """Give a member's bytes, from memory if its sample is the latest one."""
        return self.window.at(member.offset, member.size)

    def _without_key(self, member: Member) -> Iterator[Damage]:
        """Report a file that webdataset would skip silently; count what is intentionally not a sample."""
        last = member.name[member.name.rfind("/") + 1 :]
        if member.kind in _NO_FILES:
            self.skipped[member.kind] += 1
        elif _META.match(member.name):
            self.skipped["meta"] += 1
        elif last.startswith("._"):
            self.skipped["macos_metadata"] += 1
        else:
            is_image = last.rpartition(".")[2].lower() in IMAGE_SUFFIXES
            detail = f"the name starts with a dot, so it has no key: {last[:100]!a}"
            if "." not in last:
                detail = f"the name has no suffix: {last[:100]!a}"
            yield Damage(
                member.start, member.end, "no_key", detail, member.name, num_samples=1 if is_image else 0
            )

    def _finished(self, sample: Sample) -> Sample | Damage:
        earlier = self._suffixes_of.setdefault(sample.key, set())
        is_known, is_repeated = bool(earlier), not earlier.isdisjoint(sample.members)
        earlier.update(sample.members)
        if not is_known:
            return sample
        kind, detail = "key_not_contiguous", "more members of an earlier sample, after other samples"
        if is_repeated:
            kind, detail = "key_repeated", "the key of an earlier sample, with members of the same names"
        return Damage(sample.start, sample.end, kind, detail, sample.key, num_samples=1)


def split_name(name: str) -> tuple[str, str] | None:
    """Split a member's name into key and suffix; None for names that webdataset skips.

    >>> split_name("train/a.b/0001.seg.PNG")
    ('train/a.b/0001', 'seg.png')
    """
    last = name.rfind("/") + 1
    dot = name.find(".", last)
    if dot <= last or (name.startswith("__") and _META.match(name)):
        return None
    return name[:dot], name[dot + 1 :].lower()


def name_oddity(name: str) -> str | None:
    """Say what makes a name dangerous to use as a path or to print raw."""
    if ".." in name and ".." in name.split("/"):
        return "name_leaves_folder"
    if name.startswith("/"):
        return "name_is_absolute"
    if len(name) > 1024:
        return "name_very_long"
    if not name.isprintable():
        return "name_not_text"
    return None
