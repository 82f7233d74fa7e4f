"""Diagnostics: is a session's log sound, how did its turns end, and what can a person do about it?

Theory of operation
-------------------
`diagnose` reads the log once, from the beginning to the end or to the damage, and folds it into `_Log`: the
turns with their evidence (`treenail.turns.states`), the calls, the model calls, the children. Each check is a
plain function of that, with an id of its own, and `CHECKS` lists all of them. A check that had nothing to
look at says so: it has passed, and has shown nothing.

A check fails if what stands in the log cannot be right, or if nobody can go on from it without a decision; it
warns if somebody should look or has something left to do. Findings carry the sequence numbers of the events
that they are about, and next actions are commands that can be pasted.

Nothing is changed, no lease is taken, and no damage is a traceback: a store that cannot be opened at all
gives a report as well (`diagnose_store`), from whatever can be salvaged of it.

Events of rooms above this one are known by the name of their type and by their attributes.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from treenail.conversation.events import HistoryCompacted, ProviderUsage, SubagentEvent
from treenail.conversation.messages import InnerMessage
from treenail.conversation.replay import Replay, Replayer
from treenail.errors import LogError, TreenailError, UsageError
from treenail.log.base import LogReport
from treenail.log.event import Envelope, SessionInfo
from treenail.log.sqlite import SqliteLog
from treenail.state.events import AttentionNeeded, AttentionResolved
from treenail.state.session import Session
from treenail.tools.events import HoldAnswered, ToolHeld, ToolInvoked, ToolStarted
from treenail.turns.derivation import Fact, FactReader
from treenail.turns.states import (
    EVIDENCE,
    PartialText,
    TurnDerivation,
    TurnEnded,
    TurnFold,
    TurnStarted,
    TurnState,
    pasteable,
)

CheckStatus = Literal["passed", "warning", "failed"]
"""What a check found: nothing wrong, something to look at, something that is wrong."""

ReportStatus = Literal["ready", "ready_with_warnings", "blocked"]
"""Whether a session can go on: without more, with something to look at, or not before somebody decided."""

STALE_AFTER = timedelta(minutes=5)
"""A child that should be at work and of which nothing was heard for so long is stale."""

NOTHING = "nothing_to_check"
"""The classification of a check that had nothing to look at."""

_OVER = frozenset({"completed", "failed", "timed_out", "cancelled", "detached", "closed"})
_RANK: Mapping[CheckStatus, int] = {"passed": 0, "warning": 1, "failed": 2}
_MOST_FINDINGS = 50


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check found, and the event that it is about."""

    message: str
    seq: int | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    id: str
    status: CheckStatus
    message: str
    classification: str
    """What it found, in one word that a program can compare."""
    findings: tuple[Finding, ...] = ()
    next_actions: tuple[str, ...] = ()

    def to_data(self) -> dict[str, Any]:
        """Return the result as plain values that JSON can hold."""
        return {
            "id": self.id,
            "status": self.status,
            "message": self.message,
            "details": {"classification": self.classification, "next_actions": list(self.next_actions)},
            "findings": [{"seq": each.seq, "message": each.message} for each in self.findings],
        }


