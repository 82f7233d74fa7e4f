"""What a tool returns reaches the model, as text, a picture or a file; nothing is dropped in silence."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pydantic
import pytest

from treenail import Agent, ToolResult, tool
from treenail.conversation import ImagePart
from treenail.log.sqlite import SqliteLog
from treenail.providers import ModelRequest
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.state import Session
from treenail.tools import MAX_COLLECTED, Tool
from treenail.turns import MAX_KEPT_CHARS, MAX_SHOWN_CHARS, TurnState
from treenail.workspace import Filesystem, InMemoryFilesystem
from treenail.workspace.host import HostFilesystem

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(32))
BINARY = bytes(range(256))


@dataclass(frozen=True)
class Point:
    x: int
    label: str
    more: dict[str, Any] = field(default_factory=dict)


class Model(pydantic.BaseModel):
    size: int
    names: list[str]


class Plain:
    """An object without any text of its own."""


class Marked(str):
    """Text of a class of its own, as libraries have it."""

    __slots__ = ()


class Spoken:
    def __str__(self) -> str:
        return "spoken for"


def told(returned: Any, *, effects: Any = "workspace", workspace: Any = None) -> Any:
    """Run a tool that returns this, and return the message that the model is told by."""

    @tool(effects=effects)
    def give() -> Any:
        """Give."""
        return returned

    return ran(give, workspace=workspace)


def ran(given: Tool[Any, Any], **more: Any) -> Any:
    provider = ScriptedProvider([Answer(calls=[(given.name, {})]), "done"])
    run = Agent("giver", tools=[given]).run("go", provider=provider, **more)
    assert run.state is TurnState.COMPLETED
    (message,) = [each for each in run.messages if each.role == "tool"]
    run.close()
    return message


# --- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ("as it is", "as it is"),
        (Marked("safe"), "safe"),
        (ToolResult(Marked("safe")), "safe"),
        (ToolResult.ok(Marked("safe")), "safe"),
        (None, "OK"),
        (Point(1, "é", {"at": (1, 2)}), '{"x": 1, "label": "é", "more": {"at": [1, 2]}}'),
        (Model(size=2, names=["a"]), '{"size": 2, "names": ["a"]}'),
        ([Model(size=2, names=[])], '[{"size": 2, "names": []}]'),
        (MappingProxyType({"a": MappingProxyType({"b": 1})}), '{"a": {"b": 1}}'),
        (OrderedDict(a=1), '{"a": 1}'),
        ({"seen": Spoken()}, '{"seen": "spoken for"}'),
        (Spoken(), "spoken for"),
        (b"plain text", "plain text"),
        (bytearray("größer".encode()), "größer"),
        (range(3), "[0, 1, 2]"),
        (0, "0"),
        (False, "false"),
        ("", ""),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_what_a_tool_returns_is_what_the_model_reads(returned: Any, text: str) -> None:
    message = told(returned)
    assert (message.content, message.is_error) == (text, False)


def test_what_an_async_tool_leaves_to_be_awaited_is_awaited() -> None:
    async def later() -> str:
        return "at last"

    @tool(effects="none")
    async def give() -> Any:
        """Give."""
        return later()

    assert ran(give).content == "at last"


@pytest.mark.parametrize(
    "returned", [Plain(), {"inside": Plain()}, ToolResult.ok(Plain())], ids=["bare", "inside", "result"]
)
def test_a_value_that_cannot_be_shown_is_said_to_be_one(returned: Any) -> None:
    """The call stands, for it may have acted; the model and the author read what to do about it."""
    message = told(returned)
    assert not message.is_error
    assert "Plain" in message.content
    assert "cannot be shown" in message.content
    assert "render()" in message.content


def test_a_value_that_refers_to_itself_is_said_to_be_one() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert "cannot be shown" in told(endless).content


def test_a_result_with_words_of_its_own_speaks_by_them() -> None:
    assert told(ToolResult.ok(Plain(), message="two were found")).content == "two were found"


# --- bytes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (PNG, "image/png"),
        (b"\xff\xd8\xff\xe0" + BINARY, "image/jpeg"),
        (b"GIF89a" + BINARY, "image/gif"),
        (b"RIFF\x00\x00\x00\x00WEBP" + BINARY, "image/webp"),
    ],
    ids=["png", "jpeg", "gif", "webp"],
)
def test_bytes_of_a_picture_become_a_picture_in_the_message(data: bytes, media_type: str) -> None:
    """Also of a tool without effects, and without a workspace."""
    message = told(data, effects="none")
    assert message.parts == (ImagePart(media_type, data),)
    assert media_type in message.content


def test_several_pictures_are_several_parts() -> None:
    assert told([PNG, PNG + b"2"]).parts == (ImagePart("image/png", PNG), ImagePart("image/png", PNG + b"2"))


@pytest.mark.parametrize("kind", ["memory", "host"])
def test_other_bytes_become_a_file_in_the_workspace(kind: str, tmp_path: Path) -> None:
    files: Filesystem = InMemoryFilesystem() if kind == "memory" else HostFilesystem(tmp_path)
    message = told(BINARY, workspace=files)
    (name,) = [each.path for each in files.glob("tool-results/*")]
    assert files.read_bytes(name).content == BINARY
    assert name in message.content
    assert "256 bytes" in message.content
    assert message.parts == ()


def test_a_file_that_is_there_is_not_written_over() -> None:
    files = InMemoryFilesystem()
    files.write("tool-results/give-call_1_1.bin", "somebody's")
    message = told(BINARY, workspace=files)
    assert files.read("tool-results/give-call_1_1.bin").content == "somebody's"
    assert "tool-results/give-call_1_1-2.bin" in message.content
    assert files.read_bytes("tool-results/give-call_1_1-2.bin").content == BINARY


def test_the_file_is_part_of_the_call_and_goes_when_the_call_is_undone() -> None:
    files = InMemoryFilesystem()

    @tool(effects="workspace")
    def give() -> ToolResult[bytes]:
        """Give."""
        return ToolResult("broken", value=BINARY, success=False)

    assert ran(give, workspace=files).content == "broken"
    assert list(files.glob("**/*")) == []


def test_bytes_without_a_place_are_said_to_be_lost() -> None:
    """A tool without effects may not write a file."""
    message = told(BINARY, effects="none")
    assert "256 bytes" in message.content
    assert "cannot be shown" in message.content
    assert 'effects="workspace"' in message.content


def test_a_value_for_the_program_only_is_neither_shown_nor_kept() -> None:
    files = InMemoryFilesystem()
    given = ToolResult("kept back", value=BINARY, exclude_value_from_context=True)
    assert told(given, workspace=files).content == "kept back"
    assert list(files.glob("**/*")) == []


# --- generators ----------------------------------------------------------------------------------------


@tool(effects="workspace")
def counts(*, context: Any) -> Iterator[int]:
    """Count."""
    yield 1
    context.filesystem.write("between.txt", "written while it yields")
    yield 2


@tool(effects="workspace")
async def counts_later(*, context: Any) -> AsyncIterator[int]:
    """Count."""
    yield 1
    context.filesystem.write("between.txt", "written while it yields")
    yield 2


@pytest.mark.parametrize("given", [counts, counts_later], ids=["sync", "async"])
def test_a_generator_is_collected_as_part_of_its_call(given: Tool[Any, Any]) -> None:
    files = InMemoryFilesystem()
    assert ran(given, workspace=files).content == "[1, 2]"
    assert files.exists("between.txt")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_generator_that_fails_midway_leaves_nothing(kind: str) -> None:
    files = InMemoryFilesystem()

    @tool(effects="workspace")
    def breaks(*, context: Any) -> Iterator[int]:
        """Break."""
        context.filesystem.write("a.txt", "a")
        yield 1
        raise ValueError("no more")

    @tool(effects="workspace")
    async def breaks_later(*, context: Any) -> AsyncIterator[int]:
        """Break."""
        context.filesystem.write("a.txt", "a")
        yield 1
        raise ValueError("no more")

    message = ran(breaks if kind == "sync" else breaks_later, workspace=files)
    assert message.is_error
    assert "no more" in message.content
    assert list(files.glob("**/*")) == []


def test_an_endless_generator_is_a_failed_call() -> None:
    @tool(effects="none")
    def endless() -> Iterator[int]:
        """Go on."""
        while True:
            yield 0

    message = ran(endless)
    assert message.is_error
    assert f"{MAX_COLLECTED:,}" in message.content


def test_other_iterators_are_collected_too() -> None:
    assert told(map(str, [1, 2])).content == '["1", "2"]'
    assert told(ToolResult.ok(iter([1, 2]))).content == "[1, 2]"


# --- sys.exit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async", "generator", "render", "str"])
def test_a_tool_that_exits_is_a_failed_call_and_not_the_end_of_the_program(kind: str) -> None:
    """In a process of its own, and beside another call: it lives on, and the other call's result stands."""
    code = f"""
        import sys
        from treenail import Agent, tool
        from treenail.providers.scripted import Answer, ScriptedProvider

        @tool(effects="none")
        def leave_sync() -> str:
            "Leave."
            sys.exit(3)

        @tool(effects="none")
        async def leave_async() -> str:
            "Leave."
            sys.exit(3)

        @tool(effects="none")
        def leave_generator():
            "Leave."
            yield 1
            sys.exit(3)

        class Rendered:
            def render(self):
                sys.exit(3)

        class Text:
            def __str__(self):
                sys.exit(3)

        @tool(effects="none")
        def leave_render() -> Rendered:
            "Leave."
            return Rendered()

        @tool(effects="none")
        def leave_str() -> Text:
            "Leave."
            return Text()

        @tool(effects="none")
        def stay() -> str:
            "Stay."
            return "here"

        script = [Answer(calls=[("leave_{kind}", {{}}), ("stay", {{}})]), "done"]
        tools = [leave_sync, leave_async, leave_generator, leave_render, leave_str, stay]
        with Agent("leaver", tools=tools).run("go", provider=ScriptedProvider(script)) as run:
            print(run.state.value, [(m.is_error, m.content) for m in run.messages if m.role == "tool"])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("completed [(True, ")
    assert "sys.exit(3)" in done.stdout
    assert "(False, 'here')" in done.stdout


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_tool_that_waits_for_something_cancelled_is_a_failed_call(kind: str) -> None:
    """Not a cancellation of the run, nor the end of the program."""

    async def waits() -> None:
        task = asyncio.ensure_future(asyncio.sleep(60))
        await asyncio.sleep(0)
        task.cancel()
        await task

    @tool(effects="none", name="wait")
    def plain() -> None:
        """Wait."""
        asyncio.run(waits())

    @tool(effects="none", name="wait")
    async def coroutine() -> None:
        """Wait."""
        await waits()

    message = ran(plain if kind == "sync" else coroutine)
    assert (message.is_error, message.content) == (True, "wait waited for something that was cancelled")


def test_a_signal_handler_that_exits_while_a_tool_runs_ends_the_program() -> None:
    """That exit is the program's own, wherever it happens to be raised."""
    code = """
        import os, signal, sys
        from treenail import Agent, tool
        from treenail.providers.scripted import Answer, ScriptedProvider

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))

        @tool(effects="none")
        async def look() -> str:
            "Look."
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(10**9):
                pass
            return "seen"

        Agent("a", tools=[look]).run("go", provider=ScriptedProvider([Answer(calls=[("look", {})]), "done"]))
        print("alive")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, ""), done.stderr


# --- long output ---------------------------------------------------------------------------------------


WHOLE = "".join(f"line {number}\n" for number in range(20_000))


@tool(effects="none")
def talk() -> str:
    """Talk."""
    return WHOLE


def reads_on(request: ModelRequest) -> Answer:
    """Read on where the last result says."""
    last = request.items[-1].text
    start = last.rpartition("start=")[2].rpartition(")")[0]
    if not start.isdecimal():
        return Answer("all read")
    call = last.rpartition("call_id=")[2].split(",")[0].strip("\"'")
    return Answer(calls=[("read_result", {"call_id": call, "start": int(start)})])


def joined(run: Any) -> str:
    """Put the pieces that the model was shown together again, without their notes."""
    shown = [each.content for each in run.messages if each.role == "tool"]
    return "".join(each.rpartition("\n[")[0] if each.endswith("]") else each for each in shown)


def test_long_output_is_cut_for_the_model_and_can_be_read_to_its_end(tmp_path: Path) -> None:
    """In pieces, by a tool that is offered from then on; the whole is in the log."""
    offered: list[list[str]] = []

    def watching(request: ModelRequest) -> Answer:
        offered.append([each.name for each in request.tools])
        return reads_on(request)

    provider = ScriptedProvider([Answer(calls=[("talk", {})]), *[watching] * 12])
    run = Agent("talker", tools=[talk]).run("go", provider=provider, store=tmp_path / "runs.db")
    assert (run.state, run.output) == (TurnState.COMPLETED, "all read")
    results = [each.content for each in run.messages if each.role == "tool"]
    assert all(len(each) <= MAX_SHOWN_CHARS + 300 for each in results)
    assert f"{len(WHOLE):,} characters" in results[0]
    assert joined(run) == WHOLE
    assert offered[0] == ["talk", "read_result"]
    run.close()


def test_a_resumed_run_offers_to_read_on_as_well(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    broken = Answer(error=ConnectionError("gone"))
    agent = Agent("talker", tools=[talk], retry=None)
    run = agent.run("go", provider=ScriptedProvider([Answer(calls=[("talk", {})]), broken]), store=store)
    assert run.state is not TurnState.COMPLETED
    run.close()
    script = [Answer(calls=[("talk", {})]), *[reads_on] * 12]
    resumed = agent.resume(store, run.id, provider=ScriptedProvider(script))
    assert (resumed.state, resumed.output) == (TurnState.COMPLETED, "all read")
    assert joined(resumed) == WHOLE
    resumed.close()


def test_a_run_without_long_output_is_offered_nothing_more() -> None:
    offered: list[list[str]] = []

    def watching(request: ModelRequest) -> str:
        offered.append([each.name for each in request.tools])
        return "done"

    @tool(effects="none")
    def short() -> str:
        """Say little."""
        return "x" * MAX_SHOWN_CHARS

    run = Agent("a", tools=[short]).run(
        "go", provider=ScriptedProvider([Answer(calls=[("short", {})]), watching])
    )
    assert offered == [["short"]]
    assert [each.content for each in run.messages if each.role == "tool"] == ["x" * MAX_SHOWN_CHARS]
    run.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"call_id": "nobody", "start": 0}, "nobody"),
        ({"call_id": "call_1_1", "start": 10}, f"{MAX_SHOWN_CHARS}"),
        ({"call_id": "call_1_1", "start": 10**9}, f"{len(WHOLE):,}"),
    ],
)
def test_reading_on_in_the_wrong_place_says_where_to(arguments: dict[str, Any], said: str) -> None:
    script = [Answer(calls=[("talk", {})]), Answer(calls=[("read_result", arguments)]), "done"]
    run = Agent("talker", tools=[talk]).run("go", provider=ScriptedProvider(script))
    message = [each for each in run.messages if each.role == "tool"][-1]
    assert message.is_error
    assert said in message.content
    run.close()


def test_output_beyond_what_is_kept_is_said_to_be_lost(tmp_path: Path) -> None:
    """There is an end to what a log holds, and the model is told where it is."""

    @tool(effects="none")
    def floods() -> str:
        """Flood."""
        return "y" * (MAX_KEPT_CHARS + 5)

    store = tmp_path / "runs.db"
    run = Agent("a", tools=[floods]).run(
        "go", provider=ScriptedProvider([Answer(calls=[("floods", {})]), "done"]), store=store
    )
    (message,) = [each for each in run.messages if each.role == "tool"]
    assert f"the first {MAX_KEPT_CHARS:,} are kept" in message.content
    run.close()
    log = SqliteLog(store)
    with Session.open(log, run.id, read_only=True) as again:
        assert again.head > 0
    log.close()
