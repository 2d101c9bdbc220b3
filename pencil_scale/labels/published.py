"""Published labels: the manifests that finished runs left, and the only reader of the labels they name.

    <storage>/labels/published/NAME.json     labels that may be used
    <storage>/labels/held/NAME.json          labels that wait for a person (`pencil_scale.train.gate`)

Runs are found by name or by the URL of a manifest. Held labels are found only on request: every other caller
gets an error that says why they are held.

    published = find_published("s3://lake/clothing1m", "night-0012")
    labels = PublishedLabels(published.manifest)
    labels.rows(range(0, 100)).decide()             # the class of each row, how sure, changed or not
    labels.rows(range(0, 100)).logits               # float32 [100, C]; also noisy_class, role, predictions()
    labels.last_epoch(range(0, 100))                # int32 [100]; 0 or less: never trained on
    for some in labels.batches():                   # every row, one label part at a time
        ...
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.class_names import ClassOrder
from pencil_scale.config.command import command
from pencil_scale.labels.columns import (
    FREE,
    PINNED,
    key_bytes,
    labels_schema,
    new_ledger,
    to_columns,
)
from pencil_scale.labels.manifest import LABELS, LEDGER, Manifest, get_parts
from pencil_scale.labels.run_record import read_record, why_held
from pencil_scale.method.decisions import UNLABELLED, Decisions, decide, decide_by_evidence
from pencil_scale.method.evidence import NoiseModel, Predictions
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.storage import Storage

SHOWN = 10  # names in an error


@dataclass(frozen=True)
class Published:
    """The labels of one finished run."""

    name: str
    url: str
    manifest: Manifest
    history: str  # folder of its labels after each epoch; may be empty
    held_because: tuple[str, ...] = ()  # at least one reason if the labels are held

    @property
    def held(self) -> bool:
        return bool(self.held_because)


@dataclass(frozen=True)
class LabelRows:
    """The labels of consecutive rows, and what the network predicted when it last saw each."""

    rows: range
    noise: tuple[NoiseModel, ...]  # the oldest first; none: decide by logits
    logits: npt.NDArray[np.float32]  # [B, C]
    noisy_class: npt.NDArray[np.int32]  # as given, or pinned to; -1 where a row has no usable label
    role: npt.NDArray[np.uint8]
    sample_key: npt.NDArray[np.uint8]  # [B, 16]: the 128-bit keys; zeros in a table made without keys
    last_epoch: npt.NDArray[np.int32]
    predicted_class: npt.NDArray[np.integer]  # [B, K], the most likely first
    predicted_log_p: npt.NDArray[np.float16]  # [B, K]; NaN: never predicted

    @classmethod
    def of(
        cls, first_row: int, labels: pa.RecordBatch, ledger: pa.RecordBatch, manifest: Manifest
    ) -> "LabelRows":
        """View the batches of both files that start at this row."""
        columns = to_columns(labels.drop_columns(["row"])) | to_columns(ledger)
        rows = range(first_row, first_row + labels.num_rows)
        models = [*manifest.earlier_noise, manifest.noise] if manifest.noise else []
        noise = tuple(NoiseModel(**model) for model in models)  # type: ignore[arg-type]
        return cls(rows, noise, columns.pop("label_logits"), **columns)

    @classmethod
    def unseen(cls, rows: range, num_classes: int) -> "LabelRows":
        """Rows that are newer than the labels."""
        logits, keys = np.zeros((len(rows), num_classes), np.float32), np.zeros((len(rows), 16), np.uint8)
        classes, role = np.full(len(rows), UNLABELLED, np.int32), np.full(len(rows), FREE, np.uint8)
        return cls(rows, (), logits, classes, role, keys, **to_columns(new_ledger(len(rows), num_classes)))

    @property
    def pinned(self) -> npt.NDArray[np.bool_]:
        """Whether a person decided the label."""
        found: npt.NDArray[np.bool_] = self.role == PINNED
        return found

    @property
    def is_undecided(self) -> npt.NDArray[np.bool_]:
        """Whether the label is as given until a night has enough evidence to decide it.

        In labels without evidence, which are decided by their logits, it is one whose logits never moved.
        """
        as_given: npt.NDArray[np.bool_] = self.logits.argmax(1) == self.noisy_class
        undecided = as_given & ~is_decided(self) & ~self.pinned
        if not self.noise:
            undecided &= (np.count_nonzero(self.logits, axis=1) == 1) & (self.last_epoch > 0)
        return undecided

    @property
    def has_evidence(self) -> npt.NDArray[np.bool_]:
        """Whether the label is decided by its prediction."""
        found = np.zeros(len(self.rows), np.bool_)
        for _, some in self.by_noise():
            found |= some
        return found

    @property
    def is_unseen(self) -> npt.NDArray[np.bool_]:
        """Whether the label is decided by a network that was never trained on the sample."""
        found = np.zeros(len(self.rows), np.bool_)
        for noise, some in self.by_noise():
            found |= some & (self.last_epoch <= noise.crossed_until)
        return found

    def by_noise(self) -> Iterator[tuple[NoiseModel, npt.NDArray[np.bool_]]]:
        """Each noise model, with the rows that it decides: those that its own network predicted last.

        So a label that a night does not decide stays as it is, whatever that night finds. The last epoch of a
        row that was never trained on is that of its prediction, negated; 0: the newest network predicted it.
        """
        known = ~np.isnan(self.predicted_log_p[:, 0]) & (self.noisy_class != UNLABELLED) & ~self.pinned
        newest = len(self.noise) - 1
        since = [model.since for model in self.noise]
        number = np.searchsorted(since, abs(self.last_epoch), side="right") - 1
        number[self.last_epoch == 0] = newest
        for nth, model in enumerate(self.noise):
            some = known & (number == nth)
            if some.any():
                yield model, some

    def predictions(self, some: Any = slice(None)) -> Predictions:
        """What the network predicted when it last saw each row, or some of them; NaN: never."""
        classes, log_p = self.predicted_class[some], self.predicted_log_p[some]
        return Predictions(classes.astype(np.int64), log_p.astype(np.float64), self.logits.shape[1])

    def decide(self) -> Decisions:
        """Decide the class of every row by its prediction, if there is evidence, else by its logits."""
        found = decide(self.logits, self.noisy_class)
        for noise, some in self.by_noise():
            judged = decide_by_evidence(self.predictions(some), self.noisy_class[some], noise)
            found = found.but(some, judged)
        return found

    def under(self, order: ClassOrder, given: npt.NDArray[np.integer]) -> "LabelRows":
        """The same rows with the class numbers of another list, and with other given classes of that list."""
        return replace(
            self,
            logits=order.logits(self.logits),
            noisy_class=given.astype(np.int32),
            predicted_class=order.classes(self.predicted_class),
        )


def is_decided(labels: LabelRows) -> npt.NDArray[np.bool_]:
    """Which rows were predicted by a run that could decide them."""
    decided: npt.NDArray[np.bool_] = ~np.isnan(labels.predicted_log_p[:, 0])
    return decided


class PublishedLabels:
    """The labels of a complete manifest, read by row; every file is checked against its hash."""

    def __init__(self, manifest: Manifest) -> None:
        manifest.require_whole()
        self.manifest, self._layout = manifest, manifest.layout

    def rows(self, rows: range) -> LabelRows:
        """Read the labels of these rows, as far as the table has them."""
        num_classes = self._layout.num_classes
        labels, ledger = (
            pa.concat_batches([none, *(batch for _, batch in self._read(rows, folder))])
            for folder, none in (
                (LABELS, pa.RecordBatch.from_pylist([], labels_schema(num_classes))),
                (LEDGER, new_ledger(0, num_classes)),
            )
        )
        return LabelRows.of(rows.start, labels, ledger, self.manifest)

    def batches(self, rows: range | None = None) -> Iterator[LabelRows]:
        """Read these rows, or all, one part at a time and a few parts ahead."""
        both = zip(self._read(rows, LABELS), self._read(rows, LEDGER), strict=True)
        return (LabelRows.of(first, labels, ledger, self.manifest) for (first, labels), (_, ledger) in both)

    def parts_with(self, rows: npt.NDArray[np.int64]) -> Iterator[LabelRows]:
        """Read the complete parts that hold any of these rows."""
        parts = np.unique(rows[rows < self._layout.num_rows] >> self._layout.shift).tolist()
        both = (get_parts(self.manifest, parts, folder) for folder in (LABELS, LEDGER))
        for part, labels, ledger in zip(parts, *both, strict=True):
            yield LabelRows.of(self._layout.rows_of(part).start, labels, ledger, self.manifest)

    def last_epoch(self, rows: range | None = None) -> npt.NDArray[np.int32]:
        """Read the last epoch of the table's life in which each row was trained on; 0 or less: never."""
        found = [batch["last_epoch"].to_numpy() for _, batch in self._read(rows, LEDGER)]
        return np.concatenate([np.zeros(0, np.int32), *found])

    def _read(self, rows: range | None, folder: str) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Read these rows as far as the table has them, or all, one part at a time, with its first row."""
        layout = self._layout
        rows = range(layout.num_rows) if rows is None else range(layout.num_rows)[rows.start : rows.stop]
        parts = range(rows.start >> layout.shift, ((rows.stop - 1) >> layout.shift) + 1) if rows else ()
        for part, batch in zip(parts, get_parts(self.manifest, parts, folder), strict=True):
            here = layout.rows_of(part)
            first, stop = max(here.start, rows.start), min(here.stop, rows.stop)
            yield first, batch.slice(first - here.start, stop - first)


def find_published(storage: str, named: str, held: bool = False) -> Published:
    """Read the labels of a run, by name or by URL; with `held`, also held ones, to look at, not to use."""
    files = Storage(storage)
    urls = [named] if "/" in named else [published_url(storage, named), held_url(storage, named)]
    urls += [named] if "/" not in named and named.endswith(".json") else []
    found = ((url, manifest) for url in urls if (manifest := Manifest.find(url)) is not None)
    url, manifest = next(found, (urls[0], None))
    if manifest is None:
        raise PencilError(f"{url}: no published labels; {_known_labels(storage)}")
    name = PurePosixPath(url).name.removesuffix(".json")
    is_held = PurePosixPath(url).parts[-3:-1] == ("labels", "held")
    record = read_record(storage, name) if is_held else None
    if is_held and not held:
        if record is None:
            raise PencilError(
                f"{url}: the labels of this run are held, and its record ({files.path(files.run(name))}) is "
                "missing; restore it to promote them, or remove them and train again"
            )
        raise PencilError(
            f"{url}: the labels of this run are held: {why_held(storage, record)}. To export them "
            f"as they are: `{command('pipelines.export_labels')} export.labels={name} --force`"
        )
    night = files.read_json(files.night(name, "night.json")) if "/" not in named else None
    reasons = tuple(record.held_because if record else ()) or ("the record of the run gives no reason",)
    if night is not None and night["status"] == "held" and not night.get("promoted"):
        is_held, reasons = True, tuple(night["reasons"])
        if not held:
            raise PencilError(
                f"{url}: this night is held: {'; '.join(reasons)}. Look at it, and promote it if it is good: "
                f"`{command('pipelines.promote')} {name}`. To export its labels as they are: "
                f"`{command('pipelines.export_labels')} export.labels={name} --force`"
            )
    manifest.require_whole()
    history = files.path(files.history(manifest.run))
    return Published(name, url, manifest, history, reasons if is_held else ())


def _known_labels(storage: str) -> str:
    """Say which labels there are."""
    published, held = (names(storage)[:SHOWN] for names in (published_names, held_names))
    known = [f"published are {', '.join(published)}"] if published else []
    if held:
        how = f"`{command('pipelines.export_labels')} export.labels={held[0]} --force`"
        known.append(f"held are {', '.join(held)}, which are exported only on request ({how})")
    return "; ".join(known) or "train first"


def published_url(storage: str, name: str) -> str:
    """The address of the labels that a run of this name publishes."""
    files = Storage(storage)
    return files.path(files.published(name))


def held_url(storage: str, name: str) -> str:
    """The address of the labels of a held run."""
    files = Storage(storage)
    return files.path(files.held(name))


def published_names(storage: str) -> list[str]:
    """The runs and nights whose labels are published."""
    return [PurePosixPath(name).stem for name in Storage(storage).names("labels/published")]


def held_names(storage: str) -> list[str]:
    """The runs whose labels are held."""
    found = {PurePosixPath(name).stem for name in Storage(storage).names("labels/held")}
    return sorted(found - set(published_names(storage)))


def require_same_rows(manifest: Manifest, catalogue: Catalogue) -> None:
    """Refuse labels of another catalogue, unless every row is the same sample in both.

    Rows are only ever appended to a catalogue, so equal catalogue ids are enough. A catalogue that was
    deleted and indexed again has another id, and may give a row number to another sample: then the keys of
    all rows are compared.
    """
    num_rows = manifest.layout.num_rows
    if num_rows > catalogue.num_rows:
        raise PencilError(
            f"labels over {num_rows:,} rows, {catalogue.folder} version {catalogue.version} has "
            f"{catalogue.num_rows:,}; use labels made over this catalogue"
        )
    if manifest.catalogue == catalogue.id:
        return
    for labels in PublishedLabels(manifest).batches():
        rows, found = labels.rows, labels.sample_key
        expected = key_bytes(catalogue.read(rows.start, rows.stop, ["sample_key"])["sample_key"])
        differs = (found != expected).any(axis=1) & found.any(axis=1)  # a table made without keys has zeros
        if differs.any():
            raise PencilError(
                f"{catalogue.folder}: row {rows.start + int(np.argmax(differs)):,} is a different sample "
                "from the one these labels were learned for: the catalogue was rebuilt since; train again "
                "under another run.name, or restore the catalogue"
            )