@dataclass(frozen=True, slots=True)
class DiagnosticsReport:
    """What the checks say about a session, and what to do."""

    session_id: str
    status: ReportStatus
    checks: tuple[Check, ...]
    events: Mapping[str, object]
    replay: Mapping[str, object]
    turns: tuple[Mapping[str, object], ...]
    tree: Mapping[str, object]
    workflows: tuple[Mapping[str, object], ...]
    usage: Mapping[str, object]
    next_actions: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing blocks the session."""
        return self.status != "blocked"

    def check(self, check_id: str) -> Check:
        """Return one check by its id. Raises `KeyError` if there is none."""
        return {each.id: each for each in self.checks}[check_id]

    def to_data(self) -> dict[str, Any]:
        """Return the report as plain values that JSON can hold."""
        return {
            "session_id": self.session_id,
            "ok": self.ok,
            "status": self.status,
            "checks": [each.to_data() for each in self.checks],
            "events": dict(self.events),
            "replay": dict(self.replay),
            "turns": [dict(each) for each in self.turns],
            "tree": dict(self.tree),
            "workflows": [dict(each) for each in self.workflows],
            "usage": dict(self.usage),
            "next_actions": list(self.next_actions),
        }

    def render(self) -> str:
        """Write the report for a person."""
        marks = {"passed": "ok  ", "warning": "look", "failed": "BAD "}
        lines = [f"session {self.session_id}: {self.status.replace('_', ' ')}"]
        for each in self.checks:
            if each.classification == NOTHING:
                continue
            lines.append(f"  {marks[each.status]} {each.id}: {each.message}")
            if each.status != "passed":
                for finding in each.findings:
                    where = "" if finding.seq is None else f"event {finding.seq}: "
                    lines.append(f"         {where}{finding.message}")
        idle = [each.id for each in self.checks if each.classification == NOTHING]
        if idle:
            lines.append(f"  nothing to look at: {', '.join(idle)}")
        if self.next_actions:
            lines += ["next:", *(f"  {each}" for each in self.next_actions)]
        return "\n".join(lines)


# --- reading ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Log:
    """What one pass over a session's log found."""

    session_id: str
    store: object = None
    """Where it is kept: a path, or a log that knows one."""
    count: int = 0
    first: int | None = None
    last: int | None = None
    types: Counter[str] = field(default_factory=Counter)
    unreadable: list[tuple[int, str]] = field(default_factory=list)
    damage: str | None = None
    stored: LogReport | None = None
    info: SessionInfo | None = None
    children: tuple[SessionInfo, ...] = ()
    has_parent: bool = True
    now: datetime | None = None
    turns: list[TurnFold] = field(default_factory=list)
    open_calls: list[tuple[int, str, TurnFold | None]] = field(default_factory=list)
    """Calls without a result: where they were asked for, their ids, and the turn."""
    stray_results: list[tuple[int, str]] = field(default_factory=list)
    partials: list[tuple[int, PartialText]] = field(default_factory=list)
    endings: list[tuple[int, TurnEnded]] = field(default_factory=list)
    usages: list[tuple[int, ProviderUsage]] = field(default_factory=list)
    compactions: list[int] = field(default_factory=list)
    attempts: dict[str, tuple[int, ToolStarted]] = field(default_factory=dict)
    invoked: list[tuple[int, ToolInvoked]] = field(default_factory=list)
    holds: dict[str, tuple[int, ToolHeld]] = field(default_factory=dict)
    attention: list[tuple[int, AttentionNeeded]] = field(default_factory=list)
    """What a person has to look at and has not said to be put right."""
    resolved: list[tuple[int, AttentionResolved]] = field(default_factory=list)
    subagents: dict[str, list[tuple[Envelope, SubagentEvent]]] = field(default_factory=dict)
    workflows: dict[str, list[tuple[int, object]]] = field(default_factory=dict)
    replayer: Replayer = field(default_factory=Replayer)
    reader: FactReader = field(default_factory=FactReader)

    def take(self, envelope: Envelope, value: object | None) -> None:
        """Fold one event."""
        seq = envelope.seq
        self.count += 1
        self.first = seq if self.first is None else self.first
        self.last = seq
        self.types[envelope.type] += 1
        if value is None:
            self.unreadable.append((seq, envelope.type))
            return
        self.replayer.add(seq, value, envelope.type)
        for each in self.reader.facts(envelope, value):
            self._take(envelope, each)

    def _take(self, envelope: Envelope, told: Fact) -> None:
        seq, value = envelope.seq, told.value
        if isinstance(value, TurnStarted):
            if not (self.turns and self.turns[-1].takes_up(value)):
                self.turns.append(TurnFold(value.turn_id))
        elif told.is_imported and isinstance(value, InnerMessage) and not self.turns:
            self.turns.append(TurnFold(""))
        if self.turns:
            self.turns[-1].take(seq, told.turn_id, told.value)
            if told.is_imported and self.turns[-1].started is None:
                self.turns[-1].keep_loose(seq, told.value)
        match value:
            case InnerMessage():
                self._take_message(seq, value)
            case PartialText():
                self.partials.append((seq, value))
            case TurnEnded():
                self.endings.append((seq, value))
            case ProviderUsage():
                self.usages.append((seq, value))
            case HistoryCompacted():
                self.compactions.append(seq)
            case ToolStarted():
                self.attempts[value.attempt_id] = (seq, value)
            case ToolInvoked():
                self.attempts.pop(value.attempt_id, None)
                self.invoked.append((seq, value))
            case ToolHeld():
                self.holds[value.hold_id] = (seq, value)
            case HoldAnswered():
                self.holds.pop(value.hold_id, None)
            case AttentionNeeded():
                self.attention.append((seq, value))
            case AttentionResolved():
                self.attention.clear()
                self.resolved.append((seq, value))
            case SubagentEvent():
                self.subagents.setdefault(value.subagent_id, []).append((envelope, value))
            case _ if type(value).__name__ == "WorkflowEvent":
                self.workflows.setdefault(_text_of(value, "workflow_id"), []).append((seq, value))

    def _take_message(self, seq: int, message: InnerMessage) -> None:
        turn = self.turns[-1] if self.turns else None
        if message.role == "assistant":
            self.open_calls.extend((seq, each.call_id, turn) for each in message.tool_calls)
        elif message.role == "tool":
            for place, (_, call_id, _) in enumerate(self.open_calls):
                if call_id == message.tool_call_id:
                    del self.open_calls[place]
                    return
            self.stray_results.append((seq, message.tool_call_id or ""))

    @property
    def is_damaged(self) -> bool:
        """Whether events are lost. A snapshot is an optimisation: without it the events are folded."""
        stored = () if self.stored is None else self.stored.findings
        return self.damage is not None or any(each.kind != "snapshot" for each in stored)

    @property
    def derived(self) -> list[TurnDerivation]:
        """How each turn stands, oldest first."""
        return [each.derive() for each in self.turns]

    @property
    def newest(self) -> TurnDerivation | None:
        """How the newest turn stands."""
        return self.turns[-1].derive() if self.turns else None

    def command(self, name: str, rest: str = "") -> str:
        """Write a command about this session."""
        return f"treenail {name} {self.session_id}{' ' + rest if rest else ''}"


def _text_of(value: object, name: str) -> str:
    return str(getattr(value, name, "") or "")


def _read(session: Session) -> _Log:
    log = _Log(str(session.session_id), session.log, now=session.clock.now())
    store, session_id = session.log, session.session_id
    try:
        upto: int | None = session.head
        log.damage = session.report.damage
    except TreenailError:
        upto = None  # It cannot be folded; its events are read as far as they go.
    try:
        for envelope, value in session.events(upto=upto):
            log.take(envelope, value)
    except LogError as error:
        log.damage = str(error)
    try:
        log.stored = store.check(session_id)
        log.info = store.info(session_id)
        log.children = tuple(store.sessions(parent_id=session_id))
        if log.info.parent_id is not None:
            log.has_parent = any(each.session_id == log.info.parent_id for each in store.sessions())
    except LogError as error:
        log.damage = log.damage or str(error)
    return log


