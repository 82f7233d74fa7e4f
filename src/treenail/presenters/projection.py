"""The one view of a run that all presenters show.

Theory of operation
-------------------
A `Projection` folds two streams into one `RunView`. Events of the log make its turns and their items, and are
the truth. Live events (`treenail.turns.live`) make an overlay, `RunView.live`: the text that is being
written, the tools that run, the status line. The overlay is only ever about what the log does not have yet:
when the log catches up, the piece of overlay is gone, and when the turn has ended there is none. So the view
that was built while a run was watched equals the one that is rebuilt from its log afterwards, whatever was
lost or came late on the live side.

How a turn stands is derived from its evidence (`treenail.turns.states`), and what an item is called follows
from that: the last answer of a completed turn is an `answer`; the same words in a turn that is not done are a
`draft`, and in one that failed they are `partial`. Nothing else ever shows a text as a clean answer.

A presenter reads a feed; for each event that says that something has happened it calls `catch_up`, and then
it hands the event to `add_live`. One in another process calls `catch_up` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from treenail.containment import SafetyEvent
from treenail.conversation.events import (
    BranchSummary,
    ContextPressure,
    HistoryCompacted,
    ProviderUsage,
    SubagentEvent,
)
from treenail.conversation.messages import InnerMessage
from treenail.conversation.replay import ORPHAN_TEXT, WITHDRAWN_TEXT
from treenail.errors import LogError
from treenail.judges.events import CompletionChecked, Feedback, JudgeEvent, NestedEvaluated
from treenail.log.base import Log
from treenail.log.event import Envelope
from treenail.providers.base import ReasoningDelta, TextDelta
from treenail.state.events import AttentionNeeded, AttentionResolved, StateRestored
from treenail.state.session import Session
from treenail.tools.events import HoldAnswered, ToolHeld, ToolInvoked, ToolStarted
from treenail.turns.derivation import Fact, FactReader
from treenail.turns.live import (
    Lagged,
    LiveEvent,
    PlanChanged,
    PlanEntry,
    StatusChanged,
    ToolCallBegan,
    ToolCallFinished,
    TurnFinished,
    UsageChanged,
)
from treenail.turns.states import (
    PartialText,
    TurnEnded,
    TurnFold,
    TurnResumed,
    TurnStarted,
    TurnState,
    pasteable,
)

ItemKind = Literal[
    "user",
    "notice",
    "text",
    "answer",
    "draft",
    "partial",
    "tool",
    "hold",
    "feedback",
    "check",
    "judge",
    "compaction",
    "branch",
    "subagent",
    "workflow",
    "limit",
    "attention",
    "restored",
    "ending",
    "unknown",
]
"""What an item is. Only `answer` is a clean answer."""

MAX_DEPTH = 8
"""How deep a tree of child sessions is shown."""

_WIDTH = 100
_UNRUN = {ORPHAN_TEXT: "cut_off", WITHDRAWN_TEXT: "withdrawn"}
_OPEN = frozenset({"pending", "running", "answered"})
"""How a call stands that has no end in the log yet; `answered` if its result came without one."""


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that happened in a turn."""

    kind: ItemKind
    seq: int
    """The event that it comes from; the newest one, if several made it."""
    text: str = ""
    title: str = ""
    """A name: the tool's, the judge's, the kind of an ending."""
    status: str = ""
    """How it stands: for a tool `pending`, `running`, `kept`, `failed` ...; for an ending a state."""
    is_good: bool = True
    """False for whatever a screen should not show as if all were well."""
    call_id: str = ""
    arguments: str = ""
    elapsed_ms: float | None = None
    diff: str | None = None
    """The call to ask for a diff of, if it may have changed files."""
    next_actions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """What model calls have used."""

    model_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float | None = None
    """None while no call has said what it cost."""

    def __add__(self, other: Usage) -> Usage:
        costs = [each.cost_usd for each in (self, other) if each.cost_usd is not None]
        return Usage(
            self.model_calls + other.model_calls,
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
            sum(costs) if costs else None,
        )


