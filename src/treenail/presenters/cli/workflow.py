"""The commands that run workflows: run, status, resume."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import click

from treenail.agent import AnyAgent
from treenail.containment import Limits
from treenail.history import LAST, find_run, opened_run
from treenail.log import Store
from treenail.presenters.cli import agents, settings
from treenail.presenters.cli.console import GuardedConsole
from treenail.presenters.cli.options import (
    agent_options,
    directory_option,
    flags_of,
    json_option,
    run_argument,
    run_named,
    store_option,
    take_over_option,
)
from treenail.presenters.cli.output import json_text, print_json
from treenail.presenters.cli.run import TerminalRun
from treenail.presenters.cli.setup import RunSetup
from treenail.state import Session
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


@click.command
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--dry-run", "is_dry", is_flag=True, help="Only print the order of the steps.")
@agent_options
@directory_option
@take_over_option
@json_option
def run(
    spec: Path, is_dry: bool, directory: Path | None, take_over: bool, as_json: bool, **options: Any
) -> int:
    """Run a workflow in this directory.

    SPEC is a YAML or JSON file. Exits 0 if every required step is ready, 1 if the workflow failed, 3 with
    partial work, 4 if a person must decide, 5 if time ran out, 130 if it was interrupted.

    Example: treenail workflow run release.yaml --dry-run
    """
    loaded = load_spec(spec)
    if is_dry:
        return _show_plan(loaded, as_json=as_json)
    setup = TerminalRun(flags_of(options), directory=directory, as_json=as_json)
    screen = _Screen(as_json=as_json)
    try:
        result = run_workflow(
            loaded,
            _agents(loaded, setup),
            provider=setup.provider,
            workspace=setup.directory,
            store=setup.store,
            ceiling=_ceiling(loaded, setup),
            permissions=setup.permissions(),
            sandbox=setup.sandbox,
            watch=screen.show,
            tags=setup.tags(),
            take_over=take_over,
        )
    except KeyboardInterrupt:
        result = _read(setup.store, find_run(setup.store, LAST))
    return screen.end(result)


@click.command
@run_argument
@click.option("--rerun", multiple=True, help="A step to run again, with its dependents; or: failed.")
@click.option("--ready", multiple=True, help="A step to accept as ready, with its changes.")
@click.option("--failed", multiple=True, help="A step to mark as failed.")
@click.option("--note", default="", help="The reason, for the steps that build on it.")
@click.option(
    "--apply/--no-apply", default=None, help="Whether to apply a ready step's changes; never over a conflict."
)
@agent_options
@take_over_option
@json_option
def resume(
    run: str,
    rerun: Sequence[str],
    ready: Sequence[str],
    failed: Sequence[str],
    note: str,
    apply: bool | None,
    take_over: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Resume a workflow. Finished steps stay.

    After a crash or an answer, or to run steps again. RUN is a run's id, the beginning of it, or @last.

    Example: treenail workflow resume @last --rerun failed
    """
    setup = TerminalRun(flags_of(options), run=run, as_json=as_json)
    assert setup.run_id is not None
    screen = _Screen(as_json=as_json)

    def before(session: Session) -> None:
        for each in ready:
            answer_step(session, each, ready=True, note=note, apply=apply)
        for each in failed:
            answer_step(session, each, ready=False, note=note)
        known = {each.id for each in record_of(session).spec.steps}
        for each in rerun:
            rerun_steps(session, None if each == FAILED and each not in known else [each])

    with opened_run(setup.store, setup.run_id) as session:
        spec = record_of(session).spec
    try:
        result = resume_workflow(
            setup.store,
            setup.run_id,
            _agents(spec, setup),
            provider=setup.provider,
            ceiling=_ceiling(spec, setup),
            permissions=setup.permissions(),
            sandbox=setup.sandbox,
            watch=screen.show,
            before=before,
            take_over=take_over,
        )
    except KeyboardInterrupt:
        result = _read(setup.store, setup.run_id)
    return screen.end(result)


@click.command
@run_argument
@store_option
@json_option
def status(run: str, store: str | None, as_json: bool) -> int:
    """Show the state of a workflow and of its steps.

    Exits as its run did. RUN is a run's id, the beginning of it, or @last.

    Example: treenail workflow status @last
    """
    result = _read(*run_named(store, run))
    if as_json:
        print_json(_data(result))
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


def _read(store: Store, run_id: UUID) -> WorkflowResult:
    with opened_run(store, run_id) as session:
        return workflow_result(session)


def _data(result: WorkflowResult) -> dict[str, Any]:
    """Return a result in the words that all commands share, and in those of workflows."""
    return {"run": result.session_id, "state": result.state.value, **result.to_data()}


def _show_plan(spec: WorkflowSpec, *, as_json: bool) -> int:
    plan = dry_run(spec)
    if as_json:
        print_json({"workflow_id": spec.id, **plan.to_data()})
        return 0
    for number, wave in enumerate(plan.waves, start=1):
        shown = [f"{each} ({spec.step(each).agent}, {spec.step(each).posture})" for each in wave]
        print(f"wave {number}: {', '.join(shown)}")
    for one, other, why in plan.conflicts:
        print(f"never together: {one} and {other}, because {why}")
    return 0


def _agents(spec: WorkflowSpec, setup: RunSetup) -> list[AnyAgent]:
    """Return the agents that steps may name: those of the file, and the command line's own.

    That one is known by its own name and as `agent`, which is what a step has that names none.
    """
    made = {"agent": replace(setup.agent, name="agent"), setup.agent.name: setup.agent}
    for each in spec.agents:
        said: dict[str, Any] = {"name": each.name, "instructions": each.instructions}
        if each.tools is not None:
            said["tools"] = list(each.tools)
        if each.max_iterations is not None:
            said["max_iterations"] = each.max_iterations
        made[each.name] = agents.agent_of(said, f"the agent {each.name!r} of the workflow {spec.id!r}")
    return list(made.values())


def _ceiling(spec: WorkflowSpec, setup: RunSetup) -> Limits:
    """Return what all steps together may use up.

    A default that is meant for one turn of one agent is none for a workflow, which says what it needs
    itself; only money is always bounded.
    """
    limits, chosen = setup.limits(), setup.settings.chosen
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


class _Screen:
    """Shows the events of a workflow: lines for people on the error stream, JSON for machines."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._console = GuardedConsole(stderr=True)

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
            self._write({"event": "ended", **_data(result), "exit_code": code})
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
        sys.stdout.write(json_text(data) + "\n")
        sys.stdout.flush()
