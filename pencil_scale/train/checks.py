"""Checks of a config before a run starts: every problem is found before anything is written.

    problems = Problems()
    check_settings(config, problems)            # settings that do not go together, and the MLflow server
    with problems.noted():
        require_agreement(config)               # the config describes the data that was indexed
    problems.require_none()                     # one error with a line per problem

Training reads the catalogue, not `data.shards` or `data.exclude`. Without `require_agreement`, a config that
changed after indexing would silently train on the old data: samples that were taken down since, other shards,
classes in another order. The error names the key and the command to run.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase

import numpy as np
import pyarrow.compute as pc

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import difference, read_class_names
from pencil_scale.catalogue.duplicates import Keys, Rows, contains, hashes_of
from pencil_scale.catalogue.rules import make_overlay
from pencil_scale.catalogue.shard_urls import expand_braces, lines_of
from pencil_scale.config.command import program
from pencil_scale.config.settings import Config
from pencil_scale.storage.errors import HeldError, PencilError, many
from pencil_scale.storage.retries import RefusedError, UnreachableError
from pencil_scale.storage.urls import filesystem_of, without_passwords
from pencil_scale.tracking.tracker import find_server

REMEDY = f"run `{program('pipelines.index_shards')}` again with this config, or undo the change"
MOST_COPIES = 0.01  # of clean images; benchmark datasets have a few


class Problems:
    """Problems that were found so far, each once."""

    def __init__(self) -> None:
        self._lines: dict[str, None] = {}

    def add(self, text: str) -> None:
        self._lines |= dict.fromkeys(text.splitlines())

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note an error instead of raising it, so that other checks can follow."""
        try:
            yield
        except (RefusedError, UnreachableError, HeldError) as error:  # every other check depends on these
            raise type(error)("\n".join([str(error), *self._lines])) from error
        except PencilError as error:
            self.add(str(error))

    def require_none(self) -> None:
        if self._lines:
            raise PencilError("\n".join(self._lines))


def check_settings(config: Config, problems: Problems) -> None:
    """Find settings that do not go together, and a storage that needs an MLflow server."""
    needs_gpu = {
        "optimizer.precision": (config.optimizer.precision, "fp32"),
        "optimizer.compile": (config.optimizer.compile, "off"),
        "images.decode": (config.images.decode, "cpu"),
    }
    found = {key: values for key, values in needs_gpu.items() if values[0] != values[1]}
    if found and not config.workers.gpu:
        these = ", ".join(f"{key}={value}" for key, (value, _) in found.items())
        others = ", ".join(f"{key}={value}" for key, (_, value) in found.items())
        problems.add(f"workers.gpu: false, but {these} is for GPUs; set workers.gpu=true, or {others}")
    with problems.noted():
        find_server(config)


def require_agreement(config: Config) -> None:
    """Refuse a config that describes other data than the catalogue was indexed with; name every such key."""
    problems = Problems()
    data, catalogue = config.data, Catalogue.open(config.run.storage)
    found = catalogue.manifest
    for key, wanted in (("identity", data.identity), ("label", data.label)):
        if wanted != found[key]:
            problems.add(f"data.{key}: found {wanted}, the catalogue was indexed with {found[key]}; {REMEDY}")
    with problems.noted():
        if differs := difference(read_class_names(data.classes), found["classes"]):
            problems.add(f"data.classes: {data.classes} {differs}, compared with the catalogue; {REMEDY}")
    with problems.noted():
        exclude = make_overlay(data.exclude).exclude
        if found.get("exclude", exclude) != exclude:
            problems.add(
                f"data.exclude: {data.exclude} is not the list the catalogue was indexed with; its samples "
                f"would still be trained on; {REMEDY}"
            )
    with problems.noted():
        indexed = [entry.url for entry in catalogue.shards if entry.state == "indexed"]
        _require_shards(data.shards, indexed, is_subset=data.subset is not None)
    problems.require_none()


