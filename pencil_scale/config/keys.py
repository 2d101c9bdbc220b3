"""The keys of a config in words: the help page, and messages about values that are wrong.

Both are generated from the models in `config.settings`, so a message spells a type as the help page does.
"""

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import getitem
from textwrap import fill
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from pencil_scale.config.settings import Config
from pencil_scale.config.values import AUTOMATIC, Settings, Shape
from pencil_scale.storage.urls import without_passwords

KeyPath = tuple[str | int, ...]
Origins = dict[KeyPath, str]  # where each key was set: a line of the file, or an override
PLAIN = {int: "whole number", float: "number", str: "text", bool: "true | false", NoneType: "null"}
LIMITS = {"ge": "from", "gt": "above", "le": "up to", "lt": "below"}


def _keys(section: type[Settings], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        dotted = f"{prefix}{field.alias or name}"
        yield dotted, field
        if _is_section(field.annotation):
            yield from _keys(field.annotation, f"{dotted}.")


def _is_section(annotation: Any) -> TypeGuard[type[Settings]]:
    return isinstance(annotation, type) and issubclass(annotation, Settings)


KEYS = dict(_keys(Config))  # every section and key, dotted, with its field


def help_page() -> str:
    """List every key with its type and limits, unit, default and meaning."""
    lines = ["config keys (in the file, or as key=value after it; a value may contain ${VARIABLE}):"]
    for dotted, field in KEYS.items():
        if _is_section(field.annotation):
            lines += ["", f"{dotted}: {field.description}"]
        else:
            default = f"default {json.dumps(field.default, default=str)}"
            if field.is_required() or AUTOMATIC in field.metadata:
                default = "required" if field.is_required() else "default automatic"
            meaning = fill(field.description or "", 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
            lines += [f"  {dotted}: {_kind(field)}, {default}", meaning]
    return "\n".join(lines)


def _kind(field: FieldInfo) -> str:
    """Spell the type, limits and unit of a key."""
    extra = field.json_schema_extra
    unit = f", in {extra['unit']}" if isinstance(extra, dict) and extra["unit"] else ""
    return _spelled(field.annotation, field.metadata) + unit


def _spelled(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    for shape in (item for item in metadata if isinstance(item, Shape)):
        return shape
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = [limit for item in arguments[1:] for limit in getattr(item, "metadata", [item])]
        return _spelled(arguments[0], limits)
    if origin is Literal:
        return " | ".join(arguments)
    if origin in (UnionType, Union):
        return " | ".join(_spelled(item, () if item is NoneType else metadata) for item in arguments)
    if _is_section(annotation):
        return "section with keys"
    bounds = [(word, getattr(item, name, None)) for name, word in LIMITS.items() for item in metadata]
    return " ".join(
        [PLAIN[annotation], *(f"{word} {bound:g}" for word, bound in bounds if bound is not None)]
    )


# --- what is wrong -----------------------------------------------------------------------------------


def problems(error: ValidationError, tree: Any, origins: Origins) -> list[str]:
    """Describe what pydantic found, one line per key: where, the value, and what was expected."""
    findings, lines = error.errors(include_url=False), []
    unknown = {spelt(found["loc"]) for found in findings if found["type"] == "extra_forbidden"}
    # A key that is missing because it is misspelt is reported as unknown, and not also as missing.
    meant = {key for name in unknown for key in difflib.get_close_matches(name, [_nearest(name)], cutoff=0.8)}
    for found in findings:
        at, dotted = found["loc"], spelt(found["loc"])
        if dotted in unknown:
            line = f"unknown key '{dotted}'; the nearest known key is '{_nearest(dotted)}'"
        elif found["type"] == "missing" and dotted in KEYS:
            if dotted in meant:
                continue
            line = f"'{dotted}' is missing: {KEYS[dotted].description}"
        else:
            at = key_of(at)
            has_reason = found["type"] in ("value_error", "finite_number")
            line = found["msg"].removeprefix("Value error, ") if has_reason else ""
            if at:
                expected = line or f"expected: {_kind(KEYS[spelt(at)])}"
                value = reduce(getitem, at, tree)
                # What is wrong with a section as a whole says which of its keys are meant.
                shown = "" if line and isinstance(value, dict) else f"found {brief(value)}; "
                line = f"{spelt(at)}: {shown}{expected}"
        where, key = origin(at, origins), spelt(at)
        if where == f"override '{key}'":
            line = line.removeprefix(f"{key}: ")
        lines.append(f"{where}: {line}")
    return list(dict.fromkeys(lines))


def key_of(at: KeyPath) -> KeyPath:
    """Find the key that an item of a list belongs to."""
    return at if not at or spelt(at) in KEYS else key_of(at[:-1])


def takes_text(at: KeyPath) -> bool:
    """Whether a key, or the items of its list, are text; an unknown key is refused later."""
    key = KEYS.get(spelt(key_of(at)))
    return key is None or bool(re.search(r"\bstr\b|Literal", str(key.annotation)))


def _nearest(dotted: str) -> str:
    """Find a similar key in the same section, else the same name elsewhere, else the most similar key."""
    parent, _, last = dotted.rpartition(".")
    siblings = [name for name in KEYS if name.rpartition(".")[0] == parent]
    elsewhere = [name for name in KEYS if name.rpartition(".")[2] == last]
    alike = difflib.get_close_matches(dotted, siblings, 1) or elsewhere
    return (alike or difflib.get_close_matches(dotted, KEYS, 1, cutoff=0))[0]


def origin(at: KeyPath, origins: Origins) -> str:
    """Find where a key was set, or else the section that it belongs to."""
    return next(origins[at[:depth]] for depth in range(len(at), -1, -1) if at[:depth] in origins)


def spelt(at: KeyPath) -> str:
    return ".".join(map(str, at))


def brief(value: Any) -> str:
    """Show a value in at most 80 characters, without passwords."""
    text = repr(without_passwords(value))
    return text if len(text) <= 80 else f"{text[:77]}..."
