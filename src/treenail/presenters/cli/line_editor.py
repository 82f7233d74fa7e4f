"""The line that a person types into: editing, history, paste, completion. Only the chat imports it.

Enter sends. A backslash before it, or Esc before it, begins a new line instead. A long paste is shown as
`[pasted 120 lines]` and sent whole. The history is one file for each project, which only its user can read.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from prompt_toolkit import PromptSession
from prompt_toolkit.application import in_terminal
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Always, Condition
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import create_output
from prompt_toolkit.styles import Style

from treenail.presenters.cli.attachments import at_path, project_paths, with_escapes

PROMPT = "> "
FOLD_LINES = 8
FOLD_CHARS = 1_000
"""A paste of so many lines or characters is folded."""

MAX_HISTORY_BYTES = 1_000_000
MAX_KEPT_CHARS = 20_000
MAX_PATHS = 20_000
"""How many files are looked at for a completion."""

_SHOWN_PATHS = 200
_KEPT_S = 5.0
"""How long a list of files is good for."""

_TYPING = re.compile(r'(?:^|(?<=[\s("\'\[{,;]))@(?:"([^"\n]*)|([^\s"]*))$')
"""A path that is being typed."""


@dataclass(slots=True)
class Pastes:
    """Long pastes, by what stands for them in the line."""

    folded: dict[str, str] = field(default_factory=dict)

    def fold(self, text: str) -> str:
        """Return what stands for a pasted text in the line: a long one is folded."""
        lines = text.count("\n") + 1
        if lines < FOLD_LINES and len(text) < FOLD_CHARS:
            return text
        size = f"{lines} lines" if lines > 1 else f"{len(text)} characters"
        name, number = f"[pasted {size}]", 1
        while self.folded.get(name, text) != text:
            number += 1
            name = f"[pasted {size}, {number}]"
        self.folded[name] = text
        return name

    def unfold(self, line: str) -> str:
        """Return a line with its pastes in full; sent again, they name no files and run nothing."""
        whole = ""
        for text, is_pasted in self.pieces(line):
            whole += with_escapes(text, None, is_first=not whole.strip()) if is_pasted else text
        return whole

    def pieces(self, line: str) -> list[tuple[str, bool]]:
        """Take a line apart: each piece, and whether it was pasted."""
        if not self.folded:
            return [(line, False)]
        names = re.compile("(" + "|".join(map(re.escape, self.folded)) + ")")
        return [(self.folded.get(each, each), each in self.folded) for each in names.split(line) if each]


class ProjectHistory(FileHistory):
    """What was typed in one project, in a file that only its user can read.

    A line that begins with a blank is not kept.
    """

    def __init__(self, file: Path, pastes: Pastes) -> None:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        if file.stat().st_size > MAX_HISTORY_BYTES:
            _drop_older_half(file)
        super().__init__(str(file))
        self._pastes = pastes

    def append_string(self, string: str) -> None:
        """Keep what was typed, with its pastes unless they are very long."""
        if not string.strip() or string.startswith(" "):
            return
        whole = self._pastes.unfold(string)
        super().append_string(whole if len(whole) <= MAX_KEPT_CHARS else string)

    def store_string(self, string: str) -> None:
        """Write to the file; a full disk does not end a chat."""
        try:
            super().store_string(string)
        except OSError:
            pass


def _drop_older_half(file: Path) -> None:
    kept = file.read_bytes()[-MAX_HISTORY_BYTES // 2 :]
    begin = kept.find(b"\n# ")  # Each entry begins with the time, as a comment.
    beside = file.with_suffix(".new")
    beside.write_bytes(kept[begin + 1 :])
    beside.chmod(0o600)
    beside.replace(file)


Words = Callable[[str, Sequence[str]], Iterable[tuple[str, str]]]
"""Returns the words that may come next in a command, each with a note: the command's name, and the words
before."""


class LineCompleter(Completer):
    """Completes commands with their arguments, and paths behind an at sign."""

    def __init__(
        self, directory: Callable[[], Path], commands: Iterable[tuple[str, str]], words: Words
    ) -> None:
        self._directory, self._commands, self._words = directory, list(commands), words
        self._paths: list[str] = []
        self._read_at: tuple[Path, float] | None = None

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Yield what the word at the cursor may become."""
        before = document.text_before_cursor
        naming = _TYPING.search(before)
        if naming is not None:
            begun = naming[1] if naming[1] is not None else naming[2]
            yield from self._named(begun, len(before) - naming.start())
        elif before.startswith("/") and "\n" not in before:
            *earlier, word = before.split(" ")
            known = self._words(earlier[0], earlier[1:]) if earlier else self._commands
            for text, note in known:
                if text.startswith(word):
                    yield Completion(text, -len(word), display_meta=note)

    def _named(self, begun: str, length: int) -> Iterable[Completion]:
        wanted = begun.lower()
        paths = self._all_paths()
        found = [each for each in paths if each.lower().startswith(wanted)]
        found = found or [each for each in paths if wanted in each.lower()]
        for path in found[:_SHOWN_PATHS]:
            yield Completion(at_path(path), -length, display=path)

    def _all_paths(self) -> list[str]:
        """Return the project's files, without what its ignore files leave out."""
        directory, now = self._directory(), monotonic()
        if self._read_at is None or self._read_at[0] != directory or now - self._read_at[1] > _KEPT_S:
            self._paths = sorted(
                project_paths(directory, MAX_PATHS), key=lambda each: (each.count("/"), each)
            )
            self._read_at = (directory, now)
        return self._paths


