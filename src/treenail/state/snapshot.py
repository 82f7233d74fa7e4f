"""Snapshots of a session and of the whole execution state, and their JSON form.

A snapshot keeps references to slices, which never change; taking one costs the
number of slices and not of items. The items become tuples when somebody asks for
them.

The JSON form names types by their stable names. Reading it back resolves them
through the registry only; whatever does not fit is a `SnapshotRestoreError`, and
nothing was changed.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from random import Random
from types import MappingProxyType
from typing import Any, Literal
from uuid import UUID

from treenail.codec import Codec, codec, parse_json
from treenail.errors import CodecError, DecodeError, SnapshotRestoreError
from treenail.log import SlicePolicy
from treenail.state.events import as_read
from treenail.state.slices import Slice, sealed

SNAPSHOT_VERSION = "1"


class SnapshotState(Mapping[type, tuple[Any, ...]]):
    """The captured slices: type to items. Immutable; equal if the items are."""

    __slots__ = ("_slices",)

    def __init__(self, slices: Mapping[type, Slice[Any]]) -> None:
        self._slices = dict(slices)

    def __getitem__(self, slice_type: type) -> tuple[Any, ...]:
        return as_read(slice_type, self._slices[slice_type].all())

    def __iter__(self) -> Iterator[type]:
        return iter(self._slices)

    def __len__(self) -> int:
        return len(self._slices)

    def __repr__(self) -> str:
        inside = ", ".join(f"{each.__qualname__}: {len(kept)}" for each, kept in self._slices.items())
        return f"SnapshotState({{{inside}}})"

    def captured(self, slice_type: type) -> Slice[Any]:
        """Return a slice as it was captured, with the origins of its items."""
        return self._slices[slice_type]


@dataclass(slots=True, frozen=True)
class Snapshot:
    """What a session held at one moment."""

    created_at: datetime
    slices: SnapshotState
    policies: Mapping[type, SlicePolicy]
    """The policy of every slice that the session knew."""
    parent_id: UUID | None = None
    children_ids: tuple[UUID, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    captured: frozenset[SlicePolicy] = frozenset({SlicePolicy.STATE})
    """Which policies were asked for: only slices under these are emptied if they are not in `slices`."""
    session_id: UUID | None = field(default=None, compare=False)
    seq: int = field(default=0, compare=False)
    """The place in the session's log at which it was taken; 0 if that is not known."""
    taken_by: object = field(default=None, compare=False, repr=False)
    """What took it, while that lives: its items can then be referred to instead of being copied."""

    def to_json(self, *, codec: Codec = codec) -> str:
        """Serialise. `from_json` gives back an equal snapshot."""
        return json.dumps(snapshot_to_data(self, codec), ensure_ascii=True)

    @classmethod
    def from_json(cls, raw: str | bytes, *, codec: Codec = codec) -> Snapshot:
        """Read what `to_json` wrote. Raises `SnapshotRestoreError`; never imports or runs anything."""
        with _reading():
            return snapshot_from_data(parse_json(raw), codec)


def snapshot_to_data(snapshot: Snapshot, codec: Codec) -> dict[str, Any]:
    """Turn a snapshot into JSON data."""
    name_of = codec.registry.name_of
    slices = []
    for slice_type in snapshot.slices:
        items = snapshot.slices.captured(slice_type).all()
        kinds = {type(item) for item in items}
        if len(kinds) == 1:
            (item_type,) = kinds
            name: str | None = name_of(item_type)
            data = [codec.record_to_data(item) for item in items]
        else:
            name = None
            data = [codec.to_data(item) for item in items]
        slices.append({"slice_type": name_of(slice_type), "item_type": name, "items": data})
    return {
        "version": SNAPSHOT_VERSION,
        "created_at": snapshot.created_at.isoformat(),
        "parent_id": str(snapshot.parent_id) if snapshot.parent_id else None,
        "children_ids": [str(each) for each in snapshot.children_ids],
        "tags": dict(snapshot.tags),
        "policies": {name_of(each): policy.value for each, policy in snapshot.policies.items()},
        "captured": sorted(policy.value for policy in snapshot.captured),
        "slices": slices,
        "session_id": str(snapshot.session_id) if snapshot.session_id else None,
        "seq": snapshot.seq,
    }


@contextmanager
def _reading() -> Iterator[None]:
    """Whatever is wrong with a snapshot's text is one kind of error."""
    try:
        yield
    except CodecError as error:
        raise SnapshotRestoreError(f"this snapshot cannot be read: {error}") from error
    except RecursionError:
        raise SnapshotRestoreError("this snapshot cannot be read: it is nested too deeply") from None


