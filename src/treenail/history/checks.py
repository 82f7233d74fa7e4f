"""The table of checks: each one is a pure function of what one pass over a log found.

A check fails if the log cannot be right, or if the run cannot continue without a person's decision; it warns
if a person should look or has something left to do; it returns None if the log has nothing for it to check.
Findings carry the sequence numbers of the events that they are about, and next actions are commands to paste.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from treenail.conversation import InnerMessage, ProviderUsage, Replayer, SubagentEvent
from treenail.history.projection import Projection
from treenail.history.view import Item
from treenail.log import Envelope, LogReport, SessionInfo
from treenail.state import AttentionNeeded, AttentionResolved
from treenail.tools import ASK_PERSON, ToolInvoked
from treenail.turns import EVIDENCE, LoopAttached, PartialText, TurnDerivation, TurnEnded, TurnFold, TurnState
from treenail.workflows import WorkflowEvent

T = TypeVar("T")

CheckStatus = Literal["passed", "warning", "failed"]
"""The result of a check: nothing wrong, something to look at, something wrong."""

STALE_AFTER = timedelta(minutes=5)
"""A child at work that has logged nothing for this long is stale."""

MAX_FINDINGS = 50
"""How many findings a check lists; it counts the others."""

_OVER = frozenset({"completed", "failed", "timed_out", "cancelled", "detached", "closed"})
_UNWELL = frozenset({"failed", "timed_out", "cancelled", "detached"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check found, and the event that it is about."""

    message: str
    seq: int | None = None


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    status: CheckStatus
    classification: str
    """The result in one word that a program can compare."""
    message: str
    findings: tuple[Finding, ...] = ()
    next_actions: tuple[str, ...] = ()
    id: str = ""

    def to_data(self) -> dict[str, Any]:
        """Return the result as plain values for JSON."""
        return {
            "id": self.id,
            "status": self.status,
            "message": self.message,
            "details": {"classification": self.classification, "next_actions": list(self.next_actions)},
            "findings": [{"seq": each.seq, "message": each.message} for each in self.findings],
        }


@dataclass(slots=True)
class LogFacts:
    """What one pass over a session's log found: the projection that screens draw, and values by type."""

    session_id: str
    store: object = None
    """Where the session is kept: a path, or a log that has one."""
    damage: str | None = None
    stored: LogReport | None = None
    info: SessionInfo | None = None
    children: tuple[SessionInfo, ...] = ()
    has_parent: bool = True
    now: datetime | None = None
    count: int = 0
    first: int | None = None
    types: Counter[str] = field(default_factory=Counter)
    unreadable: list[tuple[int, str]] = field(default_factory=list)
    projection: Projection = field(default_factory=Projection)
    replayer: Replayer = field(default_factory=Replayer)
    _values: dict[type, list[tuple[Envelope, Any]]] = field(default_factory=dict)

    def add(self, envelope: Envelope, value: object | None) -> None:
        """Fold one event."""
        self.count += 1
        self.first = envelope.seq if self.first is None else self.first
        self.types[envelope.type] += 1
        if value is None:
            self.unreadable.append((envelope.seq, envelope.type))
        else:
            self.replayer.add(envelope.seq, value, envelope.type)
        for fact in self.projection.add(envelope, value):
            self._values.setdefault(type(fact.value), []).append((envelope, fact.value))

    def of(self, kind: type[T]) -> Sequence[tuple[Envelope, T]]:
        """Return the facts of one type with their events, oldest first."""
        return self._values.get(kind, [])

    @property
    def last(self) -> int:
        """The newest event that was read."""
        return self.projection.seq

    @property
    def turns(self) -> Sequence[TurnFold]:
        """The turns with their evidence, oldest first; not what was logged outside of turns."""
        return [each for each in self.projection.folds if each.started is not None or each.loose]

    @property
    def newest(self) -> TurnDerivation | None:
        """The derivation of the newest turn."""
        return self.turns[-1].derive() if self.turns else None

    @property
    def subagents(self) -> Mapping[str, Sequence[tuple[Envelope, SubagentEvent]]]:
        """The events of each child."""
        return _grouped(self.of(SubagentEvent), lambda each: each.subagent_id)

    @property
    def workflows(self) -> Mapping[str, Sequence[tuple[Envelope, WorkflowEvent]]]:
        """The events of each workflow."""
        return _grouped(self.of(WorkflowEvent), lambda each: each.workflow_id)

    @property
    def holds(self) -> Sequence[Item]:
        """The calls that wait for a person."""
        return [each for each in self.projection.items("hold") if each.status == "waiting"]

    @property
    def is_damaged(self) -> bool:
        """Whether events are lost. A damaged snapshot loses nothing: the events are folded instead."""
        stored = () if self.stored is None else self.stored.damage
        return self.damage is not None or any(each.kind != "snapshot" for each in stored)

    @property
    def is_written(self) -> bool:
        """Whether a process holds the session for writing."""
        return self.info is not None and self.info.owner is not None

    def command(self, name: str, rest: str = "") -> str:
        """Write a command about this session."""
        return f"treenail {name} {self.session_id}{' ' + rest if rest else ''}"


