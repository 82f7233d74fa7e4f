"""Resources: the typed things that a run works with, and how long each one lives.

Theory of operation
-------------------
A `ResourceRegistry` says what there is: one `Binding` per type. It is a frozen
value; merging two gives a third. Opening it gives a `ResourceContext`, which
owns what its providers build and closes it, newest first, when the block ends.
One registry can be opened many times; each opening builds its own objects.

*The maker of an object closes it.* An instance that the caller hands in
(`Binding.instance`, or a plain value in `ResourceRegistry.build`) is only
passed along: it is neither initialised nor closed here, it can be read without
opening anything, and it outlives every context. To hand ownership over, bind a
provider instead: `Binding(Database, lambda _: database)`.

A scope says how long a built object lives: as long as the context
(`SINGLETON`), as long as one tool call (`TOOL_CALL`), or as long as its
user keeps it (`PROTOTYPE`, never tracked, never closed).

Construction happens under one lock per context, so that two threads that ask
for the same singleton get the same object, and so that a cycle is seen as a
cycle and not as a deadlock: the thread that holds the lock owns the stack of
types under construction. What is built already is read without the lock.

An object is entered into the close order when it is complete. Its dependencies
were complete before it, so walking the order backwards closes every object
before the ones that it leans on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType, TracebackType
from typing import Final, Generic, Literal, Protocol, TypeGuard, TypeVar, cast, overload, runtime_checkable

from treenail.errors import (
    CircularDependencyError,
    DuplicateBindingError,
    ProviderError,
    ResourceLifecycleError,
    UnboundResourceError,
    UsageError,
)
from treenail.log import SlicePolicy

_log = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
D = TypeVar("D")
SnapshotT = TypeVar("SnapshotT")


class _Missing(Enum):
    """Tells "no default was given" from a default of None."""

    MISSING = "missing"


_MISSING: Final = _Missing.MISSING


# --- what a resource may be able to do -----------------------------------------------------------------


@runtime_checkable
class Snapshotable(Protocol[SnapshotT]):
    """A holder of state that can say where it is, and go back there.

    `snapshot_policy`, if the object has that attribute, says what a rollback does with it, as it
    does for a slice; without it the policy is `STATE`.
    """

    def snapshot(self, *, tag: str | None = None) -> SnapshotT:
        """Return the present state as an immutable value."""
        ...

    def restore(self, snapshot: SnapshotT, /) -> object:
        """Go back to that state. On an exception the holder is as it was before the call."""
        ...


@runtime_checkable
class PostConstruct(Protocol):
    """A resource that has a second step after its constructor."""

    def post_construct(self) -> None:
        """Finish the construction. If this raises, the object is closed and never handed out."""
        ...


@runtime_checkable
class Closeable(Protocol):
    """A resource that holds something to give back."""

    def close(self) -> None:
        """Give back what is held. Called once, when the scope of the resource ends."""
        ...


# A proxy can do what the object behind it can. `isinstance` sees that in Python 3.11 only: later versions
# ignore attributes that `__getattr__` finds.


def is_snapshotable(resource: object) -> TypeGuard[Snapshotable[object]]:
    """Say whether something can be snapshotted, directly or through the object behind it."""
    return _can(resource, "snapshot") and _can(resource, "restore")


def _is_closeable(resource: object) -> TypeGuard[Closeable]:
    return _can(resource, "close")


def _has_second_step(resource: object) -> TypeGuard[PostConstruct]:
    return _can(resource, "post_construct")


def _can(resource: object, name: str) -> bool:
    return callable(getattr(resource, name, None))


class Resolver(Protocol):
    """What a provider uses to find the resources that it needs itself."""

    @overload
    def get(self, resource_type: type[T], /) -> T: ...
    @overload
    def get(self, resource_type: type[T], default: D, /) -> T | D: ...
    def get(self, resource_type: type[T], default: object = _MISSING, /) -> object:
        """Return the resource that is bound to this type; without a default, it must be bound."""
        ...

    def get_optional(self, resource_type: type[T], /) -> T | None:
        """Return the resource that is bound to this type, or None if nothing is."""
        ...


class Scope(Enum):
    """How long a built resource lives."""

    SINGLETON = "singleton"
    """One per context, built when first asked for, closed with the context."""
    TOOL_CALL = "tool_call"
    """One per tool call, closed when the call ends."""
    PROTOTYPE = "prototype"
    """A fresh one for each request, which belongs to the caller: never tracked, never closed."""


# --- bindings ------------------------------------------------------------------------------------------


# No slots: Python 3.11 cannot construct a frozen generic with slots through `Binding[Database](...)`.
@dataclass(frozen=True)
class Binding(Generic[T_co]):
    """How one type is provided.

    `provider` is called with a `Resolver` and returns the object. `eager` builds it when the
    context opens, not when it is first asked for. `policy` overrides what the object itself says
    about rollbacks (`snapshot_policy`).
    """

    protocol: type[T_co]
    """The type that the resource is asked for by: a class or a Protocol."""
    provider: Callable[[Resolver], T_co]
    scope: Scope = Scope.SINGLETON
    eager: bool = False
    provided: T_co | None = None
    """The caller's own object, readable without opening a context; see `Binding.instance`."""
    policy: SlicePolicy | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.protocol, type):
            raise UsageError(
                f"a resource is bound to a type, not to {self.protocol!r}; pass the class or the Protocol"
            )
        if not callable(self.provider):
            raise UsageError(
                f"the provider of {_name(self.protocol)} is not callable: {self.provider!r}; "
                f"use Binding.instance to bind an object"
            )
        if self.scope is not Scope.SINGLETON and (self.eager or self.provided is not None):
            raise UsageError(
                f"{_name(self.protocol)} is bound with scope {self.scope.value}: only a singleton "
                f"can be eager or be provided as an instance"
            )

    @staticmethod
    def instance(protocol: type[T], obj: T, *, policy: SlicePolicy | None = None) -> Binding[T]:
        """Bind an object that exists already. The caller still owns it: it is not closed here."""
        if obj is None:
            raise UsageError(f"None cannot be bound to {_name(protocol)}; leave the binding out instead")
        return Binding(protocol, lambda _: obj, eager=True, provided=obj, policy=policy)


