"""Clean-up after success: it may fail or hang, and the job still succeeds."""

import threading

import pytest

from pencil_scale.storage.cleanup import clean_up


def test_work_that_succeeds_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    done = []
    clean_up("old files", lambda: done.append(1))
    assert done
    assert not caplog.messages


@pytest.mark.parametrize("error", [OSError("disk is gone"), ValueError("a bug"), KeyError("x")])
def test_a_failure_of_any_kind_is_only_a_warning(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise error

    clean_up("old files", fail)
    assert f"old files could not be removed ({type(error).__name__}: {error})" in caplog.messages[0]


def test_work_that_hangs_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    never = threading.Event()
    clean_up("old files", never.wait, most_s=0.05)
    never.set()
    assert "old files could not be removed (still not done after 0.05 s)" in caplog.messages[0]
