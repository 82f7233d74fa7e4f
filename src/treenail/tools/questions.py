"""A tool by which a model asks a person. Each call is a hold: it waits until somebody has answered.

A person at a terminal is asked at once, through the same approver as for permissions. Otherwise the run stops
as `held`, and `treenail hold answer --answer TEXT` and a resume give the model its answer, in this process or
another. Offer it only where somebody answers: a run without anybody would wait for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treenail.tools.context import ToolContext
from treenail.tools.policies import answer_of, hold_of
from treenail.tools.tool import ReadyTool, Tool, ToolExample, ToolResult, described

ASK_PERSON = "ask_person"
"""The name of the tool."""


@dataclass(frozen=True, slots=True)
class AskPerson:
    """What `ask_person` takes."""

    question: str = described("What you want to know, with what the person needs to decide it.")
    options: tuple[str, ...] = described(
        "Answers to choose from, if there are a few; the person may still answer in their own words.",
        default=(),
    )


def _ask_person(params: AskPerson, *, context: ToolContext) -> ToolResult[str]:
    held = hold_of(context.session, context.call_id)
    answer = None if held is None else answer_of(context.session, held)
    if answer is None:
        return ToolResult.error("Nobody has answered. Decide for yourself, and say so at the end.")
    return ToolResult.ok(message=f"The person answers: {chosen(answer.note, params.options)}")


def chosen(answer: str, options: Sequence[str]) -> str:
    """Return an answer in words: the number of an option stands for the option."""
    number = int(answer) if answer.isdecimal() and len(answer) < 4 else 0
    return options[number - 1] if 0 < number <= len(options) else answer


ask_person: Tool[AskPerson, str] = ReadyTool[AskPerson, str](
    name=ASK_PERSON,
    description=(
        "Ask the person a question, and wait for the answer. Ask only what you cannot find out yourself, and "
        "where a wrong guess would cost them much: otherwise take the most likely meaning, and say so."
    ),
    handler=_ask_person,
    effects="none",
    is_question=True,
    examples=(
        ToolExample(
            "Ask which of two",
            AskPerson("The tests need a database. Which one?", ("SQLite", "Postgres")),
            "The person answers: SQLite",
        ),
    ),
)
"""Asks a person a question."""
