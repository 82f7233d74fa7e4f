"""Tool calls, failures, forks, rollbacks and restarts in any order, against a model that fits on a page.

The model is a value: the files, the working state, and history that only grows. A call that is kept replaces
the value; any other leaves it as it is, except for history. Every boundary remembers the value on both sides
of it, and going back to a boundary is taking that value again.

The same machine runs in memory, and on disk with SQLite. On disk a call may also write past the filesystem,
as a foreign process does; that is a change of the call like any other. And there is somebody else, who writes
into the same directory between calls, into files of their own. Only what looks at the whole tree (a call that
lets a foreign process loose) knows about those, and only going back to such a boundary changes them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal
from uuid import uuid4

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from treenail.errors import VisibilityExpansionRequired
from treenail.log import MemoryLog, SlicePolicy
from treenail.log.sqlite import SqliteLog
from treenail.state import (
    CheckpointStore,
    CompositeSnapshot,
    ExecutionState,
    Replace,
    ResourceRegistry,
    Session,
    Slice,
    event,
    replace_latest,
    rollback_to_tool,
)
from treenail.tools import (
    Tool,
    ToolCall,
    ToolContext,
    ToolInvoked,
    ToolResult,
    ToolRunner,
    diff_calls,
    filesystem_of,
    fork_at,
    recover,
    rollback_to_call,
)
from treenail.tools.events import OutboxPut
from treenail.workspace import Filesystem, InMemoryFilesystem
from treenail.workspace.host import HostFilesystem

# --- what sessions are told ------------------------------------------------------------------------


@event(name="machine.Plan")
@dataclass(frozen=True, slots=True)
class Plan:
    """Working state: the newest counts."""

    text: str


@event(name="machine.Add")
@dataclass(frozen=True, slots=True)
class Add:
    """Adds to `Total`; in which order does not matter, so parallel calls may."""

    number: int


@event(name="machine.Total")
@dataclass(frozen=True, slots=True)
class Total:
    """Working state, folded from `Add`."""

    number: int


@event(name="machine.Note", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class Note:
    """History."""

    text: str


def _sum(slice_: Slice[Total], add: Add) -> Replace[Total]:
    latest = slice_.latest()
    return Replace((Total(add.number + (0 if latest is None else latest.number)),))


# --- the model -------------------------------------------------------------------------------------

Files = dict[str, str | None]
"""Path to content; None is a directory."""


@dataclass(frozen=True, slots=True)
class Model:
    """Everything that a call changes, as a value."""

    files: Files = field(default_factory=dict)
    plan: str | None = None
    total: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a tool does."""

    kind: Literal["write", "append", "delete", "move", "mkdir", "plan", "add", "note", "outbox"]
    path: str = ""
    target: str = ""
    text: str = ""


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _below(files: Files, path: str) -> list[str]:
    return [each for each in files if each.startswith(f"{path}/")]


def predict(files: Files, step: Step) -> Files | None:
    """Return the files after a step, or None if it must be refused."""
    path, target = step.path, step.target
    result = dict(files)
    if step.kind in ("write", "append", "mkdir"):
        if any(files.get(each, None) is not None for each in _parents(path)):
            return None
        if step.kind == "mkdir":
            if files.get(path) is not None:
                return None
            made: str | None = None
        else:
            if path in files and files[path] is None:
                return None
            made = (files.get(path) or "") * (step.kind == "append") + step.text
        result.update(dict.fromkeys(_parents(path)))
        result[path] = made
        return result
    if path not in files:
        return None
    if step.kind == "delete":
        for each in (path, *_below(files, path)):
            del result[each]
        return result
    if any(each not in files or files[each] is not None for each in _parents(target)):
        return None
    if target == path:
        return result
    if target.startswith(f"{path}/"):
        return None
    if target in files and ((files[target] is None) != (files[path] is None) or _below(files, target)):
        return None
    for each in (path, *_below(files, path)):
        result[target + each[len(path) :]] = result.pop(each)
    return result


# --- the tools -------------------------------------------------------------------------------------

Ending = Literal["ok", "error", "raise", "expand", "interrupt"]
PATHS = ("a", "b", "d", "d/x", "d/y", "d/deep/z", "a/under", "e/x", "past/x")
paths = st.sampled_from(PATHS)
texts = st.sampled_from(("", "one\n", "two\r\nlines\n", "three" * 30))
file_steps = st.builds(
    Step,
    st.sampled_from(("write", "write", "append", "delete", "move", "mkdir")),
    paths,
    paths,
    texts,
)
state_steps = st.builds(Step, st.sampled_from(("plan", "add", "note", "outbox")), text=texts)
scripts = st.lists(file_steps | state_steps, max_size=6)
endings: st.SearchStrategy[Ending] = st.sampled_from(
    ("ok", "ok", "ok", "error", "raise", "expand", "interrupt")
)


