"""Audit: how good the repairs are, and how many errors they missed, from random samples that a person judged.

There are two strata, the changed and the unchanged labels, and a simple random sample of each: the first rows
in a seeded order. The intervals are exact for draws without replacement (hypergeometric), so they contain the
true share in at least 95 % of all draws, however small the share or the stratum.

    chosen = draw(rows, seed=7, num=200)                  # positions, in the random order of judging
    found = study(Stratum(num_right=188, num_judged=200, num_all=41_250), Stratum(197, 200, 210_000))
    found.precision.share, found.precision.low, found.precision.high

    audit = read_audit("decisions.json")                  # from the decisions that the review page saved
    audit.answers, audit.run                              # what was judged, and whose labels
    reliability([audit.changed, audit.unchanged])         # how often labels are right, by their confidence
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import exp, isnan, lgamma, nan
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import filesystem_of, store_errors
from pencil_scale.subset.choice import seeded_order

CONFIDENCE = 0.95
CHANGED, UNCHANGED = "changed", "unchanged"
KIND, VERSION = "pencil_scale decisions", 3
BINS = (0.0, 0.5, 0.7, 0.9, 0.97, 1.0)  # of the confidence


@dataclass(frozen=True)
class Stratum:
    """The judged labels of one stratum."""

    num_right: int
    num_judged: int
    num_all: int  # labels of this stratum in the dataset
    num_given_right: int = 0  # judged labels that were right as given
    confidence: tuple[tuple[float, bool], ...] = ()  # of each judged label, and whether it is right


class Estimate(NamedTuple):
    """A share of some labels, with its 95 % confidence interval."""

    share: float  # nan if nothing was judged
    low: float
    high: float

    def spelled(self, sign: str = "") -> str:
        """In per cent; with the sign "+" of a change."""
        middle, low, high = (f"{100 * share:{sign}.1f} %" for share in self)
        return f"{'unknown' if isnan(self.share) else middle} (95 % interval {low} to {high})"


@dataclass(frozen=True)
class Findings:
    """The results of an audit."""

    precision: Estimate  # of the changed labels, those whose new class is right
    missed: Estimate  # of the unchanged labels, those that are wrong
    remaining: Estimate  # of all labels, those that are wrong after the repair
    gain: Estimate  # of all labels, those that the repair put right minus those that it spoiled


def draw(rows: npt.NDArray[np.int64], seed: int, num: int) -> npt.NDArray[np.int64]:
    """Choose `num` rows at random; return their positions in random order.

    Draws of several stretches can be merged by drawing again from their union: the position of a row in the
    order depends only on the row and the seed.
    """
    return np.argsort(seeded_order(rows.astype(np.uint64), seed), kind="stable")[:num]


def study(changed: Stratum, unchanged: Stratum) -> Findings:
    """Estimate shares of all labels from the judged samples."""
    # Each of these intervals errs in at most 2.5 % of all draws, so their sum errs in at most 5 %.
    strata = [stratum for stratum in (changed, unchanged) if stratum.num_all]
    wrong = [_wrong(stratum, (1 + CONFIDENCE) / 2) for stratum in strata]
    remaining = np.average(wrong, axis=0, weights=[stratum.num_all for stratum in strata])
    return Findings(
        _estimate(changed.num_right, changed),
        _wrong(unchanged),
        Estimate(*remaining.tolist()),
        _gain(changed, unchanged),
    )


def _gain(changed: Stratum, unchanged: Stratum) -> Estimate:
    """Only changed labels gain or lose; a change between two wrong classes does neither."""
    if changed.num_all == 0:
        return Estimate(0.0, 0.0, 0.0)
    share, confidence = changed.num_all / (changed.num_all + unchanged.num_all), (1 + CONFIDENCE) / 2
    now = _estimate(changed.num_right, changed, confidence)
    was = _estimate(changed.num_given_right, changed, confidence)
    return Estimate(
        share * (now.share - was.share), share * (now.low - was.high), share * (now.high - was.low)
    )


class Bin(NamedTuple):
    """Judged labels of similar confidence."""

    low: float
    high: float
    num: int
    confidence: float  # on average
    right: float  # share of right labels


def reliability(strata: Sequence[Stratum]) -> list[Bin]:
    """Compare the confidence of judged labels with how often they are right; each stratum by its size."""
    judged = [
        (confidence, right, stratum.num_all / stratum.num_judged)
        for stratum in strata
        for confidence, right in stratum.confidence
    ]
    confidence, right, weight = np.array(judged, np.float64).reshape(-1, 3).T
    places, found = np.clip(np.searchsorted(BINS, confidence, "right") - 1, 0, len(BINS) - 2), []
    for place, (low, high) in enumerate(pairwise(BINS)):
        here = places == place
        if here.any():
            means = (float(np.average(some[here], weights=weight[here])) for some in (confidence, right))
            found.append(Bin(low, high, int(here.sum()), *means))
    return found


def _wrong(stratum: Stratum, confidence: float = CONFIDENCE) -> Estimate:
    return _estimate(stratum.num_judged - stratum.num_right, stratum, confidence)


def _estimate(num: int, stratum: Stratum, confidence: float = CONFIDENCE) -> Estimate:
    judged = stratum.num_judged
    return Estimate(num / judged if judged else nan, *interval(num, judged, stratum.num_all, confidence))


def interval(num: int, judged: int, of: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Bound the share among all `of`, if `num` of `judged` drawn without replacement have a property."""
    if of == 0 or judged == 0:
        return 0.0, 1.0
    tail = (1 - confidence) / 2
    fewest = _fewest(num, judged, of, tail)
    most = of - _fewest(judged - num, judged, of, tail)
    return fewest / of, most / of