# --- the checks -------------------------------------------------------------------------------------------


def _nothing(check_id: str, what: str) -> Check:
    return Check(check_id, "passed", f"there {what} in this log to look at", NOTHING)


def _found(
    check_id: str,
    status: CheckStatus,
    classification: str,
    message: str,
    findings: Iterable[Finding] = (),
    *next_actions: str,
) -> Check:
    listed = tuple(findings)
    if len(listed) > _MOST_FINDINGS:
        more = Finding(f"and {len(listed) - _MOST_FINDINGS} more")
        listed = (*listed[:_MOST_FINDINGS], more)
    return Check(check_id, status, message, classification, listed, tuple(dict.fromkeys(next_actions)))


def _check_log(log: _Log) -> Check:
    findings = [Finding(each.message, each.seq) for each in (log.stored.findings if log.stored else ())]
    if log.damage is not None and log.damage not in [each.message for each in findings]:
        findings.insert(0, Finding(log.damage, log.last))
    if log.is_damaged:
        return _found(
            "log",
            "failed",
            "damaged",
            f"the store is damaged; {log.count} events are readable, the last one is {log.last or 0}",
            findings,
            "treenail salvage whole.db",
            log.command("export"),
        )
    if log.count == 0:
        return _found("log", "failed", "empty", "the log is empty: nothing was ever recorded here")
    unknown = [Finding(f"an event of type {kind} cannot be read here", seq) for seq, kind in log.unreadable]
    pruned = f"; those before {log.first} were pruned" if (log.first or 1) > 1 else ""
    if unknown or findings:
        return _found(
            "log",
            "warning",
            "unknown_types" if unknown else "snapshot",
            f"{log.count} events, {len(unknown)} of which cannot be read in this process{pruned}",
            [*unknown, *findings],
            "import the modules that define these types, then diagnose again",
        )
    return _found("log", "passed", "whole", f"{log.count} events, all whole{pruned}")


def _check_tool_pairing(log: _Log) -> Check:
    total = sum(len(each.tool_calls) for _, each in _messages(log)) if log.count else 0
    if not total and not log.stray_results:
        return _nothing("tool_pairing", "are no tool calls")
    newest = log.newest
    held = {each.call_id for _, each in log.holds.values()}
    goes_on = newest is not None and newest.state is not TurnState.COMPLETED
    lost, pending, waiting = [], [], []
    for seq, call_id, turn in log.open_calls:
        if call_id in held:
            waiting.append(Finding(f"the call {call_id} waits for a person", seq))
        elif goes_on and turn is log.turns[-1]:
            pending.append(Finding(f"the call {call_id} has no result yet; a resume runs it", seq))
        else:
            lost.append(Finding(f"the call {call_id} has no result, and its turn is over", seq))
    stray = [
        Finding(f"a result for {call_id or 'no call'} that nobody asked for", s)
        for s, call_id in log.stray_results
    ]
    everything = [*lost, *pending, *waiting, *stray]
    if lost:
        return _found(
            "tool_pairing",
            "failed",
            "orphan_call",
            f"{len(lost)} of {total} calls have no result",
            everything,
            log.command("replay"),
        )
    if pending or stray:
        return _found(
            "tool_pairing",
            "warning",
            "pending_call" if pending else "unmatched_result",
            f"{len(pending)} of {total} calls are still to be run, {len(stray)} results have no call",
            everything,
            *([log.command("resume")] if pending else ()),
        )
    return _found("tool_pairing", "passed", "held" if waiting else "paired", f"{total} calls", waiting)


def _messages(log: _Log) -> Sequence[tuple[int, InnerMessage]]:
    return [(seq, each) for seq, each in log.replayer.said if isinstance(each, InnerMessage)]


def _check_parent_waits(log: _Log) -> Check:
    if not log.subagents:
        return _nothing("parent_waits", "are no children")
    left = [
        Finding(f"{name} is {events[-1][1].status}, and the turn that started it is completed", envelope.seq)
        for name, events in log.subagents.items()
        for envelope in (events[-1][0],)
        if events[-1][1].status not in _OVER and _turn_of(log, events[0][0]) is TurnState.COMPLETED
    ]
    if left:
        return _found(
            "parent_waits",
            "warning",
            "left_behind",
            f"{len(left)} children were left at work by a turn that is completed",
            left,
            log.command("show"),
        )
    return _found("parent_waits", "passed", "waited", "no completed turn has left a child at work")


def _turn_of(log: _Log, envelope: Envelope) -> TurnState | None:
    for each in reversed(log.turns):
        if each.started is not None and each.started[0] <= envelope.seq:
            return each.derive().state
    return None


