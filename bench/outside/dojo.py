"""AgentDojo's tasks under faults: how often is the work done, and done once?

AgentDojo 0.1.35 has 97 tasks with the true calls of each (339) and checkers of its own; no model is needed.
Its environment is a file here, which each call reads, changes and writes. A fault strikes a call before its
effect or after it, with equal chance: the tool raises, or (with `--kill`) the process is killed with SIGKILL.
The agent calls again, at most `TRIES` times. Three ways to run the same calls:

- `plain` calls the functions and tries again;
- `langgraph` has LangGraph's own agent loop with `SqliteSaver`, resumed after a fault by `invoke(None)`;
- `treenail` runs them as tools of an agent, resumed after a kill by `resume`.

A task is **useful** if AgentDojo's checker says so, and **clean** if the environment also equals that of a
run without faults. A useful task that is not clean is a dirty success: something happened twice.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pickle
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

TRIES = 12
SUITES = "v1.2.2"
ENVIRONMENT = "environment.bin"


class Fault(Exception):
    """The call failed, before its effect or after it."""


class Dice:
    """Decides which attempts a fault strikes; the count of attempts survives a kill."""

    def __init__(self, place: Path, rate: float, seed: str, *, kill: bool) -> None:
        self._count = place / "attempts"
        self._rate, self._seed, self._kill = rate, seed, kill

    def roll(self) -> str:
        """Say where a fault strikes this attempt: `before`, `after` or nowhere."""
        number = int(self._count.read_text()) + 1 if self._count.exists() else 1
        self._count.write_text(str(number))
        rng = random.Random(f"{self._seed}:{number}")
        struck = rng.random() < self._rate
        return rng.choice(("before", "after")) if struck else ""

    def strike(self) -> None:
        """Fail the attempt."""
        if self._kill:
            os.kill(os.getpid(), signal.SIGKILL)
        raise Fault("the call failed")


def call(
    index: int, dice: Dice, given: Given, read: Callable[[], bytes], write: Callable[[bytes], object]
) -> str:
    """Make one of the task's calls, as a tool that may fail on either side of its effect."""
    where = dice.roll()
    if where == "before":
        dice.strike()
    environment = pickle.loads(read())
    each = given.calls[index]
    result, _ = given.runtime.run_function(environment, each.function, dict(each.args))
    write(pickle.dumps(environment))
    if where == "after":
        dice.strike()
    return str(result)[:500]


class Given:
    """A task of AgentDojo's: its calls, its environment before and after, and its checker."""

    def __init__(self, suite: Any, task: Any, default: Any) -> None:
        from agentdojo.functions_runtime import FunctionsRuntime

        self.task = task
        self.before = task.init_environment(default.model_copy(deep=True))
        self.calls = task.ground_truth(self.before.model_copy(deep=True))
        self.runtime = FunctionsRuntime(suite.tools)
        truth = self.before.model_copy(deep=True)
        for each in self.calls:
            self.runtime.run_function(truth, each.function, dict(each.args))
        self.after = _timeless(truth.model_dump())

    def judge(self, place: Path) -> tuple[bool, bool]:
        """Say whether the work is done, and whether nothing else is."""
        environment = pickle.loads((place / "work" / ENVIRONMENT).read_bytes())
        answer = self.task.GROUND_TRUTH_OUTPUT
        useful = self.task.utility_from_traces(answer, self.before, environment, self.calls)
        if useful is None:
            useful = self.task.utility(answer, self.before, environment)
        return bool(useful), bool(useful) and _timeless(environment.model_dump()) == self.after


