"""The commands that run workflows: run, status, resume."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

from rich.console import Console

from treenail.agent import Agent
from treenail.containment import Limits
from treenail.presenters.cli import agents, settings, stored
from treenail.presenters.cli.running import Desk
from treenail.state.session import Session
from treenail.tools.policies import PermissionMode, Permissions
from treenail.workflows import (
    StepState,
    WorkflowEvent,
    WorkflowResult,
    WorkflowSpec,
    WorkflowState,
    answer_step,
    dry_run,
    load_spec,
    record_of,
    rerun_steps,
    resume_workflow,
    run_workflow,
    workflow_result,
)

EXIT_CODES = {
    WorkflowState.COMPLETED: 0,
    WorkflowState.FAILED: 1,
    WorkflowState.PARTIAL: 3,
    WorkflowState.HELD: 4,
    WorkflowState.TIMED_OUT: 5,
    WorkflowState.INTERRUPTED: 130,
    WorkflowState.RUNNING: 130,
}
"""How a command about a workflow exits: 0 for full completion and for nothing else."""

FAILED = "failed"
"""What `--rerun` takes for every step that failed, ran out of time or is partial."""


def run(
    flags: Mapping[str, object | None], file: Path, *, directory: Path | None, is_dry: bool, as_json: bool
) -> int:
    """Run a workflow from a file, or say how it would go."""
    spec = load_spec(file)
    if is_dry:
        return _show_plan(spec, as_json=as_json)
    desk = Desk(flags, directory=directory, as_json=as_json)
    screen = _Screen(as_json=as_json)
    try:
        result = run_workflow(
            spec,
            _agents(spec, desk),
            provider=desk.provider,
            workspace=desk.directory,
            store=desk.store,
            ceiling=_ceiling(spec, desk),
            permissions=_permissions(desk),
            watch=screen.show,
            tags=desk.tags(),
        )
    except KeyboardInterrupt:
        result = _read(desk.store, stored.find(desk.store, stored.LAST))
    return screen.end(result)


def resume(
    flags: Mapping[str, object | None],
    said: str,
    *,
    rerun: Sequence[str],
    ready: Sequence[str],
    failed: Sequence[str],
    note: str,
    with_changes: bool | None,
    as_json: bool,
) -> int:
    """Go on with a workflow, after a person's word about its steps."""
    desk = Desk(flags, run=said, as_json=as_json)
    assert desk.run_id is not None
    screen = _Screen(as_json=as_json)

    def before(session: Session) -> None:
        for each in ready:
            answer_step(session, each, ready=True, note=note, apply=with_changes)
        for each in failed:
            answer_step(session, each, ready=False, note=note)
        known = {each.id for each in record_of(session).spec.steps}
        for each in rerun:
            rerun_steps(session, None if each == FAILED and each not in known else [each])

    with stored.reading(desk.store, desk.run_id) as session:
        spec = record_of(session).spec
    try:
        result = resume_workflow(
            desk.store,
            desk.run_id,
            _agents(spec, desk),
            provider=desk.provider,
            ceiling=_ceiling(spec, desk),
            permissions=_permissions(desk),
            watch=screen.show,
            before=before,
        )
    except KeyboardInterrupt:
        result = _read(desk.store, desk.run_id)
    return screen.end(result)


def status(store: Path, run_id: UUID, *, as_json: bool) -> int:
    """Say how a workflow and each of its steps stand."""
    result = _read(store, run_id)
    if as_json:
        print(json.dumps(result.to_data(), ensure_ascii=False, indent=2))
        return EXIT_CODES[result.state]
    print(f"{result.name} is {result.state.value}{f' ({result.reason})' if result.reason else ''}")
    for wave in result.waves:
        for each in wave:
            _print_step(result, each)
    for action in result.next_actions:
        print(f"  {action}")
    return EXIT_CODES[result.state]


def _print_step(result: WorkflowResult, step_id: str) -> None:
    view = result.step(step_id)
    why = f" ({view.reason})" if view.reason else ""
    tried = f", try {view.attempt}" if view.attempt > 1 else ""
    print(f"  {step_id:<20} {view.state.value}{why}{tried}")
    checkpoint = view.checkpoint
    if checkpoint is None:
        return
    for line in (
        checkpoint.summary.strip(),
        *(f"limitation: {each}" for each in checkpoint.known_limitations),
    ):
        if line:
            print(f"    {line[:400]}")
    for artifact in checkpoint.artifacts:
        print(f"    {artifact.path} ({artifact.size} bytes, sha256 {artifact.sha256[:12]})")