@dataclass(slots=True)
class Handlers:
    """What the chat does with the keys that are not about the line."""

    interrupt: Callable[[bool], bool]
    """Ctrl-C (true) or Esc (false): returns whether there was something to stop."""
    leave: Callable[[], None]
    """Ctrl-C at an empty line."""
    take_queued: Callable[[], str | None]
    """Up at an empty line: the newest message that waits, which is then edited."""
    above: Callable[[], str]
    """What stands above the line, with the terminal's colours."""
    below: Callable[[], str]
    """What stands below the line."""


class LineEditor:
    """Reads messages at a terminal, while others are printed above."""

    def __init__(
        self,
        handlers: Handlers,
        completer: Completer,
        *,
        history: Path,
        directory: Callable[[], Path],
    ) -> None:
        self.pastes = Pastes()
        self._handlers, self._directory = handlers, directory
        self._output = create_output(sys.stdout)
        self._session: PromptSession[str] = PromptSession(
            self._message,
            multiline=True,
            prompt_continuation="  ",
            completer=completer,
            complete_while_typing=False,
            complete_in_thread=True,
            history=ProjectHistory(history, self.pastes),
            key_bindings=self._keys(),
            bottom_toolbar=lambda: ANSI(handlers.below()) if handlers.below() else None,
            style=Style.from_dict({"bottom-toolbar": "noreverse dim"}),
            reserve_space_for_menu=6,
            enable_suspend=True,
            enable_open_in_editor=True,
            erase_when_done=True,
            output=self._output,
        )
        # What stands below the line follows it, and is not at the bottom of the window.
        self._session.app.layout.current_window.dont_extend_height = Always()
        # Esc alone is a key here: it must not wait long for what could follow it.
        self._session.app.ttimeoutlen = 0.05
        self._session.app.timeoutlen = 0.3

    async def read(self, default: str = "") -> str:
        """Read a message. Raises `EOFError` for Ctrl-D at an empty line."""
        return await self._session.prompt_async(default=default, set_exception_handler=False)

    @property
    def is_reading(self) -> bool:
        """Whether the line is shown now."""
        return self._session.app.is_running

    @property
    def typed(self) -> str:
        """What stands in the line now."""
        return self._session.default_buffer.text if self.is_reading else ""

    def redraw(self) -> None:
        """Draw what stands above and below the line anew. Any thread may call it."""
        self._session.app.invalidate()

    def put(self, text: str) -> None:
        """Put a text into the line, before what is there."""
        buffer = self._session.default_buffer
        rest = buffer.text
        buffer.document = Document(f"{text}\n{rest}" if rest else text)

    def paused(self) -> object:
        """Leave the terminal to something else for a while: an async context manager."""
        return in_terminal()

    def print(self, text: str) -> None:
        """Write to the terminal itself."""
        self._output.write_raw(text.replace("\r\n", "\n").replace("\n", "\r\n"))
        self._output.flush()

    def _message(self) -> ANSI:
        above = self._handlers.above()
        return ANSI(f"\n{above}\n{PROMPT}" if above else f"\n{PROMPT}")

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter")
        def _(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if buffer.complete_state is not None and buffer.complete_state.current_completion is not None:
                buffer.complete_state = None
            elif buffer.document.char_before_cursor == "\\":
                buffer.delete_before_cursor()
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add(Keys.BracketedPaste)
        def _(event: KeyPressEvent) -> None:
            text = event.data.replace("\r\n", "\n").replace("\r", "\n")
            shown = self.pastes.fold(text)
            if shown == text:
                is_first = not event.current_buffer.document.text_before_cursor.strip()
                shown = with_escapes(text, self._directory(), is_first=is_first)
            event.current_buffer.insert_text(shown)

        @keys.add("c-c")
        @keys.add("<sigint>")
        def _(event: KeyPressEvent) -> None:
            if self._handlers.interrupt(True):
                return
            if event.current_buffer.text:
                event.current_buffer.reset()
            else:
                self._handlers.leave()

        @keys.add("escape")
        def _(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if buffer.complete_state is not None:
                buffer.cancel_completion()
            else:
                self._handlers.interrupt(False)

        @keys.add("up", filter=Condition(lambda: not self._session.default_buffer.text))
        def _(event: KeyPressEvent) -> None:
            queued = self._handlers.take_queued()
            if queued is None:
                event.current_buffer.auto_up()
            else:
                event.current_buffer.document = Document(queued)

        return keys

    def leave(self) -> None:
        """End `read` as Ctrl-D does."""
        if self._session.app.is_running:
            self._session.app.exit(exception=EOFError, style="class:aborting")
