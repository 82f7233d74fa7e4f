"""The fold of a log, and of what a turn publishes while it runs, into the one view of a run.

Theory of operation
-------------------
A `Projection` folds two streams into one `RunView`. Events of the log make its turns and their items, and are
the truth. Live events (`treenail.turns.live`) make an overlay, `RunView.live`: the text being written, the
tools that run, the status line. The overlay only ever shows what the log does not have yet: when the log
catches up, that piece of overlay is dropped, and when the turn has ended there is none. So the view of a run
that was watched equals the view rebuilt from its log afterwards, whatever was lost or late on the live side.

A turn's state is derived from its evidence (`treenail.turns.states`), and the kind of a text follows from it:
the last answer of a completed turn is an `answer`; the same words in an unfinished turn are a `draft`, and in
a failed one `partial`. Nothing else is ever shown as a clean answer.

A presenter subscribes to a feed; for each live event it calls `catch_up`, then `add_live`. A presenter in
another process calls `catch_up` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from treenail.containment import SafetyEvent
from treenail.conversation import (
    ORPHAN_TEXT,
    WITHDRAWN_TEXT,
    BranchSummary,
    HistoryCompacted,
    InnerMessage,
    ProviderUsage,
    SubagentEvent,
)
from treenail.errors import LogError
from treenail.history.live import with_event, without_call
from treenail.history.view import Item, ItemKind, LiveView, RunView, TurnView, Usage
from treenail.judges import CompletionChecked, Feedback, JudgeEvent, NestedEvaluated
from treenail.log import Envelope
from treenail.mcp import McpServerFailed, McpServerPinned, McpToolsChanged
from treenail.providers import ReasoningDelta, TextDelta
from treenail.state import AttentionNeeded, AttentionResolved, Session, StateRestored, TokenUsage
from treenail.tools import (
    ForkMade,
    HoldAnswered,
    ProcessStarted,
    RolledBack,
    SessionForked,
    ToolHeld,
    ToolInvoked,
    ToolStarted,
)
from treenail.turns import (
    CeilingsSet,
    Fact,
    FactReader,
    Lagged,
    LiveEvent,
    LoopAttached,
    ModelSwitched,
    PartialText,
    StatusChanged,
    ToolCallBegan,
    TurnEnded,
    TurnFinished,
    TurnFold,
    TurnResumed,
    TurnStarted,
    TurnState,
    pasteable,
)
from treenail.workflows import WorkflowEvent

_UNRUN = {ORPHAN_TEXT: "cut_off", WITHDRAWN_TEXT: "withdrawn"}
_OPEN = frozenset({"pending", "running", "answered"})
"""The states of a call without an end in the log; `answered` if its result came without one."""

_Place = tuple[int, int]
"""Where an item stands: the index of its turn, and its own in the turn."""


@dataclass(slots=True)
class _Turn:
    fold: TurnFold
    started_at: datetime | None = None
    ended_at: datetime | None = None
    items: list[Item] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    requests: int = 0
    answers: int = 0
    is_foreign: bool = False
    """Whether it is no turn, but the calls of another program's loop."""

    def view(self, store: object) -> TurnView:
        derived = self.fold.derive()
        started, ended = derived.started, derived.ended
        last = None if self.fold.last is None else self.fold.last[0]
        return TurnView(
            turn_id=self.fold.turn_id,
            state=derived.state,
            items=tuple(_named(each, derived.state, last) for each in self.items),
            seq=None if self.fold.started is None else self.fold.started[0],
            agent="" if started is None else started.agent,
            task="" if started is None else started.task,
            provider="" if started is None else started.provider,
            model="" if started is None else started.model,
            error_kind=None if ended is None else ended.error_kind,
            details="" if ended is None else ended.details,
            next_actions=() if ended is None else pasteable(ended.next_actions, store),
            missing_evidence=() if self.is_foreign else derived.missing,
            usage=self.usage,
            started_at=self.started_at,
            ended_at=None if ended is None else self.ended_at,
        )


