"""A turn whose conversation outgrows the model's context goes on: in a loop, on every wire, after a kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from conversation_kit import violations
from digging_kit import AGENT, ROUNDS, digging, loop_on

from treenail import Limits
from treenail.conversation import (
    CompactionSettings,
    ContextPressure,
    HistoryCompacted,
    ProviderUsage,
    get_inner_messages,
    inspect_replay,
    replay,
)
from treenail.log.sqlite import SqliteLog
from treenail.providers import ModelRequest, Provider
from treenail.providers.anthropic import Anthropic
from treenail.providers.openai import OpenAI
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import InProcessEventBus, Session
from treenail.testing.wire import Fault, Step, WireRequest, WireServer
from treenail.turns import ModelAdapter, StatusChanged, TurnState, contain


def ran(provider: Provider, settings: CompactionSettings, session: Session | None = None, **options):
    session = session or Session()
    result = anyio.run(loop_on(session, provider, settings, **options).run, "Dig for the key.")
    return result, session


def test_a_long_turn_is_compacted_before_its_context_is_full() -> None:
    """Every input fits, the request is never lost, and the log says when the cache was broken."""
    seen: list[ModelRequest] = []
    told: list[ContextPressure] = []
    bus = InProcessEventBus()
    bus.subscribe(ContextPressure, told.append)
    settings = CompactionSettings(window_tokens=8_000)
    result, session = ran(ScriptedProvider(digging(seen=seen)), settings, Session(bus=bus))
    assert (result.state, result.text) == (TurnState.COMPLETED, "Deep enough.")
    done = session[HistoryCompacted].all()
    assert len(done) >= 2
    assert {(each.trigger, each.strategy) for each in done} == {("pressure", "deterministic")}
    for request in seen:
        assert violations(request.items) == []
        assert sum(len(each.text) for each in request.items) / 3 < 8_000
        assert any("Dig for the key." in each.text for each in request.items)
    usages = session[ProviderUsage].all()
    assert sum(not each.extends_previous for each in usages) == len(done)
    assert {each.context_tier for each in usages} >= {"none", "advisory"}
    assert [each.tier for each in told][:4] == ["advisory", "warning", "critical", "none"]
    assert done[-1].tool_calls == (("dig", done[-1].source_event_count // 2),)


@pytest.mark.parametrize(
    ("settings", "refuse_above"),
    [(CompactionSettings(window_tokens=8_000), None), (CompactionSettings(), 45)],
)
def test_an_adapter_compacts_as_it_is_told_and_shows_it(
    settings: CompactionSettings, refuse_above: int | None
) -> None:
    """Before a call that would not fit, and after one that did not: whoever watches sees each compaction."""
    shown: list[object] = []
    provider = ScriptedProvider(digging(refuse_above=refuse_above))
    adapter = ModelAdapter(provider, compaction=settings, watch=shown.append)
    session = Session()
    assert adapter.evaluate(AGENT.prompt, session=session, request="Dig.").text == "Deep enough."
    statuses = [each.status for each in shown if isinstance(each, StatusChanged)]
    assert statuses.count("compacting") == len(session[HistoryCompacted].all()) > 0


def test_a_refused_input_is_compacted_and_sent_again() -> None:
    """Without knowing the size of the context: the provider says when it is too long."""
    seen: list[ModelRequest] = []
    provider = ScriptedProvider(digging(seen=seen, refuse_above=45))
    result, session = ran(provider, CompactionSettings())
    assert (result.state, result.text) == (TurnState.COMPLETED, "Deep enough.")
    done = session[HistoryCompacted].all()
    assert done
    assert {each.trigger for each in done} == {"overflow"}
    assert all(violations(request.items) == [] for request in seen)


def test_a_refusal_inside_the_containment_is_recovered_from_as_well() -> None:
    session = Session()
    with contain(session, Limits(max_steps=500)) as containment:
        provider = ScriptedProvider(digging(rounds=40, refuse_above=45))
        result, _ = ran(provider, CompactionSettings(), session, containment=containment)
    assert result.state is TurnState.COMPLETED, result.details
    assert session[HistoryCompacted].all()


def test_an_input_that_nothing_makes_short_enough_ends_the_turn_as_too_long() -> None:
    provider = ScriptedProvider(digging(refuse_above=3))
    result, session = ran(provider, CompactionSettings())
    assert result.state is TurnState.FAILED
    assert result.error_kind == "context_too_long"
    assert len(session[HistoryCompacted].all()) <= 4


def test_a_switched_off_compaction_leaves_the_refusal_as_it_is() -> None:
    provider = ScriptedProvider(digging(refuse_above=45))
    result, session = ran(provider, CompactionSettings(enabled=False))
    assert result.error_kind == "context_too_long"
    assert session[HistoryCompacted].all() == ()


def test_the_model_of_the_turn_writes_the_summary_and_its_use_is_counted() -> None:
    settings = CompactionSettings(window_tokens=8_000, model_written=True)
    seen: list[ModelRequest] = []
    result, session = ran(ScriptedProvider(digging(seen=seen)), settings)
    assert result.state is TurnState.COMPLETED
    done = session[HistoryCompacted].all()
    assert {each.strategy for each in done} == {"model"}
    assert any("THE KEY IS 42" in each.text for each in seen[-1].items)
    purposes = [each.purpose for each in session[ProviderUsage].all()]
    assert purposes.count("summary") == len(done)
    assert purposes.count("answer") == ROUNDS + 1


def test_a_turn_that_is_resumed_after_a_compaction_sends_the_same() -> None:
    """Another process folds the log to the input that the first one had sent."""
    seen: list[ModelRequest] = []
    script = digging(seen=seen)
    broken = [*script[:30], lambda request: Answer(error=ConnectionError("cut")), *script[31:]]
    settings = CompactionSettings(window_tokens=5_000)
    result, session = ran(ScriptedProvider(broken), settings)
    assert result.state is TurnState.FAILED
    assert session[HistoryCompacted].all()
    before = [each.canonical() for each in seen[-1].items]
    ended = anyio.run(loop_on(session, ScriptedProvider(script), settings).resume)
    assert ended.state is TurnState.COMPLETED
    resumed = [each.canonical() for each in seen[30].items]
    assert resumed[: len(before)] == before


# --- on the wire -------------------------------------------------------------------------------------


def on_the_wire(server: WireServer, api: str) -> Provider:
    if api == "anthropic.messages":
        return Anthropic("a-model", base_url=server.anthropic_url, api_key="k")
    kind = "chat" if api == "openai.chat" else "responses"
    return OpenAI("a-model", api=kind, base_url=server.openai_url, api_key="k")


@pytest.mark.parametrize("api", ["openai.chat", "openai.responses", "anthropic.messages"])
def test_every_wires_refusal_is_understood_and_recovered_from(api: str) -> None:
    """The server says in its own words that the input is too long, until it is not."""

    def script(request: WireRequest) -> Step:
        sent = request.body.get("messages") or request.body["input"]
        if len(json.dumps(sent)) > 25_000:
            return Fault("context_too_long")
        if rounds_of(json.dumps(sent)) >= 40:
            return Answer("Deep enough.")
        return Answer("", [("dig", {"depth": rounds_of(json.dumps(sent)) + 1})])

    with WireServer(script) as server:
        result, session = ran(on_the_wire(server, api), CompactionSettings())
        assert [each.violations for each in server.requests if each.violations] == []
    assert (result.state, result.text) == (TurnState.COMPLETED, "Deep enough."), result.details
    done = session[HistoryCompacted].all()
    assert done
    assert {each.trigger for each in done} == {"overflow"}
    assert inspect_replay(session).compactions == done


# --- killed ------------------------------------------------------------------------------------------

CHILD = Path(__file__).with_name("compacting_child.py")


@pytest.mark.parametrize(
    "when", ["while the summary is written", "before it is logged", "after it is logged"]
)
def test_a_turn_killed_in_the_middle_of_a_compaction_is_resumed(tmp_path: Path, when: str) -> None:
    """Nothing is lost but, at most, a summary; no tool runs twice; the compaction is made, or made again."""
    command = [sys.executable, "-W", "error", str(CHILD), str(tmp_path), when]
    killed = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with SqliteLog(tmp_path / "runs.db") as log:
        session = Session.open(log, log.sessions()[0].session_id)
        known = len(session[HistoryCompacted].all())
        assert known == (when == "after it is logged")
        before = replay(session)
        assert violations(before.items) == []
        seen: list[ModelRequest] = []
        settings = CompactionSettings(window_tokens=5_000, model_written=True)
        ended = anyio.run(loop_on(session, ScriptedProvider(digging(seen=seen)), settings).resume)
        assert (ended.state, ended.text) == (TurnState.COMPLETED, "Deep enough."), ended.details
        assert len(session[HistoryCompacted].all()) > known
        results = [each for each in get_inner_messages(session) if each.role == "tool"]
        assert [int(each.content.split(" ")[1]) for each in results] == list(range(ROUNDS))
        assert all(violations(request.items) == [] for request in seen)
        if known:
            assert seen[0].items[: len(before.items)] == before.items
        session.close()


def rounds_of(text: str) -> int:
    """Read off a request how deep the newest hole is."""
    return max((int(piece.split(" ")[0]) for piece in text.split("earth ")[1:]), default=0)
