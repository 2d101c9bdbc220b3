"""What predictions say about given labels: how many are wrong, which ones, and what a repair gains.

    noise = fit_noise(watched_predictions, given)             # of samples the network was never trained on
    judged = judge(predictions, given, noise)               # of any samples
    noise = limit_changes(noise, judged.log_odds, noise.wrong_low)     # no more than are surely wrong
    gain = net_gain(found, restored, changed_share, num_rows, noise)
    suppose(watched_predictions, given, share)              # the model if this share of the labels were wrong

The model has three numbers. A label is replaced by a random class with probability `replaced`; the true class
has the probability that the network gives it, after a calibration by temperature and power. An unsure network
therefore explains a disagreement by its own errors before it blames the label: if it is weak, little noise is
found and little changes. A network that was trained for long is too sure of hard samples and right about easy
ones; no temperature corrects both, and the noise looks smaller than it is, hence the power.

A weak network and wrong labels look alike, with few classes above all: even sure predictions differ from the
labels, and there are no classes that a network would hardly confuse. How many labels are wrong is then known
within wide bounds only (`doubt`).

Noise per class or per pair of classes fits better, and in trials it did harm wherever the network was weak.
Errors that follow such a pattern are therefore not found by this rule. `contradicted` and `unexplained` show
that there may be some. An overfitted network is as sure of its mistakes on clean labels, so what it
contradicts can only be proposed to a person, unless a clean set proves more (`proof.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Self

import numpy as np
import numpy.typing as npt

from pencil_scale.method.proof import Z95, Proof, margins

Floats = npt.NDArray[np.float64]
Classes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NEVER = -60_000.0  # the log-probability of a class that cannot be; the ledger keeps 16 bits
TOP = 6  # most likely classes kept of a prediction
TEMPERATURES = np.geomspace(0.3, 30.0, 40)
POWERS = (1.0, 1.4, 2.0)
CALIBRATIONS = list(product(TEMPERATURES.tolist(), POWERS))
PIVOT = 5.0  # a difference of log-probabilities at which the power changes nothing
REPLACED = np.concatenate([np.linspace(0, 0.1, 41), np.linspace(0.11, 0.95, 85)])
LEAST_REPLACED = 0.01
ENOUGH_ROWS = 20_000  # more rows would not move the estimate
INTERVAL = (0.05, 0.95)  # each bound holds with 95 %
MOST_SURE_ERRORS = 0.03  # share of its surest predictions that a network may get wrong
MODEL_ERROR = 0.005  # share of labels that may seem wrong only because the model is not exact
# With 2, 3 and 4 classes and networks that were right in 50 to 90 % of cases, clean labels seemed wrong at
# up to 1.7, 0.8 and 0.3 times the share that the network itself gets wrong; with 10 classes not at all.
DOUBT_OF_TWO, DOUBT_PER_CLASS = 1.7, 0.5
# With 10 classes, up to 12 % too many seemed wrong to models that were right in 63 % of cases, and 2 % to
# those right in 80 %. Weight and power were chosen on 74 such models with clean or randomly wrong labels:
# none of their repairs does harm then, and of the 49 with wrong labels 25 are published.
DOUBT_OF_WEAK = 1.3
PROVEN = 1000.0  # added to the log-odds of what a clean set proves


@dataclass(frozen=True)
class Predictions:
    """The most likely classes of samples; all other classes count as equally likely."""

    classes: Classes  # [N, K], the most likely first
    log_p: Floats  # [N, K]
    num_classes: int

    @classmethod
    def from_logits(cls, logits: npt.ArrayLike) -> Self:
        """Keep the top of full predictions [N, C]."""
        scores = np.asarray(logits, dtype=np.float64)
        log_p = scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True)
        top = np.argsort(-log_p, axis=-1, kind="stable")[:, :TOP]
        return cls(top, np.take_along_axis(log_p, top, -1), log_p.shape[1])

    @classmethod
    def join(cls, some: Sequence[Self]) -> Self:
        """The predictions of several groups of samples, of which there is at least one."""
        classes, log_p = ([getattr(one, name) for one in some] for name in ("classes", "log_p"))
        return cls(np.concatenate(classes), np.concatenate(log_p), some[0].num_classes)

    def take(self, samples: Classes) -> Self:
        """The predictions of some of the samples."""
        return replace(self, classes=self.classes[samples], log_p=self.log_p[samples])

    def without(self, classes: Classes) -> Self:
        """The predictions if one class of each sample could not be; it is the last of those kept."""
        is_it = self.classes == classes[:, None]
        shares = np.where(is_it, 0.0, np.exp(self.log_p))
        left = np.maximum(1 - np.where(is_it, np.exp(self.log_p), 0.0).sum(-1), shares.sum(-1))
        log_p = np.where(is_it, NEVER, self.log_p - np.log(np.maximum(left, 1e-12))[:, None])
        log_p = np.where(np.isnan(self.log_p), np.nan, log_p)
        order = np.argsort(-log_p, axis=-1, kind="stable")
        classes = np.take_along_axis(self.classes, order, -1)
        return replace(self, classes=classes, log_p=np.take_along_axis(log_p, order, -1))

    def calibrated(self, temperature: float, power: float) -> tuple[Floats, Floats]:
        """Probabilities of the top classes [N, K] and of every other class [N].

        With a power above 1, small differences between classes count less, and large ones more.
        """
        num_others = self.num_classes - self.classes.shape[1]
        remaining = np.clip(1 - np.exp(self.log_p).sum(-1), 1e-12, None) / max(num_others, 1)
        best = self.log_p[:, 0]
        behind = np.maximum(best[:, None] - self.log_p, 0), np.maximum(best - np.log(remaining), 0)
        top, other = (np.exp(-PIVOT / temperature * (gap / PIVOT) ** power) for gap in behind)
        total = top.sum(-1) + num_others * other
        return top / total[:, None], other / total

    def margins(self, given: Classes) -> Floats:
        """By how much the best class is likelier than the given one."""
        return margins(self.classes, self.log_p, given, self.num_classes)

    def of_class(self, classes: Classes, top: Floats, other: Floats) -> Floats:
        """The probability of one class of each sample, given those of `calibrated`."""
        is_it = self.classes == classes[:, None]
        found: Floats = np.where(is_it.any(-1), (top * is_it).sum(-1), other)
        return found


@dataclass(frozen=True)
class NoiseModel:
    """How the given labels came about, as far as the watched samples tell."""

    temperature: float
    replaced: float  # chance that a label was drawn from all classes
    wrong: float  # share of wrong labels, with its interval
    wrong_low: float
    wrong_high: float
    doubt: float = 0.0  # share of labels that may seem wrong only because the network is weak
    power: float = 1.0  # of the calibration, with the temperature
    min_log_odds: float = 0.0  # a label changes only if the odds against it are above this
    watched_below: float = 0.0  # images that hash below this were not trained on
    since: int = 0  # first epoch, in the life of the label table, of the network it was fitted to
    crossed_until: int = 0  # up to this epoch, each row was predicted by a network never trained on it
    min_margin: float | None = None  # a label contradicted by more than this changes: a clean set proves it
    proven_right: float = 1.0  # share of these changes that are right


def fit_noise(predictions: Predictions, given: Classes) -> NoiseModel:
    """Fit calibration and noise to samples that were not trained on.

    Different calibrations explain the labels almost equally well with different shares of wrong ones. The
    share is therefore the mean over all of them, each weighted by the likelihood of the labels.
    """
    if len(given) > ENOUGH_ROWS:
        some = np.linspace(0, len(given) - 1, ENOUGH_ROWS).astype(np.int64)
        predictions, given = predictions.take(some), given[some]
    even, likelihood = 1 / predictions.num_classes, _likelihood(predictions, given, REPLACED)
    weights = np.exp(np.logaddexp.reduce(likelihood, axis=0) - likelihood.max()) * np.gradient(REPLACED)
    weights /= weights.sum()
    replaced, below = float(weights @ REPLACED), weights.cumsum()
    low, high = (float(REPLACED[np.searchsorted(below, share)]) for share in INTERVAL)
    temperature, power = CALIBRATIONS[int(likelihood[:, np.searchsorted(REPLACED, replaced)].argmax())]
    is_other = 1 - even  # a random class may be the true one
    errs = 1 - float(predictions.calibrated(temperature, power)[0][:, 0].mean())
    doubt = errs * DOUBT_OF_TWO * DOUBT_PER_CLASS ** (predictions.num_classes - 2) + DOUBT_OF_WEAK * errs**3
    return NoiseModel(
        temperature=temperature,
        power=power,
        replaced=replaced,
        doubt=doubt,
        wrong=replaced * is_other,
        wrong_low=max(0.0, low * is_other - MODEL_ERROR - doubt),
        wrong_high=high * is_other,
    )


def suppose(predictions: Predictions, given: Classes, wrong: float) -> NoiseModel:
    """Calibrate as if this share of the labels were wrong."""
    replaced = min(wrong / (1 - 1 / predictions.num_classes), float(REPLACED[-1]))
    best = _likelihood(predictions, given, np.array([replaced])).argmax()
    temperature, power = CALIBRATIONS[int(best)]
    return NoiseModel(temperature, replaced, wrong, wrong, wrong, power=power)


def _likelihood(predictions: Predictions, given: Classes, replaced: Floats) -> Floats:
    """The log-likelihood of the labels for each calibration and share of replaced labels."""
    even, found = 1 / predictions.num_classes, np.empty((len(CALIBRATIONS), len(replaced)))
    for row, calibration in enumerate(CALIBRATIONS):
        on_given = predictions.of_class(given, *predictions.calibrated(*calibration))
        for column, share in enumerate(replaced):
            found[row, column] = np.log((1 - share) * on_given + share * even + 1e-12).sum()
    return found


@dataclass(frozen=True)
class Judged:
    """What the evidence says of each sample's label."""

    rival: Classes  # the most likely class other than the given one
    log_odds: Floats  # of the rival against the given class
    given_right: Floats  # probability that the given label is right
    rival_right: Floats  # probability that the rival is


