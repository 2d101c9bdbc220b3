"""Training across network namespaces: each Ray node has its own address, interface and temporary folder.

As on Debian, the name of this host resolves to a loopback address in every namespace, so workers connect only
if they choose the right interface. A link is cut, the head is cut off until it gives up all other nodes, and
a node is lost for good. Where namespaces are forbidden, the test is skipped.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import s3fs
from moto.server import ThreadedMotoServer
from ray._raylet import GcsClient
from training_runs import EPOCHS, TinyData, started

from benchmarks.processes import family
from pencil_scale.labels.manifest import Manifest
from pencil_scale.labels.published import PublishedLabels

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]

NET = "10.211.77"
HOST = f"{NET}.1"  # of this namespace, where the object store is
PORT = 6399
ALIVE = 0  # a state of a node in Ray
PATIENCE_S = 300


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@dataclass
class Network:
    """Namespaces that are connected by a bridge, with a Ray node in each."""

    opened: ExitStack
    name: str = field(default_factory=lambda: f"ps{os.getpid() % 10000}")
    nodes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def build(self, num_nodes: int) -> None:
        ip("link", "add", self.name, "type", "bridge")
        self.opened.callback(ip, "link", "del", self.name)
        ip("addr", "add", f"{HOST}/24", "dev", self.name)
        ip("link", "set", self.name, "up")
        for number in range(num_nodes):
            space, link = self.space(number), self.link(number)
            ip("netns", "add", space)
            self.opened.callback(ip, "netns", "del", space)
            ip("link", "add", link, "type", "veth", "peer", "name", "net0", "netns", space)
            ip("link", "set", link, "master", self.name, "up")
            ip("-n", space, "addr", "add", f"{self.address(number)}/24", "dev", "net0")
            ip("-n", space, "link", "set", "net0", "up")
            ip("-n", space, "link", "set", "lo", "up")

    def space(self, number: int) -> str:
        return f"{self.name}n{number}"

    def link(self, number: int) -> str:
        return f"{self.name}v{number}"

    def address(self, number: int) -> str:
        return f"{NET}.{10 + number}"

    def inside(self, number: int, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.space(number), *words]

    def start_node(self, number: int, num_cpus: int) -> None:
        """Start a Ray node; number 0 is the head."""
        folder = tempfile.mkdtemp(prefix="pn", dir="/tmp")  # Ray's sockets need short paths
        self.opened.callback(shutil.rmtree, folder, ignore_errors=True)
        ray = [str(Path(sys.executable).parent / "ray"), "start", "--block", f"--temp-dir={folder}"]
        role = [f"--address={self.address(0)}:{PORT}"]
        if number == 0:
            role = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        size = [f"--num-cpus={num_cpus}", f"--object-store-memory={80 * 2**20}"]
        words = self.inside(number, *ray, *role, *size, f"--node-ip-address={self.address(number)}")
        before, until = self.num_alive(), time.monotonic() + PATIENCE_S
        while self.num_alive() == before:
            assert time.monotonic() < until, f"node {number} did not start"
            if number not in self.nodes or self.nodes[number].poll() is not None:  # too slow: Ray gives up
                self.nodes[number] = subprocess.Popen(words, stdout=subprocess.DEVNULL)
                self.opened.callback(self.lose_node, number)
            time.sleep(0.5)

    def wait_for_nodes(self, num: int) -> None:
        until = time.monotonic() + PATIENCE_S
        while self.num_alive() != num:
            assert time.monotonic() < until, f"there are never {num} nodes"
            time.sleep(0.5)

    def num_alive(self) -> int:
        """Count the nodes that the head knows."""
        try:  # before the client, which waits long for a head that does not listen yet
            socket.create_connection((self.address(0), PORT), timeout=5).close()
            known = GcsClient(address=f"{self.address(0)}:{PORT}").get_all_node_info(timeout=5)
        except Exception:  # there is no head yet
            return 0
        return sum(node.state == ALIVE for node in known.values())

    def lose_node(self, number: int) -> None:
        """SIGKILL everything that runs on a node."""
        node = self.nodes.pop(number, None)
        if node is None:
            return
        for pid in family(node.pid) if node.poll() is None else ():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        node.wait()

    def cut(self, number: int, seconds: float) -> None:
        """Cut the link of a node for a while."""
        ip("link", "set", self.link(number), "down")
        time.sleep(seconds)
        ip("link", "set", self.link(number), "up")


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    with ExitStack() as opened:
        network = Network(opened)
        try:
            network.build(num_nodes=3)
        except OSError as error:
            pytest.skip(f"network namespaces are forbidden here: {error}")
        server = ThreadedMotoServer(ip_address=HOST, port=0, verbose=False)
        server.start()
        opened.callback(server.stop)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{HOST}:{server.get_host_and_port()[1]}")
        for name, value in (
            ("AWS_ACCESS_KEY_ID", "testing"),
            ("AWS_SECRET_ACCESS_KEY", "testing"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
            ("RAY_AUTH_MODE", "disabled"),
            ("RAY_agent_register_timeout_ms", "200000"),  # on a busy machine
            # The head gives up a node after 12 s without an answer; the default is a minute.
            ("RAY_health_check_period_ms", "1000"),
            ("RAY_health_check_timeout_ms", "2000"),
            ("RAY_health_check_failure_threshold", "4"),
        ):
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        for number, num_cpus in enumerate((1, 2, 2)):  # the head has no room for a worker
            network.start_node(number, num_cpus)
        yield network
        s3fs.S3FileSystem.clear_instance_cache()


def test_a_run_across_hosts_survives_cut_links_a_head_that_is_cut_off_and_a_lost_node(
    network: Network, tmp_path: Path
) -> None:
    data, bucket = TinyData.make(tmp_path), f"lake{os.getpid()}"
    files = s3fs.S3FileSystem()
    files.mkdir(bucket)
    options = [
        *data.put_into(files, bucket),
        f"tracking.uri=sqlite:///{tmp_path}/mlflow.db",
        "gate.hold=false",
    ]
    options += ["workers.cpus=1.5", "workers.timeout_s=60", "checkpoint.every_steps=10"]
    words = network.inside(0, *data.command(*options))
    with started(words, tmp_path / "run.log", {"RAY_ADDRESS": f"{network.address(0)}:{PORT}"}) as command:
        command.wait_for("backbone +epoch 1/")
        network.cut(1, seconds=4)
        command.wait_for("backbone +epoch 2/")
        network.cut(0, seconds=30)
        network.wait_for_nodes(1)
        for number in (1, 2):  # a cluster manager replaces the nodes that the head has given up
            network.lose_node(number)
            network.start_node(number, num_cpus=2)
        command.wait_for("pencil +epoch 3/")
        network.lose_node(2)
        network.wait_for_nodes(2)
        network.start_node(2, num_cpus=2)
        assert command.wait() == 0, command.output
    # A worker says which peer it lost, unless Ray misses that peer first: then it is said where it was.
    assert re.search(rf"^worker .*{re.escape(network.address(2))}", command.output, re.MULTILINE)
    summary = json.loads(files.cat_file(f"{bucket}/tiny/runs/tiny/summary.json"))
    assert summary["coverage"] == [1.0] * sum(EPOCHS.values())
    manifest = Manifest.load(f"s3://{bucket}/tiny/labels/published/tiny.json")
    epochs = PublishedLabels(manifest).last_epoch() - manifest.first_epoch
    assert (epochs == sum(EPOCHS.values()) - 1).all()
