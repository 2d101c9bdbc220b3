"""From patterns in a config to the objects that exist."""

from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pencil_scale.catalogue.schema import from_json, from_stored, to_stored
from pencil_scale.catalogue.shard_urls import expand_braces, expand_urls, find_changes
from pencil_scale.storage.errors import PencilError
from pencil_scale.storage.urls import ShardVersion, Window, open_source, version_of, version_tag


def test_brace_ranges_keep_leading_zeros_and_the_last_one_varies_fastest() -> None:
    assert list(expand_braces("s3://b/{a,b}-{8..10}.tar")) == [
        f"s3://b/{letter}-{number}.tar" for letter in "ab" for number in (8, 9, 10)
    ]
    assert list(expand_braces("{008..010}")) == ["008", "009", "010"]
    assert len(list(expand_braces("train-{000000..000999}.tar"))) == 1000
    assert list(expand_braces("plain.tar")) == ["plain.tar"]


@pytest.mark.parametrize("pattern", ["{0..", "a}b", "{}", "{5..1}", "{x}", "{0..99999999999}", "{{0..1}}"])
def test_invalid_braces_are_an_error(pattern: str) -> None:
    with pytest.raises(PencilError, match=r"data\.shards"):
        list(expand_braces(pattern))


def test_globs_lists_and_files_of_lines_give_absolute_paths_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b1.tar", "b0.tar", "a.tar", "a.json"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "d.tar").mkdir()
    (tmp_path / "list.txt").write_text("# shards\n\nb{0..1}.tar\n")
    monkeypatch.chdir(tmp_path)
    paths = [str(tmp_path / name) for name in ("b0.tar", "b1.tar")]
    assert expand_urls(["b*.tar"]) == paths
    assert expand_urls(["@list.txt"]) == paths
    assert expand_urls([f"file://{tmp_path}/b0.tar", "b1.tar"]) == paths
    assert expand_urls(["*.tar"]) == [str(tmp_path / "a.tar"), *paths]
    for wrong in (["c*.tar"], ["b0.tar", "b*.tar"], ["d.tar"], ["@nowhere"], ["nosuch://x"]):
        with pytest.raises(PencilError):
            expand_urls(wrong)


def test_missing_shards_are_listed_separately(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(b"abc")
    changes = find_changes([f"{tmp_path}/{{0..1}}.tar"], None, "")
    assert [shard.num_bytes for shard in changes.to_read] == [3]
    assert changes.missing == [f"{tmp_path}/1.tar"]


def test_a_version_changes_with_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    path.write_bytes(b"abc")
    first = version_of(str(path))
    path.write_bytes(b"abcd")
    assert isinstance(first, ShardVersion)
    assert version_of(str(path)) != first
    assert version_of(str(tmp_path / "1.tar")) is None


def test_memory_and_local_sources_give_the_same_bytes_through_a_window(tmp_path: Path) -> None:
    data = bytes(range(256)) * 4000
    (tmp_path / "x").write_bytes(data)
    with fsspec.open("memory://bytes/x", "wb") as file:
        file.write(data)
    for url in (str(tmp_path / "x"), "memory://bytes/x"):
        with open_source(url) as source:
            window = Window(source)
            for offset, length in [
                (0, 10),
                (5, 70_000),
                (900_000, 50),
                (3, 3),
                (1_023_990, 100),
                (500_000, 1),
            ]:
                assert window.at(offset, length) == data[offset : offset + length]


def test_a_source_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(300_000))
    with open_source(str(path)) as source:
        window = Window(source)
        window.at(0, 10)
        path.write_bytes(b"short")
        with pytest.raises(PencilError, match="changed while it was read"):
            window.at(200_000, 100)


@given(st.binary(max_size=40))
def test_any_name_survives_storing_as_valid_text(raw: bytes) -> None:
    text = raw.decode("utf-8", "surrogateescape")
    stored = to_stored(text)
    stored.encode("utf-8")
    assert from_stored(stored) == text


@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=20))
def test_any_text_from_json_can_be_stored(text: str) -> None:
    assert from_stored(to_stored(from_json(text))) == from_json(text)
    to_stored(from_json(text)).encode("utf-8")


def test_an_empty_etag_is_not_a_version() -> None:
    assert version_tag({"ETag": '"5e0e"', "LastModified": "today"}) == 'etag:"5e0e"'
    assert version_tag({"ETag": '""', "LastModified": "today"}) == "lastmodified:today"
    assert version_tag({"size": 3}) == ""
