"""Tell the story of one sample: where it is stored, its labels over time, and who or what decided them.

    python -m pipelines.why configs/demo.yaml digit-0555

Writes nothing but a thumbnail, to <storage>/thumbnails/.
"""

import sys
from collections.abc import Sequence

from pencil_scale.config.command import run_job
from pencil_scale.config.settings import Config
from pencil_scale.review.story import tell
from pencil_scale.storage.storage import Storage


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on the config and the id that the command line names."""
    sample_id = "id of the sample, as defined by data.identity; after -- if it starts with a dash"
    return run_job(run, argv, module="pipelines.why", what=__doc__ or "", words={"sample_id": sample_id})


def run(config: Config, sample_id: str) -> None:
    """Print what is known about the sample."""
    folders = [config.export.folder] if config.export.folder else []
    for line in tell(Storage(config.run.storage), sample_id, config.data.exclude, folders):
        print(line)


if __name__ == "__main__":
    sys.exit(main())
