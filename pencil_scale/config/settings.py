"""Every key of the jobs around the label table, each job with a section of its own; see `settings`.

Every key a config file may hold: its type, default, limits, unit and meaning.

The models are frozen and strict: a key nobody knows is an error, and so is a value of another type.
`pencil_scale.config.loader` reads a file into them; `--help` prints them.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pencil_scale.config.values import (
    URLS,
    Identity,
    Label,
    LambdaCurve,
    RunName,
    Settings,
    Shape,
    WorkerCount,
    key,
)


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


Triple = Annotated[tuple[float, float, float], Shape("[red, green, blue]")]
Positive = Annotated[float, Field(gt=0)]
PositiveTriple = Annotated[tuple[Positive, Positive, Positive], Shape("[red, green, blue], each above 0")]


class Run(Settings):
    name: RunName = key("names the run; the same name and storage again resume it")
    storage: str = key("local folder or URL for catalogue/ labels/ checkpoints/ exports/", min_length=1)
    seed: int = key("fixes order, augmentation, noise and subsets", 1, ge=0)
    deterministic: bool = key("the same bits every time on the same machine, at some cost in speed", False)


class Data(Settings):
    shards: URLS = key("the noisy WebDataset tars: brace range, glob, list, or @file of lines")
    classes: str = key("file of class names, one a line; its line number from 0 is the class", min_length=1)
    identity: Identity = key("what makes two samples the same one", "key")
    label: Label = key("where the given label stands", "cls")
    clean_label: Label | None = key("where it stands in validation and test shards; null: as label", None)
    aliases: str | None = key("file of lines 'raw string<TAB>class' that maps label texts to classes", None)
    subset: str | None = key("train on this subset alone (made by pipelines.balance_subset)", None)
    validation: URLS | None = key("clean shards for evaluation each epoch; shared ids leave training", None)
    test: URLS | None = key("clean shards for the final figure; shared ids leave training", None)
    truth: str | None = key(
        "true classes of some samples, measured and never trained on: json:FIELD or table:URL#id,class", None
    )
    exclude: str | None = key("file of ids, one a line, that must vanish from every output", None)
    img2dataset: bool = key("img2dataset wrote the shards: wait for each _stats.json, check its count", False)
    check_images: Literal["header", "decode"] = key("what indexing reads of each image", "header")
    max_damaged_share: float = key("more damage than this ends a job before it publishes", 0.01, ge=0, le=1)
    window_mb: int = key("size of the window that is shuffled whole, per read task", 64, ge=1, unit="MB")


class Images(Settings):
    decode: Literal["cpu", "gpu"] = key("where JPEGs are decoded", "cpu")
    resize: int | None = key("scale the image to this square before cropping", None, ge=1, unit="pixels")
    crop: int = key("side of the square the network sees", 224, ge=1, unit="pixels")
    pad: int = key("pad every side by this much before the random crop", 0, ge=0, unit="pixels")
    flip: bool = key("mirror half of the training images", True)
    mean: Triple = key("subtracted from each channel, on a scale from 0 to 1", (0.485, 0.456, 0.406))
    std: PositiveTriple = key("each channel is divided by it", (0.229, 0.224, 0.225))

    @model_validator(mode="after")
    def _crop_fits(self) -> Self:
        if self.decode == "gpu" and self.resize is None:
            raise ValueError("decode: gpu needs resize, the side of the square all images are brought to")
        if self.resize is not None and self.crop > self.resize + 2 * self.pad:
            raise ValueError(f"crop {self.crop} is larger than resize {self.resize} with pad {self.pad}")
        return self


class Model(Settings):
    backbone: str = key(
        "a torchvision classifier, preact_resnet32, cifar_resnet34, small_convnet, or package.module:factory",
        min_length=1,
    )
    weights: str | None = key(
        "path or URL of a state dict to start from; a head of other size is left out", None
    )


class Optimizer(Settings):
    tuned_batch: int = key("the batch for which the rates and lambda were tuned", ge=1, unit="samples")
    batch_per_worker: int = key("samples a worker sees at once", ge=1, unit="samples")
    accumulation: int = key("batches a worker adds up before a step", 1, ge=1, unit="batches")
    momentum: float = key("of SGD", 0.9, ge=0, lt=1)
    weight_decay: float = key("of SGD", 1e-4, ge=0)
    precision: Literal["fp32", "bf16"] = key("of the forward pass", "fp32")
    compile: Literal["off", "default", "reduce-overhead", "max-autotune"] = key("torch.compile's mode", "off")
    cuda_graph: bool = key("record a step and replay it: faster for small networks; one GPU worker", False)
    warmup_steps: int = key("the learning rate rises linearly over these first steps", 0, ge=0, unit="steps")
    sync_batch_norm: bool = key("batch norm over all workers' samples, not each worker's own", False)


class BackboneStage(Settings):
    epochs: int = key("length of the stage; 0 leaves it out", ge=0, unit="epochs")
    rate: float = key("learning rate at tuned_batch, fixed and high", gt=0)


class PencilStage(Settings):
    epochs: int = key("length of the stage; 0 leaves it out", ge=0, unit="epochs")
    rate: float = key("learning rate at tuned_batch, fixed and high", gt=0)
    alpha: float = key("weight of the compatibility loss, at tuned_classes", 0.1, ge=0)
    beta: float = key("weight of the entropy loss", 0.4, ge=0)
    lambda_: LambdaCurve = key(
        "step size of the labels, at tuned_batch and tuned_classes; epochs count from the stage's start",
        alias="lambda",
    )
    tuned_classes: int = key("number of classes for which alpha and lambda were tuned", ge=2, unit="classes")
    compatibility: Literal["released", "printed"] = key(
        "form of the compatibility loss; 'printed' can change labels only where alpha * tuned_classes is "
        "well under 1",
        "released",
    )
    start_confidence: float | None = key(
        "share of a label its given class holds at first; null: the paper's scale of 10",
        None,
        gt=0,
        lt=1,
    )
    max_class_loss: float = key(
        "a run in which a class lost more than this share of its samples is held (see gate.hold)",
        0.5,
        ge=0,
        le=1,
    )
    allow_fixed_labels: bool = key(
        "train although no label can change with these numbers, or in so few epochs", False
    )


class FinetuneStage(Settings):
    epochs: int = key("length of the stage; 0 leaves it out", ge=0, unit="epochs")
    rate: float = key("learning rate at tuned_batch at the stage's start", gt=0)
    drop_after: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Shape("list of whole numbers")] = key(
        "divide the rate after these epochs of the stage", (), unit="epochs"
    )
    drop_by: float = key("what the rate is divided by", 10.0, gt=1)


class Stages(Settings):
    backbone: BackboneStage = key("cross entropy on the given classes")
    pencil: PencilStage = key("weights and labels move together")
    finetune: FinetuneStage = key("labels stand still, the rate decays")


class Workers(Settings):
    count: WorkerCount = key("training processes", (1, 1))
    in_process: bool = key(
        "train in the command's own process: for data so small that starting a worker takes longer; a run "
        "that is interrupted begins again",
        False,
    )
    gpu: bool = key("one GPU a worker", False)
    cpus: float = key("CPUs a worker reserves; leave at least one free for reading", 1.0, gt=0, unit="CPUs")
    scratch: str | None = key("local folder for working copies; null: the system's temporary folder", None)
    timeout_s: int = key(
        "how long a worker waits for the others before it gives up", 600, ge=1, unit="seconds"
    )
    max_failures: int = key("how often workers may die and be replaced", 3, ge=0)

    @model_validator(mode="after")
    def _one_in_process(self) -> Self:
        if self.in_process and self.count != (1, 1):
            raise ValueError("in_process: true trains as a single worker; set count: 1")
        return self


class Checkpoint(Settings):
    every_steps: int | None = key("besides every epoch; null: epochs alone", None, ge=1, unit="steps")
    keep: int = key("checkpoints kept while a run trains; once it is finished, none", 3, ge=1)
    history: bool = key("keep what every label was after each epoch that moved labels", True)


class Tracking(Settings):
    uri: str | None = key("MLflow server; null: MLFLOW_TRACKING_URI, else sqlite under a local storage", None)
    experiment: str | None = key("MLflow experiment; null: the run's name", None)
    register_as: str | None = key("register the trained model under this name", None)


class Gate(Settings):
    hold: bool = key(
        "publish no labels, and end with exit code 3, where the network is not clearly better than chance, a "
        "class lost most of its samples, or data.truth says the labels got worse; false: publish and warn",
        True,
    )


class Cost(Settings):
    gpu_hour: float | None = key("price of one worker for an hour, for --dry-run", None, ge=0)


class Config(Settings):
    """A whole run."""

    run: Run = key("the run")
    data: Data = key("what to read")
    images: Images = key("from bytes to pixels", Images())
    model: Model = key("the network")
    optimizer: Optimizer = key("how the weights move")
    stages: Stages = key("the three stages of PENCIL")
    workers: Workers = key("who trains", Workers())
    checkpoint: Checkpoint = key("what survives a crash", Checkpoint())
    tracking: Tracking = key("where figures go", Tracking())
    gate: Gate = key("when labels wait for a person", Gate())
    cost: Cost = key("what it costs", Cost())
    subset: SubsetJob = key("what pipelines.balance_subset draws", SubsetJob())
    export: ExportJob = key("what pipelines.export_labels writes", ExportJob())
    pin: PinJob = key("what pipelines.pin_labels takes", PinJob())
    report: ReportJob = key("what pipelines.review_report shows", ReportJob())
    nightly: NightlyJob = key("what pipelines.reclean_nightly does, and when it holds a night", NightlyJob())

    @model_validator(mode="after")
    def _recordable(self) -> Self:
        options, one_gpu = self.optimizer, self.workers.gpu and self.workers.count == (1, 1)
        torch_records = options.compile in ("reduce-overhead", "max-autotune")
        if options.cuda_graph and (torch_records or options.accumulation > 1 or not one_gpu):
            raise ValueError(
                "optimizer.cuda_graph: true records the step of one GPU worker that adds up no batches; set "
                "workers.gpu: true, workers.count: 1, optimizer.accumulation: 1 and optimizer.compile: off "
                "or default, or cuda_graph: false"
            )
        return self
