"""A store that misbehaves: every access is retried, and what waiting cannot fix is reported at once."""

import logging
import pickle
import re
import time
from collections.abc import Callable, Iterator

import pyarrow.fs
import pytest
import s3fs
from botocore.exceptions import ClientError
from s3_front import fresh_front

from benchmarks.s3_proxy import Proxy, Seen, s3_proxy
from pencil_scale.storage import retries
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.retries import RETRY_VARIABLE, RefusedError, UnreachableError, limited_to
from pencil_scale.storage.urls import Window, filesystem_of, open_source, open_url, version_of

DATA = bytes(range(256)) * 4000


@pytest.fixture
def one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries by ourselves alone, each of them logged."""
    monkeypatch.setattr(retries, "SILENT_S", 0.0)
    monkeypatch.setattr(retries, "BOTOCORE_RETRIES", {"total_max_attempts": 1})


@pytest.fixture
def proxy(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A store behind a proxy, with one object in one bucket."""
    fresh_front(monkeypatch)
    with s3_proxy(s3_endpoint) as found:
        Folder("s3://lake").put("x/data", DATA)
        found.requests.clear()
        yield found


def read_by_pyarrow() -> bytes:
    files, path = filesystem_of("s3://lake/x/data")
    files = pickle.loads(pickle.dumps(pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(files))))
    with files.open_input_file(path) as file:
        found: bytes = file.read()
        return found


def write_by_pyarrow() -> bool:
    files, path = filesystem_of("s3://lake/x/new")
    files = pickle.loads(pickle.dumps(pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(files))))
    with files.open_output_stream(path) as file:
        file.write(DATA)
    return Folder("s3://lake").get("x/new") == DATA


def read_by_ranges() -> bytes:
    with open_source("s3://lake/x/data", len(DATA)) as source:
        window = Window(source)
        return window.at(0, 7) + window.at(7, len(DATA) - 7)


def delete() -> list[str]:
    Folder("s3://lake").delete("x/data")
    return Folder("s3://lake").names("x")


def delete_folder() -> bool:
    files, path = filesystem_of("s3://lake/x")
    files.rm(path, recursive=True)
    return bool(files.exists(path))


