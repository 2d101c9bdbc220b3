from pencil_scale.storage.errors import sample_key


def test_a_sample_key_is_the_blake2b_of_the_id() -> None:
    # Worked out with `printf a | b2sum -l 128`.
    assert sample_key("a").hex() == "27c35e6e9373877f29e562464e46497e"


def test_an_id_that_is_no_valid_text_has_a_key_of_its_own() -> None:
    raw = b"caf\xe9".decode("utf-8", "surrogateescape")
    assert len(sample_key(raw)) == 16
    assert sample_key(raw) != sample_key("café")
