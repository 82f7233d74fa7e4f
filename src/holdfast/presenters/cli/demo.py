"""The demo: an agent at work in a scratch directory, and the things that usually go wrong.

Nothing in it is faked: real files, a real process killed with SIGKILL, a real log. Only
the model reads from a script. What is printed is read from the log afterwards.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from uuid import UUID

from rich.console import Console

from holdfast.agent import Agent, Run, opened
from holdfast.containment import Limits
from holdfast.log.sqlite import SqliteLog
from holdfast.presenters.cli.timeline import timeline
from holdfast.providers.scripted import Answer, ScriptedProvider
from holdfast.tools.context import ToolContext
from holdfast.tools.files import FILE_TOOLS
from holdfast.tools.tool import tool
from holdfast.turns.states import TurnState

_FILES = {
    "shop/cart.py": "def totl(prices):\n    return sum(prices)\n",
    "shop/report.py": "from shop.cart import totl\n\n\ndef report(prices):\n    return totl(prices)\n",
    "shop/old.py": "from shop.cart import totl  # legacy\n",
}


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
            raise RuntimeError(
                f"{match.path} is legacy code and must not be touched (after {len(changed)} files)"
            )
        if old in text:
            context.filesystem.write(match.path, text.replace(old, new))
            changed.append(match.path)
    return f"renamed {old} to {new} in {', '.join(changed)}"


@tool(effects="workspace")
def add_tests(*, context: ToolContext) -> str:
    """Write tests for the project."""
    context.filesystem.write("tests/test_cart.py", "from shop.cart import total\n")
    if not context.is_resume:
        # The worst moment: half of the work is on disk, nothing of it is committed.
        os.kill(os.getpid(), signal.SIGKILL)
    context.filesystem.write(
        "tests/test_cart.py",
        "from shop.cart import total\n\n\ndef test_total():\n    assert total([1, 2]) == 3\n",
    )
    return "wrote tests/test_cart.py"


@tool(effects="none")
def think_again() -> str:
    """Think about the problem once more."""
    return "still thinking"


DEMO_AGENT = Agent(
    "demo",
    instructions="You keep a small shop's code in order.",
    tools=(*FILE_TOOLS, rename_symbol, add_tests, think_again),
)

_RENAME = ("rename_symbol", {"old": "totl", "new": "total"})
_ALLOW = ("write_file", {"path": "ALLOW_LEGACY", "content": "ok\n"})
_THINK = Answer("Let me think again.", [("think_again", {})], cost_usd=0.07)

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
        "Done: the function is called `total` everywhere, and it has a test.",
    ]
)

_RUNAWAY = ScriptedProvider([_THINK], repeat=True)


def work(directory: Path) -> None:
    """Run the agent in a process of its own; one of its tools kills that process."""
    DEMO_AGENT.run(
        "Fix the misspelt function and add a test.",
        provider=_SCRIPT,
        workspace=directory / "project",
        store=directory / "runs.db",
    )


def demo(console: Console, directory: Path | None = None) -> int:
    """Show the demo. Returns the exit code: 0 only if everything it claims was seen."""
    place = directory or Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    project, store = place / "project", place / "runs.db"
    for name, text in _FILES.items():
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    console.print(f"[bold]Holdfast demo[/] in {place}\n")

    console.print("[bold]1.[/] An agent works in its own process. One of its tools fails half-way;")
    console.print("   another one kills the process with SIGKILL in the middle of its work.")
    command = [sys.executable, "-m", "holdfast", "demo", "--work-in", str(place)]
    finished = subprocess.run(command, check=False, capture_output=True, text=True)
    killed = finished.returncode == -signal.SIGKILL
    console.print(f"   the process ended with {'SIGKILL' if killed else finished.returncode}")
    if not killed:
        console.print(finished.stderr)
        return 1
    half_written = (project / "tests/test_cart.py").exists()
    console.print(f"   on disk now: tests/test_cart.py {'half written' if half_written else 'absent'}\n")

    run_id = _newest(store)
    console.print("[bold]2.[/] Another process resumes: first it undoes the half-done call, then it goes on.")
    with DEMO_AGENT.resume(store, run_id, provider=_SCRIPT) as run:
        console.print(f"   the run is [bold]{run.state.value}[/]: {run.output}")
        _show_timeline(console, run)
        console.print("   what the second rename changed:")
        renamed = [each for each in run.tool_calls if each.name == "rename_symbol" and each.success]
        console.print(_indent(renamed[0].diff().text), markup=False, highlight=False)
        ok = run.state is TurnState.COMPLETED

    console.print("[bold]3.[/] A runaway agent would think for ever, at $0.07 a thought. Its limit is $0.50.")
    with DEMO_AGENT.run(
        "Think.", provider=_RUNAWAY, workspace=project, store=store, limits=Limits(max_cost_usd=0.50)
    ) as runaway:
        result = runaway.result
        console.print(f"   the run [bold]{result.state.value}[/]: {result.error_kind}, {result.details}")
        ok = ok and runaway.result.error_kind == "budget_exceeded"

    console.print("\nLook at it yourself:")
    for command_line in (
        f"holdfast show {run_id} --store {store}",
        f"git --git-dir={store}.files log -p --all",
    ):
        console.print("   " + command_line, markup=False, highlight=False, soft_wrap=True)
    return 0 if ok else 1


def _newest(store: Path) -> UUID:
    log = SqliteLog(store)
    try:
        return log.sessions()[-1].session_id
    finally:
        log.close()


def _show_timeline(console: Console, run: Run) -> None:
    show_timeline(console, run.execution_state.session, indent="   ")


def show_timeline(console: Console, session: Any, indent: str = "") -> None:
    """Print a session's timeline."""
    for line in timeline(session):
        mark = "[green]✓[/]" if line.good else "[red]✗[/]"
        console.print(f"{indent}{line.seq:>4}  {mark} [bold]{line.kind:<7}[/]", end="")
        console.print(line.text, markup=False, highlight=False)


def show(console: Console, store: Path, run_id: UUID) -> None:
    """Print a stored session's timeline."""
    with opened(store, run_id) as session:
        show_timeline(console, session)


def _indent(text: str) -> str:
    return "\n".join("      " + line for line in text.splitlines())
