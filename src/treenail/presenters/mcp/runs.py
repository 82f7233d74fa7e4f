"""The runs that a server of tools starts, one after the other, and what it tells about any run."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Lock
from typing import Any
from uuid import UUID, uuid5

from treenail.containment import CancellationToken
from treenail.errors import SessionNotFoundError, UsageError
from treenail.history import (
    LAST,
    RunTree,
    answer_run,
    diff_run,
    find_run,
    lines,
    list_holds,
    live_text,
    opened_log,
    opened_run,
    read_tree,
    summarize,
    undo_run,
)
from treenail.presenters.cli.settings import Chosen
from treenail.presenters.cli.setup import RunSetup
from treenail.turns import LiveEvent, TurnState, ceilings_of

_KEYS = UUID("6f3d2c1e-5b57-4a36-9a8b-7d3f0a4f6b10")
"""The namespace of the ids that are made from keys."""

_RESUMABLE = {TurnState.UNFINISHED.value, TurnState.INTERRUPTED.value}
BY = "mcp"
"""Who acts, in the log."""


@dataclass(slots=True)
class _Work:
    """One turn that this server runs, or that waits for the one before it."""

    task: str | None
    """None to resume."""
    cancellation: CancellationToken = field(default_factory=CancellationToken)
    turn: Future[None] = field(default_factory=Future)
    doing: str = ""
    """What it does now, in a line."""


class Runs:
    """Starts runs in one directory, and reads its store.

    One turn runs at a time, because a workspace has one writer; the others wait in the order of their start.
    """

    def __init__(self, flags: Mapping[str, object | None], directory: Path) -> None:
        self._flags, self._directory = flags, directory.resolve()
        self._store = RunSetup(flags, directory=directory).store
        self._work: dict[UUID, _Work] = {}
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="treenail-run")

    def close(self) -> None:
        """Interrupt what runs. Each turn ends in the log, and can be resumed."""
        with self._lock:
            for each in self._work.values():
                each.turn.cancel()
                each.cancellation.cancel("the server was stopped")
        self._thread.shutdown()

    def start(
        self, task: str, key: str, *, max_cost_usd: float | None = None, timeout_s: float | None = None
    ) -> UUID:
        """Start a run, or find the one that was started with this key; resume that one if it was cut off."""
        if not task.strip() or not key.strip():
            raise UsageError("a run needs a task that says what to do, and a key of your choice")
        for wanted in (max_cost_usd, timeout_s):
            if wanted is not None and not wanted > 0:
                raise UsageError(f"a ceiling must be greater than 0, not {wanted}")
        run_id = uuid5(_KEYS, f"{self._directory}\n{key}")
        with self._lock:
            known = self._read(run_id)
            if task != self._task_of(run_id, known, task):
                raise UsageError(f"the key {key!r} belongs to another task; choose a new key")
            if self._is_under_way(run_id):
                return run_id
            if known is None:
                setup = self._setup(None)
                for name, wanted in (("max_cost", max_cost_usd), ("timeout", timeout_s)):
                    _lower(setup, name, wanted)
                self._begin(run_id, setup, task)
            elif known.summary.state == "empty":
                self._begin(run_id, self._setup(run_id), task)
            elif known.summary.state in _RESUMABLE or self._is_answered(run_id, known):
                self._begin(run_id, self._setup(run_id), None)
        return run_id

    def answer(self, run: str, call: str | None, *, approved: bool, note: str) -> UUID:
        """Answer a call that waits for a person, and resume the run."""
        run_id = self._named(run)
        with self._lock:
            setup = self._setup(run_id)
            answer_run(self._store, run_id, call, approved=approved, note=note, by=BY)
            if not list_holds(self._store, run_id):
                self._begin(run_id, setup, None)
        return run_id

    def cancel(self, run: str) -> UUID:
        """Interrupt a run of this server, and wait until it has ended."""
        run_id = self._named(run)
        work = self._work.get(run_id)
        if work is None or work.turn.done():
            if self.data(run)["state"] == "running":
                raise UsageError("another process writes this run; stop it there")
            return run_id
        if not work.turn.cancel():
            work.cancellation.cancel("cancelled by the client")
            wait([work.turn])
        return run_id

    def wait(self, run: str, timeout_s: float) -> str:
        """Wait for a turn to end, not longer than this; return what it does now, empty when it has ended."""
        work = self._work.get(self._named(run))
        if work is None or work.turn.done():
            if self.data(run)["state"] != "running":
                return ""
            Event().wait(timeout_s)
            return "another process writes this run"
        wait([work.turn], timeout_s)
        return "" if work.turn.done() else work.doing or "waits for the run before it"

    def undo(self, run: str) -> list[str]:
        """Undo everything that a run did to the files; return the calls that were undone."""
        run_id = self._named(run)
        if self._is_under_way(run_id):
            raise UsageError("the run is under way; cancel it first")
        return [each.call_id for each in undo_run(self._store, run_id, by=BY).undone]

    def diff(self, run: str) -> str:
        """Return what the run changed in the files, as text."""
        return diff_run(self._store, self._named(run)).diff.text

    def timeline(self, run: str) -> str:
        """Return what happened in a run, line by line."""
        tree = self._read(self._named(run))
        if tree is None:
            return ""
        shown = []
        for each in lines(tree.view):
            seq, mark = "" if each.seq is None else each.seq, " " if each.is_good else "✗"
            shown.append(f"{seq:>4} {mark} {each.label:<8}{each.text}")
        return "\n".join(shown)

    def list(self, limit: int) -> list[dict[str, object]]:
        """Return the newest runs, newest first."""
        with opened_log(self._store) as log:
            newest = [each for each in reversed(log.sessions()) if each.parent_id is None][:limit]
            return [summarize(log, each).to_data() for each in newest]

    def data(self, run: str) -> dict[str, Any]:
        """Return how a run stands, as its log shows it."""
        run_id = self._named(run)
        tree = self._read(run_id)
        if tree is None:
            return {"id": str(run_id), "state": "queued"} | self._outcome(run_id)
        view = tree.view
        state = "running" if self._is_under_way(run_id) else tree.summary.state
        turn = view.turns[-1] if view.turns else None
        return {
            "id": str(run_id),
            "state": state,
            "task": tree.summary.task,
            "answer": view.answer,
            "error_kind": None if turn is None else turn.error_kind,
            "details": tree.damage or ("" if turn is None else turn.details),
            "cost_usd": view.usage.cost_usd,
            "input_tokens": view.usage.input_tokens,
            "output_tokens": view.usage.output_tokens,
            "holds": [
                {"call": each.call_id, "tool": each.tool_name, "arguments": each.arguments}
                for each in list_holds(self._store, run_id)
            ],
            "next": _advice(state),
        } | (self._outcome(run_id) if state in _RESUMABLE else {})

    def _outcome(self, run_id: UUID) -> dict[str, Any]:
        """Say what kept a turn from running at all, if something did."""
        work = self._work.get(run_id)
        if work is None or not work.turn.done():
            return {}
        if work.turn.cancelled():
            return {"state": "cancelled", "next": ""} if work.task is not None else {}
        error = work.turn.exception()
        return {} if error is None else {"state": "failed", "details": str(error)}

    def _named(self, run: str) -> UUID:
        if run == LAST and self._work:
            return next(reversed(self._work))
        with suppress(ValueError):
            if (whole := UUID(run)) in self._work:
                return whole
        return find_run(self._store, run)

    def _read(self, run_id: UUID) -> RunTree | None:
        with opened_log(self._store) as log:
            try:
                return read_tree(log, run_id, depth=0)
            except SessionNotFoundError:
                return None

    def _task_of(self, run_id: UUID, known: RunTree | None, default: str) -> str:
        """Return the task that a run began with; `default` if there is no such run."""
        if known is not None and known.view.turns:
            return known.view.turns[0].task
        work = self._work.get(run_id)
        return default if work is None or work.task is None else work.task

    def _is_under_way(self, run_id: UUID) -> bool:
        work = self._work.get(run_id)
        return work is not None and not work.turn.done()

    def _is_answered(self, run_id: UUID, known: RunTree) -> bool:
        """Whether a run is held, and nothing of it waits for an answer any more."""
        return known.summary.state == TurnState.HELD.value and not list_holds(self._store, run_id)

    def _setup(self, run_id: UUID | None) -> RunSetup:
        """Set a run up by the operator's options; one that is resumed keeps the ceilings that are lower."""
        if run_id is None:
            return RunSetup(self._flags, directory=self._directory)
        setup = RunSetup(self._flags, directory=self._directory, run=str(run_id))
        with opened_run(self._store, run_id) as session:
            before = ceilings_of(session)
        if before is not None:
            for name, ceiling in (
                ("max_cost", before.max_cost_usd),
                ("max_steps", before.max_steps),
                ("max_retries", before.max_retries),
                ("timeout", before.timeout),
            ):
                _lower(setup, name, ceiling)
        return setup

    def _begin(self, run_id: UUID, setup: RunSetup, task: str | None) -> None:
        self._work.pop(run_id, None)
        work = self._work[run_id] = _Work(task)
        new_id = run_id if setup.run_id is None else None

        def watch(event: LiveEvent) -> None:
            work.doing = live_text(event) or work.doing

        def turn() -> None:
            setup.run(task, setup.permissions(), watch, work.cancellation, new_id=new_id).close()

        work.turn = self._thread.submit(turn)


def _lower(setup: RunSetup, name: str, wanted: float | None) -> None:
    """Lower a ceiling: a client may have less than the operator allows, never more."""
    allowed = setup.settings.number(name)
    if wanted is not None and (allowed is None or wanted < allowed):
        chosen = {**setup.settings.chosen, name: Chosen(wanted, "the client")}
        setup.settings = replace(setup.settings, chosen=chosen)


def _advice(state: str) -> str:
    if state == TurnState.HELD.value:
        return "a call waits for an answer: show it to the person, then call answer_hold"
    if state in _RESUMABLE:
        return "call start_run with the same key and task to resume it"
    return "call wait_run" if state == "running" else ""
