"""What every room shares: the error a person can act on, plurals, the key of a sample, and random ids."""

import hashlib
import uuid


class PencilError(Exception):
    """An error a person can act on: it names the thing, what was found, and what to do.

    A job prints the message as one line and exits with code 2, without a traceback. Subclasses exist only
    where a caller handles them differently.
    """


class DamagedError(PencilError):
    """A stored file is missing, cut short, or not what its name promises."""


class ResumableError(PencilError):
    """Something passes, such as an outage: the same command, given again, continues where this one ended."""


class HeldError(PencilError):
    """A run whose labels wait for a person: a job exits with code 3, as it did when it held them."""


class TaskDiedError(PencilError):
    """The process of a task died in every attempt; `number` says which piece it worked on."""

    def __init__(self, number: int, error: Exception) -> None:
        self.number, self.kind = number, type(error).__name__
        what = f"task {number}: its process died in every attempt ({self.kind})"
        super().__init__(f"{what}; start Ray with more memory or fewer CPUs")


def many(number: int, thing: str) -> str:
    """Format a number of things, as in `1 shard` or `2 shards`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def sample_key(sample_id: str) -> bytes:
    """Hash a sample id to the 128 bits that name it in tables of fixed width.

    Ids from shards may contain bytes that are not valid text; they arrive as surrogates and are hashed as
    the original bytes.
    """
    return hashlib.blake2b(sample_id.encode("utf-8", "surrogateescape"), digest_size=16).digest()


def new_id() -> str:
    """Draw an id that nothing else has: names are reused, ids never."""
    return uuid.uuid4().hex[:16]
