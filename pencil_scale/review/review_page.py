"""Review page: one HTML file with its data, style and script inside, that fetches nothing from anywhere.

A content security policy allows exactly this script and this style, by their hashes, and pictures that are in
the page. What came out of shards is data to the script, which only ever sets it as text.

    html = review_page(data, Heading(...))
"""

import base64
import hashlib
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from pencil_scale.review.page_data import as_json

SCRIPTS = ("base.js", "charts.js", "matrix.js", "decisions.js", "gallery.js", "audit.js", "main.js")


@dataclass(frozen=True)
class Fact:
    """One of the large figures at the top."""

    name: str
    value: str
    detail: str


@dataclass(frozen=True)
class Heading:
    """What the page says before anything is drawn."""

    run: str
    created: str
    catalogue_version: int
    facts: tuple[Fact, ...]
    since: str | None = None  # the labels compared with
    notes: tuple[str, ...] = ()


def review_page(data: dict[str, Any], heading: Heading) -> str:
    """Spell the page."""
    style = _read("page.css")
    script = "(() => {\n'use strict';\n" + "\n".join(_read(name) for name in SCRIPTS) + "\n})();\n"
    known = {"run": heading.run, "created": heading.created, "since": heading.since}
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(_read("page.html")).render(
        **asdict(heading),
        policy=content_policy(style, script),
        style=Markup(style),
        script=Markup(script),
        data=Markup(as_json(data | known)),
    )


def content_policy(style: str, script: str) -> str:
    """Allow this style, this script, and pictures inside the page; nothing else, and no network."""
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _read(name: str) -> str:
    return (resources.files("pencil_scale.review") / "page" / name).read_text()
