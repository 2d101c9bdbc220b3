"""The words every station shares: the error a person can act on, the key of a sample, the id of a run.

Nothing here knows a file, a tensor or a cluster.
"""

import hashlib
import uuid


class PencilError(Exception):
    """An error a person can act on: it names the thing, what was found, and what to do.

    A job prints its message as one line and exits with code 2, without a traceback. Every module
    raises a subclass of its own (`ConfigError`, `ShardError`), so callers can tell them apart.
    """


def sample_key(sample_id: str) -> bytes:
    """Hash a sample id to the 128 bits that name it in tables of fixed width.

    Ids from shards may hold bytes that are no valid text; they arrive as surrogates and are hashed as
    the bytes they were.
    """
    return hashlib.blake2b(sample_id.encode("utf-8", "surrogateescape"), digest_size=16).digest()


def new_id() -> str:
    """Draw an id that nothing else has: names are reused, ids never."""
    return uuid.uuid4().hex[:16]


class LabelTableError(PencilError):
    """The label table cannot do what was asked."""


class TableDamagedError(LabelTableError):
    """A file of the table is missing, cut short, or not what its name promises."""
