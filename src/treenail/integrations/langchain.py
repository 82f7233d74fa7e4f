"""LangChain and LangGraph: a middleware that makes a transaction of each tool call.

    with Transactions("project", store="runs.db", run="thread-1") as transactions:
        agent = create_agent(model, tools, middleware=[TransactionMiddleware(transactions)])

Put it last in the list, so that middleware which retries a call, or answers for it, is outside of the
transaction.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import ToolMessage
from langgraph.prebuilt.tool_node import ToolCallRequest
from langgraph.types import Command

from treenail.errors import OutcomeUnknownError, ToolCommitError
from treenail.integrations.transactions import Transactions, current_context
from treenail.tools import ToolCall

__all__ = ["TransactionMiddleware", "Transactions", "current_context"]

Result: TypeAlias = "ToolMessage | Command[Any]"
"""What a tool call comes to in LangGraph."""


class TransactionMiddleware(AgentMiddleware[Any, Any, Any]):
    """Makes a transaction of each tool call.

    A call fails, and is undone, if the tool raises, or if the answer to the model has the status `error`. A
    call that could not be kept is answered with such a message; one that a ceiling forbids raises
    `CallRefused`, which ends the run.
    """

    def __init__(self, transactions: Transactions) -> None:
        super().__init__()
        self.transactions = transactions

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Result]
    ) -> Result:
        """Run a call as a transaction."""
        call = _call(request)
        try:
            result: Result = self.transactions.run(call, lambda: handler(request), is_error=_is_error)
            return result
        except (ToolCommitError, OutcomeUnknownError) as error:
            return _failed(call, error)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Result]]
    ) -> Result:
        """Run a call as a transaction, inside an event loop."""
        call = _call(request)
        try:
            result: Result = await self.transactions.arun(call, lambda: handler(request), is_error=_is_error)
            return result
        except (ToolCommitError, OutcomeUnknownError) as error:
            return _failed(call, error)


def _call(request: ToolCallRequest) -> ToolCall:
    call = request.tool_call
    return ToolCall(call["id"] or "", call["name"], call["args"])


def _is_error(result: Any) -> bool:
    each = result if isinstance(result, list) else [result]
    return any(getattr(one, "status", "success") == "error" for one in each)


def _failed(call: ToolCall, error: Exception) -> ToolMessage:
    return ToolMessage(str(error), name=call.name, tool_call_id=call.id, status="error")
