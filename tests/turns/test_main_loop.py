"""A loop over requests of one type."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from treenail import Session
from treenail.conversation import InnerMessage
from treenail.errors import ModelCallError
from treenail.log.sqlite import SqliteLog
from treenail.loop import MainLoop
from treenail.prompt import MarkdownSection, Prompt, PromptResponse
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.turns import ModelAdapter, TurnState, turn_state


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


def test_inside_an_event_loop_it_is_the_same() -> None:
    """Serving, resuming, and serving what never began, each awaited."""

    async def main() -> tuple[Reply | None, ...]:
        session = Session()
        failing = Answering(ScriptedProvider([Answer(error=ModelCallError("down"))]))
        with pytest.raises(ModelCallError):
            await failing.aexecute(Question("6 x 7?"), session=session)
        loop = Answering(ScriptedProvider(['{"answer": "42"}']))
        resumed = await loop.aresume(Question("6 x 7?"), session)
        begun = await loop.aresume(Question("6 x 7?"), Session())
        executed = await loop.aexecute(Question("6 x 7?"))
        assert len(loop.finals) == 3
        return resumed.output, begun.output, executed.output

    assert anyio.run(main) == (Reply("42"),) * 3


def test_an_answer_may_be_looked_at_by_another_loop_before_it_is_returned() -> None:
    """Whatever makes prompts and looks at answers may itself evaluate: it is not called in an event loop."""

    class Doubting(Answering):
        def finalize(self, prompt, session, response):
            return Answering(ScriptedProvider(['{"answer": "43"}'])).execute(Question("sure?"))

    assert Doubting(ScriptedProvider(['{"answer": "42"}'])).execute(Question("6 x 7?")).output == Reply("43")
