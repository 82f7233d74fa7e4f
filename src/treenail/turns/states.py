"""How a turn may end: the one table, and how an ending is derived from the log.

Theory of operation
-------------------
A turn begins with `TurnStarted` and is said to be over by `TurnEnded`. Saying so is not enough. Each state
names the evidence that must stand in the log (`ENDINGS`), and `derive_turn` believes a `TurnEnded` only as
far as its evidence goes: a `completed` without a clean answer is `unfinished`, a `partial_failed` without
text is `failed`. A process that exited, a stream that closed or a text on a screen is evidence of nothing.

Every cause has a kind of its own (`CAUSES`), and its kind decides the state and what a person can do next.
The loop never decides: it hands whatever stopped it to `ending_for`, which looks it up. `end_turn` checks the
ending against the log before it writes it; an illegal one raises `IllegalEndingError` and changes nothing.

A turn whose log simply stops (the process died) has no ending. It is `unfinished`, which is no state of its
own but the lack of one, until somebody resumes it, or opens the session and closes it as interrupted by a
crash (`close_crashed_turn`). A resumed turn is `unfinished` again: an ending counts only while nothing of its
turn comes after it. So a log that was cut off at any event never reads as `completed`: only the whole
evidence does.

Everything here is values and plain functions, except for the two functions that append an ending.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import Enum
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from uuid import UUID
from weakref import WeakKeyDictionary

from treenail.codec import Codec
from treenail.containment import StopReason
from treenail.conversation.events import ProviderUsage
from treenail.conversation.messages import InnerMessage
from treenail.conversation.replay import decoded, read_events
from treenail.errors import (
    BudgetExceededError,
    CallRefused,
    CancelledByToken,
    DeadlineExceededError,
    HoldRequired,
    IllegalEndingError,
    ModelCallError,
    OutputParseError,
    PromptError,
    PromptEvaluationError,
    RestoreFailedError,
    UsageError,
)
from treenail.log.event import Draft, Envelope, SlicePolicy
from treenail.state.events import InitializeSlice, StateRestored, event
from treenail.state.session import Session, stamped
from treenail.state.slices import entry_at, opened
from treenail.tools.events import HoldAnswered, ToolHeld, ToolInvoked, ToolStarted


class TurnState(Enum):
    """How a turn ended, or that it has not."""

    COMPLETED = "completed"
    PARTIAL_FAILED = "partial_failed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    TIMED_OUT = "timed_out"
    HELD = "held"
    UNFINISHED = "unfinished"

    @property
    def is_terminal(self) -> bool:
        """Whether the turn is over. A held turn waits, an unfinished one can be resumed."""
        return self not in (TurnState.HELD, TurnState.UNFINISHED)


# --- what stands in the log --------------------------------------------------------------------------


@event(name="treenail.TurnStarted", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class TurnStarted:
    """A request was taken up."""

    turn_id: str
    evaluation_id: str
    agent: str
    task: str
    provider: str
    model: str
    workspace: str | None = None
    """The directory that the turn works in, so that a resume finds it."""


@event(name="treenail.TurnResumed", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class TurnResumed:
    """A turn that had stopped goes on: whatever ending it had no longer counts."""

    turn_id: str
    provider: str = ""
    model: str = ""


@event(name="treenail.TurnEnded", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A turn's ending, with its cause and what to do next."""

    turn_id: str
    state: TurnState
    error_kind: str | None = None
    details: str = ""
    next_actions: tuple[str, ...] = ()


