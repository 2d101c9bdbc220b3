"""In these tests a table of a few thousand rows has several parts."""

import pytest


@pytest.fixture(autouse=True)
def several_parts(small_label_parts: None) -> None:
    """Use small parts everywhere in this folder."""
