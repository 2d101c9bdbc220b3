"""import_features and export_features: vectors reach the rows of their ids, and come back unchanged."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from catalogue_making import Bench, samples

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.config.loader import load_config
from pencil_scale.features.interchange import Vectors, write_vectors
from pencil_scale.features.manifest import ABSENT, FeatureManifest
from pencil_scale.features.table import FeatureTable
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.storage import Storage
from pencil_scale.train.run import _settings
from pipelines import export_features, import_features


class ExchangeBench(Bench):
    """A catalogue in memory, and the two jobs over it."""

    def config(self, **keys: Any) -> Any:
        overrides = [f"features.{name}={value}" for name, value in keys.items()]
        return load_config(self.folder / "config.yaml", overrides)

    def take(self, **keys: Any) -> import_features.Summary:
        return import_features.run(self.config(**{"name": "clip", **keys}))

    def give(self, **keys: Any) -> export_features.Summary:
        return export_features.run(self.config(**keys))

    def table(self, key: str) -> FeatureTable:
        return FeatureTable.open(Storage(self.storage), key, self.folder)

    def parquet(self, ids: list[str], vectors: Any, **more: Any) -> Path:
        path = self.folder / "vectors.parquet"
        pq.write_table(
            pa.table({"sample_id": ids, "features": list(vectors), **more}), path, row_group_size=7
        )
        return path


@pytest.fixture
def bench(tmp_path: Path, small_label_parts: None) -> ExchangeBench:
    """Twenty samples; their ids are their row numbers with leading zeros."""
    made = ExchangeBench(tmp_path)
    made.shard("00.tar", samples(range(20)))
    made.index()
    return made


def ids_of(numbers: Any) -> list[str]:
    return [f"{number:06d}" for number in numbers]


def vectors_of(numbers: Any) -> Any:
    return np.array(numbers, np.float32)[:, None] + np.array([0.0, 0.25, 0.5], np.float32)


def test_vectors_in_any_order_reach_the_rows_of_their_ids(bench: ExchangeBench) -> None:
    numbers = np.random.default_rng(1).permutation(20)
    summary = bench.take(file=bench.parquet(ids_of(numbers), vectors_of(numbers)))
    table = bench.table(summary.manifest.key)
    assert np.array_equal(table.features[:, 0], vectors_of(range(20)))
    assert summary.manifest.counts == {"ready": 20, "unreadable": 0, "absent": 0}


def test_unknown_and_missing_ids_are_counted_and_reported(
    bench: ExchangeBench, capsys: pytest.CaptureFixture[str]
) -> None:
    (bench.folder / "exclude.txt").write_text("000004\n")
    bench.index(exclude=str(bench.folder / "exclude.txt"))
    ids = [*ids_of(range(17)), "stranger"]
    summary = bench.take(file=bench.parquet(ids, vectors_of(range(18))))
    found = summary.found
    assert (found.num_unknown, found.unknown) == (1, ["stranger"])
    assert (found.num_missing, found.missing) == (3, ids_of([17, 18, 19]))
    assert found.num_left_out == 1
    table = bench.table(summary.manifest.key)
    assert np.flatnonzero(table.state).tolist() == [row for row in range(17) if row != 4]
    assert not table.features[[4, 17, 18, 19]].any()
    said = capsys.readouterr().out
    assert "not in the catalogue: such as 'stranger'" in said
    assert "without a vector: such as '000017', '000018', '000019'" in said


@pytest.mark.parametrize("file", ["out.parquet", "out.npy"])
def test_exported_features_can_be_imported_again(bench: ExchangeBench, file: str) -> None:
    first = bench.take(file=bench.parquet(ids_of(range(20)), vectors_of(range(20))))
    path = bench.folder / file
    assert bench.give(file=path).num_samples == 20
    ids = {"ids": bench.folder / "out.ids.txt"} if file.endswith(".npy") else {}
    again = bench.take(file=path, name="again", **ids)
    assert again.manifest.key != first.manifest.key
    before, after = (bench.table(key).features.copy() for key in (first.manifest.key, again.manifest.key))
    assert np.array_equal(before, after)


def test_exports_leave_out_what_was_taken_down_or_changed_since(bench: ExchangeBench) -> None:
    bench.take(file=bench.parquet(ids_of(range(20)), vectors_of(range(20))))
    members = samples(range(20))
    members[3 * 6] = ("000006.png", samples([300])[0][1])  # another image
    bench.shard("00.tar", members[: 3 * 19])  # and the last sample is gone
    (bench.folder / "exclude.txt").write_text("000002\n")
    bench.index(exclude=str(bench.folder / "exclude.txt"))
    bench.give(file=bench.folder / "out.parquet")
    found = pq.read_table(bench.folder / "out.parquet")
    kept = [row for row in range(19) if row not in (2, 6)]
    assert found["sample_id"].to_pylist() == ids_of(kept)
    assert np.array_equal(np.array(found["features"].to_pylist()), vectors_of(kept))


def test_importing_again_replaces_the_features_of_this_name(bench: ExchangeBench) -> None:
    bench.take(file=bench.parquet(ids_of(range(20)), vectors_of(range(20))))
    summary = bench.take(file=bench.parquet(ids_of(range(5)), -vectors_of(range(5))))
    table = bench.table(summary.manifest.key)
    assert np.array_equal(table.features[:5, 0], -vectors_of(range(5)))
    assert not table.features[5:].any()
    storage = Storage(bench.storage)
    arrows = [name for name in storage.names(storage.features(summary.manifest.key)) if ".arrow" in name]
    assert len(arrows) == 1
    longer = np.concatenate([vectors_of(range(20))] * 2, axis=1)
    bench.take(file=bench.parquet(ids_of(range(20)), longer))
    assert FeatureManifest.choose(storage, "clip").dimension == 6
    assert storage.names(storage.features(summary.manifest.key)) == []


def test_a_run_knows_whether_the_vectors_of_a_name_are_still_the_same(bench: ExchangeBench) -> None:
    config = load_config(bench.folder / "config.yaml", ["model.head=linear", "features.name=clip"])
    settings = []
    for vectors in (vectors_of(range(20)), vectors_of(range(20)), vectors_of(range(20))[::-1]):
        bench.take(file=bench.parquet(ids_of(range(20)), vectors))
        settings.append(_settings(config))
    assert settings[0] == settings[1] != settings[2]


def test_a_row_that_has_another_image_now_has_no_features(bench: ExchangeBench) -> None:
    key = bench.take(file=bench.parquet(ids_of(range(20)), vectors_of(range(20)))).manifest.key
    members = samples(range(20))
    members[3 * 6] = ("000006.png", samples([300])[0][1])
    bench.shard("00.tar", members)
    bench.index()
    catalogue = Catalogue.open(bench.storage)
    table = FeatureTable.open(Storage(bench.storage), key, bench.folder, catalogue)
    assert np.flatnonzero(table.state == ABSENT).tolist() == [6]


def test_an_id_that_needs_two_lines_is_not_exported_to_a_file_of_ids(tmp_path: Path) -> None:
    with pytest.raises(PencilError, match=r"the id 'a\\nb' does not fit on one line"):
        write_vectors(str(tmp_path / "out.npy"), None, 1, 3, [Vectors(["a\nb"], vectors_of([1]))])
    for file, why in ((tmp_path, "directory"), (Path("/proc/x.npy"), "check the folder")):
        with pytest.raises(PencilError, match=why):
            write_vectors(str(file), None, 1, 3, [Vectors(["a"], vectors_of([1]))])


def test_a_scratch_folder_is_made_or_its_key_is_named(bench: ExchangeBench) -> None:
    file = bench.parquet(ids_of(range(20)), vectors_of(range(20)))
    for scratch in (bench.folder / "new" / "scratch", file):
        config = bench.config(name="clip", file=file)
        workers = config.workers.model_copy(update={"scratch": str(scratch)})
        config = config.model_copy(update={"workers": workers})
        if scratch != file:
            import_features.run(config)
            continue
        with pytest.raises(PencilError, match=r"workers.scratch: .*name a folder on a local disk"):
            import_features.run(config)


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ([[1.0, 2.0], [1.0, 2.0, 3.0]], r"the vector of '000001' has 3 numbers, that of '000000' 2"),
        ([[1.0, 2.0], [1.0, float("nan")]], r"the vector of '000001' has numbers that are not finite"),
        ([[1.0, 2.0], [1e6, 2.0]], r"1 row, such as row 1, are not finite as float16"),
        ([[1.0, 2.0], [1e-9, 0.0]], r"the vector of '000001' has only numbers that are 0 as float16"),
        ([[1.0, 2.0], None], r"features or sample_id has nulls"),
        (["a", "b"], r"column features holds string; lists of numbers were expected"),
    ],
)
def test_vectors_that_are_no_features_are_refused(bench: ExchangeBench, vectors: Any, message: str) -> None:
    with pytest.raises(PencilError, match=message):
        bench.take(file=bench.parquet(ids_of(range(2)), vectors))
    with pytest.raises(PencilError, match="has none"):  # nothing was published
        FeatureManifest.choose(Storage(bench.storage), None)


def test_a_later_row_group_with_vectors_of_another_length_is_refused(bench: ExchangeBench) -> None:
    vectors = [[1.0, 2.0]] * 7 + [[1.0, 2.0, 3.0]] * 7
    with pytest.raises(PencilError, match=r"3 numbers.*2"):
        bench.take(file=bench.parquet(ids_of(range(14)), vectors))


def test_two_vectors_of_one_sample_are_refused(bench: ExchangeBench) -> None:
    with pytest.raises(PencilError, match="sample '000003' has more than one vector"):
        bench.take(file=bench.parquet([*ids_of(range(9)), "000003"], vectors_of(range(10))))


def test_files_that_do_not_fit_are_refused(bench: ExchangeBench) -> None:
    file, ids = bench.folder / "v.npy", bench.folder / "ids.txt"
    np.save(file, vectors_of(range(3)))
    ids.write_text("000000\n000001\n")
    with pytest.raises(PencilError, match=r"2 ids for the 3 vectors"):
        bench.take(file=file, ids=ids)
    with pytest.raises(PencilError, match=r"features.ids: not set"):
        bench.take(file=file)
    with pytest.raises(PencilError, match=r"no such file"):
        bench.take(file=bench.folder / "gone.parquet")
    with pytest.raises(PencilError, match=r"no column vector; it has sample_id, features"):
        bench.take(file=bench.parquet(ids_of(range(3)), vectors_of(range(3))), column="vector")
    with pytest.raises(PencilError, match=r"no vector is that of a usable sample.*'x'.*check data.identity"):
        bench.take(file=bench.parquet(["x"], vectors_of([1])))
    with pytest.raises(PencilError, match=r"features.name is not set"):
        import_features.run(bench.config(file=file))


def test_which_features_to_export_must_be_clear(bench: ExchangeBench) -> None:
    with pytest.raises(PencilError, match=r"features.name: not set; .* has none"):
        bench.give(file=bench.folder / "out.parquet")
    file = bench.parquet(ids_of(range(20)), vectors_of(range(20)))
    keys = [bench.take(file=file, name=name).manifest.key for name in ("clip", "dino")]
    with pytest.raises(PencilError, match=r"clip \(1 x 3\).*give the key of one of them"):
        bench.give(file=bench.folder / "out.parquet")
    assert bench.give(file=bench.folder / "out.parquet", name="dino").manifest.key == keys[1]
    assert bench.give(file=bench.folder / "out.parquet", name=keys[0]).manifest.key == keys[0]
