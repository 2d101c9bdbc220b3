"""Storage: everything of a dataset, and the only module that knows the layout.

    <storage>/catalogue/            rows of the samples; validation/ and test/ in it for clean sets
    <storage>/labels/parts/ID/      label parts of the run with this id; also ledger/ID/, history/ID/
    <storage>/labels/published/     manifests of labels that may be used; held/: of labels that wait
    <storage>/labels/pins/          labels that people decided
    <storage>/runs/NAME/            record, starting labels, summary and lease of a run
    <storage>/checkpoints/NAME/     its checkpoints, until it ends
    <storage>/models/NAME.pt        its weights
    <storage>/features/KEY/         features of all rows; the key is a hash of what made them
    <storage>/nights/               a record per night, and CURRENT
    <storage>/subsets/NAME/, exports/NAME/, reports/NAME.html, thumbnails/

Methods give names relative to the storage, as `Folder` and `Lease` take them; `path` makes a URL of a name.

    storage = Storage("s3://lake/clothing1m")
    storage.path(storage.model("night-0012"))       # s3://lake/clothing1m/models/night-0012.pt
    storage.read_json(storage.run("mine", "run.json"))
"""

from pencil_scale.storage.folder import Folder


class Storage(Folder):
    """The layout of a storage."""

    labels = "labels"
    pins = "labels/pins"
    nights = "nights"
    thumbnails = "thumbnails"

    def catalogue(self, clean_set: str = "") -> str:
        """The catalogue, or that of the validation or test shards."""
        return f"catalogue/{clean_set}" if clean_set else "catalogue"

    def published(self, name: str) -> str:
        """The manifest of labels that may be used."""
        return f"labels/published/{name}.json"

    def held(self, name: str) -> str:
        """The manifest of labels that wait for a person."""
        return f"labels/held/{name}.json"

    def history(self, run_id: str) -> str:
        """What the labels of a run were after each epoch."""
        return f"labels/history/{run_id}"

    def run(self, name: str, file: str = "") -> str:
        """The folder of a run, or a file in it."""
        return f"runs/{name}/{file}" if file else f"runs/{name}"

    def checkpoints(self, name: str) -> str:
        """The checkpoints of a run."""
        return f"checkpoints/{name}"

    def model(self, name: str) -> str:
        """The weights that a run or a night published."""
        return f"models/{name}.pt"

    def features(self, key: str, file: str = "") -> str:
        """The features that one network made, or a file of them."""
        return f"features/{key}/{file}" if file else f"features/{key}"

    def night(self, name: str, file: str = "") -> str:
        """The folder of a night, or a file in it."""
        return f"nights/{name}/{file}" if file else f"nights/{name}"

    def subset(self, name: str) -> str:
        """A balanced subset."""
        return f"subsets/{name}"

    def export(self, name: str) -> str:
        """The export of a run or a night, unless the config names a folder."""
        return f"exports/{name}"

    def report(self, name: str) -> str:
        """The review page of a run or a night, unless the config names one."""
        return f"reports/{name}.html"
