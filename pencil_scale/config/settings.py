"""Every key that a config file may contain: type, default, limits, unit and meaning.

The models are frozen and strict: an unknown key is an error, and so is a value of another type. The sections
of a run come first, then one section per job in `pipelines/`. `config.loader` reads a file into them, and
`--help` prints them.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pencil_scale.config.stages import Stages
from pencil_scale.config.values import (
    AUTOMATIC,
    AutoAmount,
    AutoCount,
    AutoWhole,
    Between,
    Count,
    Positive,
    Settings,
    Shape,
    Share,
    Whole,
    key,
    one_or_list,
)

Text = Annotated[str, Field(min_length=1), Shape("non-empty text")]
URLS = Annotated[tuple[Text, ...], Field(min_length=1), one_or_list(), Shape("URL or list of URLs")]
Identity = Annotated[
    str, Field(pattern=r"^(key|shard_key|sha256|json:.+)$"), Shape("key | shard_key | json:FIELD | sha256")
]
Label = Annotated[
    str,
    Field(pattern=r"^(cls|txt|json:.+|file:.+|table:.+#[^,#]+,[^,#]+)$"),
    Shape("cls | txt | json:FIELD | file:URL | table:URL#id,label"),
]
WorkerCount = Annotated[
    tuple[Count, Count], one_or_list(2), Shape("whole number from 1 | [fewest, most] for an elastic run")
]
RunName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"), Shape("name of letters, digits, '.', '_' and '-'")
]
StageEpochs = Annotated[tuple[Whole, Whole, Whole], Shape("three whole numbers [backbone, pencil, finetune]")]
ClassMoves = Annotated[dict[str, str | None], Shape("{old name: new name or null, ...}")]
CompileMode = Literal["off", "default", "reduce-overhead", "max-autotune"]
Triple = Annotated[tuple[float, float, float], Shape("three numbers [red, green, blue]")]
PositiveTriple = Annotated[
    tuple[Positive, Positive, Positive], Shape("three numbers [red, green, blue] above 0")
]
NAMED = "name of a run or night, or URL; null: those of the night in use, or this run's"


class Run(Settings):
    name: RunName = key("name of the run; the same name and storage resume it")
    storage: Text = key("local folder or URL for the catalogue, labels, checkpoints, exports and all else")
    seed: Whole = key("seed of the sample order, augmentation, noise and subsets", 1)
    deterministic: bool = key("bit-identical results on the same machine, at some cost in speed", False)


class StorageAccess(Settings):
    retry_s: float = key(
        "how long timeouts and other passing faults of an object store are retried",
        600.0,
        ge=0,
        unit="seconds",
    )


class Data(Settings):
    shards: URLS = key("the noisy WebDataset shards: brace range, glob, list, or @FILE with one per line")
    classes: Text = key("file of class names, one per line; the line number, from 0, is the class")
    identity: Identity = key("what identifies a sample", "key")
    label: Label = key("where to read the given label", "cls")
    clean_label: Label | None = key("where to read it in validation and test shards; null: as in label", None)
    aliases: str | None = key("file of lines 'label text<TAB>class' that maps label texts to classes", None)
    subset: str | None = key("train only on this subset (made by balance_subset)", None)
    validation: URLS | None = key(
        "clean shards to evaluate on after each epoch; their ids are held out of training", None
    )
    test: URLS | None = key("clean shards for the final figure; their ids are held out of training", None)
    truth: str | None = key(
        "true classes of some samples, for measuring only: json:FIELD or table:URL#id,class", None
    )
    exclude: str | None = key("file of sample ids to remove from every output, one per line", None)
    img2dataset: bool = key("shards of img2dataset: wait for each _stats.json and check its count", False)
    check_images: Literal["header", "decode"] = key(
        "whether indexing reads only the header of each image or decodes it", "header"
    )
    max_damaged_share: Share = key(
        "fail before publishing if more than this share of samples is damaged", 0.01
    )
    window_mb: Count = key("size of the window that is shuffled as a unit, per read task", 64, unit="MB")
    keep_mb: Whole = key(
        "memory of every reading process for decoded images; they are kept from the first epoch on if all of "
        "them fit",
        256,
        unit="MB",
    )


class Images(Settings):
    decode: Literal["cpu", "gpu"] | Between = key(
        "where JPEGs are decoded; a number: this share of them on the GPU, the others on CPUs", "cpu"
    )
    resize: Count | None = key("scale images to a square of this side before cropping", None, unit="pixels")
    crop: AutoCount = key(
        "side of the square that the network sees; without it, resize and pad are automatic too",
        None,
        unit="pixels",
    )
    pad: AutoWhole = key("pad every side by this much before the random crop", None, unit="pixels")
    flip: bool = key("mirror half of the training images", True)
    mean: Triple = key("subtracted from each channel, on a scale from 0 to 1", (0.485, 0.456, 0.406))
    std: PositiveTriple = key("divisor of each channel", (0.229, 0.224, 0.225))

    @model_validator(mode="after")
    def _crop_fits(self) -> Self:
        if self.crop is None:
            return self
        if self.decode != "cpu" and self.resize is None:
            raise ValueError(f"decode: {self.decode} needs resize, the side to which all images are scaled")
        pad = self.pad or 0
        if self.resize is not None and self.crop > self.resize + 2 * pad:
            raise ValueError(f"crop {self.crop} is larger than resize {self.resize} with pad {pad}")
        return self

    @property
    def gpu_share(self) -> float:
        """The share of the images that the GPU decodes."""
        if isinstance(self.decode, float):
            return self.decode
        return 1.0 if self.decode == "gpu" else 0.0


FEATURES = "features:"  # and how many numbers: the name of a network that is only a head


class Model(Settings):
    backbone: Annotated[Text, AUTOMATIC] = key(
        "a torchvision classifier, timm:NAME, pooled_convnet, preact_resnet32, cifar_resnet18, "
        "cifar_resnet34, small_convnet, or package.module:factory",
        None,
    )
    weights: str | None = key(
        "what to start from: imagenet (downloaded once), or the path or URL of a state dict; a head of "
        "another size is left out; null: random weights, which are too weak a start for photos",
        None,
    )
    head: Literal["linear", "mlp"] | None = key(
        "train only this layer, on features that the rest of the network, frozen, gives each image once, or "
        "on imported ones (features.name, without a backbone); mlp has a hidden layer; minutes instead of "
        "days without a GPU, if weights are pretrained; null: train the whole network",
        None,
    )


class Optimizer(Settings):
    tuned_batch: AutoCount = key(
        "global batch for which the rates and lambda were tuned", None, unit="samples"
    )
    batch_per_worker: AutoCount = key("samples per worker and batch", None, unit="samples")
    accumulation: Count = key("batches that a worker accumulates per step", 1, unit="batches")
    momentum: float = key("of SGD", 0.9, ge=0, lt=1)
    weight_decay: AutoAmount = key("of SGD", None)
    precision: Literal["fp32", "bf16"] = key("of the forward pass", "fp32")
    compile: CompileMode = key("mode of torch.compile", "off")
    cuda_graph: bool = key("record a step and replay it: faster for small networks, on one GPU worker", False)
    warmup_steps: Whole = key("steps over which the learning rate rises linearly", 0, unit="steps")
    sync_batch_norm: bool = key("compute batch norm over the samples of all workers", False)


class Workers(Settings):
    count: WorkerCount = key("training processes", (1, 1))
    in_process: bool = key(
        "train in the process of the command, for very small data; an interrupted run starts over", False
    )
    gpu: bool = key("one GPU per worker", False)
    cpus: Positive = key("CPUs reserved per worker; leave at least one for reading", 1.0, unit="CPUs")
    scratch: str | None = key("local folder for working copies; null: the system's temporary folder", None)
    timeout_s: Count = key("how long a worker waits for the others before it fails", 600, unit="seconds")
    max_failures: Whole = key("how often workers may fail in a row, without a new checkpoint in between", 3)
    wait_for_nodes_s: Positive = key(
        "how long a run waits for nodes that have room for its workers, at its start and whenever nodes are "
        "lost",
        3600.0,
        unit="seconds",
    )
    stop_s: Positive = key(
        "after SIGTERM: how long workers may take to finish their step; then the last checkpoint counts",
        20.0,
        unit="seconds",
    )

    @model_validator(mode="after")
    def _count_fits(self) -> Self:
        if self.count[0] > self.count[1]:
            raise ValueError("count: [fewest, most] were expected in this order")
        if self.in_process and self.count != (1, 1):
            raise ValueError("in_process: true trains as a single worker; set count: 1")
        return self


class Checkpoint(Settings):
    every_steps: Count | None = key(
        "also save after this many steps; null: only after epochs", None, unit="steps"
    )
    max_time_share: Share = key(
        "write a checkpoint after an epoch unless that takes more than this share of the time since the "
        "last one; 1: after every epoch",
        0.1,
    )
    keep: Count = key("checkpoints kept while a run trains; a finished run keeps none", 3)
    history: bool = key("keep every label's class after each epoch that moved labels", True)


class Tracking(Settings):
    uri: str | None = key("MLflow server; null: MLFLOW_TRACKING_URI, or SQLite in a local storage", None)
    experiment: str | None = key("MLflow experiment; null: the name of the storage's folder", None)
    register_as: str | None = key("register the trained model under this name", None)


class Gate(Settings):
    hold: bool = key(
        "hold the labels and exit with code 3 if the network is not clearly better than chance, the repair "
        "is not clearly a gain by the evidence, a class lost most of its samples, or data.truth shows that "
        "the labels got worse; false: warn and publish",
        True,
    )


class Evidence(Settings):
    watched: float | None = key(
        "share of the samples that are predicted but never trained on, to measure the network and the noise "
        "without clean data; null: about 5 %, of a small dataset as evidence.folds says; 0: none",
        None,
        ge=0,
        le=0.5,
    )
    folds: AutoCount = key(
        "trainings, each watching another part of the samples, so that every label is judged by a network "
        "that was never trained on it; takes that many times as long; up to 10,000 samples 4, above 1; "
        "nights train once",
        None,
        le=10,
    )
    planted: float | None = key(
        "share of the labels replaced by a wrong class while the run trains, to measure how many errors it "
        "finds; never published; null: about 1 %, more of a small dataset; 0: none",
        None,
        ge=0,
        le=0.2,
    )
    clean: Literal["validation", "test"] | None = key(
        "clean set, data.validation or data.test, whose accuracy shows which of the labels that the network "
        "contradicts are wrong, also where errors follow the image; its samples must come from the same "
        "source as the others; nights that continue another ignore it; null: only random errors are repaired",
        None,
    )

    @model_validator(mode="after")
    def _folds_fit(self) -> Self:
        if self.watched is not None and (self.folds or 1) > 1:
            raise ValueError(
                f"folds: each of {self.folds} trainings watches 1/{self.folds} of the samples; leave watched "
                "out, or set folds: 1"
            )
        if self.watched == 0 and self.clean is not None:
            raise ValueError("clean: it is compared with watched samples; leave watched out, or clean")
        return self


class Cost(Settings):
    gpu_hour: float | None = key("price of one worker per hour, for --dry-run", None, ge=0)


# --- jobs --------------------------------------------------------------------------------------------


class FeaturesJob(Settings):
    backbone: Text | None = key(
        "frozen network: a torchvision classifier, timm:NAME, or package.module:factory; null: "
        "model.backbone with model.weights",
        None,
    )
    weights: str | None = key(
        "its weights: imagenet, or the path or URL of a state dict; null: those that its factory loads", None
    )
    views: int = key("1: the centre of each image; 2: also mirrored", 1, ge=1, le=2)
    name: RunName | None = key(
        "name to import features under; for export, this name or a key; null: the only features", None
    )
    file: str | None = key("Parquet or .npy file that import_features reads or export_features writes", None)
    ids: str | None = key("sample ids of a .npy file, one per line, in the order of its vectors", None)
    column: Text = key("column of the vectors in Parquet, beside sample_id", "features")
    duplicate_similarity: float = key(
        "cosine similarity from which find_similar groups images as near-duplicates; to choose it, look at "
        "groups of the lowest nearest_similarity in its result: raise it while they are different things, "
        "lower it if copies are missed",
        0.92,
        gt=0,
        le=1,
    )
    exact_rows: Count = key(
        "different images up to which find_similar compares all pairs, which takes minutes; "
        "beyond that it uses an index of faiss, which misses a few",
        100_000,
        unit="images",
    )


class SubsetJob(Settings):
    name: RunName = key("name of the subset, published as <storage>/subsets/NAME", "balanced")
    per_class: Count | None = key("samples per class; set this or total", None, unit="samples")
    total: Count | None = key("samples in total, divided equally among the classes", None, unit="samples")
    by: Literal["noisy", "corrected"] = key("balance the given or the repaired classes", "noisy")
    labels: str | None = key(f"published labels to use: {NAMED}", None)
    min_confidence: float = key("take only samples whose label gives their class this share", 0.0, ge=0, lt=1)
    exclude: str | None = key("file of sample ids to leave out, one per line", None)
    on_shortage: Literal["error", "take_all"] = key("what to do if a class has too few samples", "error")
    shards: Literal["never", "thin", "always"] = key("whether to copy the samples into new shards", "thin")
    thin_share: Share = key("thin: copy if the samples are less than this share of their shards' bytes", 0.05)
    samples_per_shard: Count = key("samples per new shard", 1000, unit="samples")


class ExportJob(Settings):
    labels: str | None = key(f"published labels to export: {NAMED}", None)
    folder: str | None = key("folder of the export; null: <storage>/exports/NAME", None)
    top_k: Count = key("number of classes listed per label distribution", 5, unit="classes")
    predict: bool = key("let the model predict the class of unlabelled samples", True)
    corrected_shards: bool = key("also write shards that contain the repaired labels", False)
    judged: str | None = key("decisions from the audit of these labels: recalibrate probabilities", None)


class PinJob(Settings):
    file: str | None = key("decisions to pin: JSON, CSV or Parquet with sample_id and class", None)
    by: str | None = key("who decided; needed unless every decision in the file says so", None)


class ReportJob(Settings):
    labels: str | None = key(f"published labels to review: {NAMED}", None)
    since: str | None = key("earlier labels to compare with: name of a run, or URL", None)
    page: str | None = key("HTML file to write; null: <storage>/reports/NAME.html", None)
    listed: int = key("samples most worth reviewing, for the gallery", 1000, ge=0, le=100_000, unit="samples")
    thumbnails: Whole = key(
        "samples in the gallery that have a thumbnail, of about 11 kB if it is a photo; 0: none",
        1000,
        unit="samples",
    )
    thumbnail_px: int = key(
        "longer side of a thumbnail; small images stay small", 224, ge=16, le=512, unit="pixels"
    )
    audit: int = key(
        "changed labels drawn for the audit, and as many unchanged", 200, ge=0, le=5000, unit="samples"
    )
    outliers: Whole = key("outliers to show besides, after find_similar", 200, unit="samples")
    similar: Whole = key("samples like the listed ones to show besides", 1000, unit="samples")
    judged: str | None = key("decisions from an audit: print the estimates that follow, write no page", None)
    mlflow: bool = key("attach a copy of the page to the run in MLflow", True)


class NightlyJob(Settings):
    old_per_new: float = key("old samples to train on per new sample, redrawn every night", 1.0, ge=0)
    start_from: RunName | None = key("finished run that the first night continues; null: the only one", None)
    first_epochs: StageEpochs | None = key(
        "epochs of the first night, over all samples, if it continues no run; null: refuse",
        None,
        unit="epochs",
    )
    remap: ClassMoves = key("new names of classes removed from data.classes; null drops a class", {})
    max_accuracy_fall: Share = key(
        "hold the night if accuracy on the clean set drops by more than this", 0.02
    )
    max_changed_share: Share = key(
        "hold it if more than this share of the old labels trained on changed", 0.1
    )
    max_repair_jump: Share = key(
        "hold it if the share of repaired labels among new samples is higher than among old by more", 0.15
    )
    max_class_ratio: float = key(
        "hold it if a class is more common or rarer among new samples by more than this factor", 4.0, gt=1
    )
    keep_nights: Count = key("nights to keep, in addition to CURRENT and its parent", 14, unit="nights")


class Config(Settings):
    """All sections of a config."""

    run: Run = key("the run")
    storage: StorageAccess = key("how object stores are accessed", StorageAccess())
    data: Data = key("what to read")
    images: Images = key("how images are decoded and augmented", Images())
    model: Model = key("the network", Model())
    optimizer: Optimizer = key("how the weights are trained", Optimizer())
    stages: Stages = key("the three stages of PENCIL", Stages())
    workers: Workers = key("the training processes", Workers())
    checkpoint: Checkpoint = key("what is saved while a run trains", Checkpoint())
    tracking: Tracking = key("where metrics are reported", Tracking())
    gate: Gate = key("when labels are held for a person to check", Gate())
    evidence: Evidence = key("how a run measures itself without clean data", Evidence())
    cost: Cost = key("prices", Cost())
    features: FeaturesJob = key(
        "what extract_features computes, import_features and export_features exchange, and find_similar "
        "compares",
        FeaturesJob(),
    )
    subset: SubsetJob = key("what balance_subset draws", SubsetJob())
    export: ExportJob = key("what export_labels writes", ExportJob())
    pin: PinJob = key("what pin_labels reads", PinJob())
    report: ReportJob = key("what review_report shows", ReportJob())
    nightly: NightlyJob = key("what reclean_nightly does, and when it holds a night", NightlyJob())

    @model_validator(mode="after")
    def _head_fits(self) -> Self:
        if self.model.head is not None and self.model.backbone is None and self.features.name is None:
            raise ValueError(
                "model.head: name the network that gives the features, as model.backbone, or imported "
                "features, as features.name"
            )
        if self.model.head is not None and self.features.backbone not in (None, self.model.backbone):
            raise ValueError(
                f"features.backbone: {self.features.backbone}; with model.head the features are those of "
                f"model.backbone, {self.model.backbone}: leave features.backbone out"
            )
        if self.model.head is not None and self.features.weights not in (None, self.model.weights):
            raise ValueError(
                f"features.weights: {self.features.weights}; with model.head the features are those of "
                f"model.weights, {self.model.weights or 'not set'}: set that one alone"
            )
        strong = [name for name, stage in self.stages if stage.augment == "strong"]
        if self.model.head is not None and strong:
            raise ValueError(
                f"stages.{strong[0]}.augment: strong changes images, and a head (model.head) is trained on "
                "features; use weak"
            )
        return self

    @model_validator(mode="after")
    def _clean_exists(self) -> Self:
        name = self.evidence.clean
        if name is not None and getattr(self.data, name) is None:
            raise ValueError(f"evidence.clean: {name}, but data.{name} is not set; set it, or leave this out")
        return self

    @model_validator(mode="after")
    def _recordable(self) -> Self:
        options, one_gpu = self.optimizer, self.workers.gpu and self.workers.count == (1, 1)
        torch_records = options.compile in ("reduce-overhead", "max-autotune")
        if options.cuda_graph and (torch_records or options.accumulation > 1 or not one_gpu):
            raise ValueError(
                "optimizer.cuda_graph: true needs one GPU worker and no accumulation; set "
                "workers.gpu: true, workers.count: 1, optimizer.accumulation: 1 and optimizer.compile: off "
                "or default, or cuda_graph: false"
            )
        return self
