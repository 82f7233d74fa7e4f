"""The commands that run an agent: run, resume, chat."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from rich.console import Console

from treenail.agent import Agent, Run
from treenail.containment.limits import Limits, OnUnknownPrice
from treenail.errors import LeaseHeldError, LogDamagedError, LogError, UsageError
from treenail.judges import CommandChecker, LLMCompletionVerifier, NestedExecutionConfig
from treenail.presenters.cli import agents, models, places, settings, stored
from treenail.presenters.cli.screen import JsonScreen, Screen, screen_for, watching
from treenail.presenters.cli.settings import Settings
from treenail.providers.base import Provider
from treenail.tools.policies import PermissionMode, Permissions
from treenail.turns.derivation import turn_state
from treenail.turns.states import TurnEnded, TurnState

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

_LIMIT_KINDS = {
    "budget_exceeded",
    "step_limit_exceeded",
    "retry_budget_exceeded",
    "iteration_cap",
    "circuit_open",
    "provider_rate_limit",
    "halted",
}

_REMEMBERED = (
    "agent",
    "model",
    "base_url",
    "api",
    "check",
    "judge",
    "permissions",
    "max_cost",
    "max_steps",
    "max_retries",
    "timeout",
    "unknown_price",
)
"""What a resume goes on with unless it is told otherwise: also the ceilings, or they would not be any."""

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
        is_chat: bool = False,
    ) -> None:
        self.is_chat = is_chat
        self.directory = (directory or Path.cwd()).resolve()
        if not self.directory.is_dir():
            raise UsageError(f"{self.directory} is no directory; name the one that the agent is to work in")
        self.as_json = as_json
        said = settings.load(flags, os.environ, self.directory)
        self.store = places.store_for(self.directory, said.text("store"), os.environ)
        self.run_id: UUID | None = None
        remembered: dict[str, str] = {}
        self._before: Limits | None = None
        if run is not None:
            self.run_id = stored.find(places.existing(self.store), run)
            remembered = self._remembered(self.run_id)
        else:
            places.ready(self.store)
        known = settings.load(flags, os.environ, self.directory, remembered)
        spec = known.text("agent")
        self.agent = _agent_for(known, self.directory)
        ceilings = {} if spec is None else agents.limits_of(spec, self.directory)
        self.settings = settings.load(flags, os.environ, self.directory, remembered, ceilings)
        self.provider: Provider = models.provider_for(self.settings, os.environ)

    def _remembered(self, run_id: UUID) -> dict[str, str]:
        with stored.opened_log(self.store) as log:
            tags = dict(log.info(run_id).tags)
            told = {name: tags[_TAG + name] for name in _REMEMBERED if tags.get(_TAG + name)}
            self._before = stored.ceilings(log, run_id)
        return told | stored.ceilings_since(self._before, told)

    def tags(self) -> dict[str, str]:
        """Return what a resume has to know."""
        kept = {
            name: self.settings[name]
            for name in _REMEMBERED
            if self.settings.chosen[name].source != settings.DEFAULT
        }
        agent = kept.get("agent")
        if isinstance(agent, str):
            path, colon, name = agent.partition(":")
            kept["agent"] = str((self.directory / Path(path).expanduser()).resolve()) + colon + name
        model = kept.get("model")
        if isinstance(model, str) and model.startswith("scripted:"):
            kept["model"] = "scripted:" + str(Path(model.removeprefix("scripted:")).resolve())
        return {_TAG + name: str(value) for name, value in kept.items() if value not in (None, False)}

    def limits(self) -> Limits:
        """Return the run's ceilings."""
        steps, retries = self.settings.number("max_steps"), self.settings.number("max_retries")
        return Limits(
            max_cost_usd=self.settings.number("max_cost"),
            max_steps=None if steps is None else int(steps),
            max_retries=None if retries is None else int(retries),
            timeout=self.settings.number("timeout"),
            on_unknown_price=cast(OnUnknownPrice, self.settings["unknown_price"]),
            # Only a program can say this one.
            max_depth=None if self._before is None else self._before.max_depth,
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
            return self._stopped(screen, "the turn was cut off", EXIT_CODES[TurnState.INTERRUPTED])
        except (LeaseHeldError, LogDamagedError):
            raise
        except LogError as error:
            # The log would not take another event, so the ending cannot be in it; the run is whole so far.
            if self.run_id is None and not self._has_begun():
                raise
            return self._stopped(screen, str(error), EXIT_CODES[TurnState.FAILED])
        with run:
            self.run_id = run.id
            ended = TurnEnded("", run.state, run.result.error_kind, run.result.details, run.next_actions)
            return self._tell(screen, run.id, ended, run.text)

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

    def _has_begun(self) -> bool:
        """Whether the store has a run at all."""
        try:
            with stored.opened_log(self.store) as log:
                return bool(log.sessions())
        except LogError:
            return False

    def _stopped(self, screen: Screen, details: str, code: int) -> int:
        """Say how a turn that did not come back stands in the log."""
        self.run_id = self.run_id or stored.find(self.store, stored.LAST)
        with stored.reading(self.store, self.run_id) as session:
            state, newest = turn_state(session), session[TurnEnded].latest()
        if newest is None or newest.state is not state:
            newest = TurnEnded("", state, "", details, (f"treenail resume {self.run_id}",))
        self._tell(screen, self.run_id, newest, "")
        return code

    def _tell(self, screen: Screen, run_id: UUID, ended: TurnEnded, text: str) -> int:
        """Say how a turn ended, and what can be pasted now. Returns the exit code."""
        code = exit_code(ended.state, ended.error_kind)
        short = str(run_id)[:8]
        commands = self._commands(ended, run_id)
        details = _in_flags(ended.details)
        if isinstance(screen, JsonScreen):
            screen.write(
                {
                    "event": "ended",
                    "run": str(run_id),
                    "state": ended.state.value,
                    "error_kind": ended.error_kind,
                    "details": details,
                    "text": text,
                    "next_actions": list(ended.next_actions),
                    "commands": commands,
                    "exit_code": code,
                }
            )
            return code
        err = Console(stderr=True)
        style = "green" if ended.state is TurnState.COMPLETED else "red"
        kind = f" ({ended.error_kind})" if ended.error_kind else ""
        why = f"{kind}: {details}" if details else kind
        err.print(f"[{style}]{ended.state.value}[/] run {short}", end="", highlight=False)
        err.print(why, markup=False, highlight=False, soft_wrap=True)
        if self.is_chat and ended.state is TurnState.COMPLETED:
            return code
        for each in commands:
            err.print(f"  {each}", style="dim", markup=False, highlight=False, soft_wrap=True)
        return code

    def _commands(self, ended: TurnEnded, run_id: UUID) -> list[str]:
        """Return what a person can paste now, in the directory that they are in."""
        short = str(run_id)[:8]
        actions = list(ended.next_actions)
        if ended.state is TurnState.COMPLETED:
            actions = [f"treenail show {short}", f"treenail diff {short}"]
        elif ended.state is TurnState.HELD:
            actions.insert(0, f"treenail hold list {short}")
        elsewhere = places.flag_for(self.store)
        return [
            each.partition(" --store ")[0].replace(str(run_id), short) + elsewhere
            if each.startswith("treenail ")
            else f"# {each}"
            for each in dict.fromkeys(actions)
        ]


_FLAGS = (
    (
        "give cost_estimate_hint or prices=, or set on_unknown_price",
        "say --unknown-price warn to go on uncounted",
    ),
)


def _in_flags(details: str) -> str:
    """Say in flags what an error of the library says in arguments."""
    for said, meant in _FLAGS:
        details = details.replace(said, meant)
    return details


def _agent_for(chosen: Settings, directory: Path) -> Agent:
    """Return the agent, with the judges that the settings add to its own.

    A judge that was asked for by name is a gate: if it cannot find out, the run is not complete.
    """
    spec = chosen.text("agent")
    agent = agents.coding_agent() if spec is None else agents.load_agent(spec, directory)
    check = chosen.text("check")
    asked = agents.joined(
        None if check is None else CommandChecker(check), LLMCompletionVerifier() if chosen["judge"] else None
    )
    if asked is None:
        return agent
    nested = agent.nested or NestedExecutionConfig()
    return replace(
        agent,
        completion=agents.joined(agent.completion, asked),
        nested=replace(nested, on_completion_failure="closed"),
    )


def run(flags: Mapping[str, object | None], task: str, *, directory: Path | None, as_json: bool) -> int:
    """Run an agent on a task."""
    if task == "-":
        task = sys.stdin.read()
    if not task.strip():
        raise UsageError('say what is to be done: treenail run "fix the failing test"')
    return Desk(flags, directory=directory, as_json=as_json).turn(task)


def resume(flags: Mapping[str, object | None], said: str, *, as_json: bool) -> int:
    """Go on with a run that was cut off, held or stopped by a limit."""
    desk = Desk(flags, run=said, as_json=as_json)
    assert desk.run_id is not None
    with stored.opened_log(desk.store) as log:
        if stored.is_workflow(log.info(desk.run_id)):
            short = str(desk.run_id)[:8]
            raise UsageError(f"{short} is a workflow; go on with `treenail workflow resume {short}`")
    return desk.turn(None)


def chat(
    flags: Mapping[str, object | None], said: str | None, *, directory: Path | None, as_json: bool = False
) -> int:
    """Talk with an agent: each line is a turn of the same run."""
    desk = Desk(flags, directory=directory, run=said, as_json=as_json, is_chat=True)
    console = Console(stderr=True)
    is_person = sys.stdin.isatty() and not as_json
    if is_person:
        console.print("[dim]an empty line or Ctrl-D ends the chat; Ctrl-C stops a turn[/]")
    code = 0
    while True:
        try:
            line = console.input("> ", markup=False) if is_person else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            break
        if not line.strip():
            break
        code = desk.turn(line.strip())
    if is_person and desk.run_id is not None:
        again = f"treenail chat --run {str(desk.run_id)[:8]}{places.flag_for(desk.store)}"
        console.print(f"go on with: {again}", style="dim", markup=False, highlight=False, soft_wrap=True)
    return code
