"""Roles: which samples a run only watches, and which get a wrong label on purpose.

Watched samples are never trained on, so the network cannot have memorised their labels: they show how good it
is and how many labels are wrong. Planted errors are trained on like all other samples: they show how many
wrong labels the run finds. Neither needs clean data. A first run plants random errors; once confusions have
been observed, half of a night's errors follow them, since these are harder to find.

    roles = choose_roles(catalogue, rows, pinned, config.evidence, seed=1)
    roles = choose_roles(catalogue, rows, pinned, config.evidence, seed=1, parent=carried)    # of a night
    roles.watched, roles.planted, roles.planted_class

Watched samples are those whose image hashes below a threshold, so copies of an image are watched together. A
run that continues another never raises its threshold, and watches no sample that was ever trained on, nor a
copy of one. It watches samples of the whole catalogue, also those that it would not have trained on.

With `evidence.folds`, a run trains several times. The range of the hashes is divided into as many windows:
the run itself watches the first, each further training another one. Together they watch every sample once.

    for number, fold in roles.folds(): ...      # the roles in each further training

So few samples that nothing could be measured get no role, but a night keeps watching: later ones add to them.
"""

import io
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.duplicates import hashes_of
from pencil_scale.config.settings import Evidence
from pencil_scale.labels.columns import Int64s
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.published import PublishedLabels, is_decided
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.hashing import UInt64s, hashes

ROLES = "roles.npz"  # in the folder of a run
ALL = 2**64  # a threshold above every hash
FEWEST_WATCHED, MOST_WATCHED, MOST_PER_CLASS = 1_000, 20_000, 100
FEWEST_PLANTED = 300
FEWEST = 30  # watched samples that select, or planted errors, below which nothing is concluded
JUDGE_KEY = 0x6A75646765
NO_ROWS = np.zeros(0, np.int64)
COLUMNS = ["row", "status", "noisy_class", "content_key", "image_bytes"]
Mask = npt.NDArray[np.bool_]
Samples = npt.NDArray[np.void]  # of the type SAMPLE
SAMPLE = np.dtype([("row", "i8"), ("content", "u8"), ("given", "i8"), ("num_bytes", "i8")])


@dataclass(frozen=True)
class Roles:
    """The rows with a role, in rising order."""

    watched: Int64s
    watched_bytes: Int64s  # of their images
    planted: Int64s
    planted_class: npt.NDArray[np.int32]  # the wrong class of each
    threshold: int  # images that hash below this are watched
    crossed: Int64s = field(default_factory=lambda: NO_ROWS)  # rows that further trainings watch
    crossed_bytes: Int64s = field(default_factory=lambda: NO_ROWS)
    crossed_by: Int64s = field(default_factory=lambda: NO_ROWS)  # the number of that training, from 1

    @classmethod
    def none(cls) -> "Roles":
        """No row has a role."""
        return cls(NO_ROWS, NO_ROWS, NO_ROWS, np.zeros(0, np.int32), 0)

    @property
    def trainings(self) -> int:
        """How often the run trains."""
        return 1 + len(np.unique(self.crossed_by))

    def folds(self) -> Iterator[tuple[int, "Roles"]]:
        """The number and the roles of each further training: the same errors, but in no watched sample."""
        for number in np.unique(self.crossed_by).tolist():
            here = self.crossed_by == number
            rows, num_bytes = self.crossed[here], self.crossed_bytes[here]
            left = ~np.isin(self.planted, rows)
            yield number, Roles(rows, num_bytes, self.planted[left], self.planted_class[left], self.threshold)

    def but(self, taken_down: Int64s) -> "Roles":
        """The same roles, but some rows are not watched: they may not be read any more."""
        here, there = (~np.isin(rows, taken_down) for rows in (self.watched, self.crossed))
        return replace(
            self,
            watched=self.watched[here],
            watched_bytes=self.watched_bytes[here],
            crossed=self.crossed[there],
            crossed_bytes=self.crossed_bytes[there],
            crossed_by=self.crossed_by[there],
        )

    @property
    def unmeasured(self) -> str:
        """What cannot be measured with these roles; empty if everything can."""
        if not _select_enough(self.watched):
            return "how many labels are wrong and what the repair gains"
        return "what the repair gains" if len(self.planted) < FEWEST else ""

    def encode(self) -> bytes:
        """As the bytes of a file: a run that resumes has the same roles, whatever was pinned since."""
        file = io.BytesIO()
        values = asdict(self) | {"threshold": np.frombuffer(str(self.threshold).encode(), np.uint8)}
        np.savez_compressed(file, **values)
        return file.getvalue()

    @classmethod
    def decode(cls, data: bytes) -> "Roles":
        """Undo `encode`."""
        with np.load(io.BytesIO(data), allow_pickle=False) as found:
            values = {name: found[name] for name in found.files}
        return cls(**values | {"threshold": int(values["threshold"].tobytes())})


