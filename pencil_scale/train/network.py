"""Network between the workers: which interface they use, and what an error of it says.

Gloo and NCCL choose an interface on their own. On Debian the host name resolves to a loopback address; gloo
binds to it, and no other host can connect. Every worker is therefore given the interface whose address Ray
uses for its node, unless GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is set there.

    TorchTrainer(..., torch_config=NetworkConfig(backend="gloo", timeout_s=600))
"""

import fcntl
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.train.torch import TorchConfig

from pencil_scale.storage.errors import PencilError
from pencil_scale.stream.ray_tasks import reason_of

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux
IPV6 = Path("/proc/net/if_inet6")


def interface_of(address: str) -> str | None:
    """The name of the network interface of this machine that has an address; None if none has it."""
    if ":" in address:
        wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        lines = [line.split() for line in IPV6.read_text().splitlines()] if IPV6.exists() else []
        return next((words[-1] for words in lines if words[0] == wanted), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                asked = struct.pack("256s", name.encode())
                found = fcntl.ioctl(handle.fileno(), ADDRESS_OF_INTERFACE, asked)
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def choose_interface() -> str:
    """Set the interface of this process, and describe where the process runs."""
    address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    name = interface_of(address)
    for variable in VARIABLES if name else ():
        os.environ.setdefault(variable, str(name))
    return f"{where()} by {os.environ.get(VARIABLES[0], 'any interface')}"


def where() -> str:
    """The host of this process, and its address in the cluster."""
    address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return f"{socket.gethostname()} ({address})"


@dataclass
class NetworkConfig(TorchConfig):
    """As TorchConfig, but the workers choose their interface first."""

    @property
    def backend_cls(self) -> Any:
        parent: Any = super().backend_cls

        class NetworkBackend(parent):  # type: ignore[misc]
            def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
                places = worker_group.execute(choose_interface)
                try:
                    super().on_start(worker_group, backend_config)
                except RayTaskError as error:
                    raise unconnected(places, error) from error

        return NetworkBackend


def unconnected(places: list[str], error: Exception) -> PencilError:
    """Say which workers do not reach each other, and what to set."""
    named = ", ".join(f"worker {rank} on {place}" for rank, place in enumerate(places))
    return PencilError(
        f"the workers do not reach each other: {named}; {reason_of(error)}. Open the ports between these "
        f"hosts, or set {' and '.join(VARIABLES)} on every node to the interface that connects them"
    )
