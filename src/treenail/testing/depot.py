"""A depot in memory, and the conformance suite of depots.

Subclass `DepotConformance` in a test module, and say how to make a depot:

    class TestMyDepot(DepotConformance):
        def make_depot(self) -> Depot:
            return MyDepot(...)
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from uuid import UUID, uuid4

import pytest

from treenail.errors import DepotError
from treenail.workspace import Depot


class MemoryDepot:
    """A depot in memory, for tests."""

    name = "memory"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.objects: dict[bytes, bytes] = {}
        """What is there, by name. A test may take something away, or damage it."""
        self.sent: list[bytes] = []
        """The names of what was put, in order, also of what was there already."""
        self._held: defaultdict[UUID, set[bytes]] = defaultdict(set)
        self._shares: defaultdict[UUID, set[UUID]] = defaultdict(set)

    def claim(self, holder: UUID, ids: Collection[bytes]) -> set[bytes]:
        """Hold objects, and return the names of those that are not there yet."""
        with self._lock:
            self._held[holder].update(ids)
            return set(ids) - self.objects.keys()

    def put(self, holder: UUID, objects: Mapping[bytes, bytes]) -> None:
        """Keep objects for a holder. One that is there already is not replaced."""
        with self._lock:
            self._held[holder].update(objects)
            self.objects = {**objects, **self.objects}
            self.sent.extend(objects)

    def get(self, ids: Collection[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Yield objects with their names. Raises `DepotError` if one is not there."""
        for each in ids:
            if each not in self.objects:
                raise DepotError(f"the object {each.hex()} is missing from the depot in memory")
            yield each, self.objects[each]

    def share(self, holder: UUID, shared: UUID) -> None:
        """Let a holder need everything that another one holds."""
        with self._lock:
            self._shares[holder].add(shared)

    def release(self, holder: UUID, *, keep: UUID | None = None) -> None:
        """Forget what a holder holds and shares, and delete what nobody else does."""
        with self._lock:
            shared = self._shares.pop(holder, set())
            if keep in shared:
                self._shares[holder] = {keep}
            others: set[UUID] = set().union(*self._shares.values())
            for each in (holder, *(shared - others)):
                self._held.pop(each, None)
            needed: set[bytes] = set().union(*self._held.values())
            self.objects = {name: each for name, each in self.objects.items() if name in needed}

    def sweep(self) -> None:
        """Do nothing: nothing is ever cut off here."""


def made(text: str) -> tuple[bytes, bytes]:
    """Return a name and a payload."""
    payload = text.encode()
    return random.Random(text).randbytes(20), payload