@dataclass(frozen=True, slots=True)
class TurnView:
    """One turn: how it stands, and what happened in it."""

    turn_id: str
    state: TurnState
    items: tuple[Item, ...]
    agent: str = ""
    task: str = ""
    provider: str = ""
    model: str = ""
    error_kind: str | None = None
    details: str = ""
    next_actions: tuple[str, ...] = ()
    missing_evidence: tuple[str, ...] = ()
    usage: Usage = Usage()
    started_at: datetime | None = None
    ended_at: datetime | None = None

    @property
    def answer(self) -> str | None:
        """The clean answer, if the turn is completed; else None."""
        return next((each.text for each in reversed(self.items) if each.kind == "answer"), None)


@dataclass(frozen=True, slots=True)
class SubagentView:
    """A child, as its parent's log has it."""

    subagent_id: str
    child_session_id: str
    agent: str
    task: str
    status: str
    reason: str = ""
    summary: str = ""
    elapsed_ms: int | None = None
    next_actions: tuple[str, ...] = ()
    retry_of: str | None = None


@dataclass(frozen=True, slots=True)
class RunningCall:
    """A tool that runs right now."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class LiveView:
    """What is going on right now and is not in the log yet."""

    status: str = ""
    detail: str = ""
    text: str = ""
    """The answer that is being written: neither whole nor clean."""
    reasoning: str = ""
    running: tuple[RunningCall, ...] = ()
    plan: tuple[PlanEntry, ...] = ()
    pressure: ContextPressure | None = None
    usage: UsageChanged | None = None
    missed: int = 0
    """How many live events this screen was too slow for."""


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as a screen shows it."""

    session_id: str
    seq: int
    """The newest event that was looked at."""
    turns: tuple[TurnView, ...] = ()
    subagents: tuple[SubagentView, ...] = ()
    usage: Usage = Usage()
    judges_usage: Usage = Usage()
    """What judges used on the side; it is not part of `usage`."""
    live: LiveView | None = None
    damage: str | None = None
    """Why the log could not be read further, if it could not."""
    children: tuple[RunView, ...] = ()

    @property
    def state(self) -> TurnState:
        """How the newest turn stands."""
        return self.turns[-1].state if self.turns else TurnState.UNFINISHED

    @property
    def answer(self) -> str | None:
        """The newest turn's clean answer, if it is completed; else None."""
        return self.turns[-1].answer if self.turns else None

    def to_data(self) -> dict[str, Any]:
        """Return the view as plain values that JSON can hold."""
        data = _plain(self)
        assert isinstance(data, dict)
        return {**data, "state": self.state.value, "answer": self.answer}


# --- the fold -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Turn:
    fold: TurnFold
    at: datetime | None = None
    ended_at: datetime | None = None
    items: list[Item] = field(default_factory=list)
    usage: Usage = Usage()
    requests: int = 0
    answers: int = 0

    def view(self, store: object = None) -> TurnView:
        derived = self.fold.derive()
        started, ended = derived.started, derived.ended
        last = None if self.fold.last is None else self.fold.last[0]
        return TurnView(
            turn_id=self.fold.turn_id,
            state=derived.state,
            items=tuple(_named(each, derived.state, last) for each in self.items),
            agent="" if started is None else started.agent,
            task="" if started is None else started.task,
            provider="" if started is None else started.provider,
            model="" if started is None else started.model,
            error_kind=None if ended is None else ended.error_kind,
            details="" if ended is None else ended.details,
            next_actions=() if ended is None else pasteable(ended.next_actions, store),
            missing_evidence=derived.missing,
            usage=self.usage,
            started_at=self.at,
            ended_at=None if ended is None else self.ended_at,
        )


def _named(item: Item, state: TurnState, last: int | None) -> Item:
    """Call a text that asks for no tool what the turn's state makes of it."""
    if item.kind != "draft":
        return item
    if state is TurnState.COMPLETED and item.seq == last:
        return replace(item, kind="answer", is_good=True)
    if state in (TurnState.COMPLETED, TurnState.UNFINISHED):
        return item
    return replace(item, kind="partial")


