"""The front door of every job: `python -m MODULE CONFIG [key=value ...]`.

Bad input ends with one line a problem on stderr and exit code 2, never with a traceback; anything else that
goes wrong is ours, and keeps its traceback.
"""

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from pencil_scale.config import load_config, masked
from pencil_scale.config_help import help_page
from pencil_scale.job_folder import refuse_lost
from pencil_scale.schema import PencilError
from pencil_scale.shapes import without_passwords
from pencil_scale.versions import check_versions

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
