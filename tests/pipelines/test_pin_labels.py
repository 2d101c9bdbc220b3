"""Pins: decisions are found by sample id, overrule learned labels, and every run starts from them."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from catalogue_making import Bench, samples

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.loader import load_config
from pencil_scale.labels.columns import FREE, PINNED
from pencil_scale.labels.pins import read_pins
from pencil_scale.labels.published import published_url
from pencil_scale.labels.start_labels import start_labels
from pencil_scale.labels.table import LabelTable
from pencil_scale.storage.errors import PencilError
from pipelines import export_labels
from pipelines.pin_labels import Summary, main, run


class PinBench(Bench):
    def pin(self, name: str, content: str | bytes) -> Summary:
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return run(load_config(self.folder / "config.yaml", [f"pin.file={path}", "pin.by=ada"]))

    def pins(self) -> list[tuple[int, str, str]]:
        return [(pin["row"], pin["class"], pin["by"]) for pin in read_pins(self.storage).table.to_pylist()]


@pytest.fixture
def bench(tmp_path: Path) -> PinBench:
    found = PinBench(tmp_path)
    found.shard("a.tar", samples(range(6)))  # classes 0, 1, 2 in turn
    found.index()
    return found


def test_json_csv_and_parquet_give_the_same_pins(bench: PinBench, tmp_path: Path) -> None:
    entries = [{"sample_id": "000004", "class": "cat"}, {"sample_id": "000001", "class": 0, "by": "bob"}]
    bench.pin("d.json", json.dumps({"decisions": entries}))
    wanted = [(1, "ant", "bob"), (4, "cat", "ada")]
    assert bench.pins() == wanted
    assert bench.pin("d.csv", "sample_id,class,by\n000004,cat,\n000001,0,bob\n").num_changed == 0
    pq.write_table(pa.Table.from_pylist(entries[:1]), tmp_path / "d.parquet")
    assert bench.pin("d.parquet", (tmp_path / "d.parquet").read_bytes()).num_new == 0
    assert bench.pins() == wanted


def test_the_newest_decision_wins_and_entries_without_a_class_are_counted(bench: PinBench) -> None:
    assert bench.pin("a.csv", "sample_id,class\n000001,ant\n000002,bee\n").num_new == 2
    again = bench.pin("b.csv", "sample_id,class\n000001,cat\n000003,\n")
    assert (again.num_new, again.num_changed, again.num_dropped, again.num_pins) == (0, 1, 1, 2)
    assert bench.pins() == [(1, "cat", "ada"), (2, "bee", "ada")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "sample_id,class\n000001,ant\nnobody,bee\n",
            "1 of 2 samples are not in .* such as 'nobody'; nothing",
        ),
        ("sample_id,class\n000001,dog\n", "entry 1, sample '000001': 'dog' is none of the 3 classes"),
        ("sample_id,class\n000001,ant\n000001,bee\n", "'000001' is decided twice, as 'ant' and as 'bee'"),
        ("key,class\n000001,ant\n", "entry 1 has no text under sample_id"),
    ],
)
def test_a_file_with_one_bad_entry_pins_nothing(bench: PinBench, content: str, said: str) -> None:
    with pytest.raises(PencilError, match=said):
        bench.pin("d.csv", content)
    assert bench.pins() == []


def test_a_decision_that_nobody_signed_is_refused(bench: PinBench) -> None:
    (bench.folder / "d.csv").write_text("sample_id,class,by\n000001,ant,bob\n000002,bee,\n")
    with pytest.raises(PencilError, match=r"1 of 2 decisions do not say who .* '000002'; .* set pin.by=NAME"):
        run(load_config(bench.folder / "config.yaml", [f"pin.file={bench.folder}/d.csv"]))
    assert bench.pins() == []


def test_what_was_dropped_and_what_to_run_next_are_printed(
    bench: PinBench, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [{"sample_id": f"00000{n}", "class": None, "verdict": "none"} for n in range(2)]
    entries += [{"sample_id": "000002", "class": None, "verdict": "reject"}]
    assert bench.pin("d.json", json.dumps([*entries, {"sample_id": "000003", "class": "ant"}])).num_pins == 1
    said = capsys.readouterr().out
    assert "dropped: 2 judged to be none of the classes, such as '000000', '000001'\n" in said
    assert "dropped: 1 judged wrong, no other class chosen, such as '000002'\n" in said
    assert said.endswith("run export_labels again:\n  python -m pipelines.export_labels CONFIG\n")


def test_damaged_json_ends_with_one_line(bench: PinBench, capsys: pytest.CaptureFixture[str]) -> None:
    (bench.folder / "d.json").write_text("[{")
    assert main([str(bench.folder / "config.yaml"), f"pin.file={bench.folder}/d.json"]) == 2
    assert "damaged JSON" in capsys.readouterr().err.splitlines()[-1]


def test_a_missing_file_of_decisions_is_named(bench: PinBench) -> None:
    with pytest.raises(PencilError, match=r"gone\.json: no such file"):
        run(load_config(bench.folder / "config.yaml", [f"pin.file={bench.folder}/gone.json"]))


def test_a_run_starts_with_the_pins_and_no_step_moves_them(bench: PinBench) -> None:
    bench.pin("d.csv", "sample_id,class\n000001,cat\n")
    catalogue = Catalogue.open(bench.storage)
    pins = read_pins(bench.storage).resolve(catalogue.class_names)
    manifest = start_labels(catalogue, bench.storage, 10.0, pins)
    table = LabelTable.restore(manifest, bench.folder / "copy")
    assert table.read([0, 1], "noisy_class").tolist() == [0, 2]
    assert table.read([0, 1], "role").tolist() == [FREE, PINNED]
    table.write([0, 1], np.zeros((2, 3)), None, epoch=0)
    assert table.read([1]).tolist() == [[0.0, 0.0, 10.0]]


def test_an_export_marks_pins_also_those_newer_than_its_labels(bench: PinBench) -> None:
    labels = start_labels(Catalogue.open(bench.storage), bench.storage, 10.0)
    labels.save(published_url(bench.storage, "t"))
    bench.pin("d.csv", "sample_id,class\n000001,cat\n")
    keys = ["export.predict=false", f"export.folder={bench.folder}/out"]
    export_labels.run(load_config(bench.folder / "config.yaml", keys))
    (path,) = (bench.folder / "out").glob("table/*")
    exported = pq.read_table(path).to_pylist()[1]
    assert (
        exported["pinned"],
        exported["predicted_by"],
        exported["given_label"],
        exported["predicted_label"],
    ) == (
        True,
        "person",
        1,
        2,
    )
    assert exported["is_label_issue"]
    assert exported["label_score"] < 0.01


def test_no_decision_is_lost_when_many_people_pin_at_once(tmp_path: Path) -> None:
    bench = PinBench(tmp_path)
    bench.shard("a.tar", samples(range(40)))
    bench.index()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: bench.pin(f"{n}.csv", f"sample_id,class\n{n:06d},cat\n"), range(40)))
    assert [row for row, _, _ in bench.pins()] == list(range(40))


def test_pins_name_their_class_so_a_reordered_list_changes_nothing(bench: PinBench) -> None:
    bench.pin("d.csv", "sample_id,class\n000001,cat\n")
    (bench.folder / "classes.txt").write_text("cat\nbee\nant\n")
    catalogue = bench.index(label="json:name").catalogue
    pins = read_pins(bench.storage).resolve(catalogue.class_names)
    manifest = start_labels(catalogue, bench.storage, 10.0, pins)
    table = LabelTable.restore(manifest, bench.folder / "copy")
    assert [manifest.class_names[number] for number in table.read([0, 1], "noisy_class")] == ["ant", "cat"]


def test_pins_of_a_catalogue_that_was_rebuilt_in_another_order_are_refused(bench: PinBench) -> None:
    bench.pin("d.csv", "sample_id,class\n000001,cat\n")
    fsspec.filesystem("memory").rm(f"{bench.storage}/catalogue".removeprefix("memory:/"), recursive=True)
    bench.shard("0.tar", samples(range(6, 12)))  # now comes first
    catalogue = bench.index().catalogue
    pins = read_pins(bench.storage).resolve(catalogue.class_names)
    with pytest.raises(PencilError, match="row 1 is a different sample now"):
        start_labels(catalogue, bench.storage, 10.0, pins)
    with pytest.raises(PencilError, match="row 1 is a different sample now"):
        bench.pin("e.csv", "sample_id,class\n000007,ant\n")  # is now in row 1
    assert [pin["sample_id"] for pin in read_pins(bench.storage).table.to_pylist()] == ["000001"]
