"""An export is recalibrated by the judgements of the audit, or refuses those that do not belong to it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from catalogue_making import samples
from review_making import ReviewBench

from pencil_scale.config.loader import load_config
from pencil_scale.export.files import read_manifest
from pencil_scale.storage.errors import PencilError
from pipelines import export_labels, why

NAMES = ("ant", "bee", "cat")
NUM, NUM_CHANGED = 120, 40
CHANGED = {row: (row + 1) % 3 for row in range(NUM_CHANGED)}  # a sample's given class is its row modulo 3
SHARES = {row: 0.88 + 0.001 * row for row in range(NUM)}


class AuditBench(ReviewBench):
    """Labels of which people found fewer to be right than they claim."""

    def judge(self, num_changed: int = 30, num_unchanged: int = 30, run: str = "t") -> str:
        """Save judgements on some labels, of which two in three are right, as the review page does."""
        rows = [*range(num_changed), *range(NUM_CHANGED, NUM_CHANGED + num_unchanged)]
        sizes = {"changed": NUM_CHANGED, "unchanged": NUM - NUM_CHANGED}
        drawn = {kind: {"all": size, "drawn": size} for kind, size in sizes.items()}
        head = {"kind": "pencil_scale decisions", "version": 3, "run": run, "audit": drawn}
        path = self.folder / "decisions.json"
        path.write_text(json.dumps(head | {"decisions": [self._judged(row) for row in rows]}))
        return str(path)

    def _judged(self, row: int) -> dict[str, Any]:
        given, suggested = NAMES[row % 3], NAMES[CHANGED.get(row, row % 3)]
        chosen = suggested if row % 3 else given if row in CHANGED else None
        known = {"sample_id": f"{row:06d}", "given": given, "suggested": suggested, "class": chosen}
        kind = "changed" if row in CHANGED else "unchanged"
        return known | {"audit": kind, "confidence": round(SHARES[row], 4)}

    def export(self, *overrides: str) -> pa.Table:
        keys = ["export.predict=false", f"export.folder={self.folder}/out"]
        export_labels.run(load_config(self.config, [*keys, *overrides]))
        (path,) = (self.folder / "out").glob("table/*")
        return pq.read_table(path)


@pytest.fixture
def bench(tmp_path: Path) -> AuditBench:
    found = AuditBench(tmp_path)
    found.shard("a.tar", samples(range(NUM)))
    found.index()
    found.publish(CHANGED, shares=SHARES)
    return found


def test_probabilities_move_to_what_people_found_and_rank_as_before(
    bench: AuditBench, capsys: pytest.CaptureFixture[str]
) -> None:
    before = bench.export()
    after = bench.export(f"export.judged={bench.judge()}")
    for name in ("confidence", "label_score"):
        was, now = (table[name].to_numpy() for table in (before, after))
        assert (np.argsort(now, kind="stable") == np.argsort(was, kind="stable")).all()
    confidence, score = (after[name].to_numpy() for name in ("confidence", "label_score"))
    assert before["confidence"].to_numpy().mean() > 0.9
    assert 0.67 < confidence.mean() < 0.8  # two in three of the judged labels are right
    assert score[:NUM_CHANGED].mean() > before["label_score"].to_numpy()[:NUM_CHANGED].mean()
    assert (score[NUM_CHANGED:] == confidence[NUM_CHANGED:]).all()
    assert after["predicted_label"] == before["predicted_label"]
    manifest = read_manifest(f"{bench.folder}/out")
    assert manifest is not None
    assert manifest.calibration is not None
    assert manifest.calibration.num_judged == 60
    seen = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "recalibrated by 60 judgements of the audit" in seen
    known = manifest.calibration
    assert f"calibration error {known.error_after:.3f}, was {known.error_before:.3f}" in seen
    assert known.error_after < 0.5 * known.error_before


def test_the_history_of_a_sample_has_the_recalibrated_probability(
    bench: AuditBench, capsys: pytest.CaptureFixture[str]
) -> None:
    confidence = bench.export(f"export.judged={bench.judge()}")["confidence"][7].as_py()
    why.run(load_config(bench.config, [f"export.folder={bench.folder}/out"]), "000007")
    told = f"cat, right with a probability of {confidence:.2f} (by 60 judgements of an audit)"
    assert told in capsys.readouterr().out


def test_judgements_on_other_labels_are_refused(bench: AuditBench) -> None:
    with pytest.raises(PencilError, match=r"judgements on the labels of u, .* set export\.labels=u"):
        bench.export(f"export.judged={bench.judge(run='u')}")
    judged = bench.judge()
    bench.publish(CHANGED, shares={row: share - 0.01 for row, share in SHARES.items()})
    with pytest.raises(PencilError, match=r"60 of 60 samples judged in .* another run of this name"):
        bench.export(f"export.judged={judged}")


@pytest.mark.parametrize(
    ("num_changed", "num_unchanged", "said"),
    [
        (14, 15, "29 usable judgements of its audit; at least 30 are needed"),
        (40, 0, "40 usable judgements of its audit, and none of unchanged labels"),
    ],
)
def test_too_few_judgements_are_refused(
    bench: AuditBench, num_changed: int, num_unchanged: int, said: str
) -> None:
    with pytest.raises(PencilError, match=said):
        bench.export(f"export.judged={bench.judge(num_changed, num_unchanged)}")
