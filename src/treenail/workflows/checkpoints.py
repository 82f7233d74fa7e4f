"""Deciding about a step: its agent's claim, held against its log, its value, its files and its write set.

The turn must be completed in the child's own log, and the answer must be that turn's. The files that it names
must exist (they are hashed), the value must fit its schema, and everything that it wrote, in this attempt and
earlier ones, must lie in its write set. An isolated step's changes are applied in one transaction; a
conflict is left to a person.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from treenail.errors import TreenailError
from treenail.state import ExecutionState, Session
from treenail.subagents import Subagent, Subagents, SubagentStatus
from treenail.tools import Permissions, boundaries, filesystem_of, pending_holds
from treenail.turns import TurnStarted, TurnState, turn_state
from treenail.workflows.copies import apply_copies, files_of, is_applied, outside
from treenail.workflows.events import WorkflowRecord
from treenail.workflows.outcomes import Artifact, Checkpoint, Readiness, StepAnswer
from treenail.workflows.prompts import cut
from treenail.workflows.schemas import payload_problem
from treenail.workflows.spec import StepSpec
from treenail.workspace import Filesystem, fingerprint


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Turns the steps of one workflow into checkpoints."""

    state: ExecutionState
    subagents: Subagents
    permissions: Permissions
    record: WorkflowRecord

    async def of_step(self, step: StepSpec, child: Subagent) -> Checkpoint:
        """Return what other steps may rely on, now that the step's subagent has ended."""
        with self.session_of(child) as session:
            turn = TurnState.UNFINISHED if session is None else turn_state(session)
            answer = None if session is None else newest_answer(session)
        made = checkpoint_maker(step, child)
        if turn is TurnState.HELD:
            return made("held", child.reason, next_actions=("answer the waiting call, and resume",))
        if child.status is SubagentStatus.TIMED_OUT:
            return made("failed", child.reason, timed_out=True, next_actions=child.next_actions)
        if child.status is SubagentStatus.DETACHED:
            return made(
                "needs_orchestrator", child.reason, reason="detached", next_actions=child.next_actions
            )
        if child.status is not SubagentStatus.COMPLETED:
            return made("failed", child.reason or child.status.value, next_actions=child.next_actions)
        if turn is not TurnState.COMPLETED or answer is None:
            return made("failed", "its agent did not say whether the step is ready", reason="no_answer")
        claim = made(
            answer.status,
            answer.summary,
            known_limitations=answer.known_limitations,
            evidence=answer.evidence,
            payload_json=answer.payload_json,
            next_actions=answer.next_actions,
        )
        return await self._verified(step, child, claim, answer) if claim.is_usable else claim

    async def _verified(
        self, step: StepSpec, child: Subagent, claim: Checkpoint, answer: StepAnswer
    ) -> Checkpoint:
        """Check a claim against the value, the files and the write set; then apply the changes."""
        if step.output is not None:
            problem = payload_problem(answer.payload_json, step.output)
            if problem is not None:
                return replace(
                    claim, status="failed", reason="output", payload_json="", known_limitations=(problem,)
                )
        filesystem = filesystem_of(self.state)
        is_isolated = step.has_copy and filesystem is not None
        copy: AbstractContextManager[Any] = (
            self.subagents.copy_of(child.id) if is_isolated else nullcontext(filesystem)
        )
        with copy as files:
            touched = files_of(files.changes()) if is_isolated else self._touched(step)
            artifacts, missing = _hashed(files, answer.artifacts)
        claim = replace(claim, artifacts=artifacts)
        if missing:
            return _not_ready(
                claim, "partial", "artifact_missing", f"named as results but missing: {', '.join(missing)}"
            )
        strays = outside(touched, step.writes)
        if strays:
            return _not_ready(
                claim,
                "needs_orchestrator",
                "outside_write_set",
                f"it wrote outside its write set: {', '.join(strays[:10])}",
                ("inspect its changes", "answer the step, or run it again"),
            )
        if is_isolated and step.auto_apply and claim.dependent_safe:
            return await self.apply((child.id,), claim)
        return claim

    def _touched(self, step: StepSpec) -> tuple[str, ...]:
        """Return the paths that a step has changed in the shared workspace, if its write set limits them.

        The changes of earlier attempts count: they are still there.
        """
        filesystem = filesystem_of(self.state)
        if step.mode != "shared" or "**" in step.write_set or filesystem is None:
            return ()
        found: dict[str, None] = {}
        for subagent_id in self.record.steps[step.id].tries:
            with self.session_of(self.subagents.get(subagent_id)) as session:
                for each in () if session is None else boundaries(session):
                    if each.success and each.before is not None:
                        changes = filesystem.diff(each.before, each.after).changes
                        found.update((change.path, None) for change in changes)
        # A directory is made or removed for the files in it.
        above = {str(parent) for each in found for parent in PurePosixPath(each).parents}
        return tuple(
            each for each in found if each not in above and fingerprint(filesystem, each).kind != "directory"
        )

    async def apply(self, subagent_ids: Sequence[str], claim: Checkpoint) -> Checkpoint:
        """Apply the changes of isolated steps in one transaction. A conflict makes the claim not ready."""
        wanted = [each for each in subagent_ids if not is_applied(self.state.session, each)]
        if not wanted:
            return claim
        result = await apply_copies(self.state, self.subagents, wanted, self.permissions)
        if result.success:
            return claim
        return _not_ready(
            claim,
            "needs_orchestrator",
            "conflict",
            result.message,
            ("resolve the conflict by hand and answer the step", "or run the step again"),
        )

    async def of_apply_step(self, step: StepSpec) -> Checkpoint:
        """Apply the changes of other steps. Changes that were applied before are skipped."""
        claim = Checkpoint(
            step.id,
            "checkpoint_ready",
            f"applied the changes of {', '.join(step.apply_from)}",
            verified_by="engine",
        )
        sources = [self.record.steps[each].subagent_id for each in step.apply_from]
        touched: list[str] = []
        for each in sources:
            if filesystem_of(self.state) is not None and not is_applied(self.state.session, each):
                with self.subagents.copy_of(each) as copy:
                    touched += files_of(copy.changes())
        strays = outside(touched, step.writes)
        if strays:
            claim = _not_ready(
                claim,
                "needs_orchestrator",
                "outside_write_set",
                f"these paths lie outside its write set: {', '.join(strays[:10])}",
                ("inspect the changes to be applied", "answer the step, or run a source again"),
            )
        elif touched:
            claim = await self.apply(sources, claim)
        return claim if claim.dependent_safe else replace(claim, summary="nothing was applied")

    # .. the sessions of subagents ..

    def session_of(self, child: Subagent) -> AbstractContextManager[Session | None]:
        """Open a subagent's session for reading; None if that is not possible."""
        try:
            return Session.open(self.state.session.log, child.session_id, read_only=True)
        except TreenailError:
            return nullcontext(None)

    def waits_for_person(self, child: Subagent) -> bool:
        """Say whether a tool call of a subagent waits for a person's answer."""
        with self.session_of(child) as session:
            return session is not None and bool(pending_holds(session))

    def was_answered(self, child: Subagent) -> bool:
        """Say whether a subagent's turn was held and every waiting call has been answered since."""
        with self.session_of(child) as session:
            return (
                session is not None and turn_state(session) is TurnState.HELD and not pending_holds(session)
            )