def _read(store: Path, run_id: UUID) -> WorkflowResult:
    with stored.reading(store, run_id) as session:
        return workflow_result(session)


def _show_plan(spec: WorkflowSpec, *, as_json: bool) -> int:
    plan = dry_run(spec)
    if as_json:
        print(json.dumps({"workflow_id": spec.id, **plan.to_data()}, ensure_ascii=False, indent=2))
        return 0
    for number, wave in enumerate(plan.waves, start=1):
        shown = [f"{each} ({spec.step(each).agent}, {spec.step(each).posture})" for each in wave]
        print(f"wave {number}: {', '.join(shown)}")
    for one, other, why in plan.conflicts:
        print(f"never together: {one} and {other}, because {why}")
    return 0


def _agents(spec: WorkflowSpec, desk: Desk) -> list[Agent]:
    """Return the agents that steps may name: those of the file, and the command line's own.

    That one is known by its own name and as `agent`, which is what a step has that names none.
    """
    made = {"agent": replace(desk.agent, name="agent"), desk.agent.name: desk.agent}
    for each in spec.agents:
        said: dict[str, Any] = {"name": each.name, "instructions": each.instructions}
        if each.tools is not None:
            said["tools"] = list(each.tools)
        if each.max_iterations is not None:
            said["max_iterations"] = each.max_iterations
        made[each.name] = agents.agent_of(said, f"the agent {each.name!r} of the workflow {spec.id!r}")
    return list(made.values())


def _ceiling(spec: WorkflowSpec, desk: Desk) -> Limits:
    """Return what all steps together may use up.

    A default that is meant for one turn of one agent is none for a workflow, which says what it needs
    itself; only money is always bounded.
    """
    limits, chosen = desk.limits(), desk.settings.chosen
    cost = limits.max_cost_usd

    def is_default(name: str) -> bool:
        return chosen[name].source == settings.DEFAULT

    return replace(
        limits,
        max_steps=None if is_default("max_steps") else limits.max_steps,
        max_retries=None if is_default("max_retries") else limits.max_retries,
        timeout=None if is_default("timeout") else limits.timeout,
        max_cost_usd=(spec.max_cost_usd or cost) if is_default("max_cost") else cost,
    )


def _permissions(desk: Desk) -> Permissions:
    """Nobody is asked on the terminal: several steps work at once, so that a call waits durably."""
    return Permissions(PermissionMode(str(desk.settings["permissions"])))


class _Screen:
    """Shows the events of a workflow: lines for people on the error stream, JSON for machines."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._console = Console(stderr=True)

    def show(self, event: WorkflowEvent) -> None:
        """Show one event."""
        if self._as_json:
            data: dict[str, Any] = {"event": event.kind, "at": event.created_at.isoformat()}
            for name in ("step_id", "attempt", "subagent_id", "reason", "status"):
                if getattr(event, name):
                    data[name] = getattr(event, name)
            self._write(data)
            return
        if event.kind == "step_scheduled":
            self._line(f"● {event.step_id}{f' ({event.reason})' if event.reason else ''}", "cyan")
        elif event.kind == "checkpoint_decided" and event.checkpoint is not None:
            good = event.checkpoint.dependent_safe
            text = " ".join(event.checkpoint.summary.split())[:160]
            mark = "✓" if good else "✗"
            self._line(f"  {mark} {event.step_id} is {event.status}: {text}", "green" if good else "red")
        elif event.kind == "step_held":
            self._line(f"  - {event.step_id} was not begun: {event.reason}", "dim")

    def end(self, result: WorkflowResult) -> int:
        """Say how it ended; return the exit code."""
        code = EXIT_CODES[result.state]
        if self._as_json:
            self._write({"event": "ended", **result.to_data(), "exit_code": code})
            return code
        ready = len(result.steps_in(StepState.READY))
        told = f"{result.state.value} workflow {result.session_id[:8]}"
        self._line(f"{told}: {ready} of {len(result.steps)} steps ready", "green" if result.ok else "red")
        for each in result.next_actions:
            self._line(f"  {each}", "dim")
        return code

    def _line(self, text: str, style: str) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _write(self, data: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps(data, ensure_ascii=False, default=str) + "\n")
        sys.stdout.flush()
