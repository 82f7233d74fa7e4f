"""A tool call that is killed has happened wholly or not at all, wherever it is killed.

Theory of operation
-------------------
A small world (a workspace with a repository of the user's own in it, a private store, a log in SQLite, a
place outside for deliveries) is prepared once and copied for each kill. A child process opens the world,
runs one call and is killed at one moment; `killing.py` finds the moments by itself: before and after every
SQL statement, and before, after and within every file operation that leaves a disk of its own (kills that
leave the same bytes behind are the same crash, and are done once). Each place in the code is taken, the first
and the last time it is reached, and more by chance from a fixed seed; `TREENAIL_EVERY_MOMENT=1` takes all.
(`test_workspace_kill.py` kills the operations of the filesystem by themselves, at all of their moments.)

Then this process opens the world as a next process would, lets `recover` put things right, and compares
with two references: the world before the call, and the world after it. What the files must be after it is
worked out by hand, without Treenail. It then resumes as a loop would, runs what has not ended, and expects
the world after the call, whatever happened on the way; and last it goes back to before the call once more.
"""

from __future__ import annotations

import functools
import os
import shutil
import stat
import subprocess
import tempfile
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from killing import EVERY_MOMENT, STATEMENT, Disk, Moment, Watch, killed, moments, sample
from tests.forks import in_child, orphaned
from tests.postgres import shared
from tests.stores import open_store

from treenail.errors import ReadOnlyError
from treenail.log import SlicePolicy
from treenail.state import (
    Append,
    ExecutionState,
    Replace,
    ResourceRegistry,
    Session,
    Slice,
    event,
    replace_latest,
)
from treenail.tools import (
    Outbox,
    Tool,
    ToolCall,
    ToolContext,
    ToolInvoked,
    ToolResult,
    ToolRunner,
    ToolStarted,
    diff_calls,
    filesystem_of,
    recover,
    rollback_to_call,
    run_command_async,
)
from treenail.tools.events import OutboxPut
from treenail.tools.outbox import undelivered
from treenail.workspace import Filesystem
from treenail.workspace.host import HostFilesystem

SESSION_ID = UUID(int=0x0D1E)
CALL_ID = "call-under-test"

# --- what the call tells the session ---------------------------------------------------------------


@event(name="crash.Plan")
@dataclass(frozen=True, slots=True)
class Plan:
    """Working state: the newest counts."""

    text: str


@event(name="crash.Finding")
@dataclass(frozen=True, slots=True)
class Finding:
    """Working state that a call's result carries."""

    text: str