@dataclass(slots=True)
class Projection:
    """Folds a run's events, logged and live, into its view."""

    session_id: str = ""
    seq: int = 0
    """The newest event of the log that was folded."""
    damage: str | None = None
    _turns: list[_Turn] = field(default_factory=list)
    _calls: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Where the items of a call id stand: turn and place, oldest first."""
    _waiting: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """The same for those that have no result yet: a provider may use a call id again."""
    _places: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Where an item stands that later events change: holds and children, by their ids."""
    _subagents: dict[str, SubagentView] = field(default_factory=dict)
    _judges: Usage = Usage()
    _reader: FactReader = field(default_factory=FactReader)
    _store: object = None
    """The log, which may know where it is kept."""
    _live: LiveView | None = None
    _live_turn: str = ""
    _live_step: int = 0

    # .. the log ..

    def catch_up(self, session: Session, *, upto: int | None = None) -> Projection:
        """Fold what the session's log has beyond what was folded already. Damage ends it, and is noted."""
        self.session_id, self._store = str(session.session_id), session.log
        try:
            for envelope, value in session.events(after=self.seq, upto=upto):
                self.add(envelope, value)
        except LogError as error:
            self.damage = str(error)
        return self

    def add(self, envelope: Envelope, value: object | None) -> None:
        """Fold the next event of the log. One that was folded before is passed over."""
        if envelope.seq <= self.seq:
            return
        self.seq = envelope.seq
        for each in self._reader.facts(envelope, value):
            self._take(envelope, each)

    def _take(self, envelope: Envelope, told: Fact) -> None:
        value = told.value
        if isinstance(value, TurnStarted):
            # A conversation that came out of a snapshot has no turn until somebody goes on with it.
            if not (self._turns and self._turns[-1].fold.takes_up(value)):
                self._turns.append(_Turn(TurnFold(value.turn_id)))
            self._turns[-1].at = envelope.at
            self._live = None if self._live_turn != value.turn_id else self._live
        if not self._turns:
            self._turns.append(_Turn(TurnFold("")))
        turn = self._turns[-1]
        turn.fold.take(envelope.seq, told.turn_id, told.value)
        if told.is_imported and turn.fold.started is None:
            turn.fold.keep_loose(envelope.seq, told.value)
        if value is None:
            self._item(Item("unknown", envelope.seq, title=envelope.type, is_good=False))
            return
        fold = _FOLDS.get(type(value))
        if fold is not None:
            fold(self, envelope, value)
        elif type(value).__name__ == "WorkflowEvent":
            self._take_workflow(envelope.seq, value)

    def _item(self, item: Item) -> tuple[int, int]:
        self._turns[-1].items.append(item)
        return len(self._turns) - 1, len(self._turns[-1].items) - 1

    def _change(self, place: tuple[int, int], **changes: Any) -> Item:
        turn, index = place
        items = self._turns[turn].items
        items[index] = replace(items[index], **changes)
        return items[index]

    def _take_message(self, envelope: Envelope, message: InnerMessage) -> None:
        turn, seq = self._turns[-1], envelope.seq
        if message.role == "user":
            # The first request is the person's; what comes later in a turn is the runtime's or a judge's.
            kind: ItemKind = "notice" if turn.requests else "user"
            turn.requests += 1
            self._item(Item(kind, seq, message.content))
        elif message.role == "tool":
            self._take_result(seq, message)
        elif message.role == "assistant":
            turn.answers += 1
            self._forget_text()
            if message.tool_calls:
                if message.content:
                    self._item(Item("text", seq, message.content))
                for each in message.tool_calls:
                    place = self._item(
                        Item(
                            "tool",
                            seq,
                            title=each.name,
                            status="pending",
                            call_id=each.call_id,
                            arguments=each.arguments,
                        )
                    )
                    self._calls.setdefault(each.call_id, []).append(place)
                    self._waiting.setdefault(each.call_id, []).append(place)
            else:
                self._item(Item("draft", seq, message.content, is_good=False))

    def _take_result(self, seq: int, message: InnerMessage) -> None:
        waiting = self._waiting.get(message.tool_call_id or "")
        if not waiting:
            return
        place = waiting.pop(0)
        item = self._change(place, text=message.content, seq=seq)
        if item.status in _OPEN:
            status = _UNRUN.get(message.content, "answered")
            self._change(place, status=status, is_good=False)

    def _take_started(self, envelope: Envelope, value: ToolStarted) -> None:
        place = self._call(value.call_id)
        if place is not None:
            self._change(place, status="running", seq=envelope.seq)

    def _call(self, call_id: str) -> tuple[int, int] | None:
        places = self._calls.get(call_id)
        if not places:
            return None
        for place in places:
            if self._turns[place[0]].items[place[1]].status in _OPEN:
                return place
        return places[-1]

    def _take_invoked(self, envelope: Envelope, value: ToolInvoked) -> None:
        call_id = value.call_id or ""
        place = self._call(call_id)
        if place is None:
            place = self._item(Item("tool", envelope.seq, title=value.name, call_id=call_id))
            self._calls.setdefault(call_id, []).append(place)
        item = self._turns[place[0]].items[place[1]]
        self._change(
            place,
            seq=envelope.seq,
            # The message has the whole text; here it may be shortened.
            text=item.text if item.status == "answered" else value.rendered_output,
            status="kept" if value.success else value.outcome,
            is_good=value.success,
            elapsed_ms=value.elapsed_ms,
            diff=call_id if value.workspace is not None else None,
        )
        self._forget_call(call_id)

    def _take_held(self, envelope: Envelope, value: ToolHeld) -> None:
        item = Item("hold", envelope.seq, value.reason, value.tool_name, "waiting", False, value.call_id)
        self._places[f"hold {value.hold_id}"] = self._item(item)

    def _take_answered(self, envelope: Envelope, value: HoldAnswered) -> None:
        status = "approved" if value.approved else "refused"
        place = self._places.get(f"hold {value.hold_id}")
        if place is not None:
            self._change(place, status=status, is_good=value.approved, seq=envelope.seq)

    def _take_ended(self, envelope: Envelope, value: TurnEnded) -> None:
        turn = self._turns[-1]
        turn.ended_at = envelope.at
        self._item(
            Item(
                "ending",
                envelope.seq,
                value.details,
                value.error_kind or "",
                turn.fold.derive().state.value,
                turn.fold.derive().state is TurnState.COMPLETED,
                next_actions=pasteable(value.next_actions, self._store),
            )
        )
        self._live = None

    def _take_usage(self, envelope: Envelope, value: ProviderUsage) -> None:
        used = value.usage
        self._turns[-1].usage += Usage(
            1, used.input_tokens or 0, used.output_tokens or 0, used.cached_tokens or 0, value.cost_usd
        )

    def _take_nested(self, envelope: Envelope, value: NestedEvaluated) -> None:
        used = value.usage
        into, out, cached = (
            (0, 0, 0)
            if used is None
            else (used.input_tokens or 0, used.output_tokens or 0, used.cached_tokens or 0)
        )
        self._judges += Usage(1, into, out, cached, value.cost_usd)

    def _take_subagent(self, envelope: Envelope, value: SubagentEvent) -> None:
        self._subagents[value.subagent_id] = SubagentView(
            value.subagent_id,
            value.child_session_id,
            value.agent,
            value.task,
            value.status,
            value.reason,
            value.summary,
            value.elapsed_ms,
            value.next_actions,
            value.retry_of,
        )
        item = Item(
            "subagent",
            envelope.seq,
            value.summary or value.reason or value.task,
            f"{value.agent} {value.subagent_id}",
            value.status,
            value.status in ("queued", "running", "completed", "closed"),
            elapsed_ms=value.elapsed_ms,
            next_actions=value.next_actions,
        )
        key = f"subagent {value.subagent_id}"
        if key in self._places:
            self._change(self._places[key], **{each.name: getattr(item, each.name) for each in fields(item)})
        else:
            self._places[key] = self._item(item)

    def _take_workflow(self, seq: int, value: object) -> None:
        status = str(getattr(value, "checkpoint_status", "") or getattr(value, "status", "") or "")
        name = str(getattr(value, "workflow_name", "") or getattr(value, "workflow_id", ""))
        step = str(getattr(value, "step_id", "") or "")
        kind = str(getattr(value, "kind", ""))
        good = status not in ("failed", "held", "partial", "needs_orchestrator", "timed_out")
        self._item(Item("workflow", seq, kind, f"{name} {step}".strip(), status, good))

    # .. the live side ..

    def add_live(self, event: LiveEvent | Lagged) -> None:
        """Fold a live event. One about something that the log has already is passed over."""
        if isinstance(event, StatusChanged):
            self._live_turn, self._live_step = event.turn_id, event.step
        if isinstance(event, TurnFinished):
            self._live_turn = event.turn_id
            self._live = None
            return
        if self._is_over():
            self._live = None
            return
        live = self._live or LiveView()
        match event:
            case StatusChanged():
                live = replace(live, status=event.status, detail=event.detail)
            case TextDelta() if not self._is_logged():
                live = replace(live, text=live.text + event.text)
            case ReasoningDelta() if not self._is_logged():
                live = replace(live, reasoning=live.reasoning + event.text)
            case ToolCallBegan():
                begun = RunningCall(event.call_id, event.name, event.arguments)
                if not self._is_call_over(event.call_id):
                    live = replace(live, running=(*live.running, begun))
            case ToolCallFinished():
                live = replace(live, running=tuple(e for e in live.running if e.call_id != event.call_id))
            case PlanChanged():
                live = replace(live, plan=event.entries)
            case ContextPressure():
                live = replace(live, pressure=event)
            case UsageChanged():
                live = replace(live, usage=event)
            case Lagged():
                live = replace(live, missed=live.missed + event.count)
        self._live = live

    def _is_over(self) -> bool:
        """Say whether the log has the ending of the turn that live events are about."""
        known = [each.fold for each in self._turns if each.fold.turn_id == self._live_turn]
        if not known and self._live_turn:
            return False  # A turn that the log was not read up to yet.
        fold = known[-1] if known else self._turns[-1].fold if self._turns else None
        return fold is not None and fold.ended is not None

    def _is_logged(self) -> bool:
        """Say whether the answer that is being written is in the log already."""
        turn = next((each for each in self._turns if each.fold.turn_id == self._live_turn), None)
        return turn is not None and 0 < self._live_step <= turn.answers

    def _is_call_over(self, call_id: str) -> bool:
        place = self._call(call_id)
        return place is not None and self._turns[place[0]].items[place[1]].status not in _OPEN

    def _forget_text(self) -> None:
        if self._live is not None:
            self._live = replace(self._live, text="", reasoning="")

    def _forget_call(self, call_id: str) -> None:
        if self._live is not None:
            running = tuple(each for each in self._live.running if each.call_id != call_id)
            self._live = replace(self._live, running=running)

    # .. the view ..

    def view(self) -> RunView:
        """Return the run as it is to be shown now."""
        usage = Usage()
        for each in self._turns:
            usage += each.usage
        return RunView(
            session_id=self.session_id,
            seq=self.seq,
            turns=tuple(each.view(self._store) for each in self._turns),
            subagents=tuple(self._subagents.values()),
            usage=usage,
            judges_usage=self._judges,
            live=self._live,
            damage=self.damage,
        )


