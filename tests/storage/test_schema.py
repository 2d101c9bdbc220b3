"""Sample keys: the hash of an id, also of one that is not valid text."""

from pencil_scale.storage.errors import sample_key


def test_a_sample_key_is_the_blake2b_of_the_id() -> None:
    # Worked out with `printf a | b2sum -l 128`.
    assert sample_key("a").hex() == "27c35e6e9373877f29e562464e46497e"


def test_an_id_with_invalid_utf8_has_a_different_key() -> None:
    raw = b"caf\xe9".decode("utf-8", "surrogateescape")
    assert len(sample_key(raw)) == 16
    assert sample_key(raw) != sample_key("café")
