"""Label report: how many labels changed, to which classes, how sure they are, and how many are right.

It is read from a snapshot, part by part, so it needs the memory of a few parts and does not disturb training.

    report = study_labels(manifest, catalogue)
    report.figures()["corrected_share"], report.transitions          # [C, C], given -> corrected

A run studies its labels after each epoch:

    study = LabelStudy(storage, catalogue_version, run_id, history=True)
    found = study.of(manifest, epoch=7, moved=True, before=figures_of_epoch_6)
    found.figures["corrected_share"], found.warnings, found.transitions

With `history` it also writes `epoch-NNNNN.arrow` after each epoch that moved labels, with the class and the
confidence of every row. A night also writes `start.arrow`, the labels it started from.

    moves = LabelMoves("s3://lake/clothing1m/labels/history/ID", layout)
    moves.last_change(range(0, 1000), given)     # int32: the epoch in which each row got its class, or -1
    traces = read_traces(published, rows)        # rows in rising order; of a long run at most `most` epochs
    traces.epochs, traces.classes, traces.confidence             # [E], [B, E], [B, E]
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.labels.columns import PLANTED, WATCHED, Int64s, Layout
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.published import Published, PublishedLabels
from pencil_scale.method.decisions import label_distribution
from pencil_scale.storage.errors import DamagedError
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import filesystem_of, open_url

HISTORY = pa.schema([pa.field("class", pa.uint16()), pa.field("confidence", pa.float16())])
FALL_WORTH_A_WARNING = 0.01
NEVER = -1
START = "start.arrow"  # the labels a night started from, where they were not those given
_FILE = re.compile(rf"/(?:epoch-(\d+)\.arrow|{re.escape(START)})$")


@dataclass(frozen=True)
class Share:
    """How many of how many, with the 95 % interval of Wilson."""

    num: int
    of: int

    @property
    def share(self) -> float:
        return self.num / self.of if self.of else float("nan")

    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the true share, if these were drawn at random."""
        if not self.of:
            return (0.0, 1.0)
        z2 = 1.959964**2
        middle = (self.num + z2 / 2) / (self.of + z2)
        half = np.sqrt(z2 * (self.num * (self.of - self.num) / self.of + z2 / 4)) / (self.of + z2)
        return (max(0.0, float(middle - half)), min(1.0, float(middle + half)))


@dataclass(frozen=True)
class LabelReport:
    """The labels of all trained rows at one moment. Pinned rows count as changed or not, never as right."""

    transitions: Int64s  # [C, C], rows of given class i that now have class j
    entropy_sum: float
    given_right: Share
    corrected_right: Share

    @property
    def num_rows(self) -> int:
        return int(self.transitions.sum())

    @property
    def num_corrected(self) -> int:
        return self.num_rows - int(np.trace(self.transitions))

    def figures(self) -> dict[str, float]:
        """The report in numbers, as they are tracked."""
        num_rows = max(self.num_rows, 1)
        found = {
            "corrected": float(self.num_corrected),
            "corrected_share": self.num_corrected / num_rows,
            "label_entropy": self.entropy_sum / num_rows,
        }
        if self.corrected_right.of:
            low, high = self.corrected_right.interval()
            found |= {"given_label_accuracy": self.given_right.share, "label_accuracy_n": self.given_right.of}
            found |= {"corrected_label_accuracy": self.corrected_right.share}
            found |= {"corrected_label_accuracy_low": low, "corrected_label_accuracy_high": high}
            found |= {"gain_true": self.corrected_right.share - self.given_right.share}
        return found

    def shrunken_classes(self, most_lost: float) -> list[tuple[int, float]]:
        """Classes that lost more than this share of their samples, and what they lost."""
        before, after = self.transitions.sum(1), self.transitions.sum(0)
        lost = 1 - after / np.maximum(before, 1)
        return [(int(c), float(lost[c])) for c in np.flatnonzero((lost > most_lost) & (before > 0))]


