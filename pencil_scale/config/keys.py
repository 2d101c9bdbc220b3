"""The keys of a config in words: the help page, and messages about a value that is wrong.

Both are generated from the models in `config.settings`.
"""

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from pencil_scale.config.settings import Config
from pencil_scale.config.values import Settings, Shape
from pencil_scale.storage.urls import without_passwords

KeyPath = tuple[str | int, ...]
PLAIN = {int: "whole number", float: "number", str: "text", bool: "true | false", type(None): "null"}
LIMITS = {"ge": "from", "gt": "above", "le": "up to", "lt": "below"}


def known_keys(section: type[Settings] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """List every key below a section, dotted, with its field."""
    for name, field in section.model_fields.items():
        dotted = f"{prefix}{field.alias or name}"
        yield dotted, field
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            yield from known_keys(field.annotation, f"{dotted}.")


def help_page() -> str:
    """List every key with its type and limits, unit, default and meaning."""
    lines = ["config keys (in the file, or as key=value after it; a value may contain ${VARIABLE}):"]
    for dotted, field in known_keys():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            lines += ["", f"{dotted}: {field.description}"]
        else:
            meaning = fill(field.description or "", 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
            lines += [f"  {dotted}: {_kind(field)}", meaning]
    return "\n".join(lines)


def _kind(field: FieldInfo) -> str:
    shapes = [str(item) for item in field.metadata if isinstance(item, Shape)]
    bounds = [(word, getattr(item, name, None)) for item in field.metadata for name, word in LIMITS.items()]
    limits = " ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
    extra = field.json_schema_extra
    unit = extra.get("unit", "") if isinstance(extra, dict) else ""
    default = "required" if field.is_required() else f"default {json.dumps(field.default)}"
    parts = [
        shapes[0] if shapes else _spelled(field.annotation),
        limits,
        f"in {unit}" if unit else "",
        default,
    ]
    return ", ".join(part for part in parts if part)


def _spelled(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return next(str(item) for item in arguments if isinstance(item, Shape))
    if origin is Literal:
        return " | ".join(arguments)
    if origin in (UnionType, Union):
        return " | ".join(_spelled(part) for part in arguments)
    return PLAIN[annotation]


# --- what is wrong -----------------------------------------------------------------------------------


def worth_saying(error: ValidationError) -> list[Any]:
    """All findings, except keys that are missing because they are misspelt: those are reported as unknown."""
    findings = error.errors(include_url=False)
    unknown = [spelt(found["loc"]) for found in findings if found["type"] == "extra_forbidden"]
    meant = {key for name in unknown for key in difflib.get_close_matches(name, [_nearest(name)], cutoff=0.8)}
    return [found for found in findings if found["type"] != "missing" or spelt(found["loc"]) not in meant]


def problem(details: Any, tree: Any, places: dict[KeyPath, str]) -> str:
    """Describe a finding of pydantic: where, what was found, what was expected."""
    at: KeyPath = tuple(part for part in details["loc"] if not str(part).startswith("function-"))
    where, dotted = place_of(at, places), spelt(at)
    if details["type"] == "missing" and dotted in dict(known_keys()):
        return f"{where}: '{dotted}' is missing: {dict(known_keys())[dotted].description}"
    if details["type"] == "extra_forbidden":
        return f"{where}: unknown key '{dotted}'; the nearest known key is '{_nearest(dotted)}'"
    if details["type"] == "missing":  # for example the third of three numbers: name the list
        at, dotted = at[:-1], spelt(at[:-1])
    if details["type"] in ("missing", "too_long", "tuple_type") and (listed := _list_of(dotted)):
        return f"{where}: {dotted}: found {brief(_at(tree, at))}; {listed} were expected"
    found = _at(tree, at)
    if details["type"] == "model_type":
        return f"{where}: {dotted}: found {brief(found)}; a section with keys was expected"
    expected = re.sub(r"^Value error, ", "", details["msg"])
    expected = re.sub(r"^Field required$", "more values were expected", expected)
    expected = re.sub(r"^Input should be (.*)$", r"\1 was expected", expected)
    expected = re.sub(r"^Input should (.*)$", r"it should \1", expected)
    return f"{where}: {dotted}: found {brief(found)}; {expected}" if dotted else f"{where}: {expected}"


def _at(tree: Any, at: KeyPath) -> Any:
    for name in at:
        tree = tree[name]
    return tree


def _list_of(dotted: str) -> str | None:
    """How many values a key takes, and which; None if it does not take a list of a fixed length."""
    field = dict(known_keys()).get(dotted)
    kinds = (
        [field.annotation, *get_args(field.annotation)] if field else []
    )  # the type itself, or one of a union
    for kind in kinds:
        notes = field.metadata if field else []
        if get_origin(kind) is Annotated:
            kind, *notes = get_args(kind)
        items = get_args(kind) if get_origin(kind) is tuple else ()
        if items and ... not in items:
            shape = next((f", {note}," for note in notes if isinstance(note, Shape)), "")
            return f"{len(items)} values{shape}"
    return None


def _nearest(dotted: str) -> str:
    """Find a similar key in the same section, else the same name elsewhere, else the most similar key."""
    keys = [name for name, _ in known_keys()]
    parent, _, last = dotted.rpartition(".")
    siblings = [name for name in keys if name.rpartition(".")[0] == parent]
    elsewhere = [name for name in keys if name.rpartition(".")[2] == last]
    alike = difflib.get_close_matches(dotted, siblings, 1) or elsewhere
    return (alike or difflib.get_close_matches(dotted, keys, 1, cutoff=0))[0]


def place_of(at: KeyPath, places: dict[KeyPath, str]) -> str:
    return next(places[at[:depth]] for depth in range(len(at), -1, -1) if at[:depth] in places)


def spelt(at: KeyPath) -> str:
    return ".".join(map(str, at))


def brief(value: Any) -> str:
    text = repr(without_passwords(value))
    return text if len(text) <= 80 else f"{text[:77]}..."


def broken_yaml(where: str | Path, error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    line = f":{mark.line + 1}" if mark is not None and not str(where).startswith("override") else ""
    reason = getattr(error, "problem", None) or " ".join(str(error).split())
    return f"{where}{line}: broken YAML: {reason}"
