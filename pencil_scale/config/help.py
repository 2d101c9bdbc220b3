"""The page of all config keys that every job prints at `--help`, generated from the models."""

import json
import types
import typing
from textwrap import fill
from typing import Any

from pydantic.fields import FieldInfo

from pencil_scale.config.problems import known_keys
from pencil_scale.config.values import Settings, Shape

PLAIN = {int: "whole number", float: "number", str: "text", bool: "true | false", type(None): "null"}
LIMITS = {"ge": "from", "gt": "above", "le": "up to", "lt": "below"}


def help_page() -> str:
    """Spell out every key: its type and limits, unit, default, and meaning."""
    lines = ["config keys (in the file, or as key=value behind it; a value may hold ${VARIABLE}):"]
    for dotted, field in known_keys():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            lines += ["", f"{dotted}: {field.description}"]
        else:
            lines += [f"  {dotted}: {_kind(field)}", _indented(field.description or "")]
    return "\n".join(lines)


def _kind(field: FieldInfo) -> str:
    parts = [_type(field), _limits(field), _unit(field), _default(field)]
    return ", ".join(part for part in parts if part)


def _type(field: FieldInfo) -> str:
    spelled = [str(item) for item in field.metadata if isinstance(item, Shape)]
    return spelled[0] if spelled else _spelled(field.annotation)


def _spelled(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return next(str(item) for item in arguments if isinstance(item, Shape))
    if origin is typing.Literal:
        return " | ".join(arguments)
    if origin in (types.UnionType, typing.Union):
        return " | ".join(_spelled(part) for part in arguments)
    return PLAIN[annotation]


def _limits(field: FieldInfo) -> str:
    found = ((LIMITS[name], getattr(item, name, None)) for item in field.metadata for name in LIMITS)
    return " ".join(f"{word} {bound:g}" for word, bound in found if bound is not None)


def _unit(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    unit = extra.get("unit", "") if isinstance(extra, dict) else ""
    return f"in {unit}" if unit else ""


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else f"default {json.dumps(field.default)}"


def _indented(text: str) -> str:
    return fill(text, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
