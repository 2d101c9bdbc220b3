"""Delivery: a thread that hands an outbox over, in order, in batches, and with patience.

    delivery = Delivery(outbox, send, receiver="MLflow http://tracking:5000")
    remaining = delivery.finish(wait_s=30)         # what was not taken is still in the outbox

`send` gets the next records, takes as many from the front as it can in one go, and says how many. A record
leaves the disk only after that: a crash repeats at most one such hand-over, which `send` must bear, and loses
none. The log says once that the receiver went away, and once that it is back with how many were delivered.
"""

import logging
import random
import threading
import time
from collections.abc import Callable

from pencil_scale.tracking.outbox import MOST_RECORDS, Outbox, Record

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 30.0


class AwayError(Exception):
    """The receiver cannot be reached, or cannot work now; the same records may be taken later."""


class RefusedError(Exception):
    """The receiver will never take the first of these records."""


Send = Callable[[list[Record]], int]


class Delivery:
    """The one who empties an outbox."""

    def __init__(self, outbox: Outbox, send: Send, receiver: str, every_s: float = 1.0) -> None:
        self._outbox = outbox
        self._send = send
        self._receiver = receiver
        self._every_s = every_s
        self._finishing = threading.Event()
        self._deadline = float("inf")
        self._away: str | None = None  # why, while it is
        self._num_since = 0
        self._pause_s = FIRST_PAUSE_S
        self._most = MOST_RECORDS
        self._thread = threading.Thread(target=self._run, name="delivery", daemon=True)
        self._thread.start()

    def finish(self, wait_s: float) -> int:
        """Hand over the rest, for so long at most; say what remains and where, and give its number."""
        self._deadline = time.monotonic() + wait_s
        self._finishing.set()
        self._thread.join(wait_s)
        remaining = len(self._outbox)
        self._say_what_remains(remaining)
        return remaining

    def _run(self) -> None:
        try:
            if self._claimed():
                try:
                    self._empty()
                finally:
                    self._outbox.release()
        except Exception as error:  # of the disk, say: a thread that dies does so silently
            self._away = f"{type(error).__name__}: {error}"
            log.warning("delivery to %s ended (%s); the run continues", self._receiver, self._away)

    def _empty(self) -> None:
        records: list[Record] = []
        while time.monotonic() < self._deadline:
            records = records or self._outbox.first(self._most)
            if records:
                records = self._hand_over(records)
                continue
            self._emptied()
            if self._finishing.is_set():
                return
            self._finishing.wait(self._every_s)

    def _hand_over(self, records: list[Record]) -> list[Record]:
        """Send some; give back those known to be still there, or none where the outbox must be asked."""
        try:
            taken = self._send(records)
        except AwayError as error:
            self._went_away(str(error))
            return records
        except Exception as error:  # a RefusedError, or a fault of `send`, which must not stop the others
            if len(records) == 1:
                self._refused(records[0], str(error) or repr(error))
            self._most = 1  # which of several is to blame shows when they are sent singly
            return []
        self._outbox.drop(records[taken - 1].number)
        self._num_since += taken
        self._pause_s, self._most = FIRST_PAUSE_S, min(2 * self._most, MOST_RECORDS)
        return records[taken:]

    def _claimed(self) -> bool:
        said = False
        while not self._outbox.claim():
            if not said:
                log.warning("%s is being emptied by somebody else: waiting for its end", self._outbox.path)
                said = True
            if time.monotonic() >= self._deadline:
                return False
            time.sleep(min(self._every_s, FIRST_PAUSE_S))
        return True

    # --- what the log says -----------------------------------------------------------------------------

    def _went_away(self, reason: str) -> None:
        if self._away is None:
            kept = self._outbox.path
            log.warning("%s is away (%s): the work goes on, records wait in %s", self._receiver, reason, kept)
            self._num_since = 0
        self._away = reason
        if self._finishing.is_set():
            time.sleep(FIRST_PAUSE_S)
        else:  # runs that lost the same server should not all come back in the same moment
            self._finishing.wait(self._pause_s * random.uniform(0.5, 1))
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)

    def _emptied(self) -> None:
        if self._away is not None:
            log.warning("%s is back: %d records delivered", self._receiver, self._num_since)
            self._away = None

    def _refused(self, record: Record, reason: str) -> None:
        if self._outbox.num_refused() == 0:
            where = self._outbox.path
            log.warning("%s refuses a %s (%s): set aside in %s", self._receiver, record.kind, reason, where)
        self._outbox.set_aside(record, reason)

    def _say_what_remains(self, remaining: int) -> None:
        where = self._outbox.path
        if remaining:
            why = self._away or "no time was left"
            log.warning("%d records did not reach %s (%s)", remaining, self._receiver, why)
            log.warning("%s keeps them; the next start of the same run delivers them", where)
        if num_refused := self._outbox.num_refused():
            log.warning("%s refused %d records: table 'refused' of %s", self._receiver, num_refused, where)
        if num_lost := self._outbox.num_lost:
            log.warning("%d writes to %s failed: what they held is lost", num_lost, where)
