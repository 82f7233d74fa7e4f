"""What a person can do to a stored run. Every presenter calls these operations and adds none of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from treenail.agent import named_boundaries, reopened, workspace_line, workspace_of, workspace_store
from treenail.conversation import HistoryCompacted, branch_summary, compact
from treenail.errors import UsageError
from treenail.history.files import stored_files
from treenail.history.kinds import know_all_kinds
from treenail.history.stores import opened_log, opened_run
from treenail.log import Log, LogReport, PostgresUrl, Store, open_log, store_named, this_process_owner
from treenail.log.sqlite import SqliteLog
from treenail.state import AttentionNeeded, AttentionResolved, ExecutionState, ResourceRegistry, Session
from treenail.tools import (
    Boundary,
    RolledBack,
    ToolHeld,
    answer_hold,
    boundaries,
    diff_calls,
    filesystem_of,
    fork_at,
    newest_workspace,
    pending_holds,
    redo,
    rollback_to,
    workspace_call_id,
)
from treenail.turns import TurnStarted
from treenail.workspace import (
    Depot,
    Filesystem,
    KeptFiles,
    WorkspaceDiff,
    WorkspaceOrigin,
    begin_with_boundary,
    check_host,
    depot_of,
    kept_files,
    left_open,
    line_names,
    make_branch,
    make_patch,
    newest_of,
    origin_holder,
    origin_of,
    remove_checkouts,
    shown_path,
    sweep,
    write_tree,
)
from treenail.workspace.host import HostFilesystem

_KEPT_BY_HAND = 2
"""How many events stay as they are when a person has the conversation summarised."""

_COMMIT_LENGTH = 12
"""How much of a commit's id names it."""


def find_call(session: Session, call: str | None, *, standing: bool = False) -> Boundary:
    """Return the finished call that a person names by id, beginning or number; None is the newest one.

    With `standing`, the newest one is the newest that changed something and was not undone.
    """
    known = boundaries(session)
    if not known:
        raise UsageError("this run has no finished tool call to go back to")
    if call is None:
        newest = next((each for each in reversed(known) if each.stands or not standing), None)
        if newest is None:
            raise UsageError("no call of this run stands: each one failed, changed nothing, or was undone")
        return newest
    if call.isdigit() and 1 <= int(call) <= len(known):
        return known[int(call) - 1]
    found = [each for each in known if each.call_id.startswith(call)]
    if len({each.call_id for each in found}) == 1:
        return found[-1]
    shown = ", ".join(f"{number}={each.call_id} ({each.tool_name})" for number, each in enumerate(known, 1))
    raise UsageError(
        f"{'several calls begin' if found else 'no call begins'} with {call!r}; the calls are: {shown}"
    )


@dataclass(frozen=True, slots=True)
class RunDiff:
    """What a run changed in the files between two calls, and which of these calls were undone since."""

    first: str
    last: str
    diff: WorkspaceDiff
    undone: tuple[Boundary, ...] = ()


def diff_run(store: Store, run_id: UUID, first: str | None = None, last: str | None = None) -> RunDiff:
    """Return what the run changed in the files between two calls.

    By default these are its first and its last call that stand; a call that is named may be an undone one.
    """
    with opened_run(store, run_id) as session:
        if workspace_of(session) is None:
            raise UsageError("this run worked in memory; there are no files to compare")
        calls = [each for each in boundaries(session) if each.success]
        if not calls:
            raise UsageError("this run has no finished tool call, so it changed nothing")
        undone = tuple(each for each in calls if each.undone is not None)
        shown = [each for each in calls if each.undone is None]
        if first is None and last is None and not shown:
            return RunDiff(calls[0].call_id, calls[-1].call_id, WorkspaceDiff((), ""), undone)
        with stored_files(store, session) as filesystem:
            resources = ResourceRegistry.build({Filesystem: filesystem})
            state = ExecutionState(session, resources, clock=session.clock)
            start = (shown or calls)[0] if first is None else find_call(session, first)
            end = (shown or calls)[-1] if last is None else find_call(session, last)
            if last is None and first is not None:
                end = start
            if first is not None or last is not None:
                undone = tuple(e for e in undone if start.seq_after <= e.seq_after <= end.seq_after)
            diff = diff_calls(state, start.call_id, end.call_id)
            return RunDiff(start.call_id, end.call_id, diff, undone)


