"""Survey: the label source, class names, ids and image sizes of shards that come without a description.

    found = survey(expand_urls(["crawl/*.tar"]))
    found.label, found.class_names, found.identity, found.sizes

All shards are read if they are small, otherwise some, spread evenly over the list. Nothing is decoded.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pencil_scale.catalogue.shards import Sample, ShardReader
from pencil_scale.images.inspect import inspect_image
from pencil_scale.storage.errors import PencilError, many
from pencil_scale.storage.urls import open_source, versions_of

MOST_BYTES = 2 << 30  # of shards that are all read
MOST_SHARDS = 20  # of larger ones
LONGEST_LABEL = 100  # characters; longer texts are captions
LABEL_FIELDS = ("label", "class", "class_name", "category", "category_name", "target", "given_label")
TRUTH_FIELDS = ("true_class", "true_label", "clean_label")
# What img2dataset and make_shards write beside a label.
OTHER_FIELDS = {"key", "url", "source", "status", "error_message", "sha256", "md5", "caption", "exif"}

Facts = dict[str, str | int]  # of one sample: its possible labels, by their spelling in data.label


@dataclass(frozen=True)
class Survey:
    """What the shards contain, as a config says it."""

    num_samples: int
    num_read: int  # shards
    label: str
    truth: str | None
    identity: str
    class_names: tuple[str, ...]
    sizes: Counter[str]  # of the images, as "640x480"


def survey(urls: Sequence[str], known_classes: Sequence[str] = ()) -> Survey:
    """Read the shards; `known_classes` is a list that was found beside them."""
    chosen = _spread(urls)
    keys: dict[str, str] = {}  # and their shards
    samples: list[Facts] = []
    sizes: Counter[str] = Counter()
    identity = "key"
    for url in chosen:
        for key, size, facts in _read(url):
            identity = "shard_key" if keys.setdefault(key, url) != url else identity
            sizes[size] += 1
            samples.append(facts)
    del sizes[""]
    if not samples:
        raise PencilError(
            f"{urls[0]}: no sample in {many(len(chosen), 'shard')}; are these WebDataset shards?"
        )
    label = _label_of(samples)
    truths = [f"json:{name}" for name in TRUTH_FIELDS]
    truth = next((name for name in truths if any(name in facts for facts in samples)), None)
    names = _class_names(samples, label, known_classes)
    return Survey(len(samples), len(chosen), label, truth, identity, names, sizes)


def _spread(urls: Sequence[str]) -> Sequence[str]:
    num_bytes = sum(version.num_bytes for version in versions_of(list(urls)) if version)
    if num_bytes <= MOST_BYTES or len(urls) <= MOST_SHARDS:
        return urls
    return [urls[number * len(urls) // MOST_SHARDS] for number in range(MOST_SHARDS)]


def _read(url: str) -> Iterator[tuple[str, str, Facts]]:
    """Give the key of every sample, the size of its image, and what may be its label."""
    with open_source(url) as source:
        reader = ShardReader(source)
        for found in reader.read():
            if isinstance(found, Sample):
                image, _ = found.image()
                seen = inspect_image(reader.data(image)) if image and image.kind == "file" else None
                size = f"{seen.width}x{seen.height}" if seen and seen.problem is None else ""
                yield found.key, size, _facts(reader, found)


def _facts(reader: ShardReader, sample: Sample) -> Facts:
    facts: Facts = {}
    for suffix in ("cls", "txt", "json"):
        member = sample.members.get(suffix)
        if member is None or member.kind != "file" or member.size > 1 << 20:
            continue
        text = reader.data(member).decode("utf-8", "replace").strip()
        if suffix != "json":
            facts[suffix] = text
            continue
        try:
            fields: Any = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(fields, dict):
            facts |= {f"json:{name}": value for name, value in fields.items() if _is_plain(value)}
    return {name: value for name, value in facts.items() if len(str(value)) <= LONGEST_LABEL and value != ""}


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _label_of(samples: Sequence[Facts]) -> str:
    """Find the member or JSON field whose few values repeat, as those of a label do."""
    counts: dict[str, Counter[str | int]] = {}
    for facts in samples:
        for name, value in facts.items():
            counts.setdefault(name, Counter())[value] += 1
    named = [f"json:{name}" for name in LABEL_FIELDS]
    left_out = {f"json:{name}" for name in (*TRUTH_FIELDS, *LABEL_FIELDS, *OTHER_FIELDS)}
    others = [name for name, found in counts.items() if name.startswith("json:") and name not in left_out]
    texts = [name for name in others if all(isinstance(value, str) for value in counts[name])]
    for name in ("cls", *named, *texts, "txt"):
        found = counts.get(name, Counter())
        if 2 <= len(found) <= max(2, found.total() // 3) and found.total() > len(samples) / 2:
            return name
    seen = [
        f"{name} ({many(len(found), 'value')}, such as {next(iter(found))!r})"
        for name, found in counts.items()
    ]
    raise PencilError(
        f"no label found in {many(len(samples), 'sample')}: a .cls or .txt member or a JSON field with two "
        f"values that repeat was expected; found {', '.join(seen[:8]) or 'no texts and no JSON fields'}. "
        "If the labels are in a table, write a config with data.label=table:URL#id,label"
    )


def _class_names(samples: Sequence[Facts], label: str, known: Sequence[str]) -> tuple[str, ...]:
    """The class list: that beside the shards if it fits, else the names of the numbers, else all labels."""
    values = {facts[label] for facts in samples if label in facts}
    numbers = {int(value) for value in values if str(value).isdecimal()}
    if len(numbers) < len(values):
        names = sorted(str(value) for value in values)
        return tuple(known) if set(names) <= set(known) else tuple(names)
    if max(numbers) < len(known):
        return tuple(known)
    if any(isinstance(value, str) for value in values) and label != "cls":  # texts such as "7" are names
        return tuple(sorted((str(value) for value in values), key=int))
    for name in LABEL_FIELDS:
        pairs = {(facts[label], facts.get(f"json:{name}")) for facts in samples if label in facts}
        texts = {
            int(number): text for number, text in pairs if isinstance(text, str) and not text.isdecimal()
        }
        if len(pairs) == len(set(texts.values())) == len(numbers) == max(numbers) + 1:
            return tuple(texts[number] for number in sorted(texts))
    return tuple(str(number) for number in range(max(numbers) + 1))
