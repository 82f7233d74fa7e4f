"""Asking the feedback providers of a prompt after tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from treenail.containment import CancellationToken
from treenail.errors import NestedEvaluationError, UsageError
from treenail.judges.calls import ask, on_worker
from treenail.judges.events import Feedback, FileTriggerFired, JudgeEvent, JudgeOutcome
from treenail.judges.feedback import FeedbackContext, FeedbackProviderConfig, newest_first, placed
from treenail.judges.judged_run import JudgedRun
from treenail.tools import ToolInvoked

EventsOfText = Callable[[str], Sequence[object]]
"""Makes the events by which the model is told a text; they are appended together with the judgement."""


@dataclass(frozen=True, slots=True)
class _Provider:
    """A feedback provider under the name that its calls are counted by."""

    name: str
    config: FeedbackProviderConfig
    woken_by: str | None = None


class FeedbackRound:
    """The feedback providers of one prompt. Everything that it counts is read from the session's log."""

    def __init__(self, run: JudgedRun, configs: Sequence[FeedbackProviderConfig]) -> None:
        self._run = run
        self.providers = _named(configs)

    async def ask(self, record: EventsOfText | None) -> str | None:
        """Ask the providers that are due. Returns what the model is to be told, or None."""
        due = self._due()
        if not due:
            return None
        run = self._run
        run.cancellation.raise_if_cancelled()
        nothing_left = run.nothing_left()
        given: list[Feedback] = []
        for each in due:
            if nothing_left is not None:
                self._record_silence(each, "skipped", *nothing_left)
                continue
            feedback = await self._ask_one(each)
            if feedback is not None:
                given.append(feedback)
        if not given:
            return None
        text = "\n\n".join(each.render() for each in given)
        run.session.dispatch_all((*given, *(() if record is None else record(text))))
        return text

    async def _ask_one(self, judge: _Provider) -> Feedback | None:
        run, provider = self._run, judge.config.provider

        async def work(token: CancellationToken) -> tuple[bool, Feedback | None]:
            context = FeedbackContext(**run.context_fields(token))
            if not await on_worker(lambda: provider.should_run(context=context)):
                return False, None
            answer = await ask(provider, "provide", context=context)
            if answer is not None and not isinstance(answer, Feedback):
                raise UsageError(f"{judge.name}.provide returned {answer!r:.200}; return a Feedback or None")
            return True, answer

        time_limit = getattr(provider, "time_limit", None)
        asked = await run.call(judge.name, "feedback", time_limit, work, _label)
        if asked.answer is None:
            assert asked.error is not None
            outcome, reason, detail = run.sort(asked.error)
            self._record_silence(judge, outcome, reason, detail, asked.elapsed_ms)
            if run.config.on_feedback_failure == "closed":
                raise NestedEvaluationError(
                    f"the run must not continue without the feedback of {judge.name}, which failed: {detail}",
                    prompt_name=run.prompt.name,
                    kind=reason,
                ) from asked.error
            return None
        has_run, feedback = asked.answer
        if not has_run:
            return None
        if feedback is None:
            self._record_silence(judge, "silent", "nothing_to_say", "", asked.elapsed_ms)
            return None
        self._record_waking(judge)
        return replace(
            feedback.shortened(),
            provider_name=judge.name,
            prompt_name=run.prompt.name,
            call_index=self.call_index(),
            timestamp=run.clock.now(),
        )

    def _record_silence(
        self,
        judge: _Provider,
        outcome: JudgeOutcome,
        reason: str,
        detail: str = "",
        elapsed_ms: float = 0.0,
    ) -> None:
        if outcome != "skipped":
            self._record_waking(judge)
        self._run.record_silence(
            judge.name,
            "feedback",
            outcome,
            reason,
            detail,
            failed_closed=self._run.config.on_feedback_failure == "closed" and outcome == "failed",
            call_index=self.call_index(),
            elapsed_ms=elapsed_ms,
        )

    def _record_waking(self, judge: _Provider) -> None:
        if judge.woken_by is not None:
            self._run.session.dispatch(FileTriggerFired(judge.name, self._run.prompt.name, judge.woken_by))

    # .. who is due ..

    def _due(self) -> list[_Provider]:
        """Return the providers whose triggers fire, all at the same moment."""
        now = self._run.clock.now()
        asked = self._last_asked()
        due: list[_Provider] = []
        for each in self.providers:
            place, last = asked.get(each.name, (0, None))
            trigger = each.config.trigger
            calls = 0 if trigger.every_n_calls is None else self._calls_since(place, trigger.every_n_calls)
            file = self._waking_file(each)
            if file is not None or trigger.is_due(calls=calls, last=last, now=now):
                due.append(replace(each, woken_by=file))
        return due

    def _last_asked(self) -> dict[str, tuple[int, datetime | None]]:
        """Return when each provider was last asked: the place in the log, and the time.

        A failed attempt counts: else a judge that is down would be asked after every call.
        """
        session, name = self._run.session, self._run.prompt.name
        attempts = [
            (place, each.judge, each.created_at)
            for each, place in placed(session, JudgeEvent)
            if each.kind == "feedback" and each.prompt_name == name
        ]
        attempts += [
            (place, each.provider_name, each.timestamp)
            for each, place in placed(session, Feedback)
            if each.prompt_name == name
        ]
        asked: dict[str, tuple[int, datetime | None]] = {}
        for place, judge, moment in attempts:
            if place >= asked.get(judge, (0, None))[0]:
                asked[judge] = (place, moment)
        return asked

    def _calls_since(self, place: int, most: int | None = None) -> int:
        """Count the prompt's tool calls after a place in the log; stop at `most`."""
        found = 0
        for each, at in newest_first(self._run.session, ToolInvoked):
            if at <= place or found == most:
                break
            found += each.prompt_name == self._run.prompt.name
        return found

    def call_index(self) -> int:
        """Return how many tool calls of the prompt there have been: since the last judgement, and before."""
        session, name = self._run.session, self._run.prompt.name
        newest = [
            next(((at, each.call_index) for each, at in events if each.prompt_name == name), (0, 0))
            for events in (newest_first(session, Feedback), newest_first(session, JudgeEvent))
        ]
        place, before = max(newest)
        return before + self._calls_since(place)

    def _waking_file(self, provider: _Provider) -> str | None:
        run, wanted = self._run, provider.config.trigger.on_file_created
        if wanted is None or run.filesystem is None:
            return None
        mark = FileTriggerFired(provider.name, run.prompt.name, wanted)
        try:
            is_new = mark not in run.session[FileTriggerFired].all() and run.filesystem.exists(wanted)
        except (OSError, ValueError):
            return None
        return wanted if is_new else None


def _label(answer: tuple[bool, Feedback | None]) -> str:
    has_run, feedback = answer
    if feedback is not None:
        return feedback.severity
    return "silent" if has_run else "not_due"


def _named(configs: Sequence[FeedbackProviderConfig]) -> tuple[_Provider, ...]:
    """Give every provider a unique name: two with the same name would share their counters."""
    taken: dict[str, int] = {}
    named = []
    for each in configs:
        name = str(each.provider.name)
        taken[name] = taken.get(name, 0) + 1
        named.append(_Provider(name if taken[name] == 1 else f"{name}#{taken[name]}", each))
    return tuple(named)
