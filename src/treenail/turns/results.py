"""Long results: what the model is shown of them, and how it reads on.

A result is cut for the model after `MAX_SHOWN_CHARS` characters. The rest is an event beside the message, in
the same append, so that the whole is in the log. As soon as a session has such a rest, `read_result` is among
the tools that the model is offered.
"""

from __future__ import annotations

from dataclasses import dataclass

from treenail.log import SlicePolicy
from treenail.prompt import READ_RESULT
from treenail.state import event
from treenail.tools import ReadyTool, Tool, ToolCall, ToolContext, ToolResult, described

MAX_SHOWN_CHARS = 50_000
"""How much of a tool's result a model is shown at once."""

MAX_KEPT_CHARS = 10_000_000
"""How much of a tool's result is kept."""

_PAGE_CHARS = MAX_SHOWN_CHARS - 1_000
"""How much `read_result` shows at once: its own answer is never cut."""


@event(name="treenail.ResultRest", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class ResultRest:
    """The rest of a tool's result, of which the message shows the beginning."""

    call_id: str
    start: int
    """How many characters the message shows."""
    text: str


def cut(call: ToolCall, text: str) -> tuple[str, ResultRest | None]:
    """Return what the model is shown of a result, and the rest; None if it is shown whole."""
    if len(text) <= MAX_SHOWN_CHARS:
        return text, None
    shown = f"{text[:MAX_SHOWN_CHARS]}\n{_note(call.id, MAX_SHOWN_CHARS, len(text))}"
    return shown, ResultRest(call.id, MAX_SHOWN_CHARS, text[MAX_SHOWN_CHARS:MAX_KEPT_CHARS])


def _note(call_id: str, start: int, total: int) -> str:
    lost = "" if total <= MAX_KEPT_CHARS else f", of which the first {MAX_KEPT_CHARS:,} are kept"
    return (
        f"[cut: the result has {total:,} characters{lost}; read on with "
        f"{READ_RESULT}(call_id={call_id!r}, start={start})]"
    )


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What `read_result` takes."""

    call_id: str = described("The id of the call whose result was cut, as the result says it.")
    start: int = described("The character to read on at, as the result says it.")


def _read_result(params: ReadResult, *, context: ToolContext) -> ToolResult[str]:
    rests = [each for each in context.session[ResultRest].all() if each.call_id == params.call_id]
    if not rests:
        return ToolResult.error(f"No result of a call {params.call_id!r} was cut; use the id that it says.")
    rest = rests[-1]
    total = rest.start + len(rest.text)
    if not rest.start <= params.start < total:
        return ToolResult.error(
            f"start must be at least {rest.start} and less than {total:,}, where the result ends."
        )
    end = min(params.start + _PAGE_CHARS, total)
    text = rest.text[params.start - rest.start : end - rest.start]
    return ToolResult.ok(message=text if end == total else f"{text}\n{_note(params.call_id, end, total)}")


read_result: Tool[ReadResult, str] = ReadyTool(
    name=READ_RESULT,
    description="Read on in a long result of a tool that was cut. The result says with which arguments.",
    handler=_read_result,
    effects="none",
)
"""Reads on in a result that was cut."""
