"""Whether a config still says of its data what the catalogue was made from.

Training reads the catalogue, not `data.shards` or `data.exclude`. A config that has changed since would be
trained as it was before, without a word: samples that must vanish, other shards, classes in another order.

    require_agreement(config)      # else an error names the key, and the command that brings them together
"""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from pencil_scale.catalogue import Catalogue
from pencil_scale.class_names import read_class_names
from pencil_scale.indexing.index_rules import make_overlay
from pencil_scale.reading.byte_source import filesystem_of
from pencil_scale.reading.shard_urls import expand_braces, lines_of
from pencil_scale.running.checks import RunRefusedError
from pencil_scale.settings import Config
from pencil_scale.shapes import without_passwords

REMEDY = "run pipelines.index_shards again with this config, or take the change back"


def require_agreement(config: Config) -> None:
    """Refuse a config whose words on its data are not those the catalogue was indexed with."""
    data, catalogue = config.data, Catalogue.open(config.run.storage)
    found = catalogue.manifest
    _require("data.identity", data.identity, found["identity"])
    _require("data.label", data.label, found["label"])
    names = read_class_names(data.classes)
    if list(names) != found["classes"]:
        raise RunRefusedError(
            f"data.classes: {data.classes} {_other_classes(names, found['classes'])}; {REMEDY}"
        )
    exclude = make_overlay(data.exclude).exclude
    if found.get("exclude", exclude) != exclude:
        raise RunRefusedError(
            f"data.exclude: {data.exclude} is not the list the catalogue was indexed with, so what it names "
            f"would still be trained on; {REMEDY}"
        )
    _require_shards(data.shards, [entry.url for entry in catalogue.shards if entry.state == "indexed"])


def _require(key: str, wanted: str, indexed: str) -> None:
    if wanted != indexed:
        raise RunRefusedError(f"{key}: found {wanted}, the catalogue was indexed with {indexed}; {REMEDY}")


def _other_classes(names: Iterable[str], indexed: list[str]) -> str:
    names = list(names)
    if len(names) != len(indexed):
        return f"names {len(names)} classes, the catalogue was indexed with {len(indexed)}"
    number = next(n for n, name in enumerate(names) if name != indexed[n])
    return f"calls class {number} '{names[number]}', the catalogue was indexed with '{indexed[number]}' there"


def _require_shards(patterns: Iterable[str], indexed: list[str]) -> None:
    """The patterns must name shards of the catalogue; the store is not asked for any.

    A shard that left the list keeps its rows as long as it stands in its store: indexing again changes
    nothing about that, so it is only told.
    """
    wanted = {_bare(path) for path in _paths(patterns)}
    globs = [path for path in wanted if any(sign in path for sign in "*?[")]
    others = [
        url
        for url in indexed
        if _bare(url) not in wanted and not any(fnmatchcase(_bare(url), glob) for glob in globs)
    ]
    if not others:
        return
    such_as = f"such as {without_passwords(others[0])}"
    if len(others) == len(indexed):
        raise RunRefusedError(
            f"data.shards: names none of the catalogue's {len(indexed):,} shards, {such_as}; {REMEDY}"
        )
    print(
        f"data.shards: {len(others):,} of the catalogue's {len(indexed):,} shards are not named here, "
        f"{such_as}; they keep their rows and are trained on, too; to leave them out, set data.subset, "
        "or index into another run.storage",
        flush=True,
    )


def _paths(patterns: Iterable[str]) -> Iterator[str]:
    for pattern in patterns:
        for line in lines_of(pattern[1:]) if pattern.startswith("@") else [pattern]:
            for url in expand_braces(line):
                yield filesystem_of(url)[1]


def _bare(url: str) -> str:
    """One spelling for a URL, a path and what a filesystem makes of them."""
    return url.rpartition("://")[2].lstrip("/")
