"""What the log keeps of prompts: history, serialisable, and not for the model."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from prompt_kit import Review, Task
from pydantic import BaseModel

from treenail.log import Channel, MemoryLog, SlicePolicy
from treenail.prompt import (
    MarkdownSection,
    Prompt,
    PromptExecuted,
    PromptRendered,
    PromptResponse,
    PromptTemplate,
)
from treenail.state import RunContext, Session, TokenUsage, spec_of

NOW = datetime(2026, 11, 5, 12, tzinfo=UTC)


class Verdict(BaseModel):
    fine: bool


def rendered_event(session: Session) -> PromptRendered:
    template = PromptTemplate[Review](
        ns="tests", key="case", sections=[MarkdownSection[Task]("Do", "$path"), MarkdownSection("B", "$x")]
    )
    prompt = Prompt(template).bind(Task("a.py")).with_variables(x={1, 2})
    return PromptRendered.of(
        prompt,
        prompt.render(session),
        adapter="scripted",
        session_id=session.session_id,
        created_at=NOW,
        run_context=RunContext(session_id=session.session_id),
    )


@pytest.mark.parametrize("kind", [PromptRendered, PromptExecuted])
def test_they_are_history_and_never_replayed(kind: type) -> None:
    assert spec_of(kind).policy is SlicePolicy.LOG
    assert spec_of(kind).channel is Channel.AUDIT


def test_a_rendering_survives_the_log() -> None:
    log = MemoryLog()
    session = Session(log=log)
    event = rendered_event(session)
    session.dispatch(event).raise_if_errors()
    session.close()
    (found,) = Session.open(log, session.session_id)[PromptRendered].all()
    assert found == event
    assert found.rendered_prompt.startswith("## 1. Do (do)\n\na.py")
    assert found.render_inputs == {
        "params": {"Task": {"path": "a.py", "times": 2}},
        "variables": {"x": [1, 2]},
    }
    assert found.descriptor is not None
    assert (found.prompt_ns, found.prompt_key, found.prompt_name) == ("tests", "case", "case")


@pytest.mark.parametrize(
    ("output", "data"),
    [
        (Review(1, ["a"]), {"score": 1, "notes": ["a"]}),
        ([Review(1), Review(2)], [{"score": 1, "notes": []}, {"score": 2, "notes": []}]),
        (Verdict(fine=True), {"fine": True}),
        ("text", "text"),
        (None, None),
        (object, "<class 'object'>"),
    ],
)
def test_an_evaluation_survives_the_log_with_its_output_as_data(output: Any, data: Any) -> None:
    """Whatever the output is, and whether its type is known when the log is read."""
    log = MemoryLog()
    session = Session(log=log)
    response = PromptResponse("case", "said", output)
    event = PromptExecuted.of(
        response,
        adapter="scripted",
        session_id=session.session_id,
        created_at=NOW,
        usage=TokenUsage(input_tokens=1, output_tokens=2),
    )
    session.dispatch(event).raise_if_errors()
    session.close()
    (found,) = Session.open(log, session.session_id)[PromptExecuted].all()
    assert found == event
    assert found.result == PromptResponse("case", "said", data)
    assert response.output is output


@pytest.mark.parametrize(
    ("output", "records"),
    [
        (Review(1), (Review(1),)),
        ([Review(1), Review(2)], (Review(1), Review(2))),
        (Verdict(fine=False), (Verdict(fine=False),)),
        ("text", ()),
        (None, ()),
        ([], ()),
    ],
)
def test_records_of_an_output_go_to_their_slices(output: Any, records: tuple[object, ...]) -> None:
    assert PromptResponse("case", "said", output).typed_outputs() == records


def test_a_rollback_keeps_them() -> None:
    session = Session()
    snapshot = session.snapshot()
    session.dispatch(rendered_event(session))
    session.rollback(snapshot)
    assert len(session[PromptRendered].all()) == 1