def _grouped(
    events: Iterable[tuple[Envelope, T]], key: Callable[[T], str]
) -> dict[str, list[tuple[Envelope, T]]]:
    found: dict[str, list[tuple[Envelope, T]]] = {}
    for envelope, value in events:
        found.setdefault(key(value), []).append((envelope, value))
    return found


def _passed(classification: str, message: str, findings: Iterable[Finding] = ()) -> CheckResult:
    return CheckResult("passed", classification, message, tuple(findings))


def _warning(
    classification: str, message: str, findings: Iterable[Finding] = (), *actions: str
) -> CheckResult:
    return CheckResult("warning", classification, message, tuple(findings), actions)


def _failed(
    classification: str, message: str, findings: Iterable[Finding] = (), *actions: str
) -> CheckResult:
    return CheckResult("failed", classification, message, tuple(findings), actions)


# --- the log and its turns --------------------------------------------------------------------------------


def _log(log: LogFacts) -> CheckResult:
    findings = [Finding(each.message, each.seq) for each in (log.stored.damage if log.stored else ())]
    if log.damage is not None and log.damage not in [each.message for each in findings]:
        findings.insert(0, Finding(log.damage, log.last or None))
    if log.is_damaged:
        message = f"the store is damaged; {log.count} events are readable, the last one is {log.last}"
        return _failed("damaged", message, findings, "treenail salvage whole.db", log.command("export"))
    if log.count == 0:
        return _failed("empty", "the log is empty: nothing was ever recorded here")
    unknown = [Finding(f"an event of type {kind} cannot be read here", seq) for seq, kind in log.unreadable]
    pruned = f"; those before {log.first} were pruned" if (log.first or 1) > 1 else ""
    if unknown or findings:
        return _warning(
            "unknown_types" if unknown else "snapshot",
            f"{log.count} events, {len(unknown)} of which cannot be read in this process{pruned}",
            [*unknown, *findings],
            "import the modules that define these types, then diagnose again",
        )
    return _passed("whole", f"{log.count} events, all readable{pruned}")


def _tool_pairing(log: LogFacts) -> CheckResult | None:
    total = sum(len(each.tool_calls) for _, each in log.of(InnerMessage))
    stray = [each for each in log.projection.items("tool") if each.status == "unmatched"]
    if not total and not stray:
        return None
    newest = log.newest
    held = {each.call_id for each in log.holds}
    is_open = newest is not None and newest.state is not TurnState.COMPLETED
    lost, pending, waiting = [], [], []
    for fold, call in log.projection.waiting_calls:
        if call.call_id in held:
            waiting.append(Finding(f"the call {call.call_id} waits for a person", call.seq))
        elif is_open and fold is log.turns[-1]:
            pending.append(Finding(f"the call {call.call_id} has no result yet; a resume runs it", call.seq))
        else:
            lost.append(Finding(f"the call {call.call_id} has no result, and its turn is over", call.seq))
    unasked = [Finding(f"a result for {e.call_id or 'no call'} that no call asked for", e.seq) for e in stray]
    findings = [*lost, *pending, *waiting, *unasked]
    if lost:
        message = f"{len(lost)} of {total} calls have no result"
        return _failed("orphan_call", message, findings, log.command("replay"))
    if pending or stray:
        return _warning(
            "pending_call" if pending else "unmatched_result",
            f"{len(pending)} of {total} calls have not run yet, {len(stray)} results have no call",
            findings,
            *([log.command("resume")] if pending else ()),
        )
    return _passed("held" if waiting else "paired", f"{total} calls", waiting)


