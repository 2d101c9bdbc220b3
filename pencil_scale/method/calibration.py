"""Recalibration: what is claimed about labels is corrected by how often a person found it to be true.

    calibration = fit_calibration(claimed, right, weight)        # of labels drawn at random and judged
    decisions = calibration.applied(decisions, some)             # confidence, score and margin of some rows

A label makes two claims: the probability that its class is right, and the probability that the given one is.
One map serves both: the logit of a claim is stretched by `slope`, above 0, and lowered by `shift`. It never
reverses the order of two claims. As it never raises a logit by a constant, the probabilities of two classes
of a label still add up to 1 at most. Both numbers are shrunk to "no change": few judgements change little.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pencil_scale.method.decisions import Decisions
from pencil_scale.method.evidence import Flags, Floats

SHIFTS = np.linspace(-4.0, 0.0, 81)
LOG_SLOPES = np.linspace(-2.5, 1.0, 71)
SPREAD = 0.4  # standard deviation of shift and log slope before anything was judged
LEAST, MOST = 1e-12, 1 - 1e-7  # of a probability: 32-bit floats come no closer to 1
BINS = (0.0, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 1.0)


@dataclass(frozen=True)
class Calibration:
    """A map of probabilities, and what it rests on."""

    shift: float
    slope: float
    num_judged: int
    error_before: float  # mean difference between what the judged labels claim and what is true
    error_after: float

    def of(self, claimed: npt.ArrayLike) -> Floats:
        """Recalibrate probabilities."""
        return _mapped(_logit(claimed), self.shift, self.slope)

    def applied(self, decisions: Decisions, some: Flags) -> Decisions:
        """Recalibrate the probabilities of some rows; no class changes."""
        confidence = self.of(decisions.confidence)
        margin = np.maximum(confidence - self.of(decisions.confidence - decisions.margin), 0.0)
        return replace(
            decisions,
            confidence=np.where(some, confidence.astype(np.float32), decisions.confidence),
            margin=np.where(some, margin.astype(np.float32), decisions.margin),
            score=np.where(some, self.of(decisions.score).astype(np.float32), decisions.score),
        )


def fit_calibration(claimed: Floats, right: Flags, weight: Floats) -> Calibration:
    """Fit the map to judged labels: their claims [N, 2], whether each is true [N, 2], and weights [N].

    A weight is the number of labels that a judged one stands for. Unequal weights are worth fewer judgements
    than there are (Kish's effective sample size).
    """
    worth = weight.sum() / np.square(weight).sum()
    weights = np.repeat(weight[:, None] / 2, 2, axis=1)  # of a claim: half of the label's
    logits, best, lowest = _logit(claimed), (0.0, 1.0), np.inf
    for slope in np.exp(LOG_SLOPES):
        for shift in SHIFTS:
            logit = shift + slope * logits
            surprise = np.logaddexp(0.0, np.where(right, -logit, logit))
            cost = worth * (weights * surprise).sum() + (shift**2 + np.log(slope) ** 2) / (2 * SPREAD**2)
            if cost < lowest:
                best, lowest = (float(shift), float(slope)), float(cost)
    after = _mapped(logits, *best)
    errors = [calibration_error(one, right, weights) for one in (claimed, after)]
    return Calibration(*best, len(weight), *errors)


def calibration_error(claimed: Floats, right: Flags, weight: Floats) -> float:
    """The mean difference, over bins, between the mean claim and the share of claims that are true."""
    error, places = 0.0, np.clip(np.searchsorted(BINS, claimed, "right") - 1, 0, len(BINS) - 2)
    for place in range(len(BINS) - 1):
        here = places == place
        error += abs(float((weight[here] * (claimed[here] - right[here])).sum()))
    return error / float(weight.sum())


def _logit(claimed: npt.ArrayLike) -> Floats:
    share = np.clip(np.asarray(claimed, np.float64), LEAST, MOST)
    found: Floats = np.log(share / (1 - share))
    return found


def _mapped(logits: Floats, shift: float, slope: float) -> Floats:
    found: Floats = 1 / (1 + np.exp(-(shift + slope * logits)))
    return found
