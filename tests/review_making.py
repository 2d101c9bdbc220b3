"""Labels to review in tests: published with known moves and a history, and the page that shows them."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
from catalogue_making import Bench
from label_making import new_table

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.loader import load_config
from pencil_scale.labels.published import published_url
from pencil_scale.labels.report import HISTORY
from pipelines.review_report import Summary, run


class ReviewBench(Bench):
    """A catalogue with published labels, and pages made of them in a real folder."""

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def page(self) -> Path:
        return self.folder / "report.html"

    def publish(
        self,
        corrected: Mapping[int, int],
        name: str = "t",
        shares: Mapping[int, float] | None = None,
        visited: Sequence[int] | None = None,
    ) -> None:
        """Publish labels in which these rows have moved to other classes, with 0.8 of their mass, or more."""
        catalogue = Catalogue.open(self.storage)
        given = catalogue.read(0, catalogue.num_rows)["noisy_class"].fill_null(-1).to_numpy()
        num_classes = catalogue.num_classes
        folder = self.folder / f"table-{len(list(self.folder.iterdir()))}"
        table = new_table(folder, given, catalogue.class_names, store=f"{self.storage}/labels", run=name)
        rows = np.arange(len(given)) if visited is None else np.array(visited, np.int64)
        told = np.array([corrected.get(row, max(given[row], 0)) for row in rows], np.int64)
        largest = np.array([(shares or {}).get(row, 0.8) for row in rows])
        logits = np.log(np.repeat((1 - largest)[:, None] / (num_classes - 1), num_classes, axis=1))
        logits[np.arange(len(rows)), told] = np.log(largest)
        table.write(rows, logits, None, epoch=0)
        table.snapshot().save(published_url(self.storage, name))

    def keep_history(self, epochs: Mapping[int, Sequence[int]], name: str = "t") -> None:
        """Write what the class of every row was after these epochs."""
        for epoch, classes in epochs.items():
            url = f"{self.storage}/labels/history/{name}/epoch-{epoch:05d}.arrow"
            columns = [pa.array(classes, pa.uint16()), pa.array(np.full(len(classes), 0.5, np.float16))]
            with fsspec.open(url, "wb", auto_mkdir=True) as file, pa.ipc.new_file(file, HISTORY) as writer:
                writer.write_batch(pa.record_batch(columns, schema=HISTORY))

    def keep_figures(self, epochs: Sequence[dict[str, Any]], name: str = "t") -> None:
        with fsspec.open(f"{self.storage}/runs/{name}/epochs.json", "w", auto_mkdir=True) as file:
            json.dump(epochs, file)

    def keep_summary(self, facts: dict[str, Any], name: str = "t") -> None:
        with fsspec.open(f"{self.storage}/runs/{name}/summary.json", "w", auto_mkdir=True) as file:
            json.dump(facts, file)

    def report(self, *overrides: str) -> Summary:
        keys = [f"report.page={self.page}", "report.mlflow=false"]
        return run(load_config(self.config, [*keys, *overrides]))

    def shown(self) -> dict[str, Any]:
        """What the page was given to show."""
        return shown_in(self.page)


def shown_in(page: Path) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)
    found: dict[str, Any] = json.loads(text)
    return found
