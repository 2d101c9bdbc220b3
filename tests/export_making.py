"""A catalogue with published labels, for tests of what is exported."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from catalogue_making import Bench, samples
from label_making import new_table

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.loader import load_config
from pencil_scale.labels.published import published_url
from pipelines.export_labels import Summary, run


class ExportBench(Bench):
    """A catalogue with published labels; exports go to a real folder, where other tools can open them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.out = folder / "out"

    def publish(self, corrected: dict[int, int], visited: Sequence[int] | None = None) -> None:
        """Publish labels in which these rows have moved to other classes, with 0.8 of their mass."""
        catalogue = Catalogue.open(self.storage)
        given = catalogue.read(0, catalogue.num_rows)["noisy_class"].fill_null(-1).to_numpy()
        folder = self.folder / f"table-{len(list(self.folder.iterdir()))}"
        table = new_table(folder, given, catalogue.class_names, store=f"{self.storage}/labels", run="t")
        rows = np.arange(len(given)) if visited is None else np.array(visited)
        wanted = np.array([corrected.get(row, max(given[row], 0)) for row in rows])
        shares = np.full((len(rows), 3), 0.1)
        shares[np.arange(len(rows)), wanted] = 0.8
        table.write(rows, np.log(shares), None, epoch=0)
        table.snapshot().save(published_url(self.storage, "t"))

    def export(self, *overrides: str, predict: bool = False) -> Summary:
        keys = [f"export.folder={self.out}", f"export.predict={str(predict).lower()}", "images.crop=4"]
        return run(load_config(self.folder / "config.yaml", [*keys, *overrides]))

    def table(self) -> list[dict[str, Any]]:
        return pa.concat_tables(pq.read_table(path) for path in sorted(self.out.glob("table/*"))).to_pylist()

    def sidecar(self, name: str) -> list[dict[str, Any]]:
        (path,) = self.out.glob(f"sidecars/*/{name}.labels.parquet")
        return pq.read_table(path).to_pylist()

    def write_times(self, kind: str) -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in self.out.glob(f"{kind}/*/*")}


def two_shards(folder: Path) -> ExportBench:
    """Twelve samples of three classes in turn, of which two were repaired."""
    bench = ExportBench(folder)
    bench.shard("00041.tar", samples(range(6)))
    bench.shard("00042.tar", samples(range(6, 12)))
    bench.index()
    bench.publish({1: 2, 7: 0})
    return bench
