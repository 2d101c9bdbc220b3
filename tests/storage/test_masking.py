"""Credentials in URLs are never shown, even if a password contains unescaped separators."""

import pytest

from pencil_scale.config.command import exit_code
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import without_passwords

SHOWN = {
    "http://me:hush@host:5000/x": "http://me:***@host:5000/x",
    "https://hush@host/x": "https://***@host/x",
    "https://hush:@host/x": "https://***@host/x",
    "redis://:hush@host": "redis://:***@host",
    "http://me:5000@host": "http://me:***@host",
    "postgresql://me:hu/sh@host/db": "postgresql://me:***@host/db",
    "http://me:hu@sh@host:5000": "http://me:***@host:5000",
    "https://hu@sh@host/x": "https://***@host/x",
    "http://me:hu@s/h@host/x": "http://me:***@host/x",
    # It is unknown where this password ends, so only the end of the path is safe to show.
    "s3://id:hush@bucket/a@b/x.tar": "s3://id:***@b/x.tar",
    "https://host/x.tar?sig=hush&part=2#id,label": "https://host/x.tar?sig=***&part=2#id,label",
    "http://a:hush@h,https://hush@i,s3://b/x@y": "http://a:***@h,https://***@i,s3://b/x@y",
    "'http://a:hush@h/1' and s3://b/c@d, ask ops@corp": "'http://a:***@h/1' and s3://b/c@d, ask ops@corp",
    "table:s3://id:hush@b/t.parquet#id,label": "table:s3://id:***@b/t.parquet#id,label",
}
INTACT = [
    "s3://bucket/a@b/x.tar",
    "table:s3://bucket/t@2.parquet#id@x,label",
    "http://host:5000/a@b",
    "http://[::1]:5000/a@b",
    "file:///home/me@work/x",
    "sqlite:////tmp/a@b.db",
    "is the label right? key = value",
]


@pytest.mark.parametrize("text", SHOWN)
def test_credentials_are_masked_and_the_rest_of_the_text_is_kept(text: str) -> None:
    assert without_passwords(text) == SHOWN[text]


@pytest.mark.parametrize("text", INTACT)
def test_a_text_without_credentials_is_unchanged(text: str) -> None:
    assert without_passwords(text) == text


def test_an_error_that_ends_a_command_shows_no_credentials(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise PencilError("s3://id:hu/sh@bucket/0.tar: damaged\nhttps://hush@host/1.tar: absent")

    assert exit_code(work) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: s3://id:***@bucket/0.tar: damaged",
        "error: https://***@host/1.tar: absent",
    ]
