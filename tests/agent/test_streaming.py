"""A run can be watched while it runs, joined late without a gap, answered, cancelled and waited for."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from uuid import UUID, uuid4

import anyio
import pytest

from treenail import Agent, TurnState, tool
from treenail.agent import RunEvent, RunHandle, follow
from treenail.conversation import InnerMessage, ProviderUsage
from treenail.errors import LeaseHeldError, UsageError
from treenail.providers import TextDelta
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.tools import PermissionMode, Permissions, ToolHeld, ToolInvoked, ToolStarted
from treenail.turns import TurnEnded, TurnStarted


@tool
def note(text: str, *, context) -> str:
    """Write a note."""
    context.filesystem.write("notes.txt", text + "\n", mode="append")
    return "noted"


class Gate:
    """A tool that waits until the test lets it go on."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def wait(self, *, context) -> str:
        """Wait."""
        self.begun.set()
        while not self.go.wait(0.01):
            context.cancellation.raise_if_cancelled()
        return "waited"


AGENT = Agent("tester", tools=[note])
SCRIPT = [Answer("one\ntwo\n", [("note", {"text": "a"})]), "three\nfour\n"]
ASK = Permissions(PermissionMode.ASK)


def kinds(events: list[RunEvent]) -> list[type]:
    return [type(each.value) for each in events if not each.is_live]


def durable(events: list[RunEvent]) -> list[tuple[int, str]]:
    return [(each.seq, each.type) for each in events if not each.is_live]


def text_of(events: list[RunEvent]) -> str:
    return "".join(each.value.text for each in events if isinstance(each.value, TextDelta))


def logged(store: Path, run_id: UUID) -> list[tuple[int, str]]:
    return durable(list(follow(store, run_id, wait=False)))


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.anyio
async def test_a_stream_has_its_id_at_once_and_gives_text_calls_usage_and_the_ending(
    anyio_backend: str, tmp_path: Path
) -> None:
    store = tmp_path / "runs.db"
    async with AGENT.stream("go", provider=ScriptedProvider(SCRIPT), store=store) as run:
        assert isinstance(run.id, UUID)
        events = [each async for each in run]
        done = await run.aresult()
    assert (done.state, done.output) == (TurnState.COMPLETED, "three\nfour\n")
    assert text_of(events) == "one\ntwo\nthree\nfour\n"
    for kind in (TurnStarted, InnerMessage, ToolStarted, ToolInvoked, ProviderUsage):
        assert kind in kinds(events)
    assert kinds(events)[-1] is TurnEnded
    assert durable(events) == logged(store, run.id)
    seqs = [each.seq for each in events]
    assert seqs == sorted(seqs)


def test_a_stream_works_without_an_event_loop() -> None:
    with AGENT.stream("go", provider=ScriptedProvider(SCRIPT)) as run:
        events = list(run)
        assert run.result().output == "three\nfour\n"
    assert text_of(events) == "one\ntwo\nthree\nfour\n"


def test_text_comes_before_its_message_and_is_not_repeated_after_it() -> None:
    with AGENT.stream("go", provider=ScriptedProvider(SCRIPT)) as run:
        events = list(run)
    said = ""
    for each in events:
        if isinstance(each.value, TextDelta):
            said += each.value.text
        elif isinstance(each.value, InnerMessage) and each.value.role == "assistant":
            assert each.value.content == said
            said = ""
    assert said == ""


def test_a_reader_that_joins_late_misses_nothing(tmp_path: Path) -> None:
    """Whichever number it continues behind, it gets what the others got after that."""
    gate, store = Gate(), tmp_path / "runs.db"
    agent = Agent("tester", tools=[note, gate.wait])
    script = ScriptedProvider([*SCRIPT[:1], Answer("", [("wait", {})]), "end"])
    handle = agent.start("go", provider=script, store=store)
    assert gate.begun.wait(60)
    readers = [iter(handle.events(after=after)) for after in (0, 3, 6)]
    firsts = [next(each) for each in readers]
    gate.go.set()
    whole = logged_when_done(handle, store)
    for first, reader, after in zip(firsts, readers, (0, 3, 6), strict=True):
        assert durable([first, *reader]) == [each for each in whole if each[0] > after]