def _named(item: Item, state: TurnState, last: int | None) -> Item:
    """Return a text with the kind that the turn's state gives it."""
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
    store: object = None
    """The log, whose path the next actions name."""
    _turns: list[_Turn] = field(default_factory=list)
    _calls: dict[str, list[_Place]] = field(default_factory=dict)
    """The items of a call id, oldest first: a provider may reuse an id."""
    _waiting: dict[str, list[_Place]] = field(default_factory=dict)
    """The calls without a result, by call id."""
    _places: dict[tuple[str, str], _Place] = field(default_factory=dict)
    """The items that later events change: holds and children, by kind and id."""
    _ended: dict[int, _Place] = field(default_factory=dict)
    """The calls that have ended, by the event that ended each."""
    _subagents: dict[str, SubagentEvent] = field(default_factory=dict)
    _judges: Usage = field(default_factory=Usage)
    _reader: FactReader = field(default_factory=FactReader)
    _live: LiveView | None = None
    _live_turn: str = ""
    _live_step: int = 0

    # .. the log ..

    def catch_up(self, session: Session, *, upto: int | None = None) -> Projection:
        """Fold what the session's log has beyond what was folded already. Damage ends it, and is noted."""
        self.session_id, self.store = str(session.session_id), session.log
        try:
            for envelope, value in session.events(after=self.seq, upto=upto):
                self.add(envelope, value)
        except LogError as error:
            self.damage = str(error)
        return self

    def add(self, envelope: Envelope, value: object | None) -> Sequence[Fact]:
        """Fold the next event of the log, and return its facts. One that was folded before is skipped."""
        if envelope.seq <= self.seq:
            return ()
        self.seq = envelope.seq
        facts = self._reader.facts(envelope, value)
        for each in facts:
            self._take(envelope, each)
        return facts

    def _take(self, envelope: Envelope, fact: Fact) -> None:
        value = fact.value
        if isinstance(value, TurnStarted):
            # A conversation that came with a snapshot has no turn until one continues it.
            if not (self._turns and self._turns[-1].fold.takes_up(value)):
                self._turns.append(_Turn(TurnFold(value.turn_id)))
            self._turns[-1].started_at = envelope.at
            self._live = None if self._live_turn != value.turn_id else self._live
        if not self._turns:
            self._turns.append(_Turn(TurnFold("")))
        fold = self._turns[-1].fold
        fold.take(envelope.seq, fact.turn_id, value)
        if fact.is_imported and fold.started is None:
            fold.keep_loose(envelope.seq, value)
        if value is None:
            self._item(Item("unknown", envelope.seq, title=envelope.type, is_good=False))
        elif type(value) in _FOLDS:
            _FOLDS[type(value)](self, envelope, value)

    def _item(self, item: Item) -> _Place:
        self._turns[-1].items.append(item)
        return len(self._turns) - 1, len(self._turns[-1].items) - 1

    def _at(self, place: _Place) -> Item:
        return self._turns[place[0]].items[place[1]]

    def _change(self, place: _Place, **changes: Any) -> None:
        self._turns[place[0]].items[place[1]] = replace(self._at(place), **changes)

    def _take_attached(self, envelope: Envelope, value: LoopAttached) -> None:
        self._turns[-1].is_foreign = True
        text = f"the tool calls of another program's loop, in {value.workspace}"
        self._item(Item("notice", envelope.seq, text, value.run))

    def _take_message(self, envelope: Envelope, message: InnerMessage) -> None:
        turn, seq = self._turns[-1], envelope.seq
        if message.role == "user":
            # Later requests in a turn come from the runtime or a judge, unless they say otherwise.
            kind: ItemKind = "notice" if turn.requests and not message.is_follow_up else "user"
            turn.requests += 1
            self._item(Item(kind, seq, message.content))
        elif message.role == "tool":
            self._take_result(seq, message)
        elif message.role == "assistant":
            turn.answers += 1
            if self._live is not None:
                self._live = replace(self._live, text="", reasoning="")
            if not message.tool_calls:
                self._item(Item("draft", seq, message.content, is_good=False))
                return
            if message.content:
                self._item(Item("text", seq, message.content))
            for each in message.tool_calls:
                item = Item("tool", seq, "", each.name, "pending", True, each.call_id, each.arguments)
                self._add_call(item, is_waiting=True)

    def _add_call(self, item: Item, *, is_waiting: bool) -> _Place:
        place = self._item(item)
        self._calls.setdefault(item.call_id, []).append(place)
        if is_waiting:
            self._waiting.setdefault(item.call_id, []).append(place)
        return place

    def _take_result(self, seq: int, message: InnerMessage) -> None:
        call_id = message.tool_call_id or ""
        waiting = self._waiting.get(call_id)
        if not waiting:
            name = message.tool_name or ""
            self._item(Item("tool", seq, message.content, name, "unmatched", False, call_id))
            return
        place = waiting.pop(0)
        self._change(place, text=message.content, seq=seq)
        if self._at(place).status in _OPEN:
            status = _UNRUN.get(message.content, "answered")
            self._change(place, status=status, is_good=False)

    def _take_started(self, envelope: Envelope, value: ToolStarted) -> None:
        place = self._call(value.call_id)
        if place is None:
            item = Item("tool", envelope.seq, "", value.tool_name, "running", True, value.call_id)
            self._add_call(item, is_waiting=False)
            return
        item = self._at(place)
        waiting = self._waiting.get(value.call_id, [])
        if item.status not in _OPEN and place in waiting:
            # The call was undone, and a resume runs it again: both attempts are shown.
            again = replace(item, seq=envelope.seq, status="running", text="", is_good=True, elapsed_ms=None)
            waiting[waiting.index(place)] = self._add_call(again, is_waiting=False)
        else:
            self._change(place, status="running", seq=envelope.seq)

    def _call(self, call_id: str) -> _Place | None:
        places = self._calls.get(call_id)
        if not places:
            return None
        return next((each for each in places if self._at(each).status in _OPEN), places[-1])

    def _take_invoked(self, envelope: Envelope, value: ToolInvoked) -> None:
        call_id = value.call_id or ""
        place = self._call(call_id)
        if place is None:
            item = Item("tool", envelope.seq, title=value.name, call_id=call_id)
            place = self._add_call(item, is_waiting=False)
        item = self._at(place)
        self._change(
            place,
            seq=envelope.seq,
            # The message has the whole text; the event may have a shortened one.
            text=item.text if item.status == "answered" else value.rendered_output,
            status="kept" if value.success else value.outcome,
            is_good=value.success,
            elapsed_ms=value.elapsed_ms,
            diff=call_id if value.workspace is not None else None,
        )
        self._ended[envelope.seq] = place
        if self._live is not None:
            self._live = without_call(self._live, call_id)

    def _take_rolled_back(self, envelope: Envelope, value: RolledBack) -> None:
        told = f"by {value.by or 'a program'}, {value.at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
        for each in value.undone:
            if each.seq in self._ended:
                self._change(self._ended[each.seq], status="undone", is_good=False, undone=told)
        for each in value.redone:
            if each.seq in self._ended:
                self._change(self._ended[each.seq], status="kept", is_good=True, undone="")
        calls = value.redone if value.action == "redo" else value.undone
        names = ", ".join(f"{each.tool_name} ({each.call_id})" for each in calls) or "nothing"
        self._item(Item("undo", envelope.seq, names, told, value.action))

    def _take_held(self, envelope: Envelope, value: ToolHeld) -> None:
        item = Item("hold", envelope.seq, value.reason, value.tool_name, "waiting", False, value.call_id)
        self._places["hold", value.hold_id] = self._item(item)

    def _take_answered(self, envelope: Envelope, value: HoldAnswered) -> None:
        status = "approved" if value.approved else "refused"
        place = self._places.get(("hold", value.hold_id))
        if place is not None:
            self._change(place, status=status, is_good=value.approved, seq=envelope.seq)

    def _take_ended(self, envelope: Envelope, value: TurnEnded) -> None:
        turn = self._turns[-1]
        turn.ended_at = envelope.at
        state = turn.fold.derive().state
        item = Item("ending", envelope.seq, value.details, value.error_kind or "", state.value)
        actions = pasteable(value.next_actions, self.store)
        self._item(replace(item, is_good=state is TurnState.COMPLETED, next_actions=actions))
        self._live = None

    def _take_usage(self, envelope: Envelope, value: ProviderUsage) -> None:
        self._turns[-1].usage += _usage(value.usage, value.cost_usd)

    def _take_nested(self, envelope: Envelope, value: NestedEvaluated) -> None:
        self._judges += _usage(value.usage, value.cost_usd)

    def _take_subagent(self, envelope: Envelope, value: SubagentEvent) -> None:
        self._subagents[value.subagent_id] = value
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
        place = self._places.get(("subagent", value.subagent_id))
        if place is None:
            self._places["subagent", value.subagent_id] = self._item(item)
        else:
            self._turns[place[0]].items[place[1]] = item

    # .. the live side ..

    def add_live(self, event: LiveEvent | Lagged) -> None:
        """Fold a live event. One about something that the log has already is skipped."""
        if isinstance(event, StatusChanged):
            self._live_turn, self._live_step = event.turn_id, event.step
        if isinstance(event, TurnFinished):
            self._live_turn = event.turn_id
        if isinstance(event, TurnFinished) or self._is_over():
            self._live = None
            return
        live = self._live or LiveView()
        is_old = (isinstance(event, TextDelta | ReasoningDelta) and self._is_logged()) or (
            isinstance(event, ToolCallBegan) and self._is_call_over(event.call_id)
        )
        self._live = live if is_old else with_event(live, event)

    def _is_over(self) -> bool:
        """Return whether the log has the ending of the turn that live events are about."""
        known = [each.fold for each in self._turns if each.fold.turn_id == self._live_turn]
        if not known and self._live_turn:
            return False  # The log was not read up to that turn yet.
        fold = known[-1] if known else self._turns[-1].fold if self._turns else None
        return fold is not None and fold.ended is not None

    def _is_logged(self) -> bool:
        """Return whether the answer that is being written is in the log already."""
        turn = next((each for each in self._turns if each.fold.turn_id == self._live_turn), None)
        return turn is not None and 0 < self._live_step <= turn.answers

    def _is_call_over(self, call_id: str) -> bool:
        place = self._call(call_id)
        return place is not None and self._at(place).status not in _OPEN

    # .. what it shows ..

    @property
    def folds(self) -> Sequence[TurnFold]:
        """The evidence of each turn, oldest first."""
        return [each.fold for each in self._turns]

    @property
    def waiting_calls(self) -> Sequence[tuple[TurnFold, Item]]:
        """The tool calls without a result, with their turns, in order."""
        places = sorted(place for each in self._waiting.values() for place in each)
        return [(self._turns[place[0]].fold, self._at(place)) for place in places]

    def items(self, kind: ItemKind) -> Iterator[Item]:
        """Yield the items of one kind, oldest first. A text is a `draft` here, whatever its turn's state."""
        return (each for turn in self._turns for each in turn.items if each.kind == kind)

    def view(self) -> RunView:
        """Return the run as a screen shows it now."""
        return RunView(
            session_id=self.session_id,
            seq=self.seq,
            turns=tuple(each.view(self.store) for each in self._turns),
            subagents=tuple(self._subagents.values()),
            usage=sum((each.usage for each in self._turns), Usage()),
            judges_usage=self._judges,
            live=self._live,
            damage=self.damage,
        )