def _turn_completion(log: LogFacts) -> CheckResult | None:
    turns = [(each, each.derive()) for each in log.turns]
    if not turns and log.workflows:
        return None
    if not turns and log.of(LoopAttached):
        return _passed("foreign", "the calls of another program's loop, which ends as that program says")
    if not turns:
        return _warning("no_turn", "no turn was ever started in this session")
    unproved = [
        Finding(
            f"turn {each.turn_id} claims to be {each.claimed.value}, but the log lacks "
            + "; ".join(EVIDENCE[name].meaning for name in each.missing),
            _seq_of(fold),
        )
        for fold, each in turns
        if not each.is_as_claimed and each.claimed is not None
    ]
    if unproved:
        message = f"{len(unproved)} of {len(turns)} turns claim a state that the log does not show"
        return _failed("claim_without_evidence", message, unproved, log.command("show"))
    fold, newest = turns[-1]
    if newest.started is None:
        message = "a conversation came with a snapshot, and no turn has continued it"
        return _warning("taken_over", message, (), log.command("resume"))
    if newest.state is not TurnState.UNFINISHED:
        message = f"{len(turns)} turns, the newest one is {newest.state.value}"
        return _passed(newest.state.value, message)
    if log.is_damaged:
        message = f"the ending of the newest turn is unknown: the log is readable up to event {log.last}"
        return _warning("unknown", message, [Finding(f"turn {newest.turn_id} began here", _seq_of(fold))])
    began = [Finding(f"turn {newest.turn_id} began here and has not ended", _seq_of(fold))]
    if log.is_written:
        return _warning("under_way", "the newest turn is running", began)
    message = "the newest turn has no ending: its process died"
    return _warning("crashed", message, began, log.command("resume"))


def _seq_of(fold: TurnFold) -> int | None:
    place = fold.ended or fold.started
    return None if place is None else place[0]


def _assistant_canonicalization(log: LogFacts) -> CheckResult | None:
    partials = log.of(PartialText)
    if not partials and all(each.role != "assistant" for _, each in log.of(InnerMessage)):
        return None
    cut = [
        Finding(f"{len(each.text)} characters of an answer that was cut off", e.seq) for e, each in partials
    ]
    if not cut:
        return _passed("clean", "every answer is complete")
    return _warning(
        "partial_preserved",
        f"{len(cut)} partial answers are kept as evidence; the model never sees them",
        cut,
        log.command("replay"),
    )


def _turn_failure_evidence(log: LogFacts) -> CheckResult | None:
    failures = [(e.seq, each) for e, each in log.of(TurnEnded) if each.state is not TurnState.COMPLETED]
    if not failures:
        return None
    lacking = []
    for seq, each in failures:
        fields = {"a kind": each.error_kind, "details": each.details, "next actions": each.next_actions}
        missing = [name for name, value in fields.items() if not value]
        if missing:
            message = f"turn {each.turn_id} ended {each.state.value} without {', '.join(missing)}"
            lacking.append(Finding(message, seq))
    if lacking:
        message = f"{len(lacking)} of {len(failures)} endings lack a reason or a next action"
        return _failed("missing_fields", message, lacking, log.command("show"))
    newest = failures[-1][1]
    is_last = log.newest is not None and log.newest.ended == newest
    return CheckResult(
        "warning" if is_last else "passed",
        newest.error_kind or newest.state.value,
        f"{len(failures)} turns did not complete; each records its cause",
        tuple(Finding(f"{each.state.value} ({each.error_kind}): {each.details}", s) for s, each in failures),
        newest.next_actions if is_last else (),
    )


def _continuation(log: LogFacts) -> CheckResult | None:
    newest = log.newest
    if log.is_damaged:
        message = "a damaged log cannot be written to; continue in a copy of its readable part"
        copy = log.command("diagnose", "--store whole.db")
        return _failed("damaged", message, (), "treenail salvage whole.db", copy)
    if newest is None:
        return None
    if newest.state is TurnState.COMPLETED:
        return _passed("completed", "there is nothing to resume; a new turn may begin")
    if newest.state is TurnState.HELD and log.holds:
        message = "the run can continue after a person has answered"
        return _warning("held", message, _questions(log), *_answers(log), log.command("resume"))
    if log.is_written and newest.state is TurnState.UNFINISHED:
        return _passed("under_way", "a process is working on it")
    message = f"the newest turn is {newest.state.value} and can be resumed"
    return _warning("resumable", message, (), log.command("resume"))


# --- children and workflows -------------------------------------------------------------------------------


