"""The front door of every job: `python -m MODULE CONFIG [key=value ...]`.

Bad input ends with one line a problem on stderr and exit code 2, never with a traceback; anything else that
goes wrong is ours, and keeps its traceback.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

from pencil_scale.config import load_config
from pencil_scale.config_help import help_page
from pencil_scale.schema import PencilError
from pencil_scale.settings import Config
from pencil_scale.versions import check_versions


def run_job(run: Callable[[Config], object], argv: Sequence[str] | None, *, module: str, what: str) -> int:
    """Read the config the command line names, run the job on it, and give the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=what,
        epilog=help_page(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file of the run, such as configs/demo.yaml")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="keys to set over the file's")
    arguments = parser.parse_args(argv)
    return exit_code(lambda: run(load_config(arguments.config, arguments.overrides)))


def exit_code(work: Callable[[], object]) -> int:
    """Do the work; turn an error a person can act on into its lines and exit code 2."""
    try:
        check_versions()
        work()
    except PencilError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    return 0
