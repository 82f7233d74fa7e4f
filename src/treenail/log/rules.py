"""The decisions that every store makes alike, as plain functions.

A store asks these before it writes, inside the same transaction. They either
return or raise; none of them changes anything. Keeping them here means that
every store refuses the same things in the same words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple, NoReturn
from uuid import UUID

from treenail.errors import LeaseHeldError, SessionNotFoundError, StaleWriterError, UsageError
from treenail.log.base import Lease
from treenail.log.event import Draft, from_microseconds, to_microseconds
from treenail.log.lease import owner_is_alive, owner_text

MAX_PAYLOAD_BYTES = 512 * 1024 * 1024
"""The largest payload of an event or of a stored snapshot."""

MAX_BATCH = 100_000
"""The most events in one append."""

SNAPSHOTS_KEPT = 2
"""How many stored snapshots a session keeps: the newest, and one to fall back on if it is damaged."""

_EARLIEST_US = to_microseconds(datetime.fromisoformat("0001-01-02T00:00:00+00:00"))
_LATEST_US = to_microseconds(datetime.fromisoformat("9999-12-30T00:00:00+00:00"))


class LeaseState(NamedTuple):
    """What a store keeps about a session's writer. `owner` is None when the lease was given back."""

    epoch: int = 0
    owner: str | None = None
    ttl_us: int = 0
    expires_us: int = 0

    def is_live(self, now_us: int) -> bool:
        """Return whether the lease is held: not given back, not expired, not by a dead process."""
        return self.owner is not None and now_us < self.expires_us and owner_is_alive(self.owner) is not False

    def as_lease(self, session_id: UUID) -> Lease:
        """Return what the holder gets."""
        expires_at = from_microseconds(self.expires_us)
        return Lease(session_id, self.epoch, self.owner or "", self.ttl_us / 1_000_000, expires_at)


def check_text(what: str, value: object) -> None:
    """Refuse text that not every store can keep: lone surrogates and NUL."""
    if not isinstance(value, str):
        raise UsageError(f"{what} must be a string, not {type(value).__name__}")
    if "\0" in value:
        raise UsageError(f"{what} holds a NUL character, which a log cannot keep: {value!r}")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise UsageError(f"{what} holds a lone surrogate, which is not text: {value!r}") from None


def check_created(created_at: datetime, tags: Mapping[str, str] | None) -> None:
    """Refuse a session whose time is naive or whose tags are not text."""
    if created_at.tzinfo is None:
        raise UsageError(f"created_at must be an aware time, for instance in UTC, not {created_at!r}")
    for key, value in (tags or {}).items():
        check_text("a tag's name", key)
        check_text(f"the tag {key!r}", value)


def check_drafts(drafts: Sequence[Draft]) -> None:
    """Refuse a batch that could not be stored or could not be read again."""
    if len(drafts) > MAX_BATCH:
        raise UsageError(f"one append takes at most {MAX_BATCH} events, not {len(drafts)}; append in parts")
    stamp: object = None
    for draft in drafts:
        kind, payload, at_us, turn_id, run_id, trace_id, rolled_back = draft
        check_text("an event's type", kind)
        if not kind:
            raise UsageError("an event's type must not be empty")
        if draft[3:6] != stamp:  # Mostly the events of an append have one stamp.
            for what, text in (("turn_id", turn_id), ("run_id", run_id), ("trace_id", trace_id)):
                if text is not None:
                    check_text(what, text)
            stamp = draft[3:6]
        if type(payload) is not bytes or len(payload) > MAX_PAYLOAD_BYTES:
            check_payload(f"the payload of {kind!r}", payload)
        if type(at_us) is not int or not _EARLIEST_US <= at_us <= _LATEST_US:
            raise UsageError(f"at_us of {kind!r} must be whole microseconds since 1970, not {at_us!r}")
        if rolled_back not in (False, True):
            raise UsageError(f"rolled_back of {kind!r} must be True or False, not {rolled_back!r}")


def check_payload(what: str, payload: bytes) -> None:
    """Refuse what is not bytes, or more bytes than a store takes."""
    if type(payload) is not bytes:
        raise UsageError(f"{what} must be bytes, not {type(payload).__name__}")
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise UsageError(f"{what} has {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES} fit")


def grant(session_id: UUID, state: LeaseState, *, owner: str, ttl_s: float, now_us: int) -> LeaseState:
    """Hand the lease to `owner` with the next epoch, or raise `LeaseHeldError` while its holder lives."""
    check_text("a lease's owner", owner)
    if not (math.isfinite(ttl_s) and 0 < ttl_s <= 366 * 24 * 3600):
        raise UsageError(f"a lease lasts for a positive number of seconds and at most a year, not {ttl_s!r}")
    refuse_if_held(session_id, state, now_us)
    ttl_us = max(1, round(ttl_s * 1_000_000))
    return LeaseState(state.epoch + 1, owner, ttl_us, now_us + ttl_us)


