"""Every key of the jobs around the label table, each job with a section of its own; see `settings`."""

from typing import Annotated, Literal

from pydantic import Field

from pencil_scale.section import Settings, key
from pencil_scale.shapes import RunName, Shape


class SubsetJob(Settings):
    name: RunName = key("names the subset; it is published as <storage>/subsets/NAME", "balanced")
    per_class: int | None = key("samples of each class; give this or total", None, ge=1, unit="samples")
    total: int | None = key("samples in all, the classes alike", None, ge=1, unit="samples")
    by: Literal["noisy", "corrected"] = key("classes as given, or as repaired", "noisy")
    labels: str | None = key("published labels to go by: name of a run, or URL; null: this run's", None)
    min_confidence: float = key(
        "take only samples whose label holds this share on that class", 0.0, ge=0, lt=1
    )
    exclude: str | None = key("file of ids, one a line, that are not to be taken", None)
    on_shortage: Literal["error", "take_all"] = key("what to do about a class with too few samples", "error")
    shards: Literal["never", "thin", "always"] = key("also copy the members into new shards", "thin")
    thin_share: float = key("thin: members are less than this share of their shards' bytes", 0.05, ge=0, le=1)
    samples_per_shard: int = key("in the new shards", 1000, ge=1, unit="samples")


class ExportJob(Settings):
    labels: str | None = key("published labels to export: name of a run, or URL; null: this run's", None)
    folder: str | None = key("where to; null: <storage>/exports/NAME of those labels", None)
    top_k: int = key("how many classes of each label's distribution are told", 5, ge=1, unit="classes")
    predict: bool = key("let the model say what unlabelled samples are", True)
    corrected_shards: bool = key("also write shards whose label member is the repaired one", False)


class PinJob(Settings):
    file: str | None = key("decisions to pin: JSON, CSV or Parquet with sample_id and class", None)
    by: str | None = key("who decided, where the file does not say", None)


class ReportJob(Settings):
    labels: str | None = key("published labels to look at: name of a run, or URL; null: this run's", None)
    since: str | None = key(
        "labels of the night before, to tell what changed since: name of a run, or URL", None
    )
    page: str | None = key("the HTML file to write; null: <storage>/reports/NAME.html of those labels", None)
    listed: int = key("samples in the gallery, the most worth a look", 2000, ge=0, le=100_000, unit="samples")
    thumbnails: int = key(
        "how many of them are shown with their picture; 0: none", 2000, ge=0, unit="samples"
    )
    thumbnail_px: int = key("longer side of a thumbnail", 112, ge=16, le=512, unit="pixels")
    audit: int = key(
        "how many changed and how many unchanged labels are drawn for an audit",
        200,
        ge=0,
        le=5000,
        unit="samples",
    )
    judged: str | None = key(
        "decisions that an audit came to: print what follows from them, and write no page", None
    )
    mlflow: bool = key("keep a copy of the page with the run in MLflow", True)


StageEpochs = Annotated[
    tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]],
    Shape("[backbone, pencil, finetune]"),
]
ClassMoves = Annotated[dict[str, str | None], Shape("{old name: new name or null, ...}")]


class NightlyJob(Settings):
    old_per_new: float = key("old samples trained on for each new one, others every night", 1.0, ge=0)
    start_from: RunName | None = key(
        "finished run that the first night continues; null: the one there is", None
    )
    first_epochs: StageEpochs | None = key(
        "epochs of a first night that has no run to continue, over all samples; null: refuse it",
        None,
        unit="epochs",
    )
    remap: ClassMoves = key("what became of classes that left data.classes", {})
    max_accuracy_fall: float = key(
        "a night is held when accuracy on the clean set falls by more than this", 0.02, ge=0, le=1
    )
    max_changed_share: float = key(
        "... when more than this share of the old labels trained on changed since the night before",
        0.1,
        ge=0,
        le=1,
    )
    max_repair_jump: float = key(
        "... when the share of repaired labels is higher among new samples than among old ones by more",
        0.15,
        ge=0,
        le=1,
    )
    max_class_ratio: float = key(
        "... when a class is more than so many times commoner, or rarer, among new samples than before",
        4.0,
        gt=1,
    )
    keep_nights: int = key("nights that are kept, besides CURRENT and its parent", 14, ge=1, unit="nights")
