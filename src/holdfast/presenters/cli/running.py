"""The commands that run an agent: run, resume, chat."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

from rich.console import Console

from holdfast.agent import Agent, Run
from holdfast.containment import Limits
from holdfast.errors import UsageError
from holdfast.judges import CommandChecker, CompositeChecker, LLMCompletionVerifier, completion_prompt
from holdfast.presenters.cli import agents, models, places, settings, stored
from holdfast.presenters.cli.screen import JsonScreen, Screen, screen_for, watching
from holdfast.presenters.cli.settings import Settings
from holdfast.providers.base import Provider
from holdfast.tools.policies import PermissionMode, Permissions
from holdfast.turns.states import TurnEnded, TurnState, turn_state

USAGE = 2
LIMIT = 6
EXIT_CODES = {
    TurnState.COMPLETED: 0,
    TurnState.FAILED: 1,
    TurnState.PARTIAL_FAILED: 3,
    TurnState.HELD: 4,
    TurnState.TIMED_OUT: 5,
    TurnState.INTERRUPTED: 130,
    TurnState.UNFINISHED: 1,
}
"""How a command that ran a turn exits: 0 for a clean answer and for nothing else."""

_LIMIT_KINDS = {"budget_exceeded", "step_limit_exceeded", "retry_budget_exceeded"}

_REMEMBERED = ("agent", "model", "base_url", "api", "check", "judge", "permissions")
_TAG = "cli."


def exit_code(state: TurnState, kind: str | None) -> int:
    """Return the exit code for an ending: a ceiling has its own."""
    if state is TurnState.FAILED and kind in _LIMIT_KINDS:
        return LIMIT
    return EXIT_CODES[state]


class Desk:
    """What the commands that run an agent share: settings, store, agent, provider."""

    def __init__(
        self,
        flags: Mapping[str, object | None],
        *,
        directory: Path | None = None,
        run: str | None = None,
        as_json: bool = False,
    ) -> None:
        self.directory = (directory or Path.cwd()).resolve()
        if not self.directory.is_dir():
            raise UsageError(f"{self.directory} is no directory; name the one that the agent is to work in")
        self.as_json = as_json
        said = settings.load(flags, os.environ, self.directory)
        self.store = places.store_for(self.directory, said.text("store"), os.environ)
        self.run_id: UUID | None = None
        remembered: dict[str, str] = {}
        if run is not None:
            self.run_id = stored.find(places.existing(self.store), run)
            remembered = self._remembered(self.run_id)
        else:
            places.ready(self.store)
        self.settings = settings.load(flags, os.environ, self.directory, remembered)
        self.provider: Provider = models.provider_for(self.settings, os.environ)
        self.agent = _agent_for(self.settings, self.directory, self.provider)

    def _remembered(self, run_id: UUID) -> dict[str, str]:
        with stored.opened_log(self.store) as log:
            tags = dict(log.info(run_id).tags)
        return {name: tags[_TAG + name] for name in _REMEMBERED if tags.get(_TAG + name)}

    def tags(self) -> dict[str, str]:
        """Return what a resume has to know."""
        kept = {name: self.settings[name] for name in _REMEMBERED}
        agent = kept["agent"]
        if isinstance(agent, str):
            path, colon, name = agent.partition(":")
            kept["agent"] = str((self.directory / Path(path).expanduser()).resolve()) + colon + name
        return {_TAG + name: str(value) for name, value in kept.items() if value not in (None, False)}

    def limits(self) -> Limits:
        """Return the run's ceilings."""
        steps, retries = self.settings.number("max_steps"), self.settings.number("max_retries")
        return Limits(
            max_cost_usd=self.settings.number("max_cost"),
            max_steps=None if steps is None else int(steps),
            max_retries=None if retries is None else int(retries),
            timeout=self.settings.number("timeout"),
            on_unknown_price="warn" if self.settings["unknown_price"] == "warn" else "halt",
        )

    def turn(self, task: str | None) -> int:
        """Run one turn: a task, or what was left of the last one. Returns the exit code."""
        mode = PermissionMode(str(self.settings["permissions"]))
        screen = screen_for(as_json=self.as_json, asks=mode is PermissionMode.ASK)
        permissions = Permissions(mode, approver=screen.ask)
        try:
            with watching(screen) as feed:
                run = self._go(task, permissions, feed.publish)
        except KeyboardInterrupt:
            return self._interrupted(screen)
        with run:
            self.run_id = run.id
            return self._tell(screen, run.id, run.state, run.result.error_kind, run.result.details, run)

    def _go(self, task: str | None, permissions: Permissions, watch: Any) -> Run:
        if task is None:
            assert self.run_id is not None
            return self.agent.resume(
                self.store,
                self.run_id,
                provider=self.provider,
                limits=self.limits(),
                permissions=permissions,
                watch=watch,
            )
        return self.agent.run(
            task,
            provider=self.provider,
            workspace=self.directory if self.run_id is None else None,
            store=self.store,
            limits=self.limits(),
            permissions=permissions,
            watch=watch,
            run_id=self.run_id,
            tags=self.tags(),
        )

    def _interrupted(self, screen: Screen) -> int:
        """Say how an interrupted turn stands in the log."""
        run_id = self.run_id or stored.find(self.store, stored.LAST)
        self.run_id = run_id
        with stored.reading(self.store, run_id) as session:
            ended = session[TurnEnded].latest()
            state = turn_state(session)
        details = ended.details if ended is not None else "the turn was cut off"
        kind = ended.error_kind if ended is not None else None
        self._tell(screen, run_id, state, kind, details, None)
        return EXIT_CODES[TurnState.INTERRUPTED]

    def _tell(
        self, screen: Screen, run_id: UUID, state: TurnState, kind: str | None, details: str, run: Run | None
    ) -> int:
        code = exit_code(state, kind)
        short = str(run_id)[:8]
        actions = run.next_actions if run is not None else ("resume the session",)
        commands = _commands(state, short, actions)
        if isinstance(screen, JsonScreen):
            screen.write(
                {
                    "event": "ended",
                    "run": str(run_id),
                    "state": state.value,
                    "error_kind": kind,
                    "details": details,
                    "text": "" if run is None else run.text,
                    "next_actions": list(actions),
                    "commands": commands,
                    "exit_code": code,
                }
            )
            return code
        err = Console(stderr=True)
        style = "green" if state is TurnState.COMPLETED else "red"
        why = f" ({kind}): {details}" if kind else ""
        err.print(f"[{style}]{state.value}[/] run {short}", end="", highlight=False)
        err.print(why, markup=False, highlight=False)
        for each in commands:
            err.print(f"  {each}", style="dim", markup=False, highlight=False)
        return code


