"""pydantic-ai: a capability that makes a transaction of each tool call.

with Transactions("project", store="runs.db", run="task-1") as transactions:
    agent = Agent(model, tools=tools, capabilities=[TransactionCapability(transactions)])
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from pydantic_ai import RunContext, ToolDefinition, ToolFailed
from pydantic_ai.capabilities import AbstractCapability, CapabilityOrdering, WrapToolExecuteHandler
from pydantic_ai.messages import ToolCallPart

from treenail.errors import OutcomeUnknownError, ToolCommitError
from treenail.integrations.transactions import Transactions, current_context
from treenail.tools import ToolCall

__all__ = ["TransactionCapability", "Transactions", "current_context"]

_raised: ContextVar[list[Exception]] = ContextVar("treenail_pydantic_ai_raised")
"""What the tool of the present call has raised."""


@dataclass
class TransactionCapability(AbstractCapability[Any]):
    """Makes a transaction of each tool call.

    A call fails, and is undone, if the tool raises, `ModelRetry` and the other exceptions of the framework
    included; also if a capability answers for it. A call that could not be kept is a `ToolFailed` for the
    model; one that a ceiling forbids raises `CallRefused`, which ends the run.
    """

    transactions: Transactions

    def get_ordering(self) -> CapabilityOrdering:
        """Stand next to the tool: what retries a call is outside of its transaction."""
        return CapabilityOrdering(position="innermost")

    async def wrap_tool_execute(
        self,
        ctx: RunContext[Any],
        *,
        call: ToolCallPart,
        tool_def: ToolDefinition,
        args: dict[str, Any],
        handler: WrapToolExecuteHandler,
    ) -> Any:
        """Run a call as a transaction."""
        raised: list[Exception] = []
        before = _raised.set(raised)
        try:
            return await self.transactions.arun(
                ToolCall(call.tool_call_id, call.tool_name, args),
                lambda: handler(args),
                is_error=lambda value: bool(raised),
            )
        except (ToolCommitError, OutcomeUnknownError) as error:
            raise ToolFailed(str(error)) from error
        finally:
            _raised.reset(before)

    async def on_tool_execute_error(
        self,
        ctx: RunContext[Any],
        *,
        call: ToolCallPart,
        tool_def: ToolDefinition,
        args: dict[str, Any],
        error: Exception,
    ) -> Any:
        """Note that the tool raised, before a capability can answer for it."""
        _raised.get([]).append(error)
        raise error