def _item_of(kind: ItemKind, describe: Callable[[Any], dict[str, Any]]) -> Callable[..., None]:
    def fold(projection: Projection, envelope: Envelope, value: Any) -> None:
        projection._item(Item(kind, envelope.seq, **describe(value)))

    return fold


_FOLDS: dict[type, Callable[[Projection, Envelope, Any], None]] = {
    InnerMessage: Projection._take_message,
    ToolStarted: Projection._take_started,
    ToolInvoked: Projection._take_invoked,
    ToolHeld: Projection._take_held,
    HoldAnswered: Projection._take_answered,
    TurnEnded: Projection._take_ended,
    ProviderUsage: Projection._take_usage,
    NestedEvaluated: Projection._take_nested,
    SubagentEvent: Projection._take_subagent,
    TurnResumed: _item_of("notice", lambda e: {"text": "resumed", "title": e.model}),
    PartialText: _item_of("partial", lambda e: {"text": e.text, "status": "cut_off", "is_good": False}),
    HistoryCompacted: _item_of("compaction", lambda e: {"text": e.summary, "title": e.trigger}),
    BranchSummary: _item_of("branch", lambda e: {"text": e.summary, "title": e.from_session}),
    Feedback: _item_of(
        "feedback",
        lambda e: {
            "text": e.summary,
            "title": e.provider_name,
            "status": e.severity,
            "is_good": e.severity == "info",
        },
    ),
    CompletionChecked: _item_of(
        "check",
        lambda e: {
            "text": e.feedback,
            "title": e.checker,
            "status": "complete" if e.complete else "incomplete",
            "is_good": e.complete and e.verified,
        },
    ),
    JudgeEvent: _item_of(
        "judge",
        lambda e: {
            "text": e.detail or e.reason,
            "title": e.judge,
            "status": e.outcome,
            "is_good": e.outcome != "failed",
        },
    ),
    SafetyEvent: _item_of("limit", lambda e: {"text": e.reason, "title": e.event_type, "is_good": False}),
    AttentionNeeded: _item_of(
        "attention",
        lambda e: {
            "text": "; ".join((e.reason, *e.details)),
            "is_good": False,
            "next_actions": e.next_actions,
        },
    ),
    AttentionResolved: _item_of("attention", lambda e: {"text": e.note, "title": e.by, "status": "resolved"}),
    StateRestored: _item_of("restored", lambda e: {"text": e.reason}),
}


