"""Resources: what is bound, when it is built, who closes it, and what happens when that fails."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Protocol, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.delegates import PassesOn

from treenail.errors import (
    CircularDependencyError,
    DuplicateBindingError,
    ProviderError,
    ResourceError,
    ResourceLifecycleError,
    UnboundResourceError,
    UsageError,
)
from treenail.log import SlicePolicy
from treenail.state import (
    Binding,
    Closeable,
    PostConstruct,
    ResourceContext,
    ResourceRegistry,
    Scope,
    Snapshotable,
)
from treenail.state.resources import Resolver


class Store(Protocol):
    """A seam without an implementation, as `Filesystem` is."""

    def read(self) -> str: ...


class MemoryStore:
    def read(self) -> str:
        return "memory"


@dataclass
class Recorder:
    """Writes down what happens to the resources that share it."""

    events: list[str] = field(default_factory=list)


@dataclass
class Part:
    name: str
    recorder: Recorder
    close_error: BaseException | None = None

    def close(self) -> None:
        self.recorder.events.append(f"close {self.name}")
        if self.close_error is not None:
            raise self.close_error


class Engine(Part):
    """A resource type."""


class Gearbox(Part):
    """Another one."""


class Wheel(Part):
    """A third."""


@dataclass
class Counter:
    """The smallest holder of state."""

    value: int = 0

    def snapshot(self, *, tag: str | None = None) -> int:
        return self.value

    def restore(self, snapshot: int) -> None:
        self.value = snapshot


class Ledger(Counter):
    snapshot_policy = SlicePolicy.LOG


def make(kind: type[Part], recorder: Recorder, *needs: type[object]) -> Callable[[Resolver], Part]:
    def provide(resolver: Resolver) -> Part:
        for need in needs:
            resolver.get(need)
        recorder.events.append(f"build {kind.__name__}")
        return kind(kind.__name__, recorder)

    return provide


# --- the registry --------------------------------------------------------------------------------------


def test_an_instance_is_readable_without_opening_anything() -> None:
    store = MemoryStore()
    registry = ResourceRegistry.build({Store: store})
    assert registry.get(Store) is store
    assert Store in registry
    assert list(registry) == [Store]
    assert len(registry) == 1


def test_none_values_are_skipped() -> None:
    registry = ResourceRegistry.build({Store: None, Counter: Counter(3)})
    assert list(registry) == [Counter]


def test_an_unbound_type_is_none_or_the_default() -> None:
    registry = ResourceRegistry()
    fallback = Counter()
    assert registry.get(Counter) is None
    assert registry.get(Counter, fallback) is fallback


def test_what_a_provider_must_build_does_not_exist_before_opening() -> None:
    """The error says how to get it; a default is taken instead of the error."""
    registry = ResourceRegistry.of(Binding(Counter, lambda _: Counter()))
    with pytest.raises(ResourceLifecycleError, match=r"Counter is built by a provider.*registry\.open\(\)"):
        registry.get(Counter)
    assert registry.get(Counter, None) is None


def test_a_registry_is_frozen() -> None:
    source: dict[type[object], Binding[object]] = {Counter: Binding.instance(Counter, Counter())}
    registry = ResourceRegistry(source)
    source.clear()
    assert Counter in registry
    with pytest.raises(FrozenInstanceError):
        registry._entries = {}  # type: ignore[misc]  # that it cannot be changed is the point
    with pytest.raises(TypeError):
        registry._entries[Store] = Binding.instance(Store, MemoryStore())  # type: ignore[index]  # that it cannot be changed is the point


def test_two_bindings_for_one_type_are_refused() -> None:
    binding = Binding.instance(Counter, Counter())
    with pytest.raises(DuplicateBindingError, match="Counter is bound twice"):
        ResourceRegistry.of(binding, binding)


def test_merging_names_every_conflict_and_non_strict_lets_the_right_side_win() -> None:
    left = ResourceRegistry.build({Counter: Counter(1), Store: MemoryStore()})
    right = ResourceRegistry.build({Counter: Counter(2)})
    assert left.conflicts(right) == {Counter}
    with pytest.raises(DuplicateBindingError, match="bind Counter"):
        left.merge(right)
    merged = left.merge(right, strict=False)
    assert set(merged) == {Counter, Store}
    assert merged.get(Counter) is right.get(Counter)
    assert left.get(Counter) == Counter(1), "merging changed its left side"


registries = st.sets(st.sampled_from([Counter, Ledger, MemoryStore, Recorder])).map(
    lambda kinds: ResourceRegistry.build({kind: kind() for kind in kinds})
)


@given(left=registries, right=registries)
def test_merge_laws(left: ResourceRegistry, right: ResourceRegistry) -> None:
    """Strict merging works exactly when there is no conflict; merging with nothing changes nothing."""
    assert left.conflicts(right) == set(left) & set(right)
    if left.conflicts(right):
        with pytest.raises(DuplicateBindingError):
            left.merge(right)
    else:
        assert left.merge(right) == right.merge(left)
    merged = left.merge(right, strict=False)
    assert set(merged) == set(left) | set(right)
    assert all(merged.get(kind) is (right if kind in right else left).get(kind) for kind in merged)
    assert left.merge(ResourceRegistry()) == left == ResourceRegistry().merge(left)


def test_a_binding_in_build_must_be_for_its_key() -> None:
    binding = Binding(Counter, lambda _: Counter())
    assert ResourceRegistry.build({Counter: binding}).binding_for(Counter) is binding
    with pytest.raises(UsageError, match="given for Store is one for Counter"):
        ResourceRegistry.build({Store: binding})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Binding("Counter", lambda _: Counter()), "bound to a type"),
        (lambda: Binding(Counter, Counter(1)), r"Binding\.instance"),
        (lambda: Binding.instance(Counter, None), "None cannot be bound to Counter"),
        (lambda: Binding(Counter, lambda _: Counter(), Scope.TOOL_CALL, eager=True), "only a singleton"),
        (
            lambda: Binding(Counter, lambda _: Counter(), Scope.PROTOTYPE, provided=Counter()),
            "only a singleton",
        ),
    ],
)
def test_a_binding_that_cannot_work_is_refused_when_it_is_made(
    build: Callable[[], object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        build()


def test_a_binding_can_be_spelled_with_its_type_argument() -> None:
    binding = Binding[Counter](Counter, lambda _: Counter(7))
    with ResourceRegistry.of(binding).open() as resources:
        assert resources.get(Counter) == Counter(7)


# --- building ------------------------------------------------------------------------------------------


def test_a_singleton_is_built_once_and_only_when_asked_for() -> None:
    recorder = Recorder()
    registry = ResourceRegistry.of(Binding(Engine, make(Engine, recorder)))
    with registry.open() as resources:
        assert recorder.events == []
        assert resources.get(Engine) is resources.get(Engine)
        assert recorder.events == ["build Engine"]
    with registry.open() as again:
        again.get(Engine)
    assert recorder.events == ["build Engine", "close Engine"] * 2


def test_an_eager_singleton_is_built_on_opening() -> None:
    recorder = Recorder()
    with ResourceRegistry.of(Binding(Engine, make(Engine, recorder), eager=True)).open():
        assert recorder.events == ["build Engine"]


def test_a_prototype_is_fresh_each_time_and_never_closed() -> None:
    recorder = Recorder()
    registry = ResourceRegistry.of(Binding(Engine, make(Engine, recorder), Scope.PROTOTYPE))
    with registry.open() as resources:
        assert resources.get(Engine) is not resources.get(Engine)
    assert recorder.events == ["build Engine", "build Engine"]


def test_a_resource_bound_by_a_protocol_is_found_by_it() -> None:
    with ResourceRegistry.of(Binding(Store, lambda _: MemoryStore())).open() as resources:
        assert resources.get(Store).read() == "memory"
        assert Store in resources
        assert MemoryStore not in resources


def test_an_unbound_type_is_an_error_that_names_it() -> None:
    fallback = Counter()
    with ResourceRegistry().open() as resources:
        with pytest.raises(UnboundResourceError, match="nothing is bound for Counter"):
            resources.get(Counter)
        assert resources.get_optional(Counter) is None
        assert resources.get(Counter, fallback) is fallback


def test_a_cycle_is_reported_with_its_members_in_order() -> None:
    recorder = Recorder()
    registry = ResourceRegistry.of(
        Binding(Wheel, make(Wheel, recorder, Engine)),
        Binding(Engine, make(Engine, recorder, Gearbox)),
        Binding(Gearbox, make(Gearbox, recorder, Engine)),
    )
    with registry.open() as resources:
        with pytest.raises(CircularDependencyError) as caught:
            resources.get(Wheel)
        assert caught.value.cycle == (Engine, Gearbox, Engine)
        # The stack is clean afterwards: the same question gets the same answer.
        with pytest.raises(CircularDependencyError):
            resources.get(Gearbox, None)
    assert recorder.events == []


def test_a_failing_provider_is_wrapped_with_its_cause_and_the_way_to_it() -> None:
    def broken(_: Resolver) -> Gearbox:
        raise OSError("no oil")

    registry = ResourceRegistry.of(
        Binding(Gearbox, broken), Binding(Engine, make(Engine, Recorder(), Gearbox))
    )
    with registry.open() as resources, pytest.raises(ProviderError) as caught:
        resources.get(Engine)
    assert str(caught.value) == "building Gearbox (needed by Engine) failed: OSError: no oil"
    assert isinstance(caught.value.__cause__, OSError)


def test_a_missing_dependency_is_not_mistaken_for_a_missing_resource() -> None:
    """A default stands in for a type that is not bound, never for one that cannot be built."""
    registry = ResourceRegistry.of(Binding(Engine, make(Engine, Recorder(), Gearbox)))
    with (
        registry.open() as resources,
        pytest.raises(ProviderError, match=r"building Engine failed.*nothing is bound for Gearbox"),
    ):
        resources.get(Engine, None)


def test_a_provider_that_returns_nothing_is_an_error() -> None:
    with (
        ResourceRegistry.of(Binding(Counter, lambda _: None)).open() as resources,
        pytest.raises(ProviderError, match="returned None"),
    ):
        resources.get(Counter)


def test_a_failed_resource_is_tried_again() -> None:
    attempts: list[int] = []

    def flaky(_: Resolver) -> Counter:
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("not yet")
        return Counter(len(attempts))

    with ResourceRegistry.of(Binding(Counter, flaky)).open() as resources:
        with pytest.raises(ProviderError):
            resources.get(Counter)
        assert resources.get(Counter) == Counter(2)


@dataclass
class Connection:
    recorder: Recorder
    error: BaseException | None = None

    def post_construct(self) -> None:
        self.recorder.events.append("connect")
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.recorder.events.append("close")


def test_post_construct_runs_before_the_resource_is_handed_out() -> None:
    recorder = Recorder()
    assert isinstance(Connection(recorder), PostConstruct)
    assert isinstance(Connection(recorder), Closeable)
    with ResourceRegistry.of(Binding(Connection, lambda _: Connection(recorder))).open() as resources:
        resources.get(Connection)
        assert recorder.events == ["connect"]


def test_a_failed_post_construct_closes_the_object_and_keeps_nothing() -> None:
    recorder = Recorder()
    registry = ResourceRegistry.of(Binding(Connection, lambda _: Connection(recorder, OSError("refused"))))
    with registry.open() as resources:
        with pytest.raises(ProviderError, match="OSError: refused"):
            resources.get(Connection)
        assert recorder.events == ["connect", "close"]
        with pytest.raises(ProviderError):
            resources.get(Connection)
    assert recorder.events == ["connect", "close"] * 2


def test_an_interrupt_in_a_provider_is_not_wrapped_and_leaves_the_context_usable() -> None:
    recorder = Recorder()
    errors: list[BaseException | None] = [KeyboardInterrupt(), None]
    registry = ResourceRegistry.of(Binding(Connection, lambda _: Connection(recorder, errors.pop(0))))
    with registry.open() as resources:
        with pytest.raises(KeyboardInterrupt):
            resources.get(Connection)
        assert recorder.events == ["connect", "close"]
        resources.get(Connection)
    assert recorder.events == ["connect", "close"] * 2


# --- closing -------------------------------------------------------------------------------------------


def test_resources_are_closed_before_what_they_lean_on() -> None:
    recorder = Recorder()
    registry = ResourceRegistry.of(
        Binding(Wheel, make(Wheel, recorder, Gearbox)),
        Binding(Gearbox, make(Gearbox, recorder, Engine)),
        Binding(Engine, make(Engine, recorder)),
    )
    with registry.open() as resources:
        resources.get(Wheel)
    assert recorder.events == [
        "build Engine",
        "build Gearbox",
        "build Wheel",
        "close Wheel",
        "close Gearbox",
        "close Engine",
    ]


KINDS = [type(f"Kind{number}", (Part,), {}) for number in range(6)]


@given(st.data())
def test_for_any_dependencies_closing_mirrors_building(data: st.DataObject) -> None:
    """Each object is built after its dependencies, once, and closed before them, once."""
    recorder = Recorder()
    needs: Mapping[type[Part], list[type[Part]]] = {
        kind: data.draw(st.lists(st.sampled_from(KINDS[:index]), unique=True)) if index else []
        for index, kind in enumerate(KINDS)
    }
    registry = ResourceRegistry.of(
        *(Binding(kind, make(kind, recorder, *needs[kind])) for kind in data.draw(st.permutations(KINDS)))
    )
    with registry.open() as resources:
        for kind in data.draw(st.lists(st.sampled_from(KINDS))):
            resources.get(kind)
    built = [event.split()[1] for event in recorder.events if event.startswith("build")]
    closed = [event.split()[1] for event in recorder.events if event.startswith("close")]
    assert closed == built[::-1]
    assert len(set(built)) == len(built)
    for kind in KINDS:
        if kind.__name__ in built:
            for need in needs[kind]:
                assert built.index(need.__name__) < built.index(kind.__name__)


def test_the_callers_own_object_is_neither_initialised_nor_closed() -> None:
    """Whoever makes an object closes it, so a registry of instances can be opened again and again."""
    recorder = Recorder()
    registry = ResourceRegistry.build({Connection: Connection(recorder)})
    for _ in range(2):
        with registry.open() as resources:
            assert resources.get(Connection) is registry.get(Connection)
    assert recorder.events == []


def test_a_close_that_fails_stops_no_other_and_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    first, second = OSError("first"), OSError("second")
    registry = ResourceRegistry.of(
        Binding(Wheel, lambda _: Wheel("wheel", recorder), eager=True),
        Binding(Gearbox, lambda _: Gearbox("gearbox", recorder, first), eager=True),
        Binding(Engine, lambda _: Engine("engine", recorder, second), eager=True),
    )
    with caplog.at_level(logging.ERROR, "treenail"), registry.open() as resources:
        pass
    assert recorder.events == ["close engine", "close gearbox", "close wheel"]
    assert resources.close_errors == (second, first)
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [second, first]
    assert "Engine" in caplog.text
    assert "Gearbox" in caplog.text


def test_an_interrupt_while_closing_waits_until_all_are_closed() -> None:
    recorder = Recorder()
    registry = ResourceRegistry.of(
        Binding(Wheel, lambda _: Wheel("wheel", recorder), eager=True),
        Binding(Engine, lambda _: Engine("engine", recorder, KeyboardInterrupt()), eager=True),
    )
    with pytest.raises(KeyboardInterrupt), registry.open():
        pass
    assert recorder.events == ["close engine", "close wheel"]


def test_when_an_eager_resource_fails_the_ones_before_it_are_closed() -> None:
    recorder = Recorder()
    registry = ResourceRegistry.of(
        Binding(Engine, make(Engine, recorder), eager=True),
        Binding(Gearbox, make(Gearbox, recorder, Store), eager=True),
    )
    context = registry.open()
    with pytest.raises(ProviderError, match="Gearbox"), context:
        raise AssertionError("the block ran although its resources were not there")
    assert recorder.events == ["build Engine", "close Engine"]
    with pytest.raises(ResourceLifecycleError, match="closed"):
        context.get(Engine)


def test_the_blocks_own_exception_continues_after_closing() -> None:
    recorder = Recorder()
    registry = ResourceRegistry.of(Binding(Engine, make(Engine, recorder), eager=True))
    with pytest.raises(ZeroDivisionError), registry.open():
        raise ZeroDivisionError
    assert recorder.events == ["build Engine", "close Engine"]


def test_a_context_is_used_once() -> None:
    context = ResourceRegistry().open()
    with pytest.raises(ResourceLifecycleError, match="before the resource context was entered"):
        context.get(Counter)
    with context, pytest.raises(ResourceLifecycleError, match="open already"), context:
        raise AssertionError("entered twice")
    with pytest.raises(ResourceLifecycleError, match="closed"), context:
        raise AssertionError("entered again")
    with pytest.raises(ResourceLifecycleError, match="after the resource context was closed"):
        context.get(Counter)
    context.close()
    assert context.close_errors == ()


def test_a_provider_cannot_close_the_context_that_is_building_it() -> None:
    recorder = Recorder()

    def suicidal(_: Resolver) -> Engine:
        context.close()
        return Engine("engine", recorder)

    context = ResourceRegistry.of(Binding(Engine, suicidal)).open()
    with context, pytest.raises(ProviderError, match="cannot be closed while Engine is being built"):
        context.get(Engine)


# --- tool calls ----------------------------------------------------------------------------------------


def test_a_tool_call_has_resources_of_its_own_closed_when_it_ends() -> None:
    recorder = Recorder()
    registry = ResourceRegistry.of(
        Binding(Engine, make(Engine, recorder)),
        Binding(Gearbox, make(Gearbox, recorder, Engine), Scope.TOOL_CALL),
        Binding(Wheel, make(Wheel, recorder, Gearbox), Scope.TOOL_CALL),
    )
    with registry.open() as resources:
        with resources.tool_scope() as first, resources.tool_scope() as second:
            assert first.get(Wheel) is first.get(Wheel)
            assert first.get(Gearbox) is not second.get(Gearbox)
            assert first.get(Engine) is second.get(Engine) is resources.get(Engine)
        # The second scope ends first; within a scope the newest object goes first.
        assert recorder.events[-3:] == ["close Gearbox", "close Wheel", "close Gearbox"]
        assert recorder.events.count("build Engine") == 1
        with pytest.raises(ResourceLifecycleError, match="after its tool call ended"):
            first.get(Wheel)
        assert first.get_optional(Store) is None
    assert recorder.events[-1] == "close Engine"


def test_a_tool_call_that_raises_still_closes_its_resources() -> None:
    recorder = Recorder()
    registry = ResourceRegistry.of(Binding(Gearbox, make(Gearbox, recorder), Scope.TOOL_CALL))
    with registry.open() as resources:
        with pytest.raises(ZeroDivisionError), resources.tool_scope() as scope:
            raise ZeroDivisionError(scope.get(Gearbox))
        assert recorder.events == ["build Gearbox", "close Gearbox"]


def test_a_context_forgets_the_calls_that_ended() -> None:
    """A run of many calls must not grow."""
    with ResourceRegistry().open() as resources:
        with resources.tool_scope() as scope:
            ended = weakref.ref(scope)
        del scope
        gc.collect()
        assert ended() is None


def test_outside_of_a_tool_call_its_resources_cannot_be_had() -> None:
    registry = ResourceRegistry.of(Binding(Gearbox, make(Gearbox, Recorder()), Scope.TOOL_CALL))
    with (
        registry.open() as resources,
        pytest.raises(ResourceLifecycleError, match=r"Gearbox lives for one tool call.*tool_scope\(\)"),
    ):
        resources.get(Gearbox)


def test_a_singleton_cannot_capture_a_tool_calls_resource() -> None:
    """It would go on using an object that is closed when the call ends."""
    registry = ResourceRegistry.of(
        Binding(Gearbox, make(Gearbox, Recorder()), Scope.TOOL_CALL),
        Binding(Engine, make(Engine, Recorder(), Gearbox)),
        Binding(Wheel, make(Wheel, Recorder(), Gearbox), Scope.PROTOTYPE),
    )
    with registry.open() as resources, resources.tool_scope() as scope:
        with pytest.raises(ProviderError, match=r"building Engine failed.*Gearbox lives for one tool call"):
            scope.get(Engine)
        assert isinstance(scope.get(Wheel), Wheel)


def test_closing_the_context_ends_the_calls_that_are_still_open() -> None:
    recorder = Recorder()
    registry = ResourceRegistry.of(
        Binding(Engine, make(Engine, recorder)),
        Binding(Gearbox, make(Gearbox, recorder, Engine), Scope.TOOL_CALL),
    )
    context = registry.open()
    context.start()
    with context.tool_scope() as scope:
        scope.get(Gearbox)
        context.close()
        assert recorder.events[-2:] == ["close Gearbox", "close Engine"]
    assert recorder.events.count("close Gearbox") == 1
    with pytest.raises(ResourceLifecycleError), context.tool_scope():
        raise AssertionError("a scope of a closed context was opened")


# --- threads -------------------------------------------------------------------------------------------


def test_threads_that_ask_at_the_same_moment_share_one_singleton() -> None:
    recorder = Recorder()
    threads = 16
    barrier = threading.Barrier(threads)
    registry = ResourceRegistry.of(
        Binding(Engine, make(Engine, recorder)),
        Binding(Gearbox, make(Gearbox, recorder, Engine)),
        Binding(Wheel, make(Wheel, recorder, Gearbox, Engine)),
    )

    def ask(context: ResourceContext, kind: type[Part]) -> Part:
        barrier.wait()
        return context.get(kind)

    with registry.open() as resources, ThreadPoolExecutor(threads) as pool:
        kinds = [Engine, Gearbox, Wheel, Gearbox] * (threads // 4)
        found = list(pool.map(lambda kind: ask(resources, kind), kinds))
        assert all(part is resources.get(kind) for part, kind in zip(found, kinds, strict=True))
    assert sorted(recorder.events[:3]) == ["build Engine", "build Gearbox", "build Wheel"]


def test_a_thread_that_waited_for_the_builder_takes_what_was_built() -> None:
    """The provider returns only after the other thread has looked for the singleton in vain."""
    main = threading.get_ident()
    looked = threading.Event()

    class Watched(type):
        """Looking an object up by its type hashes the type, so this sees the other thread come."""

        def __hash__(cls) -> int:
            if threading.get_ident() != main:
                looked.set()
            return super().__hash__()

    class Shared(metaclass=Watched):
        pass

    def provide(_: Resolver) -> Shared:
        future.append(pool.submit(resources.get, Shared))
        assert looked.wait(30)
        return Shared()

    future: list[Future[Shared]] = []
    registry = ResourceRegistry.of(Binding(Shared, provide))
    with registry.open() as resources, ThreadPoolExecutor(1) as pool:
        assert resources.get(Shared) is future[0].result(30)
    assert len(future) == 1


def test_opposite_halves_of_a_cycle_in_two_threads_do_not_deadlock() -> None:
    recorder = Recorder()
    barrier = threading.Barrier(2)
    registry = ResourceRegistry.of(
        Binding(Engine, make(Engine, recorder, Gearbox)), Binding(Gearbox, make(Gearbox, recorder, Engine))
    )

    def ask(kind: type[Part]) -> tuple[type[object], ...]:
        barrier.wait()
        try:
            resources.get(kind)
        except CircularDependencyError as error:
            return error.cycle
        raise AssertionError("a cycle was resolved")

    with registry.open() as resources, ThreadPoolExecutor(2) as pool:
        cycles = list(pool.map(ask, [Engine, Gearbox]))
    assert cycles == [(Engine, Gearbox, Engine), (Gearbox, Engine, Gearbox)]


def test_a_close_may_wait_for_a_thread_that_asks_for_a_resource() -> None:
    """Objects are closed outside of the lock, so that such a thread gets an error and not a deadlock."""
    outcome: list[BaseException] = []

    class Worker:
        def close(self) -> None:
            thread = threading.Thread(target=self.ask)
            thread.start()
            thread.join(timeout=30)

        def ask(self) -> None:
            try:
                resources.get(Counter)
            except ResourceError as error:
                outcome.append(error)

    registry = ResourceRegistry.of(
        Binding(Worker, lambda _: Worker(), eager=True), Binding(Counter, lambda _: Counter())
    )
    with registry.open() as resources:
        pass
    assert [type(error) for error in outcome] == [ResourceLifecycleError]


# --- snapshots -----------------------------------------------------------------------------------------


def test_snapshotable_resources_are_those_with_snapshot_and_restore() -> None:
    counter = Counter(1)
    registry = ResourceRegistry.build({Store: MemoryStore(), Counter: counter})
    assert isinstance(counter, Snapshotable)
    assert registry.snapshotable_resources() == {Counter: counter}


def test_what_passes_requests_on_is_finished_snapshotted_and_closed_like_what_is_behind_it() -> None:
    class Line(Counter):
        def __init__(self) -> None:
            self.events: list[str] = []

        def post_construct(self) -> None:
            self.events.append("finished")

        def close(self) -> None:
            self.events.append("closed")

    line, counter = Line(), PassesOn(Counter())
    registry = ResourceRegistry.of(
        Binding(PassesOn, lambda _: PassesOn(line)), Binding.instance(Counter, cast(Counter, counter))
    )
    assert registry.snapshotable_resources() == {Counter: counter}
    with registry.open() as resources:
        built = resources.get(PassesOn)
        assert line.events == ["finished"]
        assert resources.snapshotable_resources() == {PassesOn: built, Counter: counter}
    assert line.events == ["finished", "closed"]


def test_an_opened_context_also_sees_the_singletons_that_were_built() -> None:
    handed_in = Ledger(1)
    registry = ResourceRegistry.of(
        Binding(Counter, lambda _: Counter(2)),
        Binding.instance(Ledger, handed_in),
        Binding(MemoryStore, lambda _: MemoryStore()),
    )
    with registry.open() as resources:
        assert list(resources.snapshotable_resources()) == [Ledger], "a snapshot built a resource"
        counter = resources.get(Counter)
        resources.get(MemoryStore)
        assert resources.snapshotable_resources() == {Counter: counter, Ledger: handed_in}
        assert list(resources.snapshotable_resources()) == [Counter, Ledger], "not in binding order"


def test_a_resources_policy_is_the_bindings_then_the_objects_then_state() -> None:
    registry = ResourceRegistry.of(
        Binding.instance(Counter, Counter()),
        Binding.instance(Ledger, Ledger()),
        Binding.instance(MemoryStore, MemoryStore(), policy=SlicePolicy.CACHE),
    )
    with registry.open() as resources:
        for source in (registry, resources):
            assert source.policy_of(Counter) is SlicePolicy.STATE
            assert source.policy_of(Ledger) is SlicePolicy.LOG
            assert source.policy_of(MemoryStore) is SlicePolicy.CACHE
            assert source.policy_of(Recorder) is SlicePolicy.STATE
    overridden = ResourceRegistry.of(Binding.instance(Ledger, Ledger(), policy=SlicePolicy.STATE))
    assert overridden.policy_of(Ledger) is SlicePolicy.STATE


def test_the_policy_of_an_object_bound_by_a_protocol_is_its_own() -> None:
    """Before it is built only the type can be asked; afterwards the object decides."""
    registry = ResourceRegistry.of(Binding(Counter, lambda _: Ledger()))
    with registry.open() as resources:
        assert resources.policy_of(Counter) is SlicePolicy.STATE
        resources.get(Counter)
        assert resources.policy_of(Counter) is SlicePolicy.LOG