def _check_turn_completion(log: _Log) -> Check:
    turns = log.derived
    if not turns and log.workflows:
        return _nothing("turn_completion", "are no turns, as it is a workflow,")
    if not turns:
        return _found("turn_completion", "warning", "no_turn", "no turn was ever started in this session")
    false = [
        Finding(
            f"turn {each.turn_id} is said to be {each.claimed.value}, but the log lacks "
            + "; ".join(EVIDENCE[name].meaning for name in each.missing),
            _seq_of(log, each),
        )
        for each in turns
        if not each.is_as_claimed and each.claimed is not None
    ]
    if false:
        return _found(
            "turn_completion",
            "failed",
            "claim_without_evidence",
            f"{len(false)} of {len(turns)} turns claim what the log does not show",
            false,
            log.command("show"),
        )
    newest = turns[-1]
    if newest.started is None:
        return _found(
            "turn_completion",
            "warning",
            "taken_over",
            "a conversation was taken over from a snapshot, and nobody has gone on with it",
            (),
            log.command("resume"),
        )
    if newest.state is TurnState.UNFINISHED and log.is_damaged:
        return _found(
            "turn_completion",
            "warning",
            "unknown",
            f"how the newest turn ended is not known: the log can be read up to event {log.last}",
            [Finding(f"turn {newest.turn_id} began here", _seq_of(log, newest))],
        )
    if newest.state is TurnState.UNFINISHED:
        is_written = log.info is not None and log.info.owner is not None
        return _found(
            "turn_completion",
            "warning",
            "under_way" if is_written else "crashed",
            "the newest turn is under way"
            if is_written
            else "the newest turn has no ending: its process died",
            [Finding(f"turn {newest.turn_id} began here and has not ended", _seq_of(log, newest))],
            *(() if is_written else (log.command("resume"),)),
        )
    return _found(
        "turn_completion",
        "passed",
        newest.state.value,
        f"{len(turns)} turns, the newest one is {newest.state.value}",
    )


def _seq_of(log: _Log, derived: TurnDerivation) -> int | None:
    fold = next((each for each in log.turns if each.turn_id == derived.turn_id), None)
    if fold is None or fold.started is None:
        return None
    return fold.ended[0] if fold.ended is not None else fold.started[0]


def _check_assistant_canonicalization(log: _Log) -> Check:
    if not log.partials and not any(each.role == "assistant" for _, each in _messages(log)):
        return _nothing("assistant_canonicalization", "are no answers")
    cut = [
        Finding(f"{len(each.text)} characters of an answer that was cut off", seq)
        for seq, each in log.partials
    ]
    texts = {each.text for _, each in log.partials if each.text.strip()}
    mixed = [
        Finding("an answer in the conversation is word for word one that was cut off", seq)
        for seq, each in _messages(log)
        if each.role == "assistant" and each.content in texts
    ]
    if cut or mixed:
        return _found(
            "assistant_canonicalization",
            "warning",
            "partial_in_conversation" if mixed else "partial_preserved",
            f"{len(cut)} partial answers are kept as evidence; the model never sees them",
            [*cut, *mixed],
            log.command("replay"),
        )
    return _found("assistant_canonicalization", "passed", "clean", "every answer is a whole one")


def _check_turn_failure_evidence(log: _Log) -> Check:
    failures = [(seq, each) for seq, each in log.endings if each.state is not TurnState.COMPLETED]
    if not failures:
        return _nothing("turn_failure_evidence", "are no failed turns")
    lacking = [
        Finding(f"turn {each.turn_id} ended {each.state.value} without {', '.join(missing)}", seq)
        for seq, each in failures
        if (
            missing := [
                name
                for name, there in (
                    ("a kind", each.error_kind),
                    ("details", each.details),
                    ("next actions", each.next_actions),
                )
                if not there
            ]
        )
    ]
    told = [Finding(f"{each.state.value} ({each.error_kind}): {each.details}", seq) for seq, each in failures]
    if lacking:
        return _found(
            "turn_failure_evidence",
            "failed",
            "missing_fields",
            f"{len(lacking)} of {len(failures)} endings do not say why, or what to do",
            lacking,
            log.command("show"),
        )
    newest = failures[-1][1]
    is_last = log.newest is not None and log.newest.ended == newest
    return _found(
        "turn_failure_evidence",
        "warning" if is_last else "passed",
        newest.error_kind or newest.state.value,
        f"{len(failures)} turns did not complete, each with its cause",
        told,
        *(newest.next_actions if is_last else ()),
    )


def _check_subagent_timeouts(log: _Log) -> Check:
    late = [
        (e.seq, each) for events in log.subagents.values() for e, each in events if each.event == "timed_out"
    ]
    if not late:
        return _nothing("subagent_timeouts", "are no children that ran out of time")
    wanted = ("timeout_ms", "elapsed_ms", "reason", "child_session_id", "next_actions")
    lacking = [
        Finding(f"{each.subagent_id} timed out without {', '.join(missing)}", seq)
        for seq, each in late
        if (missing := [name for name in wanted if getattr(each, name) in (None, "", ())])
    ]
    if lacking:
        return _found(
            "subagent_timeouts",
            "failed",
            "missing_fields",
            f"{len(lacking)} timeouts are not explained",
            lacking,
        )
    told = [
        Finding(f"{each.subagent_id}: {each.elapsed_ms} of {each.timeout_ms} ms, {each.reason}", seq)
        for seq, each in late
    ]
    return _found(
        "subagent_timeouts",
        "warning",
        "timed_out",
        f"{len(late)} children ran out of time",
        told,
        *(action for _, each in late for action in each.next_actions),
        *(f"treenail show {each.child_session_id}" for _, each in late),
    )


