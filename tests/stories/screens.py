"""The screens in the docs: real sessions in a real terminal, with a server that speaks a vendor's format.

`make screens` writes them to `docs/screens`; `test_screens.py` compares them with what the command shows now.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping
from io import StringIO
from itertools import groupby
from pathlib import Path

import pyte
from rich.console import Console
from rich.text import Text
from tests.stories.terminal import Terminal

from treenail.providers.scripted import Answer
from treenail.testing.wire import WireServer

FOLDER = Path(__file__).parents[2] / "docs" / "screens"
COLUMNS = 88
_COLOURS = {"brown": "yellow", "default": "default"}
_VARYING = [(r"· \d+ s\b", "· 4 s"), (r"\$\d+\.\d+ of", "$0.03 of"), (r"\b[0-9a-f]{8}\b", "3f2a1b2c")]
"""What differs from run to run: times, prices of the day, ids."""

EDIT = ("edit_file", {"path": "calc.py", "old_text": "a - b", "new_text": "a + b"})
TEST = ("run_command", {"command": "python -B test_calc.py"})
PLAN = ("setup_plan", {"objective": "mend add", "steps": ["run the test", "mend add", "run it again"]})
ANSWERS = [
    Answer("I run the test first, to see **how** it fails.", [PLAN, TEST]),
    Answer("", [("update_step", {"step": 1, "status": "done"}), ("read_file", {"path": "calc.py"})]),
    Answer("`add` subtracts. One sign is wrong:", [EDIT]),
    Answer(
        "",
        [
            ("update_step", {"step": 2, "status": "done"}),
            TEST,
            ("update_step", {"step": 3, "status": "done"}),
        ],
    ),
    Answer(
        "Done. `add` adds now, and the test passes:\n\n"
        "| call | before | now |\n|---|---|---|\n| `add(1, 2)` | -1 | 3 |\n\n"
        "Nothing else uses `add`, so no other file changed."
    ),
]
TASK = "make the failing test pass"


def project_in(folder: Path) -> Path:
    """Make a small project with a failing test."""
    root = folder / "project"
    root.mkdir()
    (root / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (root / "test_calc.py").write_text(
        "import sys\nfrom calc import add\n\n"
        'if add(1, 2) != 3:\n    sys.exit(f"add(1, 2) is {add(1, 2)}, not 3")\n'
    )
    return root


def recorded(folder: Path) -> Mapping[str, str]:
    """Run the sessions, and return each screen by its file's name."""
    root = project_in(folder)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {"NO_COLOR": "", "TERM": "xterm-256color", "ANTHROPIC_API_KEY": "a-key", "PATH": path}
    made: dict[str, str] = {}
    with WireServer(ANSWERS) as server:
        flags = ("--model", "anthropic/claude-sonnet-5-5", "--base-url", server.anthropic_url)
        with Terminal("run", TASK, *flags, cwd=root, env=env, columns=COLUMNS) as terminal:
            assert terminal.end() == 0, terminal.text
        made["session.svg"] = picture(terminal.written, f'treenail run "{TASK}"')
    (root / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    with WireServer([Answer("", [EDIT, TEST]), Answer("Done.")]) as server:
        flags = ("--model", "anthropic/claude-sonnet-5-5", "--base-url", server.anthropic_url, "--ask")
        with Terminal("run", TASK, *flags, cwd=root, env=env, columns=COLUMNS) as terminal:
            terminal.wait_for(r"calc\.py[\s\S]*\[e\]dit")
            terminal.type("y")
            terminal.wait_for(r"\$ python -B test_calc\.py[\s\S]*\[e\]dit")
            made["question.svg"] = picture(terminal.written, f'treenail run "{TASK}" --ask')
            terminal.type("n")
            terminal.wait_for("why")
            terminal.type("not now\r")
            assert terminal.end() == 0, terminal.text
    return made


def picture(written: str, title: str) -> str:
    """Draw as SVG what a terminal shows of these bytes."""
    screen = pyte.Screen(COLUMNS, 60)
    pyte.Stream(screen).feed(written)
    console = Console(
        record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor"
    )
    last = max((row for row in range(60) if screen.display[row].strip()), default=0)
    for row in range(last + 1):
        cells = (screen.buffer[row][column] for column in range(COLUMNS))
        parts = groupby(cells, lambda each: f"{'bold ' if each.bold else ''}{_COLOURS.get(each.fg, each.fg)}")
        line = Text.assemble(
            *(("".join(each.data for each in same), style) for style, same in parts), no_wrap=True
        )
        line.rstrip()
        console.print(_fixed(line))
    svg = console.export_svg(title=title, unique_id="treenail")
    # A picture asks no other host for its letters.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def _fixed(line: Text) -> Text:
    """Replace what differs from run to run, and keep the colours around it."""
    for pattern, instead in _VARYING:
        while found := re.search(pattern, line.plain):
            if found[0] == instead:
                break
            before, after = line[: found.start()], line[found.end() :]
            line = Text.assemble(before, (instead, line.get_style_at_offset(_CONSOLE, found.start())), after)
    return line


_CONSOLE = Console(file=StringIO())


def main() -> None:
    """Write the screens of the docs."""
    with tempfile.TemporaryDirectory() as folder:
        for name, svg in recorded(Path(folder)).items():
            (FOLDER / name).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
