"""Watch: what a run learns, while it trains, from samples that it never trains on.

    watch = Watch(samples, preparation, ranks, owners, saved, planted)       # samples(): their batches
    figures |= watch.look(model, "pencil", epoch)           # after every epoch
    watch.keep(epochs_done, model, labels)                  # if this is the best epoch of its kind so far
    watch.best                                              # the epoch to return to, or to publish
    proof_of(figures)                                       # what a clean set proves, compared with them

One half of the samples selects: it says when labels may start to move, and which epoch is the best. The other
half judges whether the network got worse while labels moved. No label of these samples is ever learned, so
agreement with them, noisy as they are, ranks the epochs of a run.

A network that memorises wrong labels may predict other samples as well as before. But of the samples in
which an error was planted it predicts fewer as they were given before: it learns the error. So half of these
samples count as well when epochs are ranked.

Epochs within a standard error of each other cannot be told apart; the latest of them is the best.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from torch import nn

from pencil_scale.config.stages import Stages
from pencil_scale.labels.columns import Int64s
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.owners import Batch, Owners
from pencil_scale.labels.roles import judges
from pencil_scale.labels.start_labels import Classes
from pencil_scale.method.proof import Counts, Proof, no_counts, prove, shift
from pencil_scale.train.checkpoints import Kept, Saved
from pencil_scale.train.preparation import Preparation, predict
from pencil_scale.train.ranks import Ranks

FIRST = "backbone"  # the stage before labels move
CLEAN_COUNTS, WATCHED_COUNTS = "clean_counts", "watched_counts"  # figures of an epoch
COUNTS = (CLEAN_COUNTS, WATCHED_COUNTS)


class Watch:
    """The watched samples of a run; every rank predicts its share, and all know the result."""

    def __init__(
        self,
        samples: Callable[[], Iterator[Batch]],
        preparation: Preparation,
        ranks: Ranks,
        owners: Owners,
        saved: Saved | None,
        planted: tuple[Int64s, Classes] | None = None,
    ) -> None:
        """`planted` are rows of this rank with a planted error, and the classes they had before."""
        self._samples, self._preparation, self._ranks, self._owners = samples, preparation, ranks, owners
        rows, given = planted or (np.zeros(0, np.int64), np.zeros(0, np.int32))
        self._planted = rows[~judges(rows)], given[~judges(rows)]  # those that select
        self._seen = list(saved.figures) if saved else []  # of every epoch
        self._agree: list[int] = []  # the judging samples that are predicted as given now
        self.num_selecting = int(self._seen[-1]["watched_selecting"]) if self._seen else 0
        self.agreed = saved.agreed if saved else None  # the same before labels moved
        self.best = saved.best if saved else None
        if saved and self.best is None and saved.progress.step == 0 and self._seen:
            self.best = Kept(saved.progress.epoch, saved.shown, saved.labels)

    def look(self, model: nn.Module, stage: str, epoch: int | None) -> dict[str, Any]:
        """Predict the samples, store the predictions if an epoch is over, and compare with what was given."""
        found = [(np.zeros(0, np.int64), np.zeros(0, np.bool_))]
        counts = no_counts()
        for some, predicted, given, more in predict(model, self._samples(), self._preparation):
            if epoch is not None:
                self._owners.mark(some, predicted, epoch)
            found.append((some.numpy(), predicted[:, 0].cpu().numpy() == given.numpy()))
            counts += more
        self._owners.drain()
        rows, agrees = map(np.concatenate, zip(*chain(*self._ranks.gather(found)), strict=True))
        judging = judges(rows)
        self._agree = sorted(rows[judging & agrees].tolist())
        self.num_selecting = int((~judging).sum())
        figures: dict[str, Any] = {
            "watch_agreement": float(agrees[~judging].sum() / max(self.num_selecting, 1)),
            "watch_agreement_judged": float(agrees[judging].sum() / max(judging.sum(), 1)),
            "watched_selecting": self.num_selecting,
        }
        if self._preparation.config.evidence.clean is not None:
            figures[WATCHED_COUNTS] = np.sum(self._ranks.gather(counts), axis=0).tolist()
        if epoch is None:
            self.agreed = self._agree  # before the first epoch of a run whose network has been trained before
            return figures
        figures |= self._look_at_planted()
        self._seen.append({"stage": stage, **figures})
        if stage == FIRST:
            return figures
        before, now = set(self.agreed or ()), set(self._agree)
        here = set(rows.tolist())
        return figures | {"watch_lost": len((before & here) - now), "watch_won": len(now - before)}

    def _look_at_planted(self) -> dict[str, float]:
        """How many of the selecting planted errors were predicted as the class they had before."""
        rows, given = self._planted
        known = ~np.isnan(self._owners.table.read(rows, "predicted_log_p")[:, 0])
        agrees = self._owners.table.read(rows, "predicted_class")[:, 0] == given
        num, of = (int(self._ranks.total(int(some.sum()))) for some in (agrees & known, known))
        return {"planted_agreement": num / of, "planted_selecting": of} if of else {}

    def agreements(self, first_stage: bool) -> list[float]:
        """The agreement after each epoch before, or after, labels started to move."""
        return [one["watch_agreement"] for one in self._of(first_stage)]

    def _of(self, first_stage: bool) -> list[dict[str, Any]]:
        return [one for one in self._seen if (one["stage"] == FIRST) == first_stage]

    def keep(self, epoch: int, model: nn.Module, labels: Manifest) -> None:
        """Keep a copy of the last epoch if it is the best so far; `epoch` counts the epochs done."""
        is_first = self._seen[-1]["stage"] == FIRST
        scores, nums = zip(*map(score, self._of(is_first)), strict=True)
        if is_best(scores, nums[-1]):
            weights = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
            self.best = Kept(epoch, weights, labels)
            if is_first:
                self.agreed = self._agree

    def start_to_move(self) -> Kept | None:
        """Forget the best epoch of the first stage, after which labels move; return it."""
        best, self.best = self.best, None
        return best


def predicts_plainly(stages: Stages) -> bool:
    """Whether the stages after the first predict what they train on as plainly as watched samples."""
    last, pencil = stages.finetune, stages.pencil
    steps = [(last.epochs, last.mixup, last.augment, last.average)]
    steps += [(pencil.epochs, pencil.mixup, pencil.augment, pencil.teacher)]
    return not any(
        epochs and average is None and (mixup or augment == "strong")
        for epochs, mixup, augment, average in steps
    )


def score(figures: Mapping[str, Any]) -> tuple[float, int]:
    """The share of selecting samples, watched and planted, that were predicted as given; and their number."""
    nums = [figures.get(name, 0) for name in ("watched_selecting", "planted_selecting")]
    agreements = [figures["watch_agreement"], figures.get("planted_agreement", 0.0)]
    return float(np.average(agreements, weights=nums if sum(nums) else [1, 0])), sum(nums)


def is_best(agreements: Sequence[float], num: int) -> bool:
    """Whether the last epoch is within a standard error of the best."""
    highest = max(agreements)
    return agreements[-1] >= highest - math.sqrt(highest * (1 - highest) / max(num, 1))


def proof_of(figures: Sequence[Mapping[str, Any]], mixes: bool = False) -> Proof | None:
    """What the clean set of `evidence.clean` proves, if anything.

    If the last stage mixes images without an average, samples that are trained on have predictions of the
    end of the stage before, and watched ones of the published epoch: the higher of both bars serves for all.
    """
    proofs = [prove(*counts) for counts in _compared(figures, mixes)]
    found = [proof for proof in proofs if proof is not None]
    return max(found, key=lambda proof: proof.min_margin) if found and None not in proofs else None


def no_proof(figures: Sequence[Mapping[str, Any]], mixes: bool = False) -> str:
    """Say why the clean set of `evidence.clean` proves nothing."""
    if not (compared := _compared(figures, mixes)):
        return "the clean set proves nothing, because no samples are watched, with which it would be compared"
    right, agree = (counts[0, 0] / max(counts[0].sum(), 1) for counts in compared[-1])
    shares = f"right for {right:.2f} of the clean samples, and agrees with {agree:.2f} of the watched labels"
    if any(shift(*counts) > 0 for counts in compared):
        return (
            "the clean set proves nothing, because it seems to come from another source: the network is "
            f"clearly more, or less, often sure of clean samples than of watched ones (it is {shares}); take "
            "clean samples at random from the same source"
        )
    return (
        "the clean set proves nothing: where the network contradicts labels, it may be wrong itself just as "
        f"often (it is {shares}); a stronger network or more clean samples may prove something"
    )


def _compared(figures: Sequence[Mapping[str, Any]], mixes: bool) -> list[tuple[Counts, Counts]]:
    """The counts of clean and of watched samples by the networks whose predictions decide."""
    before = [epoch for epoch in figures if mixes and epoch["stage"] != "finetune"]
    used = [epoch for epoch in (*before[-1:], *figures[-1:]) if {*COUNTS} <= epoch.keys()]
    return [(np.array(epoch[COUNTS[0]]), np.array(epoch[COUNTS[1]])) for epoch in used]
