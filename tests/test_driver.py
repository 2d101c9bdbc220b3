"""The driver hears all news of a run, whatever goes wrong in reporting it."""

from types import SimpleNamespace
from typing import Any

import pytest

from pencil_scale.running import driver
from pencil_scale.telling.harmless import Harmless


def test_news_that_cannot_be_reported_is_logged_and_the_rest_is_still_heard(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    news = [{"kind": kind, "n": n} for n, kind in enumerate(["step", "epoch", "epoch", "step"])]
    monkeypatch.setattr(driver, "take_news", lambda control: news)
    heard: list[int] = []

    def hear(event: dict[str, Any]) -> None:
        if event["kind"] == "epoch":
            raise ValueError("no such figure")
        heard.append(event["n"])

    driver._pass_news(SimpleNamespace(control=None), hear, Harmless())
    assert heard == [0, 3]
    (message,) = caplog.messages
    assert "news of kind 'epoch' failed (ValueError: no such figure); training continues" in message
