"""The path of one tool call of a turn: an ordered list of steps, each around the next.

    show         tell the screen that the call begins, and how it ended
    contain      let the containment allow the call, or end the turn
    trace        put the call into a span
    expand       note the sections that the call wants opened, which is not a failure
    seat         wait until a vendor's own loop has come to the call, and tell it the result
    transact     begin; commit, or roll back (`treenail.tools.runner`)
    run_handler  call the tool's function (`treenail.tools.handlers`)

A step does its part, awaits the next one, and returns the result. A call goes down the list once and comes
back up once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

from treenail import telemetry
from treenail.containment import CancellationToken, ExecutionContext, WrapOptions
from treenail.conversation import InnerMessage
from treenail.errors import CancelledByToken, HoldRequired, VisibilityExpansionRequired
from treenail.tools import Body, ToolCall, ToolResult, run_handler
from treenail.turns.frame import TurnFrame, refused
from treenail.turns.results import ResultRest, cut
from treenail.turns.traces import tool_span


@dataclass(slots=True)
class TurnCall:
    """One tool call on its way down the steps and back."""

    request: ToolCall
    frame: TurnFrame
    place: int
    """The place in the conversation that is reserved for its result."""
    is_resume: bool = False
    message: InnerMessage | None = None
    """The message that tells the model the result, once it is recorded."""
    expansion: VisibilityExpansionRequired | None = None
    """The sections that the call wants opened."""
    rest: ResultRest | None = None
    """What the message does not show of a long result."""

    def record(self, result: ToolResult[Any]) -> tuple[object, ...]:
        """Make the message for the append that ends the call. If the commit fails it is made again."""
        text, self.rest = cut(self.request, result.render())
        self.message = self.frame.record.result(self.request, result, text, self.place)
        return (self.message,) if self.rest is None else (self.message, self.rest)

    def shown(self, result: ToolResult[Any]) -> ToolResult[Any]:
        """Return the result as the model is shown it: a long one is cut."""
        if self.rest is None or self.message is None:
            return result
        return ToolResult(self.message.content, success=result.success)


Next = Callable[[TurnCall], Awaitable[ToolResult[Any]]]
"""The rest of the path."""


async def show(proceed: Next, call: TurnCall) -> ToolResult[Any]:
    """Show the call as it begins and ends, also if it is refused, held or cut off."""
    display, clock = call.frame.display, call.frame.state.clock
    if display.watch is None:
        return await proceed(call)
    display.call_began(call.request)
    began = clock.monotonic()
    result: ToolResult[Any] | None = None
    outcome = "interrupted"
    try:
        result = await proceed(call)
        return result
    except HoldRequired:
        outcome = "held"
        raise
    finally:
        display.call_ended(call.request, result, clock.monotonic() - began, outcome, call.frame.state)


async def contain(proceed: Next, call: TurnCall) -> ToolResult[Any]:
    """Ask the containment. If it refuses or stops the call, the turn is halted."""
    containment = call.frame.containment
    if containment is None:
        return await proceed(call)
    return await contained(call.request, partial(proceed, call), containment, call.frame.cancellation)


async def contained(
    request: ToolCall,
    proceed: Callable[[], Awaitable[ToolResult[Any]]],
    containment: ExecutionContext,
    cancellation: CancellationToken,
) -> ToolResult[Any]:
    """Make a tool call if the containment lets it. Raises `CallRefused` if it refuses or stops the call."""
    options = WrapOptions(
        operation_name=request.name, fingerprint=request.arguments_json, cost_of=lambda result: 0.0
    )
    outcome = await containment.acall_tool(proceed, options)
    if outcome.value is not None:
        return outcome.value
    error = outcome.error
    stopped_by_chain = isinstance(error, CancelledByToken) and not cancellation.is_cancelled
    if error is None or stopped_by_chain:
        raise refused(outcome, containment)
    raise error


async def trace(proceed: Next, call: TurnCall) -> ToolResult[Any]:
    """Put the call, its commit or rollback included, into a span."""
    if not telemetry.is_on():
        return await proceed(call)
    with tool_span(call.request, call.frame.state.clock) as traced:
        result = await proceed(call)
        traced.ended(success=result.success)
    return result


async def expand(proceed: Next, call: TurnCall) -> ToolResult[Any]:
    """Note the sections that the call wants opened: the turn opens them when its calls have ended."""
    try:
        result = await proceed(call)
    except VisibilityExpansionRequired as required:
        call.expansion = required
        return ToolResult.ok(message=str(required))
    return result


async def seat(proceed: Next, call: TurnCall) -> ToolResult[Any]:
    """Keep step with a vendor's own loop, if there is one."""
    vendor = call.frame.seat.vendor
    if vendor is not None:
        await call.frame.seat.wait_until_asked(call.request, call.frame.runner.tool_registry)
    result = await proceed(call)
    if vendor is not None:
        await vendor.deliver(call.request, call.shown(result))
    return result


async def transact(proceed: Body, call: TurnCall) -> ToolResult[Any]:
    """Begin the call, run the handler, and commit the outcome or roll everything back."""
    frame = call.frame
    context = replace(frame.context, is_resume=True) if call.is_resume else frame.context
    return await frame.runner.transaction(call.request, proceed, context=context, record=call.record)


STEPS: tuple[Callable[[Any, TurnCall], Awaitable[ToolResult[Any]]], ...] = (
    show,
    contain,
    trace,
    expand,
    seat,
    transact,
)

run_call: Next = reduce(lambda proceed, step: partial(step, proceed), reversed(STEPS), run_handler)  # type: ignore[assignment]  # the handler, at the end, takes the open call
"""Run one call: through all steps to the handler, and back."""
