"""Shard index: reads one shard and returns its samples and its damage, as tables.

Every sample is one row of the samples, or one row of the damage if it has no readable id.

    with open_source(url) as source:
        indexer = ShardIndexer(source, shard, rules)
        samples, damage = indexer.read()         # and `shard` now has all counts
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from pencil_scale.catalogue.catalogue import Shard
from pencil_scale.catalogue.class_names import LabelClasses, LabelLookup, lookup_key
from pencil_scale.catalogue.schema import (
    CHUNK_ROWS,
    DAMAGE,
    HARMLESS,
    SAMPLE,
    damage_line,
    from_json,
    shard_stem,
    to_stored,
)
from pencil_scale.catalogue.shards import PICKLE_SUFFIXES, Sample, ShardReader, name_oddity
from pencil_scale.catalogue.tar_headers import holds_header
from pencil_scale.catalogue.tar_walk import Damage, Member
from pencil_scale.images.inspect import ImageFacts, inspect_image
from pencil_scale.storage.errors import PencilError, sample_key
from pencil_scale.storage.urls import ByteSource

MAX_IMAGE_BYTES = 256 << 20
MAX_TEXT_BYTES = 1 << 20
MAX_TEXTS = 100  # different ones that are counted: if keys contain dots, every sample has its own suffix
MAX_FIELDS = 20  # of a JSON member, that are named if a sample has no label
_UNUSABLE = {"cut": "cut", "link": "link_member", "sparse": "sparse_member"}


@dataclass(frozen=True)
class IndexRules:
    """The settings for reading a sample; `name` changes with everything that would change the result."""

    identity: str
    label: str  # `cls`, `txt`, `json:FIELD`, or the name of one of the tables
    classes: LabelClasses
    truth: str | None = None
    decode_images: bool = False
    tables: Mapping[str, LabelLookup] = field(default_factory=dict)
    name: str = ""


class ShardIndexer:
    """Indexes one shard, and counts in `shard` what it finds."""

    def __init__(self, source: ByteSource, shard: Shard, rules: IndexRules) -> None:
        self._shard = shard
        self._rules = rules
        self._reader = ShardReader(source)
        self._stem = shard_stem(shard.url)
        sources = (rules.identity, rules.label, rules.truth or "")
        self._needs_json = any(source.startswith("json:") for source in sources)
        self._samples: list[tuple[Any, ...]] = []
        self._damage: list[tuple[Any, ...]] = []

    def read(self) -> tuple[pa.Table, pa.Table]:
        """Read the shard to its end; returns its samples and its damage."""
        shard, batches = self._shard, []
        for found in self._reader.read():
            if isinstance(found, Damage):
                shard.num_samples += found.num_samples
                self._add_damage(found)
                continue
            shard.num_samples += 1
            try:
                self._add_sample(found)
            except PencilError:
                raise
            except Exception as error:  # a bug of ours or of a decoder must not end the run
                self._lose(found, "not_understood", f"{type(error).__name__} while reading it")
            if len(self._samples) == CHUNK_ROWS:
                batches.append(_table(self._samples, SAMPLE))
                self._samples = []
        if shard.num_samples == 0 and not self._damage:
            self._add_damage(Damage(0, shard.num_bytes, "no_samples", "an intact tar without samples"))
        if shard.num_expected not in (None, shard.num_samples):
            detail = f"img2dataset counted {shard.num_expected:,} samples, {shard.num_samples:,} were found"
            self._add_damage(Damage(shard.num_bytes, shard.num_bytes, "count_mismatch", detail))
        samples = pa.concat_tables([*batches, _table(self._samples, SAMPLE)])
        shard.num_with_id = len(samples)
        shard.skipped = self._reader.skipped
        shard.suffixes = {to_stored(suffix): count for suffix, count in shard.suffixes.items()}
        return samples, _table(self._damage, DAMAGE)

    def _add_sample(self, sample: Sample) -> None:
        for suffix in sample.members:
            _count(self._shard.suffixes, suffix)
        member, image, digest = self._image(sample)
        fields, json_problem = self._json(sample) if self._needs_json else (None, None)
        sample_id = self._sample_id(sample.key, fields, digest)
        if not sample_id:
            kind = "cut_short" if sample.near_damage else "id_missing"
            reason = image.problem or json_problem or "no such field, or no text in it"
            return self._lose(sample, kind, f"no id by {self._rules.identity}: {reason}")
        key = sample_key(sample_id)
        noisy_class, label_problem = self._class(sample, self._rules.label, fields, key, json_problem)
        if label_problem == "unlabelled" and not self._shard.json_fields:
            self._shard.json_fields = _values(fields if self._needs_json else self._json(sample)[0])
        truth = self._rules.truth
        true_class = None if truth is None else self._class(sample, truth, fields, key, None)[0]
        status = _status(sample, image, label_problem)
        self._samples.append(
            (
                to_stored(sample_id),
                key,
                to_stored(sample.key),
                sample.start,
                sample.end,
                member.offset if member else sample.start,
                member.size if member else 0,
                image.format,
                noisy_class,
                true_class,
                status,
                self._oddity(sample, image),
                digest[:16] if digest else None,
            )
        )
        self._shard.statuses[status] += 1
        if status == "ok" and "exif-rotated" not in image.oddities:  # those may change width and height
            _count(self._shard.sizes, f"{image.width}x{image.height}")
        return None

    def _lose(self, sample: Sample, kind: str, detail: str) -> None:
        self._add_damage(Damage(sample.start, sample.end, kind, detail, sample.key, num_samples=1))

    def _add_damage(self, found: Damage) -> None:
        start, end, kind, detail, name, *_, num_samples = found
        self._shard.damage[kind] += 1
        self._shard.num_lost += num_samples
        if num_samples == 0 and kind not in HARMLESS:
            self._shard.lost_bytes += end - start
        line = damage_line(self._shard.url, start, kind, detail)
        self._damage.append(
            (-1, start, end, kind, None if name is None else to_stored(name), num_samples, line)
        )

    def _sample_id(self, key: str, fields: Any, digest: bytes | None) -> str | None:
        """Give a sample its id by `data.identity`; None if it has none."""
        identity = self._rules.identity
        if identity == "key":
            return key
        if identity == "shard_key":
            return f"{self._stem}/{key}"
        if identity == "sha256":
            return digest.hex() if digest else None
        value = _json_field(fields, identity.removeprefix("json:"))
        is_text = isinstance(value, str | int) and not isinstance(value, bool)
        return from_json(str(value)) if is_text else None

    def _image(self, sample: Sample) -> tuple[Member | None, ImageFacts, bytes | None]:
        """Find the image, inspect it, and hash it if it can be read."""
        member, problem = sample.image()
        if member is not None and member.kind != "file":
            problem = _UNUSABLE[member.kind]
        elif member is not None and member.size > MAX_IMAGE_BYTES:
            problem = "image_too_large"
        elif member is not None:
            data = self._reader.data(member)
            if not holds_header(data, 0, len(data)):
                facts = inspect_image(data, self._rules.decode_images)
                return member, facts, hashlib.sha256(data).digest()
            problem = "cut"  # blocks of the shard were swapped
        return member, ImageFacts(format="", problem=problem), None

    def _json(self, sample: Sample) -> tuple[Any, str | None]:
        text, problem = self._text(sample, "json")
        try:
            return None if text is None else json.loads(text), problem
        except (ValueError, RecursionError):
            return None, "label_unreadable"

    def _text(self, sample: Sample, suffix: str) -> tuple[str | None, str | None]:
        member = sample.members.get(suffix)
        if member is None:
            return None, None
        if member.kind != "file":
            return None, _UNUSABLE[member.kind]
        if member.size > MAX_TEXT_BYTES:
            return None, "label_unreadable"
        return self._reader.data(member).decode("utf-8", "surrogateescape"), None

    def _class(
        self, sample: Sample, label: str, fields: Any, key: bytes, json_problem: str | None
    ) -> tuple[int | None, str | None]:
        problem: str | None = None
        if label.startswith("json:"):
            raw, problem = _json_field(fields, label.removeprefix("json:")), json_problem
        elif label in self._rules.tables:
            by_key = label.startswith("file:")
            raw = self._rules.tables[label].find(sample_key(lookup_key(sample.key)) if by_key else key)
        else:
            raw, problem = self._text(sample, label)
        if problem is not None:
            return None, problem
        number, status = self._rules.classes.classify(raw)
        if status == "unknown_class":
            if label == self._rules.label:
                text = to_stored((raw if isinstance(raw, str) else repr(raw))[:80])
                _count(self._shard.unknown_labels, text.encode("utf-8", "backslashreplace").decode())
            status = "label_not_a_number" if label == "cls" else status
        return number, status

    def _oddity(self, sample: Sample, image: ImageFacts) -> str | None:
        oddities = list(image.oddities) if image.problem is None else []
        if any(suffix.rpartition(".")[2] in PICKLE_SUFFIXES for suffix in sample.members):
            oddities.append("pickle_member")
        if (odd_name := name_oddity(sample.key)) is not None:
            oddities.append(odd_name)
        for oddity in oddities:
            self._shard.oddities[oddity] += 1
        return "+".join(oddities) or None


def _status(sample: Sample, image: ImageFacts, label_problem: str | None) -> str:
    if sample.has_repeated_member:
        return "repeated_member"
    torn = image.problem in ("cut", "image_missing") or label_problem in ("cut", "unlabelled")
    if sample.near_damage and torn:
        return "cut"
    if (sample.near_damage or sample.ends_in_zeros) and "truncated" in image.oddities:
        return "cut"
    return image.problem or label_problem or "ok"


def _count(counts: dict[str, int], text: str) -> None:
    if text in counts or len(counts) < MAX_TEXTS:
        counts[text] += 1


def _json_field(fields: Any, name: str) -> Any:
    """Find a field by its name, or by a dotted path into nested objects; None if it is absent."""
    if not isinstance(fields, dict):
        return None
    if name in fields:
        return fields[name]
    head, dot, rest = name.partition(".")
    return _json_field(fields.get(head), rest) if dot else None


def _values(fields: Any) -> dict[str, str]:
    """The fields of an object and of the objects in it, as `json:FIELD` names them, with their values."""
    found: dict[str, Any] = {}
    for name, value in fields.items() if isinstance(fields, dict) else ():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        found |= {f"{name}.{field}".rstrip("."): one for field, one in inner}
    return {ascii(name[:80])[1:-1]: ascii(found[name])[:40] for name in list(found)[:MAX_FIELDS]}


def _table(rows: Iterable[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.table(arrays, schema=schema)
