"""Identity: which text names a sample, by the policy the config chose.

WebDataset keys repeat between shards and change between crawls, so nobody but the owner of the data can
say what makes two samples the same one.
"""

from collections.abc import Callable
from typing import Any

from pencil_scale.indexing.raw_text import from_json
from pencil_scale.schema import PencilError

# key of the sample, its JSON or None, hex sha256 of its image or None -> id or None
IdPolicy = Callable[[str, Any, str | None], str | None]


def id_policy(identity: str, shard_url: str) -> IdPolicy:
    """Make the policy `key`, `shard_key`, `json:FIELD` or `sha256` for one shard."""
    if identity == "key":
        return lambda key, fields, digest: key
    if identity == "shard_key":
        stem = shard_stem(shard_url)
        return lambda key, fields, digest: f"{stem}/{key}"
    if identity == "sha256":
        return lambda key, fields, digest: digest
    if identity.startswith("json:"):
        name = identity.removeprefix("json:")
        return lambda key, fields, digest: _text(json_field(fields, name))
    raise PencilError(f"data.identity: {identity!r} is none of key, shard_key, json:FIELD, sha256")


def needs_json(policy: str) -> bool:
    """Tell whether a sample's JSON must be read for this identity or label."""
    return policy.startswith("json:")


def shard_stem(url: str) -> str:
    """Give a shard's own name: its last part, without `.tar`."""
    return url.rstrip("/").rpartition("/")[2].removesuffix(".tar")


def json_field(fields: Any, name: str) -> Any:
    """Find a field by its name, or by a dotted path into nested objects; None when it is not there."""
    if not isinstance(fields, dict):
        return None
    if name in fields:
        return fields[name]
    head, dot, rest = name.partition(".")
    return json_field(fields.get(head), rest) if dot else None


def _text(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return from_json(str(value)) or None
