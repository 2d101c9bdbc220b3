"""Recalibration of an export: from the judgements of its blind audit, which were drawn at random.

    calibration = recalibration("decisions-demo.json", source)

Pins are not used: people choose what to pin by doubt. A judgement is usable if its sample still has the label
that was judged. Each stands for as many labels as its stratum (changed or unchanged) has per judgement.
"""

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.schema import from_stored
from pencil_scale.export.rows import Source
from pencil_scale.labels.published import PublishedLabels
from pencil_scale.method.calibration import Calibration, fit_calibration
from pencil_scale.review.audit import Answer, read_audit
from pencil_scale.storage.errors import PencilError, many, sample_key

FEWEST = 30
ROUNDED = 2e-4  # a page has 16 bits for a probability, and saves four digits of it


def recalibration(url: str, source: Source) -> Calibration:
    """Fit a map of probabilities to the judgements that the review page of these labels saved."""
    audit, name = read_audit(url), source.published.name
    if audit.run != name:
        raise PencilError(
            f"export.judged: {url} has judgements on the labels of {audit.run}, and the labels of {name} are "
            f"exported; set export.labels={audit.run}, or judge on the review page of {name}"
        )
    claims = _claims(source, audit.answers)
    usable = [answer for answer in audit.answers if answer in claims]
    if 2 * len(usable) < len(audit.answers):
        raise PencilError(
            f"export.judged: {len(audit.answers) - len(usable):,} of {len(audit.answers):,} samples judged "
            f"in {url} have other labels in {source.published.url}, so another run of this name was judged; "
            "make the review page again, and judge there"
        )
    num = Counter(answer.stratum for answer in usable)
    missing = [kind for kind, size in audit.sizes.items() if size and not num[kind]]
    if len(usable) < FEWEST or missing:
        lacking = f", and none of {' or '.join(missing)} labels" if missing else ""
        raise PencilError(
            f"export.judged: {url} has {many(len(usable), 'usable judgement')} of its audit{lacking}; at "
            f"least {FEWEST} are needed: judge more samples of the audit, in its order"
        )
    right = np.array([(answer.right, answer.given_right) for answer in usable])
    weight = np.array([audit.sizes[answer.stratum] / num[answer.stratum] for answer in usable])
    return fit_calibration(np.array([claims[answer] for answer in usable]), right, weight)


def _claims(source: Source, answers: tuple[Answer, ...]) -> dict[Answer, tuple[float, float]]:
    """How likely the suggested and the given class are right, of the samples that still have these labels."""
    manifest, claims = source.published.manifest, dict[Answer, tuple[float, float]]()
    rows, names = _rows(source.catalogue, answers), manifest.class_names
    for labels in PublishedLabels(manifest).parts_with(np.array(sorted(rows), np.int64)):
        found = labels.decide()
        for row in rows.keys() & set(labels.rows):
            slot, answer = row - labels.rows.start, rows[row]
            classes = names[labels.noisy_class[slot]], names[found.corrected_class[slot]]
            confidence, score = float(found.confidence[slot]), float(found.score[slot])
            if classes == (answer.given, answer.suggested) and abs(confidence - answer.confidence) < ROUNDED:
                claims[answer] = confidence, score
    return claims


def _rows(catalogue: Catalogue, answers: tuple[Answer, ...]) -> dict[int, Answer]:
    """The rows of the samples that are in the catalogue."""
    owners = {sample_key(from_stored(answer.sample_id)): answer for answer in answers}
    keys, rows = pa.array(list(owners), pa.binary(16)), dict[int, Answer]()
    for table in catalogue.batches(["row", "sample_key"]):
        found = table.filter(pc.is_in(table["sample_key"], keys)).to_pydict()
        rows |= {row: owners[key] for row, key in zip(found["row"], found["sample_key"], strict=True)}
    return rows