def worse(figures: Mapping[str, Any]) -> str:
    """Say that the labels got worse, if their truth is known; otherwise nothing."""
    given, corrected = figures.get("given_label_accuracy"), figures.get("corrected_label_accuracy")
    if given is None or corrected is None or not corrected < given:
        return ""
    num = figures.get("label_accuracy_n") or 0
    return (
        f"WORSE: of {num:,.0f} labels whose true class is known, {given * num:,.0f} were right as given and "
        f"{corrected * num:,.0f} are right now"
    )


def study_labels(
    manifest: Manifest,
    catalogue: Catalogue,
    members: Int64s | None = None,
    history: pa.ipc.RecordBatchFileWriter | None = None,
) -> LabelReport:
    """Read a snapshot once, counting the rows that are trained on: all, or those of `members`.

    With `history`, also write every row's label. The class as given is the catalogue's: the table has the
    class that a row was pinned to.
    """
    num_classes = manifest.layout.num_classes
    transitions = np.zeros((num_classes, num_classes), np.int64)
    entropy_sum, known, given_right, corrected_right = 0.0, 0, 0, 0
    labels = PublishedLabels(manifest)
    # With a history every row is written; else only the parts with members have anything to count.
    parts = labels.batches() if members is None or history is not None else labels.parts_with(members)
    for part in parts:
        rows, logits = part.rows, part.logits
        found = part.decide()
        columns = catalogue.read(rows.start, rows.stop, ["noisy_class", "true_class", "status"])
        given, true = (columns[name].fill_null(-1).to_numpy() for name in ("noisy_class", "true_class"))
        on = pa.compute.equal(columns["status"], "ok").to_numpy() & (given >= 0)
        on &= part.role != PLANTED  # wrong on purpose
        on &= (part.role != WATCHED) | part.has_evidence  # else not decided yet
        if members is not None:
            first, last = np.searchsorted(members, [rows.start, rows.stop])
            on &= np.isin(np.arange(rows.start, rows.stop), members[first:last])
        np.add.at(transitions, (given[on], found.corrected_class[on]), 1)
        shares = label_distribution(logits[on])
        entropy_sum += float(-(shares * np.log(np.maximum(shares, 1e-30))).sum())
        judged = on & (true >= 0) & ~part.pinned
        known += int(judged.sum())
        given_right += int((given == true)[judged].sum())
        corrected_right += int((found.corrected_class == true)[judged].sum())
        if history is not None:
            classes, confidence = found.corrected_class.astype(np.uint16), found.confidence.astype(np.float16)
            history.write_batch(pa.record_batch([classes, confidence], schema=HISTORY))
    return LabelReport(transitions, entropy_sum, Share(given_right, known), Share(corrected_right, known))


@contextmanager
def history_file(url: str) -> Iterator[pa.ipc.RecordBatchFileWriter]:
    """Open a file to write the labels of one moment to, for `study_labels`."""
    with open_url(url, "wb") as file, pa.ipc.new_file(file, HISTORY) as writer:
        yield writer


@dataclass(frozen=True)
class Found:
    """The results of a study."""

    figures: dict[str, float]
    warnings: dict[str, str]
    transitions: Int64s | None


@dataclass
class LabelStudy:
    """Studies the labels of one run; if none moved since, the results of the last study still hold."""

    storage: str
    catalogue_version: int
    run: str  # its id
    members: Int64s | None = None
    history: bool = False
    max_class_loss: float = 0.5
    _last: LabelReport | None = field(default=None, init=False)

    def of(self, manifest: Manifest, epoch: int, moved: bool, before: Mapping[str, float]) -> Found:
        """Study a snapshot taken after `epoch`; `before` are the figures of the epoch before."""
        if self._last is None or moved:
            catalogue = Catalogue.open(self.storage, self.catalogue_version)
            files = Storage(self.storage)
            url = files.path(f"{files.history(self.run)}/epoch-{epoch:05d}.arrow")
            with history_file(url) if moved and self.history else nullcontext() as history:
                self._last = study_labels(manifest, catalogue, self.members, history)
        figures, warnings = self._last.figures(), dict[str, str]()
        if not moved:
            return Found(figures, warnings, None)
        if figures["label_entropy"] == before.get("label_entropy"):
            warnings["no_label_moved"] = "no label moved in an epoch that should move them; check lambda"
        name = "corrected_label_accuracy"
        if figures.get(name, 1.0) < before.get(name, 0.0) - FALL_WORTH_A_WARNING:
            warnings["label_accuracy_falls"] = (
                f"label accuracy fell from {before[name]:.3f} to {figures[name]:.3f}"
            )
        shrunken = self._last.shrunken_classes(self.max_class_loss)
        if shrunken:
            worst = ", ".join(
                f"{manifest.class_names[number]} lost {lost:.0%}" for number, lost in shrunken[:5]
            )
            warnings["classes_shrink"] = f"classes that lose their samples: {len(shrunken)}: {worst}"
        return Found(figures, warnings, self._last.transitions)