def _parent_waits(log: LogFacts) -> CheckResult | None:
    if not log.subagents:
        return None
    left = []
    for name, events in log.subagents.items():
        envelope, newest = events[-1]
        if newest.status not in _OVER and _state_at(log, events[0][0]) is TurnState.COMPLETED:
            message = f"{name} is {newest.status}, and the turn that started it is completed"
            left.append(Finding(message, envelope.seq))
    if left:
        message = f"a completed turn left {len(left)} children at work"
        return _warning("left_behind", message, left, log.command("show"))
    return _passed("waited", "no completed turn left a child at work")


def _state_at(log: LogFacts, envelope: Envelope) -> TurnState | None:
    for each in reversed(log.turns):
        if each.started is not None and each.started[0] <= envelope.seq:
            return each.derive().state
    return None


def _subagent_timeouts(log: LogFacts) -> CheckResult | None:
    late = [(e.seq, each) for e, each in log.of(SubagentEvent) if each.event == "timed_out"]
    if not late:
        return None
    wanted = ("timeout_ms", "reason", "child_session_id", "next_actions")
    lacking = [
        Finding(f"{each.subagent_id} timed out without {', '.join(missing)}", seq)
        for seq, each in late
        if (missing := [name for name in wanted if getattr(each, name) in (None, "", ())])
    ]
    if lacking:
        return _failed("missing_fields", f"{len(lacking)} timeouts lack an explanation", lacking)
    return _warning(
        "timed_out",
        f"{len(late)} children ran out of time",
        [
            Finding(
                f"{e.subagent_id}: {'?' if e.elapsed_ms is None else e.elapsed_ms} of {e.timeout_ms} ms, "
                f"{e.reason}",
                s,
            )
            for s, e in late
        ],
        *(action for _, each in late for action in each.next_actions),
        *(f"treenail show {each.child_session_id}" for _, each in late),
    )


def _workflow_events(log: LogFacts) -> CheckResult | None:
    if not log.workflows:
        return None
    marks = ("workflow_started", "workflow_resumed", "workflow_interrupted", "workflow_finished")
    unfinished = []
    for name, events in log.workflows.items():
        # A step that was decided or reset after the ending waits for a resume.
        newest = max((place for place, (_, each) in enumerate(events) if each.kind in marks), default=0)
        envelope, mark = events[newest]
        if mark.kind != "workflow_finished":
            what = "was interrupted" if mark.kind == "workflow_interrupted" else "has not finished"
            unfinished.append(Finding(f"workflow {name} {what}", envelope.seq))
        elif newest < len(events) - 1:
            unfinished.append(Finding(f"workflow {name} was changed after its ending", events[-1][0].seq))
    if unfinished:
        message = f"{len(unfinished)} workflows have not finished"
        return _warning("unfinished", message, unfinished, log.command("workflow resume"))
    return _passed("finished", f"{len(log.workflows)} workflows have finished")


def _workflow_checkpoints(log: LogFacts) -> CheckResult | None:
    steps: dict[tuple[str, str], tuple[int, str]] = {}
    for envelope, each in log.of(WorkflowEvent):
        if not each.step_id:
            continue
        if each.kind in ("checkpoint_decided", "step_held"):
            steps[each.workflow_id, each.step_id] = (envelope.seq, each.status or "undecided")
        elif each.kind in ("step_scheduled", "step_reset"):
            steps[each.workflow_id, each.step_id] = (envelope.seq, each.kind.removeprefix("step_"))
    if not steps:
        return None
    unready = [
        Finding(f"step {step} of {name} is {status}", seq)
        for (name, step), (seq, status) in steps.items()
        if status != "checkpoint_ready"
    ]
    if unready:
        message = f"{len(unready)} of {len(steps)} steps have no checkpoint that others may build on"
        return _warning("not_ready", message, unready, log.command("workflow status"))
    return _passed("checkpoint_ready", f"{len(steps)} steps are ready")