def project(session: Session, *, children: bool = False) -> RunView:
    """Rebuild the view of a run from its log; with `children`, the views of its child sessions as well."""
    view = Projection().catch_up(session, upto=session.head).view()
    return with_children(view, session.log) if children else view


def with_children(view: RunView, log: Log, *, depth: int = MAX_DEPTH) -> RunView:
    """Add the views of a run's child sessions, and of theirs, down to a depth."""
    if depth <= 0:
        return view
    found = []
    for info in log.sessions(parent_id=UUID(view.session_id)):
        child = Session.open(log, info.session_id, read_only=True)
        found.append(with_children(Projection().catch_up(child).view(), log, depth=depth - 1))
    return replace(view, children=tuple(found))


# --- plain values and plain text ----------------------------------------------------------------------------


def _plain(value: object) -> object:
    match value:
        case TurnState():
            return value.value
        case datetime():
            return value.isoformat()
        case tuple():
            return [_plain(each) for each in value]
        case None | str() | int() | float():
            return value
    return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}  # type: ignore[arg-type]  # a dataclass


_LABELS: dict[ItemKind, str] = {
    "user": "person",
    "notice": "note",
    "text": "model",
    "answer": "answer",
    "draft": "draft, not final",
    "partial": "PARTIAL, not an answer",
}


