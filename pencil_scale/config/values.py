"""What the models of a config are made of: a section, a key, and values that no plain type describes.

`Shape` is how the help page spells such a value, and how a message spells what was expected.

    Steps(((0, 3000.0), (5, 500.0))).at(4, num_epochs=10)    # 3000.0
    Line(3000.0, 0.0).at(9, num_epochs=10)                   # 0.0: the last epoch reaches the end
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeGuard

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, WrapValidator

from pencil_scale.storage.urls import without_passwords


@dataclass(frozen=True)
class Steps:
    """A curve of constant steps: each value applies from its epoch until the next step."""

    steps: tuple[tuple[int, float], ...]

    def at(self, epoch: int, num_epochs: int) -> float:
        return [value for start, value in self.steps if start <= epoch][-1]

    def __str__(self) -> str:
        return str([[start, value] for start, value in self.steps])


@dataclass(frozen=True)
class Line:
    """A straight line from `start` in the first epoch to `end` in the last."""

    start: float
    end: float

    def at(self, epoch: int, num_epochs: int) -> float:
        share = epoch / (num_epochs - 1) if num_epochs > 1 else 0.0
        return self.start + (self.end - self.start) * share

    def __str__(self) -> str:
        return f"{{start: {self.start}, end: {self.end}}}"


Curve = Steps | Line


class Shape(str):
    """How the help page and messages spell a type."""


# Marks a key that `method.automatic` fills in when a run starts. Until then it is None, whatever its type
# says: only a config that is filled in may be trained with.
AUTOMATIC = WrapValidator(lambda value, check: None if value is None else check(value))
Whole = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Amount = Annotated[float, Field(ge=0)]
Between = Annotated[float, Field(gt=0, lt=1)]
AutoWhole = Annotated[Whole, AUTOMATIC]
AutoCount = Annotated[Count, AUTOMATIC]
AutoRate = Annotated[Positive, AUTOMATIC]
AutoAmount = Annotated[float, Field(ge=0), AUTOMATIC]


def one_or_list(times: int = 1) -> BeforeValidator:
    """Take a single value for a list of it; a strict tuple would take neither."""
    return BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else (value,) * times)


def read_curve(value: object) -> Curve:
    """Read a number, a line {start, end}, or steps [[epoch, value], ...]."""
    if _is_amount(value):
        return Steps(((0, float(value)),))
    if isinstance(value, dict) and set(value) == {"start", "end"} and all(map(_is_amount, value.values())):
        return Line(float(value["start"]), float(value["end"]))
    if isinstance(value, list) and value and all(map(_is_step, value)):
        epochs = [epoch for epoch, _ in value]
        if epochs[0] == 0 and epochs == sorted(set(epochs)):
            return Steps(tuple((epoch, float(amount)) for epoch, amount in value))
        raise ValueError("the epochs of its steps must rise from 0, as in [[0, 3000], [5, 500]]")
    raise ValueError


def _is_amount(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _is_step(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and type(value[0]) is int and _is_amount(value[1])


class Settings(BaseModel):
    """One section of a config. Its repr shows variables as written, never their values."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    _written: dict[str, Any] = PrivateAttr(default_factory=dict)  # the keys that had a variable

    def entries(self) -> Iterator[tuple[str, Any, Any]]:
        """Give every key with its value, and as it may be shown: with variables, without passwords."""
        for name, field in type(self).model_fields.items():
            key, value = field.alias or name, getattr(self, name)
            yield key, value, self._written.get(key, without_passwords(value))

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        return ((key, shown) for key, _, shown in self.entries())


def key(meaning: str, default: Any = ..., *, unit: str = "", **limits: Any) -> Any:
    """Declare a key of a section."""
    return Field(default, description=meaning, json_schema_extra={"unit": unit}, **limits)
