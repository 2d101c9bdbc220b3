"""The end of a run: the model and the labels are published, and the summary says what came of it."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import ray.train
import torch

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.settings import FEATURES, Config
from pencil_scale.features.head import joined
from pencil_scale.features.network import load_frozen
from pencil_scale.labels.assessment import Assessment, assess
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.report import study_labels, worse
from pencil_scale.labels.run_record import RunRecord, ways_on
from pencil_scale.method.backbones import find_head
from pencil_scale.storage.errors import DamagedError
from pencil_scale.storage.lease import Lease
from pencil_scale.storage.storage import Storage
from pencil_scale.storage.urls import without_passwords
from pencil_scale.tracking.tracker import Tracker
from pencil_scale.train.checkpoints import Kept, Saved, fetch_checkpoint
from pencil_scale.train.folds import Fold
from pencil_scale.train.gate import judge, unmeasured, unready
from pencil_scale.train.plan import RunPlan, price_of
from pencil_scale.train.watch import no_proof, proof_of

GATE = "gate"  # the warning about labels that would be held, if gate.hold=false
EVIDENCE = "evidence"  # the warning about what could not be measured
CLEAN = "evidence.clean"  # the warning that a clean set proves nothing
TABLE = {
    "given_label_accuracy": "labels right as given",
    "corrected_label_accuracy": "labels right as repaired",
    "test_accuracy": "test accuracy",
    "test_accuracy_best": "test accuracy, best epoch",
    "validation_accuracy": "validation accuracy",
    "published_epoch": "epoch of model and labels",
    "trainings": "trainings",
    "samples": "samples trained on",
    "watched": "samples watched",
    "corrected": "labels changed",
    "wrong_labels": "labels wrong at random, estimated",
    "proven_wrong": "labels proven wrong, at least",
    "gain": "gain in right labels, estimated",
    "gain_true": "gain in right labels, true",
    "watch_agreement": "agreement on watched samples",
    "images_per_s": "images/s",
    "epoch_s": "seconds per epoch",
    "model": "model",
    "model_takes": "the model takes",
    "labels": "labels",
}
Figures = list[dict[str, Any]]  # of every epoch of a training
SIGNED = ("gain", "gain_true")


@dataclass(frozen=True)
class Summary:
    """What came of a run, as stored in `summary.json`."""

    facts: dict[str, Any]

    def table(self) -> str:
        """The most important facts, one per line."""
        rows = [(words, self._spelled(name)) for name, words in TABLE.items() if name in self.facts]
        width = max(map(len, TABLE.values()))
        return "\n".join(f"{words:<{width}} {value}" for words, value in rows)

    def _spelled(self, name: str) -> str:
        """A fact, with its interval if it has one."""
        spell = "{:+.4f}".format if name in SIGNED else _spelled
        ends = [spell(self.facts[end]) for end in (f"{name}_low", f"{name}_high") if end in self.facts]
        ends = [] if len(set(ends)) == 1 else ends  # nothing changed
        among = f" of {self.facts[f'{name}_of']:,}" if f"{name}_of" in self.facts else ""
        if name in ("samples", "watched") and self.facts.get("trainings", 1) > 1:
            among = " in the last training"
        interval = f"   (90 %: {' to '.join(ends)})" if ends else ""
        return spell(self.facts[name]) + among + interval

    @property
    def held(self) -> bool:
        return bool(self.facts["status"] == "held")

    def last_lines(self) -> list[str]:
        """The last lines of the output: why the labels are held, or what a gate that only warns found.

        Where the truth is known and the labels got worse, the very last line says so.
        """
        warnings = self.facts["warnings"]
        shown = (CLEAN,) if self.held else (GATE, EVIDENCE, CLEAN)
        lines = [f"WARNING: {warnings[kind]}" for kind in shown if kind in warnings]
        if self.held:
            name = self.facts["run"]
            held = [f"HELD: {reason}" for reason in self.facts["held_because"]]
            lines = [
                *held,
                *lines,
                f"The labels of {name} are not published.",
                *ways_on(name, self.facts.get("corrected")),
            ]
        return [*lines, *filter(None, [worse(self.facts)])]


def publish(
    plan: RunPlan,
    record: RunRecord,
    checkpoint: ray.train.Checkpoint,
    folds: Sequence[Fold],
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
    saved = fetch_checkpoint(checkpoint.as_directory, record.id)
    config, storage = plan.config, Storage(plan.config.run.storage)
    clean = plan.clean.items()
    num_clean = {name: Catalogue.open(storage.url, spec.version, name).num_ok for name, spec in clean}
    kept = saved.best or Kept(saved.progress.epoch, saved.shown, saved.labels)
    is_night = kept.labels.first_epoch > 1
    start = Manifest.load(record.labels) if is_night and config.evidence.watched != 0 else None
    only_learns = is_night and config.stages.pencil.epochs == 0
    moved = [fold.labels for fold in folds]
    mixes = config.stages.finetune.mixup > 0 and config.stages.finetune.average is None
    proof = proof_of(saved.figures[: kept.epoch], mixes) if start is None else None
    found = assess(kept.labels, plan.catalogue, plan.roles, moved, start, moves=not only_learns, proof=proof)
    kept = replace(kept, labels=found.labels, weights=_complete(config, record, kept.weights))
    report = study_labels(found.labels, plan.catalogue, plan.stream.subset)
    max_loss = config.stages.pencil.max_class_loss
    figures = saved.figures[: kept.epoch]
    doubts = judge(figures, report, plan.class_names, max_loss, num_clean, found, config.evidence)
    doubts = (*filter(None, [_ended_early(plan, record, saved)]), *doubts)
    if doubts and not config.gate.hold:
        warnings = {**warnings, GATE: "; ".join(doubts)}
        tracker.set_tag(f"warning.{GATE}", warnings[GATE])
        doubts = ()
    if missing := "" if config.evidence.watched == 0 or only_learns else unmeasured(found):
        warnings = {**warnings, EVIDENCE: missing}
        tracker.set_tag(f"warning.{EVIDENCE}", missing)
    if config.evidence.clean is not None and proof is None and start is None:
        warnings = {**warnings, CLEAN: no_proof(figures, mixes)}
        tracker.set_tag(f"warning.{CLEAN}", warnings[CLEAN])
    held = hold and bool(doubts)
    labels = storage.held(record.name) if held else storage.published(record.name)
    _save(kept, storage.model(record.name), labels, lease)
    fold_figures = [fold.figures for fold in folds]
    facts = {
        **_facts(saved.figures, kept.epoch, fold_figures),
        **report.figures(),
        "corrected": report.num_corrected,
        "watched": len(plan.roles.watched),
        "planted": len(plan.roles.planted),
        "unmoved": found.unmoved or only_learns,
        **_evidence(found, report.num_rows if found.num_new is None else found.num_new),
        "run": record.name,
        "warnings": warnings,
        "model": storage.path(storage.model(record.name)),
        **_takes(config),
        "labels": storage.path(labels),
        "status": "held" if held else "finished",
        "held_because": list(doubts),
        "catalogue_version": record.catalogue_version,
        **compare_with_outcome(config, record.estimate, saved, fold_figures),
    }
    if proof is not None:
        facts["proven_wrong"] = round(proof.wrong_low * report.num_rows)
    lease.put(storage.run(record.name, "epochs.json"), json.dumps(saved.figures, indent=1).encode())
    write_facts(storage.url, record.name, facts, lease)
    tracker.log_json("summary", {key: without_passwords(value) for key, value in facts.items()})
    if held:
        alias = None  # until a person promotes the run
        tracker.set_tag("labels", "held")
        tracker.set_tag("labels.held_because", "; ".join(doubts))
    tracker.log_model(config.model.backbone, kept.weights, plan.class_names, config.images.crop, alias)
    return Summary(facts)


def _complete(config: Config, record: RunRecord, weights: dict[str, Any]) -> dict[str, Any]:
    """The weights of the network that takes images: with a head alone, of the frozen layers too."""
    if config.model.head is None:
        return weights
    backbone, crop = config.model.backbone, config.images.crop
    if backbone.startswith(FEATURES):
        return joined({}, find_head(backbone), weights)
    frozen, _ = load_frozen(backbone, record.weights, crop, config.run.seed)  # that gave the features
    layers = {name: tensor.cpu() for name, tensor in frozen.module.state_dict().items()}
    return joined(layers, find_head(backbone), weights)


def _takes(config: Config) -> dict[str, str]:
    """What to give the published model, if not images."""
    is_alone = config.model.backbone.startswith(FEATURES)
    return {"model_takes": f"the features {config.features.name}, not images"} if is_alone else {}


def _ended_early(plan: RunPlan, record: RunRecord, saved: Saved) -> str:
    """Why labels never moved, if the watched samples did not allow it."""
    if saved.progress.epoch == plan.schedule.extended(saved.progress.extended).epochs:
        return ""
    seen = [epoch["watch_agreement"] for epoch in saved.figures]
    num = int(saved.figures[-1]["watched_selecting"])
    is_automatic = "stages.backbone.epochs" in record.automatic
    return unready(seen, num, len(plan.class_names), may_rise=is_automatic)


def _evidence(found: Assessment, num_rows: int) -> dict[str, float]:
    """What was measured without clean data."""
    facts: dict[str, float] = {}
    if found.noise is not None:
        wrong = {"": found.noise.wrong, "_low": found.noise.wrong_low, "_high": found.noise.wrong_high}
        facts |= {f"wrong_labels{bound}": round(share * num_rows) for bound, share in wrong.items()}
        facts["wrong_labels_of"] = num_rows
    if found.gain is not None:
        facts |= {"gain": found.gain.gain, "gain_low": found.gain.low, "gain_high": found.gain.high}
        facts |= {"planted_found": found.gain.found, "planted_restored": found.gain.restored}
    return facts


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


def _save(kept: Kept, model: str, labels: str, lease: Lease) -> None:
    """Store weights and labels."""
    weights = io.BytesIO()
    torch.save(kept.weights, weights)
    kept.labels.require_whole()
    lease.put(model, weights.getvalue())
    lease.put(labels, kept.labels.encode())


def _facts(figures: Figures, published: int, folds: Sequence[Figures]) -> dict[str, Any]:
    """The figures of the published epoch, and the typical ones of an epoch; the time of all trainings."""
    last = figures[published - 1]
    facts = {key: last[key] for key in last if key.endswith("_accuracy")}
    for key in ("test_accuracy", "validation_accuracy"):
        if key in last:
            facts[f"{key}_best"] = max(epoch[key] for epoch in figures)
    facts |= {key: last[key] for key in ("watch_agreement",) if key in last}
    facts |= {
        "samples": last["rows_planned"],
        "epochs": len(figures),
        "published_epoch": published,
        # The share of the epoch's rows that was trained; rows taken down during it count on neither side.
        "coverage": [min(epoch["rows_visited"] / max(epoch["rows_planned"], 1), 1.0) for epoch in figures],
        "unreadable": last["rows_unreadable"],
        "seconds": _seconds(figures, *folds),
    }
    if folds:
        facts["trainings"] = 1 + len(folds)
    for key in ("images_per_s", "epoch_s", "data_wait_share", "label_wait_share"):
        facts[key] = median(epoch[key] for epoch in figures)
    return facts


def _seconds(*trainings: Figures) -> float:
    return float(sum(epoch["epoch_s"] for figures in trainings for epoch in figures))


def compare_with_outcome(
    config: Config, counted: Mapping[str, Any], saved: Saved, folds: Sequence[Figures] = ()
) -> dict[str, Any]:
    """What a finished run was estimated to take, and what it took, under the same keys."""
    figures = saved.figures
    first, second = figures[0], figures[min(1, len(figures) - 1)]  # the first may include compilation
    hours = (1 + len(folds)) * (first["epoch_s"] + second["epoch_s"] * (len(figures) - 1)) / 3600
    spent = _seconds(figures, *folds) / 3600
    expected = {
        "images_per_s": second["images_per_s"],
        "hours": hours,
        "cost": price_of(config, hours),
        "hours_from": "the first epoch, and the second for each later one, without evaluation and saving",
    }
    state = saved.optimizer.get("state", {}).values()
    momenta = sum(momentum.nbytes for slot in state for momentum in slot.values() if momentum is not None)
    kept = [*saved.weights.values(), *(saved.average or {}).values()]
    files = [file for part in saved.labels.parts.values() for file in (part.labels, part.ledger)]
    came_to = {
        "samples": round(median(epoch["rows_visited"] for epoch in figures)),
        "epochs": len(figures),
        "trainings": 1 + len(folds),
        "steps_per_epoch": saved.progress.all_steps / len(figures),
        "table_bytes": sum(file.num_bytes for file in files),
        "checkpoint_bytes": momenta + sum(tensor.nbytes for tensor in kept),
        "images_per_s": median(epoch["images_per_s"] for epoch in figures),
        "hours": spent,
        "cost": price_of(config, spent),
    }
    return {"estimate": {**counted, **expected}, "came_to": came_to}


def _spelled(value: Any) -> str:
    if isinstance(value, float) and value < 100:
        return f"{value:.4f}" if value <= 1 else f"{value:.2f}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)