def snapshot_from_data(data: Any, codec: Codec) -> Snapshot:
    """Turn such data back into a snapshot. Raises `CodecError`."""
    top = _object(data, "snapshot")
    _version(top)
    slices: dict[type, Slice[Any]] = {}
    for index, each in enumerate(_array(top.get("slices"), "snapshot.slices")):
        where = f"snapshot.slices[{index}]"
        entry = _object(each, where)
        slice_type = codec.registry.resolve(_text(entry.get("slice_type"), f"{where}.slice_type"))
        if slice_type in slices:
            raise DecodeError("this slice stands here twice", path=where)
        name = entry.get("item_type")
        items = _array(entry.get("items"), f"{where}.items")
        values: list[Any]
        if name is None:
            values = [codec.from_data(item, root=f"{where}.items") for item in items]
        else:
            item_type = codec.registry.resolve(_text(name, f"{where}.item_type"))
            _record_type(item_type, f"{where}.item_type")
            values = [codec.record_from_data(item_type, item) for item in items]
        for value in values:
            if not isinstance(value, slice_type):
                raise DecodeError(
                    f"a {type(value).__qualname__} is not a {slice_type.__qualname__}", path=where
                )
        slices[slice_type] = Slice.of((sealed(codec, value, codec.encode(value)), 0) for value in values)
    policies = {
        codec.registry.resolve(name): _policy(value, f"snapshot.policies[{name!r}]")
        for name, value in _object(top.get("policies", {}), "snapshot.policies").items()
        if codec.registry.knows(name)  # A slice that this process never uses needs no policy here.
    }
    captured = _array(top.get("captured", ["state"]), "snapshot.captured")
    parent_id, session_id = top.get("parent_id"), top.get("session_id")
    return Snapshot(
        created_at=_moment(top.get("created_at"), "snapshot.created_at"),
        slices=SnapshotState(slices),
        policies=MappingProxyType(policies),
        parent_id=None if parent_id is None else _uuid(parent_id, "snapshot.parent_id"),
        children_ids=tuple(
            _uuid(each, f"snapshot.children_ids[{index}]")
            for index, each in enumerate(_array(top.get("children_ids", []), "snapshot.children_ids"))
        ),
        tags=MappingProxyType(
            {
                key: _text(value, f"snapshot.tags[{key!r}]")
                for key, value in _object(top.get("tags", {}), "snapshot.tags").items()
            }
        ),
        captured=frozenset(_policy(each, "snapshot.captured") for each in captured),
        session_id=None if session_id is None else _uuid(session_id, "snapshot.session_id"),
        seq=_count(top.get("seq", 0), "snapshot.seq"),
    )


@dataclass(slots=True, frozen=True)
class SnapshotMetadata:
    """When and why a snapshot was taken."""

    tag: str | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None
    phase: Literal["pre_tool", "post_tool", "checkpoint", "manual"] = "manual"


_PHASES = ("pre_tool", "post_tool", "checkpoint", "manual")


@dataclass(slots=True, frozen=True)
class CompositeSnapshot:
    """A consistent snapshot of a session and of every resource that can be captured."""

    snapshot_id: UUID
    created_at: datetime
    session: Snapshot
    resources: Mapping[type, object]
    """Resource type to that resource's own snapshot."""
    metadata: SnapshotMetadata
    rng: RandomState | None = None
    """Where the injected random numbers were."""
    origins: Mapping[type, object] = field(default_factory=dict, compare=False, repr=False)
    """The resources themselves, while they live: one may have to add what another process needs."""

    def to_json(self, *, codec: Codec = codec) -> str:
        """Serialise. `from_json` gives back an equal snapshot, also in another process.

        A resource with a method `portable(snapshot)` says what travels, and may refuse.
        """
        resources = []
        for resource_type, taken in self.resources.items():
            portable = getattr(self.origins.get(resource_type), "portable", None)
            travels = portable(taken) if callable(portable) else taken
            resources.append(
                {
                    "resource_type": codec.registry.name_of(resource_type),
                    "snapshot_type": codec.registry.name_of(type(travels)),
                    "snapshot": codec.record_to_data(travels),
                }
            )
        return json.dumps(
            {
                "version": SNAPSHOT_VERSION,
                "snapshot_id": str(self.snapshot_id),
                "created_at": self.created_at.isoformat(),
                "session": snapshot_to_data(self.session, codec),
                "resources": resources,
                "metadata": codec.record_to_data(self.metadata),
                "rng": self.rng,
            },
            ensure_ascii=True,
        )

    @classmethod
    def from_json(cls, raw: str | bytes, *, codec: Codec = codec) -> CompositeSnapshot:
        """Read what `to_json` wrote. Raises `SnapshotRestoreError`; never imports or runs anything."""
        with _reading():
            return _composite_from_data(parse_json(raw), codec)


