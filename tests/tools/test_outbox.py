"""What cannot be undone is sent when the call stands: at least once, in order, with stable keys."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest
from tools_kit import World, once, succeeds

from treenail.errors import LogError
from treenail.tools import Outbox, ToolCall, ToolContext, tool
from treenail.tools.events import OutboxDelivered, OutboxFailed, OutboxPut
from treenail.tools.outbox import undelivered


@tool
def send(texts: list[str], fail: bool = False, key: str | None = None, *, context: ToolContext) -> str:
    """Send some mail."""
    for text in texts:
        context.outbox.put("mail", text, key=key)
    if fail:
        raise ValueError("no")
    return "sent"


class Mailbox:
    """A receiver that can be out of order."""

    def __init__(self) -> None:
        self.got: list[tuple[str, object]] = []
        self.is_down = False

    def __call__(self, message: OutboxPut) -> None:
        if self.is_down:
            raise ConnectionError("nobody there")
        self.got.append((message.key, message.payload))

    @property
    def texts(self) -> list[object]:
        return [payload for _, payload in self.got]


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox()


def run(world: World, mailbox: Mailbox, call_id: str, face: str = "sync", **arguments: Any) -> bool:
    runner = world.runner(send, outbox=Outbox({"mail": mailbox}))
    call = ToolCall(call_id, "send", arguments)
    return (runner.execute(call) if face == "sync" else anyio.run(runner.aexecute, call)).success


@pytest.mark.parametrize("face", ["sync", "async"])
def test_messages_leave_after_the_commit_and_not_before(world: World, mailbox: Mailbox, face: str) -> None:
    """And what a failed call put is dropped."""
    world.log.before = lambda drafts: mailbox.got.append(("append", drafts[-1].type))
    assert run(world, mailbox, "c1", face, texts=["a", "b"])
    assert mailbox.texts == [
        "treenail.ToolStarted",
        "treenail.ToolInvoked",
        "a",
        "treenail.OutboxDelivered",
        "b",
        "treenail.OutboxDelivered",
    ]
    world.log.before = None
    mailbox.got.clear()
    assert not run(world, mailbox, "c2", face, texts=["c"], fail=True)
    assert (mailbox.got, undelivered(world.session)) == ([], ())
    assert len(world.session[OutboxPut].all()) == 2


def test_a_commit_that_fails_drops_them_too(world: World, mailbox: Mailbox) -> None:
    world.log.before = once(LogError("the disk is full"))
    assert not run(world, mailbox, "c1", texts=["a"])
    assert (mailbox.got, undelivered(world.session)) == ([], ())


def test_a_failed_delivery_is_recorded_and_tried_again_and_order_is_kept(
    world: World, mailbox: Mailbox
) -> None:
    """Later messages of the topic wait behind it; other topics do not."""
    mailbox.is_down = True
    assert run(world, mailbox, "c1", texts=["a"]), "the call stands"
    assert run(world, mailbox, "c2", texts=["b"])
    assert [(each.attempt, each.error) for each in world.session[OutboxFailed].all()] == [
        (1, "ConnectionError: nobody there"),
        (2, "ConnectionError: nobody there"),
    ]
    mailbox.is_down = False
    assert run(world, mailbox, "c3", texts=["c"])
    assert mailbox.texts == ["a", "b", "c"]
    assert undelivered(world.session) == ()


def test_what_a_crash_left_is_delivered_by_the_next_process(world: World, mailbox: Mailbox) -> None:
    """At least once: a delivery whose record was lost is made again, under the same key."""

    def lose(drafts: Any) -> None:
        if drafts[0].type == "treenail.OutboxDelivered":
            raise LogError("the power went out")

    world.log.before = lose
    assert run(world, mailbox, "c1", texts=["a", "b"]), "the call stands"
    world.log.before = None
    world.reopen()
    assert [each.payload for each in undelivered(world.session)] == ["a", "b"]
    assert Outbox({"mail": mailbox}).flush(world.session) == ()
    assert mailbox.texts == ["a", "a", "b"]
    assert mailbox.got[0] == mailbox.got[1]
    assert len(world.session[OutboxDelivered].all()) == 2
    Outbox({"mail": mailbox}).flush(world.session)
    assert len(mailbox.got) == 3


def test_a_topic_that_nobody_handles_waits(world: World, mailbox: Mailbox) -> None:
    @tool
    def mixed(*, context: ToolContext) -> str:
        """Send to two topics."""
        context.outbox.put("pigeon", 1)
        context.outbox.put("mail", 2)
        return "sent"

    world.runner(mixed, outbox=Outbox({"mail": mailbox})).execute(ToolCall("c1", "mixed"))
    assert mailbox.texts == [2]
    assert [each.topic for each in undelivered(world.session)] == ["pigeon"]


def test_keys_are_the_same_when_a_call_is_run_again(world: World, mailbox: Mailbox) -> None:
    """A receiver recognises what it got from an attempt before."""
    keys: list[str] = []

    @tool
    def tells(fail: bool, *, context: ToolContext) -> str:
        """Note the keys."""
        keys.append(context.outbox.put("mail", 1))
        keys.append(context.outbox.put("mail", 2, key="named"))
        if fail:
            raise ValueError("no")
        return "sent"

    runner = world.runner(tells)
    runner.execute(ToolCall("c1", "tells", {"fail": True}))
    runner.execute(ToolCall("c1", "tells", {"fail": False}))
    assert keys[:2] == keys[2:]
    assert keys[0] == f"{world.session.session_id}:c1:0"
    assert keys[1].endswith(":c1:named")


def test_a_call_id_that_is_used_again_makes_new_keys(world: World, mailbox: Mailbox) -> None:
    """Or the second message would be taken for the first, and lost."""
    for text in ("a", "b", "c"):
        assert run(world, mailbox, "call_0", texts=[text])
    assert mailbox.texts == ["a", "b", "c"]
    assert len({key for key, _ in mailbox.got}) == 3


def test_a_key_is_used_once_in_a_call(small_world: World, mailbox: Mailbox) -> None:
    assert not run(small_world, mailbox, "c1", texts=["a", "b"], key="same")
    assert "was used already" in small_world.ends()[-1].rendered_output


def test_a_payload_that_cannot_be_stored_fails_the_call(world: World, mailbox: Mailbox) -> None:
    @tool
    def odd(*, context: ToolContext) -> str:
        """Send what no log can keep."""
        context.filesystem.write("file.txt", "changed")
        context.outbox.put("mail", lambda: None)
        return "sent"

    result = world.runner(odd, outbox=Outbox({"mail": mailbox})).execute(ToolCall("c1", "odd"))
    assert not result.success
    assert "payload" in result.message
    assert (mailbox.got, world.files()) == ([], {"file.txt": "original"})


def test_a_handler_may_flush_without_delivering_twice(small_world: World) -> None:
    got: list[object] = []
    outbox = Outbox()

    def deliver(message: OutboxPut) -> None:
        got.append(message.payload)
        assert len(outbox.flush(small_world.session)) == 2 - (len(got) - 1)

    outbox.handlers = {"mail": deliver}
    runner = small_world.runner(send, outbox=outbox)
    runner.execute(ToolCall("c1", "send", {"texts": ["a", "b"]}))
    assert got == ["a", "b"]


def test_a_pruned_history_forgets_nothing_that_waits(world: World, mailbox: Mailbox) -> None:
    """The messages that are left after a prune are the ones that are found."""
    assert run(world, mailbox, "c1", texts=["a"])
    assert len(mailbox.got) == 1
    world.session.prune(keep_last=0)
    mailbox.is_down = True
    assert run(world, mailbox, "c2", texts=["b"])
    assert [each.payload for each in undelivered(world.session)] == ["b"]


def test_a_log_that_fails_while_delivering_is_only_logged(
    world: World, mailbox: Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    """The call is committed; what was not recorded as delivered waits."""

    def lose(drafts: Any) -> None:
        if drafts[0].type == "treenail.OutboxDelivered":
            raise LogError("the disk is full")

    world.log.before = lose
    with caplog.at_level(logging.WARNING, "treenail.tools"):
        assert run(world, mailbox, "c1", texts=["a"])
    assert "the disk is full" in caplog.text
    world.log.before = None
    assert world.run(succeeds, "c2").success
