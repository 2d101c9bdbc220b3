"""Which Python, Ray and MLflow this release was tested with; outside them a job stops at its start.

Job folder: where Ray unpacks what `ray job submit --working-dir .` sent, and which it removes again.

What a job writes there by a relative path is gone with it, though the job says that all went well; so jobs
refuse it. Small files that were sent along, such as a config or a class list, may be read.

    refuse_lost("run.storage", "runs/demo")

The front door of every job: `python -m MODULE CONFIG [key=value ...]`.

Bad input ends with one line a problem on stderr and exit code 2, never with a traceback; anything else that
goes wrong is ours, and keeps its traceback.
"""

import argparse
import platform
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.specifiers import SpecifierSet

from pencil_scale.config.help import help_page
from pencil_scale.config.loader import load_config, masked
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import without_passwords

PYTHON = ">=3.11,<3.13"
RAY = ">=2.60,<3"
MLFLOW = ">=3.17,<4"  # client and server alike


def check_versions() -> None:
    """Stop with one line if Python, Ray or the MLflow client is outside the supported range."""
    require("Python", platform.python_version(), PYTHON)
    require("Ray", _installed("ray"), RAY)
    require("MLflow", _installed("mlflow", "mlflow-skinny"), MLFLOW)


def require(thing: str, found: str | None, supported: str) -> None:
    """Raise unless the version found lies within the supported range."""
    if found is None:
        raise PencilError(f"{thing} is not installed; {thing} {supported} is needed: run 'make install'")
    if not SpecifierSet(supported).contains(found, prereleases=True):
        raise PencilError(f"{thing} {found} found; {thing} {supported} is supported: install such a version")


def _installed(*names: str) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


UNPACKED = "working_dir_files"  # Ray's own name for the folder that has those of all jobs
LOCAL = re.compile(r"^((file|local)://|sqlite(\+\w+)?:///)")


def refuse_lost(name: str, *paths: str | None) -> None:
    """Refuse paths that lie in the folder of a submitted job; `name` is what people call them by."""
    for path in filter(None, paths):
        local = LOCAL.sub("", path, count=1)
        if "://" not in local and UNPACKED in Path(local).expanduser().absolute().parts:
            raise PencilError(
                f"{name}: {path} lies in the folder of this job, which Ray removes; give a URL, or an "
                "absolute path that every node sees"
            )


HELD = 3  # the exit code of a job whose labels wait for a person


def run_job(
    run: Callable[..., object],
    argv: Sequence[str] | None,
    *,
    module: str,
    what: str,
    words: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> int:
    """Read the config the command line names, run the job on it, and give the exit code.

    `words` are arguments of the job's own that follow the config, and `flags` its switches, each with its
    help: "dry_run" is --dry-run. Both arrive as keywords.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=what,
        epilog=help_page(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file of the run, such as configs/demo.yaml")
    for name, meaning in (words or {}).items():
        parser.add_argument(name, metavar=name.upper(), help=meaning)
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="keys to set over the file's"
    )
    for name, meaning in (flags or {}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=meaning)
    given = vars(parser.parse_intermixed_args(argv))
    path, overrides = given.pop("config"), given.pop("overrides")

    def work() -> None:
        config = load_config(path, overrides)
        try:
            refuse_lost("run.storage", config.run.storage)
            refuse_lost("tracking.uri", config.tracking.uri)
            run(config, **given)
        except PencilError as error:
            raise PencilError(masked(str(error), config)) from error

    return exit_code(work)


def say(text: str) -> None:
    """Print a line at once, without the credentials of the URLs in it."""
    print(without_passwords(text), flush=True)


def exit_code(work: Callable[[], object]) -> int:
    """Do the work; turn an error a person can act on into its lines, without credentials, and exit code 2."""
    if threading.current_thread() is threading.main_thread():
        # Like Ctrl-C, SIGTERM unwinds the job, so that it releases its leases.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        check_versions()
        work()
    except PencilError as error:
        for line in str(error).splitlines():
            print(f"error: {without_passwords(line)}", file=sys.stderr)
        return 2
    return 0
