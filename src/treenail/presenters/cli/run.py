"""The commands that run an agent: run, resume."""

from __future__ import annotations

import atexit
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import click

from treenail.clock import new_id
from treenail.containment import CancellationToken
from treenail.conversation import ImagePart
from treenail.errors import LeaseHeldError, LogDamagedError, LogError, UsageError
from treenail.history import (
    LAST,
    TurnCounts,
    find_run,
    is_workflow,
    kept_by_runs,
    newest_run_in,
    opened_log,
    opened_run,
    short,
    turn_counts,
)
from treenail.log import PostgresUrl
from treenail.mcp import McpServerFailed, McpToolsChanged
from treenail.presenters.cli import run_picker, settings, stores
from treenail.presenters.cli.attachments import all_images
from treenail.presenters.cli.console import GuardedConsole
from treenail.presenters.cli.engines import resumed_by_workers
from treenail.presenters.cli.footer import end_text
from treenail.presenters.cli.options import (
    agent_options,
    complete_run,
    directory_option,
    flags_of,
    image_option,
    json_option,
    run_named,
    store_named,
    take_over_option,
)
from treenail.presenters.cli.output import json_text, print_text
from treenail.presenters.cli.recover import print_kept
from treenail.presenters.cli.screen import JsonScreen, Screen, watching
from treenail.presenters.cli.setup import RunSetup
from treenail.presenters.cli.terminal_screen import screen_for
from treenail.printable import printable_line
from treenail.sandbox import FOR_THE_PERSON
from treenail.tools import CommandRan, ProcessTable, filesystem_of
from treenail.turns import Inbox, TurnEnded, TurnStarted, TurnState, newest_turn, turn_state

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


def exit_code(state: TurnState, kind: str | None) -> int:
    """Return the exit code for an ending: a ceiling has its own."""
    if state is TurnState.FAILED and kind in _LIMIT_KINDS:
        return LIMIT
    return EXIT_CODES[state]


_CHAT_PROCESSES = ProcessTable()
"""The background processes of the chat that this program is."""

atexit.register(_CHAT_PROCESSES.close)


