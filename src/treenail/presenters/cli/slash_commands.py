"""The commands of the chat. Each does what the command line's does, by the same code, to the chat's run."""

from __future__ import annotations

import difflib
import importlib
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from treenail.errors import TreenailError, UsageError
from treenail.history import compact_run, context_of, find_run, opened_run
from treenail.presenters.cli import models, run_picker, settings, stores
from treenail.presenters.cli.attachments import expanded
from treenail.presenters.cli.output import guard
from treenail.presenters.cli.picker import choice
from treenail.prompt import read_project
from treenail.tools import boundaries
from treenail.turns import TurnState, turn_state

if TYPE_CHECKING:
    from treenail.presenters.cli.chat import Chat


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the chat."""

    help: str
    takes: str = ""
    """What may follow it, for the help."""
    needs_run: bool = False
    is_for_idle: bool = True
    """Whether it waits until no turn is under way."""


COMMANDS = {
    "help": Command("show the commands and keys", is_for_idle=False),
    "model": Command("show the model, or use another one from the next turn on", "[NAME]"),
    "diff": Command("show what the run changed in files", "[CALL]", needs_run=True, is_for_idle=False),
    "undo": Command(
        "undo what the last turn did to files, all that the run did, or everything since a call",
        "[all|CALL]",
        needs_run=True,
    ),
    "redo": Command("take the last undo back", needs_run=True),
    "fork": Command("try another way from a call, in a new directory", "[CALL [DIRECTORY]]", needs_run=True),
    "compact": Command("summarise the conversation now, to make room", needs_run=True),
    "context": Command("show what fills the model's context", is_for_idle=False),
    "resume": Command("continue another run", "[RUN]"),
    "new": Command("begin a new run, with an empty conversation"),
    "permissions": Command("show what may run without asking, or change it", "[auto|ask|read_only]"),
    "quit": Command("leave", is_for_idle=False),
}

PERMISSION_MODES = {
    "auto": "runs without asking",
    "ask": "asks before effects",
    "read_only": "changes nothing",
}
"""What each mode means to a person."""

KEYS = """
Enter sends; Esc Enter, or a backslash before Enter, begins a new line. A pasted text is one message.
@path puts a file or a picture into the message (Tab completes; @"a path" with blanks; \\@ is an at sign).
!command runs a command of your own, and shows it to the model with your next message.
Esc or Ctrl-C stops the turn. What you type meanwhile is queued for the next step; Up edits it.
Ctrl-C clears the line; twice at an empty line it leaves, as Ctrl-D does. Ctrl-R searches your history.
""".strip()


def is_command(line: str) -> bool:
    """Say whether a line is a command: a path such as /usr/bin is not."""
    return line.startswith("/") and "/" not in line.split(maxsplit=1)[0][1:]


class Slash:
    """Runs the commands of a chat."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    async def run(self, line: str) -> None:
        """Run a command. Raises the errors of the command line."""
        try:
            name, *words = shlex.split(line[1:])
        except ValueError as error:
            raise UsageError(f"{line}: {error}; close the quotes") from error
        command = COMMANDS.get("quit" if name == "exit" else name)
        if command is None:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean /{near[0]}? " if near else ""
            raise UsageError(
                f"there is no command /{name}; {hint}/help lists them. Begin with a blank to send it as text"
            )
        if command.is_for_idle and self._chat.is_at_work:
            raise UsageError(f"/{name} waits until the turn has ended; Esc stops it")
        if command.needs_run and self._chat.run.begun_id is None:
            raise UsageError(f"/{name} is about a run, and there is none yet; write what to do first")
        await getattr(self, f"_{'quit' if name == 'exit' else name}")(*self._checked(name, command, words))

    @staticmethod
    def _checked(name: str, command: Command, words: list[str]) -> list[str]:
        most = len(command.takes.split())
        if len(words) > most:
            raise UsageError(f"/{name} takes {command.takes or 'nothing'}, not {' '.join(words)!r}")
        return words

    def words(self, name: str, before: Sequence[str]) -> Iterable[tuple[str, str]]:
        """Return what may come next in a command, with notes, for completion."""
        try:
            return self._words(name.removeprefix("/"), len(before))
        except (TreenailError, OSError):
            return ()

    def _words(self, name: str, place: int) -> Iterable[tuple[str, str]]:
        chat = self._chat
        if place:
            return ()
        if name == "model":
            return [(each, "") for each in models.known_names()]
        if name == "permissions":
            return [(each, "") for each in ("auto", "ask", "read_only")]
        if name == "resume":
            return [
                (str(each.run_id)[:8], each.summary.task)
                for each in run_picker.known_runs(stores.existing(chat.run.store))
            ]
        if name in ("diff", "undo", "fork") and chat.run.run_id is not None:
            with opened_run(chat.run.store, chat.run.run_id) as session:
                calls = [(each.call_id, each.tool_name) for each in boundaries(session)][::-1]
            return [("all", "everything that the run did"), *calls] if name == "undo" else calls
        return ()

    # .. the commands ..

    async def _help(self) -> None:
        width = max(len(f"{name} {each.takes}") for name, each in COMMANDS.items()) + 1
        lines = [f"/{f'{name} {each.takes}':<{width}} {each.help}" for name, each in COMMANDS.items()]
        self._chat.say("\n".join([*lines, "", KEYS]))

    async def _quit(self) -> None:
        self._chat.quit()

    async def _model(self, name: str | None = None) -> None:
        chat = self._chat
        if name is None:
            chat.say(
                f"{chat.run.provider.model}; /model NAME uses another one, such as NAME or PROVIDER/NAME"
            )
            return
        chat.use(model=name)
        chat.say(f"{chat.run.provider.model} answers from the next turn on")

    async def _permissions(self, mode: str | None = None) -> None:
        chat = self._chat
        if mode is not None:
            settings.BY_NAME["permissions"].read("/permissions", mode)
            chat.use(permissions=mode)
        now = str(chat.run.settings["permissions"])
        rules = [f"{each.kind:<7} {each.text}  ({each.source})" for each in chat.run.settings.rules]
        chat.say("\n".join([f"permissions: {now}, {PERMISSION_MODES[now]}", *rules]))

    async def _diff(self, call: str | None = None) -> None:
        self._invoke("files:diff", self._named(), *(() if call is None else ("--call", call)))

    async def _undo(self, call: str | None = None) -> None:
        if call in (None, "all"):
            self._invoke("files:undo", self._named(), *(("--turn",) if call is None else ()))
        else:
            self._invoke("files:rollback", self._named(), "--call", call)

    async def _redo(self) -> None:
        self._invoke("files:redo", self._named())

    async def _fork(self, call: str | None = None, into: str | None = None) -> None:
        place = _place(into, self._chat.run.directory)
        wanted = () if call is None else ("--call", call)
        self._invoke("files:fork", str(place), "--run", self._named(), *wanted)
        self._chat.say("/resume continues there; this chat stays in its own run", style="dim")

    async def _compact(self) -> None:
        chat = self._chat
        assert chat.run.run_id is not None
        done = compact_run(chat.run.store, chat.run.run_id)
        chat.say(
            f"{done.source_event_count} messages and events are a summary now; the last "
            f"{done.tail_event_count} stay as they are"
        )
        await self._context()

    async def _context(self) -> None:
        chat = self._chat
        run = chat.run
        measure = partial(
            context_of,
            model=run.provider.model,
            instructions=run.agent.description,
            tools=tuple(run.agent.tool_registry().values()),
            project=read_project(run.directory, datetime.now(UTC)) if run.agent.reads_project else None,
        )
        if run.begun_id is None:
            found = measure(None)
        else:
            with opened_run(run.store, run.begun_id) as session:
                found = measure(session)
        lines = [f"{tokens:>9,}  {name}" for name, tokens in found.parts]
        of = "; the size of this model's context is not known"
        if found.window is not None and found.ratio is not None:
            of = f" of {found.window:,}, {found.ratio:.0%}"
        chat.say("\n".join([f"about {found.tokens:,} tokens{of}", *lines]))

    async def _new(self) -> None:
        self._chat.begin_anew()
        self._chat.say("a new run begins with your next message")

    async def _resume(self, name: str | None = None) -> None:
        chat = self._chat
        store = chat.run.store
        runs = run_picker.known_runs(stores.existing(store))
        if not runs:
            raise UsageError("there are no runs in this project yet; write what to do")
        if name is None:
            start = next((number for number, each in enumerate(runs) if each.waits), 0)
            async with chat.terminal():
                chosen = await choice("Which run?", run_picker.lines_of(runs), start=start).run_async()
            if chosen is None:
                return
            name = str(runs[chosen].run_id)
        chat.continue_run(str(find_run(store, name)))
        assert chat.run.run_id is not None
        chat.say_run()
        with opened_run(store, chat.run.run_id) as session:
            state = turn_state(session)
        if state is TurnState.COMPLETED:
            chat.say("\nyour next message follows up on it", style="dim")
        else:
            chat.start(None)

    # .. the command line's own ..

    def _named(self) -> str:
        return str(self._chat.run.begun_id)

    def _invoke(self, command_at: str, *words: str) -> None:
        """Run a command of the command line; what it asks, it asks at the terminal itself."""
        module, _, function = command_at.partition(":")
        command: click.Command = getattr(importlib.import_module(f"{__package__}.{module}"), function)
        run = self._chat.run
        # As it was given: a database's URL is shown without its password.
        place = str(run.store) if isinstance(run.store, Path) else run.settings.text("store")
        given = [*words, "--store", place or ""]
        try:
            if self._chat.is_at_work:
                command.main(given, prog_name=f"/{function}", standalone_mode=False)
            else:
                with plain_output():
                    command.main(given, prog_name=f"/{function}", standalone_mode=False)
        except click.Abort:
            self._chat.say("nothing was changed")
        except KeyboardInterrupt:
            self._chat.say(f"/{function} was stopped; /diff shows what stands")
        except click.ClickException as error:
            raise UsageError(error.format_message()) from error


@contextmanager
def plain_output() -> Iterator[None]:
    """Write to the terminal itself: the line is not shown, and somebody may ask something."""
    assert sys.__stdout__ is not None
    assert sys.__stderr__ is not None
    with redirect_stdout(guard(sys.__stdout__)), redirect_stderr(guard(sys.__stderr__)):
        yield


def _place(into: str | None, directory: Path) -> Path:
    """Return where a fork's files go: by default a directory beside this one that does not exist yet."""
    if into is not None:
        return directory / expanded(into)
    number = 1
    while (place := directory.with_name(f"{directory.name}-fork-{number}")).exists():
        number += 1
    return place
