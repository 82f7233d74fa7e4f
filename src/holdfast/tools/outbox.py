"""Delivering what committed calls asked for: at least once, in order, with stable keys.

`OutboxPut` stands in the log only if its call was committed, so nothing is delivered
for a call that was rolled back. A delivery is recorded after it was made; a crash in
between makes it twice, with the same key, which is what the receiver deduplicates by.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from holdfast.state.session import Session
from holdfast.tools.events import OutboxDelivered, OutboxFailed, OutboxPut

_logger = logging.getLogger("holdfast.tools")

Deliver = Callable[[OutboxPut], object]


def undelivered(session: Session) -> tuple[OutboxPut, ...]:
    """Return the messages that were committed and not yet delivered, oldest first."""
    done = {each.key for each in session[OutboxDelivered].all()}
    return tuple(each for each in session[OutboxPut].all() if each.key not in done)


@dataclass(slots=True)
class Outbox:
    """Hands committed messages to the operator's handlers, one per topic."""

    handlers: Mapping[str, Deliver] = field(default_factory=dict)

    def flush(self, session: Session, messages: tuple[OutboxPut, ...] | None = None) -> tuple[OutboxPut, ...]:
        """Deliver what waits. Returns what still does: its handler failed, or its topic has none.

        A message is held back while an earlier one of its topic waits, so that order is kept.
        """
        waiting = undelivered(session) if messages is None else messages
        left: list[OutboxPut] = []
        blocked: set[str] = set()
        for message in waiting:
            handler = self.handlers.get(message.topic)
            if handler is None or message.topic in blocked:
                left.append(message)
                blocked.add(message.topic)
                continue
            try:
                handler(message)
            except Exception as error:  # noqa: BLE001  # the receiver is foreign code; the message stays
                attempt = 1 + sum(1 for each in session[OutboxFailed].all() if each.key == message.key)
                _logger.warning("delivering %s failed (attempt %d): %s", message.key, attempt, error)
                session.dispatch(OutboxFailed(message.key, attempt, f"{type(error).__name__}: {error}"))
                left.append(message)
                blocked.add(message.topic)
            else:
                session.dispatch(OutboxDelivered(message.key))
        return tuple(left)
