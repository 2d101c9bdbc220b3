"""Training on an object store that goes down: the run waits, and its labels are those of a quiet run.

Everything is real: S3 over HTTP behind a proxy, the command, its own Ray and its workers.
"""

import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import s3fs
import torch
from s3_front import fresh_front
from training_runs import TinyData

from benchmarks.s3_proxy import Proxy, Seen, s3_proxy
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.published import PublishedLabels
from pencil_scale.storage.folder import Folder
from pencil_scale.train import __main__ as train
from pencil_scale.train.checkpoints import SNAPSHOT

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

KEEP = 2  # checkpoint.keep
EPOCHS = {"backbone": 1, "pencil": 2, "finetune": 1}


@dataclass
class Lake:
    """Shards, catalogue and storage of tiny runs on an object store."""

    data: TinyData
    proxy: Proxy
    files: Any  # past the proxy
    settings: list[str]
    most_tables: int = 0  # label tables of one run, of one part each, that were in the store at once

    def words(self, name: str, *overrides: str) -> list[str]:
        words = [f"run.name={name}", *self.settings, "workers.count=1"]
        words += [f"tracking.uri=sqlite:///{self.data.folder}/mlflow.db", "gate.hold=false"]
        words += ["checkpoint.every_steps=15", "run.deterministic=true", *overrides]
        return words + [f"stages.{stage}.epochs={epochs}" for stage, epochs in EPOCHS.items()]

    def train(self, name: str, *overrides: str) -> str:
        """Train with the real command; return what it printed."""
        with self.data.start(*self.words(name, *overrides)) as command:
            while command.process.poll() is None:
                parts = self.files.find("lake/tiny/labels/parts")
                by_run = Counter(path.split("/")[-2] for path in parts)
                self.most_tables = max(self.most_tables, *by_run.values(), 0)
                time.sleep(0.1)
            assert command.wait() == 0, command.output
        return command.output

    def train_here(self, name: str) -> None:
        """Train in this process, on one thread as a worker has."""
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        words = self.words(name, "workers.in_process=true")
        assert train.main([str(self.data.folder / "config.yaml"), *words]) == 0
        torch.set_num_threads(num_threads)
        torch.use_deterministic_algorithms(False)

    def require_labels_as_of(self, quiet: str, name: str) -> None:
        assert np.array_equal(self.labels(quiet), self.labels(name))
        summary = Folder("s3://lake/tiny").read_json(f"runs/{name}/summary.json")
        assert summary["coverage"] == [1.0] * sum(EPOCHS.values())

    def labels(self, name: str) -> npt.NDArray[np.float32]:
        manifest = Manifest.load(f"s3://lake/tiny/labels/published/{name}.json")
        return PublishedLabels(manifest).rows(range(self.data.num_samples)).logits


@pytest.fixture
def lake(s3_endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    with pytest.MonkeyPatch.context() as patch, s3_proxy(s3_endpoint) as proxy:
        fresh_front(patch)
        files = s3fs.S3FileSystem(endpoint_url=s3_endpoint, use_listings_cache=False)
        data = TinyData.make(tmp_path_factory.mktemp("lake"))
        yield Lake(data, proxy, files, data.put_into(files, "lake"))


@dataclass
class Nth:
    """The nth request for such a file."""

    left: int
    method: str
    end: str

    def __call__(self, seen: Seen) -> bool:
        self.left -= seen.method == self.method and seen.path.partition("?")[0].endswith(self.end)
        return self.left <= 0


def test_outages_while_shards_are_read_and_checkpoints_saved_do_not_change_the_labels(
    ray_session: None, lake: Lake
) -> None:
    lake.train_here("quiet")
    assert not lake.proxy.outages

    lake.proxy.down_for(2, Nth(2, "GET", ".tar"))
    # Long enough for an access to fail twice: botocore repeats each over up to 3 s, and only what takes
    # longer than 2 s is reported.
    lake.proxy.down_for(6, Nth(3, "GET", ".tar"))
    # Longer than the patience of the run: worker or controller fail, or both, and the next attempt resumes.
    # An access gives up after 8 s and two rounds of botocore's own retries, of up to 5 s each.
    lake.proxy.down_for(24, Nth(2, "PUT", SNAPSHOT))
    lake.proxy.down_for(24, Nth(7, "PUT", ".arrow"))
    stormy = lake.train("stormy", "storage.retry_s=8")
    assert len(lake.proxy.outages) == 4
    assert re.search(r"s3://lake/\S+ does not answer .*: retrying for up to 8 s", stormy)
    assert re.search(r"s3://lake answers again after \d+ s", stormy)
    assert re.search(r"(the controller|worker 0) failed: .*s3://lake/tiny/\S+ unreachable for", stormy)
    assert re.search(r"training with 1 worker from epoch", stormy)
    lake.require_labels_as_of("quiet", "stormy")
    # Those of the checkpoints, what the run started from, a new one, and one of a checkpoint on its way.
    assert lake.most_tables <= KEEP + 3
