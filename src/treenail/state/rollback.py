"""Going back to a snapshot: which slices change, written as one event that folding needs nothing else for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treenail.codec import Codec
from treenail.log import SlicePolicy
from treenail.state.core import Core
from treenail.state.events import RestoredSlice, StateRestored, spec_of
from treenail.state.slices import EMPTY, Entry, Slice, entries_of, opened
from treenail.state.snapshot import Snapshot
from treenail.state.stored import described


def restoring_event(
    core: Core,
    present: Mapping[type, Slice[Any]],
    snapshot: Snapshot,
    *,
    preserve_logs: bool,
    reason: str,
    refers: bool,
) -> StateRestored | None:
    """Return the event that takes the present slices to a snapshot; None if they are there already.

    If it `refers`, items that are in the session's own log are named by their events, not copied.
    """
    restored = []
    for slice_type in dict.fromkeys((*core.fold.known, *present)):
        now = present.get(slice_type, EMPTY)
        target = _target(core, snapshot, slice_type, now, preserve_logs)
        if target is not None:
            keep = _shared(now, target) if refers else 0
            items = described(target, core.pruned_upto if refers else None, keep=keep)
            restored.append(RestoredSlice(core.codec.registry.name_of(slice_type), keep, items))
    return StateRestored(tuple(restored), reason) if restored else None


def _target(
    core: Core, snapshot: Snapshot, slice_type: type, present: Slice[Any], preserve_logs: bool
) -> Slice[Any] | None:
    """Say what a slice must become, or None if it stays."""
    policy = core.fold.policy_of(slice_type)
    kept = snapshot.slices.captured(slice_type) if slice_type in snapshot.slices else None
    if policy is SlicePolicy.LOG and preserve_logs:
        # A log that has the snapshot's events has its history too, unless it was pruned on purpose.
        if snapshot.session_id == core.session_id and core.head >= snapshot.seq:
            return None
        is_longer = kept is not None and len(kept) > len(present)
        return kept if is_longer and _begins_with(core.codec, kept or EMPTY, present) else None
    if kept is None:
        was_captured = policy in snapshot.captured or spec_of(slice_type).captured
        return EMPTY if was_captured and len(present) else None
    if len(kept) == len(present) and _begins_with(core.codec, kept, present):
        return None
    return kept


def _begins_with(codec: Codec, longer: Slice[Any], shorter: Slice[Any]) -> bool:
    return all(
        _is_same(codec, one, other)
        for one, other in zip(entries_of(longer), entries_of(shorter), strict=False)
    )


def _is_same(codec: Codec, one: Entry, other: Entry) -> bool:
    """Say whether two entries hold the same item, to the byte: 1 is not True."""
    if one[0] is other[0]:
        return True
    mine, theirs = opened(one[0]), opened(other[0])
    return type(mine) is type(theirs) and codec.encode(mine) == codec.encode(theirs)


def _shared(present: Slice[Any], target: Slice[Any]) -> int:
    """Count the items at the beginning of two slices that are the very same."""
    count = 0
    for (mine, _), (theirs, _) in zip(entries_of(present), entries_of(target), strict=False):
        if mine is not theirs:
            break
        count += 1
    return count
