"""Shards made of folders, tables and downloads: read back by webdataset, by tarfile, and byte for byte."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from webdataset.tariterators import base_plus_ext

from pencil_scale.noise import symmetric_noise
from pipelines import make_shards
from pipelines.shard_making.shard_options import ShardJob, jobs_of, parse_arguments
from pipelines.shard_making.shard_samples import BytesPiece, RawSample, SourceError, clean_key
from pipelines.shard_making.shard_writing import OutFolder, ShardPlan, write_shard

DATA = Path(os.environ.get("PENCIL_DATA", Path(__file__).parents[2] / "shared" / "data"))


def image(number: int, format: str = "PNG") -> bytes:
    target = BytesIO()
    Image.new("RGB", (4, 4), (number % 256, number // 256, 7)).save(target, format)
    return target.getvalue()


def class_folders(root: Path, per_class: int = 4, classes: tuple[str, ...] = ("cat", "dog", "owl")) -> Path:
    for place, name in enumerate(classes):
        (root / name / "deep").mkdir(parents=True)
        for number in range(per_class):
            data = image(100 * place + number, "PNG" if number % 2 else "JPEG")
            where = (
                root
                / name
                / ("deep" if number == 0 else "")
                / f"{name}.{number}.{'png' if number % 2 else 'JPG'}"
            )
            where.write_bytes(data)
    return root


def parquet(path: Path, numbers: range, **columns: object) -> Path:
    table = {"image": [image(number) for number in numbers], "label": [number % 3 for number in numbers]}
    pq.write_table(pa.table(table | columns), path, row_group_size=3)
    return path


def job_of(*arguments: object) -> ShardJob:
    (job,) = jobs_of(parse_arguments([str(argument) for argument in arguments]))
    return job


def written_here(job: ShardJob) -> dict[str, dict[str, bytes]]:
    """Write a job's shards in this process, without Ray, and give the samples that tarfile finds."""
    labels, _ = make_shards.add_noise(job.source.labels(), job.noise)
    names = make_shards.shard_names(job.prefix, len(labels.given_class), job.per_shard)
    for plan in make_shards._plans(job, labels, names):
        write_shard(plan, labels.classes, job.out)
    return samples_in(Path(job.out))


def members_in(folder: Path) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                yield member, file.read()


