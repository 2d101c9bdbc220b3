"""For tests of conditional puts: a layer between the client and the S3 server that can lose answers."""

import threading
from collections.abc import Callable
from typing import Any

import fsspec
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication

from pencil_scale.storage import s3
from pencil_scale.storage.folder import warn_once


class Front:
    """Serves one request at a time, because moto compares and puts in two steps, unlike a real store."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ignores_conditions = False
        self.answers_to_lose = 0
        self.is_down = False
        self._turn = threading.Lock()
        answer = DomainDispatcherApplication.__call__
        patch.setattr(DomainDispatcherApplication, "__call__", lambda *args: self._serve(answer, *args))

    def _serve(self, answer: Any, app: Any, environ: dict[str, Any], start_response: Any) -> Any:
        if self.is_down:
            return _unavailable(start_response)
        is_conditional = environ.keys() & {"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"}
        if self.ignores_conditions:
            for header in is_conditional:
                del environ[header]
        loses = self.answers_to_lose > 0 and bool(is_conditional)
        with self._turn:
            said = answer(app, environ, _nowhere if loses else start_response)
        if loses:
            self.answers_to_lose -= 1
            return _unavailable(start_response)
        return said


def fresh_front(patch: pytest.MonkeyPatch) -> Front:
    """Put a front before the server of `s3_endpoint`, with a bucket that has not been probed yet."""
    patch.setattr(s3, "_known", {})
    warn_once.cache_clear()
    fsspec.filesystem("s3").mkdir("lake")
    return Front(patch)


def _nowhere(*_: object, **__: object) -> Callable[[bytes], object]:
    return lambda _: None


def _unavailable(start_response: Any) -> list[bytes]:
    start_response("503 Service Unavailable", [("Content-Length", "0")])
    return [b""]
