r"""Catalogue schema: its tables and how they are written, every status and kind of damage, and ids.

`status` is what training uses; `found_status` is what the shard alone says, so that an id removed from the
exclude list does not require reading its shard again. Row groups have 4,096 rows: a chunk of an epoch plan is
one row group and can be read alone.

Names and ids from shards may contain bytes that are not UTF-8; in memory they are surrogates. Parquet and
JSON take only valid UTF-8: there such a byte is written as `\xNN` and a backslash as `\\`. Both directions
are exact, so two different ids never become equal.

    to_stored("caf\udce9")       # 'caf\\xe9'
    from_stored("caf\\xe9")      # 'caf\udce9'
"""

import io
import re
import uuid
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.parquet as pq

from pencil_scale.storage.folder import Folder
from pencil_scale.storage.urls import without_passwords

_RAW_BYTE = re.compile("[\udc80-\udcff]")
_ESCAPE = re.compile(r"\\(?:\\|x([0-9a-f]{2}))")


def to_stored(text: str) -> str:
    """Escape text for a file."""
    if text.isascii() and "\\" not in text:
        return text
    return _RAW_BYTE.sub(lambda match: f"\\x{ord(match[0]) - 0xDC00:02x}", text.replace("\\", "\\\\"))


def from_stored(text: str) -> str:
    """Undo `to_stored`."""
    if "\\" not in text:
        return text
    return _ESCAPE.sub(lambda match: chr(0xDC00 + int(match[1], 16)) if match[1] else "\\", text)


def from_json(text: str) -> str:
    """Convert text from JSON, which may contain half a surrogate pair, to the form of names in memory."""
    if text.isascii():
        return text
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")


CHUNK_ROWS = 4096
SUFFIXES_SHOWN = 5

# What a shard says about one sample. Texts are escaped by `to_stored`.
SAMPLE = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("sample_key", pa.binary(16), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("sample_start", pa.int64(), nullable=False),  # its members are between these bytes
        pa.field("sample_end", pa.int64(), nullable=False),
        pa.field("image_offset", pa.int64(), nullable=False),
        pa.field("image_bytes", pa.int64(), nullable=False),
        pa.field("format", pa.string(), nullable=False),
        pa.field("noisy_class", pa.int32()),
        pa.field("true_class", pa.int32()),
        pa.field("found_status", pa.string(), nullable=False),
        pa.field("oddity", pa.string()),
        pa.field("content_key", pa.binary(16)),  # the first half of the image's SHA-256
    ]
)

# A row of the catalogue, or an alias of one: a sample with its row, its shard and its status.
ROW = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        *SAMPLE,
    ]
)