def _check_workflow_events(log: _Log) -> Check:
    if not log.workflows:
        return _nothing("workflow_events", "are no workflows")
    marks = ("workflow_started", "workflow_resumed", "workflow_interrupted", "workflow_finished")
    open_ones = []
    for name, events in log.workflows.items():
        # A step that was decided about, or reset, after an ending waits for a resume: that is no ending.
        seen = [(seq, _text_of(each, "kind")) for seq, each in events]
        newest = max((place for place, (_, kind) in enumerate(seen) if kind in marks), default=0)
        seq, kind = seen[newest]
        if kind != "workflow_finished":
            told = "was interrupted" if kind == "workflow_interrupted" else "has not finished"
            open_ones.append(Finding(f"workflow {name} {told}", seq))
        elif newest < len(seen) - 1:
            open_ones.append(Finding(f"workflow {name} was changed after it had ended", seen[-1][0]))
    unnamed = [
        Finding("a workflow event without an id or a kind", seq)
        for events in log.workflows.values()
        for seq, each in events
        if not _text_of(each, "workflow_id") or not _text_of(each, "kind")
    ]
    if unnamed:
        return _found(
            "workflow_events", "failed", "missing_fields", "workflow events are incomplete", unnamed
        )
    if open_ones:
        return _found(
            "workflow_events",
            "warning",
            "unfinished",
            f"{len(open_ones)} workflows have not finished",
            open_ones,
            log.command("workflow resume"),
        )
    return _found("workflow_events", "passed", "finished", f"{len(log.workflows)} workflows have finished")


def _check_workflow_checkpoints(log: _Log) -> Check:
    steps: dict[tuple[str, str], tuple[int, str]] = {}
    for name, events in log.workflows.items():
        for seq, each in events:
            kind, step = _text_of(each, "kind"), _text_of(each, "step_id")
            if not step:
                continue
            if kind in ("checkpoint_decided", "step_held"):
                status = _text_of(each, "checkpoint_status") or _text_of(each, "status")
                steps[name, step] = (seq, status or ("held" if kind == "step_held" else "?"))
            elif kind in ("step_scheduled", "step_reset"):
                steps[name, step] = (seq, kind.removeprefix("step_"))
    if not steps:
        return _nothing("workflow_checkpoints", "are no steps of workflows")
    open_steps = [
        Finding(f"step {step} of {name} is {status}", seq)
        for (name, step), (seq, status) in steps.items()
        if status != "checkpoint_ready"
    ]
    if open_steps:
        return _found(
            "workflow_checkpoints",
            "warning",
            "not_ready",
            f"{len(open_steps)} of {len(steps)} steps have no checkpoint that others may build on",
            open_steps,
            log.command("workflow status"),
        )
    return _found("workflow_checkpoints", "passed", "checkpoint_ready", f"{len(steps)} steps are ready")


def _check_subagent_terminal_states(log: _Log) -> Check:
    if not log.subagents:
        return _nothing("subagent_terminal_states", "are no children")
    lacking, at_work, unwell = [], [], []
    for name, events in log.subagents.items():
        envelope, newest = events[-1]
        if newest.status not in _OVER:
            at_work.append(Finding(f"{name} ({newest.agent}) is {newest.status}", envelope.seq))
            continue
        missing = [] if newest.child_session_id else ["its session"]
        if newest.status == "completed" and not (newest.summary or newest.artifacts):
            missing.append("what it came to")
        if newest.status in ("failed", "timed_out", "cancelled", "detached") and not newest.reason:
            missing.append("a reason")
        if newest.status in ("failed", "timed_out", "detached") and not newest.next_actions:
            missing.append("what to do next")
        if missing:
            lacking.append(Finding(f"{name} is {newest.status} without {', '.join(missing)}", envelope.seq))
        elif newest.status in ("failed", "timed_out", "cancelled", "detached"):
            unwell.append(Finding(f"{name} is {newest.status}: {newest.reason}", envelope.seq))
    everything = [*lacking, *at_work, *unwell]
    if lacking:
        return _found(
            "subagent_terminal_states",
            "failed",
            "missing_fields",
            f"{len(lacking)} endings of children lack evidence",
            everything,
            log.command("show"),
        )
    if everything:
        return _found(
            "subagent_terminal_states",
            "warning",
            "at_work" if at_work else "not_completed",
            f"of {len(log.subagents)} children {len(at_work)} are at work and {len(unwell)} did not complete",
            everything,
            log.command("show"),
        )
    return _found("subagent_terminal_states", "passed", "over", f"{len(log.subagents)} children, all over")


def _at_work(log: _Log) -> list[tuple[Envelope, SubagentEvent]]:
    return [events[-1] for events in log.subagents.values() if events[-1][1].status not in _OVER]


def _check_subagent_staleness(log: _Log) -> Check:
    working = _at_work(log)
    if not working:
        return _nothing("subagent_staleness", "are no children at work")
    stale = [
        Finding(
            f"nothing was heard of {each.subagent_id} since {envelope.at:%Y-%m-%d %H:%M:%S} UTC", envelope.seq
        )
        for envelope, each in working
        if log.now is not None and log.now - envelope.at > STALE_AFTER
    ]
    if stale:
        return _found(
            "subagent_staleness",
            "warning",
            "stale",
            f"{len(stale)} of {len(working)} children at work were silent for more than five minutes",
            stale,
            *(f"treenail diagnose {each.child_session_id}" for _, each in working),
        )
    return _found(
        "subagent_staleness", "passed", "fresh", f"{len(working)} children at work, all heard of lately"
    )


