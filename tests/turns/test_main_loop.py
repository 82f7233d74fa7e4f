"""A loop over requests of one type."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast import Session
from holdfast.conversation import InnerMessage
from holdfast.errors import ModelCallError
from holdfast.log.sqlite import SqliteLog
from holdfast.loop import MainLoop
from holdfast.prompt import MarkdownSection, Prompt, PromptResponse
from holdfast.providers.scripted import Answer, ScriptedProvider
from holdfast.turns import ModelAdapter, TurnState, turn_state


@dataclass(frozen=True)
class Question:
    text: str


@dataclass(frozen=True)
class Reply:
    answer: str


class Answering(MainLoop[Question, Reply]):
    """Answers questions."""

    def __init__(self, provider: ScriptedProvider, store: Path | None = None) -> None:
        super().__init__(ModelAdapter(provider, retry=None))
        self.store = store
        self.finals: list[PromptResponse[Reply]] = []

    def create_prompt(self, request: Question) -> Prompt[Reply]:
        section = MarkdownSection[Question]("Question", template="Answer: $text")
        return Prompt[Reply](ns="t", key="answer", sections=[section]).bind(request)

    def create_session(self) -> Session:
        return Session() if self.store is None else Session(log=SqliteLog(self.store))

    def finalize(self, prompt, session, response):
        self.finals.append(response)
        return response


def test_a_request_becomes_a_prompt_and_its_answer_comes_back_typed() -> None:
    loop = Answering(ScriptedProvider(['{"answer": "42"}']))
    assert loop.execute(Question("6 x 7?")).output == Reply("42")
    assert len(loop.finals) == 1


def test_messages_are_recorded_without_being_asked_for(tmp_path: Path) -> None:
    loop = Answering(ScriptedProvider(['{"answer": "42"}']), tmp_path / "runs.db")
    session = loop.create_session()
    loop.execute(Question("6 x 7?"), session=session)
    assert [each.role for each in session[InnerMessage].all()] == ["system", "assistant"]
    assert "6 x 7?" in session[InnerMessage].all()[0].content


def test_what_was_cut_off_is_resumed_and_what_never_began_is_served(tmp_path: Path) -> None:
    session = Session(log=SqliteLog(tmp_path / "runs.db"))
    failing = Answering(ScriptedProvider([Answer(error=ModelCallError("down"))]))
    with pytest.raises(ModelCallError):
        failing.execute(Question("6 x 7?"), session=session)
    assert turn_state(session) is TurnState.FAILED
    loop = Answering(ScriptedProvider(['{"answer": "42"}']))
    assert loop.resume(Question("6 x 7?"), session).output == Reply("42")
    assert loop.resume(Question("6 x 7?"), Session()).output == Reply("42")
