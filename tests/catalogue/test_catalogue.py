"""What happens to rows when shards are added, change, move and vanish."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from catalogue_making import Bench, accounted_for, image, sample, samples

from pencil_scale.catalogue.catalogue import Catalogue, publish, read_manifest
from pencil_scale.catalogue.schema import CHUNK_ROWS, ROW
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.folder import Folder


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def states(bench: Bench, summary: object) -> dict[str, tuple[int, str, str]]:
    """For each id: its row, its shard's name, its status."""
    catalogue = summary.catalogue  # type: ignore[attr-defined]
    return {
        row["sample_id"]: (row["row"], Path(catalogue.shards[row["shard"]].url).name, row["status"])
        for row in bench.rows(summary)  # type: ignore[arg-type]
    }


# -- what a row says ----------------------------------------------------------------------------------


def test_a_row_says_where_its_image_is_and_what_it_is(bench: Bench) -> None:
    path = bench.shard("a.tar", samples(range(5)))
    summary = bench.index()
    for row in bench.rows(summary):
        number = int(row["key"])
        found = path.read_bytes()[row["image_offset"] : row["image_offset"] + row["image_bytes"]]
        assert found == image(number)
        assert (row["row"], row["noisy_class"], row["format"], row["true_class"]) == (
            number,
            number % 3,
            "png",
            None,
        )
    manifest = summary.catalogue.manifest
    assert (manifest["num_rows"], manifest["num_ok"], manifest["num_classes"]) == (5, 5, 3)
    assert (manifest["status"], manifest["damage"]) == ({"ok": 5}, {})


