"""A section of a config: what its keys are declared with, and how it is shown."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from pencil_scale.shapes import without_passwords


class Settings(BaseModel):
    """One section of a config. Shown with its variables as written, never with what they stood for."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    _written: dict[str, str] = PrivateAttr(default_factory=dict)

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        for name, value in self:
            yield name, self._written.get(name, without_passwords(value))


def key(meaning: str, default: Any = ..., *, unit: str = "", **limits: Any) -> Any:
    """Declare one key of a section."""
    return Field(default, description=meaning, json_schema_extra={"unit": unit}, **limits)
