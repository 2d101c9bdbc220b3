"""Which network interface the workers use, and what an error of their network says."""

import os
import socket
from pathlib import Path

import pytest

from pencil_scale.train.network import VARIABLES, interface_of, unconnected


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None  # of no machine


def test_the_interface_of_an_ipv6_address_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fd000000000000000000000000000002 02 40 00 80     eth0\n"
    )
    monkeypatch.setattr("pencil_scale.train.network.IPV6", table)
    assert interface_of("::1") == "lo"
    assert interface_of("fd00::2") == "eth0"
    assert interface_of("fd00::3") is None


@pytest.mark.ray
def test_a_worker_takes_the_interface_by_which_ray_reaches_its_node_unless_one_is_set(
    ray_session: None,
) -> None:
    import ray

    @ray.remote(num_cpus=0)
    def chosen(before: str) -> tuple[str | None, str, str]:
        from pencil_scale.train.network import choose_interface

        for variable in VARIABLES:
            os.environ.pop(variable, None)
        if before:
            os.environ[VARIABLES[0]] = before
        place = choose_interface()
        found = [os.environ.pop(variable, "") for variable in VARIABLES]
        return interface_of(ray.util.get_node_ip_address()), *found, place

    name, gloo, nccl, place = ray.get(chosen.remote(""))
    assert name == gloo == nccl
    assert place == f"{socket.gethostname()} ({ray.util.get_node_ip_address()}) by {name}"
    assert ray.get(chosen.remote("ib0"))[1:3] == ("ib0", name)


def test_workers_that_do_not_reach_each_other_are_named_with_the_variable_to_set() -> None:
    error = unconnected(
        ["a (10.0.0.1) by eth0", "b (10.0.0.2) by eth1"], RuntimeError("connection timed out")
    )
    text = str(error)
    assert (
        "worker 0 on a (10.0.0.1) by eth0, worker 1 on b (10.0.0.2) by eth1; RuntimeError: connection" in text
    )
    assert "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on every node" in text
