"""A read-only view can be attacked from every side and the session stays as it is."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pydantic
import pytest
from state_kit import Add, Box, Note, Page, Said, Seen, Total, equip

from treenail.errors import ReadOnlyError, UsageError
from treenail.log import Log
from treenail.state import Append, InProcessDispatcher, Session, SessionView, Slice


@dataclass(frozen=True)
class Frozen:
    """Frozen outside, soft inside."""

    items: list[int] = field(default_factory=list)
    by_name: dict[str, list[int]] = field(default_factory=dict)
    anything: object = None
    proxy: types.MappingProxyType[str, int] = field(default_factory=lambda: types.MappingProxyType({"a": 1}))


class Leaf(pydantic.BaseModel):
    tags: set[str] = set()


class Tree(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    leaf: Leaf = Leaf()
    leaves: list[Leaf] = []


def filled(log: Log) -> Session:
    session = equip(Session(log=log))
    session.dispatch_all(
        [
            Note("a"),
            Add(1),
            Box([1]),
            Page(title="t", lines=["x"]),
            Frozen([1], {"a": [1]}, {"deep": [[1]]}),
            Tree(leaf=Leaf(tags={"a"}), leaves=[Leaf()], extra=[1]),
        ]
    )
    return session


def content(session: Session) -> str:
    """Everything that a session holds, as text."""
    return repr(
        [
            (kind, items)
            for kind, items in session.snapshot(include_all=True).slices.items()
            for items in [list(items)]
        ]
    )


def spoil_items(read: Callable[[type], tuple[Any, ...]]) -> None:
    for box in read(Box):
        box.things.append(99)
    for page in read(Page):
        page.title = "spoiled"
        page.lines.clear()
    for frozen in read(Frozen):
        frozen.items.append(99)
        frozen.by_name["a"].append(99)
        frozen.by_name["b"] = []
        frozen.anything["deep"][0].append(99)
        with pytest.raises(TypeError):
            frozen.proxy["a"] = 2
    for tree in read(Tree):
        tree.leaf.tags.add("spoiled")
        tree.leaves.append(Leaf())
        tree.extra.append(99)


READERS: dict[str, Callable[[Any, type], tuple[Any, ...]]] = {
    "all": lambda view, kind: view[kind].all(),
    "latest": lambda view, kind: (view[kind].latest(),),
    "where": lambda view, kind: view[kind].where(lambda item: True),
    "predicate": lambda view, kind: collected(lambda keep: view[kind].where(keep)),
    "iteration": lambda view, kind: tuple(view[kind]),
    "select_all": lambda view, kind: view.select_all(kind),
    "query": lambda view, kind: view.query(kind).all(),
    "slice": lambda view, kind: view[kind].view().all(),
    "slice iteration": lambda view, kind: tuple(view[kind].view()),
    "slice index": lambda view, kind: (view[kind].view()[0],),
    "slice range": lambda view, kind: view[kind].view()[0:9],
    "slice reversed": lambda view, kind: tuple(reversed(view[kind].view())),
    "slice sum": lambda view, kind: view[kind].view().__add__(()),
    "slice find": lambda view, kind: collected(lambda keep: view[kind].view().find(keep, 1)),
    "snapshot": lambda view, kind: view.snapshot(include_all=True).slices[kind],
    "snapshot items": lambda view, kind: dict(view.snapshot(include_all=True).slices.items())[kind],
}


def collected(reader: Callable[[Callable[[Any], bool]], object]) -> tuple[Any, ...]:
    found: list[Any] = []

    def keep(item: Any) -> bool:
        found.append(item)
        return True

    reader(keep)
    return tuple(found)


@pytest.mark.parametrize("name", READERS)
def test_items_that_were_read_can_be_spoiled_without_harm(log: Log, name: str) -> None:
    session = filled(log)
    before = content(session)
    for view in (session.read_only_view(), session):
        spoil_items(lambda kind, view=view: READERS[name](view, kind))  # type: ignore[misc]  # a default binds
    assert content(session) == before
    session.close()
    assert content(equip(Session.open(log, session.session_id))) == before


def test_what_observers_are_given_can_be_spoiled_without_harm(log: Log) -> None:
    session = filled(log)
    session.observe(Box, lambda old, new: [box.things.append(99) for box in (*old, *new)])
    session.dispatch(Box([2]))
    assert session[Box].all() == (Box([1]), Box([2]))


@pytest.mark.parametrize("is_in_transaction", [False, True])
def test_what_subscribers_are_told_can_be_spoiled_without_harm_to_what_is_kept(
    log: Log, is_in_transaction: bool
) -> None:
    """It was in the log before they heard of it: neither it nor a slice nor a new process follows."""
    bus = InProcessDispatcher()
    session = Session(log=log, bus=bus)
    told: list[Frozen] = []

    def spoil(event: Frozen) -> None:
        told.append(event)
        event.items.append(99)
        event.by_name["a"].append(99)

    bus.subscribe(Frozen, spoil)
    if is_in_transaction:
        with session.transaction() as inside:
            inside.dispatch(Frozen([1], {"a": [1]}))
    else:
        session.dispatch(Frozen([1], {"a": [1]}))
    session.dispatch(Frozen([2], {"a": [2]}))
    kept = (Frozen([1], {"a": [1]}), Frozen([2], {"a": [2]}))
    assert len(told) == 2
    assert session[Frozen].all() == kept
    assert tuple(event for _, event in session.events()) == kept
    session.close()
    assert Session.open(log, session.session_id)[Frozen].all() == kept


def test_what_a_reducer_sees_through_its_context_can_be_spoiled_without_harm(log: Log) -> None:
    views: list[Any] = []

    def attack(slice_: Any, event: Note, *, context: Any) -> Append[Said]:
        views.append(context.session)
        spoil_items(lambda kind: context.session[kind].all())
        spoil_items(lambda kind: tuple(context.session[kind].view()))
        for name in ("dispatch", "mutate", "rollback", "install", "begin", "transaction"):
            with pytest.raises(ReadOnlyError):
                getattr(context.session, name)
        for name in ("seed", "append", "clear", "register", "dispatch"):
            with pytest.raises(ReadOnlyError):
                getattr(context.session[Note], name)
        with pytest.raises(UsageError, match="no snapshots"):
            context.session.snapshot()
        return Append(Said(event.text))

    session = filled(log)
    session[Said].register(Note, attack)
    before = {kind: repr(session[kind].all()) for kind in (Box, Page, Frozen, Tree, Total, Seen)}
    result = session.dispatch(Note("b"))
    result.raise_if_errors()
    assert {kind: repr(session[kind].all()) for kind in before} == before
    spoil_items(lambda kind: views[0][kind].all())
    assert {kind: repr(session[kind].all()) for kind in before} == before


CHANGES: dict[str, Callable[[Any], object]] = {
    "dispatch": lambda view: view.dispatch(Note("x")),
    "broadcast": lambda view: view.broadcast(Note("x")),
    "dispatch_all": lambda view: view.dispatch_all([Note("x")]),
    "mutate": lambda view: view.mutate(Note).seed(Note("x")),
    "seed": lambda view: view[Note].seed(Note("x")),
    "append": lambda view: view[Note].append(Note("x")),
    "clear": lambda view: view[Note].clear(),
    "register": lambda view: view[Note].register(Note, lambda slice_, event: ()),
    "slice dispatch": lambda view: view[Note].dispatch(Note("x")),
    "query": lambda view: view.query(Note).seed(Note("x")),
    "install": lambda view: view.install(Note),
    "observe": lambda view: view.observe(Note, print),
    "rollback": lambda view: view.rollback(view.snapshot()),
    "restore": lambda view: view.restore(view.snapshot()),
    "reset": lambda view: view.reset(),
    "drop_caches": lambda view: view.drop_caches(),
    "prune": lambda view: view.prune(keep_last=0),
    "begin": lambda view: view.begin(),
    "transaction": lambda view: view.transaction(),
    "clone": lambda view: view.clone(),
    "fork": lambda view: view.fork(),
    "close": lambda view: view.close(),
    "setting": lambda view: setattr(view, "session_id", None),
    "replacing": lambda view: setattr(view, "_read", None),
    "deleting": lambda view: delattr(view, "tags"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_everything_that_changes_a_session_is_refused_by_its_view(name: str) -> None:
    session = Session()
    session.dispatch(Note("a"))
    with pytest.raises(ReadOnlyError, match="read-only"):
        CHANGES[name](session.read_only_view())
    assert session[Note].all() == (Note("a"),)
    assert session.head == 1


def test_tags_and_slices_themselves_cannot_be_changed() -> None:
    session = Session(tags={"a": "b"})
    session.dispatch(Note("a"))
    view = session.read_only_view()
    with pytest.raises(TypeError):
        view.tags["a"] = "c"  # type: ignore[index]  # that is the attack
    slice_: Slice[Note] = view[Note].view()
    longer = slice_.append(Note("b"))
    assert (len(slice_), len(longer)) == (1, 2)
    with pytest.raises(TypeError):
        slice_[0] = Note("x")  # type: ignore[index]  # that is the attack
    assert session[Note].all() == (Note("a"),)
    with pytest.raises(AttributeError, match="no 'nonsense'"):
        view.nonsense  # the access is the point


def test_a_view_shows_what_the_session_becomes() -> None:
    session = Session()
    view = session.read_only_view()
    assert isinstance(view, SessionView)
    assert view.read_only_view() is view
    assert view.session_id == session.session_id
    assert len(view[Note]) == 0
    session.dispatch(Note("a"))
    assert view[Note].all() == (Note("a"),)


def test_a_session_opened_for_reading_refuses_every_change(log: Log) -> None:
    with Session(log=log) as session:
        session.dispatch(Note("a"))
        reader = Session.open(log, session.session_id, read_only=True)
        snapshot = reader.snapshot()
        for attempt in (
            lambda: reader.dispatch(Note("x")),
            lambda: reader[Note].seed(Note("x")),
            lambda: reader[Note].clear(),
            lambda: reader.begin(),
            lambda: reader.prune(keep_last=0),
            lambda: reader.reset(),
        ):
            with pytest.raises(ReadOnlyError, match="opened for reading"):
                attempt()
        reader.rollback(snapshot)
        assert reader[Note].all() == session[Note].all() == (Note("a"),)
        reader.close()