@event(name="crash.Note", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class Note:
    """History: logged at once, whatever becomes of the call."""

    text: str


@event(name="crash.Spent")
@dataclass(frozen=True, slots=True)
class Spent:
    """Reaches both: it is counted in working state, and kept in history."""

    cents: int


@event(name="crash.Balance")
@dataclass(frozen=True, slots=True)
class Balance:
    """Working state, folded from `Spent`."""

    cents: int


@event(name="crash.Receipt", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class Receipt:
    """History, folded from `Spent`."""

    cents: int


@event(name="crash.Answer", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class Answer:
    """What the model is told; logged with the end of the call, and what a resume goes by."""

    call_id: str
    text: str


def _add(slice_: Slice[Balance], spent: Spent) -> Replace[Balance]:
    latest = slice_.latest()
    return Replace((Balance((0 if latest is None else latest.cents) + spent.cents),))


def _keep(slice_: Slice[Receipt], spent: Spent) -> Append[Receipt]:
    return Append(Receipt(spent.cents))


# --- the world -------------------------------------------------------------------------------------

ODD_NAME = os.fsdecode(b"caf\xe9.txt")
"""A name that is not UTF-8."""


@dataclass(frozen=True, slots=True)
class World:
    """Everything on disk that a run has."""

    top: Path

    @property
    def workspace(self) -> Path:
        return self.top / "workspace"

    @property
    def store(self) -> Path:
        return self.top / "store"

    @property
    def log(self) -> Path:
        return self.top / "log.db"

    @property
    def url(self) -> Path:
        """A file with the URL of the log, if that is on Postgres."""
        return self.top / "log.url"

    def open_log(self, **options: Any) -> Any:
        return open_store(self.url.read_text() if self.url.exists() else self.log, **options)

    @property
    def deliveries(self) -> Path:
        return self.top / "outside" / "deliveries"

    @property
    def runs(self) -> Path:
        return self.top / "outside" / "runs"

    @property
    def disk(self) -> Disk:
        return Disk([self.top], unread=[str(self.log)])


def _make_tree(root: Path) -> None:
    """Put awkward things into a workspace."""
    for name, text in {
        "notes.txt": "one\ntwo\n",
        "journal.txt": "first\n",
        "old.txt": "to be deleted\n",
        "a.txt": "to be moved\n",
        "target.txt": "to be replaced by a move\n",
        "forged.txt": "same size 1\n",
        "untouched.bin": "stays\n",
        "script.sh": "#!/bin/sh\necho hello\n",
        ODD_NAME: "coffee\n",
        "tree/one.txt": "1\n",
        "tree/deep/two.txt": "2\n",
        "moved/inner/three.txt": "3\n",
        "swapped/four.txt": "4\n",
        ".gitignore": "*.log\n",
        "ignored.log": "ignored by the user's repository\n",
        "nested/.git/config": "[core]\n\tfsmonitor = touch fsmonitor-was-run\n",
        "nested/code.py": "print()\n",
        ".git/HEAD": "ref: refs/heads/main\n",
        ".git/config": "[core]\n\tfsmonitor = touch fsmonitor-was-run\n\thooksPath = hooks\n",
        ".git/refs/heads/main": "0" * 40 + "\n",
        ".git/objects/ab/cdef": "an object\n",
        ".git/hooks/post-checkout": "#!/bin/sh\ntouch hook-was-run\n",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / ".git/objects/ab/cdef").chmod(0o444)
    (root / ".git/hooks/post-checkout").chmod(0o755)
    (root / "tree/empty").mkdir()
    (root / "tree/deep/two.txt").chmod(0o600)
    (root / "link").symlink_to("notes.txt")
    (root / "outward").symlink_to("/etc/hostname")


@contextmanager
def opened(world: World) -> Iterator[tuple[ExecutionState, ToolRunner]]:
    """Open a world as a process does that continues a run."""
    with (
        # Nobody here lives long enough for a heartbeat, and a kill is no power cut.
        world.open_log(synchronous="NORMAL", heartbeat=False) as log,
        Session.open(log, SESSION_ID) as session,
        HostFilesystem(world.workspace, store=world.store) as filesystem,
    ):
        yield _runtime(world, session, filesystem)


def _runtime(world: World, session: Session, filesystem: HostFilesystem) -> tuple[ExecutionState, ToolRunner]:
    session[Plan].register(Plan, replace_latest)
    session[Balance].register(Spent, _add)
    session[Receipt].register(Spent, _keep, policy=SlicePolicy.LOG)
    state = ExecutionState(session, ResourceRegistry.build({Filesystem: filesystem}))  # type: ignore[type-abstract]  # a protocol is a key like a class

    def deliver(message: OutboxPut) -> None:
        # A link appears whole or not at all, so that the receiver itself cannot be cut off in the middle.
        os.symlink(message.key, world.deliveries / str(len(os.listdir(world.deliveries))))

    tools = {each.name: each for each in TOOLS}
    return state, ToolRunner(state, tools, outbox=Outbox({"mail": deliver}))


@pytest.fixture(scope="module")
def prepared() -> Iterator[Path]:
    """A world in which a run has been going on for a while, and stopped properly."""
    yield from _prepared("sqlite")


@pytest.fixture(scope="module")
def prepared_on_postgres() -> Iterator[Path]:
    """The same, with its log on a server."""
    yield from _prepared("postgres")


def _prepared(store: str) -> Iterator[Path]:
    # The death of a process is the same on a disk in memory, which is ten times as fast.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    base = Path(tempfile.mkdtemp(prefix="treenail-crash-", dir=memory))
    world = World(base / "world")
    world.workspace.mkdir(parents=True)
    world.deliveries.mkdir(parents=True)
    world.runs.touch()
    _make_tree(world.workspace)
    if store == "postgres":
        world.url.write_text(shared().url(base))

    def first_run() -> None:
        with (
            world.open_log() as log,
            Session(log=log, session_id=SESSION_ID) as session,
            HostFilesystem(world.workspace, store=world.store) as filesystem,
        ):
            _, runner = _runtime(world, session, filesystem)
            assert runner.execute(ToolCall("earlier-call", "earlier")).success
            # Written outside of calls: the call under test begins by making a boundary of it.
            filesystem.write("notes.txt", "one\ntwo\nthree\n")
            session.dispatch(Plan("before the call"))

    in_child(first_run)
    if world.url.exists():
        # Kept apart, as the files are; what is used afterwards is a copy of it.
        shared().copy(world.url.read_text(), shared().url(base / "prepared"))
    yield world.top.rename(base / "prepared")
    shutil.rmtree(base)


def _world(prepared: Path) -> World:
    """Where a world is used: paths in its log and store say so."""
    return World(prepared.with_name("world"))


def _fresh(prepared: Path) -> World:
    """Copy a world to where it is used."""
    world = _world(prepared)
    shutil.rmtree(world.top, ignore_errors=True)
    shutil.copytree(prepared, world.top, symlinks=True)
    if world.url.exists():
        shared().copy(shared().url(prepared), world.url.read_text())
    return world


# --- the tools -------------------------------------------------------------------------------------


def _count_run(context: ToolContext) -> None:
    root = context.filesystem.host_root
    assert root is not None
    with World(root.parent).runs.open("ab", buffering=0) as file:
        file.write(b".")


def _tell(context: ToolContext) -> None:
    context.session.dispatch(Plan("made by the call"))
    context.session.dispatch(Note("in the middle of the call"))
    context.session.dispatch(Spent(7))
    context.outbox.put("mail", {"to": "somebody"})
    context.outbox.put("mail", {"to": "somebody else"}, key="second")


BLOB = bytes(range(256)) * 600


def earlier(*, context: ToolContext) -> ToolResult[None]:
    """Do something before the call under test."""
    context.filesystem.write("a.txt", "to be moved, by an earlier call\n")
    context.session.dispatch(Spent(1))
    return ToolResult.ok()


def edit(*, context: ToolContext) -> ToolResult[Finding]:
    """Change files in every way that the API offers, and state, and the outbox."""
    _count_run(context)
    files = context.filesystem
    assert isinstance(files.host_root, Path)
    context.session.dispatch(Note("the call begins"))
    files.write("new/deep/file.txt", "created with its parents\n")
    files.write("notes.txt", "overwritten\n")
    files.write("notes.txt", "overwritten again\n")
    files.write("journal.txt", "second\n", mode="append")
    with files.open_write("new/stream.bin") as stream:
        stream.write(BLOB)
    _tell(context)
    files.write(ODD_NAME, "tea\n")
    files.delete("old.txt")
    files.delete("link")
    files.delete("tree", recursive=True)
    files.move("a.txt", "b.txt")
    files.move("moved", "renamed")
    files.move("forged.txt", "target.txt", overwrite=True)
    files.delete("swapped", recursive=True)
    files.write("swapped", "a file where a directory was\n")
    files.mkdir("empty/inner")
    files.chmod("script.sh", 0o755)
    files.chmod("nested", 0o700)
    getattr(files, "symlink")("empty/link", "../notes.txt")  # noqa: B009  # more than the protocol asks for
    files.write("passing.txt", "made and deleted in the same call\n")
    files.delete("passing.txt")
    return ToolResult.ok(Finding("what the result carries"))


def edited_by_hand(root: Path) -> None:
    """Do what `edit` does, without Treenail."""
    (root / "new/deep").mkdir(parents=True)
    (root / "new/deep/file.txt").write_text("created with its parents\n")
    (root / "notes.txt").write_text("overwritten again\n")
    (root / "journal.txt").write_text("first\nsecond\n")
    (root / "new/stream.bin").write_bytes(BLOB)
    (root / ODD_NAME).write_text("tea\n")
    (root / "old.txt").unlink()
    (root / "link").unlink()
    shutil.rmtree(root / "tree")
    (root / "a.txt").rename(root / "b.txt")
    (root / "moved").rename(root / "renamed")
    (root / "forged.txt").rename(root / "target.txt")
    shutil.rmtree(root / "swapped")
    (root / "swapped").write_text("a file where a directory was\n")
    (root / "empty/inner").mkdir(parents=True)
    (root / "script.sh").chmod(0o755)
    (root / "nested").chmod(0o700)
    (root / "empty/link").symlink_to("../notes.txt")


SCRIPT = """
mkdir -p made/here && echo new > made/here/file.txt && echo more >> journal.txt; echo .
printf 'same size 2\\n' > forged.txt && touch -r untouched.bin forged.txt; echo .
rm -r tree && mv a.txt b.txt && chmod 755 script.sh && ln -s ../b.txt made/link; echo .
rm -r swapped && ln -s moved swapped && mkdir -p empty/inner && rm link && mv moved renamed; echo .
echo ignored too > ignored.log && chmod 700 nested
"""
"""It writes a dot after each step, so that there is something to read, and a moment to be killed at."""


async def command(*, context: ToolContext) -> ToolResult[Finding]:
    """Change files by a shell command and through the API, and state, and the outbox."""
    _count_run(context)
    root = context.filesystem.host_root
    assert root is not None
    context.session.dispatch(Note("the call begins"))
    context.filesystem.write("early.txt", "written before the command\n")
    done = await run_command_async(SCRIPT, cwd=root)
    assert (done.exit_code, done.stderr) == (0, "")
    context.filesystem.write("notes.txt", "written after the command\n")
    _tell(context)
    return ToolResult.ok(Finding("what the result carries"))


def commanded_by_hand(root: Path) -> None:
    """Do what `command` does, without Treenail."""
    (root / "early.txt").write_text("written before the command\n")
    subprocess.run(["/bin/sh", "-c", SCRIPT], cwd=root, check=True, stdout=subprocess.DEVNULL)
    (root / "notes.txt").write_text("written after the command\n")


async def endless(*, context: ToolContext) -> ToolResult[Finding]:
    """Run a command that kills this process, and goes on.

    On a busy machine it may be a while until the supervisor runs again; here the command sees to that.
    """
    root = context.filesystem.host_root
    assert root is not None
    await run_command_async(
        "kill -STOP $PPID; (sleep 0.5; kill -CONT $PPID) &\n"
        f"echo changed > notes.txt; kill -9 {os.getpid()}\n"
        "number=0; while :; do number=$((number + 1)); echo $number > notes.txt; mkdir -p made/$number; done",
        cwd=root,
    )
    return ToolResult.ok()


def look(*, context: ToolContext) -> ToolResult[Finding]:
    """Read files and tell the session; change no file."""
    with pytest.raises(ReadOnlyError):
        context.filesystem.write("notes.txt", "refused")
    context.session.dispatch(Note("the call begins"))
    _tell(context)
    assert context.filesystem.read("notes.txt").content == "one\ntwo\nthree\n"
    return ToolResult.ok(Finding("what the result carries"))


def fail_after_editing(*, context: ToolContext) -> ToolResult[Finding]:
    """Do everything that `edit` does, and then fail."""
    edit(context=context)
    about_to_fail.set()
    raise ValueError("no good after all")


async def fail_after_a_command(*, context: ToolContext) -> ToolResult[Finding]:
    """Do everything that `command` does, and then fail."""
    done = await command(context=context)
    about_to_fail.set()
    return replace(done, success=False)


about_to_fail = threading.Event()
"""Set by a failing tool when everything is done, in the process that is to be killed."""


def _nothing(root: Path) -> None:
    """Change no file."""


TOOLS = (
    Tool.wrap(earlier),
    Tool.wrap(edit),
    Tool.wrap(command, files="any"),
    Tool.wrap(endless, files="any"),
    Tool.wrap(look, effects="none"),
    Tool.wrap(fail_after_editing),
    Tool.wrap(fail_after_a_command, files="any"),
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A call, and what it comes to if nobody disturbs it."""

    tool: str
    by_hand: Callable[[Path], None]
    kills: int
    """At how many moments it is killed, if there are more; see `killing.sample`."""
    succeeds: bool = True
    starts: bool = True
    """Whether the call is announced before it runs."""
    foreign: bool = False
    """Whether it starts processes, whose pace nobody knows."""


EDIT = Scenario("edit", edited_by_hand, 60)
COMMAND = Scenario("command", commanded_by_hand, 25, foreign=True)
LOOK = Scenario("look", _nothing, 20, starts=False)
FAIL = Scenario("fail_after_editing", _nothing, 30, succeeds=False)
FAIL_COMMAND = Scenario("fail_after_a_command", _nothing, 12, succeeds=False, foreign=True)
NOTES = 2
"""How many notes each of them writes."""


def _execute(runner: ToolRunner, scenario: Scenario, *, is_resume: bool = False) -> ToolResult[Finding]:
    context = ToolContext(runner.execution_state, is_resume=is_resume)
    return runner.execute(
        ToolCall(CALL_ID, scenario.tool),
        context=context,
        record=lambda result: [Answer(CALL_ID, "done" if result.success else "failed")],
    )


def _call(scenario: Scenario, world: World) -> Callable[[Watch], None]:
    """What the process does that is to be killed: from the entry of `execute` until it returns.

    Until a failing tool fails, it does nothing that the same tool without the failure does not do; so there
    the kills begin with the failure.
    """

    def work(watch: Watch) -> None:
        with opened(world) as (_, runner), ExitStack() as watched:
            watched.enter_context(watch(None if scenario.succeeds else about_to_fail))
            _execute(runner, scenario)

    return work


def _recovery(world: World) -> Callable[[Watch], None]:
    """What a process does that is to be killed while it recovers."""

    def work(watch: Watch) -> None:
        with opened(world) as (state, _), watch():
            recover(state)

    return work


# --- what is compared ------------------------------------------------------------------------------

Tree = Mapping[str, tuple[object, ...]]


def _tree(root: Path) -> Tree:
    """Every entry of a workspace: type, permission bits, content, target."""
    return {path: (oct(mode), content) for path, (_, mode, _, _, content) in Disk([root]).look().items()}


def _times(root: Path) -> Tree:
    """When each file was last written."""
    return {
        path: (written,)
        for path, (_, mode, _, written, _) in Disk([root]).look().items()
        if stat.S_ISREG(mode)
    }


def _marks(root: Path) -> Tree:
    """When anything at all was last done to each entry; nobody can set that back."""
    found: dict[str, tuple[object, ...]] = {}
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            status = os.lstat(os.path.join(directory, name))
            found[os.path.join(directory, name)] = (status.st_ino, status.st_ctime_ns)
    return found


@dataclass(frozen=True, slots=True)
class Facts:
    """What a call changes all at once, or not at all."""

    plan: tuple[str, ...]
    balance: tuple[int, ...]
    findings: tuple[str, ...]
    outbox: tuple[str, ...]
    tree: Tree


@dataclass(frozen=True, slots=True)
class History:
    """What is kept of a call, whatever became of it."""

    started: int
    outcomes: tuple[str, ...]
    answers: tuple[str, ...]
    notes: int
    receipts: tuple[int, ...]


def _look(state: ExecutionState, world: World) -> tuple[Facts, History]:
    session = state.session
    facts = Facts(
        plan=tuple(each.text for each in session[Plan].all()),
        balance=tuple(each.cents for each in session[Balance].all()),
        findings=tuple(each.text for each in session[Finding].all()),
        outbox=tuple(each.key for each in session[OutboxPut].all()),
        tree=_tree(world.workspace),
    )
    history = History(
        started=sum(1 for each in session[ToolStarted].all() if each.call_id == CALL_ID),
        outcomes=tuple(each.outcome for each in session[ToolInvoked].all() if each.call_id == CALL_ID),
        answers=tuple(each.text for each in session[Answer].all()),
        notes=len(session[Note].all()),
        receipts=tuple(each.cents for each in session[Receipt].all()),
    )
    return facts, history


OUTBOX = (f"{SESSION_ID}:{CALL_ID}:0", f"{SESSION_ID}:{CALL_ID}:second")


def _references(prepared: Path, scenario: Scenario) -> tuple[Facts, Facts]:
    """Return the facts before the call and after it, written down by hand."""
    world = _fresh(prepared)
    before = Facts(("before the call",), (1,), (), (), _tree(world.workspace))
    scenario.by_hand(world.workspace)
    tree = _tree(world.workspace)
    if not scenario.succeeds:
        return before, before
    return before, Facts(("made by the call",), (8,), ("what the result carries",), OUTBOX, tree)


@dataclass(slots=True)
class Judge:
    """Opens a world after a crash, and says whether everything in it is as promised."""

    scenario: Scenario
    before: Facts
    after: Facts
    times: Tree

    @classmethod
    def of(cls, prepared: Path, scenario: Scenario) -> Judge:
        before, after = _references(prepared, scenario)
        judge = cls(scenario, before, after, _times(_fresh(prepared).workspace))
        # A world that nobody disturbed passes. What is made on first use is made here, not in each child.
        world = _fresh(prepared)
        assert judge.judge(world, _marks(world.workspace / ".git")) is False
        return judge

    def judge(self, world: World, git: Tree, *, resume: bool = True, go_back: bool = True) -> bool:
        """Recover, look, resume, look, go back, look. Says whether the call had happened."""
        with opened(world) as (state, _):
            happened = self._recovered(state, world)
        if resume:
            with opened(world) as (state, runner):
                self._resumed(state, runner, world)
                if go_back:
                    changed = {
                        str(world.workspace / each.path) for each in diff_calls(state, CALL_ID).changes
                    }
                    assert changed == {
                        each
                        for each in {*self.before.tree, *self.after.tree}
                        if self.before.tree.get(each) != self.after.tree.get(each)
                    }
                    rollback_to_call(state, CALL_ID)
                    assert _look(state, world)[0] == replace(self.before, outbox=self.after.outbox)
        assert _marks(world.workspace / ".git") == git, "the user's repository was touched"
        return happened

    def _recovered(self, state: ExecutionState, world: World) -> bool:
        recovered = recover(state)
        facts, history = _look(state, world)
        happened = "ok" in history.outcomes
        ended = bool(history.answers)
        assert facts == (self.after if happened else self.before)
        if happened or not self.scenario.starts:
            assert history.outcomes == (("ok",) if happened else ())
        elif ended:
            assert history.outcomes == ("failed",)
        else:
            assert history.outcomes == ("interrupted",) * history.started
        assert history.answers == (("done" if happened else "failed",) if ended else ())
        assert history.started == (1 if ended and self.scenario.starts else history.started)
        # Logged at once; what reaches working state as well is history only when the call has ended.
        assert history.notes == NOTES if ended else history.notes <= NOTES
        assert history.receipts == ((1, 7) if ended else (1,))
        assert {each.call_id for each in recovered} <= {CALL_ID}
        assert {each.outcome for each in recovered} <= {"committed" if happened else "rolled_back"}
        assert not any(each.conflicts for each in recovered)
        filesystem = filesystem_of(state)
        assert filesystem is not None
        assert list(filesystem.unfinished()) == []
        if not happened:
            assert _times(world.workspace) == self.times, "a file that was put back has another time"
        head = state.session.head
        assert recover(state) == (), "recovering again found something to do"
        assert (_look(state, world), state.session.head) == ((facts, history), head)
        return happened

    def _resumed(self, state: ExecutionState, runner: ToolRunner, world: World) -> None:
        runs = world.runs.stat().st_size
        _, history = _look(state, world)
        if not history.answers:
            result = _execute(runner, self.scenario, is_resume=True)
            assert result.success == self.scenario.succeeds, result.message
            runs += 1
        runner.outbox.flush(state.session)
        facts, history = _look(state, world)
        assert facts == self.after
        assert history.answers == ("done" if self.scenario.succeeds else "failed",)
        assert history.outcomes[-1] == ("ok" if self.scenario.succeeds else "failed")
        if self.scenario.starts:
            assert world.runs.stat().st_size == runs, "a call that had ended was run again"
        assert undelivered(state.session) == ()
        delivered = [os.readlink(each) for each in sorted(world.deliveries.iterdir())]
        # At least once, each in its turn: a delivery may be repeated, but only the one that was cut off.
        assert tuple(dict.fromkeys(delivered)) == self.after.outbox
        assert len(delivered) <= len(self.after.outbox) + 1


@functools.cache
def _moments(prepared: Path, scenario: Scenario) -> Sequence[Moment]:
    found, passed = moments(_call(scenario, _fresh(prepared)), _world(prepared).disk)
    assert passed > len(found) > 10, "the moments were not seen"
    return found


def _kill_and_judge(
    judge: Judge,
    before: Path,
    work: Callable[[World], Callable[[Watch], None]],
    found: Sequence[Moment],
    *,
    resume_every: int,
) -> list[bool]:
    """Kill some work at these moments; say of each whether the call had happened."""
    outcomes: list[bool] = []
    missed = 0
    for number, moment in enumerate(found):
        world = _fresh(before)
        git = _marks(world.workspace / ".git")
        missed += not killed(work(world), moment, world.disk, orphans=judge.scenario.foreign)
        resume = EVERY_MOMENT or number % resume_every == 0
        try:
            outcomes.append(judge.judge(world, git, resume=resume, go_back=EVERY_MOMENT or number % 8 == 0))
        except Exception as error:
            error.add_note(f"killed {moment}")
            raise
    # How often a pipe is read depends on the pace of others; everything else is the same each time.
    assert missed <= (len(outcomes) // 2 if judge.scenario.foreign else 0)
    return outcomes


@pytest.mark.parametrize("scenario", [EDIT, COMMAND, LOOK, FAIL, FAIL_COMMAND], ids=lambda each: each.tool)
def test_a_killed_call_has_happened_wholly_or_not_at_all(prepared: Path, scenario: Scenario) -> None:
    """State, history, outbox and files agree after a kill at any moment, and resuming completes the call."""
    judge = Judge.of(prepared, scenario)
    found = _moments(prepared, scenario)
    outcomes = _kill_and_judge(
        judge,
        prepared,
        lambda world: _call(scenario, world),
        sample(found, scenario.kills),
        resume_every=2 if scenario is EDIT else 4,
    )
    assert outcomes[0] is False
    assert outcomes[-1] is scenario.succeeds
    assert scenario.foreign or outcomes == sorted(outcomes), "once a call has happened, it has happened"


@pytest.mark.parametrize(
    "scenario", [EDIT, FAIL, *([LOOK] if EVERY_MOMENT else [])], ids=lambda each: each.tool
)
def test_a_call_that_is_killed_at_any_statement_to_postgres_has_happened_or_not(
    prepared_on_postgres: Path, scenario: Scenario
) -> None:
    """Before and after each statement, where the log is on a server: the same promise, by the same judge."""
    judge = Judge.of(prepared_on_postgres, scenario)
    found = [each for each in _moments(prepared_on_postgres, scenario) if each.function == STATEMENT]
    assert len(found) >= 4, "the statements were not seen"
    outcomes = _kill_and_judge(
        judge,
        prepared_on_postgres,
        lambda world: _call(scenario, world),
        found,
        resume_every=1,
    )
    assert outcomes[0] is False
    assert outcomes[-1] is scenario.succeeds
    assert outcomes == sorted(outcomes)


@pytest.mark.parametrize(
    ("scenario", "when"),
    [
        (EDIT, "just before the commit"),
        (EDIT, "just after the commit"),
        (FAIL, "in the middle"),
    ],
    ids=lambda each: each.tool if isinstance(each, Scenario) else each.replace(" ", "-"),
)
def test_a_recovery_that_is_killed_is_completed_by_the_next(
    prepared: Path, scenario: Scenario, when: str
) -> None:
    """It does not matter how often recovering is cut off, nor where."""
    judge = Judge.of(prepared, scenario)
    found = _moments(prepared, scenario)

    def crash(number: int) -> tuple[World, bool]:
        world = _fresh(prepared)
        return world, killed(_call(scenario, world), found[number], world.disk, orphans=scenario.foreign)

    def is_committed(number: int) -> bool:
        world, is_killed = crash(number)
        if not is_killed:
            return False  # How often a pipe is read depends on the pace of others, and is before the commit.
        with opened(world) as (state, _):
            return any(each.call_id == CALL_ID and each.success for each in state.session[ToolInvoked].all())

    position = len(found) // 2
    if when != "in the middle":
        position = bisect_left(range(len(found)), True, key=is_committed)
        position -= when == "just before the commit"
    crashed = prepared.with_name("crashed")
    shutil.rmtree(crashed, ignore_errors=True)
    world, is_killed = crash(position)
    while not is_killed:
        world, is_killed = crash(position)
    world.top.rename(crashed)
    steps, _ = moments(_recovery(_fresh(crashed)), _world(prepared).disk)
    outcomes = _kill_and_judge(judge, crashed, _recovery, sample(steps, 12), resume_every=5)
    assert set(outcomes) == {when == "just after the commit"}


def test_recovery_waits_for_the_command_that_a_dead_process_left_behind(prepared: Path) -> None:
    """What is rolled back stays so, although a command was still at work when the next process came."""
    world = _fresh(prepared)
    before = _tree(world.workspace)

    def call() -> None:
        with opened(world) as (_, runner):
            runner.execute(ToolCall(CALL_ID, "endless"))

    wait_for_the_command = orphaned(call)
    with opened(world) as (state, _):
        (recovered,) = recover(state)
        assert recovered.outcome == "rolled_back"
        found = _tree(world.workspace)
    wait_for_the_command()
    assert found == before
    assert _tree(world.workspace) == before