class TerminalRun(RunSetup):
    """Runs turns of an agent for a person at a terminal, or for a program that reads JSON."""

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
        self.as_json, self.is_chat = as_json, is_chat
        self.keeps_processes = is_chat
        super().__init__(flags, directory=directory, run=run, take_over=take_over)
        self._kept = 0 if self.run_id is None else len(kept_by_runs(self.store, self.run_id))
        """How many undos have taken files away whose paths were printed, or that were before this command."""
        self._begun_id: UUID | None = None

    @property
    def begun_id(self) -> UUID | None:
        """The run; also of a first turn that is under way."""
        return self.run_id or self._begun_id

    def process_table(self) -> ProcessTable:
        """Return where background processes are kept: in a chat, the same place for all its turns."""
        return _CHAT_PROCESSES if self.is_chat else ProcessTable()

    def is_attended(self) -> bool:
        """Whether a person is at the terminal."""
        return not self.as_json and sys.stdin.isatty() and sys.stderr.isatty()

    def asks(self, question: str) -> bool | None:
        """Ask a person at the terminal; None if there is none."""
        if not self.is_attended():
            return None
        console = GuardedConsole(stderr=True)
        console.print(f"{question} [y/N] ", end="", markup=False, highlight=False, soft_wrap=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def screen(self) -> Screen:
        """Make the screen of a turn."""
        return screen_for(as_json=self.as_json, asks=True, always=self)

    def turn(
        self,
        task: str | None,
        images: Sequence[ImagePart] = (),
        *,
        cancellation: CancellationToken | None = None,
        inbox: Inbox | None = None,
    ) -> int:
        """Run one turn on a task, or resume the last one. Returns the exit code."""
        screen = self.screen()
        permissions = self.permissions(screen.ask)
        self._begun_id = new_id() if self.run_id is None else None
        try:
            with watching(screen) as feed:
                run = self.run(
                    task,
                    permissions,
                    feed.publish,
                    cancellation,
                    self._begun_id,
                    images=images,
                    inbox=inbox,
                )
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
            session = run.execution_state.session
            refused = [FOR_THE_PERSON[kind] for each in session[CommandRan].all() for kind in each.refused]
            refused += [each.reason for each in session[McpServerFailed].all()]
            refused += [printable_line(each.told()) for each in session[McpToolsChanged].all()]
            counts = turn_counts(session, filesystem_of(run.execution_state))
            return self._print_ending(screen, run.id, ended, counts, run.text, list(dict.fromkeys(refused)))

    @property
    def is_finished(self) -> bool:
        """Whether the run's newest turn has a clean answer, so that there is nothing to resume."""
        assert self.run_id is not None
        with opened_run(self.store, self.run_id) as session:
            return turn_state(session) is TurnState.COMPLETED

    def tell_finished(self) -> int:
        """Say what a finished run is, and what one can do with it."""
        assert self.run_id is not None
        name, flag = str(self.run_id)[:8], stores.flag_for(self.store)
        with opened_run(self.store, self.run_id) as session:
            task = session[TurnStarted].all()[-1].task
        err = GuardedConsole(stderr=True)
        said = f"run {name} is finished: {short(printable_line(task), 60)}"
        err.print(said, markup=False, highlight=False, soft_wrap=True)
        for command in (
            f"treenail chat --run {name}{flag}",
            f"treenail show {name}{flag}",
            f"treenail diff {name}{flag}",
            f"treenail undo {name}{flag}",
        ):
            err.print(f"  {command}", style="dim", markup=False, highlight=False, soft_wrap=True)
        return 0

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
            counts = turn_counts(session)
        state = TurnState.UNFINISHED if newest is None else newest.state
        ended = None if newest is None or not newest.is_as_claimed else newest.ended
        again = TurnEnded("", state, "", details, (f"treenail resume {self.run_id}",))
        self._print_ending(screen, self.run_id, ended or again, counts)
        return code

    def _print_ending(
        self,
        screen: Screen,
        run_id: UUID,
        ended: TurnEnded,
        counts: TurnCounts,
        text: str = "",
        refused: Sequence[str] = (),
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
        err = GuardedConsole(stderr=True)
        is_good = ended.state is TurnState.COMPLETED
        was_stopped = ended.state is TurnState.INTERRUPTED and ended.error_kind == "interrupt"
        if not is_good and not was_stopped:
            kind = f" ({ended.error_kind})" if ended.error_kind else ""
            why = f"{kind}: {details}" if details else kind
            style = "yellow" if ended.state is TurnState.HELD else "red"
            print_text(err, f"{ended.state.value} run {short}{why}", style)
        undo = "/undo" if self.is_chat else f"treenail undo{stores.flag_for(self.store)}"
        line = end_text(counts, undo, err.width, "interrupted" if was_stopped else "")
        mark = "✓" if is_good else "○" if ended.state is TurnState.HELD else "✗"
        print_text(err, f"{mark} {line}", "green" if is_good else "dim")
        known = kept_by_runs(self.store) if kept else ()
        for each in kept:
            print_kept(err, each, known)
        for line in refused:
            print_text(err, f"  {line}", "yellow")
        if not is_good and was_stopped and self.is_chat:
            print_text(err, "  say how to go on, or /resume to continue as before", "dim")
        elif not is_good:
            for command in commands:
                print_text(err, f"  {command}", "dim")
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


@click.command
@click.argument("task")
@click.option(
    "--continue", "-c", "follows", is_flag=True, help="Follow up on the newest run in this directory."
)
@image_option
@agent_options
@directory_option
@take_over_option
@json_option
def run(
    task: str,
    follows: bool,
    images: tuple[str, ...],
    directory: Path | None,
    take_over: bool,
    as_json: bool,
    **options: Any,
) -> int:
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
    pictures = all_images(images)
    flags = flags_of(options)
    followed = newest_here(flags, directory) if follows else None
    setup = TerminalRun(flags, directory=directory, run=followed, as_json=as_json, take_over=take_over)
    return setup.turn(task, pictures)


def newest_here(flags: Mapping[str, Any], directory: Path | None) -> str:
    """Return the newest run in a directory. Raises `UsageError`."""
    place = directory or Path.cwd()
    store = stores.store_for(place, settings.load(flags, os.environ, place).text("store"), os.environ)
    return str(newest_run_in(stores.existing(store), place))


@click.command
@click.argument("run", required=False, shell_complete=complete_run)
@agent_options
@take_over_option
@json_option
def resume(run: str | None, take_over: bool, as_json: bool, **options: Any) -> int:
    """Resume a run that has stopped.

    After a crash, an interrupt, a limit or an answered question. It keeps its model, its agent and its
    ceilings, unless others are given. RUN is a run's id, the beginning of it, or @last. Without RUN you
    choose one from a list; without a terminal it is the one that waits, if it is only one. A run that was
    submitted is resumed by a worker.

    Example: treenail resume @last --max-cost 1.00
    """
    flags = flags_of(options)
    if run is None:
        store = store_named(options.get("store"))
        runs = run_picker.known_runs(store)
        if not runs:
            raise UsageError(
                f'there are no runs of an agent in {store}; start one with `treenail run "task"`, or resume '
                "a workflow with `treenail workflow resume`"
            )
        is_person = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
        chosen = run_picker.pick(runs) if is_person else run_picker.the_one_that_waits(store, runs)
        if chosen is None:
            return 0
        run = str(chosen.run_id)
    place, run_id = run_named(options.get("store"), run)
    if isinstance(place, PostgresUrl) and not take_over and resumed_by_workers(place, run_id, flags):
        text = f"submitted: treenail status {str(run_id)[:8]}{stores.flag_for(place)}"
        print(json_text({"event": "submitted", "run": str(run_id)}) if as_json else text)
        return 0
    setup = TerminalRun(flags, run=run, as_json=as_json, take_over=take_over)
    assert setup.run_id is not None
    with opened_log(setup.store) as log:
        if is_workflow(log.info(setup.run_id)):
            short = str(setup.run_id)[:8]
            raise UsageError(f"{short} is a workflow; resume it with `treenail workflow resume {short}`")
    if not as_json and setup.is_finished:
        return setup.tell_finished()
    return setup.turn(None)
