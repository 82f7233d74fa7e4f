"""The single root of everything that can change during an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType

from holdfast.clock import Clock, SystemClock, new_id
from holdfast.errors import HoldfastError, RestoreFailedError, SnapshotMismatchError, UsageError
from holdfast.log.event import SlicePolicy
from holdfast.state.checkpoints import CheckpointStore
from holdfast.state.events import AttentionNeeded
from holdfast.state.resources import ResourceContext, ResourceRegistry, Snapshotable
from holdfast.state.session import Session
from holdfast.state.snapshot import CompositeSnapshot, SnapshotMetadata


@dataclass(slots=True)
class ExecutionState:
    """A session, its resources, its time and its chance: all that an evaluation may change or ask."""

    session: Session
    resources: ResourceRegistry | ResourceContext = field(default_factory=lambda: ResourceRegistry.build({}))
    clock: Clock = field(default_factory=SystemClock)
    rng: Random | None = None
    checkpoints: CheckpointStore | None = None

    def snapshot(
        self,
        *,
        tag: str | None = None,
        metadata: SnapshotMetadata | None = None,
        known: Mapping[type, object] | None = None,
    ) -> CompositeSnapshot:
        """Capture the session's working state and every resource that can be captured.

        `known` holds snapshots of resources that the caller has taken already. If a resource cannot
        be captured, its error is raised and nothing has changed.
        """
        taken = dict(known or {})
        for resource_type, resource in self.resources.snapshotable_resources().items():
            if resource_type not in taken:
                taken[resource_type] = resource.snapshot(tag=tag)
        return CompositeSnapshot(
            snapshot_id=new_id(),
            created_at=self.clock.now(),
            session=self.session.snapshot(),
            resources=MappingProxyType(taken),
            metadata=metadata or SnapshotMetadata(tag=tag),
        )

    def restore(self, snapshot: CompositeSnapshot, *, preserve_logs: bool = True) -> None:
        """Go back to a snapshot, all participants together or none.

        Resources whose policy is LOG (what was spent stays spent) are left as they are unless
        `preserve_logs` is false. Raises `SnapshotMismatchError` before anything has changed if the
        snapshot has a resource that is not here; `RestoreFailedError` if a participant could not
        go back, after the others were returned to where they were.
        """
        here = self.resources.snapshotable_resources()
        missing = [each.__qualname__ for each in snapshot.resources if each not in here]
        if missing:
            raise SnapshotMismatchError(
                f"the snapshot has resources that are not bound here: {', '.join(missing)}; "
                "bind them and try again; nothing was changed"
            )
        chosen = {
            each: here[each]
            for each in snapshot.resources
            if not (preserve_logs and self.resources.policy_of(each) is SlicePolicy.LOG)
        }
        # All snapshots before the first change: whoever cannot be captured fails while nothing happened.
        before = {each: resource.snapshot(tag="before restore") for each, resource in chosen.items()}
        done: list[type] = []
        participant = "the session"
        try:
            for each, resource in chosen.items():
                participant = each.__qualname__
                resource.restore(snapshot.resources[each])
                done.append(each)
            participant = "the session"
            # The session comes last: its restore is one append, which happens or does not.
            self.session.rollback(snapshot.session, preserve_logs=preserve_logs, reason="restore")
        except Exception as error:
            raise self._undo(participant, error, chosen, before, done) from error

    def _undo(
        self,
        participant: str,
        error: Exception,
        chosen: Mapping[type, Snapshotable[object]],
        before: Mapping[type, object],
        done: list[type],
    ) -> HoldfastError:
        """Return the participants that went back already to where they were, last one first."""
        stuck = []
        for each in reversed(done):
            try:
                chosen[each].restore(before[each])
            except Exception as again:  # noqa: BLE001  # each participant is tried, whatever the others do
                stuck.append(f"{each.__qualname__}: {again}")
        if isinstance(error, SnapshotMismatchError) and not stuck:
            return error
        failed = [f"{participant}: {error}", *stuck]
        if not stuck:
            return RestoreFailedError(
                f"{participant} could not be restored ({error}); everything else was put back as it was",
                failed=failed,
            )
        message = (
            f"{participant} could not be restored ({error}), and these could not be put back either: "
            f"{'; '.join(stuck)}. The session needs attention."
        )
        self.session.dispatch(
            AttentionNeeded(
                reason="a restore was left half done",
                details=tuple(failed),
                next_actions=("inspect the named resources", "restore them by hand or from a checkpoint"),
            )
        )
        return RestoreFailedError(message, failed=failed, undone=False)


def rollback_to_tool(state: ExecutionState, checkpoints: CheckpointStore, tool_call_id: str) -> None:
    """Go back to where things were before a tool call."""
    snapshot = checkpoints.get_pre_snapshot(tool_call_id)
    if snapshot is None:
        known = ", ".join(each.tool_call_id for each in checkpoints.list_checkpoints()) or "none"
        raise UsageError(f"No checkpoint for tool call: {tool_call_id} (there are: {known})")
    state.restore(snapshot)
