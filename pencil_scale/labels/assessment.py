"""Assessment: what watched samples and planted errors say about a run's labels, and the labels to publish.

    found = assess(manifest, catalogue, roles)
    found.noise, found.gain, found.power          # how many labels are wrong, and what the repair gains
    found.labels                                  # to publish: decided by evidence, without planted errors

The noise is fitted to all watched samples. One rule, stored in the manifest, then decides all labels, and
changes no more of them than are surely wrong: the others stay as given, and are the first that a review
shows. If less than a tenth of those that are probably wrong are surely wrong, the labels are repaired up to
the probable number and marked `unsure`: a person has to look before they are published. If the doubt is about
one label in a hundred or fewer, no review is needed. The same rule judges the planted errors, which then get
their original class back.

If even the surest predictions contradict more labels than random errors explain (`patterned`), either classes
are mixed up systematically or the network is sure of its own mistakes, and only a person can tell. If the
network restores most planted errors, the labels are decided as if its surest predictions were right: these
changes are a proposal.

With a `proof` from a clean set the labels that it proves wrong change too, random or not, and the gain is
what it proves. Where it proves nothing, or less than is known without it, everything is as without it.

If a run trained several times, `assess(manifest, catalogue, roles, folds)` takes every prediction from the
network that was never trained on the sample, and fits the noise to all samples. Such predictions do not
depend on the label, so a wrong class can be tried in place of each one, as if it had been planted: that shows
far better than some planted errors what the repair gains.

A night may have too few new samples to measure what its repair gains. If `start` is given, the labels that it
started from, no label changes then: old ones stay as they were, and new ones stay as given until a later
night decides them. Labels that earlier nights decided stay in any case, and the noise is
that of new samples: the gain is measured against given labels, and old ones have been repaired.

The rule holds for the rows that this run trained on or watched. All other rows were predicted by earlier
networks, and stay as decided by the rules that were fitted to those.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.labels.columns import FREE, PINNED, PLANTED, WATCHED, Int64s
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.published import LabelRows, PublishedLabels, is_decided
from pencil_scale.labels.roles import FEWEST, Roles
from pencil_scale.labels.start_labels import cross, keep_decided, regive, unmoved, unplant
from pencil_scale.method.evidence import (
    PROVEN,
    Floats,
    Gain,
    Judged,
    NoiseModel,
    Predictions,
    contradicted,
    fit_noise,
    judge,
    limit_changes,
    net_gain,
    proven_gain,
    suppose,
    unexplained,
)
from pencil_scale.method.proof import Proof
from pencil_scale.storage.hashing import hashes

Mask = npt.NDArray[np.bool_]
ASSUMED = 0.1  # share of replaced labels at which the power of a network is measured
HALF = 0.5  # of the planted errors: restored by a network whose changes are worth looking at
MANY = 200  # planted errors: with fewer, a night that proves no gain leaves the decision to the next
CLEAN = 0.01  # share of doubtful labels that needs no person
# Of the labels that are likely wrong: with fewer that surely are, a person has to look, or the next night,
# because what a night decides stays decided.
SURE, SURE_AT_NIGHT = 0.1, 0.5
STRETCH = 1 << 18
TRIED = 17  # key of the classes that are tried in place of the given ones


@dataclass(frozen=True)
class Assessment:
    """What is known about the labels of a run; None where there was too little to measure it."""

    labels: Manifest
    noise: NoiseModel | None = None
    gain: Gain | None = None
    power: float | None = None  # share of the planted errors found if 10 % of the labels had been replaced
    unsure: bool = False  # hardly any of the labels that are likely wrong surely are
    contradicted: tuple[int, int] = (0, 0)  # labels of the watched samples that the network is surest of
    patterned: bool = False  # random errors do not explain these
    unmoved: bool = False  # the labels are those of the start
    num_new: int | None = None  # labels that a night has to decide


def assess(
    manifest: Manifest,
    catalogue: Catalogue,
    roles: Roles,
    folds: Sequence[Manifest] = (),
    start: Manifest | None = None,
    moves: bool = True,
    proof: Proof | None = None,
) -> Assessment:
    """Fit the noise, decide all labels, and measure the decisions; `folds` are of further trainings.

    A night that does not move labels, because it only learns, leaves them as they were.
    """
    original = given_classes(catalogue, roles.planted)
    planted = roles.planted, original
    if folds:
        manifest = cross(manifest, folds)
        labels = regive(manifest, *planted)
    else:
        labels = unplant(manifest, (roles.planted, roles.planted_class), original)
    seen = _unseen(PublishedLabels(manifest), roles, start, crossed=bool(folds))
    if start is not None and (seen is None or not moves):
        return Assessment(regive(unmoved(manifest, start), *planted), unmoved=True)
    if seen is None:
        return Assessment(labels)
    known, fitted = contradicted(*seen), fit_noise(*seen)
    found = first = _measure(fitted, manifest, roles, original, folds, start)
    rest = unexplained(fitted, *known)
    # A repair that is a gain even without that share of its changes needs no person.
    patterned = rest > 0 and not (first.gain and first.gain.low > rest * first.gain.changed > 0)
    if proof is not None:
        proven = _measure(fitted, manifest, roles, original, folds, start, proof)
        least = first.gain.low if first.gain and not (patterned or first.unsure) else 0.0
        if proven.gain and proven.gain.low > least:
            found, first, patterned = proven, proven, False
    if patterned:
        proposal = suppose(*seen, known[0] / known[1])
        proposed = _measure(proposal, manifest, roles, original, folds, start)
        if proposed.gain and proposed.gain.restored > HALF:
            found = replace(proposed, gain=None)  # planted errors do not show what it gains
    num_new = None if start is None else found.num_judged
    if start is not None and (found.power is None or found.unsure or _is_early(found.gain)):
        labels = regive(unmoved(manifest, start), *planted)
        return Assessment(labels, first.noise, unmoved=True, num_new=num_new)
    earlier = (*manifest.earlier_noise, manifest.noise) if manifest.noise else ()
    labels = replace(labels, noise=asdict(found.noise), earlier_noise=earlier)
    if start is not None:
        labels = keep_decided(labels, start)
    return Assessment(
        labels, first.noise, found.gain, found.power, found.unsure, known, patterned, num_new=num_new
    )


@dataclass(frozen=True)
class Measured:
    """What a noise model changes, and what planted errors say about that; None if there are too few."""

    noise: NoiseModel  # with the bar above which a label changes
    num_judged: int
    unsure: bool
    gain: Gain | None = None
    power: float | None = None


def _measure(
    noise: NoiseModel,
    manifest: Manifest,
    roles: Roles,
    original: npt.NDArray[np.int32],
    folds: Sequence[Manifest],
    start: Manifest | None,
    proof: Proof | None = None,
) -> Measured:
    noise = replace(
        noise,
        min_margin=proof.min_margin if proof else None,
        proven_right=proof.right if proof else 1.0,
        watched_below=float(roles.threshold),
        since=manifest.first_epoch,
        crossed_until=manifest.newest_epoch if folds else 0,
    )
    found = _weigh(noise, manifest, roles, original, crossed=bool(folds), start=start)
    # The limits hold for all rows, and for those trained on: a night may watch more rows than it trains on.
    both = found.trained, np.concatenate([found.trained, found.watched])
    limits = (min(noise.wrong_low, noise.wrong), noise.wrong)
    bars = [max(limit_changes(noise, some, share).min_log_odds for some in both) for share in limits]
    surely, likely = (np.count_nonzero(both[1] > bar) for bar in bars)
    share = SURE if start is None else SURE_AT_NIGHT
    unsure = bool(surely < share * likely and likely > CLEAN * len(both[1])) and proof is None
    noise, num_judged = replace(noise, min_log_odds=bars[unsure]), len(both[1]) + found.num_planted
    is_found = found.errors > noise.min_log_odds
    # Deliberate errors are compared with rows that were predicted as they were.
    changed = float((found.trained > noise.min_log_odds).mean()) if len(found.trained) else 0.0
    gain = net_gain(is_found, is_found & found.restored, changed, len(found.trained), noise)
    if proof is not None:
        gain = proven_gain(proof, gain, float((found.trained > PROVEN / 2).mean()))
    if len(found.errors) < FEWEST:
        return Measured(noise, num_judged, unsure, gain if proof else None)
    return Measured(noise, num_judged, unsure, gain, float((found.if_assumed > 0).mean()))


class Weighed(NamedTuple):
    """The log-odds against the labels of watched samples, of those trained on, and of deliberate errors."""

    watched: Floats  # empty if every sample was watched by one of several trainings
    trained: Floats
    errors: Floats
    restored: Mask  # errors whose most likely other class is the right one
    if_assumed: Floats  # against the same errors, if a tenth of all labels had been replaced
    num_planted: int  # errors that a network was trained with


def _weigh(
    noise: NoiseModel,
    manifest: Manifest,
    roles: Roles,
    original: npt.NDArray[np.int32],
    crossed: bool,
    start: Manifest | None,
) -> Weighed:
    watched, trained, if_assumed = [np.zeros(0)], [np.zeros(0)], [np.zeros(0)]
    errors, restored, num_planted = [np.zeros(0)], [np.zeros(0, bool)], 0
    for part in PublishedLabels(manifest).batches():
        is_watched = part.role == WATCHED
        usable = is_decided(part) & (part.noisy_class >= 0) & (part.role != PINNED)
        usable &= is_watched | (part.last_epoch >= manifest.first_epoch)
        usable &= _undecided(start, part)
        is_apart = is_watched & (not crossed)  # the others were predicted by a network that had seen them
        others = usable & ~is_apart & (part.role != PLANTED)
        watched.append(_judge(part, usable & is_apart, noise).log_odds)
        trained.append(_judge(part, others, noise).log_odds)
        here = usable & (part.role == PLANTED)
        planted = part.rows.start + np.flatnonzero(here)
        num_planted += len(planted)
        right_class = original[np.searchsorted(roles.planted, planted)].astype(np.int64)
        tried = [(here, _given(part, here), right_class)]
        if crossed:  # no network has seen these labels, so any class can be tried in their place
            tried.append((others, _other_classes(part, others), _given(part, others)))
        for some, error, right in tried:
            predictions = part.predictions(some)
            judged = judge(predictions, error, noise)
            errors.append(judged.log_odds)
            restored.append(judged.rival == right)
            if_assumed.append(judge(predictions, error, replace(noise, replaced=ASSUMED)).log_odds)
    return Weighed(
        watched=np.concatenate(watched),
        trained=np.concatenate(trained),
        errors=np.concatenate(errors),
        restored=np.concatenate(restored),
        if_assumed=np.concatenate(if_assumed),
        num_planted=num_planted,
    )


def _is_early(gain: Gain | None) -> bool:
    """Whether a repair is likely to be a gain, and more planted errors may prove it."""
    return gain is not None and gain.num_planted < MANY and gain.low <= 0 < gain.gain


def _undecided(start: Manifest | None, part: LabelRows) -> Any:
    """The rows of a part that no earlier night has decided; all of them if there was none."""
    return True if start is None else ~is_decided(PublishedLabels(start).rows(part.rows))


def _unseen(
    labels: PublishedLabels, roles: Roles, start: Manifest | None, crossed: bool
) -> tuple[Predictions, Int64s] | None:
    """Predictions by networks that were never trained on a sample, and given classes; None if too few."""
    found, given = list[Predictions](), list[Int64s]()
    for part in labels.batches() if crossed else labels.parts_with(roles.watched):
        here = (part.role == WATCHED) | ((part.role == FREE) & crossed)
        here &= is_decided(part) & (part.noisy_class >= 0) & _undecided(start, part)
        found.append(part.predictions(here))
        given.append(part.noisy_class[here].astype(np.int64))
    if sum(map(len, given)) < FEWEST:
        return None
    return Predictions.join(found), np.concatenate(given)


def _judge(part: LabelRows, here: Mask, noise: NoiseModel) -> Judged:
    return judge(part.predictions(here), _given(part, here), noise)


def _given(part: LabelRows, here: Mask) -> Int64s:
    return part.noisy_class[here].astype(np.int64)


def _other_classes(part: LabelRows, here: Mask) -> Int64s:
    """A class of each row that is not the given one, the same however the rows are divided into parts."""
    num_classes = part.logits.shape[1]
    drawn = hashes(part.rows.start + np.flatnonzero(here), TRIED) % np.uint64(num_classes - 1)
    return np.asarray((_given(part, here) + 1 + drawn.astype(np.int64)) % num_classes)


def given_classes(catalogue: Catalogue, rows: Int64s) -> npt.NDArray[np.int32]:
    """The classes that the catalogue gives these rows, which are in rising order."""
    found = [np.zeros(0, np.int32)]
    for first in (np.unique(rows // STRETCH) * STRETCH).tolist():
        table = catalogue.read(first, min(first + STRETCH, catalogue.num_rows), ["noisy_class"])
        here = rows[slice(*np.searchsorted(rows, [first, first + STRETCH]))] - first
        found.append(table["noisy_class"].fill_null(-1).to_numpy()[here].astype(np.int32))
    return np.concatenate(found)
