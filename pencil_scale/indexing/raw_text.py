r"""Raw text: names and ids from shards, kept in files that only take valid UTF-8.

Text from a shard may hold bytes that are no UTF-8; in memory they are surrogates. In Parquet and JSON
such a byte stands as `\xNN` and a backslash as `\\`; everything else stands as itself. Both directions
are exact, so two different ids never become one.

    to_stored("caf\udce9")       # 'caf\\xe9'
    from_stored("caf\\xe9")      # 'caf\udce9'
"""

import re

_RAW_BYTE = re.compile("[\udc80-\udcff]")
_ESCAPE = re.compile(r"\\(?:\\|x([0-9a-f]{2}))")


def to_stored(text: str) -> str:
    """Spell text for a file."""
    if text.isascii() and "\\" not in text:
        return text
    return _RAW_BYTE.sub(lambda match: f"\\x{ord(match[0]) - 0xDC00:02x}", text.replace("\\", "\\\\"))


def from_stored(text: str) -> str:
    """Read back what `to_stored` spelled."""
    if "\\" not in text:
        return text
    return _ESCAPE.sub(lambda match: chr(0xDC00 + int(match[1], 16)) if match[1] else "\\", text)


def from_json(text: str) -> str:
    """Take text out of JSON, where half a surrogate pair may stand alone: its bytes, as in a name."""
    if text.isascii():
        return text
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
