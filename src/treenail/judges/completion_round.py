"""Asking the completion checker of a prompt before a run may stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from treenail.containment import CancellationToken
from treenail.judges.completion import (
    TaskCompletionChecker,
    TaskCompletionContext,
    TaskCompletionResult,
    check_with,
    name_of_checker,
)
from treenail.judges.events import CompletionChecked, JudgeOutcome, block, shortened
from treenail.judges.feedback import placed
from treenail.judges.feedback_round import EventsOfText
from treenail.judges.judged_run import JudgedRun

_MAX_REFUSAL_CHARS = 20_000


class CompletionRound:
    """The completion checker of one prompt. Refusals are counted from the session's log.

    Only refusals after the place `refusals_after` count, so that a turn that ended incomplete and is
    resumed gets another round.
    """

    def __init__(
        self,
        run: JudgedRun,
        checker: TaskCompletionChecker,
        refusals_after: int,
        call_index: Callable[[], int],
    ) -> None:
        self.exhausted = False
        """Whether the last refusal was the last that the configuration allows."""
        self.last_reason = ""
        """Why the run was last not allowed to stop."""
        self._run = run
        self._checker = checker
        self._name = name_of_checker(checker)
        self._refusals_after = refusals_after
        self._call_index = call_index

    async def ask(
        self, text: str, output: object | None, stop_reason: str, record: EventsOfText | None
    ) -> str | None:
        """Ask whether the run may stop. Returns None if it may, else what the model is to be told."""
        run = self._run
        self.exhausted = False
        run.cancellation.raise_if_cancelled()
        nothing_left = run.nothing_left()
        if nothing_left is not None:
            reason, detail = nothing_left
            why = f"The work could not be verified: {detail}"
            return self._unverified("skipped", reason, detail, why, self._checked(stop_reason, 0.0), None)

        async def work(token: CancellationToken) -> TaskCompletionResult:
            context = TaskCompletionContext(
                **run.context_fields(token),
                tentative_output=text if output is None else output,
                stop_reason=stop_reason,
                text=text,
            )
            return await check_with(self._checker, context)

        asked = await run.call(
            self._name,
            "completion",
            getattr(self._checker, "time_limit", None),
            work,
            lambda answer: "complete" if answer.complete else "incomplete",
        )
        answer, checked = asked.answer, self._checked(stop_reason, asked.elapsed_ms)
        if answer is None:
            assert asked.error is not None
            outcome, reason, detail = run.sort(asked.error)
            why = (
                f"The work could not be verified ({reason}): {detail}\n"
                "Make sure that it is complete, and say again that it is done."
            )
            return self._unverified(outcome, reason, detail, why, checked, record)
        if answer.complete:
            self._pass(checked, answer.feedback or "")
            return None
        why = answer.feedback or f"{self._name} says that the work is not complete, without a reason."
        return self._refuse(checked, why, record)

    def _unverified(
        self,
        outcome: JudgeOutcome,
        reason: str,
        detail: str,
        why: str,
        checked: CompletionChecked,
        record: EventsOfText | None,
    ) -> str | None:
        """Record that the work was not verified; let the run stop, or refuse, as it is configured."""
        is_closed = self._run.config.on_completion_failure == "closed"
        self._run.record_silence(
            self._name,
            "completion",
            outcome,
            reason,
            detail,
            failed_closed=is_closed,
            call_index=self._call_index(),
            elapsed_ms=checked.elapsed_ms,
        )
        checked = replace(checked, verified=False)
        if is_closed:
            return self._refuse(checked, why, record)
        self._pass(checked, f"not verified: {detail}")
        return None

    def _pass(self, checked: CompletionChecked, feedback: str) -> None:
        passed = replace(checked, complete=True, feedback=shortened(feedback, _MAX_REFUSAL_CHARS))
        self._run.session.dispatch(passed)

    def _refuse(self, checked: CompletionChecked, why: str, record: EventsOfText | None) -> str:
        """Record a refusal, and return what the model is told of it."""
        self.last_reason = why = shortened(why, _MAX_REFUSAL_CHARS)
        most = self._run.config.max_completion_checks
        self.exhausted = checked.attempt >= most or (
            not checked.verified and self._run.nothing_left() is not None
        )
        text = block(
            "completion_check",
            f"The work is not complete, so you cannot stop yet:\n{why}",
            checker=self._name,
            attempt=f"{checked.attempt} of {most}",
        )
        beside = () if record is None or self.exhausted else record(text)
        self._run.session.dispatch_all((replace(checked, feedback=why), *beside))
        return text

    def _checked(self, stop_reason: str, elapsed_ms: float) -> CompletionChecked:
        """Return the event of this check, before its result is known: not complete."""
        run = self._run
        mine = (run.evaluation_id, run.prompt.name)
        refusals = sum(
            place > self._refusals_after
            and not each.complete
            and (each.evaluation_id, each.prompt_name) == mine
            for each, place in placed(run.session, CompletionChecked)
        )
        return CompletionChecked(
            checker=self._name,
            complete=False,
            attempt=refusals + 1,
            evaluation_id=run.evaluation_id,
            prompt_name=run.prompt.name,
            stop_reason=stop_reason,
            created_at=run.clock.now(),
            elapsed_ms=elapsed_ms,
        )
