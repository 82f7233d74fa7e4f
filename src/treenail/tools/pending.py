"""Calls whose body runs outside this process, between two hooks: begin, then end or abort."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from treenail.errors import ToolError
from treenail.tools.event_loop import run_beside, run_blocking
from treenail.tools.runner import ToolRunner, no_record, tool_name
from treenail.tools.tool import Effects, FileAccess, Tool, ToolCall, ToolResult
from treenail.tools.transaction import OpenCall, PlannedCall, Record


class PendingToolTracker:
    """Makes a transaction of each call that another program runs.

    By default the other program changes `files` by itself; `"context"` says that it asks our filesystem.
    """

    def __init__(
        self, runner: ToolRunner, *, effects: Effects = "workspace", files: FileAccess = "any"
    ) -> None:
        self._runner = runner
        self._effects: Effects = effects
        self._files: FileAccess = files
        self._open: dict[str, tuple[PlannedCall, OpenCall]] = {}

    def begin(
        self,
        call_id: str,
        name: str,
        *,
        arguments: str | Mapping[str, Any] = "{}",
        effects: Effects | None = None,
        record: Record = no_record,
    ) -> ToolResult[Any] | None:
        """Begin a call, blocking. See `abegin`."""
        begin = partial(self.abegin, call_id, name, arguments=arguments, effects=effects, record=record)
        return run_blocking(begin, face="PendingToolTracker.begin", instead="abegin")

    async def abegin(
        self,
        call_id: str,
        name: str,
        *,
        arguments: str | Mapping[str, Any] = "{}",
        effects: Effects | None = None,
        record: Record = no_record,
    ) -> ToolResult[Any] | None:
        """Begin a call that is about to run elsewhere. Returns a failed result if it must not run.

        `effects` replaces the tracker's own for this call.
        """
        effects = effects or self._effects
        body: Tool[Any, Any] = Tool(
            name=tool_name(name),
            description="A tool that runs elsewhere.",
            effects=effects,
            files=self._files if effects != "none" else None,
        )
        plan = self._runner.plan(ToolCall(call_id, name, arguments), tool=body, record=record)
        begun: list[OpenCall] = []
        try:
            await self._runner.take_tickets(plan)
            opened = await run_beside(self._runner.begin, plan, begun)
        except BaseException:
            for each in begun:
                each.leave_nothing()
            _give_back(plan)
            raise
        if isinstance(opened, ToolResult):
            _give_back(plan)
            return opened
        self._open[call_id] = plan, opened
        return None

    def end(self, call_id: str, success: bool, message: str = "") -> bool:
        """End a call. Returns whether its changes were rolled back."""
        if call_id not in self._open:
            return False
        plan, opened = self._open.pop(call_id)
        try:
            result: ToolResult[Any] = ToolResult(message or ("OK" if success else "failed"), success=success)
            return not opened.end(result).success
        finally:
            _give_back(plan)

    def abort(self, call_id: str, reason: str = "aborted") -> bool:
        """Give a call up and roll its changes back. Returns whether there was such a call."""
        if call_id not in self._open:
            return False
        plan, opened = self._open.pop(call_id)
        try:
            opened.fail(ToolError(reason))
        finally:
            _give_back(plan)
        return True

    def abort_all(self, reason: str = "aborted") -> None:
        """Give every open call up."""
        for call_id in tuple(self._open):
            self.abort(call_id, reason)


def _give_back(plan: PlannedCall) -> None:
    if plan.tickets is not None:
        plan.tickets.give_back()
