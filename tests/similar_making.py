"""Digits with features, for tests of what is similar."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from catalogue_making import samples
from export_making import ExportBench
from review_making import ReviewBench
from sklearn.datasets import load_digits

from pencil_scale.config.loader import load_config
from pencil_scale.storage.storage import Storage
from pipelines import find_similar, import_features

NUM = 120


class SimilarBench(ExportBench, ReviewBench):
    """A catalogue of digits: rows 3, 4 and 100 have the same features, row 60 those of no digit."""

    def index_some(self, *skipped: int, exclude: str = "") -> None:
        for first in (0, 60):
            rows = [row for row in range(first, first + 60) if row not in skipped]
            self.shard(f"{first:02d}.tar", samples(rows))
        self.index(exclude=exclude or None)

    def overrides(self, **keys: Any) -> Any:
        return load_config(self.config, [f"features.{name}={value}" for name, value in keys.items()])

    def give_features(self) -> import_features.Summary:
        features = load_digits().data[:NUM].astype(np.float32)
        features[[4, 100]] = features[3]
        features[60] = np.tile([16, 0], 32)
        features[[5, 101]] = features[2]  # of rows that the tests remove
        path = self.folder / "vectors.parquet"
        ids = [f"{row:06d}" for row in range(NUM)]
        pq.write_table(pa.table({"sample_id": ids, "features": list(features)}), path)
        return import_features.run(self.overrides(name="digits", file=path))

    def find(self, **keys: Any) -> find_similar.Summary:
        return find_similar.run(self.overrides(**{"duplicate_similarity": 0.9999, **keys}))

    def entries(self) -> dict[int, dict[str, Any]]:
        store = Storage(self.storage)
        (key,) = (path.rpartition("/")[2] for path in store.names("features"))
        (name,) = (name for name in store.names(store.features(key)) if name.endswith(".parquet"))
        table = pq.read_table(pa.BufferReader(store.get(name)))
        return {entry["row"]: entry for entry in table.to_pylist()}