def _subagent_terminal_states(log: LogFacts) -> CheckResult | None:
    if not log.subagents:
        return None
    lacking, at_work, unwell = [], [], []
    for name, events in log.subagents.items():
        envelope, newest = events[-1]
        if newest.status not in _OVER:
            at_work.append(Finding(f"{name} ({newest.agent}) is {newest.status}", envelope.seq))
            continue
        missing = [] if newest.child_session_id else ["its session"]
        if newest.status == "completed" and not (newest.summary or newest.artifacts):
            missing.append("a summary")
        if newest.status in _UNWELL and not newest.reason:
            missing.append("a reason")
        if newest.status in _UNWELL - {"cancelled"} and not newest.next_actions:
            missing.append("next actions")
        if missing:
            lacking.append(Finding(f"{name} is {newest.status} without {', '.join(missing)}", envelope.seq))
        elif newest.status in _UNWELL:
            unwell.append(Finding(f"{name} is {newest.status}: {newest.reason}", envelope.seq))
    findings = [*lacking, *at_work, *unwell]
    if lacking:
        message = f"{len(lacking)} endings of children lack evidence"
        return _failed("missing_fields", message, findings, log.command("show"))
    if findings:
        return _warning(
            "at_work" if at_work else "not_completed",
            f"of {len(log.subagents)} children {len(at_work)} are at work and {len(unwell)} did not complete",
            findings,
            log.command("show"),
        )
    return _passed("over", f"{len(log.subagents)} children, all ended")


def _at_work(log: LogFacts) -> list[tuple[Envelope, SubagentEvent]]:
    return [events[-1] for events in log.subagents.values() if events[-1][1].status not in _OVER]


def _subagent_staleness(log: LogFacts) -> CheckResult | None:
    working = _at_work(log)
    if not working:
        return None
    stale = [
        Finding(f"{each.subagent_id} has logged nothing since {e.at:%Y-%m-%d %H:%M:%S} UTC", e.seq)
        for e, each in working
        if log.now is not None and log.now - e.at > STALE_AFTER
    ]
    if stale:
        message = f"{len(stale)} of {len(working)} children at work were silent for more than five minutes"
        actions = (f"treenail diagnose {each.child_session_id}" for _, each in working)
        return _warning("stale", message, stale, *actions)
    return _passed("fresh", f"{len(working)} children at work, all active in the last five minutes")


def _subagent_manager_runtime(log: LogFacts) -> CheckResult | None:
    working = _at_work(log)
    if not working:
        return None
    if log.is_written:
        return _passed("supervised", "a process holds this session and its children")
    message = f"{len(working)} children should be at work, but no process holds their parent"
    findings = [Finding(f"{each.subagent_id} is {each.status}", e.seq) for e, each in working]
    return _warning("unsupervised", message, findings, log.command("resume"))


