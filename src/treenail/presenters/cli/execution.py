"""The commands that run an agent: run, resume, chat."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import click
from rich.console import Console

from treenail.agent import Agent, Run
from treenail.containment import Limits, OnUnknownPrice
from treenail.errors import LeaseHeldError, LogDamagedError, LogError, UsageError
from treenail.history import LAST, find_run, is_workflow, kept_by_runs, opened_log, opened_run
from treenail.judges import CommandChecker, LLMCompletionVerifier, NestedExecutionConfig
from treenail.presenters.cli import agents, models, settings, stores
from treenail.presenters.cli.options import (
    agent_options,
    directory_option,
    flags_of,
    json_option,
    run_argument,
    take_over_option,
)
from treenail.presenters.cli.recovery import print_kept
from treenail.presenters.cli.screen import JsonScreen, Screen, screen_for, watching
from treenail.presenters.cli.settings import Settings
from treenail.providers import Provider
from treenail.sandbox import FOR_THE_PERSON, Grants, Mode, Sandbox, probe
from treenail.state import Session
from treenail.tools import CommandRan, PermissionMode, Permissions
from treenail.turns import TurnEnded, TurnState, ceilings_of, newest_turn

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
"""The exit code for each state: 0 for a clean answer and for nothing else."""

_LIMIT_KINDS = {
    "budget_exceeded",
    "step_limit_exceeded",
    "retry_budget_exceeded",
    "iteration_cap",
    "circuit_open",
    "provider_rate_limit",
    "halted",
}

_REMEMBERED = tuple(each.name for each in settings.SETTINGS if each.name != "store")
"""The settings that a resume keeps unless it is given others: also the ceilings, or they would not hold."""

_TAG = "cli."


def exit_code(state: TurnState, kind: str | None) -> int:
    """Return the exit code for an ending: a ceiling has its own."""
    if state is TurnState.FAILED and kind in _LIMIT_KINDS:
        return LIMIT
    return EXIT_CODES[state]


class RunSetup:
    """What a command needs to run an agent: settings, store, agent, provider."""

    def __init__(
        self,
        flags: Mapping[str, object | None],
        *,
        directory: Path | None = None,
        run: str | None = None,
        as_json: bool = False,
        is_chat: bool = False,
        take_over: bool = False,
    ) -> None:
        self.is_chat = is_chat
        self.take_over = take_over
        self.directory = (directory or Path.cwd()).resolve()
        if not self.directory.is_dir():
            raise UsageError(f"{self.directory} is not a directory; name the agent's working directory")
        self.as_json = as_json
        said = settings.load(flags, os.environ, self.directory)
        self.store = stores.store_for(self.directory, said.text("store"), os.environ)
        self.run_id: UUID | None = None
        remembered: dict[str, str] = {}
        self._before: Limits | None = None
        self._kept = 0
        """How many undos have taken files away whose paths were printed, or that were before this command."""
        if run is not None:
            self.run_id = find_run(stores.existing(self.store), run)
            self._kept = len(kept_by_runs(self.store, self.run_id))
            remembered = self._remembered(self.run_id)
        else:
            stores.ready(self.store)
        known = settings.load(flags, os.environ, self.directory, remembered)
        if known.unapproved:
            self._ask_to_approve(known)
            known = settings.load(flags, os.environ, self.directory, remembered)
        spec = known.text("agent")
        self.agent = _agent_for(known, self.directory)
        ceilings = {} if spec is None else agents.limits_of(spec, self.directory)
        self.settings = settings.load(flags, os.environ, self.directory, remembered, ceilings)
        self.provider: Provider = models.provider_for(self.settings, os.environ)
        self.sandbox = self._sandbox()

    def _asks(self, question: str) -> bool | None:
        """Ask a person at the terminal; None if there is none."""
        if self.as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            return None
        console = Console(stderr=True)
        console.print(f"{question} [y/N] ", end="", markup=False, highlight=False, soft_wrap=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def _ask_to_approve(self, known: Settings) -> None:
        """Ask whether what a project's file widens may take effect. Raises `UsageError` if not."""
        if self._asks(f"{known.file} wants to set {known.wanted}. Approve this file as it is?"):
            settings.approve(known, os.environ)
        else:
            known.check_approved()

    def _sandbox(self) -> Sandbox:
        """Return how commands are confined. Where they cannot be, a person may allow to do without."""
        mode = cast(Mode, self.settings["sandbox"])
        if mode != "off" and not (found := probe()).confines:
            why = f"{found.text}; {found.advice}" if found.advice else found.text
            if mode == "require":
                raise UsageError(why)
            # Without a terminal the first command is refused: an agent may not need any.
            if self._asks(f"Commands would be {found.text}. Run them all the same?"):
                mode = "off"
                chosen = {**self.settings.chosen, "sandbox": settings.Chosen("off", "your answer")}
                self.settings = replace(self.settings, chosen=chosen)
        network = bool(self.settings["allow_network"])
        return Sandbox(mode, Grants(network, self.settings.paths("allow_write")))

    def _remembered(self, run_id: UUID) -> dict[str, str]:
        with opened_log(self.store) as log, Session.open(log, run_id, read_only=True) as session:
            tags = dict(log.info(run_id).tags)
            self._before = ceilings_of(session)
        given = {name: tags[_TAG + name] for name in _REMEMBERED if tags.get(_TAG + name)}
        return given | _ceilings_since(self._before, given)

    def tags(self) -> dict[str, str]:
        """Return the settings that a resume needs."""
        kept = {
            name: self.settings[name]
            for name in _REMEMBERED
            if self.settings.chosen[name].source != settings.DEFAULT
        }
        agent = kept.get("agent")
        if isinstance(agent, str):
            path, colon, name = agent.partition(":")
            kept["agent"] = str((self.directory / Path(path).expanduser()).resolve()) + colon + name
        if kept.get("allow_write"):
            kept["allow_write"] = os.pathsep.join(map(str, self.sandbox.grants.write))
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
            # The command line has no option for this one.
            max_depth=None if self._before is None else self._before.max_depth,
        )

    def turn(self, task: str | None) -> int:
        """Run one turn on a task, or resume the last one. Returns the exit code."""
        mode = PermissionMode(str(self.settings["permissions"]))
        screen = screen_for(as_json=self.as_json, asks=mode is PermissionMode.ASK)
        permissions = Permissions(mode, approver=screen.ask)
        try:
            with watching(screen) as feed:
                run = self._run(task, permissions, feed.publish)
        except KeyboardInterrupt:
            return self._stopped(screen, "the turn was cut off", EXIT_CODES[TurnState.INTERRUPTED])
        except (LeaseHeldError, LogDamagedError):
            raise
        except LogError as error:
            # The log refused an event, so the ending cannot be in it; everything before it is.
            if self.run_id is None and not self._has_begun():
                raise
            return self._stopped(screen, str(error), EXIT_CODES[TurnState.FAILED])
        with run:
            self.run_id = run.id
            ended = TurnEnded("", run.state, run.result.error_kind, run.result.details, run.next_actions)
            commands = run.execution_state.session[CommandRan].all()
            refused = dict.fromkeys(kind for each in commands for kind in each.refused)
            return self._print_ending(
                screen, run.id, ended, run.text, [FOR_THE_PERSON[each] for each in refused]
            )

    def _run(self, task: str | None, permissions: Permissions, watch: Any) -> Run:
        if task is None:
            assert self.run_id is not None
            return self.agent.resume(
                self.store,
                self.run_id,
                provider=self.provider,
                limits=self.limits(),
                permissions=permissions,
                watch=watch,
                sandbox=self.sandbox,
                take_over=self.take_over,
            )
        return self.agent.run(
            task,
            provider=self.provider,
            workspace=self.directory if self.run_id is None else None,
            store=self.store,
            limits=self.limits(),
            permissions=permissions,
            watch=watch,
            sandbox=self.sandbox,
            run_id=self.run_id,
            tags=self.tags(),
            take_over=self.take_over,
        )

    def _has_begun(self) -> bool:
        """Whether the store has a run at all."""
        try:
            with opened_log(self.store) as log:
                return bool(log.sessions())
        except LogError:
            return False

    def _stopped(self, screen: Screen, details: str, code: int) -> int:
        """Print the state of a turn that raised, as its log shows it."""
        self.run_id = self.run_id or find_run(self.store, LAST)
        with opened_run(self.store, self.run_id) as session:
            newest = newest_turn(session)
        state = TurnState.UNFINISHED if newest is None else newest.state
        ended = None if newest is None or not newest.is_as_claimed else newest.ended
        again = TurnEnded("", state, "", details, (f"treenail resume {self.run_id}",))
        self._print_ending(screen, self.run_id, ended or again, "")
        return code

    def _print_ending(
        self, screen: Screen, run_id: UUID, ended: TurnEnded, text: str, refused: Sequence[str] = ()
    ) -> int:
        """Print how a turn ended, and commands to paste. Returns the exit code."""
        code = exit_code(ended.state, ended.error_kind)
        short = str(run_id)[:8]
        commands = self._commands(ended, run_id)
        details = _in_flags(ended.details)
        kept = kept_by_runs(self.store, run_id)[self._kept :]
        self._kept += len(kept)
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
                    "kept": [each.to_data() for each in kept],
                    "refused": list(refused),
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
        known = kept_by_runs(self.store) if kept else ()
        for each in kept:
            print_kept(err, each, known)
        for line in refused:
            err.print(f"  {line}", style="yellow", markup=False, highlight=False, soft_wrap=True)
        if self.is_chat and ended.state is TurnState.COMPLETED:
            return code
        for command in commands:
            err.print(f"  {command}", style="dim", markup=False, highlight=False, soft_wrap=True)
        return code

    def _commands(self, ended: TurnEnded, run_id: UUID) -> list[str]:
        """Return commands to paste in the present directory."""
        short = str(run_id)[:8]
        actions = list(ended.next_actions)
        if ended.state is TurnState.COMPLETED:
            actions = [f"treenail show {short}", f"treenail diff {short}"]
        elif ended.state is TurnState.HELD:
            actions.insert(0, f"treenail hold list {short}")
        elsewhere = stores.flag_for(self.store)
        return [
            each.partition(" --store ")[0].replace(str(run_id), short) + elsewhere
            if each.startswith("treenail ")
            else f"# {each}"
            for each in dict.fromkeys(actions)
        ]


