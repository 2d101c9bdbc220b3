"""Keys of the three stages: how long each lasts, its rates, and the options that the paper does not have."""

from typing import Annotated, Literal, Self

from pydantic import Field, PlainValidator, model_validator

from pencil_scale.config.values import (
    AUTOMATIC,
    Amount,
    AutoAmount,
    AutoRate,
    AutoWhole,
    Between,
    Count,
    Curve,
    Positive,
    Settings,
    Shape,
    Share,
    key,
    one_or_list,
    read_curve,
)

EpochList = Annotated[tuple[Count, ...], one_or_list(), Shape("list of whole numbers from 1"), AUTOMATIC]
LambdaCurve = Annotated[
    Curve,
    PlainValidator(read_curve),
    Shape("number from 0 | line {start: 3000, end: 0} | steps [[0, 3000], [5, 500]]"),
    AUTOMATIC,
]
Augment = Literal["weak", "strong"]
AUGMENT = "weak: crop and mirror; strong: also turn, shear, recolour and cover a part of the image"
MIXUP = (
    "blend each image, and its label, with another one, in shares drawn from a Beta distribution with this "
    "parameter, such as 1.0; 0: never"
)


class BackboneStage(Settings):
    epochs: AutoWhole = key("length of the stage; 0 skips it", None, unit="epochs")
    rate: AutoRate = key("learning rate at tuned_batch (constant and high)", None)
    augment: Augment = key(AUGMENT, "weak")
    mixup: Amount = key(MIXUP, 0.0)


class PencilStage(Settings):
    epochs: AutoWhole = key("length of the stage; 0 skips it", None, unit="epochs")
    rate: AutoRate = key("learning rate at tuned_batch (constant and high)", None)
    alpha: AutoAmount = key("weight of the compatibility loss, at tuned_classes", None)
    beta: float = key("weight of the entropy loss", 0.4, ge=0)
    lambda_: LambdaCurve = key(
        "step size of the labels, at tuned_batch and tuned_classes; epoch 0 is the first of the stage",
        None,
        alias="lambda",
    )
    tuned_classes: Annotated[int, Field(ge=2), AUTOMATIC] = key(
        "number of classes for which alpha and lambda were tuned", None, unit="classes"
    )
    compatibility: Literal["released", "printed"] = key(
        "form of the compatibility loss; 'printed' can change labels only if alpha * tuned_classes is "
        "well below 1",
        "released",
    )
    start_confidence: float | None = key(
        "share of the given class in a label at the start; null: the paper's scale of 10", None, gt=0, lt=1
    )
    teacher: Between | None = key(
        "let an average of the network move the labels, and evaluate it; it keeps this share of itself at "
        "every step, such as 0.998, and sees images weakly augmented; null: the network itself",
        None,
    )
    augment: Augment = key(AUGMENT, "weak")
    mixup: Amount = key(f"{MIXUP}; it needs a teacher, which sees the images as they are", 0.0)
    rounds: Count = key(
        "how often this stage and the next are passed through; a further round starts from the labels and "
        "the network, or its average, that the round before ended with",
        1,
    )
    max_class_loss: Share = key(
        "hold the run if a class loses clearly more than this share of its samples", 0.5
    )
    allow_fixed_labels: bool = key("train even if no label can change with these settings", False)
    allow_fast_labels: bool = key("train even if a label can change within one or two visits", False)

    @model_validator(mode="after")
    def _mixtures_move_no_label(self) -> Self:
        if self.mixup and self.teacher is None:
            raise ValueError("mixup: needs teacher, such as 0.998: predictions of mixtures move no label")
        return self

    @model_validator(mode="after")
    def _rounds_move_labels(self) -> Self:
        if self.rounds > 1 and self.epochs == 0:
            raise ValueError("rounds: more than 1 needs epochs above 0, or no label moves in any of them")
        return self


class FinetuneStage(Settings):
    epochs: AutoWhole = key("length of the stage; 0 skips it", None, unit="epochs")
    rate: AutoRate = key("learning rate at tuned_batch at the start of the stage", None)
    drop_after: EpochList = key("divide the rate after these epochs of the stage", None, unit="epochs")
    drop_by: float = key("divisor of the rate", 10.0, gt=1)
    schedule: Literal["steps", "cosine"] = key(
        "of the rate: steps, as drop_after says, or a fall along a cosine from epoch to epoch", "steps"
    )
    restart: bool = key("start from new weights, as at the start of the run; labels stay", False)
    sharpen: Positive = key(
        "learn labels as if their logits were this many times as large; 1: as they are", 1.0
    )
    move_labels: bool = key(
        "let labels move on, as at the end of the pencil stage, if it has epochs; false: they are fixed",
        False,
    )
    average: Between | None = key(
        "evaluate and publish an average of the network; it keeps this share of itself at every step, such "
        "as 0.999; null: the network itself",
        None,
    )
    augment: Augment = key(AUGMENT, "weak")
    mixup: Amount = key(f"{MIXUP}; with move_labels it needs average", 0.0)

    @model_validator(mode="after")
    def _labels_can_move(self) -> Self:
        if self.restart and self.move_labels:
            raise ValueError("move_labels: not together with restart, because new weights would ruin them")
        if self.mixup and self.move_labels and self.average is None:
            raise ValueError(
                "mixup: with move_labels it needs average; predictions of mixtures move no label"
            )
        return self

    @model_validator(mode="after")
    def _drops_are_used(self) -> Self:
        if self.schedule == "cosine" and self.drop_after:
            raise ValueError(
                "drop_after: not with schedule: cosine, where the rate falls in every epoch; leave it out "
                "(on the command line: stages.finetune.drop_after=null), or set schedule: steps"
            )
        return self


class Stages(Settings):
    backbone: BackboneStage = key("cross entropy on the given classes", BackboneStage())
    pencil: PencilStage = key("weights and labels move together", PencilStage())
    finetune: FinetuneStage = key("the learning rate decays, labels are fixed or move on", FinetuneStage())

    @property
    def num_epochs(self) -> int:
        """The epochs of all stages and rounds."""
        return int(self.backbone.epochs + self.pencil.rounds * (self.pencil.epochs + self.finetune.epochs))