def checkpoint_maker(step: StepSpec, child: Subagent) -> Callable[..., Checkpoint]:
    """Return a function that makes checkpoints of a step that a subagent has done."""

    def make(status: Readiness, summary: str, **more: Any) -> Checkpoint:
        return Checkpoint(
            step.id,
            status,
            cut(summary),
            agent_id=child.id,
            child_session_id=str(child.session_id),
            **more,
        )

    return make


def _not_ready(
    claim: Checkpoint, status: Readiness, reason: str, limitation: str, next_actions: tuple[str, ...] = ()
) -> Checkpoint:
    return replace(
        claim,
        status=status,
        reason=reason,
        known_limitations=(*claim.known_limitations, limitation),
        next_actions=next_actions or claim.next_actions,
    )


def newest_answer(session: Session) -> StepAnswer | None:
    """Return the answer of a session's newest turn. The answer of an earlier turn does not count."""
    started = session[TurnStarted].latest()
    found: StepAnswer | None = None
    for envelope, value in session.events():
        if isinstance(value, StepAnswer) and started is not None and envelope.turn_id == started.turn_id:
            found = value
    return found


def _hashed(
    filesystem: Filesystem | None, paths: Sequence[str]
) -> tuple[tuple[Artifact, ...], tuple[str, ...]]:
    """Hash the files that a step names. Returns the artifacts, and the paths that are missing."""
    found: list[Artifact] = []
    missing: list[str] = []
    for path in dict.fromkeys(paths):
        try:
            if filesystem is None:
                raise FileNotFoundError(path)
            digest, size = hashlib.sha256(), 0
            with filesystem.open_read(path) as stream:
                while piece := stream.read(1 << 20):
                    digest.update(piece)
                    size += len(piece)
        except (OSError, ValueError, TreenailError):
            missing.append(path)
        else:
            found.append(Artifact(path, digest.hexdigest(), size))
    return tuple(found), tuple(missing)