def render_text(view: RunView, *, width: int = _WIDTH) -> str:
    """Write a view as plain text, a line for each item; whatever is not well is marked."""
    return "\n".join(_lines(view, width))


def _lines(view: RunView, width: int) -> Iterator[str]:
    for turn in view.turns:
        yield f"turn {turn.turn_id or '-'}: {turn.state.value}" + (f" ({turn.task})" if turn.task else "")
        for each in turn.items:
            yield _line(each, width)
            if each.kind in ("ending", "attention"):
                yield from (f"         next: {action}" for action in each.next_actions)
        if turn.missing_evidence:
            yield f"     !!  the log lacks evidence: {', '.join(turn.missing_evidence)}"
        if turn.usage.model_calls:
            cost = "" if turn.usage.cost_usd is None else f", ${turn.usage.cost_usd:.4f}"
            tokens = turn.usage.input_tokens + turn.usage.output_tokens
            yield f"         {turn.usage.model_calls} model calls, {tokens} tokens{cost}"
    if view.live is not None:
        yield from _live_lines(view.live, width)
    if view.damage is not None:
        yield f"     !!  {view.damage}"
    for child in view.children:
        yield f"child session {child.session_id}"
        yield from ("    " + line for line in _lines(child, width - 4))


def _line(item: Item, width: int) -> str:
    mark = "ok" if item.is_good else "!!"
    if item.kind in ("draft", "text", "user", "notice"):
        mark = "  "
    label = _LABELS.get(item.kind, item.kind)
    words = [word for word in (item.title, item.status) if word]
    head = f"{item.seq:>5} {mark} {label}" + (f" {' '.join(words)}" if words else "")
    took = "" if not item.elapsed_ms else f" ({item.elapsed_ms:.0f} ms)"
    text = _short(item.text, max(width - len(head) - len(took) - 2, 20))
    return f"{head}{took}: {text}" if text else f"{head}{took}"


def _live_lines(live: LiveView, width: int) -> Iterator[str]:
    yield f"now: {live.status or 'at work'}" + (f" ({live.detail})" if live.detail else "")
    for each in live.running:
        yield f"      .. {each.name} runs ({each.call_id})"
    if live.text:
        yield f"      .. being written: {_short(live.text, width)}"


def _short(text: str, width: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"