def _in_flags(details: str) -> str:
    """Replace the library's advice about unknown prices, which names arguments, by a flag."""
    return re.sub(
        r"give cost_estimate_hint.*", "use --unknown-price warn to leave its cost uncounted", details
    )


def _agent_for(chosen: Settings, directory: Path) -> Agent:
    """Return the agent, with the judges that the settings add to its own.

    A judge that was asked for is a gate: if it cannot decide, the run is not complete.
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


def _ceilings_since(limits: Limits | None, given: Mapping[str, str]) -> dict[str, str]:
    """Return a run's present ceilings as settings, where they are not those of its beginning.

    `given` is what the run was started with. A default ceiling is not remembered: the environment and the
    settings file may set another.
    """
    if limits is None:
        return {}
    now = {
        "max_cost": limits.max_cost_usd,
        "max_steps": limits.max_steps,
        "max_retries": limits.max_retries,
        "timeout": limits.timeout,
        "unknown_price": limits.on_unknown_price,
    }
    return {
        name: str(value)
        for name, value in now.items()
        if value is not None and (name in given or value != settings.BY_NAME[name].default)
    }


@click.command
@click.argument("task")
@agent_options
@directory_option
@take_over_option
@json_option
def run(task: str, directory: Path | None, take_over: bool, as_json: bool, **options: Any) -> int:
    """Run an agent in this directory.

    TASK says what to do; - reads it from the input. Exits 0 for a clean answer, 1 if the run failed, 3 with
    partial work, 4 if a call waits for a person, 5 if time ran out, 6 if a ceiling stopped it, 130 if it was
    interrupted.

    Example: treenail run "make the failing test pass" --check "pytest -q" --max-cost 0.50
    """
    if task == "-":
        task = sys.stdin.read()
    if not task.strip():
        raise UsageError('the task is empty; write what to do: treenail run "fix the failing test"')
    setup = RunSetup(flags_of(options), directory=directory, as_json=as_json, take_over=take_over)
    return setup.turn(task)


@click.command
@run_argument
@agent_options
@take_over_option
@json_option
def resume(run: str, take_over: bool, as_json: bool, **options: Any) -> int:
    """Resume a run that has stopped.

    After a crash, an interrupt, a limit or an answered question. It keeps its model, its agent and its
    ceilings, unless others are given. RUN is a run's id, the beginning of it, or @last.

    Example: treenail resume @last --max-cost 1.00
    """
    setup = RunSetup(flags_of(options), run=run, as_json=as_json, take_over=take_over)
    assert setup.run_id is not None
    with opened_log(setup.store) as log:
        if is_workflow(log.info(setup.run_id)):
            short = str(setup.run_id)[:8]
            raise UsageError(f"{short} is a workflow; resume it with `treenail workflow resume {short}`")
    return setup.turn(None)


@click.command
@click.option("--run", help="Continue this run: an id, the beginning of it, or @last.")
@agent_options
@directory_option
@take_over_option
@json_option
def chat(run: str | None, directory: Path | None, take_over: bool, as_json: bool, **options: Any) -> int:
    """Talk with an agent, several turns in one run.

    Each line is a turn. With --json, or without a terminal, the lines are read from the input.

    Example: treenail chat --ask
    """
    setup = RunSetup(
        flags_of(options), directory=directory, run=run, as_json=as_json, is_chat=True, take_over=take_over
    )
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
        code = setup.turn(line.strip())
    if is_person and setup.run_id is not None:
        again = f"treenail chat --run {str(setup.run_id)[:8]}{stores.flag_for(setup.store)}"
        console.print(f"continue with: {again}", style="dim", markup=False, highlight=False, soft_wrap=True)
    return code