def _require_shards(patterns: Iterable[str], indexed: list[str], is_subset: bool) -> None:
    """Require that the patterns name shards of the catalogue; the storage of the shards is not read.

    A shard that was removed from the list keeps its rows as long as it exists, and indexing again would not
    change that; so this is only a note, and none is needed where a subset says what is trained on.
    """
    others = _unnamed(patterns, indexed)
    if not others:
        return
    such_as = f"such as {without_passwords(others[0])}"
    if len(others) == len(indexed):
        raise PencilError(
            f"data.shards: names none of the catalogue's {many(len(indexed), 'shard')}, {such_as}; {REMEDY}"
        )
    if is_subset:
        return
    print(
        f"data.shards: {len(others):,} of the catalogue's {len(indexed):,} shards are not named here, "
        f"{such_as}; they keep their rows and are trained on too; to leave them out, set data.subset, "
        "or index into another run.storage",
        flush=True,
    )


def require_same_shards(name: str, patterns: Iterable[str], catalogue: Catalogue) -> None:
    """Refuse a clean set of which other shards were indexed: they would all be counted."""
    indexed = [entry.url for entry in catalogue.shards if entry.state == "indexed"]
    if others := _unnamed(patterns, indexed):
        such_as, folder = without_passwords(others[0]), without_passwords(catalogue.folder)
        raise PencilError(
            f"data.{name}: {len(others):,} of {many(len(indexed), 'shard')} in its catalogue are not named "
            f"here, such as {such_as}; they would be counted too: undo the change, or, to replace the set, "
            f"remove {folder} and run `{program('pipelines.index_shards')}` again"
        )


def require_other_images(name: str, clean: Catalogue, trained: Catalogue, subset: Rows | None) -> None:
    """Refuse a clean set for `evidence.clean` whose images are trained on under other ids.

    The network knows them, so it would hardly ever contradict them, and right labels would look wrong.
    """
    contents = np.unique(np.concatenate([np.empty(0, "S16"), *(keys for _, keys in _images(clean))]))
    known, copies = np.empty(0, "S16"), np.empty(0, np.int64)
    for rows, keys in _images(trained):
        is_copy = contains(contents, keys)
        if subset is not None:
            is_copy &= np.isin(rows, subset)
        known, copies = np.union1d(known, keys[is_copy]), np.append(copies, rows[is_copy][:1])
    if len(known) > MOST_COPIES * len(contents):
        (example,) = trained.read(copies[0], copies[0] + 1, ["sample_id"])["sample_id"].to_pylist()
        raise PencilError(
            f"evidence.clean: {len(known):,} of {many(len(contents), 'image')} of data.{name} are trained on "
            f"too, under other ids, such as {example}; the network knows them, so they prove nothing: leave "
            "them out of the clean set or of training (data.exclude), or leave evidence.clean out"
        )


def _images(catalogue: Catalogue) -> Iterator[tuple[Rows, Keys]]:
    """The rows of all usable images, and the hashes of their bytes."""
    for table in catalogue.batches(["row", "status", "content_key"]):
        used = table.filter(pc.and_(pc.equal(table["status"], "ok"), pc.is_valid(table["content_key"])))
        yield used["row"].to_numpy(), hashes_of(used["content_key"])


def _unnamed(patterns: Iterable[str], indexed: list[str]) -> list[str]:
    """The shards of a catalogue that no pattern names."""
    files = (lines_of(pattern[1:]) if pattern.startswith("@") else [pattern] for pattern in patterns)
    urls = (url for lines in files for line in lines for url in expand_braces(line))
    wanted = {_bare(filesystem_of(url)[1]) for url in urls}
    globs = [path for path in wanted if any(sign in path for sign in "*?[")]
    others = [url for url in indexed if _bare(url) not in wanted]
    return [url for url in others if not any(fnmatchcase(_bare(url), glob) for glob in globs)]


def _bare(url: str) -> str:
    """One spelling for a URL and for the path that a filesystem makes of it."""
    return url.rpartition("://")[2].lstrip("/")
