"""Snapshots at the boundaries of tool calls, so that a person can go back to one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol

from treenail.clock import SystemClock, WallClock
from treenail.errors import UsageError
from treenail.state.snapshot import CompositeSnapshot

DEFAULT_CHECKPOINTS = 100
"""How many tool boundaries a store remembers unless it is told otherwise."""

_SUMMARY_LENGTH = 200


class ResultLike(Protocol):
    """What a checkpoint needs of a tool's result."""

    @property
    def message(self) -> str:
        """What the tool said."""
        ...

    @property
    def success(self) -> bool:
        """Whether the call was kept."""
        ...


@dataclass(slots=True, frozen=True)
class ToolCheckpoint:
    """What is remembered of one tool call: the state on both sides of it, and how it went."""

    tool_call_id: str
    tool_name: str
    pre_snapshot: CompositeSnapshot
    post_snapshot: CompositeSnapshot | None
    result_summary: str | None
    success: bool
    elapsed: timedelta | None
    recorded_at: datetime


def _ring() -> deque[str]:
    return deque(maxlen=DEFAULT_CHECKPOINTS)


@dataclass(slots=True)
class CheckpointStore:
    """Remembers the newest tool boundaries. A boundary that falls out of the ring is forgotten whole."""

    _checkpoints: dict[str, ToolCheckpoint] = field(default_factory=dict)
    _ring_buffer: deque[str] = field(default_factory=_ring)
    clock: WallClock | None = None
    """What says when a boundary was recorded; without one, the clock of the state that it belongs to."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @classmethod
    def keeping(cls, count: int, *, clock: WallClock | None = None) -> CheckpointStore:
        """Make a store that remembers that many boundaries."""
        if count < 1:
            raise UsageError(f"a checkpoint store keeps at least one boundary, not {count}")
        return cls(_ring_buffer=deque(maxlen=count), clock=clock)

    def record(
        self,
        tool_call_id: str,
        *,
        pre: CompositeSnapshot,
        post: CompositeSnapshot | None = None,
        result: ResultLike | None = None,
        elapsed: timedelta | None = None,
    ) -> None:
        """Remember a tool call. Recording the same call again replaces what was known of it."""
        checkpoint = ToolCheckpoint(
            tool_call_id=tool_call_id,
            tool_name=pre.metadata.tool_name or "",
            pre_snapshot=pre,
            post_snapshot=post,
            result_summary=None if result is None else result.message[:_SUMMARY_LENGTH],
            success=result is not None and result.success,
            elapsed=elapsed,
            recorded_at=(self.clock or SystemClock()).now(),
        )
        with self._lock:
            if tool_call_id in self._checkpoints:
                self._ring_buffer.remove(tool_call_id)
            elif len(self._ring_buffer) == self._ring_buffer.maxlen:
                del self._checkpoints[self._ring_buffer.popleft()]
            self._ring_buffer.append(tool_call_id)
            self._checkpoints[tool_call_id] = checkpoint

    def get(self, tool_call_id: str) -> ToolCheckpoint | None:
        """Return what is remembered of a call, or None."""
        return self._checkpoints.get(tool_call_id)

    def get_pre_snapshot(self, tool_call_id: str) -> CompositeSnapshot | None:
        """Return the state before a call, or None."""
        found = self._checkpoints.get(tool_call_id)
        return None if found is None else found.pre_snapshot

    def get_post_snapshot(self, tool_call_id: str) -> CompositeSnapshot | None:
        """Return the state after a call, or None."""
        found = self._checkpoints.get(tool_call_id)
        return None if found is None else found.post_snapshot

    def list_checkpoints(self) -> Sequence[ToolCheckpoint]:
        """Return the remembered calls, oldest first."""
        with self._lock:
            return tuple(self._checkpoints[each] for each in self._ring_buffer)
