"""Tool boundaries: recovery after a crash, rollback to a call, diffs of calls, and forks.

Everything here is read from the log, so that it also works in another process than the one that ran the
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast
from uuid import UUID

from treenail.clock import new_id
from treenail.codec import FrozenDict
from treenail.errors import UsageError, WorkspaceConflictError
from treenail.log import SlicePolicy
from treenail.state import (
    Binding,
    ExecutionState,
    ResourceContext,
    ResourceRegistry,
    Session,
    entry_at,
    is_snapshotable,
    opened,
)
from treenail.tools.context import filesystem_of
from treenail.tools.events import (
    EndedCall,
    ForkMade,
    RolledBack,
    SessionForked,
    ToolInvoked,
    ToolStarted,
)
from treenail.tools.process import wait_for_orphans
from treenail.tools.tool import ToolResult
from treenail.workspace import Filesystem, FilesystemSnapshot, WorkspaceDiff, WorkspaceOrigin, shown_path

_TOLD_PATHS = 10
"""How many paths a message names."""

# --- after a crash ---------------------------------------------------------------------------------


def workspace_call_id(session_id: UUID, call_id: str) -> str:
    """Return the name of a call in the workspace's journal.

    Sessions may share a workspace, and only the log of the call's own session knows how the call ended,
    so the name contains the session.
    """
    return f"{call_id}@{session_id}"


@dataclass(frozen=True, slots=True)
class RecoveredCall:
    """A call that a crash interrupted, and how recovery settled it."""

    call_id: str
    tool_name: str
    outcome: Literal["rolled_back", "unknown", "committed"]
    """Rolled back, so that it can run again; unknown, for an external call; or already committed."""
    conflicts: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    """Paths that were taken away without knowing whose they were; `treenail recover` brings them back."""
    lost: tuple[str, ...] = ()
    """Files among them for which a full disk had no room."""


def told_of_undo(conflicts: Sequence[str], kept: Sequence[str], lost: Sequence[str] = ()) -> str:
    """Say what an undo left alone, what it took away and kept, and what it could not keep."""
    told = []
    if lost:
        told.append(f"(removed, and not kept because the disk was full: {_listed(lost)})")
    if conflicts:
        told.append(f"(left as somebody else changed them: {_listed(conflicts)})")
    if kept:
        told.append(f"(taken away by the undo, and kept for `treenail recover`: {_listed(kept)})")
    return " ".join(told)


def _listed(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _TOLD_PATHS} more" if len(paths) > _TOLD_PATHS else ""
    return ", ".join(map(shown_path, paths[:_TOLD_PATHS])) + more


def recover(state: ExecutionState) -> tuple[RecoveredCall, ...]:
    """Roll back the calls that a crash interrupted. Call it before anything else; calling it again is safe.

    The log decides: a call whose success is in it is kept, any other is rolled back. A call that acts
    outside and is not idempotent is recorded as unknown. A call of another session in the same workspace
    is left to that session, whose log knows about it.
    """
    session = state.session
    started = session[ToolStarted].all()
    ended = {each.attempt_id: each for each in session[ToolInvoked].all()}
    newest = {each.call_id: each for each in started}
    rolled_back = {each.rollback_id for each in session[RolledBack].all()}
    recovered: dict[str, RecoveredCall] = {}
    for call_id, workspace_id in _left_open(state):
        attempt = newest.get(call_id)
        end = None if attempt is None else ended.get(attempt.attempt_id)
        committed = call_id in rolled_back or (end is not None and end.success)
        if not committed:
            # A command of the dead process may not have been stopped yet.
            root = cast(Filesystem, filesystem_of(state)).host_root
            if root is not None:
                wait_for_orphans(root)
        report = cast(Filesystem, filesystem_of(state)).recover(workspace_id, committed=committed)
        name = "" if attempt is None else attempt.tool_name
        recovered[call_id] = RecoveredCall(
            call_id,
            name,
            "committed" if committed else "rolled_back",
            report.conflicts,
            report.kept,
            report.lost,
        )
    for attempt in started:
        if attempt.attempt_id in ended:
            continue
        unknown = attempt.effects == "external" and not attempt.idempotent
        known = recovered.get(attempt.call_id)
        left = RecoveredCall("", "", "rolled_back") if known is None else known
        session.dispatch(_ended_by_crash(state, attempt, left, unknown=unknown))
        outcome: Literal["unknown", "rolled_back"] = "unknown" if unknown else "rolled_back"
        recovered[attempt.call_id] = RecoveredCall(
            attempt.call_id, attempt.tool_name, outcome, left.conflicts, left.kept, left.lost
        )
    return tuple(recovered.values())


def _left_open(state: ExecutionState) -> Sequence[tuple[str, str]]:
    """List this session's calls that are open in the workspace: their ids, and their names there."""
    filesystem = filesystem_of(state)
    if filesystem is None or filesystem.read_only:
        return ()
    suffix = workspace_call_id(state.session.session_id, "")
    return [(each.removesuffix(suffix), each) for each in filesystem.unfinished() if each.endswith(suffix)]