def judge(predictions: Predictions, given: Classes, noise: NoiseModel) -> Judged:
    """Weigh each given label against the most likely other class.

    Even if no noise was found, some labels are more doubtful than others: at least one in a hundred counts as
    replaced. `limit_changes` keeps them from changing.
    """
    top, other = predictions.calibrated(noise.temperature, noise.power)
    on_given = predictions.of_class(given, top, other)
    replaced = max(noise.replaced, LEAST_REPLACED)
    drawn = replaced / predictions.num_classes
    others = np.where(predictions.classes == given[:, None], 0.0, top)
    rows, place = np.arange(len(given)), others.argmax(-1)
    right = on_given * (1 - replaced + drawn) + 1e-12
    rival = others[rows, place] * drawn + 1e-12
    total = right + (1 - on_given) * drawn
    found = Judged(predictions.classes[rows, place], np.log(rival / right), right / total, rival / total)
    if noise.min_margin is None:
        return found
    proven = predictions.margins(given) > noise.min_margin
    rival_right = others[rows, place] / (others[rows, place] + on_given + 1e-12)
    rival_right = np.minimum(rival_right, noise.proven_right)
    return Judged(
        rival=found.rival,
        log_odds=np.where(proven, PROVEN + found.log_odds, found.log_odds),
        given_right=np.where(proven, 1 - rival_right, found.given_right),
        rival_right=np.where(proven, rival_right, found.rival_right),
    )


