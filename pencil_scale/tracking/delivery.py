"""Delivery: a thread that sends the records of a journal, in order and in batches, and retries.

    delivery = Delivery(journal, send, receiver="MLflow http://tracking:5000")
    remaining = delivery.finish(wait_s=30)         # what was not delivered is still in the journal

`send` gets the next records, sends as many from the front as fit into one request, and returns their number.
They are acknowledged after that: a crash repeats at most those of the last second, which must do no harm. The
log says once that the receiver is unreachable, and once that it is back. Nothing here ends a run; `Harmless`
gives other reporting code the same promise.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pencil_scale.tracking.journal import MOST_RECORDS, AwayError, Journal, Record

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 30.0

Send = Callable[[list[Record]], int]


class Delivery:
    """Delivers until it is finished."""

    def __init__(self, journal: Journal, send: Send, receiver: str, every_s: float = 1.0) -> None:
        self._journal = journal
        self._send = send
        self._receiver = receiver
        self._every_s = every_s
        self._finishing = threading.Event()
        self._deadline = float("inf")
        self._away: str | None = None  # why, while it is unreachable
        self._num_since = self._num_refused = 0
        self._pause_s = FIRST_PAUSE_S
        self._most = MOST_RECORDS
        self._thread = threading.Thread(target=self._run, name="delivery", daemon=True)
        self._thread.start()

    def finish(self, wait_s: float) -> int:
        """Deliver the rest, for this long at most, and close the journal; return how many records remain."""
        self._journal.flush()
        self._deadline = time.monotonic() + wait_s
        self._finishing.set()
        self._thread.join(wait_s)
        self._journal.close()
        remaining, where = len(self._journal), self._journal.url
        if remaining:
            why = self._away or "no time was left"
            log.warning("%d records did not reach %s (%s)", remaining, self._receiver, why)
            log.warning("%s keeps them; the next start of the same run delivers them", where)
        if self._num_refused:
            log.warning("%s refused %d records: see %s/refused", self._receiver, self._num_refused, where)
        if num_lost := self._journal.num_lost:
            log.warning("%d records could not be written to %s and are lost", num_lost, where)
        return remaining

    def _run(self) -> None:
        try:
            self._deliver()
        except Exception as error:  # a thread that dies does so silently
            self._away = f"{type(error).__name__}: {error}"
            log.warning("delivery to %s ended (%s); the run continues", self._receiver, self._away)

    def _deliver(self) -> None:
        while time.monotonic() < self._deadline:
            try:
                records = self._journal.first(self._most)
                if records:
                    self._hand_over(records)
                    continue
            except AwayError as error:
                self._wait_for_receiver(str(error))
                continue
            if self._away is not None:
                log.warning("%s is back: %d records delivered", self._receiver, self._num_since)
                self._away = None
            if self._finishing.is_set():
                return
            self._finishing.wait(self._every_s)

    def _hand_over(self, records: list[Record]) -> None:
        try:
            num_sent = self._send(records)
        except AwayError:
            raise
        except Exception as error:  # a RefusedError, or a bug in `send`, which must not stop the others
            if len(records) == 1:
                reason, where = str(error) or repr(error), f"{self._journal.url}/refused"
                self._journal.drop(records[0], refused=reason)
                if not self._num_refused:
                    text = "%s refuses a %s (%s): kept in %s"
                    log.warning(text, self._receiver, records[0].kind, reason, where)
                self._num_refused += 1
            self._most = 1  # sent one by one, the record to blame shows
            return
        self._journal.drop(records[num_sent - 1])
        self._num_since += num_sent
        self._pause_s, self._most = FIRST_PAUSE_S, min(2 * self._most, MOST_RECORDS)

    def _wait_for_receiver(self, reason: str) -> None:
        if self._away is None:
            text = "%s is unreachable (%s): the run continues, records wait in %s"
            log.warning(text, self._receiver, reason, self._journal.url)
            self._num_since = 0
        self._away = reason
        if self._finishing.is_set():
            time.sleep(FIRST_PAUSE_S)
        else:  # runs that lost the same server should not all return at the same moment
            self._finishing.wait(self._pause_s * random.uniform(0.5, 1))
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)


class Harmless:
    """Runs what may fail without ending a run, such as drawing a picture.

    with harmless("drawing class transitions"):
        ...                              # the first failure of each kind is logged, and the run continues
    """

    def __init__(self) -> None:
        self._failed: set[str] = set()

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if what not in self._failed:
                self._failed.add(what)
                reason = f"{type(error).__name__}: {error}"
                log.warning("%s failed (%s); training continues, later failures are not shown", what, reason)
