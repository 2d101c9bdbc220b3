"""The command `pencil-scale`: lists the jobs, runs one of them, and prints example configs.

    pencil-scale                          # the jobs, one per line
    pencil-scale train mine.yaml          # the same as python -m pencil_scale.train mine.yaml
    pencil-scale configs                  # the example configs
    pencil-scale configs demo > mine.yaml

A job is imported only when it runs, so the list appears at once.
"""

import ast
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from itertools import takewhile
from pathlib import Path

from pencil_scale.config.command import PROGRAM, as_started, exit_code
from pencil_scale.storage.errors import PencilError

HERE = Path(__file__).parent
CONFIGS = HERE / "example_configs"  # a link to configs/ in a checkout; a copy in an installed package
TRAIN = Path("pencil_scale/train/__main__.py")
# In the order in which they are used; any other job comes last.
ORDER = [
    "demo",
    "demo_photos",
    "init",
    "make_shards",
    "index_shards",
    "extract_features",
    "import_features",
    "export_features",
    "find_similar",
    "train",
    "review_report",
    "pin_labels",
    "export_labels",
    "balance_subset",
]


def main(argv: Sequence[str] | None = None) -> int:
    """List the jobs, run one, or print a config; return the exit code."""
    job, *rest = (sys.argv[1:] if argv is None else [*argv]) or ["--help"]
    files = job_files()
    if job in ("--help", "-h", "help"):
        print(job_list(files))
        return 0
    if job == "configs":
        return exit_code(lambda: print_configs(rest))
    if job not in files:
        near = get_close_matches(job, [*files, "configs"], 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        print(f"error: '{job}' is not a job{hint} `{PROGRAM}` lists all jobs", file=sys.stderr)
        return 2
    module = import_module("pencil_scale.train.__main__" if job == "train" else f"pipelines.{job}")
    return int(module.main(rest))


def job_files() -> dict[str, Path]:
    """The file of every job, by its name."""
    found = {path.stem: path for path in HERE.glob("[a-z]*.py") if "\ndef main(" in path.read_text()}
    found["train"] = HERE.parent / TRAIN
    return {name: found[name] for name in sorted(found, key=lambda name: (_place(name), name))}


def job_list(files: dict[str, Path]) -> str:
    """Each job with the first line of its docstring."""
    about = {name: ast.get_docstring(ast.parse(path.read_text())) or "" for name, path in files.items()}
    about["configs"] = "List the example configs, or print one."
    lines = [f"  {name:<16} {text.splitlines()[0]}" for name, text in about.items()]
    first = f"usage: {PROGRAM} JOB ...       ({PROGRAM} JOB --help: arguments and config keys of a job)"
    return "\n".join([first, "", *lines])


def print_configs(names: Sequence[str]) -> None:
    """List the example configs, each with its first sentence, or print those that are named."""
    files = {path.stem: path for path in sorted(CONFIGS.glob("*.yaml"))}
    for name in names:
        name = name.removesuffix(".yaml")
        if name not in files:
            raise PencilError(f"configs: there is no '{name}'; there are {', '.join(files)}")
        print(as_started(files[name].read_text()).replace("configs/", ""), end="")
    for name, path in files.items() if not names else ():
        comment = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
        about = " ".join(line.removeprefix("#").strip() for line in comment)
        print(f"{name:<16} {about.partition('. ')[0].removesuffix('.')}")


def _place(name: str) -> int:
    return ORDER.index(name) if name in ORDER else len(ORDER)


if __name__ == "__main__":
    sys.exit(main())
