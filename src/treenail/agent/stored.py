"""Opening and closing stored runs: the session, its workspace, and the processes that write them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from uuid import UUID

from treenail.conversation import enable_inner_message_recording
from treenail.errors import LeaseHeldError, UsageError
from treenail.log import (
    Log,
    PostgresUrl,
    Store,
    end_owner,
    files_of,
    open_log,
    owner_process,
    place_of,
    this_process_owner,
)
from treenail.sandbox import Sandbox
from treenail.state import ExecutionState, ResourceRegistry, Session, entry_at
from treenail.state import opened as opened_item
from treenail.tools import SessionForked, filesystem_of, newest_workspace, recover, wait_for_orphans
from treenail.turns import LoopAttached, TurnStarted
from treenail.workspace import (
    Checkout,
    Filesystem,
    FilesystemSnapshot,
    InMemoryFilesystem,
    WorkspaceOrigin,
    bind_to_host,
    check_out,
    depot_of,
    end_other_writer,
    newest_of,
    origin_of,
)
from treenail.workspace.host import HostFilesystem

RunStore = str | Path | PostgresUrl | Log
"""Where runs are kept: the path of a SQLite file, the URL of a Postgres database, or a log that is open."""


def close_state(state: ExecutionState, store: RunStore | None) -> None:
    """Close a run's session and workspace, and the store if the run opened it itself."""
    state.session.close()
    close_workspace(state)
    if isinstance(store, (str, Path, PostgresUrl)):
        state.session.log.close()


def close_workspace(state: ExecutionState) -> None:
    """Let go of a workspace's handles."""
    filesystem = filesystem_of(state)
    if isinstance(filesystem, HostFilesystem):
        filesystem.close()


def end_other_writers(
    log: Log, run_id: UUID | None, workspace: str | Path | Filesystem | None = None
) -> None:
    """Kill the processes that write a run and the files of its workspace, and wait for their end.

    That comes before anything is written to the log: a process that is stopped may keep it locked. Raises
    `LeaseHeldError` or `WorkspaceBusyError` if a process cannot be ended from here.
    """
    if run_id is not None:
        _end_writer_of(log, run_id)
        if workspace is None:
            with closing(Session.open(log, run_id, read_only=True)) as session:
                workspace = workspace_of(session)
    place = place_of(log)
    if isinstance(workspace, (str, Path)) and place is not None:
        end_other_writer(workspace_store(place), workspace)
        wait_for_orphans(Path(workspace))


def _end_writer_of(log: Log, run_id: UUID) -> None:
    owner = log.info(run_id).owner
    if owner is None or owner_process(owner) in (None, os.getpid()):
        return  # Opening the run says who writes it, if anybody does.
    try:
        is_gone = end_owner(owner)
    except OSError as error:
        raise LeaseHeldError(
            f"process {owner_process(owner)} writes this run and could not be ended ({error.strerror})",
            owner=owner,
        ) from error
    if not is_gone:
        raise LeaseHeldError(f"process {owner_process(owner)} writes this run and does not end", owner=owner)


@contextmanager
def opened(
    store: str | Path | PostgresUrl, run_id: UUID, *, read_only: bool = True, take_over: bool = False
) -> Iterator[Session]:
    """Open a stored session, read-only by default; with `take_over`, end the processes that write it."""
    with closing(open_log(store, must_exist=True)) as log:
        if take_over:
            end_other_writers(log, run_id)
        with closing(Session.open(log, run_id, read_only=read_only)) as session:
            enable_inner_message_recording(session)
            yield session


@contextmanager
def reopened(
    store: str | Path | PostgresUrl,
    run_id: UUID,
    *,
    workspace: str | Path | None = None,
    take_over: bool = False,
) -> Iterator[ExecutionState]:
    """Open a stored run with its workspace, to roll it back, fork it or answer a hold.

    Changes of calls that a crash interrupted are rolled back first. Raises `LeaseHeldError` while another
    process writes the run, and `WorkspaceBusyError` while another one writes its files; with `take_over`,
    that process is killed first.
    """
    with opened(store, run_id, read_only=False, take_over=take_over) as session:
        place = workspace if workspace is not None else workspace_of(session)
        state, _ = open_state(session, place, store)
        try:
            recover(state)
            yield state
        finally:
            close_workspace(state)


def workspace_line(run_id: UUID) -> str:
    """Return the name of a run's history in the store of its workspace."""
    return f"session-{run_id}"