def refuse_if_held(session_id: UUID, state: LeaseState, now_us: int) -> None:
    """Raise `LeaseHeldError` while a living writer holds the session."""
    if state.is_live(now_us):
        until, holder = from_microseconds(state.expires_us), owner_text(state.owner or "")
        raise LeaseHeldError(
            f"session {session_id} is being written by {holder} (lease {state.epoch}, until "
            f"{until:%H:%M:%S} UTC unless it is renewed); close that session, or wait until its process ends",
            owner=state.owner,
            holder=holder,
        )


def check_writer(lease: Lease, state: LeaseState) -> None:
    """Raise `StaleWriterError` unless this lease is the one that counts."""
    if state.epoch != lease.epoch:
        holder = f", held by {state.owner}" if state.owner else ""
        raise StaleWriterError(
            f"the lease {lease.epoch} on session {lease.session_id} was taken over: its epoch is now "
            f"{state.epoch}{holder}; nothing was written; open the session again"
        )
    if state.owner is None:
        raise StaleWriterError(
            f"the lease {lease.epoch} on session {lease.session_id} was given back; nothing was written; "
            f"acquire a new one"
        )
    if state.owner != lease.owner:
        raise StaleWriterError(
            f"session {lease.session_id} was erased and created again since {lease.owner} took lease "
            f"{lease.epoch} on it, and {state.owner} holds it; nothing was written; open the session again"
        )


def check_head(lease: Lease, *, expected_seq: int, head: int) -> None:
    """Raise `StaleWriterError` unless the writer has seen everything that is in the log."""
    if expected_seq != head:
        raise StaleWriterError(
            f"session {lease.session_id} is at event {head}, but the writer expected {expected_seq}; "
            f"nothing was written; read the events in between, or open the session again"
        )


def check_snapshot(session_id: UUID, seq: int, *, first: int, head: int, payload: bytes) -> None:
    """Refuse a snapshot of a place that is not in the log."""
    check_payload("a stored snapshot", payload)
    if not first - 1 <= seq <= head:
        raise UsageError(
            f"session {session_id} holds the events {first} to {head}; "
            f"a snapshot after event {seq} does not belong to it"
        )


def check_prune(session_id: UUID, *, upto: int, covered: int | None) -> None:
    """Refuse to delete events that no stored snapshot covers."""
    if covered is None or upto > covered:
        have = "there is none" if covered is None else f"the newest one covers events up to {covered}"
        raise UsageError(
            f"cannot prune session {session_id} up to event {upto}: only events that a stored snapshot "
            f"covers can be deleted, and {have}; store a snapshot first"
        )


def not_found(session_id: UUID, where: str) -> NoReturn:
    """Raise `SessionNotFoundError`, saying where it was looked for."""
    raise SessionNotFoundError(
        f"there is no session {session_id} in {where}; sessions() lists those that are there"
    )


class Age(NamedTuple):
    """When a session was last used, for deciding what to keep."""

    session_id: UUID
    parent_id: UUID | None
    used_us: int
    is_live: bool


def _families(ages: Sequence[Age]) -> list[list[Age]]:
    """Group sessions with their children, least recently used family first."""
    known = {age.session_id: age for age in ages}
    roots: dict[UUID, list[Age]] = {}
    for age in ages:
        root, seen = age, {age.session_id}
        while root.parent_id in known and root.parent_id not in seen:
            root = known[root.parent_id]
            seen.add(root.session_id)
        roots.setdefault(root.session_id, []).append(age)
    return sorted(roots.values(), key=lambda family: max(age.used_us for age in family))


def _ids_without_writers(families: Sequence[Sequence[Age]]) -> list[UUID]:
    free = (family for family in families if not any(age.is_live for age in family))
    return [age.session_id for family in free for age in family]


def beyond_last(ages: Sequence[Age], count: int) -> list[UUID]:
    """Choose what goes when the `count` most recently used sessions stay, each with its children."""
    if count < 0:
        raise UsageError(f"keep_last needs a number of sessions, 0 or more, not {count}")
    families = _families(ages)
    return _ids_without_writers(families[: max(len(families) - count, 0)])


def older_than(ages: Sequence[Age], moment: datetime) -> list[UUID]:
    """Choose the sessions that were last used before `moment`, none of their children later."""
    if moment.tzinfo is None:
        raise UsageError(f"older_than must be an aware time, for instance in UTC, not {moment!r}")
    limit_us = to_microseconds(moment)
    return _ids_without_writers(
        [family for family in _families(ages) if max(age.used_us for age in family) < limit_us]
    )
