"""The end of a run: the model and the labels are published, and the summary says what came of it."""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.settings import Config
from pencil_scale.labels.report import study_labels
from pencil_scale.labels.run_record import RunRecord, ways_on
from pencil_scale.storage.errors import DamagedError
from pencil_scale.storage.lease import Lease
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import without_passwords
from pencil_scale.stream.window_reader import Selection
from pencil_scale.tracking.tracker import Tracker
from pencil_scale.train.checkpoints import Saved, read_checkpoint
from pencil_scale.train.driver import Outcome
from pencil_scale.train.estimate import estimate_beside_outcome
from pencil_scale.train.gate import judge
from pencil_scale.train.preflight import Checked

GATE = "gate"  # the warning about labels that would be held, if gate.hold=false
TABLE = {
    "given_label_accuracy": "labels right as given",
    "corrected_label_accuracy": "labels right as repaired",
    "test_accuracy": "test accuracy, last epoch",
    "test_accuracy_best": "test accuracy, best epoch",
    "validation_accuracy": "validation accuracy, last epoch",
    "samples": "samples",
    "corrected": "labels changed",
    "images_per_s": "images/s",
    "epoch_s": "seconds per epoch",
    "model": "model",
    "labels": "labels",
}


@dataclass(frozen=True)
class Summary:
    """What came of a run, as stored in `summary.json`."""

    facts: dict[str, Any]

    def table(self) -> str:
        """The most important facts, one per line."""
        rows = [(words, self.facts[name]) for name, words in TABLE.items() if name in self.facts]
        return "\n".join(f"{words:<32} {_spelled(value)}" for words, value in rows)

    @property
    def held(self) -> bool:
        return bool(self.facts["status"] == "held")

    def ending(self) -> list[str]:
        """The last lines of the output: why the labels are held, or what a gate that only warns found."""
        if self.held:
            name = self.facts["run"]
            held = [f"HELD: {reason}" for reason in self.facts["held_because"]]
            return [*held, f"The labels of {name} are not published. {ways_on(name)}"]
        return [f"WARNING: {text}" for kind, text in self.facts["warnings"].items() if kind == GATE]


def publish(
    config: Config,
    checked: Checked,
    record: RunRecord,
    outcome: Outcome,
    warnings: dict[str, str],
    tracker: Tracker,
    lease: Lease,
    alias: str | None,
    hold: bool,
) -> Summary:
    """Store the weights and the labels' manifest under their final names, then the summary.

    Labels that look wrong are stored as held, and their model gets no alias; without `hold` they are
    published all the same.
    """
    with outcome.checkpoint.as_directory() as folder:
        saved = read_checkpoint(Path(folder))
    storage, clean = config.run.storage, record.clean.items()
    catalogue = Catalogue.open(storage, record.catalogue_version)
    num_clean = {part: Catalogue.open(storage, version, part).num_ok for part, version in clean}
    report = study_labels(saved.labels, catalogue, checked.subset)
    max_loss = config.stages.pencil.max_class_loss
    doubts = judge(outcome.record, report, checked.class_names, max_loss, num_clean)
    if doubts and not config.gate.hold:
        warnings = {**warnings, GATE: "; ".join(doubts)}
        tracker.set_tag(f"warning.{GATE}", warnings[GATE])
        doubts = ()
    held = hold and bool(doubts)
    facts = _facts(outcome.record, Selection(catalogue, checked.subset).num_rows)
    facts |= {"run": record.name, "warnings": warnings, **_save(config, saved, held, lease)}
    facts |= {"status": "held" if held else "finished", "held_because": list(doubts)}
    facts["catalogue_version"] = record.catalogue_version
    facts |= estimate_beside_outcome(config, record.estimate, outcome.record, saved)
    lease.put(f"runs/{record.name}/epochs.json", json.dumps(outcome.record, indent=1).encode())
    write_facts(storage, record.name, facts, lease)
    tracker.log_json("summary", {key: without_passwords(value) for key, value in facts.items()})
    if held:
        alias = None  # until a person promotes the run
        tracker.set_tag("labels", "held")
        tracker.set_tag("labels.held_because", "; ".join(doubts))
    tracker.log_model(config.model.backbone, saved.weights, checked.class_names, config.images.crop, alias)
    return Summary(facts)


def write_facts(storage: str, name: str, facts: dict[str, Any], lease: Lease) -> None:
    """Write the summary beside the run, and as the newest one of the storage."""
    text = json.dumps(facts, indent=2).encode()
    lease.put(f"runs/{name}/summary.json", text)
    try:
        newest = Storage(storage).read_json("summary.json")
        is_ours = newest is None or "held_because" in newest
    except (DamagedError, TypeError):
        is_ours = False  # the folder may hold other things than ours
    if is_ours:
        lease.put("summary.json", text)


def _save(config: Config, saved: Saved, held: bool, lease: Lease) -> dict[str, str]:
    """Store weights and labels; return their URLs."""
    storage, name = Storage(config.run.storage), config.run.name
    labels = storage.held(name) if held else storage.published(name)
    weights = io.BytesIO()
    torch.save(saved.weights, weights)
    saved.labels.require_whole()
    lease.put(storage.model(name), weights.getvalue())
    lease.put(labels, saved.labels.encode())
    return {"model": storage.path(storage.model(name)), "labels": storage.path(labels)}


def _facts(record: list[dict[str, Any]], num_samples: int) -> dict[str, Any]:
    last = record[-1]
    facts = {key: last[key] for key in last if key.endswith("_accuracy") or key.startswith("corrected")}
    for key in ("test_accuracy", "validation_accuracy"):
        if key in last:
            facts[f"{key}_best"] = max(figures[key] for figures in record)
    facts |= {key: last[key] for key in ("label_accuracy_n", "label_entropy") if key in last}
    facts |= {
        "samples": num_samples,
        "corrected": int(last["corrected"]),
        "epochs": len(record),
        # The share of the epoch's rows that was trained; rows taken down during it count on neither side.
        "coverage": [
            min(float(figures["rows_visited"]) / max(float(figures["rows_planned"]), 1.0), 1.0)
            for figures in record
        ],
        "unreadable": last["rows_unreadable"],
        "seconds": sum(figures["epoch_s"] for figures in record),
    }
    for key in ("images_per_s", "epoch_s", "data_wait_share", "label_wait_share"):
        facts[key] = median(figures[key] for figures in record)
    return facts


def _spelled(value: Any) -> str:
    if isinstance(value, float) and value < 100:
        return f"{value:.4f}" if value <= 1 else f"{value:.2f}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)
