"""Delivery of messages that committed calls put into the outbox: at least once, in order, with stable keys.

The log contains an `OutboxPut` only if its call was committed, so a rolled-back call delivers nothing. A
delivery is recorded after it was made; after a crash in between it is made again with the same key, by
which the receiver recognises the duplicate.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from treenail.state import Session
from treenail.tools.events import OutboxDelivered, OutboxFailed, OutboxPut

_logger = logging.getLogger("treenail.tools")

Deliver = Callable[[OutboxPut], object]
"""Delivers one message; raises if it did not arrive."""


class _Waiting:
    """A session's undelivered messages, updated by reading only the new items of its slices."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_flushing = False
        self._messages: dict[str, OutboxPut] = {}
        self._attempts: dict[str, int] = {}
        self._seen = (0, 0, 0)

    def messages(self, session: Session) -> tuple[OutboxPut, ...]:
        """Return the undelivered messages, oldest first."""
        puts, done = session[OutboxPut].view(), session[OutboxDelivered].view()
        failed = session[OutboxFailed].view()
        if len(puts) < self._seen[0] or len(done) < self._seen[1] or len(failed) < self._seen[2]:
            self._messages, self._attempts, self._seen = {}, {}, (0, 0, 0)  # The history was pruned.
        for position in range(self._seen[0], len(puts)):
            message = puts[position]
            self._messages[message.key] = message
        for position in range(self._seen[1], len(done)):
            self._messages.pop(done[position].key, None)
        for position in range(self._seen[2], len(failed)):
            self._attempts[failed[position].key] = failed[position].attempt
        self._seen = (len(puts), len(done), len(failed))
        return tuple(self._messages.values())

    def next_attempt(self, key: str) -> int:
        """Return the number of the next attempt."""
        return self._attempts.get(key, 0) + 1


_waiting: WeakKeyDictionary[Session, _Waiting] = WeakKeyDictionary()
_waiting_lock = threading.Lock()


def _waiting_of(session: Session) -> _Waiting:
    with _waiting_lock:
        return _waiting.setdefault(session, _Waiting())


def undelivered(session: Session) -> tuple[OutboxPut, ...]:
    """Return the messages that were committed and not yet delivered, oldest first."""
    waiting = _waiting_of(session)
    with waiting.lock:
        return waiting.messages(session)


def _sending_call(message: OutboxPut) -> object:
    return message.call_id


def times_sent(session: Session, call_id: str) -> int:
    """Return how many committed calls with this id have put a message into the outbox."""
    messages = session[OutboxPut].view()
    position = messages.find(_sending_call, call_id)
    if position is None:
        return 0
    rest = messages[position].key.removeprefix(f"{session.session_id}:{call_id}")
    return int(rest[1:].partition(":")[0]) if rest.startswith("#") else 1


@dataclass(slots=True)
class Outbox:
    """Delivers committed messages through the operator's handlers, one per topic."""

    handlers: Mapping[str, Deliver] = field(default_factory=dict)

    def flush(self, session: Session) -> tuple[OutboxPut, ...]:
        """Deliver the waiting messages. Return those whose handler failed or whose topic has none.

        A message waits while an earlier one of its topic does, so that order is kept. One flush runs at a
        time; a flush that a handler starts during another returns at once.
        """
        waiting = _waiting_of(session)
        with waiting.lock:
            if waiting.is_flushing:
                return waiting.messages(session)
            waiting.is_flushing = True
            try:
                blocked: set[str] = set()
                for message in waiting.messages(session):
                    if message.topic not in blocked and not self._deliver(session, waiting, message):
                        blocked.add(message.topic)
                return waiting.messages(session)
            finally:
                waiting.is_flushing = False

    def _deliver(self, session: Session, waiting: _Waiting, message: OutboxPut) -> bool:
        """Deliver one message; return whether it arrived."""
        handler = self.handlers.get(message.topic)
        if handler is None:
            return False
        try:
            handler(message)
        except Exception as error:  # noqa: BLE001  # the receiver is foreign code; the message stays
            attempt = waiting.next_attempt(message.key)
            _logger.warning("delivering %s failed (attempt %d): %s", message.key, attempt, error)
            session.dispatch(OutboxFailed(message.key, attempt, f"{type(error).__name__}: {error}"))
            return False
        session.dispatch(OutboxDelivered(message.key))
        return True