def watched_share(num_rows: int, num_classes: int) -> float:
    """About 5 % of the samples, more if there are few, less if there are very many. It falls as they grow."""
    num = max(0.05 * num_rows, min(FEWEST_WATCHED, 0.2 * num_rows))
    return min(num, max(MOST_WATCHED, MOST_PER_CLASS * num_classes)) / max(num_rows, 1)


def planted_share(num_trained: int) -> float:
    """About 1 % of the labels; more if there are few, as a gain is measured by 30 of them at least."""
    wanted, least = FEWEST_PLANTED / max(num_trained, 1), 2 * FEWEST / max(num_trained, 1)
    return max(0.01, min(wanted, 0.05), min(least, 0.2))


def choose_roles(
    catalogue: Catalogue,
    rows: Int64s | None,
    pinned: Int64s,
    evidence: Evidence,
    seed: int,
    parent: Manifest | None = None,
) -> Roles:
    """Choose among the unpinned rows of a run (None: all ok rows); `parent`: the labels that it continues."""
    if evidence.watched == 0:
        return Roles.none()  # what planted errors say depends on the noise
    num_rows = catalogue.num_ok if rows is None else len(rows)
    num_known = num_rows if parent is None else catalogue.num_ok
    watched, planted = evidence.watched, evidence.planted
    folds = 1 if parent is not None else evidence.folds or 1
    if watched is None:
        watched = watched_share(num_known, catalogue.num_classes) if folds == 1 else 1 / folds
    if planted is None:
        num_trained = num_rows * (1 - watched)
        planted = planted_share(round(num_trained if parent is None else num_trained / 2))  # half are new
    threshold, key = int(watched * ALL), seed
    if parent is not None:
        threshold = min(threshold, int(parent.noise["watched_below"]) if parent.noise else ALL)
        key += 2 * parent.first_epoch  # other rows every night
    limits = (threshold, ALL if folds > 1 else threshold, int(planted * ALL))
    covered, errors = _candidates(catalogue, rows, pinned, parent, limits, key)
    ends = np.array([int(number / folds * ALL) for number in range(1, folds)], np.uint64)
    window = np.searchsorted(ends, covered["content"], side="right")
    if parent is None and 0 < num_rows == np.bincount(window, minlength=1).max():
        raise PencilError(
            f"nothing is left to train on beside what is watched: all {num_rows:,} samples are copies of one "
            "image, or of a few; give other samples, or set evidence.watched=0"
        )
    found, others = covered[window == 0], covered[window > 0]
    if (parent is None and not _select_enough(found["row"])) or not len(found):
        return Roles.none()
    if not _select_enough(found["row"]) or len(errors) < FEWEST:
        errors = errors[:0]
    wrong = _wrong_classes(errors, catalogue.num_classes, key, _confused(parent, found["row"].copy()))
    watched_rows, watched_bytes = found["row"].copy(), found["num_bytes"].copy()
    crossed = others["row"].copy(), others["num_bytes"].copy(), window[window > 0]
    return Roles(watched_rows, watched_bytes, errors["row"].copy(), wrong, threshold, *crossed)


def _candidates(
    catalogue: Catalogue,
    rows: Int64s | None,
    pinned: Int64s,
    parent: Manifest | None,
    limits: tuple[int, int, int],
    key: int,
) -> tuple[Samples, Samples]:
    """The samples that any training watches, and those to plant errors in.

    `limits` bound the hashes of what the run itself watches, of what any training does, and of errors.
    """
    threshold, covered_below, planted_below = limits
    watched, planted, copies = [np.zeros(0, SAMPLE)], [np.zeros(0, SAMPLE)], [np.zeros(0, np.uint64)]
    for table in catalogue.batches(COLUMNS):
        some = _samples(table)
        is_pinned = np.isin(some["row"], pinned)
        usable = (some["given"] >= 0) & pc.equal(table["status"], "ok").to_numpy() & ~is_pinned
        trains = usable if rows is None else usable & np.isin(some["row"], rows)
        low, seen = _below(some["content"], covered_below), is_pinned | _trained(parent, some["row"])
        watches = low & ~seen & (trains if parent is None else usable)
        # Another hash of the same content, so the two choices are independent.
        here = watches & _below(some["content"], threshold)
        plants = trains & ~here & _below(hashes(some["content"], key), planted_below)
        plants &= _undecided(parent, some["row"])
        watched.append(some[watches])
        planted.append(some[plants])
        copies.append(some["content"][low & seen])
    found = np.concatenate(watched)
    return found[~np.isin(found["content"], np.concatenate(copies))], np.concatenate(planted)


