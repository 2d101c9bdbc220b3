"""Peers: who the ranks are and where they run, told once at the start and in every error after it.

When a rank hangs, gloo says how long it waited but not for whom; when one dies, it gives an address, with
the bytes of its port in the wrong order. So the ranks tell each other beforehand where they can be found:

    peers = introduce(rank, world, group)
    str(peers[1])                             # rank 1 on node-7 at 10.0.3.7 (pid 4711)
"""

import fcntl
import os
import socket
import struct
from dataclasses import dataclass

import torch.distributed as dist

from pencil_scale.labels.exchange import OwnersError

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a network interface
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Peer:
    """Where a rank runs."""

    rank: int
    host: str
    address: str  # where gloo listens
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} at {self.address} (pid {self.pid})"


def introduce(rank: int, world: int, group: dist.ProcessGroup | None) -> list[Peer]:
    """Tell every rank where this one is, and hear where they are."""
    me = Peer(rank, socket.gethostname(), gloo_address(), os.getpid())
    if world == 1:
        return [me]
    peers: list[Peer] = [me] * world
    try:
        dist.all_gather_object(peers, me, group=group)
    except RuntimeError as error:
        raise OwnersError(
            f"{me} could not meet the other {world - 1} ranks: {' '.join(str(error).split())}; "
            "see which of them did not start, and start again"
        ) from error
    return peers


def gloo_address() -> str:
    """The address on which gloo listens, found as torch finds it: by interface, else by the host's name."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interfaces:
        return _address_of(interfaces.split(",")[0])
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return LOOPBACK  # a host whose name nobody knows: torch takes the loopback too
    return str(found[0][4][0])


def _address_of(interface: str) -> str:
    """The IPv4 address of an interface, or its name where it has none."""
    asked = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, asked)
        except OSError:
            return f"interface {interface}"
    return socket.inet_ntoa(answer[20:24])
