"""Staging: what one shard contained, kept until the catalogue is published, unless too much is damaged.

The staged name of a shard is made of its URL, its version and the rules it was read by. A job that is run
again after a crash uses what is already staged, and reads again what has changed since.
"""

import hashlib
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pencil_scale.catalogue.catalogue import Shard
from pencil_scale.catalogue.schema import (
    ADVICE,
    CHUNK_ROWS,
    DAMAGED_STATUSES,
    UNCLEAR_IMAGE,
    damage_line,
    extensions_line,
    found_line,
    parquet_bytes,
)
from pencil_scale.catalogue.shard_index import IndexRules, ShardIndexer
from pencil_scale.storage.errors import PencilError, many
from pencil_scale.storage.folder import Folder
from pencil_scale.storage.urls import open_source, version_of

NAMED_DAMAGED = 5  # samples in an error message


def staged_name(shard: Shard) -> str:
    """Name the result of reading this version of a shard by these rules."""
    words = [shard.url, str(shard.num_bytes), shard.tag, str(shard.num_expected), shard.rules]
    return hashlib.sha256("\0".join(words).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def stage_shard(store: Folder, listed: Shard, rules: IndexRules) -> Shard:
    """Index one shard into the store, unless that was done before; its counts are written last."""
    name = f"staging/{staged_name(listed)}"
    if (finished := store.read_json(f"{name}.json")) is not None:
        return Shard(**finished)
    shard = Shard(listed.url, listed.num_bytes, listed.tag, listed.rules, listed.num_expected)
    with open_source(shard.url) as source:
        samples, damage = ShardIndexer(source, shard, rules).read()
    if version_of(shard.url) != shard.version:
        raise PencilError(f"shard {shard.url}: it changed while it was read; run again when it is complete")
    store.put(f"{name}.samples.parquet", parquet_bytes(samples))
    store.put(f"{name}.damage.parquet", parquet_bytes(damage))
    store.put_json(f"{name}.json", vars(shard))
    return shard


def staged_samples(store: Folder, shard: Shard, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """Read staged samples, some row groups at a time."""
    file = pq.ParquetFile(io.BytesIO(store.get(f"staging/{staged_name(shard)}.samples.parquet")))
    for batch in file.iter_batches(batch_size=16 * CHUNK_ROWS, columns=columns):
        yield pa.Table.from_batches([batch])


def staged_damage(store: Folder, shard: Shard) -> pa.Table:
    """Read the staged damage of a shard."""
    return pq.read_table(io.BytesIO(store.get(f"staging/{staged_name(shard)}.damage.parquet")))


# -- how much damage is allowed -----------------------------------------------------------------------


def check_damage(
    store: Folder, shards: Sequence[Shard], missing: Sequence[str], limit: float, total_bytes: int = 0
) -> None:
    """Refuse to publish if too many of the samples just read are damaged, naming the worst shard.

    With the bytes of all shards, stop a long run as soon as there is too much damage even if all remaining
    shards are intact.
    """
    seen, unseen = _damaged(shards, len(missing))
    num_samples = sum(shard.num_samples for shard in shards)
    read_bytes = sum(shard.num_bytes for shard in shards)
    expected, found = num_samples + unseen, "of the samples are damaged"
    if read_bytes < total_bytes:
        # The number of remaining samples is estimated from their bytes.
        expected = num_samples * total_bytes / max(read_bytes, 1)
        found = f"of all expected samples are damaged, after {len(shards):,} of the shards"
    if expected and seen + unseen > limit * expected:
        raise _too_much(f"{(seen + unseen) / expected:.2%} {found}", store, shards, missing, limit)


def check_usable(shards: Sequence[Shard], rules: IndexRules, key: str) -> None:
    """Refuse to publish a catalogue without any usable sample, and say what was found instead.

    `key` is the config key of the shards.
    """
    statuses = _total(shard.statuses for shard in shards)
    if statuses["ok"]:
        return
    counts = statuses + _total(shard.damage for shard in shards)
    words = ", ".join(f"{num:,} {word}" for word, num in counts.most_common())
    if not statuses:
        raise PencilError(
            f"{key}: no samples in {many(len(shards), 'shard')}, such as {shards[0].url} ({words}); "
            "expected tars with members such as 000123.jpg and 000123.cls; nothing was published"
        )
    fields = {name: value for shard in reversed(shards) for name, value in shard.json_fields.items()}
    found = found_line(_total(shard.suffixes for shard in shards), fields)
    advice = ADVICE[statuses.most_common(1)[0][0]]
    if statuses["unlabelled"]:
        advice = f"set data.label, which is {rules.label}, to where the label is, such as json:FIELD"
    elif texts := _total(shard.unknown_labels for shard in shards):
        labels = ", ".join(f"{text!a} {num:,}" for text, num in texts.most_common(NAMED_DAMAGED))
        names = ", ".join(map(ascii, rules.classes.names[:NAMED_DAMAGED]))
        found = f"labels found: {labels}; data.classes starts with {names}"
        advice = "correct data.classes, or map the labels to classes with data.aliases"
    raise PencilError(
        f"{key}: none of {many(statuses.total(), 'sample')} can be used ({words}); {found}; {advice}; "
        "nothing was published"
    )


def _total(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    return sum(map(Counter, counts), Counter[str]())


def _damaged_statuses(shard: Shard) -> dict[str, int]:
    return {status: count for status, count in shard.statuses.items() if status in DAMAGED_STATUSES}


def _num_damaged(shard: Shard) -> int:
    return sum(_damaged_statuses(shard).values()) + shard.num_lost


def _damaged(shards: Sequence[Shard], num_missing: int) -> tuple[float, float]:
    """Count damaged samples: those seen, by status or in the damage table, and those only inferred.

    Unreadable bytes count as samples of mean size, and a shard without samples counts as a mean shard.
    """
    full = [shard for shard in shards if shard.num_samples]
    num_bad_shards = num_missing + sum(
        shard.num_samples == 0 and "no_samples" not in shard.damage for shard in shards
    )
    total = sum(shard.num_samples for shard in full)
    if total == 0:
        return 0.0, float(num_bad_shards)
    mean_bytes = sum(shard.num_bytes for shard in full) / total
    lost = sum(shard.lost_bytes for shard in full) / mean_bytes
    short = sum(max(0, (shard.num_expected or 0) - shard.num_samples) for shard in full)
    return sum(map(_num_damaged, full)), num_bad_shards * total / len(full) + lost + short


def _too_much(
    found: str, store: Folder, shards: Sequence[Shard], missing: Sequence[str], limit: float
) -> PencilError:
    """Name what is missing or the worst shard, then its first damaged samples, one per line."""
    lines = []
    if missing:
        others = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        worst = f"{missing[0]}{others}: listed but missing; fetch what is missing, or take it off data.shards"
    else:
        shard = max(shards, key=lambda shard: (shard.num_samples == 0, _num_damaged(shard)))
        counts = {**_damaged_statuses(shard), **shard.damage}
        words = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
        damage = staged_damage(store, shard).to_pylist()
        first = f"; {damage[0]['detail']}" if damage else ""
        worst = f"the worst shard is {shard.url} ({words}){first}"
        for samples in staged_samples(store, shard, ["key", "image_offset", "found_status"]):
            unusable = pc.is_in(samples["found_status"], pa.array(list(DAMAGED_STATUSES)))
            for row in samples.filter(unusable).slice(0, NAMED_DAMAGED).to_pylist():
                status = row["found_status"]
                line = damage_line(shard.url, row["image_offset"], status)
                lines.append(f"damaged: {row['key'][:200]!a}, {status}: {line}")
        lost = [one for one in damage if one["num_samples"]]
        lines += [
            f"damaged: {(one['key'] or 'no key')[:200]!a}, {one['kind']}: {one['detail']}" for one in lost
        ]
    lines = lines[:NAMED_DAMAGED]
    unclear = [shard for shard in shards if any(shard.statuses.get(one) for one in UNCLEAR_IMAGE)]
    if unclear:
        lines.append(extensions_line(_total(shard.suffixes for shard in unclear)))
    message = f"data.max_damaged_share: {found}, {limit:.2%} are allowed; {worst}; mend this, or raise "
    return PencilError("\n".join([f"{message}data.max_damaged_share; nothing was published", *lines]))