def _ended_by_crash(
    state: ExecutionState,
    attempt: ToolStarted,
    left: RecoveredCall,
    *,
    unknown: bool,
) -> ToolInvoked:
    if unknown:
        message = unknown_outcome(attempt.tool_name, "the process ended while the call acted outside")
    else:
        message = (
            f"{attempt.tool_name} was interrupted when the process ended; "
            "everything it had changed was rolled back."
        )
    message = f"{message} {told_of_undo(left.conflicts, left.kept, left.lost)}".strip()
    return ToolInvoked(
        prompt_name="",
        adapter="",
        name=attempt.tool_name,
        params=FrozenDict(),
        result=ToolResult.error(message),
        session_id=state.session.session_id,
        created_at=state.clock.now(),
        call_id=attempt.call_id,
        attempt_id=attempt.attempt_id,
        outcome="unknown" if unknown else "interrupted",
        conflicts=left.conflicts,
        kept=left.kept,
    )


def unknown_outcome(tool_name: str, why: str) -> str:
    """Tell the model that it is unknown whether a call took effect."""
    return (
        f"The outcome of {tool_name} is unknown: {why}. It was not run again. "
        "Find out whether it took effect before you repeat it."
    )


def _ended_call(end: ToolInvoked) -> object:
    return end.call_id


def last_end(session: Session, call_id: str) -> ToolInvoked | None:
    """Return the newest end of a call, or None if it has not ended."""
    ends = session[ToolInvoked].view()
    position = ends.find(_ended_call, call_id)
    return None if position is None else ends[position]


# --- boundaries ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Boundary:
    """The place of one call in the log, and the workspace before and after it."""

    call_id: str
    tool_name: str
    seq_before: int
    """The last event before the call."""
    seq_after: int
    """The event that ended the call."""
    success: bool
    before: FilesystemSnapshot | None
    """The workspace before the call; None if nothing has changed it since."""
    after: FilesystemSnapshot | None
    has_effects: bool = False
    undone: RolledBack | None = None
    """What undid the call, if it no longer stands."""

    @property
    def stands(self) -> bool:
        """Whether the call changed something, or could have, and was neither rolled back nor undone since."""
        return self.success and self.has_effects and self.undone is None

    def at(self, side: Literal["before", "after"]) -> tuple[int, FilesystemSnapshot | None]:
        """Return the last event and the workspace on one side of the call."""
        return (self.seq_before, self.before) if side == "before" else (self.seq_after, self.after)


def boundaries(session: Session) -> tuple[Boundary, ...]:
    """Return the session's ended calls in order, read from its log."""
    return _boundaries(session)


def _boundaries(session: Session, upto: int | None = None) -> tuple[Boundary, ...]:
    starts: dict[str, tuple[int, ToolStarted]] = {}
    found: list[Boundary] = []
    undone: dict[int, RolledBack] = {}
    for envelope, value in session.events(upto=upto):
        if isinstance(value, ToolStarted):
            starts[value.attempt_id] = (envelope.seq, value)
        elif isinstance(value, RolledBack):
            undone |= {each.seq: value for each in value.undone}
            for each in value.redone:
                undone.pop(each.seq, None)
        elif isinstance(value, ToolInvoked):
            seq, start = starts.pop(value.attempt_id, (envelope.seq - value.batch_events, None))
            before = None if start is None else start.workspace
            found.append(
                Boundary(
                    call_id=value.call_id or "",
                    tool_name=value.name,
                    seq_before=seq - 1,
                    seq_after=envelope.seq,
                    success=value.success,
                    before=before,
                    after=value.workspace or before,
                    has_effects=start is not None,
                )
            )
    # A call that could not change the workspace has no snapshots. The workspace was then as the next call
    # with snapshots found it.
    later: FilesystemSnapshot | None = None
    for position in range(len(found) - 1, -1, -1):
        known = found[position]
        if known.before is None:
            found[position] = known = replace(known, before=later, after=later)
        if known.seq_after in undone:
            found[position] = replace(known, undone=undone[known.seq_after])
        later = known.before
    return tuple(found)


