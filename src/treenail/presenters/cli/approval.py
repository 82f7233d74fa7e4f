"""The question before an effect: what is asked, how it is drawn, and what a person answers.

A `Question` is plain data: the whole command or the diff, never a part of it. `ask_at_terminal` shows all of
it, a screenful at a time, before it takes a yes. It reads single keys (`keys.py`), with the terminal's own
signals turned off: Ctrl-C is a no.

A person who was typing confirms a yes with Enter, and "always", which outlives the question, is always
confirmed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol

from rich.console import Console
from rich.text import Text

from treenail.presenters.cli.console import drawn_diff
from treenail.presenters.cli.footer import lines_text
from treenail.presenters.cli.keys import CTRL_C, ENTER, ESCAPE, Keys, say
from treenail.printable import printable, printable_line
from treenail.tools import ASK_PERSON, PermissionRequest
from treenail.workspace import changed_lines

_EDITED_FIELD = {"run_command": "command", "write_file": "content", "edit_file": "new_text"}
"""What `e` edits of a tool's arguments; of other tools all of them, as JSON."""

_LEFT_OUT = re.compile(r"^(Large|Binary) file |^\.\.\. and ", re.MULTILINE)
"""What a diff says where it does not show everything."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a person is asked before a call with effects."""

    call_id: str
    tool: str
    arguments: str
    """JSON text, as the call would run with it."""
    command: str | None = None
    """The whole command, for a tool that runs one."""
    directory: str = ""
    diff: str | None = None
    """What would change in the files, as a unified diff; None if that cannot be known before."""
    rule: str = ""
    """What "always" would allow from now on; empty if it cannot be offered."""
    is_edited: bool = False
    """Whether the person has changed the arguments already."""
    has_hooks: bool = False
    """Whether hooks run around the call, whose changes are not in the diff."""

    @property
    def title(self) -> str:
        """One line: the tool, and what it is about."""
        about = printable_line(str(_fields(self.arguments).get("path", "")))
        if self.diff:
            about = f"{about} {lines_text(*changed_lines(self.diff))}"
        return f"{printable_line(self.tool)} {about}".strip()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a person answers."""

    kind: Literal["yes", "no", "always", "edited"]
    reason: str = ""
    """With a no: what the model is told."""
    arguments: str = ""
    """With `edited`: the JSON text that the call runs with."""


class Asker(Protocol):
    """Asks a person; None if nobody answers: then the call waits durably."""

    def __call__(self, question: Question, request: PermissionRequest) -> Answer | None:
        """Ask, and return the answer."""
        ...


def question_for(request: PermissionRequest, *, rule: str = "", arguments: str | None = None) -> Question:
    """Make the question for a call; `arguments` are those that a person has changed it to."""
    text = request.arguments if arguments is None else arguments
    fields = _fields(text)
    command = fields.get("command")
    preview = request.preview(text)
    return Question(
        call_id=request.call_id,
        tool=request.tool_name,
        arguments=text,
        command=command if isinstance(command, str) else None,
        directory=str(fields.get("directory", "")),
        diff=None if preview is None else preview.text,
        rule=rule,
        is_edited=arguments is not None,
        has_hooks=request.tool is not None and request.tool.wraps is not None,
    )


def drawn(question: Question) -> Text:
    """Draw all of what is asked, in colours."""
    shown = Text()
    shown.append(f"? {question.title}\n", style="bold yellow")
    if question.is_edited:
        shown.append("  with your changes\n", style="yellow")
    if question.command is not None:
        for number, line in enumerate(printable(question.command).split("\n")):
            shown.append("  $ " if number == 0 else "    ", style="dim")
            shown.append(f"{line}\n", style="bold")
        if question.directory not in ("", "."):
            shown.append(f"  in {printable_line(question.directory)}\n", style="dim")
        others = {
            name: value
            for name, value in _fields(question.arguments).items()
            if name not in ("command", "directory") and value is not None
        }
        if others:
            shown.append(_indented(json.dumps(others, ensure_ascii=False)), style="dim")
    elif question.diff and not _LEFT_OUT.search(question.diff):
        shown.append_text(drawn_diff(question.diff, indent="  "))
    else:
        shown.append(_indented(_pretty(question.arguments)))
        if question.diff == "":
            shown.append("  it would change no file\n", style="dim")
    if question.has_hooks:
        shown.append("  hooks run with this call, and may change more\n", style="dim")
    return shown


def keys_line(question: Question) -> str:
    """Write the keys that answer a question."""
    keys = ["[y]es", "[n]o, say why"]
    if question.diff:
        keys.append("[d]iff")
    keys.append("[e]dit")
    if question.rule and not question.is_edited:
        keys.append(f"[a]lways: {printable_line(question.rule)}")
    return "  ".join(keys)


def ask_at_terminal(
    question: Question,
    request: PermissionRequest,
    *,
    console: Console,
    keys: Keys | None = None,
) -> Answer | None:
    """Show all of a question, and read the answer; None if the terminal is gone or the turn was stopped."""
    keys = keys or Keys()
    try:
        with keys.raw():
            return _ask(question, request, console, keys)
    except EOFError:
        return None


def _ask(question: Question, request: PermissionRequest, console: Console, keys: Keys) -> Answer | None:
    if question.tool == ASK_PERSON:
        return _ask_in_words(question, console, keys)
    said = _shown_in_pages(drawn(question), console, keys)
    while True:
        if said is None:
            said = keys.settled(console)
        if said is None:
            say(console, f"  {keys_line(question)} ")
            said = keys.answer().lower()
        pressed, said = said, None
        is_always = pressed == "a" and question.rule != "" and not question.is_edited
        if is_always or (keys.is_typing and pressed in ("y", "e")):
            meant = (
                f"always {printable_line(question.rule)}" if is_always else {"y": "yes", "e": "edit"}[pressed]
            )
            say(console, f"{meant}? Enter confirms ")
            confirmed = keys.key()
            if confirmed not in (ENTER, "\n"):
                say(console, "\n")
                said = confirmed if confirmed in (CTRL_C, ESCAPE) else None
                continue
        if pressed == "y":
            say(console, "yes\n")
            return Answer("edited", arguments=question.arguments) if question.is_edited else Answer("yes")
        if pressed in ("n", CTRL_C, ESCAPE):
            say(console, "no\n")
            if pressed != "n":
                return Answer("no")
            say(console, "  why? (the model is told; Enter for no reason) ")
            return Answer("no", reason=keys.line(console))
        say(console, "\n")
        if is_always:
            return Answer("always")
        if pressed == "d" and question.diff:
            said = _shown_in_pages(drawn_diff(question.diff, indent="  "), console, None)
        elif pressed == "e":
            question = _edited(question, request, console, keys)
            said = _shown_in_pages(drawn(question), console, keys)
        elif pressed:
            keys.is_typing = True


def _ask_in_words(question: Question, console: Console, keys: Keys) -> Answer:
    """Show a model's question, and read the answer; an empty line is a no."""
    fields = _fields(question.arguments)
    shown = Text()
    for number, line in enumerate(printable(str(fields.get("question", ""))).split("\n")):
        shown.append(f"{'  ' if number else '? '}{line}\n", style="bold yellow")
    options = fields.get("options")
    for number, each in enumerate(options if isinstance(options, list) else (), start=1):
        shown.append(f"  {number}. {printable_line(str(each))}\n")
    said = ""
    if _shown_in_pages(shown, console, keys) is None and keys.settled(console) is None:
        say(console, "  your answer (a number chooses; Enter for none): ")
        said = keys.line(console)
    return Answer("yes", reason=said) if said else Answer("no")