@dataclass(slots=True)
class Job:
    """What the next call does. Tools take their orders from here, so that no order must fit into JSON."""

    steps: Iterable[Step]
    ending: Ending
    refused: list[bool] = field(default_factory=list)
    past_the_api: Step | None = None
    """What it writes at the end without asking the filesystem."""


def _end(ending: Ending) -> ToolResult[None]:
    if ending == "raise":
        raise ValueError("the tool raises")
    if ending == "expand":
        raise VisibilityExpansionRequired
    if ending == "interrupt":
        raise KeyboardInterrupt
    return ToolResult.ok() if ending == "ok" else ToolResult.error("the tool says that it failed")


def change(filesystem: Filesystem, step: Step) -> bool:
    """Do a step on files. Says whether it was refused."""
    try:
        if step.kind in ("write", "append"):
            filesystem.write(step.path, step.text, mode="append" if step.kind == "append" else "overwrite")
        elif step.kind == "delete":
            filesystem.delete(step.path, recursive=True)
        elif step.kind == "move":
            filesystem.move(step.path, step.target, overwrite=True)
        else:
            filesystem.mkdir(step.path)
    except OSError:
        return True
    return False


def _perform(job: Job, context: ToolContext) -> ToolResult[None]:
    for step in job.steps:
        if step.kind == "plan":
            context.session.dispatch(Plan(step.text))
        elif step.kind == "add":
            context.session.dispatch(Add(len(step.text) + 1))
        elif step.kind == "note":
            context.session.dispatch(Note(step.text))
        elif step.kind == "outbox":
            context.outbox.put("mail", step.text)
        else:
            job.refused.append(change(context.filesystem, step))
    if job.past_the_api is not None:
        root = context.filesystem.host_root
        assert root is not None
        job.refused.append(_write_past_the_api(root / job.past_the_api.path, job.past_the_api.text))
    return _end(job.ending)


