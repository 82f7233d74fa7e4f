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
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from treenail.containment import Reserved, RetryTaken, SafetyEvent, Settled
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
from treenail.history.text import about_call
from treenail.history.view import Item, ItemKind, LiveView, Row, RunView, TurnView, Usage
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

_LASTING = frozenset({"model", "tool", "hold", "subagent"})
"""The kinds of items that take time: a later event ends them."""

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
    row: int = 0
    """The place of the turn among all rows; its items follow it."""

    @property
    def last(self) -> int | None:
        """The event of the newest message."""
        return None if self.fold.last is None else self.fold.last[0]

    def view(self, store: object, *, with_items: bool = True) -> TurnView:
        derived = self.fold.derive()
        started, ended = derived.started, derived.ended
        items = self.items if with_items else ()
        return TurnView(
            turn_id=self.fold.turn_id,
            state=derived.state,
            items=tuple(_named(each, derived.state, self.last) for each in items),
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
    max_chars: int | None = None
    """How much of a text an item keeps, and of arguments what they are about; None for all of it."""
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
    _at: datetime | None = None
    """The time of the event that is being folded."""
    _at_before: datetime | None = None
    """The time of the event before it."""
    _asked: _Place | None = None
    """The newest model call, until its usage is known."""
    _rows: int = 0
    _changed: dict[int, int] = field(default_factory=dict)
    """The newest event that changed each row; the row that was changed last stands at the end."""

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
        self._at_before, self._at = self._at, envelope.at
        facts = self._reader.facts(envelope, value)
        for each in facts:
            self._take(envelope, each)
        return facts

    def _take(self, envelope: Envelope, fact: Fact) -> None:
        value = fact.value
        if isinstance(value, TurnStarted):
            # A conversation that came with a snapshot has no turn until one continues it.
            if not (self._turns and self._turns[-1].fold.takes_up(value)):
                self._add_turn(value.turn_id)
            self._turns[-1].started_at = envelope.at
            self._live = None if self._live_turn != value.turn_id else self._live
        if not self._turns:
            self._add_turn("")
        fold = self._turns[-1].fold
        fold.take(envelope.seq, fact.turn_id, value)
        if fact.is_imported and fold.started is None:
            fold.keep_loose(envelope.seq, value)
        if value is None:
            self._item(Item("unknown", envelope.seq, title=envelope.type, is_good=False))
        elif type(value) in _FOLDS:
            _FOLDS[type(value)](self, envelope, value)
        if isinstance(value, _OF_TURN):
            self._note_turn(is_renamed=not isinstance(value, ProviderUsage))

    def _note_turn(self, *, is_renamed: bool) -> None:
        """Note that the newest turn has changed; with its state, the kind of its texts changes too."""
        turn = self._turns[-1]
        self._note_row(turn.row)
        for place, item in enumerate(turn.items if is_renamed else ()):
            if item.kind == "draft":
                self._note_row(turn.row + 1 + place)

    def _add_turn(self, turn_id: str) -> None:
        self._turns.append(_Turn(TurnFold(turn_id), row=self._rows))
        self._asked = None
        self._note_row(self._rows)
        self._rows += 1

    def _note_row(self, row: int) -> None:
        self._changed.pop(row, None)
        self._changed[row] = self.seq

    def _item(self, item: Item) -> _Place:
        """Add an item. Unless it says otherwise, it begins and ends with this event."""
        began = item.started_at or self._at
        ended = item.ended_at or (None if item.kind in _LASTING else self._at)
        item = replace(item, first_seq=item.first_seq or item.seq, started_at=began, ended_at=ended)
        self._turns[-1].items.append(self._shortened(item))
        self._note_row(self._rows)
        self._rows += 1
        return len(self._turns) - 1, len(self._turns[-1].items) - 1

    def _shortened(self, item: Item) -> Item:
        most = self.max_chars
        return item if most is None or len(item.text) <= most else replace(item, text=item.text[:most])

    def _item_at(self, place: _Place) -> Item:
        return self._turns[place[0]].items[place[1]]

    def _change(self, place: _Place, **changes: Any) -> None:
        turn = self._turns[place[0]]
        turn.items[place[1]] = self._shortened(replace(turn.items[place[1]], **changes))
        self._note_row(turn.row + 1 + place[1])

    def _take_attached(self, envelope: Envelope, value: LoopAttached) -> None:
        self._turns[-1].is_foreign = True
        where = "" if value.workspace is None else f", in {value.workspace}"
        text = f"what another program's loop keeps here{where}"
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
                said = each.arguments
                if self.max_chars is not None:
                    said = about_call(said)[: self.max_chars]
                item = Item("tool", seq, "", each.name, "pending", True, each.call_id, said)
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
        if self._item_at(place).status in _OPEN:
            status = _UNRUN.get(message.content, "answered")
            self._change(place, status=status, is_good=False, ended_at=self._at)

    def _take_started(self, envelope: Envelope, value: ToolStarted) -> None:
        place = self._call(value.call_id)
        if place is None:
            item = Item("tool", envelope.seq, "", value.tool_name, "running", True, value.call_id)
            self._add_call(item, is_waiting=False)
            return
        item = self._item_at(place)
        waiting = self._waiting.get(value.call_id, [])
        if item.status not in _OPEN and place in waiting:
            # The call was undone, and a resume runs it again: both attempts are shown.
            again = replace(
                item,
                seq=envelope.seq,
                first_seq=envelope.seq,
                status="running",
                text="",
                is_good=True,
                elapsed_ms=None,
                started_at=envelope.at,
                ended_at=None,
            )
            waiting[waiting.index(place)] = self._add_call(again, is_waiting=False)
        else:
            self._change(place, status="running", seq=envelope.seq, started_at=envelope.at)

    def _call(self, call_id: str) -> _Place | None:
        places = self._calls.get(call_id)
        if not places:
            return None
        return next((each for each in places if self._item_at(each).status in _OPEN), places[-1])

    def _take_invoked(self, envelope: Envelope, value: ToolInvoked) -> None:
        call_id = value.call_id or ""
        place = self._call(call_id)
        if place is None:
            item = Item("tool", envelope.seq, title=value.name, call_id=call_id)
            place = self._add_call(item, is_waiting=False)
        item = self._item_at(place)
        # Whoever recovers a call after a crash cannot know when it ended: not before the last event there.
        is_recovered = is_recovered_end(value)
        ended_at = self._at_before if is_recovered else envelope.at
        began_at = item.started_at
        if not is_recovered:
            began_at = envelope.at - timedelta(milliseconds=value.elapsed_ms)
        self._change(
            place,
            seq=envelope.seq,
            started_at=began_at,
            ended_at=ended_at,
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
            self._change(place, status=status, is_good=value.approved, seq=envelope.seq, ended_at=envelope.at)

    def _take_ended(self, envelope: Envelope, value: TurnEnded) -> None:
        turn = self._turns[-1]
        turn.ended_at = envelope.at
        self._cut_off_model()
        state = turn.fold.derive().state
        item = Item("ending", envelope.seq, value.details, value.error_kind or "", state.value)
        actions = pasteable(value.next_actions, self.store)
        self._item(replace(item, is_good=state is TurnState.COMPLETED, next_actions=actions))
        self._live = None

    # Under ceilings the ledger says when each attempt at a model call began and ended. Without them there is
    # only what was used, which is logged at the end: the call began after whatever happened before it.

    def _take_reserved(self, envelope: Envelope, value: Reserved) -> None:
        if value.kind != "llm" or value.lineage[-1] != self.session_id:
            return  # A tool's step, or a child's: they have items of their own.
        item = Item("model", envelope.seq, "", value.operation_name, "running", call_id=value.reservation_id)
        self._asked = self._places["model", value.reservation_id] = self._item(item)

    def _take_settled(self, envelope: Envelope, value: Settled) -> None:
        place = self._places.get(("model", value.reservation_id))
        if place is None or self._item_at(place).ended_at is not None:
            return
        is_good = value.status == "ok"
        status = "answered" if is_good else value.status
        self._change(place, status=status, is_good=is_good, seq=envelope.seq, ended_at=envelope.at)

    def _take_retry(self, envelope: Envelope, value: RetryTaken) -> None:
        place = self._places.get(("model", value.reservation_id))
        if place is not None:
            self._change(place, status="retried", is_good=False, seq=envelope.seq)

    def _take_usage(self, envelope: Envelope, value: ProviderUsage) -> None:
        used = _usage(value.usage, value.cost_usd)
        self._turns[-1].usage += used
        place, self._asked = self._asked, None
        if place is None:
            began_at = self._at_before or envelope.at
            place = self._item(Item("model", envelope.seq, started_at=began_at, ended_at=envelope.at))
        item = self._item_at(place)
        self._change(
            place,
            seq=envelope.seq,
            title=value.model,
            text="; ".join(value.notes),
            status=item.status if item.status == "retried" else value.stop_reason or "answered",
            is_good=value.stop_reason in ("end", "tools", "paused", ""),
            ended_at=item.ended_at or envelope.at,
            usage=used,
        )

    def _take_resumed(self, envelope: Envelope, value: TurnResumed) -> None:
        self._cut_off_model()
        self._item(Item("notice", envelope.seq, "resumed", value.model))

    def _cut_off_model(self) -> None:
        """Close a model call that has neither an end nor an answer: its process has died."""
        place, self._asked = self._asked, None
        if place is not None and self._item_at(place).ended_at is None:
            self._change(place, status="cut_off", is_good=False, ended_at=self._at_before, seq=self.seq)

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
            call_id=value.child_session_id,
            next_actions=value.next_actions,
            ended_at=None if value.status in ("queued", "running") else envelope.at,
        )
        place = self._places.get(("subagent", value.subagent_id))
        if place is None:
            self._places["subagent", value.subagent_id] = self._item(item)
        else:
            known = self._item_at(place)
            changed = {each.name: getattr(item, each.name) for each in fields(Item)}
            kept = {"first_seq": known.first_seq, "started_at": known.started_at}
            self._change(place, **changed | kept)

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
        return place is not None and self._item_at(place).status not in _OPEN

    # .. what it shows ..

    @property
    def folds(self) -> Sequence[TurnFold]:
        """The evidence of each turn, oldest first."""
        return [each.fold for each in self._turns]

    @property
    def waiting_calls(self) -> Sequence[tuple[TurnFold, Item]]:
        """The tool calls without a result, with their turns, in order."""
        places = sorted(place for each in self._waiting.values() for place in each)
        return [(self._turns[place[0]].fold, self._item_at(place)) for place in places]

    def items(self, kind: ItemKind) -> Iterator[Item]:
        """Yield the items of one kind, oldest first. A text is a `draft` here, whatever its turn's state."""
        return (each for turn in self._turns for each in turn.items if each.kind == kind)

    @property
    def row_count(self) -> int:
        """How many rows the run has over time: its turns, and their items."""
        return self._rows

    @property
    def turn_heads(self) -> Sequence[TurnView]:
        """The turns without their items."""
        return [each.view(self.store, with_items=False) for each in self._turns]

    def call_began(self, call_id: str) -> int | None:
        """Return the event with which the model asked for a call; None if it never did."""
        places = self._calls.get(call_id)
        return None if not places else self._item_at(places[0]).first_seq

    def rows(self, first: int, last: int) -> Sequence[Row]:
        """Return the rows from `first` up to but without `last`."""
        found: list[Row] = []
        for number, turn in enumerate(self._turns):
            begin, end = max(first, turn.row), min(last, turn.row + 1 + len(turn.items))
            if begin >= end:
                continue
            state, newest = turn.fold.derive().state, turn.last
            for row in range(begin, end):
                place = row - turn.row - 1
                item = None if place < 0 else _named(turn.items[place], state, newest)
                found.append(Row(row, self._changed[row], number, item))
        return found

    def changed_rows(self, after: int, most: int) -> Sequence[Row] | None:
        """Return the rows that changed after an event, in order; None if they are more than `most`."""
        recent: list[int] = []
        for row, seq in reversed(self._changed.items()):
            if seq <= after:
                break
            recent.append(row)
            if len(recent) > most:
                return None
        return [each for row in sorted(recent) for each in self.rows(row, row + 1)]

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


def is_recovered_end(ended: ToolInvoked) -> bool:
    """Say whether a call was cut off by a crash, and its end written by the process that took over."""
    return not ended.adapter and ended.outcome in ("interrupted", "unknown")


def _usage(used: TokenUsage | None, cost_usd: float | None) -> Usage:
    known = used or TokenUsage()
    return Usage(1, known.input_tokens or 0, known.output_tokens or 0, known.cached_tokens or 0, cost_usd)


def _item_of(kind: ItemKind, describe: Callable[[Any], dict[str, Any]]) -> Callable[..., None]:
    def fold(projection: Projection, envelope: Envelope, value: Any) -> None:
        described = describe(value)
        if described:
            took = timedelta(milliseconds=getattr(value, "elapsed_ms", 0.0))
            projection._item(Item(kind, envelope.seq, started_at=envelope.at - took, **described))

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


_OF_TURN = (TurnStarted, TurnResumed, TurnEnded, ProviderUsage)
"""The events that change a turn itself, beside its items."""

_FOLDS: dict[type, Callable[[Projection, Envelope, Any], None]] = {
    InnerMessage: Projection._take_message,
    ToolStarted: Projection._take_started,
    ToolInvoked: Projection._take_invoked,
    RolledBack: Projection._take_rolled_back,
    ToolHeld: Projection._take_held,
    HoldAnswered: Projection._take_answered,
    TurnEnded: Projection._take_ended,
    LoopAttached: Projection._take_attached,
    Reserved: Projection._take_reserved,
    Settled: Projection._take_settled,
    RetryTaken: Projection._take_retry,
    ProviderUsage: Projection._take_usage,
    TurnResumed: Projection._take_resumed,
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
