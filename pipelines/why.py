"""Tell the story of one sample: where it lies, what it was called, how that changed, and who decided.

    python -m pipelines.why configs/demo.yaml digit-0555

Reads only, but for a thumbnail, which is put under <storage>/thumbnails/.
"""

import sys
from collections.abc import Sequence

import numpy as np

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.command import run_job
from pencil_scale.config.settings import Config
from pencil_scale.images.decode import UndecodableError
from pencil_scale.review.story import Story, tell
from pencil_scale.review.story_text import story_text
from pencil_scale.review.thumbnails import places_of, read_images, thumbnail
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder

SIDE = 256


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job on the config and the id that the command line names."""
    return run_job(
        run,
        argv,
        module="pipelines.why",
        what=(__doc__ or "").splitlines()[0],
        words={
            "sample_id": "id of the sample, as data.identity names it; behind -- if it begins with a dash"
        },
    )


def run(config: Config, sample_id: str) -> Story:
    """Gather what is known, and print it."""
    storage = Folder(config.run.storage).url
    folders = [config.export.folder] if config.export.folder else []
    story = tell(storage, sample_id, config.data.exclude, folders)
    picture = "none" if story.excluded else _thumbnail(storage, story)
    print(story_text(story, picture))
    return story


def _thumbnail(storage: str, story: Story) -> str:
    """Put a small picture where a person can open it; gives its path, or why there is none."""
    catalogue = Catalogue.open(storage)
    try:
        (data,) = read_images(catalogue, places_of(catalogue, np.array([story.row["row"]])))
        kind, picture = thumbnail(data, SIDE)
    except (PencilError, UndecodableError) as error:
        return f"none: {error}"
    store, name = Folder(f"{storage}/thumbnails"), f"{story.row['sample_key'].hex()}.{kind}"
    store.put(name, picture)
    return store.path(name)


if __name__ == "__main__":
    sys.exit(main())
