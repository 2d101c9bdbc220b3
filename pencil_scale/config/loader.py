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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pencil_scale.config.keys import KeyPath, brief, broken_yaml, place_of, problem, spelt, worth_saying
from pencil_scale.config.settings import Config
from pencil_scale.config.values import Settings
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import without_passwords

VARIABLE = re.compile(r"\$\{(\w+)\}")
DEEPEST = 20
MOST_VALUES = 10_000


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read the file, apply the overrides, substitute variables, and check every key."""
    tree, places = _read_file(path)
    for override in overrides:
        _override(tree, places, override)
    values, variables = _substitute(tree, places)
    try:
        config = _validated(values, variables)
    except ValidationError as error:
        problems = [problem(details, tree, places) for details in worth_saying(error)]
        raise PencilError("\n".join(dict.fromkeys(problems))) from None
    _remember_as_written(config, tree, variables)
    return config


def describe(config: Settings) -> dict[str, str]:
    """Give every key and its value as text that may be logged."""
    shown: dict[str, str] = {}
    for name, value in config.__repr_args__():
        field = type(config).model_fields[name]
        if isinstance(value, Settings):
            shown |= {f"{name}.{inner}": text for inner, text in describe(value).items()}
        else:
            shown[field.alias or name] = str(value)
    return shown


def masked(text: str, config: Settings) -> str:
    """Replace the values of variables in a text by the variables."""
    for name, value in config:
        if isinstance(value, Settings):
            text = masked(text, value)
        elif name in config._written:
            written = config._written[name]
            found = value if isinstance(value, tuple) else (value,)
            secrets = [part for part in found if isinstance(part, str) and part not in written]
            for secret in secrets:
                text = text.replace(secret, written if len(found) == 1 else "${...}")
    return text


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


def _read_file(path: str | Path) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        loader = _Loader(text)
        root = loader.get_single_node()
    except FileNotFoundError:
        raise PencilError(f"{path}: no such config file in the current folder") from None
    except OSError as error:
        raise PencilError(f"{path}: cannot be read as a config file: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PencilError(f"{path}: byte {error.start:,} is not UTF-8; save the config as UTF-8") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise PencilError(broken_yaml(path, error)) from None
    places: dict[KeyPath, str] = {}
    tree = _plain(loader, root, (), str(path), places) if root is not None else {}
    places[()] = str(path)
    if not isinstance(tree, dict):
        raise PencilError(
            f"{path}: contains {brief(tree)}; sections such as 'run:' and 'data:' were expected"
        )
    return tree, places


def _plain(loader: _Loader, node: yaml.Node, at: KeyPath, file: str, places: dict[KeyPath, str]) -> Any:
    """Turn a YAML node into dicts, lists and scalars, and record the line of every key."""
    places[at] = place = f"{file}:{node.start_mark.line + 1}"
    if len(at) > DEEPEST or len(places) > MOST_VALUES:
        raise PencilError(
            f"{place}: nested more than {DEEPEST} levels deep, or more than {MOST_VALUES:,} values"
        )
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, item, (*at, n), file, places) for n, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        try:
            return loader.construct_object(node)
        except ValueError:
            return node.value  # a number with too many digits, which the key will refuse
        except yaml.YAMLError as error:
            raise PencilError(broken_yaml(file, error)) from None
    section: dict[str, Any] = {}
    for name, value in node.value:
        place = f"{file}:{name.start_mark.line + 1}"
        if not isinstance(name, yaml.ScalarNode):
            raise PencilError(f"{place}: a key is a list or a section; a plain word was expected")
        if name.value in section:
            raise PencilError(f"{place}: duplicate key '{spelt((*at, name.value))}'")
        section[name.value] = _plain(loader, value, (*at, name.value), file, places)
        places[*at, name.value] = place
    return section


def _scalar(text: str) -> Any:
    """Read a scalar as YAML does; a number with too many digits stays text."""
    loader = _Loader("")
    tag = yaml.SafeLoader.resolve(loader, yaml.ScalarNode, text, (True, False))
    try:
        return loader.construct_object(yaml.ScalarNode(tag, text))
    except ValueError:
        return text


def _override(tree: dict[str, Any], places: dict[KeyPath, str], override: str) -> None:
    """Set one `a.b.c=value`; lists, sections and quotes are read as YAML, the rest as a scalar."""
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        shown = without_passwords(override)
        raise PencilError(f"override '{shown}': KEY=VALUE was expected, as in stages.pencil.epochs=2")
    *parents, last = dotted.split(".")
    place = f"override '{dotted}'"
    section: Any = tree
    for depth, name in enumerate(parents, 1):
        if section.get(name) is None:
            section[name] = {}
            places[tuple(parents[:depth])] = place
        section = section[name]
        if not isinstance(section, dict):
            taken = spelt(tuple(parents[:depth]))
            raise PencilError(f"{place}: '{taken}' is a value, not a section; set '{taken}' itself")
    try:
        value = _Loader(text).get_single_node() if text[:1] in tuple("[{\"'") else None
    except (yaml.YAMLError, RecursionError) as error:
        raise PencilError(broken_yaml(place, error)) from None
    path = (*parents, last)
    places[path] = place
    section[last] = _scalar(text) if value is None else _plain(_Loader(""), value, path, place, {})


# --- variables ---------------------------------------------------------------------------------------


def _substitute(tree: Any, places: dict[KeyPath, str]) -> tuple[Any, list[KeyPath]]:
    """Replace every `${VARIABLE}` by its value in the environment; also give the keys that had one."""
    found: list[KeyPath] = []

    def filled(value: Any, at: KeyPath) -> Any:
        if isinstance(value, dict):
            return {name: filled(inner, (*at, name)) for name, inner in value.items()}
        if isinstance(value, list):
            return [filled(inner, (*at, n)) for n, inner in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        if "${" in VARIABLE.sub("", value):
            where = place_of(at, places)
            raise PencilError(f"{where}: {spelt(at)}: found {brief(value)}; a variable is written ${{NAME}}")
        found.append(at)
        for name in VARIABLE.findall(value):
            if name not in os.environ:
                where = place_of(at, places)
                raise PencilError(f"{where}: {spelt(at)}: the environment variable {name} is not set")
        return VARIABLE.sub(lambda match: os.environ[match[1]], value)

    return filled(tree, ()), found


def _validated(values: Any, variables: list[KeyPath]) -> Config:
    try:
        return Config.model_validate_json(json.dumps(values))
    except ValidationError as error:
        # The value of a variable is text. Where the key takes something else, read the text as YAML.
        wrong = [at for at in variables if any(at[: len(e["loc"])] == e["loc"] for e in error.errors())]
        if not wrong:
            raise
    for at in wrong:
        holder = values
        for name in at[:-1]:
            holder = holder[name]
        holder[at[-1]] = _scalar(holder[at[-1]])
    return Config.model_validate_json(json.dumps(values))


def _remember_as_written(section: Settings, tree: Any, variables: list[KeyPath]) -> None:
    for name, field in type(section).model_fields.items():
        spoken = field.alias or name
        within = [at[1:] for at in variables if at[0] == spoken]
        value = getattr(section, name)
        if within and isinstance(value, Settings):
            _remember_as_written(value, tree[spoken], within)
        elif within:
            section._written[name] = str(without_passwords(tree[spoken]))
