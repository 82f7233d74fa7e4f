"""How a turn may end: one table of causes, one of endings, and the evidence that each ending needs.

Theory of operation
-------------------
A turn begins with `TurnStarted` and is closed by `TurnEnded`. The claim alone is not enough. Each state
names the evidence that must stand in the log (`ENDINGS`, `EVIDENCE`), and `TurnFold.derive` believes a
`TurnEnded` only as far as its evidence goes: a `completed` without a clean answer is `unfinished`, a
`partial_failed` without text is `failed`. A process that exited, a stream that closed or a text on a screen
proves nothing.

Every cause has its own kind (`CAUSES`), and the kind decides the state and what a person can do next. The
loop never decides: it hands whatever stopped it to `ending_for`, which looks it up. `check_ending` refuses a
move that the table does not allow.

A turn whose log simply stops (the process died) has no ending: it is `unfinished` until a resume, or until
the next writer closes it as interrupted by a crash. A resumed turn is `unfinished` again: an ending counts
only while nothing of its turn comes after it. So a log that was cut off at any event never reads as
`completed`; only the whole evidence does.

This file is data and pure functions. `treenail.turns.derivation` reads a session's log into the fold, and
`treenail.turns.endings` writes endings.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from uuid import UUID

from treenail.containment import StopReason
from treenail.conversation import InnerMessage
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
    WorkspaceBusyError,
)
from treenail.log import PostgresUrl, SlicePolicy, place_of, store_named
from treenail.state import event
from treenail.tools import ToolHeld, ToolStarted


class TurnState(Enum):
    """How a turn ended, or that it has not ended."""

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


# --- the events --------------------------------------------------------------------------------------


@event(name="treenail.TurnStarted", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class TurnStarted:
    """A turn began on a request."""

    turn_id: str
    evaluation_id: str
    agent: str
    task: str
    provider: str
    model: str
    workspace: str | None = None
    """The turn's working directory, which a resume needs."""


