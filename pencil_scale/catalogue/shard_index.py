"""Shard index: reads one shard and returns its catalogue records and findings, in batches.

Every sample becomes exactly one record, or exactly one finding if it has no readable id.

    with open_source(url) as source:
        for batch in ShardIndexer(source, rules).batches():     # batch.records, batch.findings
            ...
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from pencil_scale.catalogue.class_names import LabelClasses, LabelLookup, lookup_key, raw_text
from pencil_scale.catalogue.schema import (
    CHUNK_ROWS,
    FINDING,
    RECORD,
    damage_line,
    id_policy,
    json_field,
    to_stored,
)
from pencil_scale.catalogue.shards import PICKLE_SUFFIXES, Sample, ShardReader, name_oddity
from pencil_scale.catalogue.tar_headers import holds_header
from pencil_scale.catalogue.tar_walk import Damage, Member
from pencil_scale.images.inspect import inspect_image
from pencil_scale.storage.errors import PencilError, sample_key
from pencil_scale.storage.urls import ByteSource

MAX_IMAGE_BYTES = 256 << 20
MAX_TEXT_BYTES = 1 << 20
MAX_UNKNOWN_LABELS = 10_000
MAX_SUFFIXES = 100  # different ones; if keys contain dots, every sample has its own
_COMES_BACK = {
    "key_repeated": "the key of an earlier sample, with members of the same names",
    "key_not_contiguous": "more members of an earlier sample, after other samples",
}
_UNUSABLE = {"cut": "cut", "link": "link_member", "sparse": "sparse_member"}


@dataclass(frozen=True)
class LabelSource:
    """Where to read a class: `cls`, `txt`, `json:FIELD`, or a table joined by key or id."""

    source: str
    lookup: LabelLookup | None = None


@dataclass(frozen=True)
class IndexRules:
    """The settings for reading a sample."""

    identity: str
    label: LabelSource
    classes: LabelClasses
    truth: LabelSource | None = None
    decode_images: bool = False


class IndexBatch(NamedTuple):
    """Some samples of a shard, in order."""

    records: pa.RecordBatch
    findings: pa.RecordBatch


class _Image(NamedTuple):
    member: Member | None
    problem: str | None
    form: str = ""
    digest: bytes | None = None
    oddities: tuple[str, ...] = ()


class ShardIndexer:
    """Indexes one shard; the counters are complete once all batches have been read."""

    def __init__(self, source: ByteSource, rules: IndexRules) -> None:
        self.num_samples = 0
        self.unknown_labels: Counter[str] = Counter()
        self.oddities: Counter[str] = Counter()
        self.suffixes: Counter[str] = Counter()
        self._source = source
        self._rules = rules
        self._reader = ShardReader(source)
        self.skipped = self._reader.skipped  # the number of members that belong to no sample, by kind
        self._sample_id = id_policy(rules.identity, source.url)
        sources = [rules.identity, rules.label.source, rules.truth.source if rules.truth else ""]
        self._needs_json = any(each.startswith("json:") for each in sources)
        self._records: list[tuple[Any, ...]] = []
        self._findings: list[tuple[Any, ...]] = []

    def batches(self) -> Iterator[IndexBatch]:
        """Read the shard to its end; memory holds one batch and the keys of the shard."""
        damaged = False
        for found in self._reader.read():
            if isinstance(found, Damage):
                damaged = True
                self.num_samples += found.num_samples
                self._find(found.start, found.end, found.kind, found.name, found.num_samples, found.detail)
            else:
                self.num_samples += 1
                try:
                    self._take(found)
                except PencilError:
                    raise
                except Exception as error:  # a bug of ours or of a decoder must not end the run
                    self._lose(found, "not_understood", f"{type(error).__name__} while reading it")
            if len(self._records) + len(self._findings) >= CHUNK_ROWS:
                yield self._flush()
        if self.num_samples == 0 and not damaged:
            self._find(0, self._source.num_bytes, "no_samples", None, 0, "an intact tar without samples")
        if self._records or self._findings:
            yield self._flush()

    def _flush(self) -> IndexBatch:
        batch = IndexBatch(_to_arrow(self._records, RECORD), _to_arrow(self._findings, FINDING))
        self._records, self._findings = [], []
        return batch

    def _take(self, sample: Sample) -> None:
        for suffix in sample.members:
            if suffix in self.suffixes or len(self.suffixes) < MAX_SUFFIXES:
                self.suffixes[suffix] += 1
        if sample.problem in ("key_repeated", "key_not_contiguous"):
            return self._lose(sample, sample.problem, _COMES_BACK[sample.problem])
        image = self._image(sample)
        fields, json_problem = self._json(sample) if self._needs_json else (None, None)
        sample_id = self._sample_id(sample.key, fields, image.digest.hex() if image.digest else None)
        if sample_id is None:
            kind = "cut_short" if sample.near_damage else "id_missing"
            reason = image.problem or json_problem or "no such field, or no text in it"
            return self._lose(sample, kind, f"no id by {self._rules.identity}: {reason}")
        key = sample_key(sample_id)
        noisy_class, label_problem = self._class(sample, self._rules.label, fields, key, json_problem)
        truth = self._rules.truth
        true_class = None if truth is None else self._class(sample, truth, fields, key, None)[0]
        self._records.append(
            (
                to_stored(sample_id),
                key,
                to_stored(sample.key),
                image.member.offset if image.member else sample.start,
                image.member.size if image.member else 0,
                image.form,
                noisy_class,
                true_class,
                _status(sample, image, label_problem),
                self._oddity(sample, image),
                image.digest[:16] if image.digest else None,
            )
        )
        return None

    def _lose(self, sample: Sample, kind: str, detail: str) -> None:
        self._find(sample.start, sample.end, kind, sample.key, 1, detail)

    def _find(self, start: int, end: int, kind: str, key: str | None, num_samples: int, detail: str) -> None:
        line = damage_line(self._source.url, start, kind, detail)
        self._findings.append((start, end, kind, None if key is None else to_stored(key), num_samples, line))

    def _image(self, sample: Sample) -> _Image:
        member, problem = sample.image()
        if member is None:
            return _Image(None, problem)
        if member.kind != "file":
            return _Image(member, _UNUSABLE[member.kind])
        if member.size > MAX_IMAGE_BYTES:
            return _Image(member, "image_too_large")
        data = self._reader.data(member)
        if holds_header(data, 0, len(data)):
            return _Image(member, "cut")  # blocks of the shard were swapped
        facts = inspect_image(data, self._rules.decode_images)
        return _Image(member, facts.problem, facts.format, hashlib.sha256(data).digest(), facts.oddities)

    def _json(self, sample: Sample) -> tuple[Any, str | None]:
        text, problem = self._text(sample, "json")
        if text is None:
            return None, problem
        try:
            return json.loads(text), None
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
        self, sample: Sample, label: LabelSource, fields: Any, key: bytes, json_problem: str | None
    ) -> tuple[int | None, str | None]:
        problem: str | None = None
        if label.source.startswith("json:"):
            raw, problem = json_field(fields, label.source.removeprefix("json:")), json_problem
        elif label.lookup is not None:
            by_key = label.source.startswith("file:")
            raw = label.lookup.find(sample_key(lookup_key(sample.key)) if by_key else key)
        else:
            raw, problem = self._text(sample, label.source)
        if problem is not None:
            return None, problem
        number, status = self._rules.classes.classify(raw)
        if status == "unknown_class":
            if label is self._rules.label and len(self.unknown_labels) < MAX_UNKNOWN_LABELS:
                self.unknown_labels[to_stored(raw_text(raw))] += 1
            status = "label_not_a_number" if label.source == "cls" else status
        return number, status

    def _oddity(self, sample: Sample, image: _Image) -> str | None:
        oddities = list(image.oddities) if image.problem is None else []
        if any(suffix.rpartition(".")[2] in PICKLE_SUFFIXES for suffix in sample.members):
            oddities.append("pickle_member")
        if (named := name_oddity(sample.key)) is not None:
            oddities.append(named)
        self.oddities.update(oddities)
        return "+".join(oddities) or None


def _status(sample: Sample, image: _Image, label_problem: str | None) -> str:
    if sample.problem is not None:
        return sample.problem
    torn = image.problem in ("cut", "image_missing") or label_problem in ("cut", "unlabelled")
    if sample.near_damage and torn:
        return "cut"
    if (sample.near_damage or sample.ends_in_zeros) and "truncated" in image.oddities:
        return "cut"
    return image.problem or label_problem or "ok"


def _to_arrow(rows: list[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.record_batch(arrays, schema=schema)