def _timeless(value: Any) -> Any:
    """Leave out the moments at which things were made: they differ from run to run."""
    if isinstance(value, dict):
        return {key: _timeless(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_timeless(each) for each in value]
    return None if isinstance(value, datetime.datetime) else value


def plain(given: Given, place: Path, dice: Dice) -> None:
    file, done = place / "work" / ENVIRONMENT, place / "done"
    index = int(done.read_text()) if done.exists() else 0
    while index < len(given.calls):
        for _ in range(TRIES):
            try:
                call(index, dice, given, file.read_bytes, file.write_bytes)
                break
            except Fault:
                continue
        index += 1
        done.write_text(str(index))


def treenail(given: Given, place: Path, dice: Dice) -> None:
    from treenail import Agent, tool
    from treenail.log.sqlite import SqliteLog
    from treenail.providers.base import ModelRequest
    from treenail.providers.scripted import Answer, ScriptedProvider

    @tool(effects="workspace")
    def act(index: int, *, context: Any) -> str:
        """Make one of the task's calls."""
        files = context.filesystem
        return call(
            index,
            dice,
            given,
            lambda: files.read_bytes(ENVIRONMENT).content,
            lambda data: files.write_bytes(ENVIRONMENT, data),
        )

    def decide(request: ModelRequest) -> Answer:
        results = [each for each in request.items if each.role == "tool"]
        done = sum(not each.is_error for each in results)
        failed = 0
        for each in reversed(results):
            if not each.is_error:
                break
            failed += 1
        index = done + failed // TRIES
        if index >= len(given.calls):
            return Answer("Done.")
        return Answer(calls=[("act", {"index": index})])

    agent = Agent("dojo", tools=[act], max_iterations=10_000)
    model = ScriptedProvider([decide] * 10_000)
    store = place / "runs.db"
    if store.exists():
        with SqliteLog(store) as log:
            run_id = log.sessions()[0].session_id
        agent.resume(store, run_id, provider=model).close()
    else:
        agent.run("Do it.", provider=model, workspace=place / "work", store=store).close()


def langgraph(given: Given, place: Path, dice: Dice) -> None:
    from langchain.agents import create_agent
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage
    from langchain_core.outputs import ChatGeneration, ChatResult
    from langgraph.checkpoint.sqlite import SqliteSaver

    file = place / "work" / ENVIRONMENT

    def act(index: int) -> str:
        """Make one of the task's calls."""
        return call(index, dice, given, file.read_bytes, file.write_bytes)

    class Fake(BaseChatModel):
        @property
        def _llm_type(self) -> str:
            return "fake"

        def bind_tools(self, tools: Any, **_: Any) -> Any:
            return self

        def _generate(self, messages: Any, *_: Any, **__: Any) -> ChatResult:
            index = sum(each.type == "tool" for each in messages)
            calls = (
                [{"name": "act", "args": {"index": index}, "id": f"c{index}"}]
                if index < len(given.calls)
                else []
            )
            return ChatResult(generations=[ChatGeneration(message=AIMessage("Go.", tool_calls=calls))])

    is_new = not (place / "runs.db").exists()
    saver = SqliteSaver(sqlite3.connect(place / "runs.db", check_same_thread=False))
    graph = create_agent(Fake(), tools=[act], checkpointer=saver)
    config: Any = {"configurable": {"thread_id": "1"}, "recursion_limit": 10_000}
    task: Any = {"messages": [("user", "Do it.")]} if is_new else None
    for _ in range(TRIES * len(given.calls) + 1):
        try:
            graph.invoke(task, config, durability="sync")
            return
        except Fault:
            task = None  # It resumes from its last checkpoint.


WAYS: dict[str, Callable[[Given, Path, Dice], None]] = {
    "plain": plain,
    "langgraph": langgraph,
    "treenail": treenail,
}


def trial(way: str, given: Given, rate: float, seed: int, name: str, *, kill: bool) -> tuple[bool, bool]:
    """Run one task with faults, and judge what it left."""
    with tempfile.TemporaryDirectory(
        prefix="dojo-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as made:
        place = Path(made)
        (place / "work").mkdir()
        (place / "work" / ENVIRONMENT).write_bytes(pickle.dumps(given.before))
        if not kill:
            WAYS[way](given, place, Dice(place, rate, f"{seed}:{name}", kill=False))
            return given.judge(place)
        command = [sys.executable, __file__, "--child", way, name, str(place), str(rate), str(seed)]
        for _ in range(TRIES * len(given.calls) + 1):
            ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            if ended.returncode == 0:
                break
            if ended.returncode != -signal.SIGKILL:
                raise RuntimeError(f"{way} {name}: {ended.stderr[-2000:]}")
        return given.judge(place)


def child(way: str, name: str, place: Path, rate: float, seed: int) -> None:
    """Run one task, or resume it, in a process that may be killed."""
    suite_name, _, task_name = name.partition("/")
    from agentdojo.task_suite.load_suites import get_suites

    suite = get_suites(SUITES)[suite_name]
    given = Given(suite, suite.user_tasks[task_name], suite.load_and_inject_default_environment({}))
    WAYS[way](given, place, Dice(place, rate, f"{seed}:{name}", kill=True))


def all_tasks(limit: int | None) -> dict[str, Given]:
    """Load AgentDojo's tasks by name."""
    from agentdojo.task_suite.load_suites import get_suites

    found = {}
    for suite_name, suite in get_suites(SUITES).items():
        default = suite.load_and_inject_default_environment({})
        for task_name, task in suite.user_tasks.items():
            found[f"{suite_name}/{task_name}"] = Given(suite, task, default)
    chosen = list(found.items())
    return dict(chosen if limit is None else chosen[:: max(len(chosen) // limit, 1)][:limit])


def main() -> None:
    """Print one line of JSON per way, rate and kind of fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="0.1,0.3,0.5")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", type=int, help="how many of the 97 tasks (default: all)")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--child", nargs=5)
    chosen = parser.parse_args()
    if chosen.child:
        way, name, place, rate, seed = chosen.child
        child(way, name, Path(place), float(rate), int(seed))
        return
    tasks = all_tasks(chosen.tasks)
    for rate in map(float, chosen.rates.split(",")):
        for way in WAYS:
            judged = [
                trial(way, given, rate, seed, name, kill=chosen.kill)
                for seed in range(chosen.seeds)
                for name, given in tasks.items()
            ]
            useful, clean = (sum(each[place] for each in judged) for place in (0, 1))
            row = {
                "way": way,
                "rate": rate,
                "kill": chosen.kill,
                "tasks": len(judged),
                "useful": useful,
                "clean": clean,
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