# What could not become a row. `num_samples` is 1 for exactly one sample, and 0 if the number is unknown.
DAMAGE = pa.schema(
    [
        pa.field("shard", pa.int32(), nullable=False),  # -1: not known yet, or the shard is missing
        pa.field("start", pa.int64(), nullable=False),
        pa.field("end", pa.int64(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("num_samples", pa.int32(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)
# Ids, keys and hashes differ in every row: a dictionary would only cost space.
_DICTIONARY = frozenset(
    ("status", "found_status", "format", "oddity", "noisy_class", "true_class", "shard", "kind", "detail")
)


def parquet_bytes(table: pa.Table) -> bytes:
    """Write a table as the bytes of a Parquet file."""
    sink = io.BytesIO()
    names = [name for name in table.schema.names if name in _DICTIONARY]
    pq.write_table(table, sink, row_group_size=CHUNK_ROWS, compression="zstd", use_dictionary=names)
    return sink.getvalue()


def put_table(store: Folder, folder: str, table: pa.Table) -> str:
    """Write a table under a new name and return the name."""
    name = f"{folder}/{uuid.uuid4().hex}.parquet"
    store.put(name, parquet_bytes(table))
    return name


# Statuses that are not damage: counted, never trained on, given a prediction on export.
OTHER_STATUSES = {
    "unlabelled": "no label found; give one, or leave it to the trained model",
    "several_labels": "its labels name different classes; resolve this in an alias file or table",
    "unknown_class": "its label matches no class and no alias; add it to data.aliases",
    "excluded": "listed in data.exclude",
    "held_out": "also in the validation or test shards, so not trained on",
    "vanished": "no longer in any shard; the row is kept in case it returns",
}

# Statuses of damaged rows: the id is readable, but the sample cannot be used.
DAMAGED_STATUSES = {
    "cut": "part of it is lost to damage in the shard; fetch the shard again",
    "repeated_member": "two members have the same name; write the shard again with unique names",
    "image_missing": "no image member; write the shard again, or ignore it",
    "several_images": "more than one image member; keep one, or give the others a suffix such as seg.png",
    "image_empty": "the image has 0 bytes; fetch it again",
    "image_unreadable": "the image does not decode; fetch it again",
    "image_bomb": "the image declares too many pixels to decode safely; shrink it",
    "image_too_large": "the image member is over 256 MiB; shrink it",
    "link_member": "the image or label is a link to elsewhere; write the shard with files",
    "sparse_member": "the image or label is a sparse file; write the shard without --sparse",
    "label_not_a_number": "its .cls is neither a number nor a class name; mend the label",
    "label_out_of_range": "its label is a number outside the class list; check data.classes",
    "label_unreadable": "its JSON does not parse or is over 1 MiB; mend it",
}

# Samples with an image but without a label to learn from, and those kept for evaluation.
FOR_THE_MODEL = {*OTHER_STATUSES, *(status for status in DAMAGED_STATUSES if status.startswith("label_"))}
FOR_THE_MODEL -= {"excluded", "vanished"}

# Statuses that many samples have when file names contain extra dots.
UNCLEAR_IMAGE = ("image_missing", "several_images", "repeated_member")

# Damage that left no row: its place is in the damage table, and this is what to do about it.
DAMAGE_KINDS = {
    "shard_missing": "fetch it, or take it off data.shards",
    "not_a_tar": "fetch the shard again, or take it off data.shards",
    "no_samples": "take it off data.shards",
    "no_key": "write the shard again with names such as 000123.jpg; if it is not a sample, nothing is lost",
    "cut_short": "fetch the shard again",
    "count_mismatch": "fetch the shard again, and its _stats.json",
    "odd_end": "fetch the shard again; if its writer ends every shard like this, nothing is lost",
    "data_after_end": "fetch the shard again; if it was made by joining tars (cat), join them with tar -A",
    "damaged_header": "fetch the shard again; the member of this header is lost",
    "shifted_bytes": "fetch the shard again, in binary: bytes were lost or added before this place",
    "key_repeated": "write the shard again with unique keys; only the first sample is indexed",
    "key_not_contiguous": "write the shard in order (tar --sort=name): a sample's members belong together",
    "id_missing": "mend the sample, or choose another data.identity",
    "not_understood": "report this as a bug of pencil_scale, with the sample",
}

# Kinds of damage that lose no samples, however many bytes they span.
HARMLESS = frozenset(("odd_end", "no_samples", "no_key"))

ADVICE = {**OTHER_STATUSES, **DAMAGE_KINDS, **DAMAGED_STATUSES}


def extensions_line(suffixes: Mapping[str, int]) -> str:
    """List the extensions of the members; if one contains a dot, explain why."""
    most = sorted(suffixes, key=lambda suffix: (-suffixes[suffix], suffix))[:SUFFIXES_SHOWN]
    others = ", ..." if len(suffixes) > len(most) else ""
    said = f"extensions found: {', '.join(ascii(suffix[:40])[1:-1] for suffix in most)}{others}"
    dotted = next((suffix for suffix in most if "." in suffix), None)
    if dotted is None:
        return said
    shown = ascii(dotted[:40])[1:-1]
    return (
        f"{said}; WebDataset ends a sample's key at the first dot of the file name, so KEY.{shown} is sample "
        f"KEY with the extension {shown}: write the shards with names that have no other dot"
    )


def found_line(suffixes: Mapping[str, int], json_fields: Mapping[str, str]) -> str:
    """List where a label might be: the extensions of the members, and the fields of a JSON member."""
    fields = ", ".join(f"{name} = {without_passwords(value)}" for name, value in json_fields.items())
    return extensions_line(suffixes) + (f"; JSON fields found: {fields}" if fields else "")


def damage_line(url: str, start: int, word: str, found: str = "") -> str:
    """Say where a status or kind of damage occurs, what was found and what to do, in one line."""
    said = f"{found}; " if found else ""
    return f"shard {to_stored(without_passwords(url))} at byte {start:,}: {said}{ADVICE[word]}"


def shard_stem(url: str) -> str:
    """The file name of a shard, without `.tar`."""
    return url.rstrip("/").rpartition("/")[2].removesuffix(".tar")
