"""What the tests share: one Ray for the whole session, started by the first test that asks for it."""

import os
from collections.abc import Iterator

import pytest

# Loopback tests need no token, and must not leave one in the home folder of whoever runs them.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray of its own, never the cluster that happens to stand on this machine."""
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=256 * 2**20,
        log_to_driver=False,
        configure_logging=False,
    )
    yield
    ray.shutdown()