def fetch_run(store: Store, run_id: UUID, directory: Path) -> None:
    """Write the files of a run's workspace, as its log says they are, into a new or an empty directory.

    Raises `UsageError` for a run whose files do not travel.
    """
    with opened_run(store, run_id) as session:
        origin, depot = _travelling(session)
        write_tree(depot, newest_of(depot, named_boundaries(session, origin)), directory)


def patch_run(store: Store, run_id: UUID) -> bytes:
    """Return what a run has changed since it began, as a patch that `git apply` takes."""
    with opened_run(store, run_id) as session:
        origin, depot = _travelling(session)
        return make_patch(depot, origin.snapshot, newest_of(depot, named_boundaries(session, origin)))


def branch_run(store: Store, run_id: UUID, repository: Path, branch: str) -> str:
    """Make a branch of a run's workspace in a git repository, a commit for each call; return the last one.

    It begins at the commit that the run began with, if that is what it began with. Neither the index nor the
    files of the repository are touched.
    """
    with opened_run(store, run_id) as session:
        origin, depot = _travelling(session)
        newest = newest_of(depot, named_boundaries(session, origin))
        return make_branch(depot, origin, newest, repository, branch)


def _travelling(session: Session) -> tuple[WorkspaceOrigin, Depot]:
    origin = origin_of(session)
    if origin is None:
        place = workspace_of(session)
        where = f"its files are in {place}" if place is not None else "its files were in memory"
        raise UsageError(f"the files of run {session.session_id} do not travel; {where}")
    return origin, depot_of(session.log, origin.depot)


def undone_text(call: Boundary) -> str:
    """Say that a call was undone, by whom and when."""
    assert call.undone is not None
    who = f" by {call.undone.by}" if call.undone.by else ""
    when = call.undone.at.astimezone(UTC)
    return f"{call.tool_name} ({call.call_id}) was undone{who}, {when:%Y-%m-%d %H:%M:%S} UTC"


def rollback_run(
    store: Store, run_id: UUID, call: str | None = None, *, by: str = "", take_over: bool = False
) -> tuple[Boundary, RolledBack]:
    """Restore files and state to where they were before a tool call; return that call, and what was undone.

    By default that is the newest call that stands. Raises `UsageError` for a call that was undone already.
    """
    with reopened(store, run_id, take_over=take_over) as state:
        boundary = find_call(state.session, call, standing=True)
        if boundary.undone is not None:
            raise UsageError(f"{undone_text(boundary)}; `treenail redo` takes the last undo back")
        return boundary, rollback_to(state, boundary, by=by)


def preview_undo(
    store: Store, run_id: UUID, *, last_turn: bool = False, take_over: bool = False
) -> WorkspaceDiff:
    """Return what `undo_run` would change in the files. Raises the errors that it would raise."""
    with reopened(store, run_id, take_over=take_over) as state:
        before = _first_standing(state.session, last_turn=last_turn).before
        filesystem = filesystem_of(state)
        if before is None or not isinstance(filesystem, HostFilesystem):
            return WorkspaceDiff((), "")
        return filesystem.preview_restore(replace(before, scanned=False))


def undo_run(store: Store, run_id: UUID, *, last_turn: bool = False, by: str = "") -> RolledBack:
    """Restore files and state to where they were before the run's first call.

    With `last_turn`, before the first call of the newest turn that changed files and was not undone yet.
    Raises `WorkspaceConflictError`, before anything is changed, if somebody else has edited one of its files.
    """
    with reopened(store, run_id) as state:
        return rollback_to(state, _first_standing(state.session, last_turn=last_turn), action="undo", by=by)


def _first_standing(session: Session, *, last_turn: bool) -> Boundary:
    if workspace_of(session) is None:
        raise UsageError("this run worked in memory; there are no files to undo")
    standing = [each for each in boundaries(session) if each.stands]
    if not standing:
        raise UsageError(
            "no call of this run stands: each one failed, changed nothing, or was undone already"
        )
    if last_turn:
        newest = next((each for each in reversed(standing) if each.before != each.after), standing[-1])
        began = max(
            (
                envelope.seq
                for envelope, value in session.events(upto=newest.seq_before)
                if isinstance(value, TurnStarted)
            ),
            default=0,
        )
        standing = [each for each in standing if each.seq_before >= began]
    return standing[0]


