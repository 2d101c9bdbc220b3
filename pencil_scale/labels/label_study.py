"""The labels after each epoch: figures, warnings, and a history of what every label was.

study = LabelStudy(storage, catalogue_version, run_id, history=True)
found = study.of(manifest, epoch=7, moved=True, before=figures_of_epoch_6)
found.figures["corrected_share"], found.warnings, found.transitions
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pencil_scale.catalogue import Catalogue
from pencil_scale.labels.label_report import HISTORY, LabelReport, study_labels
from pencil_scale.labels.manifest import Manifest

FALL_WORTH_A_WARNING = 0.01


@dataclass(frozen=True)
class Found:
    """What a study came to."""

    figures: dict[str, float]
    warnings: dict[str, str]
    transitions: npt.NDArray[np.int64] | None


@dataclass
class LabelStudy:
    """Looks at the labels of one run; where none moved since the last look, that look still holds."""

    storage: str
    catalogue_version: int
    run: str  # its id
    members: npt.NDArray[np.int64] | None = None
    history: bool = False
    max_class_loss: float = 0.5
    _last: LabelReport | None = field(default=None, init=False)
    _class_names: Sequence[str] = field(default=(), init=False)

    def of(self, manifest: Manifest, epoch: int, moved: bool, before: Mapping[str, float]) -> Found:
        """Study a snapshot taken after `epoch`; `before` are the figures of the epoch before."""
        if self._last is None or moved:
            catalogue = Catalogue.open(self.storage, self.catalogue_version)
            with self._history_file(epoch if moved and self.history else None) as history:
                self._last = study_labels(manifest, catalogue, self.members, history)
            self._class_names = catalogue.manifest["classes"]
        figures = self._last.figures()
        warnings = self._warnings(self._last, figures, before) if moved else {}
        return Found(figures, warnings, self._last.transitions if moved else None)

    def _warnings(
        self, report: LabelReport, figures: Mapping[str, float], before: Mapping[str, float]
    ) -> dict[str, str]:
        found: dict[str, str] = {}
        if figures["label_entropy"] == before.get("label_entropy"):
            found["no_label_moved"] = "no label moved in an epoch that should move them; check lambda"
        name = "corrected_label_accuracy"
        if figures.get(name, 1.0) < before.get(name, 0.0) - FALL_WORTH_A_WARNING:
            found["label_accuracy_falls"] = (
                f"label accuracy fell from {before[name]:.3f} to {figures[name]:.3f}"
            )
        shrunken = report.shrunken_classes(self.max_class_loss)
        if shrunken:
            worst = ", ".join(f"{self._class_names[number]} lost {lost:.0%}" for number, lost in shrunken[:5])
            found["classes_shrink"] = f"classes that lose their samples: {len(shrunken)}: {worst}"
        return found

    @contextmanager
    def _history_file(self, epoch: int | None) -> Iterator[pa.ipc.RecordBatchFileWriter | None]:
        if epoch is None:
            yield None
            return
        url = f"{history_folder(self.storage, self.run)}/epoch-{epoch:05d}.arrow"
        with fsspec.open(url, "wb", auto_mkdir=True) as file, pa.ipc.new_file(file, HISTORY) as writer:
            yield writer


def history_folder(storage: str, run: str) -> str:
    """Where a run keeps what every label was after each epoch that moved labels."""
    return f"{storage.rstrip('/')}/labels/history/{run}"
