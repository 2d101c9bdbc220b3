"""Written shards: webdataset and tarfile read them, and an interruption does not change them."""

import os
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st
from shard_sources import bytes_in, class_folders, image, job_of, refusal, samples_in, source_of, written_here
from webdataset.tariterators import base_plus_ext

from pipelines import make_shards
from pipelines.make_shards import file_sizes, write_shard
from pipelines.shard_making.samples import RawSample, clean_key

DATA = Path(os.environ.get("PENCIL_DATA", Path(__file__).parents[3] / "shared" / "data"))


@given(st.text(min_size=1).filter(lambda name: "/" not in name))
def test_webdataset_reads_a_key_back_from_the_name_of_a_member(name: str) -> None:
    try:
        key = clean_key(f"class.of.{'x'}/{name}.jpg")
    except make_shards.PencilError:
        return
    assert base_plus_ext(f"{key}.json") == (key, "json")


def write(out: Path | str, *images: bytes, num_labels: int | None = None) -> int:
    """Write a shard of one class; return the number of images of an unknown format."""
    samples = [RawSample(f"k{row}", data, f"k{row}.gif", row) for row, data in enumerate(images)]
    given = np.zeros(num_labels or len(samples), np.int64)
    return write_shard((["cat"], "", str(out)), "s-000000.tar", lambda: samples, given, None)


def test_images_of_an_unknown_format_are_copied_and_counted(tmp_path: Path) -> None:
    assert write(tmp_path, image(1), b"not an image") == 1
    assert samples_in(tmp_path)["k1"]["gif"] == b"not an image"


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(make_shards.PencilError, match="1 sample found, 2 expected"):
        write(tmp_path, image(1), num_labels=2)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    source = class_folders(tmp_path / "src")
    assert "file/out/classes.txt: cannot be written" in refusal(
        capsys, "folder", source, tmp_path / "file" / "out"
    )