def redo_run(store: Store, run_id: UUID, *, by: str = "", take_over: bool = False) -> RolledBack:
    """Take the last rollback or undo of a run back. Raises `UsageError` if there is none to take back."""
    with reopened(store, run_id, take_over=take_over) as state:
        return redo(state, by=by)


@dataclass(frozen=True, slots=True)
class KeptByRun:
    """What an undo of a run has taken away without knowing whose it was."""

    run_id: UUID
    call_id: str
    """The undone call; empty if a person went back."""
    files: KeptFiles

    @property
    def sentence(self) -> str:
        """When and why the files were taken away."""
        who = self.files.tool_name or "a call"
        why = {
            "undone": f"when {who} was undone",
            "conflict": f"what {who} wrote; it could not be applied",
            "restored": "when the files went back to an earlier state",
            "recovered": "when an earlier version was brought back",
        }
        call = f" ({self.call_id})" if self.call_id else ""
        return f"{why[self.files.reason]}{call}, {self.files.at:%Y-%m-%d %H:%M} UTC"

    def to_data(self) -> dict[str, Any]:
        """Return it as plain values for JSON."""
        kept = self.files
        about = {"run": str(self.run_id), "call": self.call_id, "tool": kept.tool_name, "reason": kept.reason}
        about["commit"] = kept.commit
        return {**about, "at": kept.at.isoformat(), "workspace": kept.root, "paths": list(kept.paths)}


def kept_by_runs(store: Store, run_id: UUID | None = None) -> list[KeptByRun]:
    """Return what the undos of a store's runs, or of one run, have taken away, oldest first."""
    objects = workspace_store(store)
    runs = {workspace_line(run_id): run_id} if run_id is not None else {}
    if run_id is None:
        with opened_log(store) as log:
            runs = {workspace_line(each.session_id): each.session_id for each in log.sessions()}
    found = []
    for line, owner in runs.items():
        for each in kept_files(objects, line):
            is_of_call = each.reason in ("undone", "conflict")
            found.append(KeptByRun(owner, each.call_id.rpartition("@")[0] if is_of_call else "", each))
    return sorted(found, key=lambda each: each.files.at)


def name_to_recover(kept: KeptByRun, known: Sequence[KeptByRun]) -> str:
    """Return what a person gives to `recover_files` to have these files back, among all that is known.

    That is the path, or the call, unless a later undo kept something by the same name: then it is the commit.
    """
    paths = kept.files.paths
    name = paths[0] if len(paths) == 1 else kept.call_id if paths else ""
    if name:
        try:
            if _find_kept(known, name, Path(kept.files.root))[0] == kept:
                return name
        except UsageError:
            pass
    return kept.files.commit[:_COMMIT_LENGTH]


def recover_files(
    store: Store, what: str, *, directory: Path, into: Path | None = None
) -> tuple[KeptByRun, Sequence[str], Sequence[str]]:
    """Bring back the newest version of a path that an undo took away, or all files of an undone call.

    `what` is a path, as seen from `directory` or from the workspace's root, the id of a call, or the
    beginning of the commit that holds the files, by which an older version is found, too. With `into` the
    files are written there, and the workspace is left alone. Returns what was kept, the paths that came back,
    and those whose present version was kept in its turn.
    """
    kept, under = _find_kept(kept_by_runs(store), what, directory)
    if into is not None:
        into.mkdir(parents=True, exist_ok=True)
        line = workspace_line(kept.run_id)
        with HostFilesystem(
            kept.files.root, store=workspace_store(store), line=line, read_only=True
        ) as filesystem:
            return kept, filesystem.copy_kept(kept.files, into, under), ()
    with reopened(store, kept.run_id, workspace=kept.files.root) as state:
        report = cast(HostFilesystem, filesystem_of(state)).bring_back(kept.files, under)
    if report.conflicts:
        raise UsageError(
            f"{', '.join(map(shown_path, report.conflicts))} could not be brought back, because something is "
            "in the way; write them to another directory with --into"
        )
    return kept, report.restored, report.kept