@event(name="treenail.PartialText", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class PartialText:
    """What a model had said when its answer was cut off: evidence, never shown to it again."""

    turn_id: str
    text: str


# --- the causes --------------------------------------------------------------------------------------

_FAILED, _PARTIAL = TurnState.FAILED, TurnState.PARTIAL_FAILED
_RESUME = "treenail resume {session}"
_SHOW = "treenail show {session}"


@dataclass(frozen=True, slots=True)
class CauseRule:
    """What one cause makes of a turn."""

    kind: str
    meaning: str
    state: TurnState
    """The ending, if the model had said nothing that was cut off."""
    with_text: TurnState
    """The ending, if it had."""
    next_actions: tuple[str, ...]
    """What a person can do; `{session}` and `{call}` stand for their ids."""


def _causes() -> Iterator[CauseRule]:
    failed, partial = _FAILED, _PARTIAL
    again = (_RESUME, _SHOW)

    def provider(kind: str, meaning: str, *actions: str) -> CauseRule:
        return CauseRule(kind, meaning, failed, partial, (*actions, *again))

    def always(kind: str, meaning: str, state: TurnState, *actions: str) -> CauseRule:
        return CauseRule(kind, meaning, state, state, actions)

    # A model call that failed, by the kinds of `ModelCallError` and `ThrottleError`.
    yield provider("provider_error", "the provider failed, or its failures used up the retries")
    yield provider("rate_limit", "the provider asked us to slow down", "wait a little")
    yield provider(
        "quota_exhausted", "the provider's account has nothing left", "look at its plan and billing"
    )
    yield provider("throttle_timeout", "the provider made us wait for too long", "wait a little")
    yield provider("throttled", "the provider held us back and did not say why", "wait a little")
    yield provider("transient", "the provider failed for the moment")
    yield provider("connection", "the connection broke, or there was none", "check the network")
    yield provider(
        "context_too_long", "the conversation no longer fits the model", "use a model with more room"
    )
    yield provider("content_filtered", "the provider withheld the answer", "change what is asked")
    yield provider("truncated", "the answer reached its length limit", "allow longer answers")
    yield provider("refused", "the model would not answer", "change what is asked")
    yield provider("authentication", "the provider did not accept our credentials", "check the API key")
    yield provider("bad_request", "the provider did not accept the request", "read what it says about it")

    # What the model said is there, and is not good enough.
    yield always("incomplete", "the completion check did not accept the answer", partial, _RESUME, _SHOW)
    yield always("output_parse", "the answer does not fit the declared output type", partial, _RESUME, _SHOW)

    # The ceilings. A turn that they stop has not failed by itself, and is never complete.
    yield always("iteration_cap", "the turn asked the model as often as it may", failed, _SHOW, _RESUME)
    yield always(
        "budget_exceeded", "the money or the tokens are spent", failed, _RESUME + " --max-cost <more>", _SHOW
    )
    yield always("retry_budget_exceeded", "the run's retries are used up", failed, _RESUME, _SHOW)
    yield always(
        "circuit_open", "the model failed so often that it is left alone for a while", failed, _RESUME, _SHOW
    )
    yield always(
        "step_limit_exceeded", "the run's steps are used up", failed, _RESUME + " --max-steps <more>", _SHOW
    )
    yield always(
        "provider_rate_limit", "the run's own rate limit was reached", failed, "wait a little", _RESUME
    )
    yield always("halted", "a rule of the run refused a call", failed, _SHOW, _RESUME)
    yield always(
        "timeout", "the run's time is over", TurnState.TIMED_OUT, _RESUME + " --timeout <longer>", _SHOW
    )
    yield always(
        "deadline",
        "the turn's deadline has passed",
        TurnState.TIMED_OUT,
        _RESUME + " --timeout <longer>",
        _SHOW,
    )

    # Somebody stopped it.
    interrupted = TurnState.INTERRUPTED
    yield always("interrupt", "a person pressed Ctrl-C", interrupted, _RESUME)
    yield always("terminated", "the process was told to end (SIGTERM)", interrupted, _RESUME)
    yield always("cancelled", "the program around the turn cancelled it", interrupted, _RESUME)
    yield always("aborted", "the program aborted the run", interrupted, _RESUME)
    yield always("crash", "the process ended without a word", interrupted, _RESUME, _SHOW)

    # Somebody has to answer.
    yield always(
        "hold",
        "a tool call waits for a person",
        TurnState.HELD,
        "treenail hold answer {session} --call {call} --yes",
        _RESUME,
    )

    # It is our side that failed.
    yield always(
        "configuration_error", "the prompt or its settings are wrong", failed, "mend what it names", _RESUME
    )
    yield always(
        "restore_failed",
        "the files could not be put back",
        failed,
        "treenail diagnose {session}",
        _RESUME,
    )
    yield always("bug", "something failed that should not", failed, "treenail diagnose {session}", _RESUME)


def pasteable(actions: Iterable[str], store: object) -> tuple[str, ...]:
    """Name the store in the commands among these actions, so that they can be pasted anywhere.

    `store` is a store's path, or something that knows it as its `path`, such as a log; without a path the
    actions stay as they are. It is not written into the log: a store may be moved.
    """
    path = store if isinstance(store, str | PathLike) else getattr(store, "path", None)
    if not isinstance(path, str | PathLike):
        return tuple(actions)
    named = f" --store {shlex.quote(str(Path(path).absolute()))}"
    return tuple(
        each + named if each.startswith(_STORE_COMMANDS) and " --store " not in each else each
        for each in actions
    )


_STORE_COMMANDS = tuple(
    f"treenail {each}"
    for each in (
        "resume",
        "show",
        "diagnose",
        "replay",
        "diff",
        "export",
        "hold",
        "list",
        "salvage",
        "workflow",
    )
)

CAUSES: Mapping[str, CauseRule] = MappingProxyType({each.kind: each for each in _causes()})
"""Every cause that ends a turn before it is complete, by its kind."""

_PROVIDER_KINDS = frozenset(
    each.kind for each in CAUSES.values() if (each.state, each.with_text) == (_FAILED, _PARTIAL)
)
_THROTTLE_KINDS = {"timeout": "throttle_timeout", "unknown": "throttled"}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a turn ends: what `ending_for` makes of a cause."""

    state: TurnState
    error_kind: str | None = None
    details: str = ""
    next_actions: tuple[str, ...] = ()
    partial_text: str = ""
    """What the model had said: kept as evidence, never an answer."""

    def for_turn(self, turn_id: str) -> TurnEnded:
        """Return the event that says so."""
        return TurnEnded(turn_id, self.state, self.error_kind, self.details, self.next_actions)


def ending_for(
    cause: BaseException | str | None,
    *,
    details: str = "",
    said: str = "",
    stop_reason: str | None = None,
    session_id: UUID | str | None = None,
    call_id: str | None = None,
) -> Ending:
    """Look up how a turn ends.

    `cause` is what stopped it: None for an answer that is complete, a kind of `CAUSES`, or an exception.
    `said` is what the model had said of an answer that was cut off. `stop_reason` is why the containment or
    the turn's token stopped, if one of them did: it tells apart what one exception may mean.
    """
    if cause is None:
        return Ending(TurnState.COMPLETED)
    kind = cause if isinstance(cause, str) else kind_of(cause, stop_reason=stop_reason)
    rule = CAUSES.get(kind)
    if rule is None:
        known = ", ".join(CAUSES)
        raise UsageError(f"{kind!r} is no cause that ends a turn; the causes are: {known}")
    if isinstance(cause, HoldRequired):
        call_id = call_id or cause.call_id
    if isinstance(cause, BaseException):
        details = details or _described(cause, kind)
        said = said or (cause.partial if isinstance(cause, ModelCallError) else "")
    words = {"session": str(session_id or "<session>"), "call": call_id or "<call>"}
    return Ending(
        rule.with_text if said else rule.state,
        kind,
        details or rule.meaning,
        tuple(each.format(**words) for each in rule.next_actions),
        said,
    )


def kind_of(error: BaseException, *, stop_reason: str | None = None) -> str:
    """Name the cause that an exception is. What nobody foresaw is a `bug`.

    A cancellation that no exception of ours stands for is `cancelled`, unless `stop_reason` says why.
    """
    match error:
        case HoldRequired():
            return "hold"
        case CallRefused() if error.stop_reason in CAUSES:
            return str(error.stop_reason)
        case CallRefused():
            return "halted"
        case CancelledByToken():
            return stop_reason if stop_reason and stop_reason in CAUSES else "aborted"
        case DeadlineExceededError():
            return "timeout" if stop_reason == StopReason.TIMEOUT else "deadline"
        case BudgetExceededError():
            return "deadline" if error.exceeded_dimension == "deadline" else "budget_exceeded"
        case ModelCallError() if error.stop_reason in CAUSES:
            # Another attempt was wanted, and the run's limits did not let it be made.
            return str(error.stop_reason)
        case ModelCallError() if stop_reason == StopReason.PROVIDER_ERROR:
            # The failure that used the last retry is the run's ending; until then it is the call's.
            return "provider_error"
        case ModelCallError():
            kind = _THROTTLE_KINDS.get(error.kind, error.kind)
            return kind if kind in _PROVIDER_KINDS else "provider_error"
        case OutputParseError():
            return "output_parse"
        case PromptEvaluationError():
            return {"tool": "deadline", "budget": "budget_exceeded"}.get(error.phase, "provider_error")
        case RestoreFailedError():
            return "restore_failed"
        case PromptError() | UsageError():
            return "configuration_error"
        case KeyboardInterrupt():
            return stop_reason if stop_reason in ("terminated", "interrupt") else "interrupt"
        case Exception():
            return "bug"
    return stop_reason if stop_reason and stop_reason in CAUSES else "cancelled"


def _described(error: BaseException, kind: str) -> str:
    text = str(error)
    if kind == "bug" or (not text and isinstance(error, Exception)):
        return f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if isinstance(error, Exception) else ""


# --- the endings -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EndingRule:
    """One state: what it means, what must stand in the log for it, and what may follow it."""

    state: TurnState
    meaning: str
    evidence: tuple[str, ...]
    """Names of `EVIDENCE`, each of which must hold."""
    otherwise: TurnState
    """What a turn is that claims this state and lacks the evidence."""
    then: tuple[TurnState, ...]
    """The states that may come next: `unfinished` if the turn can be resumed."""
    shown_as: str
    """What a screen may make of it."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of causes that may end a turn so."""
        return tuple(each.kind for each in CAUSES.values() if self.state in (each.state, each.with_text))


_S = TurnState
_AGAIN = (_S.UNFINISHED,)

ENDINGS: Mapping[TurnState, EndingRule] = MappingProxyType(
    {
        each.state: each
        for each in (
            EndingRule(
                _S.COMPLETED,
                "the model gave a clean answer, and whatever checks it accepted it",
                ("start", "ending", "clean_answer", "answered_calls"),
                _S.UNFINISHED,
                (),
                "a final answer",
            ),
            EndingRule(
                _S.PARTIAL_FAILED,
                "there is useful text, and the turn failed before it was a clean answer",
                ("start", "ending", "text", "kind"),
                _S.FAILED,
                _AGAIN,
                "the text, marked as partial, with the failure",
            ),
            EndingRule(
                _S.FAILED,
                "the turn failed, or a ceiling stopped it",
                ("start", "ending", "kind"),
                _S.FAILED,
                _AGAIN,
                "a failure, with what to do",
            ),
            EndingRule(
                _S.INTERRUPTED,
                "a person, a signal, the program or a crash stopped it",
                ("start", "ending", "kind"),
                _S.INTERRUPTED,
                _AGAIN,
                "an interruption",
            ),
            EndingRule(
                _S.TIMED_OUT,
                "its time was over",
                ("start", "ending", "kind", "next_actions"),
                _S.TIMED_OUT,
                _AGAIN,
                "a timeout, with what to do",
            ),
            EndingRule(
                _S.HELD,
                "a call waits for a person",
                ("start", "ending", "kind", "hold"),
                _S.UNFINISHED,
                _AGAIN,
                "a question",
            ),
            EndingRule(
                _S.UNFINISHED,
                "there is no ending: it is under way, or its process died",
                ("start",),
                _S.UNFINISHED,
                tuple(each for each in TurnState if each is not _S.UNFINISHED),
                "work under way, or a run to resume",
            ),
        )
    }
)
"""The table: every state with its evidence and what may follow it."""


@dataclass(slots=True)
class TurnFold:
    """Takes the events of one turn's part of the log, one by one, and says how the turn stands."""

    turn_id: str
    started: tuple[int, TurnStarted] | None = None
    ended: tuple[int, TurnEnded] | None = None
    answer: int | None = None
    """The newest answer."""
    last: tuple[int, InnerMessage] | None = None
    open_calls: list[tuple[int, str]] = field(default_factory=list)
    partial: list[int] = field(default_factory=list)
    holds: list[int] = field(default_factory=list)
    attempts: dict[str, tuple[int, ToolStarted]] = field(default_factory=dict)
    """Tool calls that were begun and whose end is not in the log."""
    loose: list[tuple[int, InnerMessage]] = field(default_factory=list)
    """Messages that came out of a snapshot before any turn began: a turn that takes them up has them."""

    def copy(self) -> TurnFold:
        """Return another one that can be folded on by itself; its cost does not grow with the turn."""
        return replace(
            self,
            open_calls=list(self.open_calls),
            partial=list(self.partial),
            holds=list(self.holds),
            attempts=dict(self.attempts),
            loose=list(self.loose),
        )

    def take(self, seq: int, stamp: str | None, value: object) -> None:
        """Fold one event: its place, the turn id beside it, and its value."""
        turn_id = self.turn_id
        if isinstance(value, InnerMessage):
            # A later turn closes the calls that this one left open: its stamp, this one's evaluation.
            if stamp == turn_id if stamp is not None else self._is_of_evaluation(value):
                self.take_message(seq, value)
            return
        match value:
            case ToolInvoked():
                self.attempts.pop(value.attempt_id, None)
            case ToolStarted():
                self.attempts[value.attempt_id] = (seq, value)
                if stamp == turn_id:
                    self.ended = None
            case TurnStarted():
                self.begin(seq, value)
            case TurnResumed(turn_id=of) if of == turn_id:
                self.ended = None
            case TurnEnded(turn_id=of) if of == turn_id:
                self.ended = (seq, value)
            case PartialText(turn_id=of) if of == turn_id:
                self.partial.append(seq)
            case ToolHeld():
                self.holds.append(seq)

    def take_told(self, seq: int, told: Telling) -> None:
        """Fold what an event tells."""
        self.take(seq, told.stamp, told.value)
        if told.is_brought and self.started is None:
            self.keep_loose(seq, told.value)

    def keep_loose(self, seq: int, value: object) -> None:
        """Keep a message that came out of a snapshot, for a turn that takes it up."""
        if isinstance(value, InnerMessage):
            self.loose.append((seq, value))

    def begin(self, seq: int, started: TurnStarted) -> None:
        """Begin the turn, with the messages that it takes up."""
        self.turn_id, self.started = started.turn_id, (seq, started)
        taken_up = [each for each in self.loose if each[1].evaluation_id == started.evaluation_id]
        self.loose = []
        for at, message in taken_up:
            self.take_message(at, message)

    def takes_up(self, started: TurnStarted) -> bool:
        """Say whether what stands here is of no turn yet, and belongs to the one that begins."""
        if self.started is not None:
            return False
        return not self.loose or any(each.evaluation_id == started.evaluation_id for _, each in self.loose)

    def _is_of_evaluation(self, message: InnerMessage) -> bool:
        return self.started is not None and message.evaluation_id == self.started[1].evaluation_id

    def take_message(self, seq: int, message: InnerMessage) -> None:
        """Fold a message that is the turn's: whatever ending it had before does not count."""
        self.ended = None
        self.last = (seq, message)
        if message.role == "assistant":
            self.answer = seq
            self.open_calls += [(seq, each.call_id) for each in message.tool_calls]
        elif message.role == "tool":
            # A provider may use a call id again in a later answer: a result settles one call.
            for index, (_, call_id) in enumerate(self.open_calls):
                if call_id == message.tool_call_id:
                    del self.open_calls[index]
                    break

    def derive(self) -> TurnDerivation:
        """Say how the turn stands after the events so far."""
        claimed = None if self.ended is None else self.ended[1].state
        rule = ENDINGS[claimed or TurnState.UNFINISHED]
        found = {name: EVIDENCE[name].find(self) for name in rule.evidence}
        missing = tuple(name for name, seqs in found.items() if seqs is None)
        return TurnDerivation(
            turn_id=self.turn_id,
            state=rule.otherwise if missing else rule.state,
            evidence={name: seqs for name, seqs in found.items() if seqs is not None},
            missing=missing,
            claimed=claimed,
            started=None if self.started is None else self.started[1],
            ended=None if self.ended is None else self.ended[1],
            open_calls=tuple(self.open_calls),
            open_attempts=tuple((seq, each.call_id) for seq, each in self.attempts.values()),
        )


def _one(place: tuple[int, object] | None) -> tuple[int, ...] | None:
    return None if place is None else (place[0],)


def _clean_answer(fold: TurnFold) -> tuple[int, ...] | None:
    if fold.last is None:
        return None
    seq, message = fold.last
    return (seq,) if message.role == "assistant" and not message.tool_calls else None


def _text(fold: TurnFold) -> tuple[int, ...] | None:
    # An answer that a check did not accept is in the conversation; one that was cut off is not.
    judged = fold.ended is not None and fold.ended[1].error_kind in ("incomplete", "output_parse")
    found = [*fold.partial, *((fold.answer,) if judged and fold.answer is not None else ())]
    return tuple(found) or None


def _kind(fold: TurnFold) -> tuple[int, ...] | None:
    if fold.ended is None:
        return None
    seq, ended = fold.ended
    return (seq,) if ended.error_kind in ENDINGS[ended.state].kinds else None


def _next_actions(fold: TurnFold) -> tuple[int, ...] | None:
    return _one(fold.ended) if fold.ended is not None and fold.ended[1].next_actions else None


@dataclass(frozen=True, slots=True)
class EvidenceRule:
    """One thing that must stand in the log, and how it is found there."""

    name: str
    meaning: str
    find: Callable[[TurnFold], tuple[int, ...] | None] = field(repr=False)
    """Returns the events that show it, or None if it is missing."""


EVIDENCE: Mapping[str, EvidenceRule] = MappingProxyType(
    {
        each.name: each
        for each in (
            EvidenceRule("start", "the turn's `TurnStarted`", lambda fold: _one(fold.started)),
            EvidenceRule(
                "ending", "a `TurnEnded` with nothing of the turn after it", lambda fold: _one(fold.ended)
            ),
            EvidenceRule(
                "clean_answer", "the turn's last message is an answer that asks for no tool", _clean_answer
            ),
            EvidenceRule(
                "answered_calls",
                "every tool call has its result",
                lambda fold: None if fold.open_calls else (),
            ),
            EvidenceRule("text", "the text: a `PartialText`, or the answer that was not accepted", _text),
            EvidenceRule("kind", "an error kind that belongs to the state", _kind),
            EvidenceRule("next_actions", "what a person can do next", _next_actions),
            EvidenceRule("hold", "a `ToolHeld`", lambda fold: tuple(fold.holds) or None),
        )
    }
)
"""What evidence is, by the names that the table uses."""


# --- deriving ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TurnDerivation:
    """How a turn stands, and which events show it."""

    turn_id: str
    state: TurnState
    evidence: Mapping[str, tuple[int, ...]]
    """The sequence numbers of the events that show each piece of evidence."""
    missing: tuple[str, ...] = ()
    """The evidence that the claimed state needs and the log does not have."""
    claimed: TurnState | None = None
    """What the turn's `TurnEnded` says, if there is one that counts."""
    started: TurnStarted | None = None
    ended: TurnEnded | None = None
    open_calls: tuple[tuple[int, str], ...] = ()
    """Tool calls without a result: the events that asked for them, and their ids."""
    open_attempts: tuple[tuple[int, str], ...] = ()
    """Tool calls that were begun and never ended: the events that began them, and their call ids."""

    @property
    def is_as_claimed(self) -> bool:
        """Whether the log shows what its `TurnEnded` says."""
        return not self.missing and self.claimed in (None, self.state)


Event = tuple[Envelope, object | None]
"""An event of a log with its value; None where the value cannot be read."""


def derive_turn(events: Iterable[Event], turn_id: str) -> TurnDerivation:
    """Say how a turn stands, from the events of its log alone. It is a pure function."""
    follower = TurnFollower(turn_id)
    for envelope, value in events:
        follower.add(envelope.seq, envelope, value, None)
    return follower.fold.derive()


@dataclass(frozen=True, slots=True)
class Telling:
    """One thing that an event of a log tells."""

    value: object | None
    stamp: str | None = None
    """The turn id beside it."""
    is_brought: bool = False
    """Whether it happened elsewhere and was taken over."""


@dataclass(slots=True)
class Teller:
    """Reads a log's events as what they tell of turns, each thing once.

    Most events tell themselves. A message that is dispatched again, with another status, tells nothing
    new. A session that took over a snapshot has its conversation in one event that says what became of
    the slices: that one tells the messages and turns that it holds, in the order in which they happened.
    """

    _known: set[object] = field(default_factory=set)
    """What was told: messages by their ids, as numbers, which have their hashes at hand."""

    def tellings(self, envelope: Envelope, value: object | None) -> Sequence[Telling]:
        """Return what an event tells, in its order."""
        if isinstance(value, InnerMessage) and not self.is_new(value):
            return ()
        first = Telling(value, envelope.turn_id)
        return (first, *(Telling(each, None, is_brought=True) for each in self.brought_by(value)))

    def brought_by(self, value: object | None) -> Iterable[object]:
        """Return what an event takes over from elsewhere, as far as it was not told before."""
        if isinstance(value, StateRestored):
            brought = [
                item.item
                for each in value.slices
                for item in each.items
                if item.origin == 0 and item.item is not None
            ]
        elif isinstance(value, InitializeSlice):
            brought = list(value.items)
        else:
            return ()
        return _as_it_happened([each for each in brought if self.is_new(each)])

    def is_new(self, value: object) -> bool:
        """Say whether something was not told before; from now on it was."""
        key = value.message_id.int if isinstance(value, InnerMessage) else (type(value), repr(value))
        if key in self._known:
            return False
        self._known.add(key)
        return True


def _as_it_happened(values: Sequence[object]) -> Iterator[object]:
    """Put what came slice by slice into the order of the turns; what is of no turn comes first."""
    messages = [each for each in values if isinstance(each, InnerMessage)]
    turns = [each for each in values if isinstance(each, TurnStarted)]
    told = {each.evaluation_id for each in turns}
    ends = {each.call_id: each for each in values if isinstance(each, ToolInvoked)}
    yield from _with_ends((each for each in messages if each.evaluation_id not in told), ends)
    for turn in turns:
        yield turn
        yield from _with_ends((each for each in messages if each.evaluation_id == turn.evaluation_id), ends)
        yield from (each for each in values if isinstance(each, PartialText) and each.turn_id == turn.turn_id)
        if turn is turns[-1]:
            # Which turn they belong to is not known; what is open can only be the newest one's.
            yield from (each for each in values if isinstance(each, ToolHeld))
            yield from (each for each in values if isinstance(each, HoldAnswered | ProviderUsage))
        endings = [each for each in values if isinstance(each, TurnEnded) and each.turn_id == turn.turn_id]
        yield from endings[-1:]


def _with_ends(messages: Iterable[InnerMessage], ends: Mapping[str | None, ToolInvoked]) -> Iterator[object]:
    for each in messages:
        if each.role == "tool" and each.tool_call_id in ends:
            yield ends[each.tool_call_id]
        yield each


TURN_KINDS = frozenset[type](
    (
        TurnStarted,
        TurnResumed,
        TurnEnded,
        PartialText,
        InnerMessage,
        ToolHeld,
        ToolStarted,
        ToolInvoked,
        StateRestored,
        InitializeSlice,
    )
)
"""The kinds of events that say how a turn stands."""

FOLLOWED_KINDS = TURN_KINDS - {ToolInvoked}
"""The kinds that a `TurnFollower` must be given the values of.

The end of a call is a large event, and it matters only if the log has the call's start: most calls have none.
"""


@dataclass(slots=True)
class TurnFollower:
    """Folds one turn out of a log, event by event. Asking it again costs what was logged since."""

    turn_id: str = ""
    fold: TurnFold = field(default_factory=lambda: TurnFold(""))
    seq: int = 0
    """The newest event that was folded."""
    _is_inside: bool = False
    _teller: Teller = field(default_factory=Teller)
    lock: AbstractContextManager[bool] = field(default_factory=threading.RLock)
    """Held by whoever folds: a screen may ask from another thread."""

    def __post_init__(self) -> None:
        self.fold = TurnFold(self.turn_id)

    def aim(self, session: Session, started: TurnStarted, *, after: int | None = None) -> None:
        """Follow this turn of a session, from its first event on; nothing, if that is done already.

        Whoever has just begun the turn knows after which event that was; others have it looked for.
        """
        with self.lock:
            if self.turn_id != started.turn_id:
                self.turn_id, self.fold = "", TurnFold(started.turn_id)
                self._is_inside, self._teller = False, Teller()
                self.seq = _first_event(session, started) - 1 if after is None else after
                self.turn_id = started.turn_id

    def add(self, seq: int, logged: Envelope | Draft, value: object | None, codec: Codec | None) -> None:
        """Fold the next event. One that was folded before is passed over.

        With a codec the value of a `ToolInvoked` may be left out: it is read here if it matters.
        """
        if seq <= self.seq:
            return
        try:
            self.seq = seq
            if not isinstance(value, InnerMessage):
                self._add(seq, logged, value, codec)
            elif self._teller.is_new(value) and self._is_inside:
                self.fold.take(seq, logged.turn_id, value)
        except BaseException:
            self.turn_id = ""  # Half folded: whoever aims at the turn next folds it anew.
            raise

    def _add(self, seq: int, logged: Envelope | Draft, value: object | None, codec: Codec | None) -> None:
        if value is None and codec is not None and self.fold.attempts:
            value = _end_of_call(logged, codec)
        if type(value) not in TURN_KINDS or (isinstance(value, ToolInvoked) and not self.fold.attempts):
            return  # It tells nothing of turns.
        if self._is_of_turn(value):
            self.fold.take(seq, logged.turn_id, value)
        for brought in self._teller.brought_by(value):
            if self._is_of_turn(brought):
                self.fold.take(seq, None, brought)
            else:
                self.fold.keep_loose(seq, brought)

    def _is_of_turn(self, value: object) -> bool:
        """Say whether this is the turn's part of the log; a start says which part begins."""
        if isinstance(value, TurnStarted):
            self._is_inside = value.turn_id == self.turn_id
        return self._is_inside

    def catch_up(self, session: Session, started: TurnStarted) -> TurnFold:
        """Fold what the log has of this turn by now. Returns a fold of the caller's own."""
        with self.lock:
            self.aim(session, started)
            for seq, logged, value in read_events(session, FOLLOWED_KINDS, after=self.seq, upto=session.head):
                self.add(seq, logged, value, session.codec)
            return self.fold.copy()


def _end_of_call(logged: Envelope | Draft, codec: Codec) -> object | None:
    """Read a `ToolInvoked`; None if the event is another one."""
    name = logged.type
    if not codec.registry.knows(name) or codec.registry.resolve(name) is not ToolInvoked:
        return None
    return decoded(codec, ToolInvoked, logged.payload)


def _first_event(session: Session, started: TurnStarted) -> int:
    """Return the first event that is of a turn: its start, or what brought the messages that it took up."""
    first = abs(entry_at(session[TurnStarted].view(), -1)[1])
    messages = session[InnerMessage].view()
    for place in range(len(messages) - 1, -1, -1):
        kept, origin = entry_at(messages, place)
        if opened(kept).evaluation_id != started.evaluation_id:
            break
        first = min(first, abs(origin))
    return max(first, 1)


_followers: WeakKeyDictionary[Session, TurnFollower] = WeakKeyDictionary()


def follower_of(session: Session) -> TurnFollower:
    """Return who follows the newest turn of a session in this process: whoever asks later reads on there."""
    found = _followers.get(session)
    # Of two threads that ask for the first time, both get the same one.
    return _followers.setdefault(session, TurnFollower()) if found is None else found


def newest_turn(session: Session) -> TurnDerivation | None:
    """Say how the session's newest turn stands; None if it has none.

    It reads that turn's events, and those only once: asked again, it reads what was logged since.
    """
    found = _newest_fold(session)
    return None if found is None else found.derive()


def _newest_fold(session: Session) -> TurnFold | None:
    started = session[TurnStarted].latest()
    return None if started is None else follower_of(session).catch_up(session, started)


def turn_state(session: Session) -> TurnState:
    """Derive how the session's newest turn ended, from its log."""
    derived = newest_turn(session)
    return TurnState.UNFINISHED if derived is None else derived.state


# --- ending ------------------------------------------------------------------------------------------


def check_ending(derived: TurnDerivation, ended: TurnEnded) -> None:
    """Raise `IllegalEndingError` unless the table lets a turn that stands so end so.

    It looks at the move and at the cause; whether the evidence is there is seen when it is derived again.
    """
    state, kind = ended.state, ended.error_kind
    if state is TurnState.UNFINISHED:
        raise IllegalEndingError(
            f"turn {ended.turn_id} cannot end as unfinished: that is the lack of an ending; "
            "end it with a state of treenail.turns.states.ENDINGS"
        )
    if state not in ENDINGS[derived.state].then:
        raise IllegalEndingError(
            f"turn {ended.turn_id} is {derived.state.value} and cannot become {state.value}; "
            "resume it first, if it may go on"
        )
    kinds = ENDINGS[state].kinds
    if (kind not in kinds) if kinds else (kind is not None):
        allowed = ", ".join(kinds) or "none"
        raise IllegalEndingError(
            f"turn {ended.turn_id} cannot end as {state.value} because of {kind!r}; "
            f"the causes of that ending are: {allowed}"
        )


def end_turn(session: Session, turn_id: str, ending: Ending) -> TurnEnded:
    """Append a turn's ending, with the text that was cut off.

    Raises `IllegalEndingError`, and has changed nothing, if the table does not allow it or its evidence is
    not in the log. A turn that is completed already stays as it is: ending it so again changes nothing.
    """
    fold = _newest_fold(session)
    if fold is None or fold.turn_id != turn_id:
        raise IllegalEndingError(
            f"turn {turn_id} is not the newest turn of session {session.session_id}; only that one can end"
        )
    present = fold.derive()
    if present.state is TurnState.COMPLETED and ending.state is TurnState.COMPLETED and present.ended:
        return present.ended
    ended = ending.for_turn(turn_id)
    check_ending(present, ended)
    said = [PartialText(turn_id, ending.partial_text)] if ending.partial_text else []
    # Derive what the log would say afterwards, before anything is written.
    for seq, each in enumerate((*said, ended), start=session.head + 1):
        fold.take(seq, turn_id, each)
    missing = fold.derive().missing
    if missing:
        needed = "; ".join(EVIDENCE[name].meaning for name in missing)
        raise IllegalEndingError(
            f"turn {turn_id} cannot end as {ended.state.value}, because its log does not show: {needed}"
        )
    with stamped(turn_id=turn_id):
        session.dispatch_all((*said, ended))
    return ended


def close_crashed_turn(session: Session) -> TurnEnded | None:
    """Close the newest turn as interrupted by a crash, if its log simply stops.

    For whoever opens a session for writing and does not resume it, before anything else runs there: holding
    the session's lease is what shows that nobody else is at work on the turn. Calls that the crash left open
    stay open, for a resume to run or for the next turn to close. Returns None, and has changed nothing, if
    the turn has an ending, if there is none, or if the session was forked in the middle of it. A session
    opened for reading cannot be closed (`ReadOnlyError`).
    """
    fold = _newest_fold(session)
    if fold is None or fold.ended is not None or _is_forked(session, fold):
        return None
    present = fold.derive()
    details = "the process ended before the turn did, or could not write how"
    if present.open_attempts:
        calls = ", ".join(call_id for _, call_id in present.open_attempts)
        details += f"; cut off in the middle, to be rolled back by a resume: {calls}"
    elif present.open_calls:
        calls = ", ".join(call_id for _, call_id in present.open_calls)
        details += f"; not run yet: {calls}"
    return end_turn(
        session, present.turn_id, ending_for("crash", details=details, session_id=session.session_id)
    )


def _is_forked(session: Session, fold: TurnFold) -> bool:
    """Say whether the turn has no ending because the session is a copy that was made in the middle of it."""
    copied = session.tags.get("forked_at", "")
    places = [each[0] for each in (fold.started, fold.last) if each is not None]
    return copied.isdecimal() and max(places, default=0) <= int(copied)


# --- the table, for people ---------------------------------------------------------------------------


def endings_page() -> str:
    """Write the tables as Markdown: what `docs/endings.md` shows."""
    lines = [
        "| state | meaning | evidence in the log | without it | may become | shown as |",
        "|" + "---|" * 6,
    ]
    for each in ENDINGS.values():
        evidence = "; ".join(EVIDENCE[name].meaning for name in each.evidence)
        then = ", ".join(f"`{state.value}`" for state in each.then) or "nothing: it is final"
        lines.append(
            f"| `{each.state.value}` | {each.meaning} | {evidence} | `{each.otherwise.value}` | {then} "
            f"| {each.shown_as} |"
        )
    lines += ["", "| kind | cause | ends as | with text | next |", "|" + "---|" * 5]
    for cause in CAUSES.values():
        actions = "; ".join(f"`{each}`" if "treenail" in each else each for each in cause.next_actions)
        lines.append(
            f"| `{cause.kind}` | {cause.meaning} | `{cause.state.value}` | `{cause.with_text.value}` "
            f"| {actions} |"
        )
    lines += ["", "```mermaid", "stateDiagram-v2", "    [*] --> unfinished"]
    for each in ENDINGS.values():
        lines += [f"    {each.state.value} --> {state.value}" for state in each.then]
        if not each.then:
            lines.append(f"    {each.state.value} --> [*]")
    return "\n".join([*lines, "```", ""])