def _write_past_the_api(path: Path, text: str) -> bool:
    """Write as a foreign process would. Says whether something was in the way."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, newline="")
    except OSError:
        return True
    return False


class Machine(RuleBasedStateMachine):
    """The rules; the two machines below say where things are kept."""

    on_disk: ClassVar[bool]

    def __init__(self) -> None:
        super().__init__()
        self.top = Path(tempfile.mkdtemp(prefix="treenail-machine-"))
        (self.top / "workspace").mkdir()
        self.session_id = uuid4()
        self.memory_log = MemoryLog(heartbeat=False)
        self.memory_files = InMemoryFilesystem()
        self.model = Model()
        self.theirs: dict[str, str] = {}
        self.notes: list[str] = []
        self.sent: list[str] = []
        self.calls = 0
        self.forks = 0
        self.jobs: dict[str, Job] = {}
        self.boundaries: dict[str, tuple[Model, Model, dict[str, str] | None]] = {}
        """Per call: what was before it, what was after it, and somebody else's files if it looked at them."""
        self.checkpoints: dict[str, Model] = {}
        self.saved: list[tuple[CompositeSnapshot, Model]] = []
        self.open(new=True)

    # .. opening and closing ..

    def open(self, *, new: bool = False) -> None:
        self.log: Any = (
            SqliteLog(self.top / "log.db", synchronous="NORMAL", heartbeat=False)
            if self.on_disk
            else self.memory_log
        )
        self.filesystem: Any = (
            HostFilesystem(self.top / "workspace", store=self.top / "store")
            if self.on_disk
            else self.memory_files
        )
        if new:
            self.session = Session(log=self.log, session_id=self.session_id)
        else:
            self.session = Session.open(self.log, self.session_id)
        self.session[Plan].register(Plan, replace_latest)
        self.session[Total].register(Add, _sum)
        self.state = ExecutionState(
            self.session,
            ResourceRegistry.build({Filesystem: self.filesystem}),  # type: ignore[type-abstract]  # a protocol is a key like a class
            checkpoints=CheckpointStore(),
        )
        self.checkpoints = {}
        self.runner = self._runner(self.state)

    def _runner(self, state: ExecutionState) -> ToolRunner:
        def work(*, context: ToolContext) -> ToolResult[None]:
            """Do a job."""
            return _perform(self.jobs[context.call_id], context)

        tools = (
            Tool.wrap(work, name="work"),
            Tool.wrap(work, name="foreign", files="any"),
            Tool.wrap(work, name="look", effects="none"),
        )
        return ToolRunner(state, {each.name: each for each in tools})

    def close(self) -> None:
        self.session.close()
        if self.on_disk:
            self.filesystem.close()
            self.log.close()

    def teardown(self) -> None:
        self.close()
        shutil.rmtree(self.top)

    # .. what the model says ..

    def _predicted(self, job: Job) -> tuple[Model, list[bool], list[str], list[str]]:
        model, refused, notes, sent = self.model, [], [], []
        steps = (*job.steps, *(() if job.past_the_api is None else (job.past_the_api,)))
        for step in steps:
            if step.kind == "plan":
                model = replace(model, plan=step.text)
            elif step.kind == "add":
                model = replace(model, total=model.total + len(step.text) + 1)
            elif step.kind == "note":
                notes.append(step.text)
            elif step.kind == "outbox":
                sent.append(step.text)
            else:
                files = predict(model.files, step)
                refused.append(files is None)
                model = model if files is None else replace(model, files=files)
        return model, refused, notes, sent

    def _new_call(self, job: Job) -> str:
        self.calls += 1
        call_id = f"call-{self.calls}"
        self.jobs[call_id] = job
        return call_id

    def _execute(self, runner: ToolRunner, call_id: str, tool: str, ending: Ending) -> None:
        call = ToolCall(call_id, tool)
        if ending == "expand":
            with pytest.raises(VisibilityExpansionRequired):
                runner.execute(call)
        elif ending == "interrupt":
            with pytest.raises(KeyboardInterrupt):
                runner.execute(call)
        else:
            assert runner.execute(call).success == (ending == "ok")

    # .. calls ..

    @rule(steps=scripts, ending=endings)
    def call(self, steps: list[Step], ending: Ending) -> None:
        """A call is kept whole, or not at all."""
        self._call("work", Job(steps, ending))

    @precondition(lambda self: self.on_disk)
    @rule(steps=scripts, ending=endings, path=st.sampled_from(("a", "past/x", "past/y", "d/x")), text=texts)
    def call_that_writes_past_the_api(self, steps: list[Step], ending: Ending, path: str, text: str) -> None:
        """So is one that lets a foreign process loose: whatever changed meanwhile is its own."""
        job = Job(steps, ending, past_the_api=Step("write", path, text=text))
        self._call("foreign", job, theirs=dict(self.theirs))

    def _call(self, tool: str, job: Job, *, theirs: dict[str, str] | None = None) -> None:
        call_id = self._new_call(job)
        before = self.model
        after, refused, notes, sent = self._predicted(job)
        self._execute(self.runner, call_id, tool, job.ending)
        assert job.refused == refused
        self.notes += notes
        if job.ending == "ok":
            self.model = after
            self.sent += sent
        self.boundaries[call_id] = (before, self.model, theirs)
        self.checkpoints[call_id] = before

    @rule(jobs=st.lists(st.tuples(st.lists(state_steps, max_size=3), endings), min_size=1, max_size=4))
    def calls_without_effects(self, jobs: list[tuple[list[Step], Ending]]) -> None:
        """Side by side, and whoever fails takes nothing away from the others."""
        calls = []
        for steps, ending in jobs:
            allowed = [each for each in steps if each.kind != "plan"]  # the order would matter
            job = Job(allowed, ending if ending in ("ok", "error", "raise") else "error")
            calls.append(ToolCall(self._new_call(job), "look"))
        results = self.runner.execute_all(calls)
        for call, result in zip(calls, results, strict=True):
            job = self.jobs[call.id]
            after, _, notes, sent = self._predicted(job)
            assert result.success == (job.ending == "ok")
            # History is written at once, so notes of different calls may mix.
            self.notes += notes
            if job.ending == "ok":
                self.model = after
                self.sent += sent

    # .. between calls ..

    @rule(step=file_steps)
    def write_outside_of_calls(self, step: Step) -> None:
        """What is written between calls through the filesystem is part of the next boundary."""
        files = predict(self.model.files, step)
        assert change(self.filesystem, step) == (files is None)
        if files is not None:
            self.model = replace(self.model, files=files)

    @precondition(lambda self: self.on_disk)
    @rule(name=st.sampled_from(("one", "two", "three")), text=texts)
    def somebody_else_writes(self, name: str, text: str) -> None:
        """Nobody told Treenail."""
        path = self.top / "workspace" / "theirs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, newline="")
        self.theirs[name] = text

    @rule()
    def restart(self) -> None:
        """Another process goes on where this one stopped, and finds nothing to recover."""
        self.close()
        self.open()
        assert recover(self.state) == ()

    # .. going back ..

    @precondition(lambda self: self.boundaries)
    @rule(data=st.data(), side=st.sampled_from(("before", "after")))
    def roll_back_to_a_call(self, data: st.DataObject, side: Literal["before", "after"]) -> None:
        """Either side of any call can be gone to, also forward, also after a restart; theirs stays theirs."""
        call_id = data.draw(st.sampled_from(sorted(self.boundaries)))
        before, after, _ = self.boundaries[call_id]
        rollback_to_call(self.state, call_id, side=side)
        self.model = before if side == "before" else after

    def _bring_back(self, theirs: dict[str, str] | None) -> None:
        """Somebody else's files went back as well, if the boundary knew them.

        That was a change by Treenail, so going back to an older call would give them back what they had: it
        undoes what Treenail did, and nothing else. That is left to the tests of the workspace, and older
        calls are forgotten here.
        """
        if theirs is None or theirs == self.theirs:
            return
        self.theirs = dict(theirs)
        self.saved = []
        self.boundaries = {}
        self.checkpoints = {}

    @precondition(lambda self: self.checkpoints)
    @rule(data=st.data())
    def roll_back_to_a_checkpoint(self, data: st.DataObject) -> None:
        """A checkpoint of this process leads back to before its call."""
        call_id = data.draw(st.sampled_from(sorted(self.checkpoints)))
        assert self.state.checkpoints is not None
        rollback_to_tool(self.state, self.state.checkpoints, call_id)
        self.model = self.checkpoints[call_id]
        self._bring_back(self.boundaries[call_id][2])

    @rule()
    def take_a_snapshot(self) -> None:
        """A snapshot by hand is a boundary, too."""
        self.saved = [*self.saved[-2:], (self.state.snapshot(tag="by hand"), self.model)]

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def restore_a_snapshot(self, data: st.DataObject) -> None:
        """It brings back what it held, whatever happened since."""
        snapshot, model = data.draw(st.sampled_from(self.saved))
        self.state.restore(snapshot)
        self.model = model

    # .. looking back ..

    @precondition(lambda self: self.boundaries)
    @rule(data=st.data(), side=st.sampled_from(("before", "after")), steps=scripts)
    def fork(self, data: st.DataObject, side: Literal["before", "after"], steps: list[Step]) -> None:
        """A fork begins at a boundary and goes its own way; nothing of it is seen here."""
        call_id = data.draw(st.sampled_from(sorted(self.boundaries)))
        self.forks += 1
        directory = self.top / f"fork-{self.forks}" if self.on_disk else None
        fork = fork_at(self.state, call_id, side=side, workspace=directory)
        filesystem = filesystem_of(fork)
        assert filesystem is not None
        started = self.boundaries[call_id][0 if side == "before" else 1]
        assert self._seen(fork) == started
        job = Job(steps, "ok")
        mine, self.model = self.model, started
        after, refused, _, _ = self._predicted(job)
        self.model = mine
        self.jobs["in-the-fork"] = job
        self._execute(self._runner(fork), "in-the-fork", "work", "ok")
        assert job.refused == refused
        assert self._seen(fork) == after
        fork.session.close()
        if isinstance(filesystem, HostFilesystem):
            filesystem.close()

    @precondition(lambda self: self.boundaries)
    @rule(data=st.data())
    def diff(self, data: st.DataObject) -> None:
        """What a call changed is what differs between its two sides."""
        call_id = data.draw(st.sampled_from(sorted(self.boundaries)))
        before, after, _ = self.boundaries[call_id]
        changed = {each.path for each in diff_calls(self.state, call_id).changes}
        missing = object()
        expected = {
            each
            for each in {*before.files, *after.files}
            if before.files.get(each, missing) != after.files.get(each, missing)
        }
        assert {each for each in changed if not each.startswith("theirs")} == expected

    # .. what always holds ..

    def _seen(self, state: ExecutionState) -> Model:
        filesystem = filesystem_of(state)
        assert filesystem is not None
        files: Files = {}
        for each in filesystem.glob("**/*"):
            if not each.path.startswith("theirs"):
                content = filesystem.read_bytes(each.path).content.decode() if each.is_file else None
                files[each.path] = content
        plan, total = state.session[Plan].latest(), state.session[Total].latest()
        return Model(files, None if plan is None else plan.text, 0 if total is None else total.number)

    @invariant()
    def everything_is_as_the_model_says(self) -> None:
        assert self._seen(self.state) == self.model
        assert sorted(each.text for each in self.session[Note].all()) == sorted(self.notes)
        sent = [each.payload for each in self.session[OutboxPut].all()]
        assert sorted(map(str, sent)) == sorted(self.sent)
        assert len(self.session[ToolInvoked].all()) == self.calls
        assert list(self.filesystem.unfinished()) == []

    @invariant()
    def somebody_elses_files_are_theirs(self) -> None:
        found = {}
        with suppress(FileNotFoundError):
            for each in os.scandir(self.top / "workspace" / "theirs"):
                found[each.name] = Path(each.path).read_bytes().decode()
        assert found == self.theirs


class InMemory(Machine):
    on_disk = False


class OnDisk(Machine):
    on_disk = True


_COMMON = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)

TestInMemory = InMemory.TestCase
TestInMemory.settings = settings(_COMMON, max_examples=60, stateful_step_count=20)

TestOnDisk = OnDisk.TestCase
TestOnDisk.settings = settings(_COMMON, max_examples=25, stateful_step_count=20)
