from pathlib import Path

import pytest

from pencil_scale.catalogue.class_names import read_class_names
from pencil_scale.storage.errors import PencilError


def test_a_class_is_its_line_number(tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    path.write_bytes("\ufeffT-Shirt\r\n Down Coat \nWürde\n".encode())
    assert read_class_names(str(path)) == ("T-Shirt", "Down Coat", "Würde")
    assert read_class_names(f"file://{path}") == read_class_names(str(path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "has no classes; expected at least 2"),
        (b"one\n", "has one class; expected at least 2"),
        (b"a\n\nb\n", "line 2 is blank"),
        (b"a\nb\na\n", "'a' is on lines 1 and 3"),
        (b"a\n\xff\n", "cannot be read: 'utf-8' codec"),
    ],
)
def test_an_unusable_class_list_is_refused(text: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    path.write_bytes(text)
    with pytest.raises(PencilError, match=says):
        read_class_names(str(path))


def test_a_missing_class_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PencilError, match=r"absent.txt cannot be read: no such file .* that make_shards"):
        read_class_names(str(tmp_path / "absent.txt"))
