"""Judged file: what an audit came to, from the decisions that the review page saved.

changed, unchanged = read_judged("decisions.json")
findings = study(changed, unchanged)
"""

import json
from typing import Any

from pencil_scale.reading.byte_source import open_source, version_of
from pencil_scale.review.audit import CHANGED, UNCHANGED, Stratum
from pencil_scale.schema import PencilError

KIND, VERSION = "pencil_scale decisions", 2


class JudgedError(PencilError):
    """Decisions from which no audit follows."""


def read_judged(url: str) -> tuple[Stratum, Stratum]:
    """Count what was judged in the page's audit: the changed labels, and the unchanged."""
    found = _read(url)
    try:
        judged = [entry for entry in found["decisions"] if entry.get("audit")]
        strata = [_stratum(found["audit"][kind], judged, kind) for kind in (CHANGED, UNCHANGED)]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise JudgedError(f"{url}: entries are missing or odd ({error!r}); save it again") from error
    if not judged:
        raise JudgedError(f"{url}: nothing was judged in an audit; choose Audit in the page, judge, and save")
    return strata[0], strata[1]


def _stratum(known: dict[str, Any], judged: list[dict[str, Any]], kind: str) -> Stratum:
    here = [entry for entry in judged if entry["audit"] == kind]
    if not len(here) <= int(known["drawn"]) <= int(known["all"]):
        raise ValueError(f"{len(here)} judged of {known['drawn']} drawn of {known['all']} {kind}")
    right = sum(entry["class"] is not None and entry["class"] == entry["suggested"] for entry in here)
    return Stratum(right, len(here), int(known["all"]))


def _read(url: str) -> Any:
    if version_of(url) is None:
        raise JudgedError(f"{url}: no such file, seen from the folder you are in")
    with open_source(url) as source:
        data = source.read(0, source.num_bytes)
    try:
        found = json.loads(data)
    except ValueError as error:
        raise JudgedError(f"{url}: no whole JSON file ({error}); save it again") from error
    if not isinstance(found, dict) or (found.get("kind"), found.get("version")) != (KIND, VERSION):
        raise JudgedError(f"{url}: not a file of decisions of version {VERSION} that the review page saved")
    return found