class DepotConformance:
    """What every depot promises."""

    def make_depot(self) -> Depot:
        """Return a depot. What is in it already must not matter."""
        raise NotImplementedError

    @pytest.fixture
    def depot(self) -> Depot:
        """The depot under test."""
        return self.make_depot()

    @pytest.fixture
    def text(self) -> str:
        """A text that no other test uses, so that depots may be shared."""
        return uuid4().hex

    def test_what_was_put_is_got(self, depot: Depot, text: str) -> None:
        """Objects come back as they were put, whatever bytes they are."""
        objects = dict(made(f"{text} {number}") for number in range(300))
        objects[made(f"{text} empty")[0]] = b""
        objects[made(f"{text} zeros")[0]] = bytes(100)
        depot.put(uuid4(), objects)
        assert dict(depot.get(objects)) == objects
        assert dict(depot.get([])) == {}

    def test_a_missing_object_is_an_error_that_names_it(self, depot: Depot, text: str) -> None:
        """Nothing is made up for an object that is not there."""
        name, payload = made(text)
        depot.put(uuid4(), {name: payload})
        missing, _ = made(f"{text} missing")
        with pytest.raises(DepotError, match=missing.hex()):
            dict(depot.get([name, missing]))

    def test_what_is_there_is_not_replaced(self, depot: Depot, text: str) -> None:
        """The name says what an object is; whoever comes second changes nothing."""
        name, payload = made(text)
        depot.put(uuid4(), {name: payload})
        depot.put(uuid4(), {name: b"something else"})
        assert dict(depot.get([name])) == {name: payload}

    def test_a_claim_says_what_is_missing(self, depot: Depot, text: str) -> None:
        """What is there need not be sent again."""
        here, there = made(f"{text} here"), made(f"{text} there")
        depot.put(uuid4(), dict([here]))
        assert depot.claim(uuid4(), [here[0], there[0]]) == {there[0]}
        assert depot.claim(uuid4(), []) == set()

    def test_what_nobody_holds_is_deleted(self, depot: Depot, text: str) -> None:
        """With its last holder, and not before; a claim holds as a put does."""
        one, two, three = uuid4(), uuid4(), uuid4()
        (first, second), payloads = zip(*(made(f"{text} {each}") for each in range(2)), strict=True)
        depot.put(one, dict(zip((first, second), payloads, strict=True)))
        depot.put(two, {first: payloads[0]})
        assert depot.claim(three, [first]) == set()
        depot.release(one)
        assert dict(depot.get([first])) == {first: payloads[0]}
        assert depot.claim(uuid4(), [second]) == {second}
        depot.release(two)
        assert dict(depot.get([first])) == {first: payloads[0]}
        depot.release(three)
        with pytest.raises(DepotError):
            dict(depot.get([first]))
        depot.release(three)

    def test_what_is_shared_stays_as_long_as_somebody_shares_it(self, depot: Depot, text: str) -> None:
        """An origin goes with its last run."""
        origin, one, two = uuid4(), uuid4(), uuid4()
        name, payload = made(text)
        depot.share(one, origin)
        depot.put(origin, {name: payload})
        depot.share(two, origin)
        depot.release(one)
        assert dict(depot.get([name])) == {name: payload}
        depot.release(two)
        with pytest.raises(DepotError):
            dict(depot.get([name]))

    def test_a_holder_can_begin_again(self, depot: Depot, text: str) -> None:
        """What it still shares stays, and all else goes."""
        old, new, run = uuid4(), uuid4(), uuid4()
        names, payloads = zip(*(made(f"{text} {each}") for each in range(3)), strict=True)
        for holder, number in ((old, 0), (new, 1), (run, 2)):
            depot.put(holder, {names[number]: payloads[number]})
        depot.share(run, old)
        depot.share(run, new)
        depot.release(run, keep=new)
        assert depot.claim(uuid4(), names) == {names[0], names[2]}
        depot.release(run)
        depot.sweep()
        assert depot.claim(uuid4(), [names[1]]) == set()

    def test_what_was_deleted_can_be_put_again(self, depot: Depot, text: str) -> None:
        """A name is not used up."""
        name, payload = made(text)
        for _ in range(3):
            holder = uuid4()
            assert depot.claim(holder, [name]) == {name}
            depot.put(holder, {name: payload})
            assert dict(depot.get([name])) == {name: payload}
            depot.release(holder)

    def test_nothing_is_deleted_that_somebody_has_been_told_is_there(self, depot: Depot, text: str) -> None:
        """Holders come and go in several threads; whoever has claimed or put an object can read it."""
        objects = dict(made(f"{text} {number}") for number in range(5))
        problems: list[BaseException] = []

        def work(seed: int) -> None:
            chance = random.Random(seed)
            try:
                for _ in range(12):
                    holder = uuid4()
                    names = chance.sample(sorted(objects), 3)
                    missing = depot.claim(holder, names)
                    depot.put(holder, {each: objects[each] for each in missing})
                    assert dict(depot.get(names)) == {each: objects[each] for each in names}
                    depot.release(holder)
            except BaseException as error:  # noqa: BLE001  # raised in the test's own thread
                problems.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if problems:
            raise problems[0]
