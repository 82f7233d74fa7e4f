"""What all calls of one runner share, and the snapshots and events that are made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, cast

from pydantic_core import from_json

from treenail.clock import new_id
from treenail.codec import FrozenDict
from treenail.log import SlicePolicy
from treenail.state import (
    CompositeSnapshot,
    ExecutionState,
    Snapshotable,
    SnapshotMetadata,
    random_state,
)
from treenail.tools.context import filesystem_of
from treenail.tools.events import Outcome, ToolInvoked
from treenail.tools.gate import Gate, Ticket, gate_of
from treenail.tools.tool import Tool, ToolCall, ToolResult
from treenail.workspace import Filesystem, FilesystemSnapshot, layered

_KEPT_MESSAGE = 1_000
"""How much of a result's text `ToolInvoked` keeps; the model's copy is whole, in its message."""

_KEPT_ARGUMENT = 2_000
"""How much of a text in the arguments `ToolInvoked` keeps; the model's own message has it whole."""


@dataclass(frozen=True, slots=True)
class CallEnvironment:
    """The state that calls change, the gates before it, and the names under which calls are logged."""

    state: ExecutionState
    prompt_name: str
    adapter: str
    filesystem: Filesystem | None
    read_only: Filesystem | None
    """The workspace as a call without effects sees it."""
    gates: tuple[Gate, ...]
    """The session's gate, and the workspace's if there is one that can be changed."""

    @classmethod
    def of(cls, state: ExecutionState, prompt_name: str, adapter: str) -> CallEnvironment:
        """Make the environment of a state's calls."""
        filesystem = filesystem_of(state)
        gates = [gate_of(state.session.session_id, "the session")]
        if filesystem is not None and not filesystem.read_only:
            gates.append(gate_of(("workspace", id(filesystem)), "the workspace"))
        read_only = None if filesystem is None else filesystem.read_only_view()
        return cls(state, prompt_name, adapter, filesystem, read_only, tuple(gates))

    def scans_for(self, tool: Tool[Any, Any]) -> bool:
        """Say whether the workspace is scanned before and after a tool's calls.

        A function without a context knows no other directory than one on disk: its own process's.
        """
        if not tool.is_foreign or self.filesystem is None:
            return False
        if tool.files == "commands":
            # Commands run on a layer, and ask for a scan only where there is none.
            return layered(self.filesystem) is None
        return tool.files == "any" or self.filesystem.host_root is not None

    # .. snapshots ..

    def save_others(self) -> Sequence[tuple[type, Snapshotable[object], object]]:
        """Capture the resources, besides the workspace, that a failed call must not change."""
        resources = self.state.resources
        return [
            (each, resource, resource.snapshot(tag="pre"))
            for each, resource in self._others().items()
            if resources.policy_of(each) is not SlicePolicy.LOG
        ]

    def _others(self) -> Mapping[type, Snapshotable[object]]:
        found = self.state.resources.snapshotable_resources()
        return {each: one for each, one in found.items() if cast(object, one) is not self.filesystem}

    def boundary(
        self,
        call_id: str,
        tool_name: str,
        phase: Literal["pre_tool", "post_tool"],
        workspace: FilesystemSnapshot | None,
    ) -> CompositeSnapshot:
        """Capture everything on one side of a call, for the checkpoints."""
        tag = f"{phase.removesuffix('_tool')}:{call_id}"
        known: dict[type, object] = {}
        workspace = workspace or self._quiet_workspace(tag)
        present = self.state.resources.snapshotable_resources()
        for each, resource in present.items():
            if cast(object, resource) is not self.filesystem:
                known[each] = resource.snapshot(tag=tag)
            elif workspace is not None:
                known[each] = workspace
        return CompositeSnapshot(
            snapshot_id=new_id(),
            created_at=self.state.clock.now(),
            session=self.state.session.snapshot(),
            resources=known,
            metadata=SnapshotMetadata(tag=tag, tool_call_id=call_id, tool_name=tool_name, phase=phase),
            rng=random_state(self.state.rng),
            origins=present,
        )

    def _quiet_workspace(self, tag: str) -> FilesystemSnapshot | None:
        """Return where the workspace is, for a call that does not hold it.

        If another call is at work on it, that is where it was before: what the other call does is not
        committed yet.
        """
        if self.filesystem is None or len(self.gates) == 1:
            return None
        gate = self.gates[-1]
        ticket = Ticket(gate)
        try:
            return self.filesystem.snapshot(tag=tag) if ticket.take_nowait() else gate.boundary
        finally:
            ticket.give_back()

    def note_checkpoint(
        self,
        call_id: str,
        before: CompositeSnapshot,
        after: CompositeSnapshot | None,
        result: ToolResult[Any],
        elapsed_s: float,
    ) -> None:
        """Record both sides of a call in the checkpoints, if they are kept."""
        if self.state.checkpoints is not None:
            elapsed = timedelta(seconds=elapsed_s)
            self.state.checkpoints.record(call_id, pre=before, post=after, result=result, elapsed=elapsed)

    # .. events ..

    def invoked(
        self, call: ToolCall, result: ToolResult[Any], outcome: Outcome, **details: Any
    ) -> ToolInvoked:
        """Make the event that ends a call. `details` are other fields of `ToolInvoked`."""
        return ToolInvoked(
            prompt_name=self.prompt_name,
            adapter=self.adapter,
            name=call.name,
            params=_kept_arguments(call),
            result=_kept_result(result),
            session_id=self.state.session.session_id,
            created_at=self.state.clock.now(),
            call_id=call.id,
            outcome=outcome,
            **details,
        )


def _kept_result(result: ToolResult[Any]) -> ToolResult[Any]:
    return ToolResult(result.render()[:_KEPT_MESSAGE], success=result.success)


def _kept_arguments(call: ToolCall) -> FrozenDict[str, object]:
    text = call.arguments_json or "{}"
    try:
        data = from_json(text)  # The parser that the tool's own parameters go through.
    except ValueError:
        return FrozenDict()
    if len(text) > _KEPT_ARGUMENT:
        data = _shortened(data)
    return FrozenDict(data) if isinstance(data, dict) else FrozenDict()


def _shortened(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _KEPT_ARGUMENT:
        return f"{value[:_KEPT_ARGUMENT]}[{len(value) - _KEPT_ARGUMENT} more characters]"
    if isinstance(value, dict):
        return {key: _shortened(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shortened(each) for each in value]
    return value
