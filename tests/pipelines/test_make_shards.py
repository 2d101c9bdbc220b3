"""Folders, tables and downloads as sources of shards, and what is refused."""

import json
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shard_sources import class_folders, image, job_of, parquet, refusal, source_of, written_here

from pencil_scale.method.noise import symmetric_noise
from pipelines.shard_making.options import jobs_of, parse_arguments


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


def keys_of(*arguments: object) -> list[str]:
    return list(written_here(job_of(*arguments)))


def test_keys_start_with_a_prefix_other_than_the_default_unless_a_column_gives_them(tmp_path: Path) -> None:
    table = parquet(tmp_path / "t.parquet", range(2), name=["a", "b"])
    assert keys_of("table", table, tmp_path / "1") == ["000000000", "000000001"]
    assert keys_of("table", table, tmp_path / "2", "--prefix", "train") == ["000000000", "000000001"]
    test = ["--prefix", "test"]
    assert keys_of("table", table, tmp_path / "3", *test) == ["test-000000000", "test-000000001"]
    assert keys_of("table", table, tmp_path / "4", *test, "--key-column", "name") == ["a", "b"]
    tree = class_folders(tmp_path / "photos", per_class=1)
    plain = keys_of("folder", tree, tmp_path / "5")
    assert keys_of("folder", tree, tmp_path / "6", *test) == [f"test-{key}" for key in plain]


def test_class_names_are_found_in_a_parquet_schema(tmp_path: Path) -> None:
    features = {"info": {"features": {"label": {"names": ["a", "b", "c"]}}}}
    for number, metadata in enumerate(
        ({"class_names": '["a", "b", "c"]'}, {"huggingface": json.dumps(features)})
    ):
        table = pa.table({"image": [image(0)], "label": [1]}).replace_schema_metadata(metadata)
        pq.write_table(table, tmp_path / f"{number}.parquet")
        found = source_of(job_of("table", tmp_path / f"{number}.parquet", tmp_path))
        assert found.classes == ("a", "b", "c")


@pytest.mark.parametrize("as_csv", [True, False])
def test_the_paths_in_a_table_start_in_its_folder(tmp_path: Path, as_csv: bool) -> None:
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
    numbers = source_of(job_of("table", tmp_path / "t.csv", tmp_path))
    assert (numbers.classes, numbers.given_class.tolist()) == (("0", "1", "2"), [2, 0])
    names = source_of(job_of("table", tmp_path / "t.csv", tmp_path, "--label-names", "2,0"))
    assert (names.classes, names.given_class.tolist()) == (("2", "0"), [0, 1])


def test_added_noise_is_that_of_the_paper_and_keeps_the_true_classes(tmp_path: Path) -> None:
    table = parquet(tmp_path / "t.parquet", range(300))
    samples = written_here(job_of("table", table, tmp_path / "out", "--noise", "symmetric:0.6", "--seed", 7))
    true = np.array([json.loads(sample["json"])["true_class"] for sample in samples.values()])
    made = np.array([int(sample["cls"]) for sample in samples.values()])
    assert true.tolist() == [row % 3 for row in range(300)]
    assert made.tolist() == symmetric_noise(true, 0.6, 3, seed=7).noisy_class.tolist()


def test_asymmetric_noise_turns_a_class_into_the_next(tmp_path: Path) -> None:
    table = parquet(tmp_path / "t.parquet", range(90))
    samples = written_here(
        job_of("table", table, tmp_path / "out", "--noise", "asymmetric:0.5", "--flips", "next")
    )
    steps = Counter((int(s["cls"]) - json.loads(s["json"])["true_class"]) % 3 for s in samples.values())
    assert set(steps) == {0, 1}


def test_given_labels_replace_those_of_the_table_which_become_the_true_classes(tmp_path: Path) -> None:
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
def test_the_two_sets_of_digits_share_no_image() -> None:
    train, test = jobs_of(parse_arguments(["digits", "nowhere", "--noise", "symmetric:0.4"]))
    keys = [{sample.key for piece in source_of(job).pieces for sample in piece()} for job in (train, test)]
    assert [len(each) for each in keys] == [1437, 360]
    assert not keys[0] & keys[1]
    assert test.noise is None


REFUSALS = [
    (("table", "{}/t.parquet", "--label-column", "lable"), "no column 'lable'; found image, label"),
    (("table", "{}/t.parquet", "--label-names", "a,b"), "row 2 has the unknown class 2"),
    (("table", "{}/twice.csv", "--key-column", "id"), "twice.csv, row 0 and"),
    (("table", "{}/names.csv", "--label-names", "cat,dog"), "unknown class 'owl'"),
    (("table", "{}/hole.csv"), "row 1 has no label"),
    (("table", "{}/empty.csv"), "not a readable CSV"),
    (("table", "{}/ragged.csv"), "not a readable CSV"),
    (("table", "{}/norows.csv"), "the table has no rows"),
    (("table", "{}/broken.parquet"), "not a readable Parquet"),
    (("table", "{}/absent.csv"), "no such table"),
    (("table", "{}/t.parquet", "--given-labels", "{}/n.npz#others"), "no array 'others'; found people"),
    (("table", "{}/t.parquet", "--given-labels", "{}/n.npz#people"), "has 2 labels and"),
    (("table", "{}/t.parquet", "--noise", "symmetric:1.5"), "with RATE from 0 to 1"),
    (("table", "{}/t.parquet", "--noise", "asymmetric:0.5"), "--flips"),
    (("table", "{}/t.parquet", "--noise", "asymmetric:0.5", "--flips", "cifar10"), "3 were found"),
    (("folder", "{}/bare"), "no image in any class folder"),
    (("folder", "{}/absent"), "no such folder"),
    (("folder", "{}/clash"), "duplicate key 'cat/a': cat/a.jpg and cat/a.png"),
    (("clothing1m", "{}/bare", "--split", "noisy"), "noisy_train_key_list.txt: cannot be read"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSALS)
def test_a_source_that_cannot_be_used_is_refused_in_one_line(
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


def test_a_pattern_that_the_shell_expanded_gets_advice_to_quote_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        job_of("table", "train-0.parquet", "train-1.parquet", "out")
    assert caught.value.code == 2
    assert "unrecognized arguments: out; a pattern needs quotes" in capsys.readouterr().err
