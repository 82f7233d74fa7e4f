"""What the inspector knows: a store, its list of runs, and the few runs that somebody looks at."""

from __future__ import annotations

import getpass
import json
import os
from collections import OrderedDict
from contextlib import ExitStack
from threading import Lock
from typing import Any
from uuid import UUID

import treenail
from treenail.agent import workspace_of
from treenail.errors import UsageError
from treenail.history import OpenRun, call_at, diff_of_call, diff_run, file_diffs, opened_log, stored_files
from treenail.log import Log, Store, watcher_of
from treenail.presenters.web.runs import RunList

MAX_OPEN_RUNS = 8
"""How many folded runs are kept in memory."""

_MOST_CHANGED = 200
"""How many changed rows an update has; a page that has missed more asks for what it shows."""

_WAIT_S = 0.5


class Inspector:
    """Reads a store for the page. Every method may be called from any thread."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._stack = ExitStack()
        self._log: Log = self._stack.enter_context(opened_log(store))
        self.runs = RunList(self._log)
        self._open: OrderedDict[UUID, OpenRun] = OrderedDict()
        self._lock = Lock()

    def close(self) -> None:
        """Close the store."""
        self.runs.close()
        self._stack.close()

    def about(self, *, read_only: bool) -> dict[str, Any]:
        """Say what is inspected, and by whom."""
        return {
            "store": str(self.store),
            "version": treenail.__version__,
            "read_only": read_only,
            "person": person(),
            "directory": os.getcwd(),
        }

    def opened(self, run_id: UUID) -> OpenRun:
        """Return a run with everything folded that its log has. Raises `SessionNotFoundError`."""
        with self._lock:
            run = self._open.get(run_id)
            if run is None:
                run = OpenRun(self._log, run_id)
                self._open[run_id] = run
            self._open.move_to_end(run_id)
            # One that is dropped here may be in use; it is closed when nobody has it any more.
            while len(self._open) > MAX_OPEN_RUNS:
                self._open.popitem(last=False)
        run.catch_up()
        return run

    def run(self, run_id: UUID) -> dict[str, Any]:
        """Return what is true of a run as a whole."""
        line = self.runs.one(run_id)
        run = self.opened(run_id)
        children = self.runs.page(0, 200, parent=run_id)["runs"] if line["children"] else []
        return line | run.head() | {"workspace": workspace_of(run.session), "child_runs": children}

    def rows(self, run_id: UUID, first: int, count: int) -> dict[str, Any]:
        """Return some rows of a run."""
        run = self.opened(run_id)
        return {"first": first, "rows": [each.to_data() for each in run.rows(first, count)]}

    def row(self, run_id: UUID, index: int) -> dict[str, Any]:
        """Return one row with its whole texts."""
        return self.opened(run_id).whole(index).to_data()

    def row_at(self, run_id: UUID, seq: int) -> dict[str, Any]:
        """Return the row of an event."""
        return {"index": self.opened(run_id).row_at(seq)}

    def event(self, run_id: UUID, seq: int) -> dict[str, Any]:
        """Return an event as it is logged."""
        for each in self._log.read(run_id, after=seq - 1, upto=seq):
            return {
                "seq": each.seq,
                "at": each.at.isoformat(),
                "type": each.type,
                "turn_id": each.turn_id,
                "checksum": each.checksum.hex(),
                "payload": _payload(each.payload),
            }
        raise UsageError(f"the log has no event {seq}")

    def diff(self, run_id: UUID, seq: int | None) -> dict[str, Any]:
        """Return what a run changed in the files, or the call that an event ended."""
        if seq is None:
            whole = diff_run(self.store, run_id)
            return {"files": [each.to_data() for each in file_diffs(whole.diff)], "undone": len(whole.undone)}
        run = self.opened(run_id)
        call = call_at(run.boundaries(), seq)
        with stored_files(self.store, run.session) as filesystem:
            found = file_diffs(diff_of_call(filesystem, call))
        return {"files": [each.to_data() for each in found], "undone": int(call.undone is not None)}

    def spending(self, run_id: UUID) -> dict[str, Any]:
        """Return what a run has used up over time."""
        return self.opened(run_id).spending()

    # --- what is new -----------------------------------------------------------------------------------

    def follow(self, run_id: UUID) -> RunFollower:
        """Follow a run as its log grows."""
        return RunFollower(self, self._log, run_id)

    def list_updates(self, version: int) -> tuple[int, Any]:
        """Wait a moment for a newer list of runs."""
        newest = self.runs.wait(version)
        return (newest, {"version": newest}) if newest != version else (version, None)


class RunFollower:
    """Waits for what changes in a run. It belongs to one stream; close it when that ends."""

    def __init__(self, inspector: Inspector, log: Log, run_id: UUID) -> None:
        self._inspector, self._log, self._run_id = inspector, log, run_id
        self._watcher = watcher_of(log, run_id)
        self._writer = log.info(run_id).owner

    def __call__(self, after: int) -> tuple[int, Any]:
        """Wait a moment for events after this one; return the newest, and what has changed or None."""
        head = self._watcher.wait(after, _WAIT_S)
        writer, self._writer = self._writer, self._log.info(self._run_id).owner
        if head <= after and writer == self._writer:
            return after, None
        run = self._inspector.opened(self._run_id)
        # A writer that is gone leaves no event, and changes the state all the same.
        rows = run.changed_rows(after, _MOST_CHANGED)
        changed = None if rows is None else [each.to_data() for each in rows]
        about = self._inspector.runs.one(self._run_id) | run.head()
        return max(about["seq"], after), {"run": about, "rows": changed}

    def close(self) -> None:
        """Stop waiting."""
        self._watcher.close()


def person() -> str:
    """Return the name of the person on whose behalf the inspector acts."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def _payload(payload: bytes) -> Any:
    try:
        return json.loads(payload)
    except ValueError:
        return payload.decode("utf-8", "replace")
