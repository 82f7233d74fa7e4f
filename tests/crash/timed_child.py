"""The process that the time tests kill while its tool works; each life tells what it was charged before."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from treenail import Agent, Limits, tool
from treenail.containment import ExecutionContext, JsonlJournal, current_call, read_journal
from treenail.log.sqlite import SqliteLog
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.turns import contain
from treenail.workflows import StepSpec, WorkflowSpec, resume_workflow, run_workflow

HERE = Path(sys.argv[2])
LIMITS = Limits(timeout=float(sys.argv[3]))
TICK_S = 0.02
FOREVER = ScriptedProvider([Answer(calls=[("work", {})])], repeat=True)


def tell(**facts: object) -> None:
    """Append a line for the test to read."""
    with (HERE / "told.jsonl").open("a") as file:
        file.write(json.dumps(facts) + "\n")


def toil() -> None:
    """Work until somebody stops it; say again and again for how long it has been at it in this life."""
    call, began = current_call(), time.monotonic()
    assert call is not None
    while not call.token.wait(TICK_S):
        tell(worked_s=time.monotonic() - began)
    call.token.raise_if_cancelled()


@tool(effects="none")
def work() -> str:
    """Work."""
    toil()
    return "stopped"


WORKER = Agent("worker", tools=[work])


def charged(session):  # type: ignore[no-untyped-def]
    """Contain a run, and tell how much of its time is used already."""
    run = contain(session, LIMITS)
    tell(charged_s=(LIMITS.timeout or 0) - (run.remaining_s or 0))
    return run


def as_run() -> None:
    """A run of an agent, resumed in each life."""
    store = HERE / "runs.db"
    if not store.exists():
        run = WORKER.run("Work", provider=FOREVER, limits=charged, store=store)
    else:
        with SqliteLog(store, heartbeat=False) as log:
            run_id = log.sessions()[0].session_id
        run = WORKER.resume(store, run_id, provider=FOREVER, limits=charged)
    tell(ended=run.state.value, kind=run.result.error_kind)
    run.close()


def as_contained() -> None:
    """Containment alone, with a journal in a file."""
    place = HERE / "spent.jsonl"
    with JsonlJournal(place) as journal:
        with ExecutionContext.resume(LIMITS, read_journal(place), journal=journal) as run:
            tell(charged_s=(LIMITS.timeout or 0) - (run.remaining_s or 0))
            outcome = run.call_tool(toil)
        tell(ended=outcome.node.status, kind=outcome.stop_reason)


def as_workflow() -> None:
    """A workflow whose only step never ends by itself."""
    store = HERE / "runs.db"
    step = StepSpec(id="a", task="Work", agent="worker", posture="read")
    spec = WorkflowSpec(id="toil", steps=(step,), timeout_s=LIMITS.timeout or 0)
    if not store.exists():
        result = run_workflow(spec, [WORKER], provider=FOREVER, store=store)
    else:
        with SqliteLog(store, heartbeat=False) as log:
            run_id = log.sessions()[0].session_id
        result = resume_workflow(store, run_id, [WORKER], provider=FOREVER)
    tell(ended=result.state.value, kind="", elapsed_s=result.elapsed_s)


{"run": as_run, "contained": as_contained, "workflow": as_workflow}[sys.argv[1]]()