def _check_subagent_manager_runtime(log: _Log) -> Check:
    working = _at_work(log)
    if not working:
        return _nothing("subagent_manager_runtime", "are no children at work")
    if log.info is not None and log.info.owner is not None:
        return _found(
            "subagent_manager_runtime", "passed", "supervised", "somebody holds this session and its children"
        )
    return _found(
        "subagent_manager_runtime",
        "warning",
        "unsupervised",
        f"{len(working)} children should be at work, and nobody holds their parent",
        [Finding(f"{each.subagent_id} is {each.status}", envelope.seq) for envelope, each in working],
        log.command("resume"),
    )


def _check_provider_replay(log: _Log) -> Check:
    replayed = log.replayer.input()
    if not replayed.items:
        return _nothing("provider_replay", "is no conversation")
    wrong = list(_unbalanced(replayed))
    if wrong:
        return _found(
            "provider_replay",
            "failed",
            "unbalanced",
            "what would be sent is not what providers accept",
            wrong,
            log.command("replay"),
        )
    if replayed.synthetic:
        return _found(
            "provider_replay",
            "warning",
            "synthetic_results",
            f"{len(replayed.items)} items, {len(replayed.synthetic)} calls closed with a synthetic result",
            [Finding(f"the call {each} has no result of its own") for each in replayed.synthetic],
            log.command("replay"),
        )
    return _found("provider_replay", "passed", "balanced", f"{len(replayed.items)} items would be sent")


def _unbalanced(replayed: Replay) -> Iterable[Finding]:
    waiting: list[str] = []
    for each in replayed.items:
        if each.role == "tool":
            if each.call_id not in waiting:
                yield Finding(f"a result for {each.call_id} that no call stands before", each.seq)
            else:
                waiting.remove(each.call_id or "")
            continue
        if waiting:
            yield Finding(f"the calls {', '.join(waiting)} have no result before the next message", each.seq)
        waiting = [call.call_id for call in each.calls]
        if not each.text and not each.calls and not each.parts:
            yield Finding(f"an empty {each.role} message", each.seq)
    if waiting:
        yield Finding(f"the calls {', '.join(waiting)} have no result")


def _check_session_tree(log: _Log) -> Check:
    named = {
        event.child_session_id: (envelope.seq, name)
        for name, events in log.subagents.items()
        for envelope, event in events
        if event.child_session_id
    }
    known = {str(each.session_id) for each in log.children}
    gone = [
        Finding(f"the session {child} of {name} is not in this store", seq)
        for child, (seq, name) in named.items()
        if child not in known
    ]
    if not log.has_parent and log.info is not None:
        gone.append(Finding(f"the parent {log.info.parent_id} is not in this store"))
    if gone:
        return _found(
            "session_tree",
            "warning",
            "missing_session",
            f"{len(gone)} sessions of the tree are not here",
            gone,
            "treenail list",
        )
    if not known and (log.info is None or log.info.parent_id is None):
        return _nothing("session_tree", "are neither parents nor children")
    return _found("session_tree", "passed", "whole", f"{len(known)} child sessions, all here")


def _check_continuation(log: _Log) -> Check:
    newest = log.newest
    if log.is_damaged:
        return _found(
            "continuation",
            "failed",
            "damaged",
            "a damaged log cannot be written to; go on in a copy of what is whole",
            (),
            "treenail salvage whole.db",
            log.command("diagnose", "--store whole.db"),
        )
    if newest is None:
        return _nothing("continuation", "is no turn")
    if newest.state is TurnState.COMPLETED:
        return _found(
            "continuation", "passed", "completed", "there is nothing to resume; a new turn may begin"
        )
    if newest.state is TurnState.HELD and log.holds:
        actions = [
            log.command("hold answer", f"--call {each.call_id} --yes") for _, each in log.holds.values()
        ]
        return _found(
            "continuation",
            "warning",
            "held",
            "the run goes on when a person has answered",
            [
                Finding(f"{each.tool_name} ({each.call_id}): {each.reason}", seq)
                for seq, each in log.holds.values()
            ],
            *actions,
            log.command("resume"),
        )
    if log.info is not None and log.info.owner is not None and newest.state is TurnState.UNFINISHED:
        return _found("continuation", "passed", "under_way", "somebody is at work on it")
    return _found(
        "continuation",
        "warning",
        "resumable",
        f"the newest turn is {newest.state.value} and can be resumed",
        (),
        log.command("resume"),
    )


def _check_provider_output_truncation(log: _Log) -> Check:
    if not log.usages:
        return _nothing("provider_output_truncation", "are no model calls")
    cut = [
        Finding(f"call {each.call_index} of {each.model} reached its length limit", seq)
        for seq, each in log.usages
        if each.output_truncated
    ]
    if cut:
        return _found(
            "provider_output_truncation",
            "warning",
            "truncated",
            f"{len(cut)} of {len(log.usages)} answers were cut",
            cut,
            "allow longer answers, or ask for less at once",
            log.command("resume"),
        )
    return _found("provider_output_truncation", "passed", "whole", f"{len(log.usages)} answers, none was cut")


def _check_provider_output_completeness(log: _Log) -> Check:
    if not log.usages:
        return _nothing("provider_output_completeness", "are no model calls")
    odd = [
        Finding(f"call {each.call_index} of {each.model} ended {each.stop_reason or 'without a reason'}", seq)
        for seq, each in log.usages
        if each.stop_reason not in ("end", "tools", "length")
    ]
    mended = [
        Finding(f"call {each.call_index}: {note}", seq) for seq, each in log.usages for note in each.notes
    ]
    if odd or mended:
        return _found(
            "provider_output_completeness",
            "warning",
            "cut_off" if odd else "mended",
            f"{len(odd)} of {len(log.usages)} answers did not end by themselves, {len(mended)} remarks",
            [*odd, *mended],
            log.command("show"),
        )
    return _found("provider_output_completeness", "passed", "whole", f"{len(log.usages)} answers, all whole")


