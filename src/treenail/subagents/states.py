"""How a subagent may stand, how it may move, and what must be in the log for it.

Theory of operation
-------------------
A subagent is a child session under supervision. How it stands is not asked of a task or a
thread: it is the last `SubagentEvent` about it in its parent's log, and every event in there
was a move of this table.

    from            to
    queued          running, failed, detached, closed
    running         completed, failed, timed_out, cancelled, detached
    completed       running (it was sent something new), closed
    failed          running, closed
    timed_out       running, closed
    cancelled       running, closed
    detached        -
    closed          -

`queued` and `running` wait for something; every other state is an ending. An ending is only
recorded together with the evidence that it needs (`EVIDENCE`): an event without it is refused
before it reaches the log. `completed` needs more than that: the child's own log must show a
completed turn, because a child that exists, or a task that returned, has completed nothing.

Some events are remarks (`REMARKS`): they are kept, and change no state.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from treenail.conversation.events import SubagentEvent
from treenail.errors import IllegalMoveError, UsageError


class SubagentStatus(StrEnum):
    """How a subagent stands."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    DETACHED = "detached"
    CLOSED = "closed"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing more will happen by itself."""
        return self not in (SubagentStatus.QUEUED, SubagentStatus.RUNNING)

    @property
    def is_final(self) -> bool:
        """Whether nothing more can happen at all, not even when it is sent something new."""
        return not TRANSITIONS[self]


_Q, _R, _C, _F, _T, _X, _D, _Z = SubagentStatus

TRANSITIONS: Mapping[SubagentStatus, frozenset[SubagentStatus]] = MappingProxyType(
    {
        _Q: frozenset({_R, _F, _D, _Z}),
        _R: frozenset({_C, _F, _T, _X, _D}),
        _C: frozenset({_R, _Z}),
        _F: frozenset({_R, _Z}),
        _T: frozenset({_R, _Z}),
        _X: frozenset({_R, _Z}),
        _D: frozenset(),
        _Z: frozenset(),
    }
)
"""Every move there is."""

EVENT_NAMES: Mapping[SubagentStatus, str] = MappingProxyType(
    {
        _Q: "queued",
        _R: "started",
        _C: "finished",
        _F: "failed",
        _T: "timed_out",
        _X: "cancelled",
        _D: "detached",
        _Z: "closed",
    }
)
"""What the event is called that brings a subagent to a state."""

REMARKS = frozenset({"input", "cancel_requested", "retrying", "reattached"})
"""Events that say something about a subagent and change no state."""

EVIDENCE: Mapping[SubagentStatus, tuple[str, ...]] = MappingProxyType(
    {
        _C: ("subagent_id", "child_session_id", "elapsed_ms"),
        _F: ("subagent_id", "child_session_id", "reason", "next_actions"),
        _T: ("subagent_id", "child_session_id", "timeout_ms", "elapsed_ms", "reason", "next_actions"),
        _X: ("subagent_id", "child_session_id", "reason"),
        _D: ("subagent_id", "child_session_id", "reason", "next_actions"),
        _Z: ("subagent_id", "child_session_id", "reason"),
    }
)
"""What an ending's event must say. `completed` needs a summary or artifacts besides."""


def check_move(subagent_id: str, now: SubagentStatus | None, to: SubagentStatus) -> None:
    """Raise `IllegalMoveError` unless the table has the move. A subagent begins as `queued`."""
    allowed = frozenset({_Q}) if now is None else TRANSITIONS[now]
    if to in allowed:
        return
    if now is None:
        raise IllegalMoveError(f"the subagent {subagent_id} does not exist yet, so it cannot become {to}")
    could = ", ".join(each for each in SubagentStatus if each in allowed) or "nothing more"
    raise IllegalMoveError(
        f"the subagent {subagent_id} is {now} and cannot become {to}; from here it can become: {could}. "
        "Nothing was changed."
    )


def missing_evidence(event: SubagentEvent) -> tuple[str, ...]:
    """Name what an event lacks to stand for the ending that it claims; nothing for one that claims none."""
    status = SubagentStatus(event.status)
    if event.event in REMARKS:
        return ()
    lacks = [name for name in EVIDENCE.get(status, ()) if getattr(event, name) in (None, "", ())]
    if status is _C and not event.summary and not event.artifacts:
        lacks.append("summary")
    return tuple(lacks)


def apply_event(now: SubagentStatus | None, event: SubagentEvent) -> SubagentStatus:
    """Return how a subagent stands after an event. Refuses a move that is not in the table.

    Raises `UsageError` for an event whose name, status and evidence do not fit together.
    """
    try:
        status = SubagentStatus(event.status)
    except ValueError:
        raise UsageError(
            f"{event.status!r} is no status of a subagent; there are: {', '.join(SubagentStatus)}"
        ) from None
    if event.event in REMARKS:
        if now is not status:
            raise UsageError(f"a remark ({event.event!r}) changes no state: {now} is not {status}")
        return status
    check_move(event.subagent_id, now, status)
    if event.event != EVENT_NAMES[status]:
        raise UsageError(f"an event that leads to {status} is called {EVENT_NAMES[status]!r}")
    lacks = missing_evidence(event)
    if lacks:
        raise UsageError(
            f"the subagent {event.subagent_id} cannot be recorded as {status} without evidence; "
            f"missing: {', '.join(lacks)}"
        )
    return status