def _shown_in_pages(shown: Text, console: Console, keys: Keys | None) -> str | None:
    """Print everything, a screenful at a time; returns the key if a person said no before the end."""
    lines = console.render_lines(shown, pad=False)
    height = max(console.height - 3, 3)
    for start in range(0, len(lines), height):
        for line in lines[start : start + height]:
            console.print(Text.assemble(*((each.text, each.style or "") for each in line)), soft_wrap=True)
        left = len(lines) - start - height
        if left > 0 and keys is not None:
            pressed = keys.settled(console)
            if pressed is None:
                say(console, f"  {left} more lines: space shows more, d all at once, n says no ")
                pressed = keys.key().lower()
                say(console, "\n")
            if pressed in ("n", CTRL_C, ESCAPE):
                return pressed
            if pressed == "d":
                keys = None
    return None


def _edited(question: Question, request: PermissionRequest, console: Console, keys: Keys) -> Question:
    """Open the person's editor on the arguments; returns the question about what came out of it."""
    fields = _fields(question.arguments)
    name = _EDITED_FIELD.get(question.tool, "")
    value = fields.get(name)
    if isinstance(value, str):
        ending = ".sh" if name == "command" else PurePosixPath(str(fields.get("path", ""))).suffix
        text = value
    else:
        ending, text, name = ".json", _pretty(question.arguments), ""
    with keys.cooked():
        try:
            made = _from_editor(text, ending)
        except (OSError, subprocess.CalledProcessError, UnicodeDecodeError) as error:
            say(console, f"  the editor failed: {printable_line(str(error))}; set EDITOR\n")
            return question
    if name in ("command", ""):
        made = made.removesuffix("\n")
    arguments = made if not name else json.dumps({**fields, name: made}, ensure_ascii=False)
    if made == text:
        return question
    problem = request.problem_with(arguments)
    if problem is not None:
        say(console, f"  that does not fit: {printable(problem)}\n")
        return question
    return replace(question_for(request, rule=question.rule, arguments=arguments), is_edited=True)


def _from_editor(text: str, ending: str) -> str:
    """Let a person edit a text. The file is theirs alone, and is gone afterwards."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory(prefix="treenail-") as directory:
        file = Path(directory) / f"edit{ending if ending.isprintable() and '/' not in ending else ''}"
        file.write_text(text, encoding="utf-8")
        subprocess.run([*shlex.split(editor), str(file)], check=True)
        return file.read_text(encoding="utf-8")


def _fields(arguments: str) -> dict[str, Any]:
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _pretty(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments or "{}"), ensure_ascii=False, indent=2)
    except ValueError:
        return arguments


def _indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in printable(text).splitlines())