@event(name="treenail.TurnResumed", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class TurnResumed:
    """A stopped turn was resumed: an ending before this no longer counts."""

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
    """The text of an answer that was cut off: evidence, never sent to the model again."""

    turn_id: str
    text: str


# --- the causes --------------------------------------------------------------------------------------

_FAILED, _PARTIAL = TurnState.FAILED, TurnState.PARTIAL_FAILED
_INTERRUPTED, _TIMED_OUT = TurnState.INTERRUPTED, TurnState.TIMED_OUT
_RESUME = "treenail resume {session}"
_SHOW = "treenail show {session}"
_DIAGNOSE = "treenail diagnose {session}"
_LONGER = "treenail resume {session} --timeout <longer>"
_WAIT = "wait a little"


@dataclass(frozen=True, slots=True)
class CauseRule:
    """How one cause ends a turn."""

    kind: str
    meaning: str
    state: TurnState
    """The ending, if no text of the model was cut off."""
    with_text: TurnState
    """The ending, if some was."""
    next_actions: tuple[str, ...]
    """What a person can do; `{session}` and `{call}` stand for their ids."""


def _provider(kind: str, meaning: str, *first: str) -> CauseRule:
    return CauseRule(kind, meaning, _FAILED, _PARTIAL, (*first, _RESUME, _SHOW))


def _always(kind: str, meaning: str, state: TurnState, *next_actions: str) -> CauseRule:
    return CauseRule(kind, meaning, state, state, next_actions)


_RULES = (
    # A model call failed, by the kinds of `ModelCallError` and `ThrottleError`.
    _provider("provider_error", "the provider failed, or its failures used up the retries"),
    _provider("rate_limit", "the provider asked us to slow down", _WAIT),
    _provider("quota_exhausted", "the provider's account has no quota left", "check its plan and billing"),
    _provider("throttle_timeout", "the provider kept us waiting for too long", _WAIT),
    _provider("throttled", "the provider throttled us and did not say why", _WAIT),
    _provider("transient", "the provider failed temporarily"),
    _provider("connection", "the connection broke, or there was none", "check the network"),
    _provider(
        "context_too_long", "the conversation no longer fits the model", "use a model with a larger context"
    ),
    _provider("content_filtered", "the provider withheld the answer", "change the request"),
    _provider("truncated", "the answer reached its length limit", "allow longer answers"),
    _provider("refused", "the model refused to answer", "change the request"),
    _provider("broken_off", "the provider stopped before the answer was finished"),
    _provider("authentication", "the provider did not accept our credentials", "check the API key"),
    _provider("bad_request", "the provider did not accept the request", "read the provider's message"),
    # There is an answer, and it was not accepted.
    _always("incomplete", "the completion check did not accept the answer", _PARTIAL, _RESUME, _SHOW),
    _always("output_parse", "the answer does not fit the declared output type", _PARTIAL, _RESUME, _SHOW),
    # A ceiling stopped the turn.
    _always("iteration_cap", "the turn called the model as often as it may", _FAILED, _SHOW, _RESUME),
    _always(
        "budget_exceeded", "the money or the tokens are spent", _FAILED, _RESUME + " --max-cost <more>", _SHOW
    ),
    _always("retry_budget_exceeded", "the run's retries are used up", _FAILED, _RESUME, _SHOW),
    _always(
        "circuit_open", "the model failed so often that it is not called for a while", _FAILED, _RESUME, _SHOW
    ),
    _always(
        "step_limit_exceeded", "the run's steps are used up", _FAILED, _RESUME + " --max-steps <more>", _SHOW
    ),
    _always("provider_rate_limit", "the run reached its own rate limit", _FAILED, _WAIT, _RESUME),
    _always("halted", "a rule of the run refused a call", _FAILED, _SHOW, _RESUME),
    _always("timeout", "the run's time is over", _TIMED_OUT, _LONGER, _SHOW),
    _always("deadline", "the turn's deadline has passed", _TIMED_OUT, _LONGER, _SHOW),
    _always(
        "workspace_busy",
        "another process writes to the workspace",
        _FAILED,
        _RESUME,
        _RESUME + " --take-over",
    ),
    # Something stopped it from outside.
    _always("interrupt", "a person pressed Ctrl-C", _INTERRUPTED, _RESUME),
    _always("terminated", "the process was told to end (SIGTERM)", _INTERRUPTED, _RESUME),
    _always("cancelled", "the program around the turn cancelled it", _INTERRUPTED, _RESUME),
    _always("aborted", "the program aborted the run", _INTERRUPTED, _RESUME),
    _always("crash", "the process died without recording an ending", _INTERRUPTED, _RESUME, _SHOW),
    # A person has to answer.
    _always(
        "hold",
        "a tool call waits for a person",
        TurnState.HELD,
        "treenail hold answer {session} --call {call} --yes",
        _RESUME,
    ),
    # Our side failed.
    _always(
        "configuration_error",
        "the prompt or its settings are wrong",
        _FAILED,
        "fix what the message names",
        _RESUME,
    ),
    _always("restore_failed", "the files could not be restored", _FAILED, _DIAGNOSE, _RESUME),
    _always("bug", "an unexpected error was raised", _FAILED, _DIAGNOSE, _RESUME),
)

CAUSES: Mapping[str, CauseRule] = MappingProxyType({each.kind: each for each in _RULES})
"""Every cause that ends a turn before it is complete, by its kind."""

_PROVIDER_KINDS = frozenset(each.kind for each in _RULES if each.state is not each.with_text)
_THROTTLE_KINDS = {"timeout": "throttle_timeout", "unknown": "throttled"}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a turn ends: the result of `ending_for`."""

    state: TurnState
    error_kind: str | None = None
    details: str = ""
    next_actions: tuple[str, ...] = ()
    partial_text: str = ""
    """The text that was cut off: kept as evidence, never an answer."""

    def for_turn(self, turn_id: str) -> TurnEnded:
        """Return the event that records it."""
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

    `cause` is what stopped it: None for a complete answer, a kind of `CAUSES`, or an exception. `said` is the
    text of an answer that was cut off. `stop_reason` is why the containment or the turn's token stopped, if
    one of them did: one exception can have several causes.
    """
    if cause is None:
        return Ending(TurnState.COMPLETED)
    kind = cause if isinstance(cause, str) else kind_of(cause, stop_reason=stop_reason)
    rule = CAUSES.get(kind)
    if rule is None:
        known = ", ".join(CAUSES)
        raise UsageError(f"{kind!r} is not a cause that ends a turn; the causes are: {known}")
    actions = rule.next_actions
    if isinstance(cause, HoldRequired):
        call_id = call_id or cause.call_id
        if cause.is_question:
            actions = tuple(each.replace("--yes", "--answer TEXT") for each in actions)
    if isinstance(cause, BaseException):
        details = details or _described(cause, kind)
        said = said or (cause.partial if isinstance(cause, ModelCallError) else "")
    words = {"session": str(session_id or "<session>"), "call": call_id or "<call>"}
    return Ending(
        rule.with_text if said else rule.state,
        kind,
        details or rule.meaning,
        tuple(each.format(**words) for each in actions),
        said,
    )


def kind_of(error: BaseException, *, stop_reason: str | None = None) -> str:
    """Return the kind of cause that an exception stands for; an unexpected one is a `bug`.

    A cancellation without an exception of ours is `cancelled`, unless `stop_reason` says why.
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
            # The call was to be retried, and the run's limits did not allow it.
            return str(error.stop_reason)
        case ModelCallError() if stop_reason == StopReason.PROVIDER_ERROR:
            # This failure used the last retry: it ends the run, not only the call.
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
        case WorkspaceBusyError():
            return "workspace_busy"
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
    """One state: its meaning, the evidence that it needs, and the states that may follow it."""

    state: TurnState
    meaning: str
    evidence: tuple[str, ...]
    """Names in `EVIDENCE`, each of which must be found."""
    otherwise: TurnState
    """The state of a turn that claims this one without its evidence."""
    then: tuple[TurnState, ...]
    """The states that may follow: `unfinished` if the turn can be resumed."""
    shown_as: str
    """How a screen may show it."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of causes that may end a turn in this state."""
        return tuple(each.kind for each in CAUSES.values() if self.state in (each.state, each.with_text))


_S = TurnState
_AGAIN = (_S.UNFINISHED,)

ENDINGS: Mapping[TurnState, EndingRule] = MappingProxyType(
    {
        each.state: each
        for each in (
            EndingRule(
                _S.COMPLETED,
                "the model gave a clean answer, and every check accepted it",
                ("start", "ending", "clean_answer", "answered_calls"),
                _S.UNFINISHED,
                (),
                "a final answer",
            ),
            EndingRule(
                _S.PARTIAL_FAILED,
                "there is useful text, but the turn failed before a clean answer",
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
    """Folds the events of one turn, one by one, and derives the turn's state from them."""

    turn_id: str
    started: tuple[int, TurnStarted] | None = None
    ended: tuple[int, TurnEnded] | None = None
    answer: int | None = None
    """The newest answer."""
    last: tuple[int, InnerMessage] | None = None
    open_calls: list[tuple[int, str]] = field(default_factory=list)
    partial: list[int] = field(default_factory=list)
    holds: list[int] = field(default_factory=list)
    loose: list[tuple[int, InnerMessage]] = field(default_factory=list)
    """Messages that came with a snapshot before any turn began: the turn that continues them gets them."""

    def copy(self) -> TurnFold:
        """Return an independent copy; its cost does not grow with the turn."""
        return replace(
            self,
            open_calls=list(self.open_calls),
            partial=list(self.partial),
            holds=list(self.holds),
            loose=list(self.loose),
        )

    def take(self, seq: int, stamp: str | None, value: object) -> None:
        """Fold one event: its sequence number, the turn id of its envelope, and its value."""
        turn_id = self.turn_id
        if isinstance(value, InnerMessage):
            # A later turn closes the calls that this one left open, with its own stamp.
            if stamp == turn_id if stamp is not None else self._is_of_evaluation(value):
                self.take_message(seq, value)
            return
        match value:
            case ToolStarted() if stamp == turn_id:
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

    def keep_loose(self, seq: int, value: object) -> None:
        """Keep a message that came with a snapshot, for the turn that continues it."""
        if isinstance(value, InnerMessage):
            self.loose.append((seq, value))

    def begin(self, seq: int, started: TurnStarted) -> None:
        """Begin the turn, with the loose messages of its evaluation."""
        self.turn_id, self.started = started.turn_id, (seq, started)
        taken_up = [each for each in self.loose if each[1].evaluation_id == started.evaluation_id]
        self.loose = []
        for at, message in taken_up:
            self.take_message(at, message)

    def takes_up(self, started: TurnStarted) -> bool:
        """Return whether this fold has no turn yet and its messages belong to the one that begins."""
        if self.started is not None:
            return False
        return not self.loose or any(each.evaluation_id == started.evaluation_id for _, each in self.loose)

    def _is_of_evaluation(self, message: InnerMessage) -> bool:
        return self.started is not None and message.evaluation_id == self.started[1].evaluation_id

    def take_message(self, seq: int, message: InnerMessage) -> None:
        """Fold a message of the turn: an earlier ending no longer counts."""
        self.ended = None
        self.last = (seq, message)
        if message.role == "assistant":
            self.answer = seq
            self.open_calls += [(seq, each.call_id) for each in message.tool_calls]
        elif message.role == "tool":
            # A provider may reuse a call id in a later answer: a result settles one call.
            for index, (_, call_id) in enumerate(self.open_calls):
                if call_id == message.tool_call_id:
                    del self.open_calls[index]
                    break

    def derive(self) -> TurnDerivation:
        """Derive the turn's state from the events so far."""
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
        )


def _one(place: tuple[int, object] | None) -> tuple[int, ...] | None:
    return None if place is None else (place[0],)


def _clean_answer(fold: TurnFold) -> tuple[int, ...] | None:
    if fold.last is None:
        return None
    seq, message = fold.last
    return (seq,) if message.role == "assistant" and not message.tool_calls else None


def _text(fold: TurnFold) -> tuple[int, ...] | None:
    # A rejected answer is in the conversation; one that was cut off is not.
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
    """One piece of evidence, and how it is found in the fold."""

    name: str
    meaning: str
    find: Callable[[TurnFold], tuple[int, ...] | None] = field(repr=False)
    """Return the sequence numbers of the events that show it, or None if it is missing."""


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
"""The evidence that endings need, by name."""


@dataclass(frozen=True, slots=True)
class TurnDerivation:
    """A turn's state, and the events that show it."""

    turn_id: str
    state: TurnState
    evidence: Mapping[str, tuple[int, ...]]
    """The sequence numbers of the events that show each piece of evidence."""
    missing: tuple[str, ...] = ()
    """The evidence that the claimed state needs and the log does not have."""
    claimed: TurnState | None = None
    """The state that the turn's `TurnEnded` claims, if one counts."""
    started: TurnStarted | None = None
    ended: TurnEnded | None = None
    open_calls: tuple[tuple[int, str], ...] = ()
    """Tool calls without a result: the events that asked for them, and their ids."""

    @property
    def is_as_claimed(self) -> bool:
        """Whether the log shows what its `TurnEnded` claims."""
        return not self.missing and self.claimed in (None, self.state)


# --- the rules, applied ------------------------------------------------------------------------------


def check_ending(derived: TurnDerivation, ended: TurnEnded) -> None:
    """Raise `IllegalEndingError` unless the table allows this ending in the turn's present state.

    It checks the move and the cause; the evidence is checked by deriving the state again.
    """
    state, kind = ended.state, ended.error_kind
    if state is TurnState.UNFINISHED:
        raise IllegalEndingError(
            f"turn {ended.turn_id} cannot end as unfinished, which means that it has no ending; "
            "choose another state of treenail.turns.ENDINGS"
        )
    if state not in ENDINGS[derived.state].then:
        raise IllegalEndingError(
            f"turn {ended.turn_id} is {derived.state.value} and cannot become {state.value}; resume it first"
        )
    kinds = ENDINGS[state].kinds
    if (kind not in kinds) if kinds else (kind is not None):
        allowed = ", ".join(kinds) or "none"
        raise IllegalEndingError(
            f"turn {ended.turn_id} cannot end as {state.value} because of {kind!r}; "
            f"the causes of that ending are: {allowed}"
        )


# --- next actions as commands -----------------------------------------------------------------------


_STORE_COMMANDS = re.compile("treenail (resume|show|diagnose|replay|diff|export|hold|list|salvage|workflow)")


def pasteable(actions: Iterable[str], store: object) -> tuple[str, ...]:
    """Add `--store` to the commands among these actions, so that they can be pasted in any directory.

    `store` is a store's path or URL, or a log; for a log in memory the actions stay as they are. The log does
    not keep the flag: a store may be moved. A URL is named without its password.
    """
    place = store_named(store) if isinstance(store, str | Path | PostgresUrl) else place_of(store)
    if place is None:
        return tuple(actions)
    named = f" --store {shlex.quote(str(place.absolute() if isinstance(place, Path) else place))}"
    return tuple(
        each + named if _STORE_COMMANDS.match(each) and " --store " not in each else each for each in actions
    )
