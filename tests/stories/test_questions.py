"""A model asks a person: at a terminal, and where the answer comes later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.stories.terminal import Terminal, treenail

from treenail import Agent
from treenail.errors import UsageError
from treenail.log import MemoryLog
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.testing.wire import WireServer
from treenail.tools import Approval, Permissions, answer_hold, ask_person, pending_holds
from treenail.turns import TurnState

KEYS = {"OPENAI_API_KEY": "k"}
ASKED = Answer(
    "", [("ask_person", {"question": "Which \x1b]0;evil\x07database?", "options": ["SQLite", "Postgres"]})]
)


def flags(server: WireServer) -> tuple[str, ...]:
    return ("--model", "m", "--base-url", server.openai_url, "--unknown-price", "warn")


def sent(server: WireServer, number: int) -> dict:
    return server.requests[number].body


def names(body: dict) -> set[str]:
    return {each["function"]["name"] for each in body["tools"]}


@pytest.mark.parametrize(
    ("typed", "told"), [("2\r", "Postgres"), ("neither, use files\r", "neither, use files")]
)
def test_a_person_at_the_terminal_answers_at_once(tmp_path: Path, typed: str, told: str) -> None:
    """By the number of an option or in words; the question's escape sequences do not reach the terminal."""
    with WireServer([ASKED, Answer("Thanks.")], by_conversation=True) as server:
        with Terminal("run", "go", *flags(server), cwd=tmp_path, env=KEYS) as screen:
            screen.wait_for("your answer")
            # An escape sequence would be taken out of the text together with what it says.
            assert "2. Postgres" in screen.text and "evil" in screen.text
            screen.type(typed)
            assert screen.end() == 0, screen.text
        assert f"The person answers: {told}" in json.dumps(sent(server, 1)["messages"][-1])
        assert "You cannot ask questions" not in sent(server, 0)["messages"][0]["content"]


def test_the_answer_may_come_later(tmp_path: Path) -> None:
    """The run is held; `hold answer` and a resume give the model its answer, and the tools stay the same."""
    with WireServer([ASKED, Answer("Thanks.")], by_conversation=True) as server:
        ran = treenail("run", "go", "--ask", *flags(server), cwd=tmp_path, env=KEYS)
        assert ran.returncode == 4, ran.stderr
        assert "--answer TEXT" in ran.stderr
        assert "database?" in treenail("hold", "list", cwd=tmp_path).stdout
        refused = treenail("hold", "answer", "--yes", cwd=tmp_path)
        assert refused.returncode == 2 and "--answer TEXT" in refused.stderr
        assert treenail("hold", "answer", "--answer", "1", cwd=tmp_path).returncode == 0
        ran = treenail("resume", cwd=tmp_path, env=KEYS)
        assert ran.returncode == 0, ran.stderr
        assert "The person answers: SQLite" in json.dumps(sent(server, 1)["messages"][-1])
        assert names(sent(server, 0)) == names(sent(server, 1)) and "ask_person" in names(sent(server, 0))


def test_it_is_not_offered_where_nobody_would_answer(tmp_path: Path) -> None:
    """Without a terminal, unless the person says otherwise."""
    with WireServer(lambda request: Answer("Done.")) as server:
        for more in ((), ("--questions", "on")):
            assert treenail("run", "go", *more, *flags(server), cwd=tmp_path, env=KEYS).returncode == 0
        assert "ask_person" not in names(sent(server, 0)) and "ask_person" in names(sent(server, 1))
        assert "You cannot ask questions" in sent(server, 0)["messages"][0]["content"]


class TestInALibrary:
    agent = Agent("x", tools=[ask_person])
    asked = Answer("", [("ask_person", {"question": "Which?"})])

    def test_a_yes_without_words_is_not_an_answer(self) -> None:
        """An approver that allows everything does not answer questions: the run is held."""
        log, model = MemoryLog(), ScriptedProvider([self.asked, "Thanks."])
        run = self.agent.run(
            "go", provider=model, store=log, permissions=Permissions(approver=lambda r: True)
        )
        assert run.state is TurnState.HELD
        session = run.execution_state.session
        (held,) = pending_holds(session)
        with pytest.raises(UsageError, match="in words"):
            answer_hold(session, held.call_id, approved=True)
        answer_hold(session, held.call_id, approved=True, note="the red one")
        run.close()
        again = self.agent.resume(log, run.id, provider=model)
        assert again.state is TurnState.COMPLETED
        assert [each.content for each in again.messages if each.role == "tool"] == [
            "The person answers: the red one"
        ]

    def test_a_person_may_refuse_to_answer(self) -> None:
        model = ScriptedProvider([self.asked, "Fine."])
        says_no = Permissions(approver=lambda request: Approval(False, "not now"))
        run = self.agent.run("go", provider=model, permissions=says_no)
        assert run.state is TurnState.COMPLETED
        assert "did not answer the question. not now" in next(
            e.content for e in run.messages if e.role == "tool"
        )


def test_a_held_call_can_be_changed_or_allowed_for_good_later(tmp_path: Path) -> None:
    """`hold answer` says what the keys of a question say."""
    made = [Answer("", [("write_file", {"path": f"src/{name}", "content": "x"})]) for name in ("a", "b", "c")]
    with WireServer([*made, "Done."], by_conversation=True) as server:
        flags = ("--model", "m", "--base-url", server.openai_url, "--unknown-price", "warn", "--ask")
        assert treenail("run", "go", *flags, cwd=tmp_path, env=KEYS).returncode == 4
        wrong = treenail("hold", "answer", "--arguments", "[1]", cwd=tmp_path)
        assert wrong.returncode == 2 and "must be a JSON object" in wrong.stderr
        changed = json.dumps({"path": "src/changed", "content": "y"})
        assert treenail("hold", "answer", "--arguments", changed, cwd=tmp_path).returncode == 0
        assert treenail("resume", "@last", cwd=tmp_path, env=KEYS).returncode == 4
        said = treenail("hold", "answer", "--always", cwd=tmp_path)
        assert "from now on: write_file: src/**" in said.stdout, said.stderr
        assert treenail("resume", "@last", cwd=tmp_path, env=KEYS).returncode == 0
    assert sorted(each.name for each in (tmp_path / "src").iterdir()) == ["b", "c", "changed"]
    assert "write_file: src/**" in treenail("permissions", cwd=tmp_path).stdout
