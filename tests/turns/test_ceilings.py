"""A run's ceilings are in its log: they hold on over resumes, and whoever raised them can be asked for."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail import Agent, Limits, Run, TurnState, tool
from treenail.containment import ExecutionConfig
from treenail.log import MemoryLog
from treenail.log.sqlite import SqliteLog
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import Session
from treenail.turns import CeilingsSet, ceilings_of, contain, newly_set


@tool(effects="none")
def think() -> str:
    """Think."""
    return "hm"


AGENT = Agent("thinker", tools=(think,))


def endless() -> ScriptedProvider:
    return ScriptedProvider([Answer("", [("think", {})], cost_usd=0.2)], repeat=True)


def spent(run: Run) -> float:
    """What the run has cost by now, as its log tells it."""
    session = run.execution_state.session
    return contain(session, Limits()).get_snapshot().cost_usd_accumulated


@pytest.fixture
def stopped(tmp_path: Path) -> tuple[Path, UUID]:
    """A run that its ceiling of half a dollar has stopped."""
    store = tmp_path / "runs.db"
    with AGENT.run("go", provider=endless(), store=store, limits=Limits(max_cost_usd=0.5)) as run:
        assert (run.state, run.result.error_kind) == (TurnState.FAILED, "budget_exceeded")
        return store, run.id


def resumed(stopped: tuple[Path, UUID], limits: Limits | None = None) -> Run:
    return AGENT.resume(*stopped, provider=endless(), limits=limits)


def test_a_resume_without_a_word_about_ceilings_is_held_to_those_of_the_run(
    stopped: tuple[Path, UUID],
) -> None:
    """Nobody gets around a ceiling by leaving it out."""
    with resumed(stopped) as run:
        assert (run.state, run.result.error_kind) == (TurnState.FAILED, "budget_exceeded")
        assert spent(run) <= 0.6
    with AGENT.run("and now?", provider=endless(), store=stopped[0], run_id=stopped[1]) as run:
        assert run.result.error_kind == "budget_exceeded"
        assert spent(run) <= 0.6


def test_a_raised_ceiling_is_that_of_the_next_resume(stopped: tuple[Path, UUID]) -> None:
    """It is neither forgotten nor given again: what was spent under it stays spent."""
    with resumed(stopped, Limits(max_cost_usd=1.1)) as run:
        assert spent(run) == pytest.approx(1.0)
    with resumed(stopped) as run:
        assert run.result.error_kind == "budget_exceeded"
        assert spent(run) == pytest.approx(1.0)
        assert ceilings_of(run.execution_state.session) == Limits(max_cost_usd=1.1)


def test_who_raised_a_ceiling_and_when_is_in_the_log(
    stopped: tuple[Path, UUID], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "mallory")
    began = datetime.now(UTC)
    resumed(stopped, Limits(max_cost_usd=0.7)).close()
    with SqliteLog(stopped[0]) as log, Session.open(log, stopped[1], read_only=True) as session:
        told = [(envelope.at, each) for envelope, each in session.events() if isinstance(each, CeilingsSet)]
    assert [each.limits.max_cost_usd for _, each in told] == [0.5, 0.7]
    at, newest = told[-1]
    assert newest.by.startswith("mallory@")
    assert began <= at <= datetime.now(UTC)


def test_ceilings_that_stay_as_they_are_leave_nothing_in_the_log(stopped: tuple[Path, UUID]) -> None:
    for limits in (None, Limits(max_cost_usd=0.5)):
        with resumed(stopped, limits) as run:
            assert len(run.execution_state.session[CeilingsSet].all()) == 1


def test_ceilings_can_be_lifted_on_purpose(stopped: tuple[Path, UUID]) -> None:
    done = ScriptedProvider([Answer("done", cost_usd=9.0)], repeat=True)
    with AGENT.resume(*stopped, provider=done, limits=Limits()) as run:
        assert run.state is TurnState.COMPLETED


def test_a_run_that_never_had_ceilings_gets_none_from_nowhere(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    with AGENT.run("go", provider=ScriptedProvider(["done"]), store=store) as run:
        assert ceilings_of(run.execution_state.session) is None


def test_ceilings_outlive_the_events_that_are_pruned(stopped: tuple[Path, UUID]) -> None:
    with SqliteLog(stopped[0]) as log, Session.open(log, stopped[1]) as session:
        assert session.prune(keep_last=0) > 0
    with AGENT.run("and now?", provider=endless(), store=stopped[0], run_id=stopped[1]) as run:
        assert run.result.error_kind == "budget_exceeded"


def test_a_resume_that_has_nothing_to_do_sets_no_ceilings(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    with AGENT.run("go", provider=ScriptedProvider(["done"]), store=store, limits=Limits(max_steps=5)) as run:
        run_id = run.id
    with AGENT.resume(store, run_id, provider=ScriptedProvider([]), limits=Limits(max_steps=50)) as run:
        assert run.state is TurnState.COMPLETED
        assert ceilings_of(run.execution_state.session) == Limits(max_steps=5)


@given(
    st.builds(
        Limits,
        max_cost_usd=st.none() | st.floats(1e-6, 1e6),
        max_steps=st.none() | st.integers(1, 10**9),
        max_retries=st.none() | st.integers(1, 10**9),
        timeout=st.none() | st.integers(1, 10**9).map(lambda ms: ms / 1000),
        on_unknown_price=st.sampled_from(["halt", "warn", "estimate"]),
        max_depth=st.none() | st.integers(0, 50),
    )
)
def test_ceilings_come_back_from_the_log_as_they_were_set(limits: Limits) -> None:
    """To the millisecond and to the last bit of a dollar, so that setting them again changes nothing."""
    log = MemoryLog()
    with Session(log=log) as session:
        with contain(session, limits) as chain:
            session.dispatch_all(newly_set(session, chain))
            assert newly_set(session, chain) == ()
        with contain(session, limits.to_config()) as again:
            assert newly_set(session, again) == ()
    with Session.open(log, session.session_id, read_only=True) as reader:
        found = ceilings_of(reader)
    assert found == limits
    assert isinstance(found.to_config(), ExecutionConfig)
    assert found.to_config() == limits.to_config()


def test_a_childs_ceilings_are_not_the_sessions() -> None:
    session = Session()
    with contain(session, Limits(max_steps=9)) as chain:
        child = chain.spawn_child(Limits(max_steps=2))
        assert newly_set(session, child) == ()
        assert newly_set(session, None) == ()