def newest_workspace(session: Session) -> FilesystemSnapshot | None:
    """Return the newest boundary of the workspace that a session's log names, or None."""
    newest: tuple[int, FilesystemSnapshot] | None = None
    kinds: Mapping[type[object], str] = {
        ToolStarted: "workspace",
        ToolInvoked: "workspace",
        RolledBack: "after",
        WorkspaceOrigin: "snapshot",
    }
    for kind, named in kinds.items():
        known = session[kind].view()
        for position in range(len(known) - 1, -1, -1):
            kept, origin = entry_at(known, position)
            if newest is not None and abs(origin) < newest[0]:
                break
            snapshot = getattr(opened(kept), named)
            if snapshot is not None:
                newest = abs(origin), snapshot
                break
    return None if newest is None else newest[1]


def boundary_of(session: Session, call_id: str) -> Boundary:
    """Return the newest boundary of a call. Raises `UsageError` if the call has not ended."""
    known = boundaries(session)
    for each in reversed(known):
        if each.call_id == call_id:
            return each
    names = ", ".join(each.call_id for each in known[-10:]) or "none"
    raise UsageError(f"there is no ended tool call {call_id!r} in this session (the newest are: {names})")


def diff_calls(state: ExecutionState, first: str, last: str | None = None) -> WorkspaceDiff:
    """Return the file changes of one call, or of all calls from `first` to `last`."""
    filesystem = filesystem_of(state)
    before = boundary_of(state.session, first).before
    after = boundary_of(state.session, last or first).after
    if filesystem is None or before is None:
        return WorkspaceDiff((), "")
    return filesystem.diff(before, after)


def rollback_to_call(
    state: ExecutionState,
    call_id: str,
    *,
    side: Literal["before", "after"] = "before",
    by: str = "",
) -> RolledBack:
    """Restore state and files as they were before or after a call of this process or an earlier one.

    The log records which calls were undone, and `by` whom. What others have changed in the meantime is left
    alone; where it is in the way, `WorkspaceConflictError` is raised and nothing has changed.
    """
    return rollback_to(state, boundary_of(state.session, call_id), side=side, by=by)


def rollback_to(
    state: ExecutionState,
    boundary: Boundary,
    *,
    side: Literal["before", "after"] = "before",
    action: Literal["rollback", "undo"] = "rollback",
    by: str = "",
) -> RolledBack:
    """Do what `rollback_to_call` does, for one of several calls with the same id."""
    at, workspace = boundary.at(side)
    return _go_back(state, at, workspace, action=action, by=by)


def last_undo(session: Session) -> RolledBack | None:
    """Return the newest rollback that a redo can take back: no call with effects has been kept since."""
    undos: list[RolledBack] = []
    for _, value in session.events():
        if isinstance(value, ToolInvoked) and value.success and value.attempt_id:
            undos.clear()
        elif isinstance(value, RolledBack) and value.action == "redo":
            undos = [each for each in undos if each.rollback_id != value.takes_back]
        elif isinstance(value, RolledBack):
            undos.append(value)
    return undos[-1] if undos else None


def redo(state: ExecutionState, *, by: str = "") -> RolledBack:
    """Take the last rollback back: state and files are as they were before it. Raises `UsageError`.

    What others have changed in the meantime is left alone, as by `rollback_to_call`.
    """
    last = last_undo(state.session)
    if last is None:
        raise UsageError("there is nothing to redo: no call was undone since the last one that was kept")
    return _go_back(state, last.from_seq, last.workspace, action="redo", by=by, takes_back=last.rollback_id)