def logged_when_done(handle: RunHandle[str], store: Path) -> list[tuple[int, str]]:
    assert handle.result(60).state is TurnState.COMPLETED
    return logged(store, handle.id)


class Dripping(ScriptedProvider):
    """Says one line, and waits before the next one."""

    def __init__(self) -> None:
        super().__init__(["first\nsecond\n"])
        self.said, self.go = threading.Event(), threading.Event()

    async def stream(self, request):
        async for each in super().stream(request):
            yield each
            if isinstance(each, TextDelta) and each.text == "first\n":
                self.said.set()
                await anyio.to_thread.run_sync(self.go.wait)


def test_who_joins_in_the_middle_of_an_answer_gets_its_beginning() -> None:
    model = Dripping()
    handle = AGENT.start("go", provider=model)
    assert model.said.wait(60)
    reader = iter(handle)
    seen = [next(reader)]
    while not isinstance(seen[-1].value, TextDelta):
        seen.append(next(reader))
    model.go.set()
    seen += reader
    assert text_of(seen) == "first\nsecond\n"


OTHER = """
import sys
from treenail.agent import follow
for event in follow(sys.argv[1], sys.argv[2], after=int(sys.argv[3])):
    print(event.seq, event.type, flush=True)
"""


def test_another_process_joins_by_number(tmp_path: Path) -> None:
    gate, store = Gate(), tmp_path / "runs.db"
    agent = Agent("tester", tools=[note, gate.wait])
    script = ScriptedProvider([*SCRIPT[:1], Answer("", [("wait", {})]), "end"])
    handle = agent.start("go", provider=script, store=store)
    assert gate.begun.wait(60)
    command = [sys.executable, "-c", OTHER, str(store), str(handle.id), "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        first = other.stdout.readline()
        gate.go.set()
        seen = [first, *other.stdout]
    assert other.returncode == 0
    whole = logged_when_done(handle, store)
    assert [tuple(each.split()) for each in seen] == [(str(seq), name) for seq, name in whole if seq > 3]


@pytest.mark.anyio
async def test_following_works_inside_an_event_loop(anyio_backend: str, tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    AGENT_RUN = await AGENT.arun("go", provider=ScriptedProvider(SCRIPT), store=store)
    AGENT_RUN.close()
    seen = [each async for each in follow(store, AGENT_RUN.id, after=2)]
    assert durable(seen) == [each for each in logged(store, AGENT_RUN.id) if each[0] > 2]
    assert [each async for each in follow(store, AGENT_RUN.id, after=seen[-1].seq)] == []


# --- questions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("approved", [True, False])
def test_a_held_call_is_answered_in_the_loop_over_the_events(approved: bool, tmp_path: Path) -> None:
    with AGENT.stream("go", provider=ScriptedProvider(SCRIPT), workspace=tmp_path, permissions=ASK) as run:
        for event in run:
            if isinstance(event.value, ToolHeld):
                run.answer(event.value.call_id, approved=approved, by="tester")
        assert run.result().output == "three\nfour\n"
    assert (tmp_path / "notes.txt").exists() is approved


@pytest.mark.anyio
async def test_a_held_run_ends_its_events_and_continues_with_its_answer(anyio_backend: str) -> None:
    """Its files in memory are still there, and so are its events."""
    async with AGENT.stream("go", provider=ScriptedProvider(SCRIPT), permissions=ASK) as run:
        first = [each async for each in run]
        assert (await run.aresult()).state is TurnState.HELD
        run.answer(approved=True)
        rest = [each async for each in run.events(after=first[-1].seq)]
        assert (await run.aresult()).output == "three\nfour\n"
    assert ToolInvoked in kinds(rest) and kinds(rest)[-1] is TurnEnded


def test_an_answer_to_nothing_is_refused() -> None:
    with AGENT.stream("go", provider=ScriptedProvider(SCRIPT)) as run:
        run.result()
        with pytest.raises(UsageError, match="these wait: none"):
            run.answer(approved=True)


# --- cancelling --------------------------------------------------------------------------------------


def test_a_cancelled_run_ends_in_the_log_and_can_be_resumed(tmp_path: Path) -> None:
    gate, store = Gate(), tmp_path / "runs.db"
    agent = Agent("tester", tools=[gate.wait])
    script = ScriptedProvider([Answer("", [("wait", {})]), "end"])
    handle = agent.start("go", provider=script, store=store)
    assert gate.begun.wait(60)
    handle.cancel()
    assert handle.result(60).state is TurnState.INTERRUPTED
    gate.go.set()
    with agent.resume(store, handle.id, provider=script) as run:
        assert run.output == "end"


@pytest.mark.anyio
async def test_leaving_the_block_early_interrupts_the_run(anyio_backend: str, tmp_path: Path) -> None:
    gate, store = Gate(), tmp_path / "runs.db"
    agent = Agent("tester", tools=[gate.wait])
    script = ScriptedProvider([Answer("", [("wait", {})]), "end"])
    async with agent.stream("go", provider=script, store=store) as run:
        async for event in run:
            if isinstance(event.value, ToolStarted):
                break
    assert [name for _, name in logged(store, run.id)][-1] == "TurnEnded"


def test_what_keeps_a_run_from_starting_is_raised_at_once() -> None:
    with pytest.raises(UsageError, match="provider must be"):
        AGENT.start("go", provider=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the task must be text"):
        AGENT.start(3, provider=ScriptedProvider([]))  # type: ignore[arg-type]


# --- keys --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["order 17", uuid4(), str(uuid4())], ids=["text", "uuid", "uuid text"])
def test_the_same_key_is_the_same_run(key: UUID | str, tmp_path: Path) -> None:
    store, asked = tmp_path / "runs.db", []

    def answer(request) -> str:
        asked.append(1)
        return "done"

    runs = [AGENT.run("go", provider=ScriptedProvider([answer]), store=store, key=key) for _ in range(1)]
    runs[0].close()
    with AGENT.run("go", provider=ScriptedProvider([answer]), store=store, key=key) as again:
        assert (again.id, again.output) == (runs[0].id, "done")
    assert (
        AGENT.start("go", provider=ScriptedProvider([answer]), store=store, key=key).result().output == "done"
    )
    assert asked == [1]


def test_a_key_with_another_task_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    AGENT.run("go", provider=ScriptedProvider(["done"]), store=store, key="k").close()
    with pytest.raises(UsageError, match="the key 'k' belongs to another task, 'go'"):
        AGENT.run("stay", provider=ScriptedProvider(["done"]), store=store, key="k")
    with pytest.raises(UsageError, match="a key needs a store"):
        AGENT.run("go", provider=ScriptedProvider(["done"]), key="k")


def test_starting_a_run_that_is_under_way_gives_its_handle(tmp_path: Path) -> None:
    gate, store = Gate(), tmp_path / "runs.db"
    agent = Agent("tester", tools=[gate.wait])
    script = ScriptedProvider([Answer("", [("wait", {})]), "end"])
    first = agent.start("go", provider=script, store=store, key="k")
    assert gate.begun.wait(60)
    assert agent.start("go", provider=script, store=str(store), key="k") is first
    with pytest.raises(UsageError, match="belongs to another task"):
        agent.start("stay", provider=script, store=store, key="k")
    with pytest.raises(LeaseHeldError):
        agent.run("go", provider=script, store=store, key="k")
    gate.go.set()
    assert first.result(60).output == "end"


def test_an_event_is_plain_data_for_a_wire(tmp_path: Path) -> None:
    with AGENT.stream("go", provider=ScriptedProvider(SCRIPT), workspace=tmp_path) as run:
        events = list(run)
    for each in events:
        data = json.loads(json.dumps(each.to_data()))
        assert (data["seq"], data["type"], data["is_live"]) == (each.seq, each.type, each.is_live)
    assert json.loads(json.dumps(events[-1].to_data()))["data"]["state"] == "completed"