def _usage(used: TokenUsage | None, cost_usd: float | None) -> Usage:
    known = used or TokenUsage()
    return Usage(1, known.input_tokens or 0, known.output_tokens or 0, known.cached_tokens or 0, cost_usd)


def _item_of(kind: ItemKind, describe: Callable[[Any], dict[str, Any]]) -> Callable[..., None]:
    def fold(projection: Projection, envelope: Envelope, value: Any) -> None:
        described = describe(value)
        if described:
            projection._item(Item(kind, envelope.seq, **described))

    return fold


def _server(value: McpServerPinned) -> dict[str, Any]:
    left_out = f"; left out: {'; '.join(value.refused)}" if value.refused else ""
    held = value.confinement or "over the network"
    text = f"{len(value.tools)} tools of {value.title or value.reached} ({held})"
    text += f", list {value.fingerprint[:12]}{left_out}"
    return {"text": text, "title": value.server, "is_good": not value.refused}


def _ceilings(value: CeilingsSet) -> dict[str, Any]:
    limits = value.limits
    known = (
        (limits.max_cost_usd, "{:g} USD"),
        (limits.max_steps, "{} steps"),
        (limits.max_retries, "{} retries"),
        (limits.timeout, "{:g} s"),
        (limits.max_depth, "children {} deep"),
    )
    return {
        "text": ", ".join(text.format(each) for each, text in known if each is not None) or "none",
        "title": value.by,
    }