def _check_provider_cache(log: _Log) -> Check:
    if not log.usages:
        return _nothing("provider_cache", "are no model calls")
    previous = 0
    broken = []
    for seq, each in log.usages:
        excused = any(previous < compaction < seq for compaction in log.compactions)
        if not each.extends_previous and not excused and previous:
            broken.append(Finding(f"call {each.call_index} did not extend the input of the one before", seq))
        previous = seq
    if broken:
        return _found(
            "provider_cache",
            "warning",
            "prefix_broken",
            f"{len(broken)} model calls missed the provider's cache",
            broken,
            log.command("replay"),
        )
    return _found(
        "provider_cache",
        "passed",
        "extended",
        "every input extended the one before, or a compaction says why",
    )


def _check_workspace(log: _Log) -> Check:
    if not log.invoked and not log.attempts:
        return _nothing("workspace", "are no tool calls")
    open_ones = [
        Finding(f"{each.tool_name} ({each.call_id}) was begun and has no end", seq)
        for seq, each in log.attempts.values()
    ]
    unknown = [
        Finding(f"nobody knows whether {each.name} ({each.call_id}) took effect", seq)
        for seq, each in log.invoked
        if each.outcome == "unknown"
    ]
    conflicts = [
        Finding(f"a rollback left these to somebody else: {', '.join(each.conflicts)}", seq)
        for seq, each in log.invoked
        if each.conflicts
    ]
    is_at_work = log.info is not None and log.info.owner is not None
    if open_ones or unknown or conflicts:
        return _found(
            "workspace",
            "warning",
            ("running" if is_at_work else "cut_off")
            if open_ones
            else "unknown_outcome"
            if unknown
            else "conflicts",
            f"calls without an end: {len(open_ones)}, unknown outcomes: {len(unknown)}, "
            f"conflicts: {len(conflicts)}",
            [*open_ones, *unknown, *conflicts],
            *([log.command("resume")] if open_ones and not is_at_work else ()),
            *([log.command("diff")] if conflicts or unknown else ()),
        )
    return _found("workspace", "passed", "settled", f"{len(log.invoked)} calls, each kept or rolled back")


def _check_attention(log: _Log) -> Check:
    if not log.attention and log.resolved:
        told = [Finding(f"{each.by or 'somebody'}: {each.note}", seq) for seq, each in log.resolved]
        return _found("attention", "passed", "resolved", "a person has put right what needed one", told)
    if not log.attention:
        return _nothing("attention", "is nothing that needs a person")
    return _found(
        "attention",
        "failed",
        "attention_needed",
        f"{len(log.attention)} times something could not be put right automatically",
        [Finding("; ".join((each.reason, *each.details)), seq) for seq, each in log.attention],
        *(action for _, each in log.attention for action in each.next_actions),
    )


def _check_holds(log: _Log) -> Check:
    if not log.holds:
        return _nothing("holds", "are no questions that wait for a person")
    return _found(
        "holds",
        "warning",
        "waiting",
        f"{len(log.holds)} calls wait for a person",
        [
            Finding(f"{each.tool_name} ({each.call_id}): {each.reason}", seq)
            for seq, each in log.holds.values()
        ],
        *(log.command("hold answer", f"--call {each.call_id} --yes") for _, each in log.holds.values()),
    )


CHECKS: Mapping[str, Callable[[_Log], Check]] = {
    "log": _check_log,
    "tool_pairing": _check_tool_pairing,
    "parent_waits": _check_parent_waits,
    "turn_completion": _check_turn_completion,
    "assistant_canonicalization": _check_assistant_canonicalization,
    "turn_failure_evidence": _check_turn_failure_evidence,
    "subagent_timeouts": _check_subagent_timeouts,
    "workflow_events": _check_workflow_events,
    "workflow_checkpoints": _check_workflow_checkpoints,
    "subagent_terminal_states": _check_subagent_terminal_states,
    "subagent_staleness": _check_subagent_staleness,
    "subagent_manager_runtime": _check_subagent_manager_runtime,
    "provider_replay": _check_provider_replay,
    "session_tree": _check_session_tree,
    "continuation": _check_continuation,
    "provider_output_truncation": _check_provider_output_truncation,
    "provider_output_completeness": _check_provider_output_completeness,
    "provider_cache": _check_provider_cache,
    "workspace": _check_workspace,
    "attention": _check_attention,
    "holds": _check_holds,
}
"""Every check, by its id, in the order of the report."""


# --- the report -------------------------------------------------------------------------------------------


def diagnose(session: Session) -> DiagnosticsReport:
    """Check a session's log, and say what is wrong and what to do. Nothing is changed."""
    return _report(_read(session))


def resolve_attention(session: Session, note: str, *, by: str = "") -> AttentionResolved | None:
    """Say that a person has put right what the session needed one for; nothing, if there is no such thing.

    What is open so far counts as resolved. The session can go on, and its history keeps both.
    """
    open_ones = _read(session).attention
    if not open_ones:
        return None
    if not note.strip():
        raise UsageError("say what was done about it: resolve_attention(session, note)")
    resolved = AttentionResolved(note, by)
    session.dispatch(resolved)
    return resolved


