"""Files that are created once, and replaced only by a writer that knows them: on disk, in memory, on S3."""

import os
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from s3_front import Front, fresh_front

from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder

ROOT = Path(__file__).parents[2]


@pytest.fixture
def front(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Front:
    return fresh_front(monkeypatch)


@pytest.fixture(params=["disk", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty storage of each kind."""
    if request.param == "s3":
        request.getfixturevalue("front")
        return "s3://lake/clothing"
    return str(tmp_path) if request.param == "disk" else f"memory://{uuid.uuid4().hex}"


def test_a_file_is_created_once_and_replaced_only_by_a_writer_that_knows_it(storage: str) -> None:
    store, other = Folder(storage), Folder(storage)
    assert store.read("nights/CURRENT") is None
    assert store.etag("nights/CURRENT") is None
    assert not store.replace("nights/CURRENT", b"0", "some etag")
    assert store.create("nights/CURRENT", b"1")
    assert not other.create("nights/CURRENT", b"2")
    found = store.read("nights/CURRENT")
    assert found is not None
    assert found[0] == b"1"
    assert found[1] == store.etag("nights/CURRENT") == other.etag("nights/CURRENT")
    assert other.replace("nights/CURRENT", b"3", found[1])
    assert not store.replace("nights/CURRENT", b"4", found[1])
    assert not store.replace("nights/CURRENT", b"4", None)
    newest = store.read("nights/CURRENT")
    assert newest is not None
    assert newest[0] == b"3"
    assert newest[1] != found[1]


def test_a_file_that_holds_the_bytes_of_a_refused_put_counts_as_put(storage: str) -> None:
    store = Folder(storage)
    assert store.create("plan", b"mine")
    etag = store.etag("plan")
    assert store.create("plan", b"mine")
    assert store.replace("plan", b"more", etag)
    assert store.replace("plan", b"more", etag)


def test_of_several_writers_at_once_one_creates_and_one_replaces_a_file(storage: str) -> None:
    store = Folder(storage)
    words = [b"%d" % number for number in range(8)]
    with ThreadPoolExecutor(len(words)) as pool:
        created = list(pool.map(lambda word: store.create("runs/demo/lease", word), words))
        found = store.read("runs/demo/lease")
        assert found is not None
        assert created == [word == found[0] for word in words]
        etag = found[1]
        replaced = list(pool.map(lambda word: store.replace("runs/demo/lease", word + b"!", etag), words))
    found = store.read("runs/demo/lease")
    assert found is not None
    assert replaced == [word + b"!" == found[0] for word in words]


CREATE = """
import sys
from pencil_scale.storage.folder import Folder
store = Folder(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print([store.create(f"plans/{number}", sys.argv[2].encode()) for number in range(20)].count(True))
"""


def test_each_file_is_created_by_one_of_two_processes(storage: str) -> None:
    if storage.startswith("memory"):
        pytest.skip("memory belongs to one process")
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CREATE, storage, name], cwd=ROOT, stdin=pipe, stdout=pipe, text=True
        )
        for name in ("one", "two")
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    assert sum(int(process.communicate()[0]) for process in processes) == 20


def test_a_folder_contains_only_finished_files_and_its_lock(tmp_path: Path) -> None:
    store = Folder(str(tmp_path))
    store.create("CURRENT", b"1")
    store.create("CURRENT", b"2")
    store.replace("CURRENT", b"3", store.etag("CURRENT"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "CURRENT"]


def test_the_same_bytes_written_again_to_a_disk_are_a_new_version(tmp_path: Path) -> None:
    store = Folder(str(tmp_path))
    store.create("CURRENT", b"1")
    old = store.etag("CURRENT")
    os.utime(tmp_path / "CURRENT", ns=(1, 1))
    assert not store.replace("CURRENT", b"2", old)


@pytest.mark.slow
def test_a_put_whose_answer_was_lost_finds_its_own_file(front: Front) -> None:
    store = Folder("s3://lake/clothing")
    front.answers_to_lose = 1
    assert store.create("plan", b"mine")
    assert front.answers_to_lose == 0
    etag = store.etag("plan")
    front.answers_to_lose = 1
    assert store.replace("plan", b"more", etag)
    assert front.answers_to_lose == 0
    assert not store.replace("plan", b"again", etag)


@pytest.mark.slow
def test_a_store_that_ignores_conditions_is_reported_once(
    front: Front, capsys: pytest.CaptureFixture[str]
) -> None:
    front.ignores_conditions = True
    stores = [Folder("s3://lake/clothing") for _ in range(2)]
    assert stores[0].create("plan", b"1")
    assert not stores[1].create("plan", b"2")  # compared and put, in two steps
    assert stores[1].replace("plan", b"3", stores[1].etag("plan"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WARNING: s3://lake ignores conditional puts")


@pytest.mark.slow
def test_a_store_that_keeps_conditions_causes_no_warning_and_no_probe_remains(
    front: Front, capsys: pytest.CaptureFixture[str]
) -> None:
    front.answers_to_lose = 1
    assert Folder("s3://lake/clothing").read("plan") is None
    assert capsys.readouterr().err == ""
    assert front.answers_to_lose == 0
    assert fsspec.filesystem("s3").find("lake") == []


@pytest.mark.slow
def test_a_large_file_is_one_conditional_put(front: Front) -> None:
    store = Folder("s3://lake/clothing")
    data = b"x" * (101 * 2**20)  # by default s3fs splits anything over 100 MiB
    assert store.create("models/demo.pt", data)
    assert not store.create("models/demo.pt", data[1:])
    assert "-" not in str(store.etag("models/demo.pt"))  # as in the etag of an object put in several pieces


@pytest.mark.slow
def test_a_missing_bucket_is_reported_in_one_line(front: Front) -> None:
    with pytest.raises(PencilError, match=r"s3://sea/clothing/\S+: the bucket does not exist"):
        Folder("s3://sea/clothing").create("plan", b"1")
