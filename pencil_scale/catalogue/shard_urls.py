"""Shard URLs: from the patterns in a config to the shards that must be read.

A pattern is a path or URL with brace ranges (`{000..999}`, `{a,b}`), a glob, or `@file`, a file with one
pattern per line. Shards keep the order of the patterns, and globs are sorted by name; this order decides
which of two equal samples is the first.

A shard is read when it is new, when its size or ETag changed, or when the rules for reading it changed. A
shard that left the list but is unchanged in its store keeps its rows.

    changes = find_changes(["s3://crawl/train-{000000..000999}.tar"], catalogue, rules.name)
    changes.to_read, changes.missing, changes.gone
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pencil_scale.catalogue.catalogue import Catalogue, Shard
from pencil_scale.catalogue.class_names import read_lines
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import filesystem_of, is_local, store_errors, versions_of

MAX_SHARDS = 10_000_000
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


@dataclass
class Changes:
    """How the listed shards differ from those in the catalogue; known shards are given by their numbers."""

    to_read: list[Shard] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    reread: list[str] = field(default_factory=list)  # unchanged, but the rules for reading them changed
    missing: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)  # still being written
    gone: list[int] = field(default_factory=list)
    unlisted: list[int] = field(default_factory=list)


def find_changes(
    patterns: Sequence[str], old: Catalogue | None, rules: str, img2dataset: bool = False
) -> Changes:
    """Ask the store for the version of each shard, and compare it with the catalogue."""
    changes, urls = Changes(), expand_urls(patterns)
    numbers = {shard.url: number for number, shard in enumerate(old.shards if old else ())}
    indexed = {shard.url: shard for shard in old.shards if shard.state == "indexed"} if old else {}
    absent = [known for url, known in indexed.items() if url not in set(urls)]
    for known, version in zip(absent, versions_of([known.url for known in absent]), strict=True):
        (changes.unlisted if version == known.version else changes.gone).append(numbers[known.url])
        if version == known.version and known.rules != rules:
            changes.reread.append(known.url)
            changes.to_read.append(Shard(known.url, *known.version, rules))
    for url, version in zip(urls, versions_of(urls), strict=True):
        entry = indexed.get(url)
        num_expected = _num_successes(url) if img2dataset and version is not None else None
        if version is None:
            changes.missing.append(url)
            changes.gone += [numbers[url]] if entry else []
        elif img2dataset and num_expected is None:
            changes.waiting.append(url)
        elif entry is None or entry.version != version or entry.rules != rules:
            changes.to_read.append(Shard(url, *version, rules, num_expected))
            if entry is not None:
                (changes.reread if entry.version == version else changes.changed).append(url)
    return changes


def expand_urls(patterns: Sequence[str]) -> list[str]:
    """List every URL, in order; a duplicate URL is an error."""
    urls: list[str] = []
    for pattern in patterns:
        for line in lines_of(pattern[1:]) if pattern.startswith("@") else [pattern]:
            for url in expand_braces(line):
                urls.extend(_matching(url))
    twice = next((url for url, count in Counter(urls).items() if count > 1), None)
    if twice is not None:
        raise PencilError(f"data.shards: {twice} is listed twice; list every shard once")
    if not urls:
        raise PencilError(f"data.shards: no shard in {', '.join(patterns)}; list at least one")
    return urls


def expand_braces(pattern: str) -> Iterator[str]:
    """Yield a pattern's URLs, the last brace changing fastest; `{00..01}` keeps its zeros.

    >>> list(expand_braces("a{08..10}.tar"))
    ['a08.tar', 'a09.tar', 'a10.tar']
    """
    fixed = _BRACES.split(pattern)
    if any("{" in text or "}" in text for text in fixed[::2]):
        raise PencilError(f"data.shards: unbalanced braces in {pattern!r}")
    choices = [_choices(text, pattern) for text in fixed[1::2]]
    for chosen in itertools.product(*choices):
        yield "".join(itertools.chain(*itertools.zip_longest(fixed[::2], chosen, fillvalue="")))


def _choices(text: str, pattern: str) -> Sequence[str]:
    match = _RANGE.fullmatch(text)
    if match is None:
        if "," not in text:
            raise PencilError(f"data.shards: {{{text}}} in {pattern!r} is neither {{000..999}} nor {{a,b}}")
        return text.split(",")
    first, last = int(match[1]), int(match[2])
    if last < first or last - first >= MAX_SHARDS:
        raise PencilError(
            f"data.shards: {{{text}}} in {pattern!r} counts down, or over {MAX_SHARDS:,} shards"
        )
    width = len(match[1]) if match[1].startswith("0") or len(match[1]) == len(match[2]) else 0
    return [f"{number:0{width}d}" for number in range(first, last + 1)]


def lines_of(url: str) -> list[str]:
    """Read a file of patterns, without blank lines and comments."""
    lines = [line.strip() for line in read_lines(url, "data.shards")]
    return [line for line in lines if line and not line.startswith("#")]


def _matching(url: str) -> list[str]:
    filesystem, path = filesystem_of(url)
    if is_local(filesystem):
        url = path  # absolute, so that a shard has the same URL from any working directory
    if not any(sign in path for sign in "*?[") or url.startswith(("http://", "https://")):
        if path.endswith("/") or (is_local(filesystem) and filesystem.isdir(path)):
            raise PencilError(f"data.shards: {url} is a folder; write {url.rstrip('/')}/*.tar")
        return [url]
    with store_errors(f"data.shards: {url} cannot be listed"):
        if filesystem.isfile(path):
            return [url]
        filesystem.invalidate_cache()
        matches = filesystem.glob(path, detail=True)
    found = sorted(name for name, info in matches.items() if info["type"] == "file")
    if not found:
        raise PencilError(f"data.shards: nothing matches {url}; check the pattern and the permissions")
    return found if is_local(filesystem) else [filesystem.unstrip_protocol(name) for name in found]


def _num_successes(url: str) -> int | None:
    """Read img2dataset's count from the `_stats.json` that it writes when a shard is finished."""
    stats = url.removesuffix(".tar") + "_stats.json"
    filesystem, path = filesystem_of(stats)
    try:
        with store_errors(f"{stats}: cannot be read"):
            data = filesystem.cat_file(path)
        return int(json.loads(data)["successes"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise PencilError(f"{stats}: no valid count 'successes' ({error}); fetch the shard again") from error
