"""What a turn writes down: its messages in their order, and what each model call used.

A record belongs to one turn of one session. Every message is durable when the method that
records it returns. It also folds the conversation as it grows, so that the next input for the
model costs what was added since the last one. Whatever runs a turn, our loop or a vendor's,
writes through here, so that their logs differ in nothing but the provider's fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from treenail.clock import new_id
from treenail.conversation import (
    ORPHAN_TEXT,
    REPLAYED_KINDS,
    SHOWN_HASH,
    WITHDRAWN_TEXT,
    ContentPart,
    ContextPressure,
    ImagePart,
    InnerMessage,
    ProviderUsage,
    Replay,
    Replayer,
    Role,
    ToolCallRecord,
    enable_inner_message_recording,
    get_inner_messages,
    get_latest_evaluation_id,
    read_events,
)
from treenail.errors import ConversationNotFound, PromptMismatch
from treenail.providers import CollectedAnswer
from treenail.state import Session, TokenUsage, entries_of
from treenail.tools import HoldAnswered, ToolCall, ToolResult, pending_holds
from treenail.turns.derivation import TURN_KINDS, TurnFollower, follower_of
from treenail.turns.follow_ups import FollowUp
from treenail.turns.loops import LoopAttached
from treenail.turns.states import TurnStarted

_READ = REPLAYED_KINDS | TURN_KINDS
"""The kinds of events that a turn has to look at."""

_WITHDRAWN = "withdrawn: another request came before it was answered"


@dataclass(slots=True)
class TurnRecord:
    """The log of one turn, while it is being written."""

    session: Session
    provider: str
    model: str
    prompt_ns: str
    prompt_key: str
    turn_id: str = ""
    evaluation_id: str = ""
    messages: list[InnerMessage] = field(default_factory=list)
    """The evaluation's messages, in order."""
    replayer: Replayer = field(init=False, repr=False)
    """The conversation of the whole session, as it is sent."""
    answers_so_far: int = 0
    usage: TokenUsage = field(default_factory=TokenUsage)
    """What the evaluation has used, as far as providers said."""
    cost_usd: float | None = None
    """What it has cost; None while that is unknown."""
    _sequence: int = 0
    _turn: int = 0
    _breaks_seen: int = 0
    _follower: TurnFollower = field(init=False, repr=False)
    """Who says how the turn stands."""

    # .. the two ways to begin ..

    def new_turn(self) -> None:
        """Name a turn that is about to begin."""
        self.turn_id, self.evaluation_id = new_id().hex, new_id().hex

    def begin(
        self,
        agent: str,
        system: str,
        task: str,
        workspace: str | None = None,
        beside: Sequence[object] = (),
        images: Sequence[ImagePart] = (),
    ) -> None:
        """Take up a request: what an earlier turn left open is closed for good, and this one is started.

        The start, the events beside it and the first messages are one append.
        """
        enable_inner_message_recording(self.session)
        self._read_history()
        self._close_orphans()
        started, head = self._started(agent, task, workspace), self.session.head
        self._open(started, system, task, beside, images)
        self._follower.aim(self.session, started, after=head)

    def resume(self, agent: str, system: str, workspace: str | None = None) -> TurnStarted:
        """Resume the session's newest turn. Raises `ConversationNotFound` or `PromptMismatch`."""
        enable_inner_message_recording(self.session)
        started = self.session[TurnStarted].latest()
        evaluation_id = get_latest_evaluation_id(self.session) if started is None else started.evaluation_id
        if evaluation_id is None and self.session[LoopAttached].latest() is not None:
            raise ConversationNotFound(
                "this session has the tool calls of another program's loop, and no conversation to resume; "
                "resume it with that program"
            )
        if evaluation_id is None:
            raise ConversationNotFound("this session has no conversation to resume; run a task first")
        self.messages = list(get_inner_messages(self.session, evaluation_id))
        self._check_prompt(agent, started)
        self.evaluation_id = evaluation_id
        self._read_history(started)
        self._sequence = max((each.sequence for each in self.messages), default=-1) + 1
        self._turn = max((each.turn for each in self.messages), default=0)
        if started is not None:
            self.turn_id = started.turn_id
            if not self.messages:
                # A process of an older version died between the start and its first message.
                self._open(None, system, started.task, ())
            return started
        # The conversation came out of a snapshot, without the turn that it belonged to.
        self.turn_id = new_id().hex
        task = next((each.content for each in self.messages if each.role == "user"), "")
        started = self._started(agent, task, workspace)
        self.session.dispatch(started)
        self._follower.aim(self.session, started)
        return started

    def _started(self, agent: str, task: str, workspace: str | None) -> TurnStarted:
        return TurnStarted(
            self.turn_id, self.evaluation_id, agent, task, self.provider, self.model, workspace
        )

    def _open(
        self,
        started: TurnStarted | None,
        system: str,
        task: str,
        beside: Sequence[object],
        images: Sequence[ImagePart] = (),
    ) -> None:
        first = [self.message("system", system, self.reserve())]
        if task or images:
            first.append(self.message("user", task, self.reserve(), parts=tuple(images)))
        self.session.dispatch_all((*(() if started is None else (started,)), *beside, *first))
        self.messages.extend(first)

    def _check_prompt(self, agent: str, started: TurnStarted | None) -> None:
        system = next((each for each in self.messages if each.role == "system"), None)
        here = (self.prompt_ns, self.prompt_key)
        if system is not None and (system.prompt_ns, system.prompt_key) != here:
            raise PromptMismatch(
                f"this session belongs to the prompt {system.prompt_ns}:{system.prompt_key}, not to "
                f"{self.prompt_ns}:{self.prompt_key}; resume it with that one, or begin a new session"
            )
        if system is None and started is not None and started.agent != agent:
            raise PromptMismatch(
                f"this session belongs to the agent {started.agent!r}, not to {agent!r}; "
                "resume it with that one"
            )

    def _read_history(self, started: TurnStarted | None = None) -> None:
        """Fold what is logged so far, the current turn included; later events are folded as they come.

        The log is read once, and what the session's slices have decoded is not decoded again.
        """
        self.replayer = Replayer(self.model, self.provider)
        follower = self._follower = follower_of(self.session)
        if not self.session.head:
            return  # A session that has just been made.
        messages = self.session[InnerMessage].view()
        # An item that is its own event has a place; one that could change in place is made anew anyway.
        known = {at: kept for kept, at in entries_of(messages) if at > 0 and isinstance(kept, InnerMessage)}
        evaluation_id = ""
        with follower.lock:
            if started is not None:
                follower.aim(self.session, started)
            for seq, logged, value in read_events(self.session, _READ, upto=self.session.head, known=known):
                self.replayer.add(seq, value, logged.type)
                follower.add(seq, logged, value)
                if isinstance(value, InnerMessage):
                    evaluation_id = value.evaluation_id
                elif isinstance(value, ProviderUsage) and evaluation_id == self.evaluation_id:
                    self._count(value.usage, value.cost_usd)
        self.answers_so_far = sum(each.role == "assistant" for each in messages)
        self._breaks_seen = len(self.replayer.input().breaks)

    def catch_up(self) -> None:
        """Fold the events since the last time: the conversation, and the state of the turn."""
        follower, replayer = self._follower, self.replayer
        with follower.lock:
            taken = replayer.seq
            for seq, logged, value in read_events(self.session, _READ, after=min(taken, follower.seq)):
                if seq > taken:
                    replayer.add(seq, value, logged.type)
                follower.add(seq, logged, value)

    def _close_orphans(self) -> None:
        """Answer for good the calls that an earlier turn left open: this turn does not continue them.

        A call that waits for a person is not an orphan: its question is withdrawn in the same append, so that
        nobody answers it into the void.
        """
        waiting = self.replayer.waiting_calls
        if not waiting:
            return
        holds = {each.call_id: each for each in pending_holds(self.session)}
        asked = [
            each for each in self.session[InnerMessage].all() if each.role == "assistant" and each.tool_calls
        ]
        for call_id in waiting:
            owner = next(m for m in reversed(asked) if any(c.call_id == call_id for c in m.tool_calls))
            said = get_inner_messages(self.session, owner.evaluation_id)
            held = holds.pop(call_id, None)
            closed = InnerMessage(
                role="tool",
                content=ORPHAN_TEXT if held is None else WITHDRAWN_TEXT,
                evaluation_id=owner.evaluation_id,
                sequence=1 + max(each.sequence for each in said),
                tool_call_id=call_id,
                tool_name=next(c.name for c in owner.tool_calls if c.call_id == call_id),
                turn=owner.turn,
                prompt_ns=owner.prompt_ns,
                prompt_key=owner.prompt_key,
                created_at=self.session.clock.now(),
                is_error=True,
            )
            withdrawn = () if held is None else (HoldAnswered(call_id, False, _WITHDRAWN, "", held.hold_id),)
            self.session.dispatch_all((*withdrawn, closed))

    # .. messages ..

    @property
    def last(self) -> InnerMessage | None:
        """The newest message of the evaluation."""
        return self.messages[-1] if self.messages else None

    def reserve(self) -> int:
        """Take the next place in the conversation, for a message that is recorded later."""
        self._sequence += 1
        return self._sequence - 1

    def message(
        self,
        role: Role,
        content: str,
        sequence: int,
        *,
        tool_calls: tuple[ToolCallRecord, ...] = (),
        tool_call_id: str | None = None,
        tool_name: str | None = None,
        parts: tuple[ContentPart, ...] = (),
        is_error: bool = False,
        is_follow_up: bool = False,
    ) -> InnerMessage:
        """Make a message for a place that was reserved."""
        return InnerMessage(
            role=role,
            content=content,
            evaluation_id=self.evaluation_id,
            sequence=sequence,
            tool_calls=tool_calls,
            tool_call_id=tool_call_id,
            tool_name=tool_name,
            turn=self._turn,
            prompt_ns=self.prompt_ns,
            prompt_key=self.prompt_key,
            created_at=self.session.clock.now(),
            parts=parts,
            is_error=is_error,
            is_follow_up=is_follow_up,
        )

    def result(self, call: ToolCall, result: ToolResult[Any], text: str, sequence: int) -> InnerMessage:
        """Make the message that tells the model how its call ended."""
        return self.message(
            "tool",
            text,
            sequence,
            tool_call_id=call.id,
            tool_name=call.name,
            parts=() if result.value is None else tuple(ImagePart(*each) for each in result.pictures()),
            is_error=not result.success,
        )

    def add(self, role: Role, content: str) -> InnerMessage:
        """Record a message at the end."""
        message = self.message(role, content, self.reserve())
        self.session.dispatch(message)
        self.messages.append(message)
        return message

    def add_follow_ups(self, said: Sequence[FollowUp]) -> None:
        """Record what a person has said meanwhile, in one append."""
        made = [
            self.message("user", each.text, self.reserve(), parts=each.images, is_follow_up=True)
            for each in said
        ]
        self.session.dispatch_all(made)
        self.messages.extend(made)

    def add_answer(self, answer: CollectedAnswer, usage: ProviderUsage) -> InnerMessage:
        """Record a model's answer together with what it used."""
        self._turn += 1
        self.answers_so_far += 1
        calls = tuple([ToolCallRecord(each.id, each.name, each.arguments_json) for each in answer.calls])
        message = self.message("assistant", answer.text, self.reserve(), tool_calls=calls, parts=answer.parts)
        self.session.dispatch_all((usage, message))
        self.messages.append(message)
        return message

    # .. usage ..

    def usage_of(
        self,
        answer: CollectedAnswer,
        replayed: Replay,
        *,
        model: str | None = None,
        is_cut_off: bool = False,
        notes: tuple[str, ...] = (),
        pressure: ContextPressure | None = None,
    ) -> ProviderUsage:
        """Say what a call used, and whether its input extended the one before: a broken cache shows.

        It counts from now on; the caller records it.
        """
        breaks = len(replayed.breaks)
        extends, self._breaks_seen = breaks == self._breaks_seen, breaks
        self._count(answer.usage, answer.cost_usd)
        return ProviderUsage(
            provider=self.provider,
            model=model or answer.model or self.model,
            call_index=self.answers_so_far + 1,
            usage=answer.usage,
            cost_usd=answer.cost_usd,
            stop_reason="cut_off" if is_cut_off else answer.stop,
            input_items=len(replayed.items),
            prefix_hash=replayed.prefix_hash()[:SHOWN_HASH],
            extends_previous=extends,
            output_truncated=answer.stop == "length",
            notes=(*notes, *answer.notes),
            context_tier="" if pressure is None else pressure.tier,
            context_ratio=None if pressure is None else round(pressure.ratio, 4),
        )

    def usage_of_summary(self, answer: CollectedAnswer) -> ProviderUsage:
        """Say what it took to have a summary written. It counts from now on; the caller records it."""
        self._count(answer.usage, answer.cost_usd)
        return ProviderUsage(
            provider=self.provider,
            model=answer.model or self.model,
            call_index=self.answers_so_far + 1,
            usage=answer.usage,
            cost_usd=answer.cost_usd,
            stop_reason=answer.stop,
            input_items=1,
            output_truncated=answer.stop == "length",
            notes=answer.notes,
            purpose="summary",
        )

    def _count(self, usage: TokenUsage, cost_usd: float | None) -> None:
        self.usage += usage
        if cost_usd is not None:
            self.cost_usd = (self.cost_usd or 0.0) + cost_usd
