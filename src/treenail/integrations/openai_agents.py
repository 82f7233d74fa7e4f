"""OpenAI Agents: a decorator below `@function_tool` that makes a transaction of each call of a function.

    transactions = Transactions("project", store="runs.db", run="task-1")

    @function_tool
    @in_transaction(transactions)
    def write(path: str, text: str) -> str: ...

The SDK has no public hook around a tool, so it is the function that is wrapped. Tools that are not functions
of yours (agents as tools, MCP servers, hosted tools) are not transactions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, get_origin, get_type_hints

from agents import RunContextWrapper
from agents.tool_context import ToolContext

from treenail.integrations.transactions import Transactions, current_context
from treenail.tools import ToolCall

__all__ = ["Transactions", "current_context", "in_transaction"]

P = ParamSpec("P")
R = TypeVar("R")


def in_transaction(transactions: Transactions) -> Callable[[Callable[P, R]], Callable[..., R]]:
    """Return a decorator that makes a transaction of each call of a tool's function, sync or async.

    A call is undone if the function raises; what the SDK makes of the exception is its own affair. The same
    holds for what the SDK does with the value afterwards: an output guardrail finds a call that is kept.
    """

    def decorate(function: Callable[P, R]) -> Callable[..., R]:
        hints = get_type_hints(function, include_extras=True)
        signature = inspect.signature(function)
        takes_context = _takes_context(signature, hints)

        def call_of(context: ToolContext[Any], given: tuple[Any, ...], named: dict[str, Any]) -> ToolCall:
            arguments = signature.bind(*given, **named).arguments
            if takes_context:
                del arguments[next(iter(arguments))]
            return ToolCall(context.tool_call_id, context.tool_name, arguments)

        @functools.wraps(function)
        def run(context: ToolContext[Any], *given: Any, **named: Any) -> Any:
            given = (context, *given) if takes_context else given
            call = call_of(context, given, named)
            return transactions.run(call, lambda: function(*given, **named))

        @functools.wraps(function)
        async def arun(context: ToolContext[Any], *given: Any, **named: Any) -> Any:
            given = (context, *given) if takes_context else given
            call = call_of(context, given, named)
            made: Any = function
            return await transactions.arun(call, lambda: made(*given, **named))

        wrapper: Any = arun if inspect.iscoroutinefunction(function) else run
        if not takes_context:
            # The SDK hands its context, which has the call's id, to a function whose first parameter is one.
            first = inspect.Parameter("context_of_call", inspect.Parameter.POSITIONAL_ONLY)
            first = first.replace(annotation=ToolContext[Any])
            wrapper.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])
            hints = {first.name: first.annotation, **hints}
        wrapper.__annotations__ = hints
        return wrapper  # type: ignore[no-any-return]

    return decorate


def _takes_context(signature: inspect.Signature, hints: dict[str, Any]) -> bool:
    first = next(iter(signature.parameters), None)
    annotation = None if first is None else hints.get(first)
    return (get_origin(annotation) or annotation) in (RunContextWrapper, ToolContext)
