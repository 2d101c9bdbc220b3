"""The end of a run: the model and the labels published, and a summary of what came of it."""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pencil_scale.catalogue import Catalogue
from pencil_scale.checkpoint import read_checkpoint
from pencil_scale.labels.part_store import PartStore
from pencil_scale.reading.window_reader import Selection
from pencil_scale.running.checks import Checked
from pencil_scale.running.driver import Outcome
from pencil_scale.running.estimate import estimate_beside_outcome
from pencil_scale.running.run_record import RunRecord, run_folder
from pencil_scale.settings import Config
from pencil_scale.shapes import without_passwords
from pencil_scale.telling.tracker import Tracker


@dataclass(frozen=True)
class Summary:
    """What came of a run, as `summary.json` holds it."""

    facts: dict[str, Any]

    def table(self) -> str:
        """The few lines a person wants to see at the end."""
        named = {
            "given_label_accuracy": "labels right as given",
            "corrected_label_accuracy": "labels right as repaired",
            "test_accuracy": "test accuracy, last epoch",
            "test_accuracy_best": "test accuracy, best epoch",
            "validation_accuracy": "validation accuracy, last epoch",
            "samples": "samples",
            "corrected": "labels changed",
            "images_per_s": "images/s",
            "epoch_s": "seconds an epoch",
            "model": "model",
            "labels": "labels",
        }
        rows = [(words, self.facts[name]) for name, words in named.items() if name in self.facts]
        return "\n".join(f"{words:<32} {_spelled(value)}" for words, value in rows)


def publish(
    config: Config,
    checked: Checked,
    record: RunRecord,
    outcome: Outcome,
    warnings: dict[str, str],
    tracker: Tracker,
    alias: str | None = "current",
) -> Summary:
    """Put the weights and the labels' manifest under their final names, then the summary."""
    with outcome.checkpoint.as_directory() as folder:
        saved = read_checkpoint(Path(folder))
    storage, name = config.run.storage.rstrip("/"), config.run.name
    model, labels = f"{storage}/models/{name}.pt", f"{storage}/labels/published/{name}.json"
    weights = io.BytesIO()
    torch.save(saved.weights, weights)
    PartStore(f"{storage}/models").put(f"{name}.pt", weights.getvalue())
    saved.labels.save(labels)
    catalogue = Catalogue.open(storage, record.catalogue_version)
    facts = _facts(outcome.record, Selection(catalogue, checked.subset).counts.total)
    facts |= {"run": name, "model": model, "labels": labels, "warnings": warnings}
    facts["catalogue_version"] = record.catalogue_version
    facts |= estimate_beside_outcome(config, record.estimate, outcome.record, saved)
    text = json.dumps(facts, indent=2).encode()
    PartStore(run_folder(storage, name)).put("epochs.json", json.dumps(outcome.record, indent=1).encode())
    PartStore(run_folder(storage, name)).put("summary.json", text)
    PartStore(storage).put("summary.json", text)
    tracker.log_json("summary", {name: without_passwords(value) for name, value in facts.items()})
    tracker.log_model(config.model.backbone, saved.weights, checked.class_names, config.images.crop, alias)
    return Summary(facts)


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
        "coverage": [figures["rows_visited"] / num_samples for figures in record],
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
