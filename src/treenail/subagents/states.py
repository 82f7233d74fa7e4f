"""The states of a subagent, the moves between them, and the evidence that each ending needs.

Theory of operation
-------------------
A subagent's state is the status of the last `SubagentEvent` about it in its parent's log. No task or thread
is asked. Every event in the log is a move of this table:

    from            to
    queued          running, failed, detached, closed
    running         completed, failed, timed_out, cancelled, detached
    completed       running (it was sent a new message), closed
    failed          running, closed
    timed_out       running, closed
    cancelled       running, closed
    detached        -
    closed          -

`queued` and `running` are not endings; every other state is. `detached` ends the parent's part only: the
subagent continues by itself (`Subagents.detach`), or is out of reach after a crash. The event of an ending
must carry the fields listed in `EVIDENCE`, or it is refused before it reaches the log. `completed` needs one
thing more: the child's own log must show a completed turn with an answer. A child that exists, or a task that
returned, proves nothing.

Remarks (`REMARKS`) are events that are recorded without changing the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from treenail.conversation import SubagentEvent
from treenail.errors import IllegalMoveError, UsageError


class SubagentStatus(StrEnum):
    """The state of a subagent."""

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
        """Whether it has ended."""
        return self not in (SubagentStatus.QUEUED, SubagentStatus.RUNNING)

    @property
    def is_final(self) -> bool:
        """Whether it has ended for good, so that it cannot be sent anything new."""
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
"""Every legal move."""

EVENT_NAMES: Mapping[SubagentStatus, str] = MappingProxyType(
    {each: each.value for each in SubagentStatus} | {_R: "started", _C: "finished"}
)
"""The name of the event that moves a subagent to each state."""

REMARKS = frozenset({"input", "cancel_requested", "reattached"})
"""Events that do not change the state."""

EVIDENCE: Mapping[SubagentStatus, tuple[str, ...]] = MappingProxyType(
    {
        _C: ("subagent_id", "child_session_id"),
        _F: ("subagent_id", "child_session_id", "reason", "next_actions"),
        _T: ("subagent_id", "child_session_id", "timeout_ms", "reason", "next_actions"),
        _X: ("subagent_id", "child_session_id", "reason"),
        _D: ("subagent_id", "child_session_id", "reason", "next_actions"),
        _Z: ("subagent_id", "child_session_id", "reason"),
    }
)
"""The fields that an ending's event must fill. `completed` also needs a summary or artifacts.

How long it ran is there unless its process died before anybody saw it run.
"""


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
    """Return the fields that an event lacks for the ending that it claims; empty if it claims none."""
    status = SubagentStatus(event.status)
    if event.event in REMARKS:
        return ()
    lacks = [name for name in EVIDENCE.get(status, ()) if getattr(event, name) in (None, "", ())]
    if status is _C and not event.summary and not event.artifacts:
        lacks.append("summary")
    return tuple(lacks)


def apply_event(now: SubagentStatus | None, event: SubagentEvent) -> SubagentStatus:
    """Return the state after an event. Raises `IllegalMoveError` for a move that is not in the table.

    Raises `UsageError` for an event whose name, status and evidence do not fit together.
    """
    try:
        status = SubagentStatus(event.status)
    except ValueError:
        raise UsageError(
            f"{event.status!r} is not a status of a subagent; use one of: {', '.join(SubagentStatus)}"
        ) from None
    if event.event in REMARKS:
        if now is not status:
            raise UsageError(f"the remark {event.event!r} cannot change the state from {now} to {status}")
        return status
    check_move(event.subagent_id, now, status)
    if event.event != EVENT_NAMES[status]:
        raise UsageError(f"the event that leads to {status} must be named {EVENT_NAMES[status]!r}")
    lacks = missing_evidence(event)
    if lacks:
        raise UsageError(
            f"the subagent {event.subagent_id} cannot be recorded as {status} without evidence; "
            f"missing: {', '.join(lacks)}"
        )
    return status