def limit_changes(noise: NoiseModel, log_odds: Floats, share: float) -> NoiseModel:
    """Raise the bar until no more than this share of the labels changes, and those that are proven wrong."""
    most = max(int(share * len(log_odds)), int((log_odds > PROVEN / 2).sum()))
    ahead = np.sort(log_odds[log_odds > 0])[::-1]
    return noise if len(ahead) <= most else replace(noise, min_log_odds=float(ahead[most]))


def contradicted(predictions: Predictions, given: Classes) -> tuple[int, int]:
    """Of the samples that the network is surest of, a fifth of each class, count the other labels, and all.

    A network rarely errs there, so random errors explain at most their own share.
    """
    top, sure = predictions.classes[:, 0], -predictions.log_p[:, 0]
    num = of = 0
    for number in np.unique(top):
        some = np.flatnonzero(top == number)
        surest = some[np.argsort(sure[some], kind="stable")][: -(-len(some) // 5)]
        num, of = num + int((given[surest] != number).sum()), of + len(surest)
    return num, of


def unexplained(noise: NoiseModel, num: int, of: int) -> float:
    """What part of `contradicted` labels random errors do not explain; 0 if it may be chance."""
    share = num / max(of, 1)
    if share - noise.wrong_high <= MOST_SURE_ERRORS + 2 * np.sqrt(share * (1 - share) / max(of, 1)):
        return 0.0
    return 1 - noise.wrong_high / share


@dataclass(frozen=True)
class Gain:
    """The estimated change in the share of right labels, and what it follows from."""

    gain: float
    low: float  # bounds of its 90 % interval: each holds with 95 %
    high: float
    found: float  # share of planted errors whose label changed
    restored: float  # share of them that got their original class back
    changed: float  # share of all other labels that changed
    num_planted: int  # deliberate errors, trained with or only tried


def net_gain(found: Flags, restored: Flags, changed: float, num_rows: int, noise: NoiseModel) -> Gain:
    """Estimate what a repair gains, from deliberate errors (one flag for each).

    Wrong labels are found and restored as often as planted ones. Every other change costs a right label. With
    e the share of wrong labels the net gain is e * (restored + found) - changed. A planted error cannot be
    restored to its true class if its original label was wrong as well, hence the division by 1 - e. Where no
    label changed, nothing is gained, whatever a planted error shows; and no more wrong labels can have been
    found than labels changed, which limits e.
    """
    num = max(len(found), 1)
    share_found, share_restored = float(found.sum() / num), float(restored.sum() / num)
    if changed == 0:
        return Gain(0.0, 0.0, 0.0, share_found, share_restored, changed, len(found))
    wrong = min(noise.wrong, changed / max(share_found, changed))
    fixed = min(share_restored / (1 - wrong), share_found)
    gain = wrong * (fixed + share_found) - changed
    # A planted error counts 2 if fixed, 1 if only changed, 0 if not found.
    variance = 4 * fixed + (share_found - fixed) - (fixed + share_found) ** 2
    error = Z95 * np.sqrt(wrong**2 * variance / num + changed * (1 - changed) / max(num_rows, 1))
    error = np.hypot(error, min(noise.doubt, wrong) * (fixed + share_found))
    return Gain(
        float(gain),
        float(gain - error),
        float(min(gain + error, changed)),
        share_found,
        share_restored,
        changed,
        len(found),
    )


def proven_gain(proof: Proof, gain: Gain, proven: float) -> Gain:
    """The gain that a clean set proves, if this share of all other labels changes by it.

    Changes beyond the share that it was proven for count as errors.
    """
    share, more = min(1.0, proven / proof.changed), max(0.0, proven - proof.changed)
    return replace(gain, gain=proof.gain * share - more, low=proof.low * share - more, high=gain.changed)
