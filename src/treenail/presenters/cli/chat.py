"""The chat: a line to type into, an agent at work above it, and commands that begin with a slash.

Theory of operation
-------------------
The main thread runs an event loop with the line; a turn runs in a thread of its own, and its screen prints
above the line. Whatever is written to the terminal meanwhile goes through `AboveLine`, which the event loop
alone empties, so that nothing is written into the line. A question takes the terminal for itself: the line is
removed until it is answered.

What is typed while a turn is under way waits in a queue. The turn takes it before its next request; what is
left when it ends becomes the next turn, or goes back into the line if the turn did not end well.

Ctrl-C and Esc stop what is under way, by the turn's token, so that its ending is in the log. A tool that does
not heed that is waited for; one more Ctrl-C then leaves at once, and whoever opens the run next undoes what
the tool had done.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
import termios
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from rich.console import Console
from rich.text import Text

from treenail.containment import CancellationToken
from treenail.conversation import ImagePart
from treenail.errors import TreenailError
from treenail.history import LiveView, opened_run, project, short
from treenail.presenters.cli import models, stores
from treenail.presenters.cli.attachments import Message, compose
from treenail.presenters.cli.footer import idle_footer
from treenail.presenters.cli.line_editor import Handlers, LineCompleter, LineEditor
from treenail.presenters.cli.live_area import Area, rendered
from treenail.presenters.cli.markdown import MarkdownStream
from treenail.presenters.cli.output import guard, with_colours
from treenail.presenters.cli.person_command import PersonCommand
from treenail.presenters.cli.run import TerminalRun
from treenail.presenters.cli.screen import Screen
from treenail.presenters.cli.slash_commands import COMMANDS, PERMISSION_MODES, Slash, is_command, plain_output
from treenail.presenters.cli.terminal_screen import TerminalScreen
from treenail.printable import printable
from treenail.providers import check_takes_images
from treenail.turns import FollowUp

HISTORY_NAME = "typed"
"""The name of the file beside a project's store that keeps what was typed there."""

_AGAIN_S = 3.0
"""How soon a second Ctrl-C at an empty line has to come to leave."""

_STUBBORN_S = 1.0
"""How long a turn has to end before another Ctrl-C leaves at once."""

_SHOWN_TASK_CHARS = 300
"""How much is shown of the message that a continued run was last sent."""

_LOOK_S = 0.5
"""How often what is under way is drawn anew."""


class AboveLine(io.TextIOBase):
    """An output that appears above the line. Any thread may write; the event loop prints."""

    def __init__(self, chat: Chat, terminal: Any) -> None:
        self._chat, self._terminal = chat, terminal
        self._lock = threading.Lock()
        self._waiting: list[str] = []
        self._is_called = False

    @property
    def encoding(self) -> str:  # type: ignore[override]  # the base class has a plain attribute
        """The terminal's encoding."""
        return str(self._terminal.encoding)

    def isatty(self) -> bool:
        """Say that it is a terminal: it leads to one."""
        return True

    def writable(self) -> bool:
        """Say that it can be written to."""
        return True

    def fileno(self) -> int:
        """Return the terminal's own descriptor, for whoever asks for its size."""
        return int(self._terminal.fileno())

    def write(self, text: str) -> int:
        """Print a text soon."""
        with self._lock:
            self._waiting.append(text)
            is_called, self._is_called = self._is_called, True
        if not is_called:
            self._chat.soon(self.empty())
        return len(text)

    async def empty(self) -> None:
        """Print what waits, up to the last whole line; the line is drawn again below it."""
        with self._lock:
            self._is_called = False
        async with self._chat.terminal():
            with self._lock:
                text, self._waiting = "".join(self._waiting), []
                whole, newline, rest = text.rpartition("\n")
                if rest:
                    self._waiting.insert(0, rest)
            if newline:
                self._terminal.write(whole + newline)
                self._terminal.flush()


