"""The `ray job submit` of docs/operations.md, with the variables that a job on object storage needs.

words = documented(values, "pipelines.export_labels", "config.yaml")    # as the shell would split it
"""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXAMPLE = re.compile(r"^```\n(ray job submit .*?)\n```", re.MULTILINE | re.DOTALL)
VARIABLES, ENTRY = "--runtime-env-json", ["--", "python", "-m"]


def variables() -> dict[str, str]:
    """The variables of the example, with its values."""
    words = _example()
    found: dict[str, str] = json.loads(words[words.index(VARIABLES) + 1])["env_vars"]
    return found


def documented(values: Mapping[str, str], job: str, *words: str) -> list[str]:
    """The example with other values of its variables, and another job."""
    found = _example()
    found[found.index(VARIABLES) + 1] = json.dumps({"env_vars": dict(values)})
    entry = found.index("--")
    assert found[entry : entry + len(ENTRY)] == ENTRY
    return [*found[: entry + len(ENTRY)], job, *words]


def _example() -> list[str]:
    (text,) = EXAMPLE.findall((ROOT / "docs" / "operations.md").read_text())
    return shlex.split(text.replace("\\\n", " "))
