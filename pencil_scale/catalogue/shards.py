"""Shards: WebDataset tars read strictly, sample by sample, nothing unpacked and nothing lost.

Members are grouped by webdataset's rule: the key is the name up to the first dot of its last part, the
suffix is the rest, lower-cased; neighbours of one key are one sample. Where a tar breaks the rule the
sample says so (`problem`), and what cannot be read at all, or has no key, comes as `Damage` in between.

    with open_source(url) as source:
        for found in ShardReader(source).read():
            ...                              # Sample | Damage; damage comes as soon as it is met
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

# webdataset leaves out members such as `__info__` and everything below `__MACOSX__/`.
_META = re.compile(r"__[^/]*__($|/)")
_NO_FILES = frozenset(("directory", "other"))


@dataclass(slots=True)
class Sample:
    """Neighbouring members of one key. `problem` is what the tar did to it, None when all is well."""

    key: str
    start: int
    end: int
    members: dict[str, Member] = field(default_factory=dict)
    problem: str | None = None
    near_damage: bool = False
    ends_in_zeros: bool = False  # asked of a shard's last sample only

    def image(self) -> tuple[Member | None, str | None]:
        """Find the image member, or say why there is not exactly one: `image_missing`, `several_images`.

        A suffix of one part (`jpg`) is the image; `seg.png` is only taken where nothing else is there.
        """
        plain = [member for suffix, member in self.members.items() if suffix in IMAGE_SUFFIXES]
        if len(plain) == 1:
            return plain[0], None
        found = plain or [
            member for suffix, member in self.members.items() if suffix.rpartition(".")[2] in IMAGE_SUFFIXES
        ]
        if len(found) == 1:
            return found[0], None
        return None, "several_images" if found else "image_missing"


Found = Sample | Damage


class ShardReader:
    """Reads one shard from front to back. `skipped` counts members that belong to no sample, by kind."""

    def __init__(self, source: ByteSource) -> None:
        self.window = Window(source)
        self.skipped: Counter[str] = Counter()
        self._suffixes_of: dict[str, frozenset[str]] = {}
        self._known_sets: dict[frozenset[str], frozenset[str]] = {}

    def read(self) -> Iterator[Found]:
        """Yield samples and damage; the bytes of a sample can be had while it is the latest one."""
        current: Sample | None = None
        damaged = False
        for piece in TarWalk(self.window).pieces():
            member = piece if isinstance(piece, Member) else None
            if isinstance(piece, Damage):
                yield piece
                damaged = True
                if current is not None:
                    current.near_damage = True
                member = _cut_member(piece)
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
                current.problem = "repeated_member"
            else:
                current.members[suffix] = member
            current.end = member.end
        if current is not None:
            current.ends_in_zeros = self._ends_in_zeros(current)
            yield self._finished(current)

    def data(self, member: Member) -> bytes:
        """Give a member's bytes, from memory while its sample is the latest one read."""
        return self.window.at(member.offset, member.size)

    def _without_key(self, member: Member) -> Iterator[Damage]:
        """Tell of a file that webdataset would leave out in silence; count what is no sample by intent."""
        last = member.name[member.name.rfind("/") + 1 :]
        if member.kind in _NO_FILES:
            self.skipped[member.kind] += 1
        elif _META.match(member.name):
            self.skipped["meta"] += 1
        elif last.startswith("._"):
            self.skipped["macos_metadata"] += 1
        else:
            is_image = last.rpartition(".")[2].lower() in IMAGE_SUFFIXES
            detail = f"the name begins with a dot, so nothing is its key: {last[:100]!a}"
            if "." not in last:
                detail = f"the name has no suffix: {last[:100]!a}"
            yield Damage(
                member.start, member.end, "no_key", detail, member.name, num_samples=1 if is_image else 0
            )

    def _ends_in_zeros(self, sample: Sample) -> bool:
        """Tell whether a shard's last data end like the zeros behind them, as if bytes had been lost."""
        last = max(sample.members.values(), key=lambda member: member.offset)
        is_file = last.kind == "file" and last.size > 0
        return is_file and self.window.peek(last.offset + last.size - 1, 1) == b"\x00"

    def _finished(self, sample: Sample) -> Sample:
        suffixes = frozenset(sample.members)
        suffixes = self._known_sets.setdefault(suffixes, suffixes)
        earlier = self._suffixes_of.get(sample.key)
        if earlier is None:
            self._suffixes_of[sample.key] = suffixes
        else:
            sample.problem = "key_repeated" if earlier & suffixes else "key_not_contiguous"
            self._suffixes_of[sample.key] = earlier | suffixes
        return sample


def split_name(name: str) -> tuple[str, str] | None:
    """Split a member's name into key and suffix; None for names that webdataset gives to no sample.

    >>> split_name("train/a.b/0001.seg.PNG")
    ('train/a.b/0001', 'seg.png')
    """
    last = name.rfind("/") + 1
    dot = name.find(".", last)
    if dot <= last or (name.startswith("__") and _META.match(name)):
        return None
    return name[:dot], name[dot + 1 :].lower()


def name_oddity(name: str) -> str | None:
    """Say what makes a name dangerous to whoever would use it as a path or print it raw."""
    if ".." in name and ".." in name.split("/"):
        return "name_leaves_folder"
    if name.startswith("/"):
        return "name_is_absolute"
    if len(name) > 1024:
        return "name_very_long"
    if not name.isprintable():
        return "name_not_text"
    return None


def _cut_member(damage: Damage) -> Member | None:
    if damage.name is None:
        return None
    return Member(damage.start, damage.end, damage.name, "cut", damage.offset, damage.size)
