"""Catalogue entries: what a manifest says of each shard and of each segment."""

from dataclasses import dataclass, field

from pencil_scale.reading.byte_source import ShardVersion


@dataclass(frozen=True)
class ShardEntry:
    """A shard the catalogue knows: `state` is `indexed` or `vanished`."""

    url: str
    num_bytes: int
    tag: str
    state: str
    num_samples: int
    rules: str
    oddities: dict[str, int]
    skipped: dict[str, int]
    unknown_labels: dict[str, int]
    suffixes: dict[str, int] = field(default_factory=dict)  # the commonest of its members

    @property
    def version(self) -> ShardVersion:
        return ShardVersion(self.num_bytes, self.tag)


@dataclass(frozen=True)
class Segment:
    """One Parquet file: all rows first_row..last_row (`rows`), or newer words on some (`changes`)."""

    file: str
    kind: str
    first_row: int
    last_row: int
    num_rows: int