def _go_back(
    state: ExecutionState, at: int, workspace: FilesystemSnapshot | None, **details: Any
) -> RolledBack:
    """Bring state and files to where they were after an event, and record it: one append is the commit.

    Until then the files are held as by a tool call, so that a crash leaves all of it or nothing.
    """
    session, filesystem = state.session, filesystem_of(state)
    now = {each.seq_after: each for each in _boundaries(session) if each.stands}
    then = {each.seq_after: each for each in _boundaries(session, at) if each.stands}
    event = RolledBack(
        rollback_id=new_id().hex,
        to_seq=at,
        from_seq=session.head,
        at=state.clock.now(),
        undone=_named(now, then),
        redone=_named(then, now),
        **details,
    )
    past, held = session.past(at), None
    session.check_fits(past)
    if workspace is not None and filesystem is not None:
        name = workspace_call_id(session.session_id, event.rollback_id)
        held = filesystem.begin(name, tool_name=event.action)
    try:
        if held is not None and filesystem is not None and workspace is not None:
            # Not the whole tree: what calls have changed goes back, what others have changed is theirs.
            report = filesystem.restore(replace(workspace, scanned=False))
            if report.conflicts:
                raise WorkspaceConflictError(
                    f"somebody else changed {_listed(report.conflicts)} a moment ago; nothing was restored",
                    paths=report.conflicts,
                )
            event = replace(
                event,
                workspace=held.base,
                after=held.prepare(),
                paths=report.restored,
                kept=report.kept,
                notes=report.notes,
            )
        session.rollback(past, reason=f"{event.action} of calls", beside=(event,))
    except BaseException:
        # An interrupt may come just after the append.
        if held is not None and not any(
            each.rollback_id == event.rollback_id for each in session[RolledBack].all()
        ):
            held.rollback()
        raise
    if held is not None:
        held.finish()
    return event


def _named(these: Mapping[int, Boundary], but: Mapping[int, Boundary]) -> tuple[EndedCall, ...]:
    return tuple(
        EndedCall(each.call_id, each.tool_name, seq) for seq, each in these.items() if seq not in but
    )


def fork_at(
    state: ExecutionState,
    call_id: str,
    *,
    side: Literal["before", "after"] = "before",
    workspace: Path | None = None,
    resources: ResourceRegistry | None = None,
    tell: Callable[[Session, int], object | None] | None = None,
    by: str = "",
) -> ExecutionState:
    """Make a new session that continues before or after a call, in its own workspace.

    `workspace` is the directory of the new workspace; a filesystem in memory needs none. Both sessions
    share resources without state, and what was spent. Other resources that can be snapshotted are left out,
    since both sessions would change them: pass the fork's own in `resources`, which override shared ones.

    Both logs record it, and `by` whom. `tell` may return an event about what the old session did after the
    call, such as `treenail.conversation.branch_summary`, which is recorded with it.
    """
    at, snapshot = boundary_of(state.session, call_id).at(side)
    filesystem = filesystem_of(state)
    shared = _shared(state)
    if filesystem is not None:
        snapshot = snapshot or filesystem.snapshot(tag=f"fork:{call_id}")
        fork = cast(Any, filesystem).fork
        made = fork(snapshot) if workspace is None else fork(snapshot, workspace)
        shared = shared.merge(ResourceRegistry.build({cast("type[Any]", Filesystem): made}))
    if resources is not None:
        shared = shared.merge(resources, strict=False)
    session = state.session.fork(at=at)
    place = None if workspace is None else str(workspace.resolve())
    lineage = SessionForked(str(state.session.session_id), at, call_id, side, place, by)
    told = None if tell is None else tell(state.session, at)
    session.dispatch_all((lineage,) if told is None else (lineage, told))
    state.session.dispatch(ForkMade(str(session.session_id), call_id, side, place, by))
    return ExecutionState(
        session=session,
        resources=shared,
        clock=state.clock,
        rng=state.rng,
        checkpoints=None if state.checkpoints is None else type(state.checkpoints)(),
    )


def _shared(state: ExecutionState) -> ResourceRegistry:
    """Return the resources that two sessions may share."""
    here = state.resources
    registry = here.registry if isinstance(here, ResourceContext) else here
    filesystem = filesystem_of(state)
    kept: list[Binding[object]] = []
    for each in registry:
        binding = cast("Binding[object]", registry.binding_for(each))
        instance = binding.provided
        changes = is_snapshotable(instance) and here.policy_of(each) is not SlicePolicy.LOG
        is_workspace = each is Filesystem or (instance is not None and instance is filesystem)
        if not is_workspace and not changes:
            kept.append(binding)
    return ResourceRegistry.of(*kept)
