"""The demo: an agent at work in a scratch directory, and the things that usually go wrong.

Nothing in it is faked: real files, real commands, a real process killed with SIGKILL, a real log. Only the
model reads from a script. What is printed is read from the log afterwards.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import click
from rich.console import Console

from treenail.agent import Agent, Run
from treenail.containment import Limits
from treenail.history import LAST, find_run, opened_log, project
from treenail.judges import CommandChecker
from treenail.presenters.cli.console import GuardedConsole
from treenail.presenters.cli.timeline import print_lines
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.sandbox import Sandbox, probe
from treenail.tools import FILE_TOOLS, ToolContext, tool
from treenail.turns import TurnState

_FILES = {
    "shop/__init__.py": "",
    "shop/cart.py": "def totl(prices):\n    return sum(prices)\n",
    "shop/report.py": "from shop.cart import totl\n\n\ndef report(prices):\n    return totl(prices)\n",
    "shop/old.py": "from shop.cart import totl  # legacy\n",
}

_TEST = "from shop.cart import total\n\n\ndef test_total():\n    assert total([1, 2]) == {}\n"
_CHECK = f"{shlex.quote(sys.executable)} -c 'from tests.test_cart import test_total; test_total()'"

_PAUSE_S = 0.8


@tool(effects="workspace")
def rename_symbol(old: str, new: str, *, context: ToolContext) -> str:
    """Rename a symbol in every Python file of the project.

    Args:
        old: the name to replace
        new: the name to put in its place
    """
    changed: list[str] = []
    for match in context.filesystem.glob("**/*.py"):
        text = context.filesystem.read(match.path, limit=-1).content
        if "legacy" in text and not context.filesystem.exists("ALLOW_LEGACY"):
            raise RuntimeError(f"{match.path} is legacy, and {', '.join(changed)} was changed already")
        if old in text:
            context.filesystem.write(match.path, text.replace(old, new))
            changed.append(match.path)
    return f"renamed {old} to {new} in {', '.join(changed)}"


@tool(effects="workspace")
def add_tests(*, context: ToolContext) -> str:
    """Write tests for the project."""
    context.filesystem.write("tests/__init__.py", "")
    context.filesystem.write("tests/test_cart.py", "from shop.cart import total\n")
    if not context.is_resume:
        # The worst moment: half of the work is on disk, nothing of it is committed.
        os.kill(os.getpid(), signal.SIGKILL)
    context.filesystem.write("tests/test_cart.py", _TEST.format(4))
    return "wrote tests/test_cart.py"


@tool(effects="none")
def think_again() -> str:
    """Think about the problem once more."""
    return "still thinking"


DEMO_AGENT = Agent(
    "demo",
    instructions="You keep a small shop's code in order.",
    tools=(*FILE_TOOLS, rename_symbol, add_tests, think_again),
    completion=CommandChecker(_CHECK, name="the tests must pass"),
)

_THINKER = Agent("thinker", instructions="You think.", tools=(think_again,))

_SCRIPT = ScriptedProvider(
    [
        Answer(
            "I rename the misspelt function everywhere.", [("rename_symbol", {"old": "totl", "new": "total"})]
        ),
        Answer(
            "One file is legacy. I allow it and try again.",
            [("write_file", {"path": "ALLOW_LEGACY", "content": "ok\n"})],
        ),
        Answer("", [("rename_symbol", {"old": "totl", "new": "total"})]),
        Answer("Now the tests.", [("add_tests", {})]),
        "Done: the function is called `total` everywhere, and it has a test that passes.",
        Answer(
            "The test expects the wrong sum.",
            [("edit_file", {"path": "tests/test_cart.py", "old_text": "== 4", "new_text": "== 3"})],
        ),
        "Done: `total` everywhere, and its test passes now.",
    ]
)

_RUNAWAY = ScriptedProvider(
    [Answer("Let me think again.", [("think_again", {})], cost_usd=0.07)], repeat=True
)


def work(directory: Path) -> None:
    """Run the agent in a process of its own; one of its tools kills that process."""
    DEMO_AGENT.run(
        "Fix the misspelt function and add a test.",
        provider=_SCRIPT,
        workspace=directory / "project",
        store=directory / "runs.db",
        sandbox=_sandbox(),
    )


def _sandbox() -> Sandbox:
    """Confine the demo's one command, which only runs tests, where that is possible."""
    return Sandbox("auto" if probe().confines else "off")


