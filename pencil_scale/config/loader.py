"""Reads a YAML file and dotted overrides into a frozen `Config`, or reports every problem in one line each.

    config = load_config("configs/demo.yaml", ["stages.pencil.epochs=2", "data.shards=@list.txt"])
    describe(config)["stages.pencil.epochs"]       # "2"; the value of a ${VARIABLE} is never shown

Scalars follow YAML 1.2 (`1e-3` is a number, `010` and `1:30` are not, `yes` and `off` are text), and a
duplicate key is an error. Every value may contain `${VARIABLE}`; the type of the key decides how the result
is read.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pencil_scale.config.keys import KeyPath, Origins, brief, origin, problems, spelt, takes_text
from pencil_scale.config.settings import Config
from pencil_scale.config.values import Settings
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import without_passwords

VARIABLE = re.compile(r"\$\{(\w+)\}")
DEEPEST = 20
MOST_VALUES = 10_000


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read the file, apply the overrides, substitute variables, and check every key."""
    origins: Origins = {(): str(path)}
    tree = _read_file(str(path), origins)
    for override in overrides:
        _override(tree, override, origins)
    values, variables = _substitute(tree, origins)
    try:
        # JSON, because a strict model takes lists for tuples only from there.
        config = Config.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise PencilError("\n".join(problems(error, tree, origins))) from None
    for at in variables:
        section: Any = config
        written: Any = tree
        while isinstance(inner := getattr(section, str(at[0]), None), Settings):
            section, written, at = inner, written[at[0]], at[1:]
        section._written[at[0]] = str(without_passwords(written[at[0]]))
    return config


def describe(config: Settings) -> dict[str, str]:
    """Give every key and its value as text that may be logged."""
    return {dotted: shown for dotted, _, shown in _entries(config)}


def masked(text: str, config: Settings) -> str:
    """Replace the values of variables in a text by the variables."""
    for _, value, shown in _entries(config):
        for secret in value if isinstance(value, tuple) else (value,):
            if "${" in shown and isinstance(secret, str) and secret not in shown:
                text = text.replace(secret, shown if secret is value else "${...}")
    return text


def _entries(section: Settings, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Give every key, dotted, with its value and with the text that may be shown for it."""
    for name, value, shown in section.entries():
        if isinstance(value, Settings):
            yield from _entries(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, str(shown)


# --- reading -----------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for _tag, _pattern, _first in (
    ("null", r"(~|null|)$", ["~", "n", ""]),
    ("bool", r"(true|false)$", ["t", "f"]),
    ("int", r"[-+]?(0|[1-9][0-9]*)$", list("-+0123456789")),
    ("float", r"[-+]?((\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|\.inf|\.nan)$", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


def _read_file(path: str, origins: Origins) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PencilError(f"{path}: cannot be read as a config file: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PencilError(f"{path}: byte {error.start:,} is not UTF-8; save the config as UTF-8") from None
    tree = _parsed(text, (), path, origins)
    if not isinstance(tree, dict):
        raise PencilError(
            f"{path}: contains {brief(tree)}; sections such as 'run:' and 'data:' were expected"
        )
    return tree


def _parsed(text: str, at: KeyPath, source: str, origins: Origins) -> Any:
    """Read YAML from a file or an override into dicts, lists and scalars, and note where each key is set."""
    try:
        node = _Loader(text).get_single_node()
        return {} if node is None else _plain(node, at, source, origins)
    except (yaml.YAMLError, RecursionError) as error:
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        line = _line(source, getattr(error, "problem_mark", None))
        raise PencilError(f"{line}: broken YAML: {reason}") from None


def _line(source: str, mark: Any) -> str:
    return source if mark is None or source.startswith("override ") else f"{source}:{mark.line + 1}"


def _plain(node: yaml.Node, at: KeyPath, source: str, origins: Origins) -> Any:
    line = _line(source, node.start_mark)
    if at:
        origins[at] = line
    if len(at) > DEEPEST or len(origins) > MOST_VALUES:
        raise PencilError(
            f"{line}: nested more than {DEEPEST} levels deep, or more than {MOST_VALUES:,} values"
        )
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*at, n), source, origins) for n, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return _scalar(node)
    section: dict[str, Any] = {}
    for name, value in node.value:
        line = _line(source, name.start_mark)
        if not isinstance(name, yaml.ScalarNode):
            raise PencilError(f"{line}: a key is a list or a section; a plain word was expected")
        if name.value in section:
            raise PencilError(f"{line}: duplicate key '{spelt((*at, name.value))}'")
        section[name.value] = _plain(value, (*at, name.value), source, origins)
        origins[*at, name.value] = line
    return section


def _scalar(node: yaml.Node) -> Any:
    try:
        return _Loader("").construct_object(node)
    except ValueError:
        return node.value  # a number with too many digits, which the key will refuse


def _scalar_of(text: str) -> Any:
    """Read a text as an unquoted scalar of YAML."""
    tag = yaml.SafeLoader.resolve(_Loader(""), yaml.ScalarNode, text, (True, False))
    return _scalar(yaml.ScalarNode(tag, text))


def _override(tree: dict[str, Any], override: str, origins: Origins) -> None:
    """Set one `a.b.c=value`; lists, sections and quotes are read as YAML, the rest as a scalar."""
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        shown = without_passwords(override)
        raise PencilError(f"override '{shown}': KEY=VALUE was expected, as in stages.pencil.epochs=2")
    at, source, section = tuple(dotted.split(".")), f"override '{dotted}'", tree
    for depth, name in enumerate(at[:-1], 1):
        if section.get(name) is None:
            section[name] = {}
            origins[at[:depth]] = source
        section = section[name]
        if not isinstance(section, dict):
            taken = spelt(at[:depth])
            raise PencilError(f"{source}: '{taken}' is a value, not a section; set '{taken}' itself")
    origins[at] = source
    is_yaml = text.startswith(("[", "{", '"', "'"))
    section[at[-1]] = _parsed(text, at, source, origins) if is_yaml else _scalar_of(text)


# --- variables ---------------------------------------------------------------------------------------


def _substitute(tree: Any, origins: Origins) -> tuple[Any, list[KeyPath]]:
    """Replace every `${VARIABLE}` by its value in the environment; also list the keys that had one.

    The value is text; unless its key takes text, it is read as YAML.
    """
    found: list[KeyPath] = []

    def filled(value: Any, at: KeyPath) -> Any:
        if isinstance(value, dict):
            return {name: filled(inner, (*at, name)) for name, inner in value.items()}
        if isinstance(value, list):
            return [filled(inner, (*at, n)) for n, inner in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        where = f"{origin(at, origins)}: {spelt(at)}"
        if "${" in VARIABLE.sub("", value):
            raise PencilError(f"{where}: found {brief(value)}; a variable is written ${{NAME}}")
        for name in VARIABLE.findall(value):
            if name not in os.environ:
                raise PencilError(f"{where}: the environment variable {name} is not set")
        found.append(at)
        text = VARIABLE.sub(lambda match: os.environ[match[1]], value)
        return text if takes_text(at) else _scalar_of(text)

    return filled(tree, ()), found