def _composite_from_data(data: Any, codec: Codec) -> CompositeSnapshot:
    top = _object(data, "snapshot")
    _version(top)
    resources: dict[type, object] = {}
    for index, each in enumerate(_array(top.get("resources"), "snapshot.resources")):
        where = f"snapshot.resources[{index}]"
        entry = _object(each, where)
        resource_type = _resource(_text(entry.get("resource_type"), f"{where}.resource_type"), codec)
        kind = _resource(_text(entry.get("snapshot_type"), f"{where}.snapshot_type"), codec)
        _record_type(kind, f"{where}.snapshot_type")
        resources[resource_type] = codec.record_from_data(kind, entry.get("snapshot"))
    metadata = codec.record_from_data(SnapshotMetadata, top.get("metadata"))
    if metadata.phase not in _PHASES:
        raise DecodeError(f"{metadata.phase!r} is not a phase", path="snapshot.metadata.phase")
    return CompositeSnapshot(
        snapshot_id=_uuid(top.get("snapshot_id"), "snapshot.snapshot_id"),
        created_at=_moment(top.get("created_at"), "snapshot.created_at"),
        session=snapshot_from_data(top.get("session"), codec),
        resources=MappingProxyType(resources),
        metadata=metadata,
        rng=_random_from_data(top.get("rng")),
    )


_OWN_RESOURCES = frozenset(
    {
        "treenail.state.budget:BudgetSnapshot",
        "treenail.state.budget:BudgetTracker",
        "treenail.workspace.base:Filesystem",
        "treenail.workspace.base:FilesystemSnapshot",
        "treenail.workspace.host:HostFilesystem",
        "treenail.workspace.memory:InMemoryFilesystem",
    }
)
"""The resources that come with Treenail, and their snapshots: a process that has not used them yet may load
them. Nothing else is ever imported because a snapshot names it."""


def _resource(name: str, codec: Codec) -> type:
    """Return the type of a resource, or of its snapshot."""
    if name in _OWN_RESOURCES and not codec.registry.knows(name):
        module, _, attribute = name.partition(":")
        codec.registry.register(getattr(importlib.import_module(module), attribute))
    return codec.registry.resolve(name)


RandomState = tuple[int, tuple[int, ...], float | None]
"""What `Random.getstate()` returns."""


def random_state(rng: Random | None) -> RandomState | None:
    """Return where random numbers are; None if there are none, or they cannot be repeated."""
    try:
        return None if rng is None else rng.getstate()
    except NotImplementedError:
        return None


def _random_from_data(data: Any) -> RandomState | None:
    if data is None:
        return None
    try:
        version, words, gauss = data
        state: RandomState = (version, tuple(words), gauss)
        Random().setstate(state)
    except (TypeError, ValueError, OverflowError):
        raise DecodeError("this is not the state of a random number generator", path="snapshot.rng") from None
    return state


def snapshots_equivalent(one: CompositeSnapshot, other: CompositeSnapshot) -> bool:
    """Say whether two snapshots hold the same state, whenever and by whatever id they were taken.

    Working state is compared item by item; resources by what they describe, without ids and times.
    """
    return _state_of(one) == _state_of(other)


def _state_of(snapshot: CompositeSnapshot) -> object:
    slices = {
        slice_type: snapshot.session.slices[slice_type]
        for slice_type in snapshot.session.slices
        if snapshot.session.policies.get(slice_type, SlicePolicy.STATE) is SlicePolicy.STATE
        and snapshot.session.slices[slice_type]
    }
    return slices, {each: equivalence_of(taken) for each, taken in snapshot.resources.items()}, snapshot.rng


def equivalence_of(taken: object) -> object:
    """Return what a resource's snapshot says about the resource, without ids and times.

    That is its `equivalence_key()` if it has one, else the snapshot itself.
    """
    described = getattr(taken, "equivalence_key", None)
    return described() if callable(described) else taken


# --- checking the shape of JSON --------------------------------------------------------------------


def _object(data: Any, path: str) -> dict[str, Any]:
    if type(data) is not dict:
        raise DecodeError("expected an object", path=path)
    return data


def _array(data: Any, path: str) -> list[Any]:
    if type(data) is not list:
        raise DecodeError("expected an array", path=path)
    return data


def _text(data: Any, path: str) -> str:
    if type(data) is not str:
        raise DecodeError("expected text", path=path)
    return data


def _version(top: dict[str, Any]) -> None:
    version = top.get("version")
    if version != SNAPSHOT_VERSION:
        raise DecodeError(
            f"version {version!r} is not known here (this Treenail reads {SNAPSHOT_VERSION!r}); "
            "use the Treenail that wrote it, or a newer one",
            path="snapshot.version",
        )


def _count(data: Any, path: str) -> int:
    if type(data) is not int or data < 0:
        raise DecodeError("expected a whole number, 0 or more", path=path)
    return data


def _uuid(data: Any, path: str) -> UUID:
    try:
        return UUID(_text(data, path))
    except ValueError:
        raise DecodeError("expected a UUID", path=path) from None


def _moment(data: Any, path: str) -> datetime:
    try:
        return datetime.fromisoformat(_text(data, path))
    except ValueError:
        raise DecodeError("expected a date and time", path=path) from None


def _policy(data: Any, path: str) -> SlicePolicy:
    try:
        return SlicePolicy(data)
    except ValueError:
        raise DecodeError(f"{data!r} is not a slice policy", path=path) from None


def _record_type(cls: type, path: str) -> None:
    if not hasattr(cls, "__dataclass_fields__") and not hasattr(cls, "__pydantic_fields__"):
        raise DecodeError(f"{cls.__qualname__} is not a dataclass or a model", path=path)
