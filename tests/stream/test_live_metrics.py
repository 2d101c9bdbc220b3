"""Live metrics are where Prometheus reads them: at the metrics port of a Ray node."""

import re
import time
import urllib.request

import pytest
import ray

pytestmark = pytest.mark.ray


@ray.remote(num_cpus=0)
class Worker:
    def work(self) -> None:
        from pencil_scale.storage import retries
        from pencil_scale.stream.live_metrics import LiveMetrics, count_retries

        self.live = LiveMetrics("tiny", rank=3)
        self.live.set({"images_per_s": 1830.5, "coverage": 1.0, "epoch_s": 7.0})
        for _ in range(2):
            count_retries()  # counts once
        faults = [ConnectionError()]

        def access() -> None:
            if faults:
                raise faults.pop()

        retries.patiently("s3://measured/x", access)


def exported(address: str) -> dict[str, float]:
    text = urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read().decode()
    values = re.findall(r"^ray_pencil_scale_(\w+)\{(.*)\} (\S+)$", text, re.M)
    wanted = (("rank", "3"), ("store", "s3://measured"))
    return {
        name: float(value) for name, tags, value in values for tag, of in wanted if f'{tag}="{of}"' in tags
    }


def test_the_figures_of_a_worker_and_its_retries_are_exported_with_their_tags(ray_session: None) -> None:
    worker = Worker.remote()
    ray.get(worker.work.remote())
    (node,) = (node for node in ray.nodes() if node["Alive"])
    address, found = f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}", dict[str, float]()
    until = time.monotonic() + 200
    while len(found) < 3 and time.monotonic() < until:  # they may come one by one
        time.sleep(0.5)
        found = exported(address)
    retried = {name: value for name, value in found.items() if "retries" in name}
    assert found == {"images_per_s": 1830.5, "coverage": 1.0, **retried}
    assert list(retried.values()) == [1.0]