class LabelMoves:
    """In which epoch each label's class last changed; known only if the run kept a history."""

    def __init__(self, folder: str, layout: Layout) -> None:
        self._filesystem, _ = filesystem_of(folder)
        self._files, self._layout = history_files(folder), layout

    def last_change(self, rows: range, given: Int64s) -> npt.NDArray[np.int32]:
        """The run's epoch in which each of these rows got the class it has; -1 where it was given it."""
        last = np.full(len(rows), NEVER, np.int32)
        before: npt.NDArray[Any] = given
        for epoch, name in self._files:
            found = _read(self._filesystem, name, self._layout, np.arange(rows.start, rows.stop))
            classes = found["class"].to_numpy()
            last[classes != before] = epoch
            before = classes
        return last


@dataclass(frozen=True)
class Traces:
    """What the labels of some rows were after each epoch; no epochs where no history was kept."""

    epochs: tuple[int, ...]  # of the run, from 0
    classes: npt.NDArray[np.uint16]
    confidence: npt.NDArray[np.float16]


def read_traces(published: Published, rows: Int64s, most: int | None = None) -> Traces:
    """Read the history of a run for some rows of its label table, in rising order."""
    filesystem, _ = filesystem_of(published.history)
    files = [(epoch, name) for epoch, name in history_files(published.history) if epoch != NEVER]
    if most is not None:  # evenly spread, with the first and the last
        chosen = np.linspace(0, len(files) - 1, min(most, len(files))).round().astype(int)
        files = [files[number] for number in np.unique(chosen)]
    found = [_read(filesystem, name, published.manifest.layout, rows) for _, name in files]
    shape = len(files), len(rows)
    classes = np.array([labels["class"].to_numpy() for labels in found], np.uint16).reshape(shape)
    confidence = np.array([labels["confidence"].to_numpy() for labels in found], np.float16).reshape(shape)
    return Traces(tuple(epoch for epoch, _ in files), classes.T, confidence.T)


def history_files(folder: str) -> list[tuple[int, str]]:
    """The epochs of a run's history and the file of each, in rising order; the start of a night first."""
    filesystem, path = filesystem_of(folder)
    filesystem.invalidate_cache()
    try:
        names = filesystem.ls(path, detail=False)
    except FileNotFoundError:
        return []
    return sorted((int(match[1] or NEVER), name) for name in names if (match := _FILE.search(name)))


def _read(filesystem: Any, name: str, layout: Layout, rows: Int64s) -> pa.RecordBatch:
    """The class and confidence of rows, in rising order, in one file: one record batch per label part."""
    found, parts = [pa.RecordBatch.from_pylist([], HISTORY)], rows >> layout.shift
    try:
        with filesystem.open(name, "rb") as file:
            reader = pa.ipc.open_file(file)
            for part in np.unique(parts).tolist():
                slots = rows[slice(*np.searchsorted(parts, [part, part + 1]))] - layout.rows_of(part).start
                found.append(reader.get_batch(part).take(pa.array(slots)))
    except (pa.ArrowInvalid, IndexError) as error:
        reason = " ".join(str(error).split())
        raise DamagedError(f"{name}: damaged history file ({reason}); remove it") from error
    return pa.concat_batches(found)