def _process(value: ProcessStarted) -> dict[str, Any]:
    where = f"; it may write to {', '.join(value.writes)}, which no undo touches" if value.writes else ""
    return {"text": f"{value.process_id} runs beside: {value.command}{where}", "title": "process"}


def _workflow(value: WorkflowEvent) -> dict[str, Any]:
    bad = ("failed", "held", "partial", "needs_orchestrator", "timed_out", "interrupted")
    return {
        "text": value.reason,
        "title": f"{value.kind} {value.step_id}".strip(),
        "status": value.status,
        "is_good": value.status not in bad,
    }


_FOLDS: dict[type, Callable[[Projection, Envelope, Any], None]] = {
    InnerMessage: Projection._take_message,
    ToolStarted: Projection._take_started,
    ToolInvoked: Projection._take_invoked,
    RolledBack: Projection._take_rolled_back,
    ToolHeld: Projection._take_held,
    HoldAnswered: Projection._take_answered,
    TurnEnded: Projection._take_ended,
    LoopAttached: Projection._take_attached,
    ProviderUsage: Projection._take_usage,
    NestedEvaluated: Projection._take_nested,
    SubagentEvent: Projection._take_subagent,
    WorkflowEvent: _item_of("workflow", _workflow),
    CeilingsSet: _item_of("ceilings", _ceilings),
    ModelSwitched: _item_of(
        "notice",
        lambda e: {"text": f"the model is {e.model} now, and was {e.from_model}", "title": e.provider},
    ),
    McpServerPinned: _item_of("notice", _server),
    McpToolsChanged: _item_of("notice", lambda e: {"text": e.told(), "title": e.server, "is_good": False}),
    McpServerFailed: _item_of("notice", lambda e: {"text": e.reason, "title": e.server, "is_good": False}),
    ProcessStarted: _item_of("notice", _process),
    TurnResumed: _item_of("notice", lambda e: {"text": "resumed", "title": e.model}),
    PartialText: _item_of("partial", lambda e: {"text": e.text, "status": "cut_off", "is_good": False}),
    HistoryCompacted: _item_of("compaction", lambda e: {"text": e.summary, "title": e.trigger}),
    BranchSummary: _item_of("branch", lambda e: {"text": e.summary, "title": e.from_session}),
    SessionForked: _item_of(
        "fork",
        lambda e: {"text": f"from {e.from_session[:8]}, {e.side} {e.call_id}", "title": e.from_session},
    ),
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
            "status": ("complete" if e.complete else "incomplete") + ("" if e.verified else ", unverified"),
            "is_good": e.complete and e.verified,
        },
    ),
    JudgeEvent: _item_of(
        "judge",
        # A verdict has an event of its own.
        lambda e: (
            {"text": e.detail or e.reason, "title": e.judge, "status": e.outcome, "is_good": False}
            if e.outcome in ("failed", "skipped")
            else {}
        ),
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
    # A rollback of calls has an event of its own.
    StateRestored: _item_of(
        "restored", lambda e: {} if e.reason.endswith(" of calls") else {"text": e.reason}
    ),
    ForkMade: _item_of(
        "fork",
        lambda e: {
            "text": f"{e.side} {e.call_id}{f', by {e.by}' if e.by else ''}, in {e.workspace or 'memory'}",
            "title": f"made {e.to_session[:8]}",
        },
    ),
}


def project(session: Session) -> RunView:
    """Rebuild the view of a run from its log."""
    return Projection().catch_up(session, upto=session.head).view()