@pytest.mark.slow
def test_segments_have_row_groups_of_4096_and_chunks_agree_with_the_rows(
    bench: Bench, tmp_path: Path
) -> None:
    members = [(f"{number:06d}.png", image(number % 7)) for number in range(CHUNK_ROWS + 100)]
    labels = "\n".join(f"{number:06d} {number % 3}" for number in range(0, CHUNK_ROWS + 100, 2))
    (tmp_path / "labels.txt").write_text(labels)
    bench.shard("a.tar", members)
    catalogue = bench.index(label=f"file:{tmp_path}/labels.txt").catalogue
    segment = catalogue._file(catalogue.manifest["segments"][0]["file"])
    sizes = [segment.metadata.row_group(group).num_rows for group in range(segment.num_row_groups)]
    assert sizes == [CHUNK_ROWS, 100]
    assert catalogue.chunks().num_ok.tolist() == [CHUNK_ROWS // 2, 50]
    rows = catalogue.ok_rows()
    assert rows.tolist() == list(range(0, CHUNK_ROWS + 100, 2))
    sizes = catalogue.read(0, CHUNK_ROWS + 100, ["image_bytes"])["image_bytes"].to_numpy()
    assert catalogue.chunks().ok_bytes.sum() == sizes[rows].sum()
    assert catalogue.read(10, 13, ["row", "status"]).to_pylist()[1] == {"row": 11, "status": "unlabelled"}


def test_any_parquet_reader_opens_a_segment(bench: Bench) -> None:
    bench.shard("a.tar", samples(range(5)))
    catalogue = bench.index().catalogue
    name = catalogue.manifest["segments"][0]["file"]
    table = pq.read_table(f"{catalogue._root}/{name}", filesystem=catalogue._filesystem)
    assert table.schema.names == ROW.names
    assert len(table) == 5


# -- changes of shards ---------------------------------------------------------------------------------


def test_more_shards_are_appended_and_none_is_read_twice(bench: Bench) -> None:
    bench.shard("a.tar", samples(range(5)))
    first = bench.index()
    again = bench.index()
    assert (again.published, again.num_shards_read, again.catalogue.version) == (False, 0, 1)
    bench.shard("b.tar", samples(range(5, 8)))
    more = bench.index()
    assert (more.num_shards_read, more.catalogue.version) == (1, 2)
    assert bench.rows(more)[:5] == bench.rows(first)
    assert [row["row"] for row in bench.rows(more)] == list(range(8))
    assert Catalogue.open(bench.storage, version=1).num_rows == 5


def test_a_changed_shard_keeps_the_rows_of_the_ids_it_still_has(bench: Bench) -> None:
    bench.shard("a.tar", samples(range(5)))
    before = bench.rows(bench.index())
    bench.shard("a.tar", [("pad.txt", b"x" * 5000), *samples([4, 3, 9])])
    summary = bench.index()
    found = states(bench, summary)
    assert {key: (row, status) for key, (row, _, status) in found.items()} == {
        "000000": (0, "vanished"),
        "000001": (1, "vanished"),
        "000002": (2, "vanished"),
        "000003": (3, "ok"),
        "000004": (4, "ok"),
        "pad": (5, "image_missing"),
        "000009": (6, "ok"),
    }
    assert bench.rows(summary)[4]["image_offset"] != before[4]["image_offset"]
    assert summary.catalogue.manifest["status"]["vanished"] == 3


def test_a_change_rewrites_its_own_segment_and_older_versions_stay_readable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pencil_scale.catalogue.update.SEGMENT_ROWS", 4)
    bench.shard("a.tar", samples(range(6)))
    bench.shard("b.tar", samples(range(6, 12)))
    first = bench.index()
    before = bench.rows(first)
    bench.shard("b.tar", samples([11, 20, 9, 7, 10, 8]))  # more moved rows than one segment holds
    second = bench.index()
    assert second.catalogue.rewritten_rows(first.catalogue) == [range(4, 8), range(8, 12)]
    assert bench.rows(second)[:6] == before[:6]
    found = [(row["sample_id"], row["status"]) for row in bench.rows(second)[6:]]
    moved = [(f"{number:06d}", "ok") for number in (7, 8, 9, 10, 11, 20)]
    assert found == [("000006", "vanished"), *moved]
    rows = Catalogue.open(bench.storage, version=1)
    assert rows.read(0, 12).to_pylist() == before
    assert Folder(rows.folder).names("staging") == []


def test_samples_of_a_vanished_shard_move_to_their_duplicates_or_are_kept_as_vanished(bench: Bench) -> None:
    path = bench.shard("a.tar", samples(range(4)))
    bench.shard("b.tar", samples([2, 3, 4]))
    summary = bench.index()
    assert summary.catalogue.aliases()["row"].to_pylist() == [2, 3]
    before = path.read_bytes()
    path.unlink()
    found = states(bench, bench.index())
    assert found["000000"] == (0, "a.tar", "vanished")
    assert found["000002"] == (2, "b.tar", "ok")
    path.write_bytes(before)
    summary = bench.index()
    assert states(bench, summary)["000000"] == (0, "a.tar", "ok")
    assert states(bench, summary)["000002"] == (2, "b.tar", "ok")
    assert summary.catalogue.manifest["num_duplicates"] == 2
    assert accounted_for(summary) == 7


def test_of_equal_ids_the_first_is_kept_and_the_others_are_aliases_of_its_row(bench: Bench) -> None:
    bench.shard("a.tar", samples([0, 1]))
    bench.shard("b.tar", [*samples([1, 2]), *sample(0, label=2)])
    summary = bench.index()
    aliases = summary.catalogue.aliases().to_pylist()
    assert [(alias["row"], alias["shard"], alias["noisy_class"]) for alias in aliases] == [
        (1, 1, 1),
        (0, 1, 2),
    ]
    assert states(bench, summary)["000001"] == (1, "a.tar", "ok")
    assert accounted_for(summary) == 5


def test_an_id_shared_by_different_images_causes_a_warning(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.shard("a.tar", samples([0, 1]))
    bench.shard("b.tar", sample(7, key="000001"))
    assert bench.index().catalogue.manifest["num_duplicates_of_other_content"] == 1
    assert "try shard_key" in capsys.readouterr().out


def test_a_shard_that_left_the_list_but_is_unchanged_keeps_its_rows(bench: Bench) -> None:
    bench.shard("a.tar", samples([0, 1]))
    bench.index()
    bench.shard("b.tar", samples([2]))
    summary = bench.index(shards=f"{bench.folder}/b.tar")
    assert summary.catalogue.num_ok == 3


def test_a_missing_exclude_list_is_reported_with_its_config_key(bench: Bench) -> None:
    bench.shard("a.tar", samples([0]))
    with pytest.raises(PencilError, match=r"data\.exclude: .*gone\.txt cannot be read"):
        bench.index(exclude=f"{bench.folder}/gone.txt")


def test_an_excluded_id_that_matches_no_sample_is_reported(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.shard("a.tar", samples(range(3)))
    (tmp_path / "takedown.txt").write_text("000001\r\nO00002\n")
    assert bench.index(exclude=f"{tmp_path}/takedown.txt").catalogue.manifest["status"]["excluded"] == 1
    assert "data.exclude lists 2 ids, of which 1 are in the catalogue" in capsys.readouterr().err


def test_excluded_ids_leave_and_come_back_without_reading_a_shard(bench: Bench, tmp_path: Path) -> None:
    bench.shard("a.tar", [*samples([0, 1, 2]), ("u.png", image(5))])
    bench.index()
    (tmp_path / "takedown.txt").write_text("000001\nu\nnobody\n")
    out = bench.index(exclude=f"{tmp_path}/takedown.txt")
    assert out.num_shards_read == 0
    assert out.catalogue.manifest["status"] == {"ok": 2, "excluded": 2}
    (tmp_path / "takedown.txt").write_text("")
    back = bench.index(exclude=f"{tmp_path}/takedown.txt")
    assert back.catalogue.manifest["status"] == {"ok": 3, "unlabelled": 1}
    bench.shard("b.tar", samples([3]))
    (tmp_path / "takedown.txt").write_text("000003\n")
    assert bench.index(exclude=f"{tmp_path}/takedown.txt").catalogue.manifest["status"]["excluded"] == 1


def test_ids_shared_with_validation_or_test_leave_training(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "clean").mkdir()
    bench.shard("a.tar", samples(range(6)))
    bench.shard("clean/val.tar", samples([1, 9]))
    bench.shard("clean/test.tar", samples([2, 3]))
    clean = {"validation": f"{tmp_path}/clean/val.tar", "test": f"{tmp_path}/clean/test.tar"}
    summary = bench.index(**clean)
    assert summary.catalogue.manifest["status"] == {"ok": 3, "held_out": 3}
    assert Catalogue.open(bench.storage, clean_set="validation").num_ok == 2
    assert Catalogue.open(bench.storage, clean_set="test").num_ok == 2


def test_many_held_out_samples_cause_a_warning_every_time_and_few_do_not(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "clean").mkdir()
    bench.shard("a.tar", samples(range(100)))
    bench.shard("clean/test.tar", samples([5]))
    assert "held_out" in str(bench.index(test=f"{tmp_path}/clean/*.tar").catalogue.manifest["status"])
    assert "WARNING" not in "".join(capsys.readouterr())
    bench.shard("clean/test-2.tar", samples([6]))
    for _ in range(2):
        bench.index(test=f"{tmp_path}/clean/*.tar")
        reported = "".join(capsys.readouterr())
        (line,) = [line for line in reported.splitlines() if "WARNING" in line]
        assert "2 of 100 training samples (2.0%) are NOT trained on (held_out)" in line
        assert "data.identity: shard_key" in line


def test_equal_images_under_different_labels_prove_noise(bench: Bench) -> None:
    labels = [0, 0, 1, 2]
    members = [
        m for n, label in enumerate(labels) for m in ((f"t{n}.png", image(99)), (f"t{n}.cls", b"%d" % label))
    ]
    bench.shard("a.tar", [*members, *samples(range(4))])
    found = bench.index().catalogue.manifest["equal_content"]
    expected = {"num_labelled": 8, "num_repeated_images": 1, "num_samples": 4, "num_conflicting_images": 1}
    assert found == {**expected, "num_proven_wrong": 2, "proven_noise": 0.25}


@pytest.mark.slow
def test_shards_sorted_by_class_need_a_larger_window_than_mixed_ones(bench: Bench, tmp_path: Path) -> None:
    lines = []
    for label in range(3):
        keys = [f"{label}-{number:05d}" for number in range(CHUNK_ROWS)]
        bench.shard(f"{label}.tar", [(f"{key}.png", image(1)) for key in keys])
        lines += [f"{key} {label}" for key in keys]
    (tmp_path / "sorted.txt").write_text("\n".join(lines))
    mixed = [f"{line.split()[0]} {place % 3}" for place, line in enumerate(lines)]
    (tmp_path / "mixed.txt").write_text("\n".join(mixed))
    manifest = bench.index(label=f"file:{tmp_path}/sorted.txt").catalogue.manifest
    assert manifest["window"]["num_chunks"] == 3  # all there are
    manifest = bench.index(label=f"file:{tmp_path}/mixed.txt").catalogue.manifest
    assert manifest["window"]["num_chunks"] == 1


def test_a_shard_is_checked_before_its_offsets_are_trusted(bench: Bench) -> None:
    path = bench.shard("a.tar", samples([1]))
    catalogue = bench.index().catalogue
    catalogue.shards[0].verify()
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(PencilError, match=r"a\.tar changed .* 10,241 now; run index_shards again"):
        catalogue.shards[0].verify()
    path.unlink()
    with pytest.raises(PencilError, match="is missing since it was indexed"):
        catalogue.shards[0].verify()


def test_a_catalogue_can_be_pickled(bench: Bench) -> None:
    import pickle

    bench.shard("a.tar", samples([1, 2]))
    catalogue = bench.index().catalogue
    catalogue.ok_rows()
    assert pickle.loads(pickle.dumps(catalogue)).ok_rows().tolist() == [0, 1]


# -- manifests ----------------------------------------------------------------------------------------


def test_a_job_that_was_overtaken_by_another_does_not_publish(bench: Bench) -> None:
    bench.shard("a.tar", samples([1]))
    catalogue = bench.index().catalogue
    with pytest.raises(PencilError, match="another job published version 1"):
        publish(Folder(catalogue.folder), {**catalogue.manifest, "version": 1}, old_version=0)


def test_of_two_jobs_that_publish_the_same_version_one_succeeds(bench: Bench) -> None:
    bench.shard("a.tar", samples([1]))
    catalogue = bench.index().catalogue
    following = [{**catalogue.manifest, "version": 2, "job": job} for job in ("one", "two")]

    def published(manifest: dict[str, Any]) -> bool:
        try:
            publish(Folder(catalogue.folder), manifest, old_version=1)
        except PencilError:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(published, following))
    assert sorted(done) == [False, True]
    for version in (None, 2):
        assert read_manifest(catalogue.folder, version) == following[done.index(True)]


def test_no_catalogue_a_torn_manifest_and_another_format_are_one_line_errors(tmp_path: Path) -> None:
    with pytest.raises(PencilError, match=r"run `python -m pipelines\.index_shards CONFIG` first"):
        Catalogue.open(str(tmp_path))
    folder = tmp_path / "catalogue"
    folder.mkdir()
    (folder / "manifest.json").write_text('{"version": ')
    with pytest.raises(PencilError, match=r"damaged JSON .*index again"):
        Catalogue.open(str(tmp_path))
    (folder / "manifest.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(PencilError, match="format 99"):
        Catalogue.open(str(tmp_path))


def test_a_damaged_segment_is_named(bench: Bench) -> None:
    bench.shard("a.tar", samples(range(50)))
    catalogue = bench.index().catalogue
    name = catalogue.manifest["segments"][0]["file"]
    path = f"{catalogue._root}/{name}"
    intact = catalogue._filesystem.cat_file(path)
    for rotten in (intact[:-100], b"PAR1" + b"\xff" * (len(intact) // 2) + intact[len(intact) // 2 + 4 :]):
        catalogue._filesystem.pipe_file(path, rotten)
        with pytest.raises(PencilError, match=f"{name}: named by the manifest but unreadable"):
            Catalogue.open(bench.storage).read(0, 50)


def test_the_job_reports_bad_patterns_and_class_lists(bench: Bench) -> None:
    with pytest.raises(PencilError, match="nothing matches"):
        bench.index()
    bench.shard("a.tar", samples([1]))
    with pytest.raises(PencilError, match=r"data\.classes"):
        bench.index(classes="nowhere.txt")