def workspace_of(session: Session) -> str | None:
    """Return the directory that a run works in, according to its log; None for a workspace in memory."""
    newest: tuple[int, TurnStarted | SessionForked | LoopAttached] | None = None
    for kind in (TurnStarted, SessionForked, LoopAttached):
        known = session[kind].view()
        if len(known):
            kept, origin = entry_at(known, -1)
            # The later event wins; an event out of a snapshot counts where the snapshot was restored.
            if newest is None or abs(origin) > newest[0]:
                newest = (abs(origin), opened_item(kept))
    return None if newest is None else newest[1].workspace


def workspace_store(store: Store) -> Path:
    """Return the directory of this machine that holds the stored files of a store's workspaces."""
    return files_of(store.resolve() if isinstance(store, Path) else store)


def open_state(
    session: Session,
    workspace: str | Path | Filesystem | None,
    store: RunStore | None,
    *,
    sandbox: Sandbox | None = None,
    checkouts: str | Path | None = None,
) -> tuple[ExecutionState, str | None]:
    """Combine a session with its workspace; return the state, and the workspace's directory if it has one.

    A workspace that travels is checked out on this machine, wherever it was before.
    """
    filesystem: Filesystem
    root: str | None = None
    origin = origin_of(session)
    if origin is not None and (workspace is None or isinstance(workspace, (str, Path))):
        filesystem = _checked_out(session, origin, sandbox or Sandbox(), checkouts)
        root = filesystem.root
    elif workspace is None:
        filesystem = InMemoryFilesystem()
    elif isinstance(workspace, (str, Path)):
        place = Path(workspace).resolve()
        root = str(place)
        # Files are stored beside the log's own file, whether the caller passed a path or an open log: a run
        # that began with one can be resumed with the other.
        kept_in = place_of(session.log)
        own = [] if kept_in is None else _own_files(kept_in)
        if isinstance(kept_in, PostgresUrl):
            bind_to_host(session, workspace_store(kept_in))
        filesystem = HostFilesystem(
            place,
            store=None if kept_in is None else workspace_store(kept_in),
            line=workspace_line(session.session_id),
            # A rollback must never restore an old log.
            exclude=(
                *(f"/{each.relative_to(place)}" for each in own if each.is_relative_to(place)),
                *(f"/{each}/" for each in (sandbox or Sandbox()).grants.live),
            ),
            sandbox=(sandbox or Sandbox()).hiding(own),
        )
    else:
        if sandbox is not None:
            raise UsageError(
                "the workspace has a sandbox of its own; pass it there: HostFilesystem(sandbox=...)"
            )
        filesystem = workspace
    resources = ResourceRegistry.build({Filesystem: filesystem})
    return ExecutionState(session=session, resources=resources, clock=session.clock), root


def _checked_out(
    session: Session, origin: WorkspaceOrigin, sandbox: Sandbox, checkouts: str | Path | None
) -> Checkout:
    """Check a run's workspace out as its log says it is."""
    kept_in = place_of(session.log)
    directory = Path(checkouts) if checkouts is not None else None
    if directory is None:
        if kept_in is None:
            raise UsageError("say where this machine keeps its copies of workspaces: checkouts=DIRECTORY")
        directory = workspace_store(kept_in) / "checkouts"
    depot = depot_of(session.log, origin.depot)
    return check_out(
        depot,
        session.session_id,
        newest_of(depot, named_boundaries(session, origin, fence=True)),
        directory.resolve(),
        exclude=[f"/{each}/" for each in sandbox.grants.live],
        sandbox=sandbox.hiding([directory, *(() if kept_in is None else _own_files(kept_in))]),
        quiet=wait_for_orphans,
    )


def named_boundaries(
    session: Session, origin: WorkspaceOrigin, *, fence: bool = False
) -> list[FilesystemSnapshot]:
    """Return the newest boundary of a workspace that travels in each log of a run, its subagents' included.

    With `fence`, whoever wrote those logs before is refused from here on, as in the run's own; raises
    `LeaseHeldError` while a living process writes one of them.
    """
    log, found = session.log, [newest_workspace(session)]
    pending = [session.session_id]
    while pending:
        for child in log.sessions(parent_id=pending.pop()):
            pending.append(child.session_id)
            if fence:
                log.release(log.acquire(child.session_id, owner=this_process_owner()))
            with closing(Session.open(log, child.session_id, read_only=True)) as opened:
                newest = newest_workspace(opened)
            # What is older than the origin belongs to a history that was pruned.
            if newest is not None and newest.created_at >= origin.snapshot.created_at:
                found.append(newest)
    return [each for each in found if each is not None and each.record]


def _own_files(store: Store) -> list[Path]:
    """Return what a store has on this machine: its commands do not see it, no rollback restores it."""
    if isinstance(store, PostgresUrl):
        return [files_of(store)]
    place = store.resolve()
    return [place.with_name(place.name + ending) for ending in ("", "-wal", "-shm", "-journal", ".files")]