def _find_kept(known: Sequence[KeptByRun], what: str, directory: Path) -> tuple[KeptByRun, str]:
    """Return what a person means by a path or a call, and the path below which it is."""
    for each in reversed(known):
        root = Path(each.files.root)
        for path in (Path(os.path.normpath(directory / what)), root / os.path.normpath(what)):
            under = path.relative_to(root).as_posix() if path != root and path.is_relative_to(root) else ""
            if under and any(name == under or name.startswith(f"{under}/") for name, _ in each.files.files):
                return each, under
    for each in reversed(known):
        if each.call_id == what:
            return each, "."
    if len(what) >= _COMMIT_LENGTH:
        for each in reversed(known):
            if each.files.commit.startswith(what):
                return each, "."
    paths = dict.fromkeys(name for each in reversed(known) for name in each.files.paths)
    shown = ", ".join(map(shown_path, list(paths)[:10])) + (" ..." if len(paths) > 10 else "")
    known_paths = f"these can be brought back: {shown}" if paths else "there is nothing to bring back"
    raise UsageError(f"no undo has taken {what!r} away; {known_paths}")


def fork_run(
    store: Store,
    run_id: UUID,
    workspace: Path,
    call: str | None = None,
    *,
    after: bool = False,
    by: str = "",
) -> tuple[UUID, Boundary]:
    """Make a new run that continues from a tool call, in a workspace of its own; return it and the call."""
    if workspace.exists() and (not workspace.is_dir() or any(workspace.iterdir())):
        raise UsageError(f"{workspace} is not empty; name a new or an empty directory for the fork")
    with reopened(store, run_id) as state:
        boundary = find_call(state.session, call)
        workspace.mkdir(parents=True, exist_ok=True)
        made = fork_at(
            state,
            boundary.call_id,
            side="after" if after else "before",
            workspace=workspace,
            tell=branch_summary,
            by=by,
        )
        origin = origin_of(made.session)
        if origin is not None:
            depot, at = depot_of(made.session.log, origin.depot), newest_workspace(made.session)
            assert at is not None, "it has an origin"
            made.session.dispatch(
                begin_with_boundary(depot, made.session.session_id, at, f"fork of {run_id}")
            )
        made.session.close()
    return made.session.session_id, boundary


def newest_run_in(store: Store, directory: Path) -> UUID:
    """Return the newest run that works in a directory; workflows are not among them. Raises `UsageError`."""
    wanted = str(directory.resolve())
    with opened_log(store) as log:
        for each in reversed(log.sessions()):
            if each.parent_id is None and "workflow" not in dict(each.tags):
                with Session.open(log, each.session_id, read_only=True) as session:
                    if workspace_of(session) == wanted:
                        return each.session_id
    raise UsageError(f'no run has worked in {wanted} yet; start one with `treenail run "task"`')


def compact_run(store: Store, run_id: UUID) -> HistoryCompacted:
    """Summarise the conversation of a run now. Raises `UsageError` if there is nothing to summarise."""
    with reopened(store, run_id) as state:
        done = compact(state.session, keep_tail=_KEPT_BY_HAND)
    if done is None:
        raise UsageError("there is nothing to summarise yet: the conversation is as short as it gets")
    return done


def list_holds(store: Store, run_id: UUID) -> Sequence[ToolHeld]:
    """Return the calls of a run that wait for a person."""
    with opened_run(store, run_id) as session:
        return pending_holds(session)


def answer_run(
    store: Store,
    run_id: UUID,
    call: str | None = None,
    *,
    approved: bool,
    note: str = "",
    by: str = "",
    arguments: str | None = None,
) -> ToolHeld:
    """Answer a call that waits for a person, and return it. A resume then runs or refuses it.

    With `arguments` (JSON text) it runs with these instead of its own.
    """
    with reopened(store, run_id) as state:
        holds = pending_holds(state.session)
        if not holds:
            raise UsageError("no call of this run waits for an answer; see `treenail hold list`")
        chosen = [each for each in holds if each.call_id == call]
        chosen = chosen or [each for each in holds if call is None or each.call_id.startswith(call)]
        if len(chosen) != 1:
            shown = ", ".join(f"{each.call_id} ({each.tool_name})" for each in holds)
            raise UsageError(f"name one call with --call; these wait for an answer: {shown}")
        answer_hold(
            state.session,
            chosen[0].call_id,
            approved=approved,
            note=note,
            answered_by=by,
            arguments=arguments,
        )
    return chosen[0]


def attend_run(store: Store, run_id: UUID, note: str, *, by: str = "") -> AttentionResolved:
    """Mark a run's problem as fixed by hand. Raises `UsageError` if the run has none."""
    with reopened(store, run_id) as state:
        resolved = resolve_attention(state.session, note, by=by)
    if resolved is None:
        raise UsageError("nothing in this run needs a person; see `treenail diagnose`")
    return resolved