def samples_in(folder: Path) -> dict[str, dict[str, bytes]]:
    samples: dict[str, dict[str, bytes]] = {}
    for member, data in members_in(folder):
        key, suffix = base_plus_ext(member.name)
        samples.setdefault(key, {})[suffix] = data
    return samples


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert make_shards.main([str(argument) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_folder_tree_keeps_every_image_bit_for_bit(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "src")
    samples = written_here(job_of("folder", source, tmp_path / "out", "--samples-per-shard", 5))
    assert len(samples) == 12
    for sample in samples.values():
        about = json.loads(sample["json"])
        original = (source / about["source"]).read_bytes()
        assert original in (sample.get("png"), sample.get("jpg"))
        assert about["label"] == about["source"].split("/")[0] == ("cat", "dog", "owl")[int(sample["cls"])]
        assert "true_class" not in about


def test_a_shuffled_folder_mixes_the_classes_and_an_unshuffled_one_keeps_its_order(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "src", per_class=20)
    first = {}
    for name, options in (("mixed", ()), ("kept", ("--no-shuffle",))):
        written_here(job_of("folder", source, tmp_path / name, "--samples-per-shard", 20, *options))
        with tarfile.open(tmp_path / name / "train-000000.tar") as tar:
            first[name] = [member.split("/")[0] for member in tar.getnames()]
    assert set(first["mixed"]) == {"cat", "dog", "owl"}
    assert set(first["kept"]) == {"cat"}


def test_parquet_rows_land_in_order_across_files_row_groups_and_shards(tmp_path: Path) -> None:
    for start, stop, name in ((0, 7, "t-2.parquet"), (7, 19, "t-10.parquet"), (19, 24, "t-11.parquet")):
        parquet(tmp_path / name, range(start, stop))
    samples = written_here(
        job_of("table", tmp_path / "t-*.parquet", tmp_path / "out", "--samples-per-shard", 5)
    )
    assert list(samples) == [f"{row:09d}" for row in range(24)]
    assert [sample["png"] for sample in samples.values()] == [image(row) for row in range(24)]
    assert [int(sample["cls"]) for sample in samples.values()] == [row % 3 for row in range(24)]
    assert [json.loads(sample["json"])["index"] for sample in samples.values()] == list(range(24))


def test_class_names_are_found_in_a_parquet_schema(tmp_path: Path) -> None:
    features = {"info": {"features": {"label": {"names": ["a", "b", "c"]}}}}
    for place, metadata in enumerate(
        ({"class_names": '["a", "b", "c"]'}, {"huggingface": json.dumps(features)})
    ):
        table = pa.table({"image": [image(0)], "label": [1]}).replace_schema_metadata(metadata)
        pq.write_table(table, tmp_path / f"{place}.parquet")
        assert job_of("table", tmp_path / f"{place}.parquet", tmp_path).source.labels().classes == (
            "a",
            "b",
            "c",
        )


@pytest.mark.parametrize("as_csv", [True, False])
def test_a_table_of_paths_reads_the_files_beside_it(tmp_path: Path, as_csv: bool) -> None:
    class_folders(tmp_path)
    paths = [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.glob("*/*.png"))]
    columns = {
        "path": paths,
        "kind": [path.split("/")[0] for path in paths],
        "id": [f"k{n}" for n in range(len(paths))],
    }
    if as_csv:
        rows = [",".join(columns), *(",".join(row) for row in zip(*columns.values(), strict=True))]
        (tmp_path / "t.csv").write_text("\n".join(rows))
    else:
        pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    options = (
        "--image-column",
        "path",
        "--label-column",
        "kind",
        "--key-column",
        "id",
        "--samples-per-shard",
        4,
    )
    table = tmp_path / ("t.csv" if as_csv else "t.parquet")
    samples = written_here(job_of("table", table, tmp_path / "out", *options))
    assert list(samples) == columns["id"]
    assert [sample["png"] for sample in samples.values()] == [
        (tmp_path / path).read_bytes() for path in paths
    ]
    assert [json.loads(sample["json"])["label"] for sample in samples.values()] == columns["kind"]


def test_numbers_written_as_text_are_numbers_unless_they_are_names(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("image,label\na.png,2\nb.png,0\n")
    numbers = job_of("table", tmp_path / "t.csv", tmp_path).source.labels()
    assert (numbers.classes, numbers.given_class.tolist()) == (("0", "1", "2"), [2, 0])
    names = job_of("table", tmp_path / "t.csv", tmp_path, "--label-names", "2,0").source.labels()
    assert (names.classes, names.given_class.tolist()) == (("2", "0"), [0, 1])


def test_added_noise_keeps_the_truth_and_is_the_papers(tmp_path: Path) -> None:
    table = parquet(tmp_path / "t.parquet", range(300))
    samples = written_here(job_of("table", table, tmp_path / "out", "--noise", "symmetric:0.6", "--seed", 7))
    true = np.array([json.loads(sample["json"])["true_class"] for sample in samples.values()])
    made = np.array([int(sample["cls"]) for sample in samples.values()])
    assert true.tolist() == [row % 3 for row in range(300)]
    assert made.tolist() == symmetric_noise(true, 0.6, 3, seed=7).noisy_class.tolist()


def test_asymmetric_noise_sends_a_class_to_the_next(tmp_path: Path) -> None:
    table = parquet(tmp_path / "t.parquet", range(90))
    samples = written_here(
        job_of("table", table, tmp_path / "out", "--noise", "asymmetric:0.5", "--flips", "next")
    )
    steps = Counter((int(s["cls"]) - json.loads(s["json"])["true_class"]) % 3 for s in samples.values())
    assert set(steps) == {0, 1}


def test_given_labels_replace_the_tables_own_which_become_the_truth(tmp_path: Path) -> None:
    table = parquet(tmp_path / "t.parquet", range(6))
    np.savez(tmp_path / "n.npz", people=np.array([2, 1, 2, 0, 0, 0], np.uint8))
    spec = f"{tmp_path / 'n.npz'}#people"
    samples = written_here(job_of("table", table, tmp_path / "out", "--given-labels", spec)).values()
    assert [int(sample["cls"]) for sample in samples] == [2, 1, 2, 0, 0, 0]
    assert [json.loads(sample["json"])["true_class"] for sample in samples] == [0, 1, 2, 0, 1, 2]


def clothing1m(root: Path) -> Path:
    """A download of six images; one noisy sample also has a clean label."""
    paths = [f"images/{number}/{number},{number}.jpg" for number in range(6)]
    for number, path in enumerate(paths):
        (root / path).parent.mkdir(parents=True)
        (root / path).write_bytes(image(number, "JPEG"))
    (root / "category_names_eng.txt").write_text("T-Shirt\nShirt\nKnitwear\n")
    (root / "noisy_label_kv.txt").write_text("".join(f"{path} {n % 3}\n" for n, path in enumerate(paths[:4])))
    (root / "clean_label_kv.txt").write_text("".join(f"{path} 2\n" for path in paths[3:]))
    (root / "noisy_train_key_list.txt").write_text("\n".join(paths[:4]))
    (root / "clean_test_key_list.txt").write_text("\n".join(paths[4:]))
    return root


def test_clothing1m_gives_each_split_its_own_labels(tmp_path: Path) -> None:
    source = clothing1m(tmp_path / "src")
    noisy = written_here(job_of("clothing1m", source, tmp_path / "noisy", "--split", "noisy", "--no-shuffle"))
    assert [int(sample["cls"]) for sample in noisy.values()] == [0, 1, 2, 0]
    assert [json.loads(sample["json"]).get("true_class") for sample in noisy.values()] == [
        None,
        None,
        None,
        2,
    ]
    assert list(noisy)[3] == "images/3/3,3"
    test = written_here(job_of("clothing1m", source, tmp_path / "test", "--split", "clean_test"))
    assert sorted(test) == ["images/4/4,4", "images/5/5,5"]
    assert {json.loads(sample["json"])["label"] for sample in test.values()} == {"Knitwear"}


@pytest.mark.slow
def test_digits_split_into_two_sets_that_share_no_image() -> None:
    train, test = jobs_of(parse_arguments(["digits", "nowhere", "--noise", "symmetric:0.4"]))
    keys = [
        {
            sample.key
            for _ in [job.source.labels()]
            for piece in job.source.pieces(500)
            for sample in piece.samples()
        }
        for job in (train, test)
    ]
    assert [len(each) for each in keys] == [1437, 360]
    assert not keys[0] & keys[1]
    assert test.noise is None


REFUSALS = [
    (("table", "{}/t.parquet", "--label-column", "lable"), "no column 'lable'; it has image, label"),
    (("table", "{}/t.parquet", "--label-names", "a,b"), "row 2 has the unknown class 2"),
    (("table", "{}/twice.csv", "--key-column", "id"), "key 'x' of column id repeats 2 times"),
    (("table", "{}/names.csv", "--label-names", "cat,dog"), "unknown class 'owl'"),
    (
        (
            "table",
            "{}/hole.csv",
        ),
        "row 1 has no label",
    ),
    (
        (
            "table",
            "{}/empty.csv",
        ),
        "not a readable CSV",
    ),
    (
        (
            "table",
            "{}/ragged.csv",
        ),
        "not a readable CSV",
    ),
    (
        (
            "table",
            "{}/norows.csv",
        ),
        "the table has no rows",
    ),
    (
        (
            "table",
            "{}/broken.parquet",
        ),
        "not a readable Parquet",
    ),
    (
        (
            "table",
            "{}/absent.csv",
        ),
        "no such table",
    ),
    (("table", "{}/t.parquet", "--given-labels", "{}/n.npz#others"), "no array 'others'; it has people"),
    (("table", "{}/t.parquet", "--given-labels", "{}/n.npz#people"), "has 2 labels and"),
    (("table", "{}/t.parquet", "--noise", "symmetric:1.5"), "RATE from 0 to 1"),
    (("table", "{}/t.parquet", "--noise", "asymmetric:0.5"), "--flips"),
    (("table", "{}/t.parquet", "--noise", "asymmetric:0.5", "--flips", "cifar10"), "3 were found"),
    (("folder", "{}/bare"), "no image in any class folder"),
    (("folder", "{}/absent"), "no such folder"),
    (("folder", "{}/clash"), "key 'cat/a' repeats: cat/a.jpg and cat/a.png"),
    (("clothing1m", "{}/bare", "--split", "noisy"), "noisy_train_key_list.txt: cannot be read"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSALS)
def test_a_source_that_cannot_be_used_ends_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    parquet(tmp_path / "t.parquet", range(9))
    np.savez(tmp_path / "n.npz", people=np.zeros(2, int))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing more")
    tables = {
        "twice.csv": "image,label,id\na.png,0,x\nb.png,1,y\nc.png,1,x\n",
        "names.csv": "image,label\na.png,cat\nb.png,owl\n",
        "hole.csv": "image,label\na.png,cat\nb.png,\n",
        "empty.csv": "",
        "ragged.csv": "image,label\na.png,cat,more\n",
        "norows.csv": "image,label\n",
    }
    for name, text in tables.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "stray.jpg").write_bytes(image(0))
    (tmp_path / "clash" / "cat").mkdir(parents=True)
    for name in ("a.jpg", "a.png"):
        (tmp_path / "clash" / "cat" / name).write_bytes(image(0))
    kind, source, *options = (argument.format(tmp_path) for argument in arguments)
    line = refusal(capsys, kind, source, tmp_path / "out", *options)
    assert line.startswith("error: ")
    assert said in line
    assert not (tmp_path / "out").exists()


@given(st.text(min_size=1).filter(lambda name: "/" not in name))
def test_a_key_survives_webdatasets_own_way_of_reading_names(name: str) -> None:
    try:
        key = clean_key(f"class.of.{'x'}/{name}.jpg")
    except SourceError:
        return
    assert base_plus_ext(f"{key}.json") == (key, "json")


def plan_of(*images: bytes, num_labels: int | None = None) -> ShardPlan:
    held = [RawSample(f"k{row}", data, f"k{row}.gif", row) for row, data in enumerate(images)]
    return ShardPlan("s-000000.tar", BytesPiece(held), np.zeros(num_labels or len(held), np.int64), None)


def test_bytes_of_no_known_format_are_copied_and_counted(tmp_path: Path) -> None:
    result = write_shard(plan_of(image(1), b"not an image"), ["cat"], str(tmp_path))
    assert result.num_unrecognised == 1
    assert result.num_bytes == (tmp_path / "s-000000.tar").stat().st_size
    assert samples_in(tmp_path)["k1"]["gif"] == b"not an image"


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(make_shards.OutError, match="1 samples were found where 2 were counted"):
        write_shard(plan_of(image(1), num_labels=2), ["cat"], str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    source = class_folders(tmp_path / "src")
    assert "file/out/classes.txt: cannot be written" in refusal(
        capsys, "folder", source, tmp_path / "file" / "out"
    )


def test_a_shard_depends_on_its_samples_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, now in (("a", 1.0), ("b", 1e9)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        write_shard(plan_of(image(1), image(2)), ["cat"], str(tmp_path / name))
    assert bytes_in(tmp_path / "a") == bytes_in(tmp_path / "b")


def test_shards_reach_a_store_that_is_no_local_folder(tmp_path: Path) -> None:
    out = OutFolder("memory://shards-of-a-test/deep")
    result = write_shard(plan_of(image(1)), ["cat"], out.url)
    assert out.files() == {"s-000000.tar": result.num_bytes}


@pytest.mark.slow
def test_shards_reach_s3_whole(tmp_path: Path, s3_endpoint: str) -> None:
    OutFolder("s3://lake/x")._filesystem.mkdir("lake")
    out = OutFolder("s3://lake/shards")
    result = write_shard(plan_of(image(1), image(2)), ["cat"], out.url)
    out.write_text("classes.txt", "cat\n")
    assert out.files() == {"s-000000.tar": result.num_bytes, "classes.txt": 4}
    write_shard(plan_of(image(1), image(2)), ["cat"], str(tmp_path))
    there = out._filesystem.cat_file("lake/shards/s-000000.tar")
    assert there == (tmp_path / "s-000000.tar").read_bytes()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_webdataset_reads_back_what_the_job_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = class_folders(tmp_path / "src", per_class=6)
    (source / "notes.txt").write_text("no image")
    monkeypatch.chdir(tmp_path)  # Ray's workers stay where they are: relative paths must reach them whole
    assert make_shards.main(["folder", "src", "out", "--samples-per-shard", "4"]) == 0
    shards = str(tmp_path / "out" / "train-{000000..000004}.tar")
    samples = list(webdataset.WebDataset(shards, shardshuffle=False, empty_check=False))
    assert len({sample["__key__"] for sample in samples}) == 18
    assert Counter(int(sample["cls"]) for sample in samples) == {0: 6, 1: 6, 2: 6}
    assert (tmp_path / "out" / "classes.txt").read_text() == "cat\ndog\nowl\n"
    said = capsys.readouterr().out
    assert "5 (5 written now, 0 there before)" in said
    assert "1 files that are no images: notes.txt" in said


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_shards_that_only_another_machine_can_see_are_not_called_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of("folder", class_folders(tmp_path / "src"), tmp_path / "out")
    elsewhere = str(tmp_path / "elsewhere")
    write = make_shards.write_missing
    monkeypatch.setattr(
        make_shards, "write_missing", lambda job, *rest: write(dataclasses.replace(job, out=elsewhere), *rest)
    )
    with pytest.raises(make_shards.OutError, match=r"1 shards such as train-000000.tar"):
        make_shards.run(job)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_second_run_writes_only_what_is_missing_and_the_same_bytes(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "src")
    job = job_of("folder", source, tmp_path / "out", "--samples-per-shard", 3, "--noise", "symmetric:0.5")
    first = make_shards.run(job)
    before = bytes_in(tmp_path / "out")
    (tmp_path / "out" / "train-000002.tar").unlink()
    (tmp_path / "out" / ".train-000002.tar.0123.partial").write_bytes(b"left by a killed writer")
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
def test_other_shards_in_the_folder_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = class_folders(tmp_path / "src"), tmp_path / "out"
    assert make_shards.main(["folder", str(source), str(out), "--seed", "3"]) == 0
    capsys.readouterr()
    before = bytes_in(out)
    assert "made with --seed 3, now 4; repeat" in refusal(capsys, "folder", source, out, "--seed", 4)
    assert "made with --noise none, now symmetric:0.2; repeat" in refusal(
        capsys, "folder", source, out, "--seed", 3, "--noise", "symmetric:0.2"
    )
    assert "made with a shuffle, now --no-shuffle; repeat" in refusal(
        capsys, "folder", source, out, "--seed", 3, "--no-shuffle"
    )
    (source / "cat" / "another.png").write_bytes(image(999))
    assert "the source had 12 samples, now 13; bring" in refusal(capsys, "folder", source, out, "--seed", 3)
    (source / "dog" / "dog.1.png").unlink()
    assert "had other files" in refusal(capsys, "folder", source, out, "--seed", 3)
    classes = class_folders(tmp_path / "other", classes=("ant", "bee"))
    assert "classes.txt: lists other classes" in refusal(capsys, "folder", classes, out, "--prefix", "test")
    (out / "train.make_shards.json").unlink()
    assert "made by something else" in refusal(capsys, "folder", source, out, "--seed", 3)
    assert bytes_in(out).items() <= before.items()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_missing_image_file_is_named_and_its_shard_is_not_there(
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


def started(source: Path, out: Path) -> "subprocess.Popen[bytes]":
    command = [
        sys.executable,
        "-m",
        "pipelines.make_shards",
        "folder",
        str(source),
        str(out),
        "--samples-per-shard",
        "2",
    ]
    return subprocess.Popen(command, cwd=Path(__file__).parents[1], stderr=subprocess.DEVNULL)


@pytest.mark.ray
@pytest.mark.slow
def test_a_job_killed_midway_goes_on_to_the_same_shards(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "src", per_class=400)
    killed = started(source, tmp_path / "out")
    while not list((tmp_path / "out").glob("*.tar")):
        assert killed.poll() is None
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    half = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tar")}
    assert 0 < len(half) < 600
    for path in (tmp_path / "out").glob("*.tar"):
        with tarfile.open(path) as tar:
            assert len(tar.getnames()) == 6
    assert started(source, tmp_path / "out").wait() == 0
    assert (
        half.items()
        <= {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tar")}.items()
    )
    written_here(job_of("folder", source, tmp_path / "whole", "--samples-per-shard", 2))
    shards = {name: data for name, data in bytes_in(tmp_path / "out").items() if name.endswith(".tar")}
    assert shards == bytes_in(tmp_path / "whole")
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data at {DATA}; set PENCIL_DATA")
def test_cifar10_with_human_labels_has_the_noise_that_is_known_of_it(tmp_path: Path) -> None:
    spec = f"{DATA / 'cifar10n_part.npz'}#random1"
    job = job_of("table", DATA / "cifar10" / "train-*.parquet", tmp_path, "--given-labels", spec)
    labels = job.source.labels()
    assert labels.classes[0] == "airplane"
    assert make_shards._num_differing(labels) == 8617  # 17.23 % of 50,000
    piece = next(job.source.pieces(100))
    assert sum(1 for _ in piece.samples()) == 100