def test_the_bytes_of_a_shard_depend_only_on_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, now in (("a", 1.0), ("b", 1e9)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        write(tmp_path / name, image(1), image(2))
    assert bytes_in(tmp_path / "a") == bytes_in(tmp_path / "b")


def test_shards_can_be_written_to_a_store_that_is_not_a_local_folder(tmp_path: Path) -> None:
    out = "memory://shards-of-a-test/deep"
    write(out, image(1))
    write(tmp_path, image(1))
    assert file_sizes(out) == file_sizes(str(tmp_path))


@pytest.mark.slow
def test_a_shard_on_s3_has_the_same_bytes_as_a_local_one(tmp_path: Path, s3_endpoint: str) -> None:
    import s3fs

    store = s3fs.S3FileSystem()
    store.mkdir("lake")
    out = "s3://lake/shards"
    write(out, image(1), image(2))
    write(tmp_path, image(1), image(2))
    store.pipe_file("lake/shards/classes.txt", b"cat\n")
    assert file_sizes(out) == file_sizes(str(tmp_path)) | {"classes.txt": 4}
    there = store.cat_file("lake/shards/s-000000.tar")
    assert there == (tmp_path / "s-000000.tar").read_bytes()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_webdataset_reads_back_what_the_job_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = class_folders(tmp_path / "src", per_class=6)
    (source / "notes.txt").write_text("no image")
    monkeypatch.chdir(tmp_path)  # Ray's workers stay where they are: so they need absolute paths
    assert make_shards.main(["folder", "src", "out", "--samples-per-shard", "4"]) == 0
    shards = str(tmp_path / "out" / "train-{000000..000004}.tar")
    samples = list(webdataset.WebDataset(shards, shardshuffle=False, empty_check=False))
    assert len({sample["__key__"] for sample in samples}) == 18
    assert Counter(int(sample["cls"]) for sample in samples) == {0: 6, 1: 6, 2: 6}
    assert (tmp_path / "out" / "classes.txt").read_text() == "cat\ndog\nowl\n"
    said = capsys.readouterr().out
    assert "5 (5 written now, 0 from before)" in said
    assert "1 file, such as notes.txt" in said


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_shards_that_only_another_machine_can_see_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of("folder", class_folders(tmp_path / "src"), tmp_path / "out")
    monkeypatch.setattr(make_shards, "write_shard", lambda *_: 0)  # as if it wrote to another machine's disk
    with pytest.raises(make_shards.PencilError, match=r"1 shard, such as train-000000.tar"):
        make_shards.run(job)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_second_run_writes_only_missing_shards_with_the_same_bytes(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "src")
    job = job_of("folder", source, tmp_path / "out", "--samples-per-shard", 3, "--noise", "symmetric:0.5")
    first = make_shards.run(job)
    before = bytes_in(tmp_path / "out")
    (tmp_path / "out" / "train-000002.tar").unlink()
    (tmp_path / "out" / "train-000002.tar.0123.unfinished").write_bytes(b"from a killed writer")
    kept = (tmp_path / "out" / "train-000001.tar").stat().st_mtime_ns
    second = make_shards.run(job)
    assert (first.num_written, second.num_written, make_shards.run(job).num_written) == (4, 1, 0)
    assert bytes_in(tmp_path / "out") == before
    assert (tmp_path / "out" / "train-000001.tar").stat().st_mtime_ns == kept
    assert (
        second.num_bytes
        == first.num_bytes
        == sum(len(data) for name, data in before.items() if "tar" in name)
    )


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_folder_with_shards_of_another_job_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = class_folders(tmp_path / "src"), tmp_path / "out"
    assert make_shards.main(["folder", str(source), str(out), "--seed", "3"]) == 0
    capsys.readouterr()
    before = bytes_in(out)
    assert "made with seed 3, now 4; repeat" in refusal(capsys, "folder", source, out, "--seed", 4)
    assert "made with noise None, now symmetric:0.2; repeat" in refusal(
        capsys, "folder", source, out, "--seed", 3, "--noise", "symmetric:0.2"
    )
    assert "made with no_shuffle False, now True; repeat" in refusal(
        capsys, "folder", source, out, "--seed", 3, "--no-shuffle"
    )
    (source / "cat" / "another.png").write_bytes(image(999))
    assert "made with number of samples 12, now 13; repeat" in refusal(
        capsys, "folder", source, out, "--seed", 3
    )
    (source / "dog" / "dog.1.png").unlink()
    assert "made with hash of the names" in refusal(capsys, "folder", source, out, "--seed", 3)
    classes = class_folders(tmp_path / "other", classes=("ant", "bee"))
    assert "classes.txt: has other classes" in refusal(capsys, "folder", classes, out, "--prefix", "test")
    (out / "train.make_shards.json").unlink()
    assert "was made by something else" in refusal(capsys, "folder", source, out, "--seed", 3)
    assert bytes_in(out).items() <= before.items()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_missing_image_file_is_named_and_its_shard_is_not_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").write_bytes(image(0))
    (tmp_path / "t.csv").write_text("image,label\na.png,cat\nb.png,dog\n")
    arguments = ["table", str(tmp_path / "t.csv"), str(tmp_path / "out"), "--samples-per-shard", "1"]
    assert make_shards.main(arguments) == 2
    assert "error: b.png: no such image file under" in capfd.readouterr().err
    assert not (tmp_path / "out" / "train-000001.tar").exists()
    (tmp_path / "b.png").write_bytes(image(1))
    assert make_shards.main(arguments) == 0
    assert len(samples_in(tmp_path / "out")) == 2


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_killed_job_resumes_and_writes_the_same_shards(tmp_path: Path) -> None:
    source, out = class_folders(tmp_path / "src", per_class=200), tmp_path / "out"
    typed = ["folder", str(source), str(out), "--samples-per-shard", "2"]
    words = [sys.executable, "-m", "pipelines.make_shards", *typed]
    killed = subprocess.Popen(words, cwd=Path(__file__).parents[2], stderr=subprocess.DEVNULL)
    while not list(out.glob("*.tar")):
        assert killed.poll() is None
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    half = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert 0 < len(half) < 300
    for path in out.glob("*.tar"):
        with tarfile.open(path) as tar:
            assert len(tar.getnames()) == 6
    assert make_shards.main(typed) == 0
    assert half.items() <= {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}.items()
    written_here(job_of("folder", source, tmp_path / "whole", "--samples-per-shard", 2))
    shards = {name: data for name, data in bytes_in(out).items() if name.endswith(".tar")}
    assert shards == bytes_in(tmp_path / "whole")
    assert not list(out.glob("*.unfinished"))


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data at {DATA}; set PENCIL_DATA")
def test_cifar10_with_human_labels_has_the_published_noise_rate(tmp_path: Path) -> None:
    spec = f"{DATA / 'cifar10n_part.npz'}#random1"
    job = job_of(
        "table",
        DATA / "cifar10" / "train-*.parquet",
        tmp_path,
        "--given-labels",
        spec,
        "--samples-per-shard",
        100,
    )
    source = source_of(job)
    assert source.classes[0] == "airplane"
    assert make_shards.num_differing(source) == 8617  # 17.23 % of 50,000
    assert sum(1 for _ in source.pieces[0]()) == 100
