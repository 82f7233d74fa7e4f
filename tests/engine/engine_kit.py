"""Workers as processes, on a real Postgres: how they are started, and how a test waits for their log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import UUID

from tests.stories.terminal import clean_environment

from treenail.engine import Dispatcher, submit_run
from treenail.engine.absurd import AbsurdDispatcher, install
from treenail.history import summarize
from treenail.log import watch
from treenail.log.postgres import PostgresLog

LIMIT_S = 90.0
LEASE_S = 2.0

AGENTS = '''
import os, signal, threading
from pathlib import Path
from treenail import Agent, tool

HERE = Path(__file__).parent

def mark(name):
    """Tell the test that we are there; only the first one to come here waits to be killed."""
    try:
        with open(HERE / name, "x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True

@tool(effects="external")
def say(word: str, *, context) -> str:
    """Say a word outside: a line of a file, once per call, with the call's key."""
    with open(HERE / "said.txt", "a") as file:
        file.write(f"{context.call_id} {word}\\n")
    return "said"

@tool(effects="workspace")
def write(path: str, text: str, *, context) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return "written"

@tool(effects="workspace")
def stuck(*, context) -> str:
    """Change a file, and wait to be killed in the middle of it, the first time."""
    context.filesystem.write("half.txt", "half")
    if mark("stuck"):
        threading.Event().wait()
    context.filesystem.write("half.txt", "whole")
    return "done"

@tool(effects="none")
def ponder() -> str:
    """Think about it."""
    return "hm"

TOOLS = [say, write, stuck, ponder]
agent = Agent("clerk", tools=TOOLS)
'''


class Fleet:
    """A schema of a database, a directory with an agent, and the workers of a test."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url, self.directory = url, directory
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "agents.py").write_text(AGENTS)
        self.log = PostgresLog(url, max_connections=6)
        install(self.log, ["default"])
        self.dispatcher: Dispatcher = AbsurdDispatcher(self.log)
        self.workers: list[subprocess.Popen[bytes]] = []

    def script(self, data: object) -> str:
        """Write a model's script, and name it as a model."""
        place = self.directory / "script.json"
        place.write_text(json.dumps(data))
        return f"scripted:{place}"

    def submit(self, task: str, **options: Any) -> UUID:
        return submit_run(self.log, self.dispatcher, task, **{"agent": "clerk", "by": "test", **options})

    def worker(self, *flags: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a worker, and wait until it takes runs."""
        started = self.start(*flags, env=env)
        self.wait_for_line(started, "worker_ready")
        return started

    def start(self, *flags: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        number = len(self.workers)
        home = self.directory / f"home-{number}"
        home.mkdir(exist_ok=True)
        lines = self.directory / f"worker-{number}.log"
        with lines.open("wb") as out:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "treenail", "worker", "--store", self.url),
                    *("--agent", str(self.directory / "agents.py"), "--lease", str(LEASE_S)),
                    *("--concurrency", "2", "--sandbox", "auto", *flags),
                ],
                cwd=home,
                env={**clean_environment(home), **(env or {})},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process.lines = lines  # type: ignore[attr-defined]
        self.workers.append(process)
        return process

    def lines(self, worker: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
        """Return what a worker has written so far."""
        text = worker.lines.read_text()  # type: ignore[attr-defined]
        whole = text[: text.rfind("\n") + 1]
        try:
            return [json.loads(each) for each in whole.splitlines()]
        except ValueError:
            raise AssertionError(text) from None

    def wait_for_line(self, worker: subprocess.Popen[bytes], event: str) -> dict[str, Any]:
        """Wait until a worker has written a line about something."""

        def found() -> dict[str, Any] | None:
            assert worker.poll() is None or self._has(worker, event), worker.lines.read_text()  # type: ignore[attr-defined]
            return next((each for each in self.lines(worker) if each.get("event") == event), None)

        return until(found)

    def _has(self, worker: subprocess.Popen[bytes], event: str) -> bool:
        return any(each.get("event") == event for each in self.lines(worker))

    def wait_for(self, run_id: UUID, *states: str) -> str:
        """Wait until a run is in one of these states and nobody writes it; return the state."""
        deadline = monotonic() + LIMIT_S

        def is_over() -> bool:
            assert monotonic() < deadline, f"{run_id} is {self.state(run_id)}, not {states}; {self._told()}"
            return self.state(run_id) in states

        for _ in watch(self.log, run_id, is_over=is_over):
            continue
        return self.state(run_id)

    def wait_for_event(self, run_id: UUID, kind: str, count: int = 1) -> None:
        """Wait until a run's log has an event of a type."""
        deadline, seen = monotonic() + LIMIT_S, 0

        def is_over() -> bool:
            assert monotonic() < deadline, f"{run_id} has no {kind}; {self._told()}"
            return seen >= count

        for each in watch(self.log, run_id, is_over=is_over):
            seen += each.type == kind

    def state(self, run_id: UUID) -> str:
        info = self.log.info(run_id)
        return "running" if info.owner is not None else summarize(self.log, info).state

    def books(self) -> list[tuple[str, int]]:
        """Return Absurd's states of its tasks, and how often each was attempted."""
        schema = self.log.url.schema
        return self.sql(f'SELECT state, attempts FROM absurd."t_{schema}_default" ORDER BY enqueue_at')

    def sql(self, query: str) -> list[Any]:
        def work(connection: Any, doubt: bool) -> list[Any]:
            cursor = connection.execute(query.encode())
            return cursor.fetchall() if cursor.description else []

        return self.log.database.run("ask", work)

    def said(self) -> list[str]:
        """Return what was said outside."""
        place = self.directory / "said.txt"
        return place.read_text().splitlines() if place.exists() else []

    def wait_for_mark(self, name: str) -> int:
        """Wait until an agent has come somewhere; return its process."""
        place = self.directory / name
        return until(lambda: int(place.read_text() or 0) if place.exists() else None)

    def _told(self) -> str:
        return "\n".join(each.lines.read_text()[-3000:] for each in self.workers)  # type: ignore[attr-defined]

    def close(self) -> None:
        for each in self.workers:
            if each.poll() is None:
                os.kill(each.pid, signal.SIGCONT)
                each.kill()
            each.wait(LIMIT_S)
        self.log.close()


def until(found: Callable[[], Any]) -> Any:
    """Ask until there is an answer."""
    deadline = monotonic() + LIMIT_S
    nothing = threading.Event()
    while True:
        answer = found()
        if answer:
            return answer
        assert monotonic() < deadline, "it did not come"
        nothing.wait(0.02)


@contextmanager
def fleet_in(url: str, directory: Path) -> Iterator[Fleet]:
    fleet = Fleet(url, directory)
    try:
        yield fleet
    finally:
        fleet.close()