class ChatArea(Area):
    """Shows a run above the line. What is under way is drawn by a thread, which may wait for the screen."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._wake, self._is_over = threading.Event(), threading.Event()
        self.screen: TerminalScreen | None = None
        threading.Thread(target=self._run, name="treenail-area", daemon=True).start()

    def above(self, lines: Sequence[str]) -> None:
        """Print lines for good."""
        self._chat.out.write("".join(f"{each}\n" for each in lines))

    def changed(self) -> None:
        """Draw what is under way anew, soon."""
        self._wake.set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Remove the line, and leave the terminal to a question."""
        chat = self._chat
        chat.called(chat.pause())
        try:
            yield
        finally:
            chat.called(chat.proceed())

    def typed(self) -> str | None:
        """Return what stands in the line."""
        return self._chat.editor.typed

    def close(self) -> None:
        """Show nothing more."""
        self._is_over.set()
        self._wake.set()

    def _run(self) -> None:
        while not self._is_over.is_set():
            self._wake.wait(_LOOK_S)
            self._wake.clear()
            if self.screen is not None and not self._is_over.is_set():
                width, height = os.get_terminal_size()
                under_way = self.screen.under_way(width - 1, max(height - 8, 3))
                self._chat.shown_above, self._chat.shown_below = under_way, self.screen.footer(width - 13)
                self._chat.last_view = self.screen.view
                self._chat.editor.redraw()
            self._is_over.wait(0.1)
        self._chat.shown_above, self._chat.shown_below = (), ""


class ChatRun(TerminalRun):
    """Runs the turns of a chat: what they show stands above the line."""

    chat: Chat

    def screen(self) -> Screen:
        """Make the screen of a turn."""
        area = ChatArea(self.chat)
        console = Console(file=self.chat.terminal_file)
        area.screen = TerminalScreen(console, asks=True, area=area, always=self, is_first=False)
        return area.screen


@dataclass(slots=True)
class Queued:
    """A message that waits for the turn under way."""

    typed: str
    """As it stood in the line, to be edited."""
    message: Message
    """What is sent, without `told`."""
    told: list[str]
    """What the person's own commands said before it was typed."""
    images: tuple[ImagePart, ...]
    """The pictures that go along with it and are not named in it."""

    def whole(self) -> Message:
        """Return all that is sent."""
        return Message("\n\n".join([self.message.text, *self.told]), self.message.images)


@dataclass(slots=True)
class TurnUnderWay:
    """A turn in its thread."""

    token: CancellationToken = field(default_factory=CancellationToken)
    stopped_at: float | None = None
    """When the person wanted it to stop."""


