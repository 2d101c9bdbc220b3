"""A proxy before an S3 server that misbehaves on demand, and counts what passes.

with s3_proxy(endpoint) as proxy:                    # the environment leads clients to the proxy
    proxy.down_for(20)                               # from now on; connections are closed without an answer
    proxy.down_for(2, when=lambda seen: seen.path.endswith(".tar"))      # from the first such request on
    proxy.share = {"busy": 0.3, "cut": 0.1, "reset": 0.1}                # of the requests
    proxy.requests                                   # every request so far
"""

import http.client
import os
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import s3fs

SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"


@dataclass(frozen=True)
class Seen:
    """A request that arrived, and how the proxy answered it."""

    method: str
    path: str
    num_bytes: int  # sent and received
    fault: str = ""


class Proxy(ThreadingHTTPServer):
    """Passes requests on to a server, or commits a fault."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, endpoint: str) -> None:
        self.server_host = urlsplit(endpoint).netloc
        self.requests: list[Seen] = []
        self.share: dict[str, float] = {}
        self.denies = 0  # the status with which every request is refused
        # Whether to pass a request on and lose its answer.
        self.loses: Callable[[Seen], bool] = lambda _: False
        self.outages: list[float] = []  # when each started
        self._plans: list[tuple[float, Callable[[Seen], bool]]] = []
        self._down_until = 0.0
        self._chance, self._lock = random.Random(1), threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)

    def handle_error(self, *arguments: Any) -> None:
        """Print a traceback, except for clients that hang up, as those that are killed do."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(*arguments)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def down_for(self, seconds: float, when: Callable[[Seen], bool] = lambda _: True) -> None:
        """Be unreachable for a while, from the first of these requests on."""
        self._plans.append((seconds, when))

    def fault_for(self, seen: Seen) -> str:
        """Choose what to do to a request; empty: pass it on."""
        with self._lock:
            now = time.monotonic()
            for plan in self._plans if now >= self._down_until else ():
                if plan[1](seen):
                    self._plans.remove(plan)
                    self._down_until = now + plan[0]
                    self.outages.append(now)
                    break
            if now < self._down_until:
                return "down"
            if self.denies:
                return "denied"
            if self.loses(seen):
                return "lost"
            point = self._chance.random()
            for fault, share in self.share.items():
                if (point := point - share) < 0:
                    return fault
            return ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.fault_for(Seen(self.command, self.path, len(body)))
        status, headers, data = 0, list[tuple[str, str]](), b""
        if fault == "busy":
            status, data = 503, SLOW_DOWN
        elif fault == "denied":
            status = self.server.denies
        elif fault in ("", "cut", "short", "lost"):
            status, headers, data = self._passed_on(body)
        self.server.requests.append(Seen(self.command, self.path, len(body) + len(data), fault))
        if status and fault != "lost":
            data = data[: len(data) // 2] if fault == "short" else data
            self._send(status, headers, data, cut=fault == "cut")
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = self.close_connection or fault not in ("", "busy", "denied", "short")

    def _passed_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        server = http.client.HTTPConnection(self.server.server_host, timeout=60)
        dropped = ("host", "expect", "connection")
        # The signature covers the name of the host; the server of the tests does not check it.
        headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
        server.request(self.command, self.path, body, headers)
        answer = server.getresponse()
        data = answer.read()
        server.close()
        return answer.status, answer.getheaders(), data

    def _send(self, status: int, headers: list[tuple[str, str]], data: bytes, cut: bool) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        length = {name.lower(): value for name, value in headers}.get("content-length", str(len(data)))
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def s3_proxy(endpoint: str) -> Iterator[Proxy]:
    """Start a proxy, and lead the clients of this process and of its children to it."""
    proxy, before = Proxy(endpoint), os.environ["AWS_ENDPOINT_URL"]
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        yield proxy
    finally:
        os.environ["AWS_ENDPOINT_URL"] = before
        s3fs.S3FileSystem.clear_instance_cache()
        proxy.shutdown()
        proxy.server_close()