def diagnose_store(path: str | Path, session_id: UUID | None = None) -> tuple[DiagnosticsReport, ...]:
    """Check every session of a store, or one; also of a store that is damaged. It never raises for damage.

    If the file cannot be opened, what is whole in it is copied beside and looked at there; the file itself
    is not touched.
    """
    place = Path(path)
    if not place.is_file() or place.stat().st_size == 0:
        # Opening it would make a new store there.
        name = "?" if session_id is None else str(session_id)
        return (_report(_Log(name, place, damage=f"there is no store at {place}, or the file is empty")),)
    try:
        with SqliteLog(place, heartbeat=False) as log:
            if not log.findings:
                return _reports(log, session_id)
            damage = "; ".join(each.message for each in log.findings)
    except LogError as error:
        damage = str(error)
    return _salvaged(place, session_id, damage)


def _reports(
    log: SqliteLog, session_id: UUID | None, damage: str | None = None, place: Path | None = None
) -> tuple[DiagnosticsReport, ...]:
    made = []
    for info in log.sessions():
        if session_id not in (None, info.session_id):
            continue
        session = Session.open(log, info.session_id, read_only=True)
        found = _read(session)
        found.damage = found.damage or damage
        found.store = found.store if place is None else place
        made.append(_report(found))
    return tuple(made)


def _salvaged(place: Path, session_id: UUID | None, damage: str) -> tuple[DiagnosticsReport, ...]:
    name = "?" if session_id is None else str(session_id)
    with tempfile.TemporaryDirectory(prefix="treenail-diagnose-") as scratch:
        target = Path(scratch) / "salvaged.db"
        try:
            SqliteLog.salvage(place, target)
            with SqliteLog(target, heartbeat=False) as log:
                reports = _reports(log, session_id, damage, place)
        except (LogError, OSError) as error:
            reports = (_report(_Log(name, place, damage=f"{damage}; nothing could be salvaged: {error}")),)
    return reports or (
        _report(_Log(name, place, damage=f"{damage}; this session was not found in what is left")),
    )


_LEFT = tuple(f"treenail {each}" for each in ("salvage", "export", "show", "diagnose", "list"))
"""What can be done with a damaged log: the other commands write it or need all of it, and refuse."""


def _possible(log: _Log, actions: Iterable[str]) -> Iterable[str]:
    return [
        each
        for each in actions
        if not log.is_damaged or not each.startswith("treenail ") or each.startswith(_LEFT)
    ]


def _report(log: _Log) -> DiagnosticsReport:
    found = (check(log) for check in CHECKS.values())
    checks = tuple(
        replace(each, next_actions=pasteable(_possible(log, each.next_actions), log.store)) for each in found
    )
    worst = max(_RANK[each.status] for each in checks)
    statuses: tuple[ReportStatus, ...] = ("ready", "ready_with_warnings", "blocked")
    ordered = sorted(checks, key=lambda each: -_RANK[each.status])
    replayed = log.replayer.input()
    return DiagnosticsReport(
        session_id=log.session_id,
        status=statuses[worst],
        checks=checks,
        events={
            "count": log.count,
            "first": log.first,
            "last": log.last,
            "types": dict(sorted(log.types.items())),
        },
        replay={
            "items": len(replayed.items),
            "left_out": len(replayed.left_out),
            "synthetic": list(replayed.synthetic),
            "breaks": list(replayed.breaks),
            "prefix_hash": replayed.prefix_hash(),
        },
        turns=tuple(_turn_data(each) for each in log.derived),
        tree=_tree_data(log),
        workflows=tuple(
            {
                "workflow_id": name,
                "status": _text_of(events[-1][1], "state") or "unfinished",
                "events": [_text_of(each, "kind") for _, each in events],
            }
            for name, events in log.workflows.items()
        ),
        usage=_usage_data(log),
        next_actions=tuple(dict.fromkeys(action for each in ordered for action in each.next_actions)),
    )


def _turn_data(turn: TurnDerivation) -> dict[str, object]:
    return {
        "turn_id": turn.turn_id,
        "state": turn.state.value,
        "claimed": None if turn.claimed is None else turn.claimed.value,
        "error_kind": None if turn.ended is None else turn.ended.error_kind,
        "evidence": {name: list(seqs) for name, seqs in turn.evidence.items()},
        "missing": list(turn.missing),
    }


def _tree_data(log: _Log) -> dict[str, object]:
    return {
        "parent": None if log.info is None or log.info.parent_id is None else str(log.info.parent_id),
        "children": [{"session_id": str(each.session_id), "events": each.head} for each in log.children],
        "subagents": [
            {
                "subagent_id": name,
                "child_session_id": events[-1][1].child_session_id,
                "agent": events[-1][1].agent,
                "status": events[-1][1].status,
            }
            for name, events in log.subagents.items()
        ],
    }


def _usage_data(log: _Log) -> dict[str, object]:
    costs = [each.cost_usd for _, each in log.usages if each.cost_usd is not None]
    return {
        "model_calls": len(log.usages),
        "input_tokens": sum(each.usage.input_tokens or 0 for _, each in log.usages),
        "output_tokens": sum(each.usage.output_tokens or 0 for _, each in log.usages),
        "cached_tokens": sum(each.usage.cached_tokens or 0 for _, each in log.usages),
        "cost_usd": sum(costs) if costs else None,
        "tool_calls": len(log.invoked),
    }