class _Stage:
    """Prints the scenes, with a pause between them if somebody is watching."""

    def __init__(self, console: Console, *, fast: bool) -> None:
        self.console = console
        self._pause_s = 0.0 if fast or not console.is_terminal else _PAUSE_S
        self._scene = 0

    def scene(self, title: str) -> None:
        self._scene += 1
        if self._scene > 1:
            time.sleep(self._pause_s)
        self.console.print(f"\n[bold]{self._scene}. {title}[/]", highlight=False, soft_wrap=True)

    def say(self, text: str, style: str = "") -> None:
        self.console.print(f"   {text}", markup=False, highlight=False, style=style, soft_wrap=True)


@click.command
@click.option("--fast", is_flag=True, help="Do not pause between the scenes.")
@click.option("--keep", type=click.Path(path_type=Path), help="A directory to work in, kept afterwards.")
@click.option("--work-in", type=click.Path(path_type=Path), hidden=True)
def demo(fast: bool, keep: Path | None, work_in: Path | None) -> int:
    """See what happens when things go wrong. Offline.

    Nothing in it is faked. Exits 0 only if everything it claims was seen.

    Example: treenail demo --keep /tmp/demo
    """
    if work_in is not None:
        work(work_in)
        return 0
    console = GuardedConsole()
    place = keep or Path(tempfile.mkdtemp(prefix="treenail-demo-"))
    project, store = place / "project", place / "runs.db"
    for name, text in _FILES.items():
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    stage = _Stage(console, fast=fast)
    console.print(f"[bold]Treenail demo[/] in {place}", highlight=False, soft_wrap=True)
    console.print("The model reads from a script. Files, commands, processes and the log are real.")
    seen = [
        _crash(stage, place),
        _resumed(stage, store, find_run(store, LAST)),
        _runaway(stage, project, store),
    ]
    with opened_log(store) as log:
        run_id = log.sessions()[0].session_id
    stage.scene("Look at it yourself")
    command = "treenail" if shutil.which("treenail") else f"{sys.executable} -m treenail"
    short = str(run_id)[:8]
    for line in (
        f"{command} show {short} --store {store}",
        f"{command} replay {short} --store {store}",
        f"{command} diagnose {short} --store {store}",
        f"git --git-dir={store}.files log -p --all",
    ):
        stage.say(line)
    return 0 if all(seen) else 1


def _crash(stage: _Stage, place: Path) -> bool:
    stage.scene("An agent works in a process of its own, and everything goes wrong")
    stage.say("Its first tool raises half-way through the files. A later one kills the process")
    stage.say("with SIGKILL while a file is half written.")
    command = [sys.executable, "-m", "treenail", "demo", "--work-in", str(place)]
    finished = subprocess.run(command, check=False, capture_output=True, text=True)
    if finished.returncode != -signal.SIGKILL:
        stage.say(f"the process ended with {finished.returncode}: {finished.stderr}", "red")
        return False
    half = place / "project/tests/test_cart.py"
    stage.say("the process ended with SIGKILL", "red")
    stage.say(f"on disk: {half.relative_to(place)} {'is half written' if half.exists() else 'is not there'}")
    return half.exists()


def _resumed(stage: _Stage, store: Path, run_id: UUID) -> bool:
    stage.scene("Another process resumes the run")
    stage.say("It undoes the half-done call and runs nothing twice. When the agent says that it is")
    stage.say("done, a judge runs the tests, and sends it back.")
    stage.say(f"commands: {probe().text}")
    with DEMO_AGENT.resume(store, run_id, provider=_SCRIPT, sandbox=_sandbox()) as run:
        stage.say(f"the run is {run.state.value}: {run.output}", "green")
        raised = next(each for each in run.tool_calls if not each.success)
        left = raised.diff().text
        stage.say(f"what {raised.name} left in the files when it raised: {left or 'nothing'}")
        stage.scene("The timeline, as the log has it")
        print_lines(stage.console, project(run.execution_state.session), indent="   ")
        stage.scene("What one call changed, although it was tried twice")
        renamed = [each for each in run.tool_calls if each.name == "rename_symbol" and each.success]
        stage.console.print(textwrap.indent(renamed[0].diff().text, " " * 6), markup=False, highlight=False)
        return run.state is TurnState.COMPLETED and not left and _was_sent_back(run)


def _was_sent_back(run: Run[Any]) -> bool:
    items = project(run.execution_state.session).turns[0].items
    return [each.is_good for each in items if each.kind == "check"] == [False, True]


def _runaway(stage: _Stage, project: Path, store: Path) -> bool:
    stage.scene("A runaway agent would think for ever, at $0.07 a thought; its ceiling is $0.50")
    limits = Limits(max_cost_usd=0.50)
    with _THINKER.run("Think.", provider=_RUNAWAY, workspace=project, store=store, limits=limits) as run:
        stage.say(f"the run {run.state.value} ({run.result.error_kind}): {run.result.details}", "yellow")
        return run.result.error_kind == "budget_exceeded"
