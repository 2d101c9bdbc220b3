"""Audit: how good the repairs are, and how much noise was missed, from random samples that a person judged.

Two strata, the changed and the unchanged labels, and from each a simple random sample: the first few in a
seeded order of rows. The intervals are exact for draws without replacement (hypergeometric), so they cover
the true share in at least 95 % of all draws, however small the share or the stratum.

    chosen = draw(rows, seed=7, num=200)                  # positions, in the random order they are judged in
    found = study(Stratum(num_right=188, num_judged=200, num_all=41_250), Stratum(197, 200, 210_000))
    found.precision.share, found.precision.low, found.precision.high

Judged file: what an audit came to, from the decisions that the review page saved.

changed, unchanged = read_judged("decisions.json")
findings = study(changed, unchanged)
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from math import exp, lgamma
from typing import Any

import numpy as np
import numpy.typing as npt

from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import open_source, version_of
from pencil_scale.subset.choice import seeded_order

CONFIDENCE = 0.95
CHANGED, UNCHANGED = "changed", "unchanged"


@dataclass(frozen=True)
class Stratum:
    """What was judged of one kind of labels."""

    num_right: int
    num_judged: int
    num_all: int  # labels of this kind in the whole dataset


@dataclass(frozen=True)
class Estimate:
    """A share of some labels, and where the truth lies with 95 % confidence."""

    share: float  # nan where nothing was judged
    low: float
    high: float

    def __str__(self) -> str:
        middle = "not known" if self.share != self.share else f"{100 * self.share:.1f} %"
        return f"{middle} (95 % interval {100 * self.low:.1f} % to {100 * self.high:.1f} %)"


@dataclass(frozen=True)
class Findings:
    """What an audit came to."""

    precision: Estimate  # of the changed labels, those whose new class is right
    missed: Estimate  # of the unchanged labels, those that are wrong
    left: Estimate  # of all labels, those that are wrong after the repair


def draw(rows: npt.NDArray[np.int64], seed: int, num: int) -> npt.NDArray[np.int64]:
    """Choose `num` rows at random; gives positions in a random order.

    Draws of parts can be merged by drawing again from their union: a row's place in the order depends on the
    row and the seed alone.
    """
    places = seeded_order(rows.astype(np.uint64), seed)
    return np.argsort(places, kind="stable")[:num]


def study(changed: Stratum, unchanged: Stratum) -> Findings:
    """Estimate what the judged samples say of all."""
    wrong = Stratum(unchanged.num_judged - unchanged.num_right, unchanged.num_judged, unchanged.num_all)
    return Findings(_estimate(changed), _estimate(wrong), _left(changed, wrong))


def interval(num: int, judged: int, of: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Where the share of all `of` lies, if `num` of `judged` drawn without replacement have the property."""
    if of == 0 or judged == 0:
        return 0.0, 1.0
    tail = (1 - confidence) / 2
    fewest = _fewest(num, judged, of, tail)
    most = of - _fewest(judged - num, judged, of, tail)
    return fewest / of, most / of


def _estimate(stratum: Stratum) -> Estimate:
    share = stratum.num_right / stratum.num_judged if stratum.num_judged else float("nan")
    return Estimate(share, *interval(stratum.num_right, stratum.num_judged, stratum.num_all))


def _left(changed: Stratum, wrong: Stratum) -> Estimate:
    """Noise after the repair. Each stratum's interval errs in 2.5 % at most, so both together in 5 %."""
    parts = [Stratum(changed.num_judged - changed.num_right, changed.num_judged, changed.num_all), wrong]
    total = max(sum(part.num_all for part in parts), 1)
    filled = [part for part in parts if part.num_all]
    share = sum(part.num_all * _estimate(part).share for part in filled) / total
    bounds = [
        interval(part.num_right, part.num_judged, part.num_all, (1 + CONFIDENCE) / 2) for part in filled
    ]
    low, high = (
        sum(part.num_all * bound[side] for part, bound in zip(filled, bounds, strict=True)) / total
        for side in (0, 1)
    )
    return Estimate(share, low, high)


@lru_cache(maxsize=4096)
def _fewest(num: int, judged: int, of: int, tail: float) -> int:
    """The smallest number among `of` under which finding `num` or more is likelier than `tail`."""
    low, high = num, of - (judged - num)
    while low < high:
        middle = (low + high) // 2
        if _chance_of_at_least(num, judged, middle, of) > tail:
            high = middle
        else:
            low = middle + 1
    return low


def _chance_of_at_least(num: int, judged: int, having: int, of: int) -> float:
    """That `num` or more of `judged` have what `having` of `of` have."""
    whole = _log_choose(of, judged)
    most = min(judged, having)
    fewest = max(num, judged - (of - having))
    return sum(
        exp(_log_choose(having, k) + _log_choose(of - having, judged - k) - whole)
        for k in range(fewest, most + 1)
    )


def _log_choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)


KIND, VERSION = "pencil_scale decisions", 2


def read_judged(url: str) -> tuple[Stratum, Stratum]:
    """Count what was judged in the page's audit: the changed labels, and the unchanged."""
    found = _read(url)
    try:
        judged = [entry for entry in found["decisions"] if entry.get("audit")]
        strata = [_stratum(found["audit"][kind], judged, kind) for kind in (CHANGED, UNCHANGED)]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise PencilError(f"{url}: entries are missing or odd ({error!r}); save it again") from error
    if not judged:
        raise PencilError(f"{url}: nothing was judged in an audit; choose Audit in the page, judge, and save")
    return strata[0], strata[1]


def _stratum(known: dict[str, Any], judged: list[dict[str, Any]], kind: str) -> Stratum:
    here = [entry for entry in judged if entry["audit"] == kind]
    if not len(here) <= int(known["drawn"]) <= int(known["all"]):
        raise ValueError(f"{len(here)} judged of {known['drawn']} drawn of {known['all']} {kind}")
    right = sum(entry["class"] is not None and entry["class"] == entry["suggested"] for entry in here)
    return Stratum(right, len(here), int(known["all"]))


def _read(url: str) -> Any:
    if version_of(url) is None:
        raise PencilError(f"{url}: no such file, seen from the folder you are in")
    with open_source(url) as source:
        data = source.read(0, source.num_bytes)
    try:
        found = json.loads(data)
    except ValueError as error:
        raise PencilError(f"{url}: no whole JSON file ({error}); save it again") from error
    if not isinstance(found, dict) or (found.get("kind"), found.get("version")) != (KIND, VERSION):
        raise PencilError(f"{url}: not a file of decisions of version {VERSION} that the review page saved")
    return found
