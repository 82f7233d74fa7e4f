"""What the tests of the transaction share: a world to run tools in, and a log that can be made to fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treenail.log import MemoryLog
from treenail.log.sqlite import SqliteLog
from treenail.state import CheckpointStore, ExecutionState, InProcessDispatcher, ResourceRegistry, Session
from treenail.tools import Plan, Tool, ToolCall, ToolContext, ToolInvoked, ToolResult, ToolRunner, tool
from treenail.tools.transaction import OpenCall
from treenail.workspace import Filesystem, InMemoryFilesystem
from treenail.workspace.host import HostFilesystem


@dataclass(frozen=True)
class Note:
    """Working state: a failed call takes it back."""

    text: str


@dataclass(frozen=True)
class Found:
    """A typed result, which populates a slice of its own."""

    path: str
    count: int = 0


class TroubledLog:
    """A real log, with something that happens before or after its next appends."""

    def __init__(self, behind: Any) -> None:
        self.behind = behind
        self.before: Callable[[Sequence[Any]], None] | None = None
        self.after: Callable[[Sequence[Any]], None] | None = None
        self.appends: list[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)

    def append(self, lease: Any, drafts: Sequence[Any], *, expected_seq: int) -> None:
        if self.before is not None:
            self.before(drafts)
        self.behind.append(lease, drafts, expected_seq=expected_seq)
        self.appends.append([each.type.removeprefix("treenail.") for each in drafts])
        if self.after is not None:
            self.after(drafts)


def once(error: BaseException) -> Callable[[Sequence[Any]], None]:
    """Fail the append that ends a call, one time."""
    left = [error]

    def fail(drafts: Sequence[Any]) -> None:
        if left and any(each.type == "treenail.ToolInvoked" for each in drafts):
            raise left.pop()

    return fail


@dataclass
class World:
    """A session on some log, and a workspace, in which tools run."""

    log: TroubledLog
    filesystem: Any
    session: Session
    bus: InProcessDispatcher
    checkpoints: CheckpointStore = field(default_factory=CheckpointStore)
    extra: dict[type, Any] = field(default_factory=dict)
    reopened: Callable[[], Any] = lambda: None
    """Makes the workspace anew, as another process does."""

    @property
    def state(self) -> ExecutionState:
        resources = ResourceRegistry.build({Filesystem: self.filesystem, **self.extra})
        return ExecutionState(self.session, resources, checkpoints=self.checkpoints)

    def runner(self, *tools: Tool[Any, Any], **parts: Any) -> ToolRunner:
        return ToolRunner(self.state, {each.name: each for each in tools}, "a-prompt", "an-adapter", **parts)

    def run(self, one: Tool[Any, Any], call_id: str = "c1", /, **arguments: Any) -> ToolResult[Any]:
        return self.runner(one).execute(ToolCall(call_id, one.name, arguments))

    def reopen(self) -> World:
        """End this world's use of the store and go on as another process would."""
        self.session.close()
        self.filesystem = self.reopened() or self.filesystem
        self.session = Session.open(self.log, self.session.session_id)  # type: ignore[arg-type] # a real log behind
        self.session[Note], self.session[Plan]
        return self

    def ends(self) -> list[ToolInvoked]:
        return list(self.session[ToolInvoked].all())

    def outcomes(self) -> list[str]:
        return [each.outcome for each in self.ends()]

    def notes(self) -> list[str]:
        return [each.text for each in self.session[Note].all()]

    def files(self) -> dict[str, str]:
        return {
            each.path: self.filesystem.read(each.path).content
            for each in self.filesystem.glob("**/*")
            if each.is_file
        }

    def facts(self) -> tuple[Mapping[str, str], list[str], tuple[Any, ...]]:
        """Everything that a failed call must leave as it was."""
        return self.files(), self.notes(), self.session[Plan].all()


def make_world(log_kind: str, workspace_kind: str, directory: Path) -> World:
    """Make a world with a file, a note and a plan in it."""
    behind = (
        MemoryLog(heartbeat=False)
        if log_kind == "memory"
        else SqliteLog(directory / "log.db", synchronous="NORMAL", heartbeat=False)
    )
    log, bus = TroubledLog(behind), InProcessDispatcher()
    session = Session(bus, log=log)  # type: ignore[arg-type] # a real log behind
    filesystem: Any = InMemoryFilesystem()
    world = World(log, filesystem, session, bus)
    if workspace_kind == "host":
        (directory / "workspace").mkdir()

        def reopened() -> HostFilesystem:
            if isinstance(world.filesystem, HostFilesystem):
                world.filesystem.close()
            return HostFilesystem(directory / "workspace", store=directory / "store")

        world.reopened = reopened
        world.filesystem = reopened()
    world.filesystem.write("file.txt", "original")
    session.dispatch(Note("before"))
    session[Plan].seed(Plan(objective="test", status="active"))
    return world


def mutate(context: ToolContext) -> None:
    """Change everything that a call can change."""
    context.filesystem.write("file.txt", "changed")
    context.filesystem.write("new/deep.txt", "new")
    context.session.dispatch(Note("during"))
    context.session[Plan].seed(Plan(objective="other", status="completed"))
    context.outbox.put("mail", {"to": "you"})


@tool
def succeeds(*, context: ToolContext) -> str:
    """Change everything and succeed."""
    mutate(context)
    return "done"


@tool
async def succeeds_async(*, context: ToolContext) -> str:
    """Change everything and succeed, in the event loop."""
    mutate(context)
    return "done"


@tool
def failing_tool(*, context: ToolContext) -> str:
    """Change everything and fail."""
    mutate(context)
    raise ValueError("no")


@tool(effects="none")
def looks(*, context: ToolContext) -> str:
    """Change nothing."""
    return str(context.filesystem.read("file.txt").content)


def begin(runner: ToolRunner, name: str, call_id: str = "c1") -> OpenCall:
    """Begin a call and leave it open."""
    plan = runner.plan(ToolCall(call_id, name))
    assert plan.tickets is None or plan.tickets.take_nowait()
    opened = runner.begin(plan, [])
    assert isinstance(opened, OpenCall)
    return opened


def end(opened: OpenCall) -> None:
    """End a call that was left open."""
    opened.end(ToolResult.ok())
    if opened.plan.tickets is not None:
        opened.plan.tickets.give_back()
