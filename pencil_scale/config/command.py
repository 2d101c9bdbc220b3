"""The command line of every job: `python -m MODULE CONFIG [key=value ...]`, or `pencil-scale JOB ...`.

Bad input ends with one line per problem on stderr and exit code 2, never with a traceback. Any other failure
is a bug, and keeps its traceback. A job stops at its start if Python, Ray or MLflow is outside the tested
range.
"""

import argparse
import logging
import platform
import re
import shlex
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.specifiers import SpecifierSet

from pencil_scale.config.keys import help_page
from pencil_scale.config.loader import describe, load_config, masked
from pencil_scale.config.settings import Config
from pencil_scale.storage.errors import HeldError, PencilError
from pencil_scale.storage.retries import RefusedError, set_retry_s, store_of
from pencil_scale.storage.urls import without_passwords

PROGRAM = "pencil-scale"
PYTHON = ">=3.11,<3.15"
RAY = ">=2.60,<3"
MLFLOW = ">=3.17,<4"  # client and server
HELD = 3  # the exit code of a job whose labels wait for a person
UNPACKED = "working_dir_files"  # Ray unpacks the folders of submitted jobs in a folder of this name
TYPED: ContextVar[str] = ContextVar("config as typed", default="CONFIG")
LOCAL = re.compile(r"^((file|local)://|sqlite(\+\w+)?:///)")


def run_job(
    run: Callable[..., object],
    argv: Sequence[str] | None,
    *,
    module: str,
    what: str,
    words: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> int:
    """Read the config named on the command line, run the job, and return the exit code.

    `words` are arguments that follow the config, and `flags` are switches, each with its help text; "dry_run"
    becomes --dry-run. The job receives both as keyword arguments.
    """
    parser = argparse.ArgumentParser(
        prog=program(module),
        description=as_started(what),
        epilog=help_page(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML config file, such as configs/demo.yaml")
    for name, meaning in (words or {}).items():
        parser.add_argument(name, metavar=name.upper(), help=meaning)
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="override keys of the file"
    )
    for name, meaning in (flags or {}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=meaning)
    given = vars(parser.parse_intermixed_args(argv))
    path, overrides = given.pop("config"), given.pop("overrides")

    def work() -> None:
        refuse_repeated(overrides)
        config = load_config(path, overrides)
        set_retry_s(config.storage.retry_s)
        try:
            refuse_lost("run.storage", config.run.storage)
            refuse_lost("tracking.uri", config.tracking.uri)
            with typed(path):
                run(config, **given)
        except PencilError as error:
            kind = HeldError if isinstance(error, HeldError) else PencilError
            raise kind(masked(f"{error}{_where_named(error, config)}", config)) from error

    return exit_code(work)


def program(module: str) -> str:
    """How to start a job, in the form that started this process: `pencil-scale JOB`, or with its module."""
    is_script = Path(sys.argv[0]).name == PROGRAM
    return f"{PROGRAM} {module.rpartition('.')[2]}" if is_script else f"python -m {module}"


@contextmanager
def typed(config: str) -> Iterator[None]:
    """While a job runs on this config: messages name the file as it was typed."""
    token = TYPED.set(shlex.quote(without_passwords(config)))
    try:
        yield
    finally:
        TYPED.reset(token)


def command(module: str) -> str:
    """How to start a job on the config of this process: `pencil-scale JOB config.yaml`."""
    return f"{program(module)} {TYPED.get()}"


def as_started(text: str) -> str:
    """Spell the commands in a text in the form that started this process."""
    return re.sub(r"python -m (pencil_scale\.train|pipelines\.\w+)", lambda found: program(found[1]), text)


def refuse_repeated(overrides: Sequence[str]) -> None:
    """Refuse a key that is given twice: a shell makes several arguments of unquoted braces or wildcards."""
    for dotted, times in Counter(override.partition("=")[0] for override in overrides).items():
        if times > 1:
            raise PencilError(
                f"override '{dotted}' is given {times} times; give it once, and quote a value with braces or "
                "wildcards, which the shell expands, as in 'data.shards=train-{000..004}.tar'"
            )


def _where_named(error: PencilError, config: Config) -> str:
    """The keys that name the bucket of an object to which a store refuses access."""
    if not isinstance(error, RefusedError):
        return ""
    store = store_of(str(error).partition(": ")[0])
    keys = [key for key, text in describe(config).items() if store in text]
    return f" (see {' and '.join(keys)})" if keys else ""


def say(text: str) -> None:
    """Print a line immediately, with the credentials in URLs masked."""
    print(without_passwords(text), flush=True)


def exit_code(work: Callable[[], object]) -> int:
    """Do the work, and return 0; print an error that a person can act on, with credentials masked: 2.

    A held run ends with 3, also if a cluster manager repeats its command. Ctrl-C ends with 143, as SIGTERM
    does.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.ERROR)  # of other libraries
    if threading.current_thread() is threading.main_thread():
        # SIGTERM unwinds the job like Ctrl-C, so that it releases its leases.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        check_versions()
        work()
    except PencilError as error:
        kind, code = ("HELD", HELD) if isinstance(error, HeldError) else ("error", 2)
        for line in str(error).splitlines():
            print(f"{kind}: {without_passwords(line)}", file=sys.stderr)
        return code
    except KeyboardInterrupt:
        print("stopped; to resume, run the same command again", file=sys.stderr)
        return 128 + signal.SIGTERM
    return 0


def check_versions() -> None:
    """Stop with one line if Python, Ray or the MLflow client is outside the supported range."""
    require("Python", platform.python_version(), PYTHON)
    require("Ray", _installed("ray"), RAY)
    require("MLflow", _installed("mlflow-skinny"), MLFLOW)  # the client, which mlflow itself installs


def require(thing: str, found: str | None, supported: str) -> None:
    """Raise unless the version is within the supported range."""
    if found is None:
        raise PencilError(f"{thing} is not installed; {thing} {supported} is needed: run 'make install'")
    if not SpecifierSet(supported).contains(found, prereleases=True):
        raise PencilError(f"{thing} {found} found; {supported} is supported: install a supported version")


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def refuse_lost(name: str, *paths: str | None) -> None:
    """Refuse relative paths in the folder of a submitted job: Ray removes the folder when the job ends.

    `name` is the config key of the paths. Small files that were sent along, such as a config or a class list,
    may be read there.
    """
    for path in filter(None, paths):
        local = LOCAL.sub("", path, count=1)
        if "://" not in local and UNPACKED in Path(local).expanduser().absolute().parts:
            raise PencilError(
                f"{name}: {path} is in the folder of this job, which Ray removes; give a URL, or an "
                "absolute path that every node can read"
            )
