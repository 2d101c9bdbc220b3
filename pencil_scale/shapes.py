"""The values of a config that no plain type says: URLs, label sources, curves, ranges of workers.

Each is read at the door, by a function that either gives the finished value or says in one sentence what
was expected. `Shape` is how the help page spells it.
"""

import re
from typing import Annotated, Any, TypeGuard

from pydantic import AfterValidator, PlainValidator

from pencil_scale.curves import Curve, Line, Steps


class Shape(str):
    """How the help page spells a type that no plain annotation says."""


# People write passwords unescaped, so where the credentials of a URL end is ambiguous. After `user:`, all up
# to the last `@` of the URL is the password, which may contain `/` and `@`: that may hide part of a path, but
# never shows a password. A colon with only a port after it is no password. Without a colon, a token ends at
# the last `@` before the first `/`, so s3://bucket/a@b/x.tar stays. A match never reaches into the next URL.
CREDENTIALS = re.compile(
    r"://(?:(?P<user>[^/@:\s\[]*:)(?!//|\d{1,5}(?:[/?#\s]|$))(?:(?!://)\S)+@|[^/?#\s]+@)",
)
SECRET_IN_QUERY = re.compile(
    r"(?i)([?&][^=&\s]*(?:secret|token|password|signature|sig|key)[^=&\s]*=)[^&#\s'\"]+"
)


def without_passwords(value: Any) -> Any:
    """Blank out the passwords, signatures and tokens in every URL of a text."""
    if isinstance(value, list | tuple):
        return type(value)(without_passwords(item) for item in value)
    if not isinstance(value, str):
        return value
    value = CREDENTIALS.sub(lambda found: f"://{found['user'] or ''}***@", value)
    return SECRET_IN_QUERY.sub(r"\1***", value)


def _one_or_many(value: object) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value
    if isinstance(found, list) and found and all(isinstance(item, str) and item for item in found):
        return tuple(found)
    raise ValueError("one URL or a list of URLs was expected")


def _curve(value: object) -> Curve:
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
    raise ValueError(
        "a number from 0, a line {start: 3000, end: 0} or steps [[0, 3000], [5, 500]] was expected"
    )


def _is_amount(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _is_step(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and type(value[0]) is int and _is_amount(value[1])


def _worker_count(value: object) -> tuple[int, int]:
    bounds = [value, value] if type(value) is int else value
    if isinstance(bounds, list) and [type(bound) for bound in bounds] == [int, int]:
        fewest, most = bounds
        if 1 <= fewest <= most:
            return fewest, most
    raise ValueError("a number from 1, or [fewest, most] for an elastic run, was expected")


def _one_of(pattern: str, spelled: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{spelled} was expected")
        return value

    return AfterValidator(check)


URLS = Annotated[tuple[str, ...], PlainValidator(_one_or_many), Shape("URL or list of URLs")]
IDENTITY = "key | shard_key | json:FIELD | sha256"
Identity = Annotated[str, _one_of(r"key|shard_key|sha256|json:.+", IDENTITY), Shape(IDENTITY)]
LABEL = "cls | txt | json:FIELD | file:URL | table:URL#id,label"
Label = Annotated[str, _one_of(r"cls|txt|json:.+|file:.+|table:.+#[^,#]+,[^,#]+", LABEL), Shape(LABEL)]
CURVE = "number | {start: A, end: B} | [[epoch, value], ...]"
LambdaCurve = Annotated[Curve, PlainValidator(_curve), Shape(CURVE)]
WORKERS = "whole number | [fewest, most]"
WorkerCount = Annotated[tuple[int, int], PlainValidator(_worker_count), Shape(WORKERS)]
NAME = "a name of letters, digits, '.', '_' and '-'"
RunName = Annotated[str, _one_of(r"[A-Za-z0-9][A-Za-z0-9._-]*", NAME), Shape("name")]
