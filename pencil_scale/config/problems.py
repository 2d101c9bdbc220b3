"""What is wrong with a config, in words: where it stands, what was found, what was expected."""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from pencil_scale.config.settings import Config
from pencil_scale.config.values import Settings, Shape
from pencil_scale.storage.urls import without_passwords

KeyPath = tuple[str | int, ...]


def known_keys(section: type[Settings] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """List every key below a section, dotted, with what is known of it."""
    for name, field in section.model_fields.items():
        dotted = f"{prefix}{field.alias or name}"
        yield dotted, field
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            yield from known_keys(field.annotation, f"{dotted}.")


def worth_saying(error: ValidationError) -> list[Any]:
    """All findings, less keys that are missing only because they are misspelt: those are named already."""
    findings = error.errors(include_url=False)
    unknown = [spelt(found["loc"]) for found in findings if found["type"] == "extra_forbidden"]
    meant = {key for name in unknown for key in difflib.get_close_matches(name, [_nearest(name)], cutoff=0.8)}
    return [found for found in findings if found["type"] != "missing" or spelt(found["loc"]) not in meant]


def problem(details: Any, tree: Any, places: dict[KeyPath, str]) -> str:
    """Say one of pydantic's findings in our words: where, what was found, what was expected."""
    at: KeyPath = tuple(part for part in details["loc"] if not str(part).startswith("function-"))
    where, dotted = place_of(at, places), spelt(at)
    if details["type"] == "missing" and dotted in dict(known_keys()):
        return f"{where}: '{dotted}' is missing: {dict(known_keys())[dotted].description}"
    if details["type"] == "extra_forbidden":
        return f"{where}: unknown key '{dotted}'; the nearest known key is '{_nearest(dotted)}'"
    if details["type"] == "missing":  # the third of three numbers, say: the list is what is wrong
        at, dotted = at[:-1], spelt(at[:-1])
    if details["type"] in ("missing", "too_long", "tuple_type") and (listed := _list_of(dotted)):
        return f"{where}: {dotted}: found {brief(_at(tree, at))}; {listed} were expected"
    found = _at(tree, at)
    if details["type"] == "model_type":
        return f"{where}: {dotted}: found {brief(found)}; a section with keys of its own was expected"
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
    """Say how many values a key takes, and which; None for a key that takes no list of a fixed length."""
    field = dict(known_keys()).get(dotted)
    kinds = [field.annotation, *get_args(field.annotation)] if field else []  # itself, or one of a union
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
    """Prefer a like-named key of the same section, then the same name elsewhere, then the most alike."""
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