def _samples(table: pa.Table) -> Samples:
    """What the choice needs to know of some rows of the catalogue."""
    some = np.zeros(len(table), SAMPLE)
    some["row"], some["given"] = table["row"].to_numpy(), table["noisy_class"].fill_null(-1).to_numpy()
    some["num_bytes"] = table["image_bytes"].fill_null(0).to_numpy()
    some["content"] = _content(table["content_key"], some["row"])
    return some


def _trained(parent: Manifest | None, rows: Int64s) -> Mask:
    """Which of these consecutive rows the network may have been trained on before."""
    seen = np.zeros(len(rows), np.bool_)
    if parent is not None and len(rows):
        epochs = PublishedLabels(parent).last_epoch(range(int(rows[0]), int(rows[-1]) + 1))
        seen[: len(epochs)] = epochs > 0
    return seen


def _undecided(parent: Manifest | None, rows: Int64s) -> Mask:
    """Which of these consecutive rows no earlier run could decide."""
    undecided = np.ones(len(rows), np.bool_)
    if parent is not None and len(rows):
        known = PublishedLabels(parent).rows(range(int(rows[0]), int(rows[-1]) + 1))
        undecided[: len(known.rows)] = ~is_decided(known)
    return undecided


def _confused(parent: Manifest | None, watched: Int64s) -> tuple[Int64s, Int64s]:
    """The classes of watched samples whose labels seem right, and the class that each resembles most."""
    given, rivals = [NO_ROWS], [NO_ROWS]
    for part in PublishedLabels(parent).parts_with(watched) if parent is not None else ():
        slots = watched[slice(*np.searchsorted(watched, [part.rows.start, part.rows.stop]))] - part.rows.start
        slots = slots[is_decided(part)[slots] & ~part.decide().changed[slots]]
        given.append(part.noisy_class[slots].astype(np.int64))
        classes = part.predictions(slots).classes
        place = (classes != given[-1][:, None]).argmax(axis=1)
        rivals.append(classes[np.arange(len(slots)), place])
    return np.concatenate(given), np.concatenate(rivals)


def _wrong_classes(
    errors: Samples, num_classes: int, key: int, confused: tuple[Int64s, Int64s]
) -> npt.NDArray[np.int32]:
    """A wrong class for each row: half are random, half follow what is known of confused classes."""
    drawn = hashes(errors["content"], key + 1)
    steps = 1 + drawn % np.uint64(max(num_classes - 1, 1))
    wrong = (errors["given"] + steps.astype(np.int64)) % num_classes
    given, rivals = confused
    for number in np.unique(given).tolist():
        some = rivals[given == number]
        here = (errors["given"] == number) & (hashes(errors["row"], key) % np.uint64(2) == 0)
        wrong[here] = some[(drawn[here] % np.uint64(len(some))).astype(np.int64)]
    return wrong.astype(np.int32)


def _content(keys: pa.ChunkedArray, rows: Int64s) -> UInt64s:
    """A hash of each image; of its row number where the image has none."""
    content = hashes_of(keys.fill_null(bytes(16))).view(np.uint64)[::2]
    return np.where(keys.is_null().to_numpy(), hashes(rows, 0), content)


def _below(values: UInt64s, threshold: int) -> Mask:
    return values < np.uint64(threshold) if threshold < ALL else np.ones(len(values), np.bool_)


def _select_enough(watched: Int64s) -> bool:
    return bool(np.count_nonzero(~judges(watched)) >= FEWEST)


def judges(rows: Int64s) -> Mask:
    """Which watched rows judge a result; the others select it."""
    judging: Mask = hashes(rows, JUDGE_KEY) % np.uint64(2) == 1
    return judging