ACCESSES: dict[str, tuple[Callable[[], object], object]] = {
    "get": (lambda: Folder("s3://lake").get("x/data"), DATA),
    "find": (lambda: Folder("s3://lake").find("x/none"), None),
    "names": (lambda: Folder("s3://lake").names("x"), ["x/data"]),
    "holds": (lambda: Folder("s3://lake").holds("x/data", len(DATA)), True),
    "read": (lambda: (Folder("s3://lake").read("x/data") or (b"",))[0], DATA),
    "etag": (lambda: Folder("s3://lake").etag("x/none"), None),
    "create": (lambda: Folder("s3://lake").create("x/new", b"1"), True),
    "delete": (delete, []),
    "delete_folder": (delete_folder, False),
    "open": (lambda: open_url("s3://lake/x/data").read(), DATA),
    "version": (lambda: (version_of("s3://lake/x/data") or (0,))[0], len(DATA)),
    "ranges": (read_by_ranges, DATA),
    "pyarrow reads": (read_by_pyarrow, DATA),
    "pyarrow writes": (write_by_pyarrow, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCESSES)
def test_every_access_waits_for_a_store_that_is_down(
    one_attempt: None, proxy: Proxy, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    access, expected = ACCESSES[name]
    proxy.down_for(1)
    assert access() == expected
    started, ended = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert re.match(r"s3://lake/\S+ does not answer \(.+\): retrying for up to 600 s", started)
    assert re.match(r"s3://lake answers again after \d+ s", ended)


def test_an_answer_that_is_not_of_a_store_is_refused_in_a_line_that_names_the_object() -> None:
    def answered() -> None:
        nothing = {"Error": {"Code": ""}, "ResponseMetadata": {"HTTPStatusCode": 400}}
        raise OSError(5, "An error occurred () when calling GetObject") from ClientError(nothing, "GetObject")

    with pytest.raises(RefusedError, match=r"^s3://lake/x: refused without a reason .*AWS_ENDPOINT_URL"):
        retries.patiently("s3://lake/x", answered)


def test_an_outage_is_reported_once_although_another_access_gives_up_meanwhile(
    one_attempt: None, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = []

    def down() -> None:
        raise ConnectionResetError

    def down_at_first() -> None:
        attempts.append(time.monotonic())
        with limited_to(0), pytest.raises(UnreachableError):
            retries.patiently("s3://lake/impatient", down)
        if len(attempts) < 4:
            down()

    retries.patiently("s3://lake/patient", down_at_first)
    started, ended = (record.getMessage() for record in caplog.records)
    assert "s3://lake/patient does not answer" in started
    assert "s3://lake answers again" in ended


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["busy", "cut", "reset", "lost", "short"])
def test_faults_of_single_requests_do_not_change_what_is_read_and_written(proxy: Proxy, fault: str) -> None:
    proxy.share = {fault: 0.3}
    for number in range(3):
        Folder("s3://lake").put(f"x/{number}", DATA)
        assert read_by_ranges() == DATA
        assert Folder("s3://lake").get(f"x/{number}") == DATA
    assert any(seen.fault == fault for seen in proxy.requests)


@pytest.mark.slow
def test_a_range_that_is_cut_short_without_an_error_is_read_again(one_attempt: None, proxy: Proxy) -> None:
    proxy.share = {"short": 0.5}
    for _ in range(2):
        assert read_by_ranges() == DATA
    assert any(seen.fault == "short" for seen in proxy.requests)


@pytest.mark.slow
@pytest.mark.parametrize("replaces", [False, True])
def test_a_conditional_put_that_is_repeated_finds_what_its_first_attempt_wrote(
    one_attempt: None, proxy: Proxy, replaces: bool
) -> None:
    store = Folder("s3://lake")
    etag = store.etag("x/data") if replaces else None
    name = "x/data" if replaces else "x/new"
    lost: list[Seen] = []

    def loses(seen: Seen) -> bool:
        if seen.method == "PUT" and not lost:
            lost.append(seen)
            return True
        return False

    proxy.loses = loses
    assert store.replace(name, b"mine", etag)
    assert lost
    proxy.requests.clear()
    assert not store.replace(name, b"late", etag)
    assert store.get(name) == b"mine"


@pytest.mark.slow
def test_a_store_that_stays_down_ends_the_attempt_with_an_error_that_is_worth_another(
    one_attempt: None, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RETRY_VARIABLE, "1")
    proxy.down_for(1000)
    with pytest.raises(
        UnreachableError, match=r"^s3://lake/x/data: unreachable for \d+ s, .*storage.retry_s"
    ):
        Folder("s3://lake").get("x/data")
    monkeypatch.setenv(RETRY_VARIABLE, "1000")
    with limited_to(0), pytest.raises(UnreachableError):
        Folder("s3://lake").get("x/data")


@pytest.mark.slow
def test_a_missing_bucket_is_reported_at_once(proxy: Proxy) -> None:
    with pytest.raises(RefusedError, match=r"^s3://sea/x/data: the bucket does not exist"):
        Folder("s3://sea").put("x/data", DATA)
    with pytest.raises(RefusedError, match=r"^s3://sea/.*: the bucket does not exist"):
        Folder("s3://sea").create("x/data", DATA)


@pytest.mark.slow
@pytest.mark.parametrize("status", [401, 403])
def test_an_object_to_which_access_is_denied_is_reported_at_once(proxy: Proxy, status: int) -> None:
    proxy.denies = status
    with pytest.raises(RefusedError, match=r"^s3://lake/x/data: no access \(.*\); check the credentials"):
        Folder("s3://lake").get("x/data")
    assert len(proxy.requests) == 1


@pytest.mark.slow
def test_missing_credentials_are_reported_at_once(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    with pytest.raises(RefusedError, match=r"^s3://lake/x: no access \(NoCredentialsError"):
        Folder("s3://lake").get("x")


@pytest.mark.slow
def test_a_host_that_does_not_exist_and_a_closed_port_are_waited_for(
    one_attempt: None, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RETRY_VARIABLE, "0")
    for endpoint in ("http://no-such-host.invalid", "http://127.0.0.1:9"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(UnreachableError, match="EndpointConnectionError"):
            Folder("s3://lake").get("x")


def test_a_certificate_that_is_not_trusted_is_reported_at_once() -> None:
    def access() -> None:
        raise ConnectionError(
            "SSL validation failed [SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate"
        )

    with pytest.raises(RefusedError, match=r"^s3://lake/x: a certificate is not trusted .*AWS_CA_BUNDLE"):
        retries.patiently("s3://lake/x", access)


def test_a_name_that_no_bucket_can_have_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    with pytest.raises(RefusedError, match=r"^s3://my!lake/x: this is not the name of a bucket"):
        Folder("s3://my!lake").find("x")


def test_a_limit_includes_the_first_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def access() -> None:
        attempts.append(1)
        time.sleep(0.2)
        raise TimeoutError("no answer")

    with retries.limited_to(0.1), pytest.raises(UnreachableError):
        retries.patiently("s3://lake/x", access)
    assert len(attempts) == 1


def test_an_error_of_our_own_is_never_retried() -> None:
    def access() -> None:
        raise PencilError("damaged") from ConnectionResetError()

    with pytest.raises(PencilError, match="damaged"):
        retries.patiently("s3://lake/x", access)


@pytest.mark.slow
def test_a_file_that_could_not_be_written_to_its_end_is_not_put(proxy: Proxy) -> None:
    def write() -> None:
        with open_url("s3://lake/x/new", "wb") as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert Folder("s3://lake").find("x/new") is None


def test_a_url_is_reported_without_its_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    def access() -> None:
        raise ConnectionResetError("GET https://me:hush@host/x.tar?X-Amz-Signature=hush failed")

    monkeypatch.setenv(RETRY_VARIABLE, "0")
    with pytest.raises(UnreachableError, match=r"GET https://\*\*\*@host/x.tar failed"):
        retries.patiently("https://host/x.tar", access)
    files, path = filesystem_of("https://me:hush@127.0.0.1:9/x.tar?signature=hush")
    with pytest.raises(UnreachableError) as error:
        files.cat_file(path)
    assert "https://***@127.0.0.1:9/x.tar: unreachable" in str(error.value)
    assert "hush" not in str(error.value)


def test_every_repeated_access_is_counted_by_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(retries, "listeners", [heard.append])
    faults = [ConnectionError(), TimeoutError()]

    def access() -> str:
        if faults:
            raise faults.pop()
        return "bytes"

    assert retries.patiently("s3://lake/shards/0.tar", access) == "bytes"
    assert heard == ["s3://lake", "s3://lake"]