def _session_tree(log: LogFacts) -> CheckResult | None:
    named = {
        each.child_session_id: (envelope.seq, each.subagent_id)
        for envelope, each in log.of(SubagentEvent)
        if each.child_session_id
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
        message = f"{len(gone)} sessions of the tree are not in this store"
        return _warning("missing_session", message, gone, "treenail list")
    if not known and (log.info is None or log.info.parent_id is None):
        return None
    return _passed("whole", f"{len(known)} child sessions, all in this store")


# --- what the provider sees -------------------------------------------------------------------------------


def _provider_replay(log: LogFacts) -> CheckResult | None:
    replayed = log.replayer.input()
    if not replayed.items:
        return None
    if replayed.synthetic:
        return _warning(
            "synthetic_results",
            f"{len(replayed.items)} items, {len(replayed.synthetic)} calls closed with a synthetic result",
            [Finding(f"the call {each} has no result of its own") for each in replayed.synthetic],
            log.command("replay"),
        )
    return _passed("balanced", f"{len(replayed.items)} items would be sent")


def _provider_output_truncation(log: LogFacts) -> CheckResult | None:
    usages = log.of(ProviderUsage)
    if not usages:
        return None
    cut = [
        Finding(f"call {each.call_index} of {each.model} reached its length limit", e.seq)
        for e, each in usages
        if each.output_truncated
    ]
    if cut:
        message = f"{len(cut)} of {len(usages)} answers were cut at the length limit"
        advice = "allow longer answers, or ask for less at once"
        return _warning("truncated", message, cut, advice, log.command("resume"))
    return _passed("whole", f"{len(usages)} answers, none was cut")


def _provider_output_completeness(log: LogFacts) -> CheckResult | None:
    usages = log.of(ProviderUsage)
    if not usages:
        return None
    odd = [
        Finding(
            f"call {each.call_index} of {each.model} ended {each.stop_reason or 'without a reason'}", e.seq
        )
        for e, each in usages
        if each.stop_reason not in ("end", "tools", "length")
    ]
    notes = [Finding(f"call {each.call_index}: {note}", e.seq) for e, each in usages for note in each.notes]
    if odd or notes:
        return _warning(
            "cut_off" if odd else "repaired",
            f"{len(odd)} of {len(usages)} answers did not end normally, {len(notes)} notes",
            [*odd, *notes],
            log.command("show"),
        )
    return _passed("whole", f"{len(usages)} answers, all complete")


# --- files and people -------------------------------------------------------------------------------------


def _workspace(log: LogFacts) -> CheckResult | None:
    invoked = log.of(ToolInvoked)
    unended = [
        Finding(f"{each.title} ({each.call_id}) was started and has no end", each.seq)
        for each in log.projection.items("tool")
        if each.status == "running"
    ]
    if not invoked and not unended:
        return None
    unknown = [
        Finding(f"it is unknown whether {each.name} ({each.call_id}) took effect", e.seq)
        for e, each in invoked
        if each.outcome == "unknown"
    ]
    conflicts = [
        Finding(f"a rollback kept these files, which others had changed: {', '.join(each.conflicts)}", e.seq)
        for e, each in invoked
        if each.conflicts
    ]
    if not (unended or unknown or conflicts):
        return _passed("settled", f"{len(invoked)} calls, each kept or rolled back")
    started = "running" if log.is_written else "cut_off"
    return _warning(
        started if unended else "unknown_outcome" if unknown else "conflicts",
        f"calls without an end: {len(unended)}, unknown outcomes: {len(unknown)}, "
        f"conflicts: {len(conflicts)}",
        [*unended, *unknown, *conflicts],
        *([log.command("resume")] if unended and not log.is_written else ()),
        *([log.command("diff")] if conflicts or unknown else ()),
    )


def _attention(log: LogFacts) -> CheckResult | None:
    resolved = log.of(AttentionResolved)
    newest = resolved[-1][0].seq if resolved else 0
    problems = [(e.seq, each) for e, each in log.of(AttentionNeeded) if e.seq > newest]
    if problems:
        return _failed(
            "attention_needed",
            f"{len(problems)} problems need a person",
            [Finding("; ".join((each.reason, *each.details)), seq) for seq, each in problems],
            *(action for _, each in problems for action in each.next_actions),
        )
    if not resolved:
        return None
    notes = [Finding(f"{each.by or 'a person'}: {each.note}", e.seq) for e, each in resolved]
    return _passed("resolved", "a person fixed the problems of this run", notes)


def _questions(log: LogFacts) -> list[Finding]:
    return [Finding(f"{each.title} ({each.call_id}): {each.text}", each.seq) for each in log.holds]


def _answers(log: LogFacts) -> list[str]:
    kinds = {each.call_id: "--answer TEXT" if each.title == ASK_PERSON else "--yes" for each in log.holds}
    return [log.command("hold answer", f"--call {call_id} {kind}") for call_id, kind in kinds.items()]


@dataclass(frozen=True, slots=True)
class CheckRule:
    """One check of a log."""

    id: str
    subject: str
    """What it checks; the report says that the log has none of it, if it has none."""
    check: Callable[[LogFacts], CheckResult | None] = field(repr=False)


CHECKS: Mapping[str, CheckRule] = MappingProxyType(
    {
        each.id: each
        for each in (
            CheckRule("log", "events", _log),
            CheckRule("tool_pairing", "tool calls", _tool_pairing),
            CheckRule("parent_waits", "children", _parent_waits),
            CheckRule("turn_completion", "turns", _turn_completion),
            CheckRule("assistant_canonicalization", "answers", _assistant_canonicalization),
            CheckRule("turn_failure_evidence", "failed turns", _turn_failure_evidence),
            CheckRule("subagent_timeouts", "children that ran out of time", _subagent_timeouts),
            CheckRule("workflow_events", "workflows", _workflow_events),
            CheckRule("workflow_checkpoints", "workflow steps", _workflow_checkpoints),
            CheckRule("subagent_terminal_states", "children", _subagent_terminal_states),
            CheckRule("subagent_staleness", "children at work", _subagent_staleness),
            CheckRule("subagent_manager_runtime", "children at work", _subagent_manager_runtime),
            CheckRule("provider_replay", "messages", _provider_replay),
            CheckRule("session_tree", "parents or children", _session_tree),
            CheckRule("continuation", "turns", _continuation),
            CheckRule("provider_output_truncation", "model calls", _provider_output_truncation),
            CheckRule("provider_output_completeness", "model calls", _provider_output_completeness),
            CheckRule("workspace", "tool calls", _workspace),
            CheckRule("attention", "problems that need a person", _attention),
        )
    }
)
"""Every check, by its id, in the order of the report."""
