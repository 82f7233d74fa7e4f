"""Child sessions: how nested evaluations, subagents and workflows open, contain and stop theirs.

A child session has a log of its own in its parent's store and knows its parent only as a read-only view.
Its work runs in a chain below the parent's containment, so it spends the parent's money, steps and time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from uuid import UUID

import anyio

from treenail.clock import Clock
from treenail.containment import CancellationToken, call_later, threadsafe
from treenail.errors import SessionNotFoundError
from treenail.state import Session, nested_session


def open_child_session(parent: Session, session_id: UUID, tags: Mapping[str, str] | None = None) -> Session:
    """Open a child session for writing, and create it first if the log does not have it yet.

    Raises `LeaseHeldError` while another process writes it.
    """
    try:
        return Session.open(
            parent.log,
            session_id,
            parent=parent.read_only_view(),
            clock=parent.clock,
            codec=parent.codec,
        )
    except SessionNotFoundError:
        return nested_session(parent, session_id=session_id, tags=tags)


@contextmanager
def stopped_by(
    clock: Clock, seconds: float | None, token: CancellationToken | None = None
) -> Iterator[anyio.CancelScope]:
    """Cancel the block when its time is over or its token is cancelled, if it has either.

    Afterwards `cancel_called` of the scope says whether that happened.
    """
    with anyio.CancelScope() as scope:
        with ExitStack() as stack:
            cancel = threadsafe(scope.cancel)
            if seconds is not None:
                stack.callback(call_later(clock, seconds, cancel).cancel)
            if token is not None:
                stack.callback(token.on_cancel(cancel))
            yield scope
