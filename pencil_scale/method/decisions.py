"""From learned label logits, or from predictions, to decisions: which class, how sure, changed or not.

    decisions = decide(label_logits, noisy_class)
    decisions = decisions.but(some, decide_by_evidence(predictions, noisy_class[some], noise))
    decisions.corrected_class, decisions.confidence, decisions.changed

A label keeps its given class unless another class is strictly ahead. A row without a given class
(`noisy_class` -1) has a corrected class and counts as unchanged. Published labels are decided by one method,
`LabelRows.decide`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pencil_scale.method.evidence import NoiseModel, Predictions, judge
from pencil_scale.storage.errors import PencilError, many

UNLABELLED = -1


@dataclass(frozen=True)
class Decisions:
    """One entry per row. By evidence, a share is the probability that the class is right."""

    corrected_class: npt.NDArray[np.int64]
    confidence: npt.NDArray[np.float32]  # share of the label on the corrected class
    margin: npt.NDArray[np.float32]  # that share minus the next best one; 0 if kept though another is ahead
    score: npt.NDArray[np.float32]  # share of the given class: low means suspicious; nan if none was given
    changed: npt.NDArray[np.bool_]

    @property
    def num_changed(self) -> int:
        return int(self.changed.sum())

    def but(self, some: npt.NDArray[np.bool_], others: "Decisions") -> "Decisions":
        """These decisions, with others for some rows."""
        columns = {name: values.copy() for name, values in vars(self).items()}
        for name, values in columns.items():
            values[some] = getattr(others, name)
        return Decisions(**columns)


def label_distribution(label_logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Softmax over the classes, stable for any finite logits.   [B, C]"""
    powers = np.exp(label_logits - label_logits.max(axis=-1, keepdims=True))
    shares: npt.NDArray[np.float32] = (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float32)
    return shares


def decide(label_logits: npt.NDArray[np.float32], noisy_class: npt.NDArray[np.integer]) -> Decisions:
    """Decide the class of every row from its learned logits [B, C] and its given class [B]."""
    broken = np.flatnonzero(~np.isfinite(label_logits).all(axis=-1))
    if len(broken):
        raise PencilError(
            f"label logits of {many(len(broken), 'row')} are not finite, first at position {broken[0]:,}; "
            "restore the label table from its last snapshot"
        )
    shares = label_distribution(label_logits)
    rows = np.arange(len(shares))
    given = np.asarray(noisy_class, dtype=np.int64)
    labelled = given != UNLABELLED
    on_given = shares[rows, given]  # for an unlabelled row this is the last class, and is masked below
    best = shares.argmax(axis=-1)
    tied = labelled & (on_given == shares[rows, best])
    corrected = np.where(tied, given, best)
    confidence = shares[rows, corrected]
    return Decisions(
        corrected_class=corrected,
        confidence=confidence,
        margin=confidence - _runner_up(shares, corrected),
        score=np.where(labelled, on_given, np.float32("nan")),
        changed=labelled & (corrected != given),
    )


def decide_by_evidence(
    predictions: Predictions, noisy_class: npt.NDArray[np.integer], noise: NoiseModel
) -> Decisions:
    """Decide between the given class and the most likely other one, by the odds."""
    given = np.asarray(noisy_class, dtype=np.int64)
    judged = judge(predictions, given, noise)
    changed = judged.log_odds > noise.min_log_odds
    confidence = np.where(changed, judged.rival_right, judged.given_right)
    other = np.where(changed, judged.given_right, judged.rival_right)
    return Decisions(
        corrected_class=np.where(changed, judged.rival, given),
        confidence=confidence.astype(np.float32),
        margin=np.maximum(confidence - other, 0.0).astype(np.float32),
        score=judged.given_right.astype(np.float32),
        changed=changed,
    )


def _runner_up(shares: npt.NDArray[np.float32], winner: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    others = shares.copy()
    others[np.arange(len(shares)), winner] = -1.0
    best: npt.NDArray[np.float32] = others.max(axis=-1, initial=0.0)
    return best