class Chat:
    """Talks with a person at a terminal."""

    def __init__(
        self, run: ChatRun, *, flags: dict[str, object | None], images: Sequence[ImagePart] = ()
    ) -> None:
        self.run, self.flags = run, flags
        run.chat = self
        self.images = tuple(images)
        """Pictures that go along with the first message."""
        self.code = 0
        self.shown_above: Sequence[str] = ()
        self.shown_below = ""
        self.last_view: LiveView | None = None
        """What the run had used when it was last looked at."""
        self.terminal_file = with_colours(sys.stdout)
        self.out = AboveLine(self, self.terminal_file)
        self.slash = Slash(self)
        self._queue: list[Queued] = []
        self._queue_lock = threading.Lock()
        self._turn: TurnUnderWay | None = None
        self._own: PersonCommand | None = None
        self._told: list[str] = []
        """What the person's own commands said, for the model's next message."""
        self._note, self._note_until = "", 0.0
        self._leave_at = 0.0
        self._default = ""
        self._is_leaving = self._is_terminated = False
        self._busy: asyncio.Lock
        self._idle: asyncio.Event
        self._pausing: _Taken
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.get_ident()
        handlers = Handlers(self._interrupt, self._leave, self._take_queued, self._above, self._below)
        words = [(f"/{name}", each.help) for name, each in COMMANDS.items()]
        self.editor = LineEditor(
            handlers,
            LineCompleter(lambda: self.run.directory, words, self.slash.words),
            history=stores.own_directory(run.directory, os.environ) / HISTORY_NAME,
            directory=lambda: self.run.directory,
        )

    # .. the loop ..

    def talk(self) -> int:
        """Talk until the person leaves. Returns the exit code of the last turn."""
        self._loop = asyncio.new_event_loop()
        before = termios.tcgetattr(0)
        try:
            # Not `asyncio.run`: it would take Ctrl-C away from a command that asks something.
            with redirect_stdout(guard(self.out)), redirect_stderr(guard(self.out)):
                self._loop.run_until_complete(self._talk())
        except KeyboardInterrupt:
            self._leave_at_once(before)
        finally:
            self._loop.close()
        return 128 + signal.SIGTERM if self._is_terminated else self.code

    async def _talk(self) -> None:
        self._busy, self._idle = asyncio.Lock(), asyncio.Event()
        self._idle.set()
        self._loop.add_signal_handler(signal.SIGTERM, self._terminate)
        self._welcome()
        while not self._is_leaving:
            async with self._busy:
                pass  # A question or a list has the terminal.
            default, self._default = self._default, ""
            try:
                typed = await self.editor.read(default)
            except EOFError:
                break
            try:
                await self._take(typed)
            except TreenailError as error:
                self.say(str(error), style="red")
            except (OSError, RuntimeError) as error:  # It ends the command, not the chat or its turn.
                self.say(f"{typed.strip()}: {error}; the chat continues", style="red")
        self._is_leaving = True
        await self._stop_everything()
        await self.out.empty()

    def _welcome(self) -> None:
        """Say where the agent works, and what a run that is continued was about."""
        self.say(f"in {self.run.directory}", style="dim")
        if self.run.run_id is not None:
            self.say_run()

    def say_run(self) -> None:
        """Say which run continues, and show its last turn: the person's message and the answer."""
        assert self.run.run_id is not None
        with opened_run(self.run.store, self.run.run_id) as session:
            turns = project(session).turns
        if not turns:
            return
        last = turns[-1]
        self.say(
            f"run {str(self.run.run_id)[:8]} continues; its last turn is {last.state.value}", style="dim"
        )
        self.echo(short(last.task, _SHOWN_TASK_CHARS))
        if last.answer is not None:
            console = Console(file=self.terminal_file)
            lines = MarkdownStream().lines(console, console.width - 1, last.answer)
            self.out.write("".join(f"{each}\n" for each in ("", *lines)))

    async def _stop_everything(self) -> None:
        if self._own is not None:
            self._own.stop()
            self._loop.call_later(_STUBBORN_S, self._own.stop)  # It may ignore the first one.
        if self._turn is not None:
            self._stop_turn(self._turn)
            self.say("the turn is being stopped; Ctrl-C leaves at once")
        await self._idle.wait()

    async def _take(self, typed: str) -> None:
        """Do what a line says."""
        line = typed.strip()
        if not line:
            return
        self._leave_at = 0.0
        if line.startswith("!"):
            self.echo(typed)
            await self._run_own(line[1:].strip())
        elif is_command(line) and not typed.startswith(" "):
            self.echo(typed)
            await self.out.empty()
            await self.slash.run(line)
        else:
            self._send(typed)

    def _send(self, typed: str) -> None:
        """Send a message, or queue it while something is under way. A message that cannot be sent stays."""
        try:
            message = compose(self.editor.pastes.pieces(typed), self.run.directory, images=self.images)
            if message.images:
                check_takes_images(self.run.provider)
        except TreenailError as error:
            self._default = typed
            self.say(str(error), style="red")
            return
        queued = Queued(typed, message, self._told, self.images)
        self._told, self.images = [], ()
        if self._turn is None and self._own is None:
            self.echo(typed)
            self.start(queued.whole())
            return
        with self._queue_lock:
            self._queue.append(queued)

    # .. turns ..

    @property
    def is_at_work(self) -> bool:
        """Whether a turn is under way."""
        return self._turn is not None

    def start(self, message: Message | None) -> None:
        """Begin a turn in a thread of its own; without a message, resume the run's last one."""
        self._turn = turn = TurnUnderWay()
        self._idle.clear()

        def work() -> None:
            code, problem = 1, ""
            try:
                task, images = (None, ()) if message is None else (message.text, message.images)
                code = self.run.turn(task, images, cancellation=turn.token, inbox=self._inbox)
            except TreenailError as error:
                problem = str(error)
            except BaseException as error:  # noqa: BLE001  # a thread's error must not be lost
                problem = f"{type(error).__name__}: {error}"
            with suppress(RuntimeError):  # The loop is gone: the person has left.
                self._loop.call_soon_threadsafe(self._ended, code, problem)

        threading.Thread(target=work, name="treenail-turn", daemon=True).start()
        self.editor.redraw()

    def _inbox(self) -> Sequence[FollowUp]:
        """Hand over what waits: the turn is about to ask the model."""
        with self._queue_lock:
            taken, self._queue = self._queue, []
        for each in taken:
            self.echo(each.typed)
        return [FollowUp(message.text, message.images) for message in map(Queued.whole, taken)]

    def _ended(self, code: int, problem: str) -> None:
        self._turn, self._note = None, ""
        self.code = code
        if problem:
            self.say(problem, style="red")
        self._next(is_good=code == 0)

    def _next(self, *, is_good: bool) -> None:
        """Begin the next turn with what waits; it goes back into the line after a bad ending."""
        if self._turn is not None or self._own is not None:
            return
        with self._queue_lock:
            waiting, self._queue = self._queue, []
        if waiting and is_good and not self._is_leaving:
            first, *rest = waiting
            with self._queue_lock:
                self._queue = rest
            self.echo(first.typed)
            self.start(first.whole())
            return
        if waiting:
            self._take_back(*waiting)
            text = "\n".join(each.typed for each in waiting)
            if self.editor.is_reading:
                self.editor.put(text)
            else:
                self._default = text
        self._idle.set()
        self.editor.redraw()

    # .. other runs and other settings ..

    def use(self, **changes: object) -> None:
        """Use other settings from the next turn on. Raises `UsageError`, and changes nothing."""
        flags = {**self.flags, **changes}
        now = {name: str(self.flags[name]) for name in ("model", "base_url") if self.flags.get(name)}
        if "model" in changes and not models.same_provider(str(changes["model"]), now):
            flags |= {"base_url": None, "api": None}  # They were the other provider's.
        self._remake(flags, None if self.run.run_id is None else str(self.run.run_id))

    def continue_run(self, run: str) -> None:
        """Continue another run, with its own settings where the flags of this chat say nothing."""
        self._remake(self.flags, run)

    def begin_anew(self) -> None:
        """Begin a new run with the next message."""
        self._remake(self.flags, None)

    def _remake(self, flags: dict[str, object | None], run: str | None) -> None:
        with plain_output():  # It may ask something.
            made = ChatRun(flags, directory=self.run.directory, run=run, is_chat=True)
        made.chat = self
        if run is None or made.run_id != self.run.run_id:
            self.last_view = None
        self.run, self.flags = made, flags

    # .. the person's own commands ..

    async def _run_own(self, command: str) -> None:
        if not command:
            self.say("write a command behind the !, such as !git status")
            return
        if self._own is not None:
            self.say("one command of yours runs already; Ctrl-C stops it")
            return
        self._own = PersonCommand(command, self.run.directory)
        self._idle.clear()
        task = self._loop.create_task(self._own_to_its_end(self._own))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _own_to_its_end(self, own: PersonCommand) -> None:
        try:
            told = await own.run(self.out.write)
        except OSError as error:
            self.say(f"{own.command}: {error.strerror}", style="red")
        else:
            self._told.append(told)
            self.say("\nthe model is shown this with your next message", style="dim")
        finally:
            self._own = None
            if self._turn is None:
                with self._queue_lock:
                    for each in self._queue[:1]:
                        # It was typed while the command ran, so it carries the command's output.
                        each.told, self._told = [*each.told, *self._told], []
                self._next(is_good=True)

    # .. keys ..

    def _interrupt(self, is_ctrl_c: bool) -> bool:
        """Stop what is under way. Returns whether there was something."""
        if self._own is not None:
            self._own.stop()
            return True
        turn = self._turn
        if turn is None:
            return False
        if turn.stopped_at is None:
            self._stop_turn(turn)
            self._say_below("stopping; if that takes too long, Ctrl-C again leaves at once", 60.0)
        elif is_ctrl_c and monotonic() - turn.stopped_at >= _STUBBORN_S:
            raise KeyboardInterrupt
        return True

    @staticmethod
    def _stop_turn(turn: TurnUnderWay) -> None:
        turn.stopped_at = turn.stopped_at or monotonic()
        turn.token.cancel("interrupt")

    def _leave(self) -> None:
        """Leave at the second Ctrl-C in a row."""
        if monotonic() < self._leave_at:
            self.editor.leave()
        else:
            self._leave_at = monotonic() + _AGAIN_S
            self._say_below("Ctrl-C again leaves", _AGAIN_S)

    def quit(self) -> None:
        """Leave; a turn under way is stopped first."""
        self._is_leaving = True

    def _terminate(self) -> None:
        """End in good order, because the process was told to."""
        self._is_leaving = self._is_terminated = True
        if self._turn is not None:
            self._turn.stopped_at = monotonic()
            self._turn.token.cancel("terminated")
        self.editor.leave()

    def _leave_at_once(self, terminal: list[Any]) -> None:
        """End the process without waiting: what a tool has done until now is undone by the next command."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with suppress(termios.error, OSError):
            termios.tcsetattr(0, termios.TCSANOW, terminal)
            sys.__stdout__.write("\x1b[?2004l\x1b[?25h\n")  # type: ignore[union-attr]  # there is a terminal
            if self._turn is not None:
                name = "" if self.run.run_id is None else f" {str(self.run.run_id)[:8]}"
                sys.__stdout__.write(f"left in the middle; continue with: treenail resume{name}\n")  # type: ignore[union-attr]
            sys.__stdout__.flush()  # type: ignore[union-attr]
        if self._own is not None:
            self._own.stop()
            self._own.stop()
        os._exit(130)

    def _take_queued(self) -> str | None:
        with self._queue_lock:
            if not self._queue:
                return None
            queued = self._queue.pop()
        self._take_back(queued)
        return queued.typed

    def _take_back(self, *queued: Queued) -> None:
        """Keep what messages carry that go back into the line: the next message carries it."""
        self._told = [*(told for each in queued for told in each.told), *self._told]
        self.images = (*(image for each in queued for image in each.images), *self.images)

    # .. what is shown ..

    def echo(self, typed: str) -> None:
        """Show what was sent, as it stood in the line, below an empty line."""
        lines = printable(typed.strip()).split("\n")
        self.say("\n".join(["", f"> {lines[0]}", *(f"  {each}" for each in lines[1:])]), style="bold")

    def say(self, text: str, *, style: str = "") -> None:
        """Print a text above the line."""
        console = Console(file=self.terminal_file)
        with console.capture() as captured:
            console.print(Text(printable(text), style=style), highlight=False)
        self.out.write(captured.get())

    def _say_below(self, text: str, seconds: float) -> None:
        self._note, self._note_until = text, monotonic() + seconds
        self.editor.redraw()
        self._loop.call_later(seconds, self.editor.redraw)

    def _above(self) -> str:
        width = os.get_terminal_size().columns
        console = Console(file=self.terminal_file, width=width)
        with self._queue_lock:
            queued = [each.typed for each in self._queue]
        notes = [f"queued: {short(printable(each), max(width - 24, 10))}" for each in queued]
        if notes:
            notes[-1] += "  (Up edits it)"
        lines = list(self.shown_above)
        for each in notes:
            lines += rendered(console, Text(each, style="dim"), width - 1)
        return "\n".join(lines)

    def _below(self) -> str:
        note = self._note if monotonic() < self._note_until and (self._turn or self._leave_at) else ""
        if note:
            return note
        if self._turn is not None:
            return f"{self.shown_below or 'starting'} · Esc stops"
        asks = PERMISSION_MODES[str(self.run.settings["permissions"])]
        return idle_footer(self.run.provider.model, asks, self.last_view, os.get_terminal_size().columns - 1)

    # .. the terminal ..

    def soon(self, work: Coroutine[Any, Any, Any]) -> None:
        """Have the event loop do something. Any thread may call it."""

        def begin() -> None:
            task = self._loop.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        try:
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError:
            work.close()  # The loop is closed: the person has left.

    def called(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Have the event loop do something, and wait for it; not in the loop's own thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def terminal(self) -> Any:
        """Take the terminal: an async context manager, during which the line is not shown."""
        return _Taken(self)

    async def pause(self) -> None:
        """Take the terminal until `proceed`."""
        self._pausing = _Taken(self)
        await self._pausing.__aenter__()

    async def proceed(self) -> None:
        """Give the terminal back."""
        await self._pausing.__aexit__(None, None, None)


class _Taken:
    """The terminal without the line, one at a time."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._line: Any = None

    async def __aenter__(self) -> None:
        await self._chat._busy.acquire()
        if self._chat.editor.is_reading:
            self._line = self._chat.editor.paused()
            await self._line.__aenter__()

    async def __aexit__(self, *_: object) -> None:
        try:
            if self._line is not None:
                await self._line.__aexit__(None, None, None)
        finally:
            self._chat._busy.release()