def resolve_attention(session: Session, note: str, *, by: str = "") -> AttentionResolved | None:
    """Record that a person fixed the problems of a session; returns None if it has none.

    It covers every problem recorded so far. The session can be resumed, and its history keeps both.
    """
    problems = 0
    for _, value in session.events():
        if isinstance(value, AttentionNeeded | AttentionResolved):
            problems = problems + 1 if isinstance(value, AttentionNeeded) else 0
    if not problems:
        return None
    if not note.strip():
        raise UsageError("the note is empty; write what was done about the problem")
    resolved = AttentionResolved(note, by)
    session.dispatch(resolved)
    return resolved


def prune_run(store: Store, run_id: UUID, *, keep_last: int) -> int:
    """Delete the oldest events of a run, except what it spent; return how many."""
    if keep_last < 0:
        raise UsageError(f"--keep-last must be 0 or more, not {keep_last}")
    know_all_kinds()
    with reopened(store, run_id) as state:
        session = state.session
        origin = origin_of(session)
        if origin is None:
            return session.prune(keep_last=keep_last)
        # The history of its files begins again: what was only needed to undo earlier calls goes.
        depot = depot_of(session.log, origin.depot)
        newest = newest_of(depot, named_boundaries(session, origin))
        again = begin_with_boundary(depot, run_id, newest, origin.source)
        session.dispatch(again)
        count = session.prune(keep_last=max(keep_last, 1))
        depot.release(run_id, keep=origin_holder(depot, again.snapshot.record))
        return count


def erase_run(store: str | Path | PostgresUrl, run_id: UUID, *, abandon: bool = False) -> None:
    """Delete a run: its log, and every file content that was kept for it alone.

    Neither leaves a byte in a file of this machine; docs/guarantees.md says what a database server keeps.

    Its judges, subagents and workflow steps are deleted too, with their copies of the workspace. The
    workspace itself is not touched. Raises `LeaseHeldError` while a process writes one of them, and
    `UsageError` if a crash cut off one of their calls, whose changes could not be undone any more. With
    `abandon=True` the workspace stays as that call left it.
    """
    place = store_named(store)
    objects = workspace_store(place)
    log = open_log(store, must_exist=True)
    try:
        family = _family(log, run_id)
        for each in family:
            if isinstance(place, PostgresUrl) and not abandon:
                with closing(Session.open(log, each, read_only=True)) as session:
                    check_host(session, objects)
            # Refused while another process writes it: its call is running, not cut off.
            log.release(log.acquire(each, owner=this_process_owner()))
            left = None if abandon else left_open(objects, workspace_line(each))
            if left is not None:
                call_id = left.removesuffix(workspace_call_id(each, ""))
                raise UsageError(
                    f"the call {call_id!r} of run {each} was cut off by a crash, and its changes are still "
                    f"in the workspace; resume the run or roll it back to undo them, or abandon them; "
                    f"nothing was erased"
                )
        # The run first: if a process has begun to write it, nothing is lost.
        depots = {origin.depot for each in family if (origin := _origin(log, each)) is not None}
        for each in family:
            log.erase(each)
        for name in depots:
            depot_of(log, name).sweep()
    finally:
        log.close()
    for each in family:
        remove_checkouts(objects / "checkouts", each)
    if not objects.exists():
        return
    gone = {workspace_line(each) for each in family}
    sweep(objects, [name for name in line_names(objects) if name not in gone])
    for each in family:
        shutil.rmtree(objects / "isolated" / str(each), ignore_errors=True)


def _origin(log: Log, run_id: UUID) -> WorkspaceOrigin | None:
    with closing(Session.open(log, run_id, read_only=True)) as session:
        return origin_of(session)


def _family(log: Log, run_id: UUID) -> list[UUID]:
    """Return a session and everything below it, the oldest generation first."""
    log.info(run_id)
    found = [run_id]
    for each in found:
        found.extend(child.session_id for child in log.sessions(parent_id=each))
    return found


def salvage_store(store: Store, into: Path) -> Sequence[LogReport]:
    """Copy the readable part of a damaged store into a new file; return what was found for each session."""
    if isinstance(store, PostgresUrl):
        raise UsageError(
            f"{store} is not a file: repairing a damaged database is the server's affair; restore it from "
            f"a backup (pg_dump -n {store.schema}), or export single runs with `treenail export`"
        )
    return SqliteLog.salvage(store, into)