@dataclass(frozen=True, slots=True)
class ResourceRegistry:
    """What resources there are: one binding per type. A frozen value.

    `get` and `snapshotable_resources` see the objects that the caller handed in; what a provider
    has to build exists only in the `ResourceContext` that `open()` gives.
    """

    _entries: Mapping[type[object], Binding[object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A copy behind a proxy: the mapping that was passed cannot change the registry.
        object.__setattr__(self, "_entries", MappingProxyType(dict(self._entries)))

    @classmethod
    def of(cls, *bindings: Binding[object]) -> ResourceRegistry:
        """Make a registry of bindings. Two for one type are a `DuplicateBindingError`."""
        entries: dict[type[object], Binding[object]] = {}
        for binding in bindings:
            if binding.protocol in entries:
                raise DuplicateBindingError(
                    f"{_name(binding.protocol)} is bound twice; keep one of the two bindings"
                )
            entries[binding.protocol] = binding
        return cls(entries)

    @classmethod
    def build(cls, resources: Mapping[type[object], object]) -> ResourceRegistry:
        """Make a registry from types and their instances or bindings. None values are skipped."""
        entries: dict[type[object], Binding[object]] = {}
        for resource_type, value in resources.items():
            if value is None:
                continue
            if not isinstance(value, Binding):
                entries[resource_type] = Binding.instance(resource_type, value)
                continue
            if value.protocol is not resource_type:
                raise UsageError(
                    f"the binding given for {_name(resource_type)} is one for {_name(value.protocol)}; "
                    f"use the same type on both sides"
                )
            entries[resource_type] = value
        return cls(entries)

    def merge(self, other: ResourceRegistry, *, strict: bool = True) -> ResourceRegistry:
        """Return both registries as one.

        A type that both bind is a `DuplicateBindingError`; with `strict=False`, `other` wins.
        """
        overlap = self.conflicts(other)
        if strict and overlap:
            names = ", ".join(sorted(_name(resource_type) for resource_type in overlap))
            raise DuplicateBindingError(
                f"both registries bind {names}; drop one side, or merge with strict=False "
                f"to let the right side win"
            )
        return ResourceRegistry({**self._entries, **other._entries})

    def conflicts(self, other: ResourceRegistry) -> frozenset[type[object]]:
        """Return the types that both registries bind."""
        return frozenset(self._entries.keys() & other._entries.keys())

    def binding_for(self, resource_type: type[T]) -> Binding[T] | None:
        """Return the binding of a type, or None."""
        return cast("Binding[T] | None", self._entries.get(resource_type))

    def __contains__(self, resource_type: object) -> bool:
        return resource_type in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[type[object]]:
        return iter(self._entries)

    @overload
    def get(self, resource_type: type[T], /) -> T | None: ...
    @overload
    def get(self, resource_type: type[T], default: D, /) -> T | D: ...
    def get(self, resource_type: type[T], default: object = _MISSING, /) -> object:
        """Return the instance that was handed in for a type; None, or the default, if there is none.

        A resource that a provider has to build does not exist before the registry is opened: the
        default is returned if one was given, else this is a `ResourceLifecycleError`.
        """
        binding = self._entries.get(resource_type)
        if binding is not None and binding.provided is not None:
            return binding.provided
        if default is not _MISSING:
            return default
        if binding is None:
            return None
        raise ResourceLifecycleError(
            f"{_name(resource_type)} is built by a provider and does not exist yet; open the registry first: "
            f"`with registry.open() as resources: resources.get({_name(resource_type)})`"
        )

    def snapshotable_resources(self) -> Mapping[type[object], Snapshotable[object]]:
        """Return the instances that were handed in and can be snapshotted, by type, in binding order.

        What is read-only here is not among them: its owner takes its snapshots.
        """
        return MappingProxyType(
            {
                resource_type: binding.provided
                for resource_type, binding in self._entries.items()
                if is_snapshotable(binding.provided) and not _is_read_only(binding.provided)
            }
        )

    def policy_of(self, resource_type: type[object]) -> SlicePolicy:
        """Return what a rollback does with a resource: the binding's word, then the object's, then STATE."""
        binding = self._entries.get(resource_type)
        return _policy(binding, None if binding is None else binding.provided)

    def open(self) -> ResourceContext:
        """Return a context that builds and owns the resources; use it in a `with` block."""
        return ResourceContext(self)


# --- the life of a context -----------------------------------------------------------------------------

_ContextState = Literal["new", "open", "closed"]


class ResourceContext:
    """The resources of one opened registry, alive while the `with` block lasts.

    Entering builds the eager ones; if one of them fails, those built before it are closed and the
    error continues. Leaving closes what was built, newest first. An object whose `close` fails does
    not stop the others: the failure is logged and stands in `close_errors`.

    It can be used from several threads. It is used once: open the registry again for another one.
    """

    def __init__(self, registry: ResourceRegistry) -> None:
        self.registry: Final = registry
        self._lock = threading.RLock()
        self._state: _ContextState = "new"
        self._singletons: dict[type[object], object] = {}
        self._built: list[tuple[type[object], object]] = []
        self._stack: list[type[object]] = []
        self._scopes: list[ToolScope] = []
        self._close_errors: list[Exception] = []

    @property
    def close_errors(self) -> tuple[Exception, ...]:
        """What went wrong while closing, in the order in which it happened. Each one was also logged."""
        return tuple(self._close_errors)

    def __enter__(self) -> ResourceContext:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Build the eager resources. Entering the `with` block does this; a second time is an error."""
        with self._lock:
            if self._state != "new":
                raise ResourceLifecycleError(
                    f"this resource context is {'open already' if self._state == 'open' else 'closed'} and "
                    f"cannot be entered again; call registry.open() for a new one"
                )
            self._state = "open"
            try:
                for resource_type, binding in self.registry._entries.items():
                    if binding.provided is not None:
                        self._singletons[resource_type] = binding.provided
                for resource_type, binding in self.registry._entries.items():
                    if binding.eager:
                        self.get(resource_type)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Close what was built, newest first. Leaving the `with` block does this; again is harmless."""
        with self._lock:
            if self._stack:
                raise ResourceLifecycleError(
                    f"the context cannot be closed while {_name(self._stack[-1])} is being built; "
                    f"let its provider return first"
                )
            if self._state == "closed":
                return
            self._state = "closed"
            scopes, self._scopes = self._scopes, []
            built, self._built = self._built, []
            self._singletons.clear()
            # A tool call's resources lean on the singletons, so they go first.
            doomed = built + [entry for scope in scopes for entry in scope._surrender()]
        # Outside of the lock: an object's close may wait for a thread that asks for a resource.
        interrupt = self._close_each(doomed)
        if interrupt is not None:
            raise interrupt

    @overload
    def get(self, resource_type: type[T], /) -> T: ...
    @overload
    def get(self, resource_type: type[T], default: D, /) -> T | D: ...
    def get(self, resource_type: type[T], default: object = _MISSING, /) -> object:
        """Return the resource that is bound to this type, building it if need be.

        Unbound is an `UnboundResourceError`, unless a default is given. Providers that need each
        other are a `CircularDependencyError`, a provider that fails a `ProviderError`: a default
        does not hide either. A failed resource is not kept; asking again tries again.
        """
        return self._resolve(resource_type, default, None)

    def get_optional(self, resource_type: type[T], /) -> T | None:
        """Return the resource that is bound to this type, or None if nothing is."""
        return self.get(resource_type, None)

    @contextmanager
    def tool_scope(self) -> Iterator[ToolScope]:
        """Open the scope of one tool call: its TOOL_CALL resources are its own, and end with it.

        Scopes of calls that run at the same time do not see each other's resources.
        """
        scope = ToolScope(self)
        with self._lock:
            self._demand_open("a tool scope")
            self._scopes.append(scope)
        try:
            yield scope
        finally:
            with self._lock:
                if scope in self._scopes:
                    self._scopes.remove(scope)
                doomed = scope._surrender()
            interrupt = self._close_each(doomed)
            if interrupt is not None:
                raise interrupt

    def snapshotable_resources(self) -> Mapping[type[object], Snapshotable[object]]:
        """Return the singletons that exist at this moment and can be snapshotted, in binding order.

        What is read-only here is not among them: its owner takes its snapshots.
        """
        with self._lock:
            present = {
                resource_type: self._singletons[resource_type]
                for resource_type in self.registry
                if resource_type in self._singletons
            }
        return MappingProxyType(
            {
                resource_type: resource
                for resource_type, resource in present.items()
                if is_snapshotable(resource) and not _is_read_only(resource)
            }
        )

    def policy_of(self, resource_type: type[object]) -> SlicePolicy:
        """Return what a rollback does with a resource: the binding's word, then the object's, then STATE."""
        return _policy(self.registry.binding_for(resource_type), self._singletons.get(resource_type))

    def __contains__(self, resource_type: object) -> bool:
        return resource_type in self.registry

    def _resolve(self, resource_type: type[object], default: object, scope: ToolScope | None) -> object:
        # Built singletons are the common case and need no lock: an entry is made when its object is complete.
        existing = self._singletons.get(resource_type)
        if existing is not None:
            return existing
        with self._lock:
            self._demand_open(_name(resource_type))
            binding = self.registry.binding_for(resource_type)
            if binding is None:
                if default is not _MISSING:
                    return default
                raise UnboundResourceError(
                    f"nothing is bound for {_name(resource_type)}; add it to the registry, "
                    f"or use get_optional if it may be missing"
                )
            if resource_type in self._stack:
                start = self._stack.index(resource_type)
                raise CircularDependencyError([*self._stack[start:], resource_type])
            match binding.scope:
                case Scope.SINGLETON:
                    # Again, under the lock: another thread may have built it while this one waited.
                    existing = self._singletons.get(resource_type)
                    if existing is not None:
                        return existing
                    # A singleton outlives the call that happens to build it, so it must not see the
                    # call's own resources: it is given the context, not the scope.
                    resource = self._construct(binding, self)
                    self._built.append((resource_type, resource))
                    self._singletons[resource_type] = resource
                    if self._scopes and is_snapshotable(resource) and not _is_read_only(resource):
                        # A call that fails takes it back to where it is now.
                        fresh = resource.snapshot(tag="as built")
                        for each in self._scopes:
                            each.built.append((resource_type, resource, fresh))
                    return resource
                case Scope.TOOL_CALL:
                    if scope is None:
                        raise ResourceLifecycleError(
                            f"{_name(resource_type)} lives for one tool call and does not exist outside; "
                            f"ask for it in a `with resources.tool_scope() as scope:` block, and bind "
                            f"whatever needs it with scope TOOL_CALL or PROTOTYPE"
                        )
                    return scope._own(resource_type, lambda: self._construct(binding, scope))
                case Scope.PROTOTYPE:
                    return self._construct(binding, scope or self)

    def _construct(self, binding: Binding[object], resolver: Resolver) -> object:
        """Run a provider and the object's second step; the caller holds the lock."""
        self._stack.append(binding.protocol)
        try:
            resource = binding.provider(resolver)
            if resource is None:
                raise ProviderError(
                    f"building {self._path()} failed: the provider returned None; return the object"
                )
            if _has_second_step(resource):
                try:
                    resource.post_construct()
                except BaseException:
                    interrupt = self._close_each([(binding.protocol, resource)])
                    if interrupt is not None:
                        raise interrupt from None
                    raise
            return resource
        except (CircularDependencyError, ProviderError):
            # Already names what failed, and the way to it.
            raise
        except Exception as error:
            raise ProviderError(f"building {self._path()} failed: {type(error).__name__}: {error}") from error
        finally:
            self._stack.pop()

    def _path(self) -> str:
        """Name what is being built, and what it is needed for."""
        *needed_by, target = self._stack
        if not needed_by:
            return _name(target)
        return f"{_name(target)} (needed by {' -> '.join(_name(step) for step in needed_by)})"

    def _demand_open(self, what: str) -> None:
        if self._state == "open":
            return
        raise ResourceLifecycleError(
            f"{what} was asked for "
            + (
                "before the resource context was entered; use `with registry.open() as resources:`"
                if self._state == "new"
                else "after the resource context was closed; open the registry again"
            )
        )

    def _close_each(self, entries: list[tuple[type[object], object]]) -> BaseException | None:
        """Close objects, last one first, whatever any of them does.

        Failures are logged and collected. Of the exceptions that are not failures (an interrupt, a
        cancellation) the first is returned, for the caller to raise when all are closed.
        """
        interrupt: BaseException | None = None
        for resource_type, resource in reversed(entries):
            if not _is_closeable(resource):
                continue
            try:
                resource.close()
            except Exception as error:  # noqa: BLE001 - kept in close_errors, and logged
                self._close_errors.append(error)
                _log.exception("closing the resource %s failed; the others are closed", _name(resource_type))
            except BaseException as error:  # noqa: BLE001 - raised by the caller, after the others are closed
                interrupt = interrupt or error
        return interrupt


class ToolScope:
    """The resources of one tool call: its own TOOL_CALL objects, and the context's singletons."""

    def __init__(self, context: ResourceContext) -> None:
        self._context = context
        self._owned: dict[type[object], object] | None = {}
        self.built: list[tuple[type[object], Snapshotable[object], object]] = []
        """The singletons that were built while the call was open, and their first snapshots."""

    @overload
    def get(self, resource_type: type[T], /) -> T: ...
    @overload
    def get(self, resource_type: type[T], default: D, /) -> T | D: ...
    def get(self, resource_type: type[T], default: object = _MISSING, /) -> object:
        """Return the resource that is bound to this type, as `ResourceContext.get` does."""
        return self._context._resolve(resource_type, default, self)

    def get_optional(self, resource_type: type[T], /) -> T | None:
        """Return the resource that is bound to this type, or None if nothing is."""
        return self.get(resource_type, None)

    def _own(self, resource_type: type[object], construct: Callable[[], object]) -> object:
        """Return the call's own object, building it once; the context's lock is held."""
        if self._owned is None:
            raise ResourceLifecycleError(
                f"{_name(resource_type)} was asked for after its tool call ended; "
                f"keep what is needed, or bind it as a singleton"
            )
        existing = self._owned.get(resource_type)
        if existing is None:
            existing = construct()
            self._owned[resource_type] = existing
        return existing

    def _surrender(self) -> list[tuple[type[object], object]]:
        """End the scope and hand over what it owned, in the order in which it was built."""
        owned, self._owned = self._owned, None
        return list((owned or {}).items())


def _policy(binding: Binding[T] | None, resource: object) -> SlicePolicy:
    if binding is not None and binding.policy is not None:
        return binding.policy
    source = resource if resource is not None or binding is None else binding.protocol
    declared = getattr(source, "snapshot_policy", None)
    return declared if isinstance(declared, SlicePolicy) else SlicePolicy.STATE


def _is_read_only(resource: object) -> bool:
    """Say whether a resource only shows state, which this run can neither change nor roll back."""
    return getattr(resource, "read_only", False) is True


def _name(resource_type: type[object]) -> str:
    return getattr(resource_type, "__qualname__", repr(resource_type))
