"""What the tests share: one Ray for the whole session, an S3 server, and what a missing GPU means."""

import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Hypothesis would fail an example that takes longer than 200 ms, as any does on a busy machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A shell starts background jobs with Ctrl-C ignored, which children inherit; tests send it on purpose.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Loopback tests need no token, and must not leave one in the home folder of whoever runs them.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
# Tiny runs save checkpoints faster than Ray Train takes them, which is one each time that it polls.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.05")
os.environ.setdefault("RAY_idle_worker_killing_time_threshold_ms", "60000")
# Ray's workers and other processes import networks that are defined beside the tests.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray of its own, never the cluster that happens to stand on this machine."""
    import ray

    from pencil_scale.train.local_ray import start_local

    start_local(num_cpus=4, object_store_memory=256 * 2**20, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture
def s3_endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An S3 server over HTTP, without any bucket yet; the environment leads every client there."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    # All servers of a process share their buckets: begin without those of the test before.
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    yield endpoint
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.fixture
def mlflow_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server but the one a test names, and no long wait for one that is away."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


@pytest.fixture
def small_label_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Label parts of 1,024 rows, so that a small table has several of them."""
    from pencil_scale.labels import columns

    monkeypatch.setattr(columns, "PART_ROWS", 1024)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none; `make test` runs all that this machine can."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
