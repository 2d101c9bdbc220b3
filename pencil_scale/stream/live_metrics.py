"""Live metrics of a run, which Ray exports to Prometheus with the prefix `ray_`.

    live = LiveMetrics(run="clothing1m", rank=0)
    live.set({"images_per_s": 4670.0, "data_wait_share": 0.02})
    count_retries()                              # of this process, from now on

Nothing here waits for anything, and a run does not need Prometheus.
"""

from collections.abc import Mapping
from functools import cache

from ray.util.metrics import Counter, Gauge

from pencil_scale.storage import retries

GAUGES = {
    "images_per_s": "images per second of this worker, in this epoch so far",
    "data_wait_share": "share of the epoch's time in which this worker waited for samples",
    "label_wait_share": "share of the epoch's time in which this worker waited for labels of other workers",
    "gpu_wait_share": "share of the epoch's time in which this worker waited for its GPU",
    "epoch": "epochs that are done",
    "coverage": "share of the last epoch's samples that were trained on; always 1",
    "unreadable_images": "images of the last epoch that could not be decoded",
}


class LiveMetrics:
    """The gauges of one worker."""

    def __init__(self, run: str, rank: int) -> None:
        self._gauges = {
            name: Gauge(f"pencil_scale_{name}", description=meaning, tag_keys=("run", "rank"))
            for name, meaning in GAUGES.items()
        }
        for gauge in self._gauges.values():
            gauge.set_default_tags({"run": run, "rank": str(rank)})

    def set(self, figures: Mapping[str, float]) -> None:
        """Set the gauges that have a figure of their name."""
        for name in figures.keys() & self._gauges.keys():
            self._gauges[name].set(float(figures[name]))


@cache
def count_retries() -> None:
    """Count how often this process repeats an access to a store, by store."""
    meaning = "accesses to a store that were repeated because of a passing fault"
    counter = Counter("pencil_scale_storage_retries", description=meaning, tag_keys=("store",))
    retries.listeners.append(lambda store: counter.inc(tags={"store": store}))
