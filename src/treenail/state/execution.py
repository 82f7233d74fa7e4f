"""The single root of everything that can change during an evaluation."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType

from treenail.clock import Clock, SystemClock, new_id, whole_clock
from treenail.errors import RestoreFailedError, SnapshotMismatchError, TreenailError, UsageError
from treenail.log import SlicePolicy
from treenail.state.checkpoints import CheckpointStore
from treenail.state.events import AttentionNeeded
from treenail.state.resources import ResourceContext, ResourceRegistry, Snapshotable
from treenail.state.session import Session
from treenail.state.snapshot import CompositeSnapshot, SnapshotMetadata, equivalence_of, random_state

_logger = logging.getLogger("treenail.state")


@dataclass(slots=True)
class ExecutionState:
    """A session, its resources, clock and random numbers: all that an evaluation may change or ask."""

    session: Session
    resources: ResourceRegistry | ResourceContext = field(default_factory=lambda: ResourceRegistry.build({}))
    clock: Clock = field(default_factory=SystemClock)
    rng: Random | None = None
    checkpoints: CheckpointStore | None = None

    def __post_init__(self) -> None:
        self.clock = whole_clock(self.clock)
        if self.checkpoints is not None and self.checkpoints.clock is None:
            self.checkpoints.clock = self.clock

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
        present = self.resources.snapshotable_resources()
        for resource_type, resource in present.items():
            if resource_type not in taken:
                taken[resource_type] = resource.snapshot(tag=tag)
        return CompositeSnapshot(
            snapshot_id=new_id(),
            created_at=self.clock.now(),
            session=self.session.snapshot(),
            resources=MappingProxyType(taken),
            metadata=metadata or SnapshotMetadata(tag=tag),
            rng=random_state(self.rng),
            origins=present,
        )

    def restore(self, snapshot: CompositeSnapshot, *, preserve_logs: bool = True) -> None:
        """Go back to a snapshot, all participants together or none.

        Resources whose policy is LOG (what was spent stays spent) are left as they are unless
        `preserve_logs` is false. Raises `SnapshotMismatchError` before anything has changed if the
        snapshot has a resource or a slice that is not here; `RestoreFailedError` if a participant
        could not go back, after the others were returned to where they were. If one of them could
        not even be returned, the error says so (`undone` is false) and the session is marked with
        `AttentionNeeded`.
        """
        self.session.check_fits(snapshot.session)
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
        # All snapshots before the first change: what cannot be captured fails while nothing has changed.
        before = {each: resource.snapshot(tag="before restore") for each, resource in chosen.items()}
        begun: list[type] = []
        try:
            for each, resource in chosen.items():
                begun.append(each)
                resource.restore(snapshot.resources[each])
            # The session comes last: its restore is one append, which happens or does not.
            begun.append(Session)
            self.session.rollback(snapshot.session, preserve_logs=preserve_logs, reason="restore")
            if self.rng is not None and snapshot.rng is not None:
                self.rng.setstate(snapshot.rng)
        except BaseException as error:
            stuck = _put_back(chosen, before, begun)
            failed = f"{begun[-1].__qualname__}: {error}"
            if stuck:
                self._call_for_attention((failed, *stuck))
            if not isinstance(error, Exception) or (isinstance(error, SnapshotMismatchError) and not stuck):
                raise
            raise _restore_failed(begun[-1], error, failed, stuck) from error

    def _call_for_attention(self, details: tuple[str, ...]) -> None:
        try:
            self.session.dispatch(
                AttentionNeeded(
                    reason="a restore was left half done",
                    details=details,
                    next_actions=("inspect the named resources", "restore them by hand or from a checkpoint"),
                )
            )
        except TreenailError as error:  # the restore's own error follows, and says the same
            _logger.error("the session could not be marked as needing attention: %s", error)


def _put_back(
    chosen: Mapping[type, Snapshotable[object]], before: Mapping[type, object], begun: Sequence[type]
) -> tuple[str, ...]:
    """Return the participants that were touched to where they were, last one first. Says who is stuck."""
    stuck = []
    for each in reversed(begun):
        if each not in chosen:
            continue  # The session: its restore happens whole or not at all.
        try:
            chosen[each].restore(before[each])
        except Exception as error:  # noqa: BLE001  # each participant is tried, whatever the others do
            if not _is_as_before(chosen[each], before[each]):
                stuck.append(f"{each.__qualname__}: {error}")
    return tuple(stuck)


def _is_as_before(resource: Snapshotable[object], before: object) -> bool:
    """Say whether a participant that refuses to be restored was not changed in the first place."""
    try:
        return equivalence_of(resource.snapshot(tag="after a failed restore")) == equivalence_of(before)
    except Exception:  # noqa: BLE001  # what cannot even be captured is not known to be as before
        return False


def _restore_failed(
    participant: type, error: Exception, failed: str, stuck: tuple[str, ...]
) -> RestoreFailedError:
    name = "the session" if participant is Session else participant.__qualname__
    if not stuck:
        return RestoreFailedError(
            f"{name} could not be restored ({error}); everything was put back as it was before the restore",
            failed=(failed,),
        )
    return RestoreFailedError(
        f"{name} could not be restored ({error}), and these could not be put back either: "
        f"{'; '.join(stuck)}. The session needs attention.",
        failed=(failed, *stuck),
        undone=False,
    )


def rollback_to_tool(state: ExecutionState, checkpoints: CheckpointStore, tool_call_id: str) -> None:
    """Go back to where things were before a tool call."""
    snapshot = checkpoints.get_pre_snapshot(tool_call_id)
    if snapshot is None:
        known = ", ".join(each.tool_call_id for each in checkpoints.list_checkpoints()) or "none"
        raise UsageError(f"No checkpoint for tool call: {tool_call_id} (there are: {known})")
    state.restore(snapshot)