@lru_cache(maxsize=4096)
def _fewest(num: int, judged: int, of: int, tail: float) -> int:
    """The smallest number among `of` with which finding `num` or more is likelier than `tail`."""
    low, high = num, of - (judged - num)
    while low < high:
        middle = (low + high) // 2
        if _chance_of_at_least(num, judged, middle, of) > tail:
            high = middle
        else:
            low = middle + 1
    return low


def _chance_of_at_least(num: int, judged: int, having: int, of: int) -> float:
    """The probability that `num` or more of `judged` have a property that `having` of `of` have."""
    draws = range(max(num, judged - (of - having)), min(judged, having) + 1)
    return sum(
        exp(_log_choose(having, k) + _log_choose(of - having, judged - k) - _log_choose(of, judged))
        for k in draws
    )


def _log_choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)


class Answer(NamedTuple):
    """A label that was drawn at random and judged; classes are names."""

    sample_id: str
    stratum: str
    chosen: str | None  # None: none of the classes
    given: str
    suggested: str
    confidence: float  # with four digits

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "Answer":
        """Read an entry of a file of decisions."""
        chosen, given, suggested = (entry[name] for name in ("class", "given", "suggested"))
        confidence = float(entry["confidence"])
        return cls(str(entry["sample_id"]), entry["audit"], chosen, given, suggested, confidence)

    @property
    def right(self) -> bool:
        return self.chosen is not None and self.chosen == self.suggested

    @property
    def given_right(self) -> bool:
        return self.chosen is not None and self.chosen == self.given


@dataclass(frozen=True)
class Audit:
    """What a person judged in the page's audit."""

    run: str
    answers: tuple[Answer, ...]
    sizes: dict[str, int]  # labels of each stratum in the dataset

    @property
    def changed(self) -> Stratum:
        return self._stratum(CHANGED)

    @property
    def unchanged(self) -> Stratum:
        return self._stratum(UNCHANGED)

    def _stratum(self, kind: str) -> Stratum:
        here = [answer for answer in self.answers if answer.stratum == kind]
        right, given_right = (sum(getattr(one, name) for one in here) for name in ("right", "given_right"))
        confidence = tuple((answer.confidence, answer.right) for answer in here)
        return Stratum(right, len(here), self.sizes[kind], given_right, confidence)


def read_audit(url: str) -> Audit:
    """Read the labels that were judged in the page's audit."""
    filesystem, path = filesystem_of(url)
    try:
        with store_errors(f"{url}: cannot be read"):
            data = filesystem.cat_file(path)
        found = json.loads(data)
    except FileNotFoundError:
        raise PencilError(f"{url}: no such file; a relative path starts at the current folder") from None
    except ValueError as error:
        raise PencilError(f"{url}: not a complete JSON file ({error}); save it again") from error
    if not isinstance(found, dict) or (found.get("kind"), found.get("version")) != (KIND, VERSION):
        raise PencilError(f"{url}: not a file of decisions of version {VERSION}, as the review page saves it")
    sizes: dict[str, int] = {}
    try:
        judged = [entry for entry in found["decisions"] if entry.get("audit")]
        answers = tuple(map(Answer.of, judged))
        for kind in (CHANGED, UNCHANGED):
            num, known = sum(answer.stratum == kind for answer in answers), found["audit"][kind]
            if not num <= int(known["drawn"]) <= int(known["all"]):
                raise ValueError(f"{num} judged of {known['drawn']} drawn of {known['all']} {kind}")
            sizes[kind] = int(known["all"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise PencilError(f"{url}: entries are missing or invalid ({error!r}); save it again") from error
    if not judged:
        raise PencilError(f"{url}: nothing was judged in an audit; choose Audit in the page, judge, and save")
    return Audit(str(found.get("run")), answers, sizes)