def _commands(state: TurnState, run: str, actions: tuple[str, ...]) -> list[str]:
    """Return what a person can paste now."""
    if state is TurnState.COMPLETED:
        return [f"holdfast show {run}", f"holdfast diff {run}"]
    if state is TurnState.HELD:
        return [f"holdfast hold list {run}", f"holdfast hold answer {run} --yes", f"holdfast resume {run}"]
    return [f"holdfast resume {run}", f"holdfast diagnose {run}", *(f"# {each}" for each in actions)]


def _agent_for(chosen: Settings, directory: Path, provider: Provider) -> Agent:
    spec = chosen.text("agent")
    agent = agents.coding_agent() if spec is None else agents.load_agent(spec, directory)
    check, judge = chosen.text("check"), bool(chosen["judge"])
    if spec is not None:
        written = agents.settings_of(spec, directory)
        check = check or written.get("completion")
        judge = judge or bool(written.get("judge"))
    if check is None and not judge:
        return agent
    return replace(agent, completion=_checker(check, judge, agent.completion))


def _checker(check: str | None, judge: bool, given: Any) -> Any:
    parts = [] if given is None else [given]
    if check is not None:
        parts.append(CommandChecker(check))
    if judge:
        parts.append(LLMCompletionVerifier(completion_prompt()))
    return parts[0] if len(parts) == 1 else CompositeChecker(parts)


def run(flags: Mapping[str, object | None], task: str, *, directory: Path | None, as_json: bool) -> int:
    """Run an agent on a task."""
    if task == "-":
        task = sys.stdin.read()
    if not task.strip():
        raise UsageError('say what is to be done: holdfast run "fix the failing test"')
    return Desk(flags, directory=directory, as_json=as_json).turn(task)


def resume(flags: Mapping[str, object | None], said: str, *, as_json: bool) -> int:
    """Go on with a run that was cut off, held or stopped by a limit."""
    return Desk(flags, run=said, as_json=as_json).turn(None)


def chat(flags: Mapping[str, object | None], said: str | None, *, directory: Path | None) -> int:
    """Talk with an agent: each line is a turn of the same run."""
    desk = Desk(flags, directory=directory, run=said)
    console = Console(stderr=True)
    if sys.stdin.isatty():
        console.print("[dim]an empty line or Ctrl-D ends the chat; Ctrl-C stops a turn[/]")
    code = 0
    while True:
        try:
            line = console.input("> ", markup=False) if sys.stdin.isatty() else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            break
        if not line.strip():
            break
        code = desk.turn(line.strip())
    return code
