"""Which MLflow servers a job will talk to. The real server is asked; an old one is played by its answer."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from pencil_scale.tracking import check_server
from pencil_scale.versions import VersionError


def answering(text: str) -> HTTPServer:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Answer)
    Thread(target=server.serve_forever, daemon=True).start()
    return server


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def real_server(tmp_path: Path) -> Iterator[str]:
    uri = f"http://127.0.0.1:{free_port()}"
    store = f"sqlite:///{tmp_path}/mlflow.db"
    command = [sys.executable, "-m", "mlflow", "server", "--port", uri.rpartition(":")[2]]
    server = subprocess.Popen(
        [*command, "--backend-store-uri", store, "--workers", "1"], start_new_session=True
    )
    for _ in range(120):
        try:
            urllib.request.urlopen(f"{uri}/version", timeout=1)
            break
        except OSError:
            time.sleep(0.5)
    yield uri
    os.killpg(server.pid, signal.SIGTERM)
    server.wait()


@pytest.mark.slow
def test_the_server_we_were_tested_with_is_taken(real_server: str, caplog: pytest.LogCaptureFixture) -> None:
    check_server(real_server)
    assert not caplog.records


@pytest.mark.parametrize("version", ["2.22.0", "4.0.0", "3.16.9"])
def test_a_server_outside_the_range_stops_the_job(version: str) -> None:
    server = answering(version)
    uri = f"http://127.0.0.1:{server.server_port}"
    with pytest.raises(VersionError, match=rf"MLflow server {uri} {version} found; .*>=3.17,<4 is supported"):
        check_server(uri)
    server.shutdown()


def test_a_server_that_is_away_is_logged_without_its_password(caplog: pytest.LogCaptureFixture) -> None:
    check_server(f"http://me:hush-hush@127.0.0.1:{free_port()}")
    assert "did not tell its version" in caplog.text
    assert "hush" not in caplog.records[-1].getMessage()


def test_a_database_is_no_server() -> None:
    check_server("sqlite:///mlflow.db")
