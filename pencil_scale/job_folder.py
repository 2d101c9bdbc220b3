"""Job folder: where Ray unpacks what `ray job submit --working-dir .` sent, and which it removes again.

What a job writes there by a relative path is gone with it, though the job says that all went well; so jobs
refuse it. Small files that were sent along, such as a config or a class list, may be read.

    refuse_lost("run.storage", "runs/demo")
"""

import re
from pathlib import Path

from pencil_scale.schema import PencilError

UNPACKED = "working_dir_files"  # Ray's own name for the folder that has those of all jobs
LOCAL = re.compile(r"^((file|local)://|sqlite(\+\w+)?:///)")


class JobFolderError(PencilError):
    """A path that would not outlive the job."""


def refuse_lost(name: str, *paths: str | None) -> None:
    """Refuse paths that lie in the folder of a submitted job; `name` is what people call them by."""
    for path in filter(None, paths):
        local = LOCAL.sub("", path, count=1)
        if "://" not in local and UNPACKED in Path(local).expanduser().absolute().parts:
            raise JobFolderError(
                f"{name}: {path} lies in the folder of this job, which Ray removes; give a URL, or an "
                "absolute path that every node sees"
            )
