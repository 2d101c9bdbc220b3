"""Roles: which samples a run only watches, and which get a wrong label on purpose.

Watched samples are never trained on, so the network cannot have memorised their labels: they show how good it
is and how many labels are wrong. Planted errors are trained on like all other samples: they show how many
wrong labels the run finds. Neither needs clean data.

    roles = choose_roles(catalogue, rows, pinned, config.evidence, seed=1)
    roles.watched, roles.planted, roles.planted_class

Watched samples are those whose image hashes below a threshold, so copies of an image are watched together. A
run that continues another passes its threshold on, and a threshold only falls: no sample that was trained on
is ever watched.
"""

import io
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.duplicates import hashes_of
from pencil_scale.config.settings import Evidence
from pencil_scale.labels.columns import Int64s
from pencil_scale.storage.hashing import UInt64s, hashes

ALL = 2**64  # a threshold above every hash
FEWEST_WATCHED, MOST_WATCHED, MOST_PER_CLASS = 1_000, 20_000, 100
FEWEST_PLANTED = 300
JUDGE_KEY = 0x6A75646765
COLUMNS = ["row", "status", "noisy_class", "content_key", "image_bytes"]


@dataclass(frozen=True)
class Roles:
    """The rows with a role, in rising order."""

    watched: Int64s
    watched_bytes: Int64s  # of their images
    planted: Int64s
    planted_class: npt.NDArray[np.int32]  # the wrong class of each
    threshold: int  # images that hash below this are watched

    @classmethod
    def none(cls) -> "Roles":
        """No row has a role."""
        rows = np.zeros(0, np.int64)
        return cls(rows, rows, rows, np.zeros(0, np.int32), 0)

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


def planted_share(num_rows: int) -> float:
    """About 1 % of the labels, up to 3 % if there are few."""
    return min(max(0.01, FEWEST_PLANTED / max(num_rows, 1)), 0.03)


def choose_roles(
    catalogue: Catalogue,
    rows: Int64s | None,
    pinned: Int64s,
    evidence: Evidence,
    seed: int,
    highest: int = ALL,
) -> Roles:
    """Choose among the unpinned rows of a run (None: all ok rows); `highest` limits the threshold."""
    num_rows = catalogue.num_ok if rows is None else len(rows)
    watched, planted = evidence.watched, evidence.planted
    if watched is None:
        watched = watched_share(num_rows, catalogue.num_classes)
    if planted is None:
        planted = planted_share(num_rows)
    threshold = min(int(watched * ALL), highest)
    no_rows = np.zeros(0, np.int64)
    found = [(no_rows, no_rows, no_rows, np.zeros(0, np.int32))]
    for table in catalogue.batches(COLUMNS):
        numbers = table["row"].to_numpy()
        given = table["noisy_class"].fill_null(-1).to_numpy()
        usable = (given >= 0) & pc.equal(table["status"], "ok").to_numpy() & ~np.isin(numbers, pinned)
        if rows is not None:
            usable &= np.isin(numbers, rows)
        content = _content(table["content_key"], numbers)
        is_watched = usable & _below(content, threshold)
        # Another hash of the same content, so the two choices are independent.
        is_planted = usable & ~is_watched & _below(hashes(content, seed), int(planted * ALL))
        steps = 1 + hashes(content[is_planted], seed + 1) % np.uint64(max(catalogue.num_classes - 1, 1))
        wrong = (given[is_planted] + steps.astype(np.int64)) % catalogue.num_classes
        num_bytes = table["image_bytes"].to_numpy()[is_watched]
        found.append((numbers[is_watched], num_bytes, numbers[is_planted], wrong.astype(np.int32)))
    watched_rows, watched_bytes, planted_rows, classes = map(np.concatenate, zip(*found, strict=True))
    return Roles(watched_rows, watched_bytes, planted_rows, classes, threshold)


def _content(keys: pa.ChunkedArray, rows: Int64s) -> UInt64s:
    """A hash of each image; of its row number where the image has none."""
    content = hashes_of(keys.fill_null(bytes(16))).view(np.uint64)[::2]
    return np.where(keys.is_null().to_numpy(), hashes(rows, 0), content)


def _below(values: UInt64s, threshold: int) -> npt.NDArray[np.bool_]:
    return values < np.uint64(threshold) if threshold < ALL else np.ones(len(values), np.bool_)


def judges(rows: Int64s) -> npt.NDArray[np.bool_]:
    """Which watched rows judge a result; the others select it."""
    judging: npt.NDArray[np.bool_] = hashes(rows, JUDGE_KEY) % np.uint64(2) == 1
    return judging
