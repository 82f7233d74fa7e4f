"""The vendor's loop during one turn: how each model call is made, and what happens in between.

See `treenail.providers.claude_agent` for the theory of operation.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import anyio.to_thread
from anyio.abc import TaskGroup

from treenail.clock import new_id
from treenail.conversation import ReplayItem
from treenail.errors import ModelCallError, ToolError
from treenail.providers.answer import Collector
from treenail.providers.anthropic_answer import AnthropicAnswer
from treenail.providers.base import ModelEvent, ModelRequest, Stopped, TextDelta, ToolCallRequested
from treenail.providers.claude_agent.calls import Calls, PendingCall
from treenail.providers.claude_agent.connection import Connection, connect
from treenail.providers.claude_agent.environment import config_dir_in
from treenail.providers.claude_agent.messages import CONTINUE, news, since_newest_answer, whole_conversation
from treenail.providers.claude_agent.native import check, native_tool, perform
from treenail.providers.claude_agent.offer import PREFIX, Offer
from treenail.providers.claude_agent.settings import NAME, Settings
from treenail.providers.claude_agent.transcripts import remembers
from treenail.providers.errors import Facts
from treenail.providers.vendor import CUT_SHORT, ask_egress, cost_nothing
from treenail.providers.vendor_loop import VendorSeat
from treenail.tools import Tool, ToolCall, ToolResult


class ClaudeAgentRun:
    """The vendor's loop at work for one turn: a provider that keeps its conversation in the CLI.

    Without a task group it serves one model call and has no native tools, because nothing would run them.
    """

    takes_output_schema: ClassVar[bool] = True
    """A structured answer is asked for by a tool."""

    def __init__(self, settings: Settings, seat: VendorSeat, group: TaskGroup | None) -> None:
        self._settings = settings
        self._seat = seat
        self._group = group
        self._vendor_session_id = seat.vendor_session_id
        self._native = {
            name: native_tool(name, partial(self._perform, name))
            for name in settings.native
            if group is not None
        }
        self._connection: Connection | None = None
        self._known: tuple[ReplayItem, ...] = ()
        """The conversation as it was when the CLI was last asked."""
        self._calls = Calls()
        self._open: list[PendingCall] = []
        """The calls of the newest answer that are the turn's to run."""
        self._outputs: list[PendingCall] = []
        """The calls of the newest answer that are the structured answer."""

    @property
    def name(self) -> str:
        """The interface's name."""
        return NAME

    @property
    def model(self) -> str:
        """The model's name."""
        return self._settings.model

    @property
    def native_tools(self) -> Mapping[str, Tool[Any, Any]]:
        """The tools that run in the CLI, by the names that the model uses."""
        return self._native

    def output_bound(self, request: ModelRequest) -> int:
        """Say how many tokens the answer may have."""
        return self._settings.most_tokens(request)

    def estimate_usd(self, request: ModelRequest) -> float | None:
        """Say what the call will cost at most; None if the model's price is not known."""
        return self._settings.estimate_usd(request)

    # --- one model call ---

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Let the CLI ask the model once, and yield what it says."""
        ask_egress(self._settings.endpoint)
        connection = await self._ask(request)
        # Until the answer is complete: a caller that leaves early leaves the CLI in the middle of it.
        connection.is_broken = True
        collector, model = Collector(), request.model or self.model
        reading = AnthropicAnswer(model, NAME, partial(self._settings.used, model=model))
        while True:
            seen = await connection.next()
            if isinstance(seen, ModelCallError):
                if seen.status is not None and not reading.has_begun:
                    cost_nothing()
                if collector.text:
                    seen.partial, seen.phase = collector.text, "response"
                raise seen
            taken = reading.take(seen)
            if reading.is_nudged:
                # The CLI would now call the model again, unreserved.
                connection.cli.kill()
                taken += reading.take({"type": "message_stop"})
            for each in taken:
                shown = each
                if isinstance(each, ToolCallRequested):
                    shown = self._note(each.call, connection.offer, collector)
                    if isinstance(shown, TextDelta):
                        # The answer's text arrived as the arguments of a call.
                        reading.chars += len(shown.text)
                if isinstance(shown, Stopped):
                    connection.is_broken = reading.is_nudged or shown.reason not in ("end", "tools")
                    is_answer = shown.reason == "tools" and not self._open
                    yield Stopped("end", shown.said) if is_answer else shown
                    return
                if not isinstance(shown, ToolCallRequested):
                    collector.add(shown)
                yield shown
            if reading.is_cut:
                raise self._settings.failed(Facts(message=CUT_SHORT), collector.text)

    def _note(self, call: ToolCall, offer: Offer, collector: Collector) -> ModelEvent:
        """Find out whose call this is: the turn's, or the structured answer, which becomes text."""
        pending = self._calls.next("answer", call.id, skip_closed=False)
        output = offer.output_of(call)
        if output is not None:
            self._outputs.append(pending)
            return TextDelta(output)
        name = call.name.removeprefix(PREFIX)
        if name == call.name and offer.has_tool(name):
            # The CLI knows our tools by their long names only, and has refused this one.
            name = f"{name} (not by this name)"
        ours = ToolCallRequested(ToolCall(call.id, name, call.arguments))
        before = len(collector.answer().calls)
        collector.add(ours)
        kept = collector.answer().calls
        if len(kept) > before:
            self._calls.name(kept[-1].id, pending)
            self._open.append(pending)
        else:
            # The turn will not run it.
            pending.deliver(ToolResult.error("This call was not run: the answer asked for too much at once."))
        return ours

    # --- what the CLI is told ---

    async def _ask(self, request: ModelRequest) -> Connection:
        """Make the CLI call its model: with a message, or by letting it continue after its tools."""
        first = request.items[0] if request.items else None
        system = first.text if first is not None and first.role == "system" else ""
        items = tuple(each for each in request.items if each.role != "system")
        schema = None if request.output_schema is None else json.dumps(request.output_schema, sort_keys=True)
        most = self._settings.most_tokens(request)
        offer = Offer(system, tuple(request.tools), schema, request.model, most)
        extends = self._extends(items)
        connection = self._connection
        if connection is not None and (
            connection.is_broken or connection.is_gone or offer != connection.offer or not extends
        ):
            await self.aclose()
            connection = None
        if connection is not None:
            await self._go_on(connection, items[len(self._known) :])
        else:
            if self._known and not extends:
                self._vendor_session_id = None
            connection = await self._start(offer, items)
        self._known = items
        return connection

    def _extends(self, items: tuple[ReplayItem, ...]) -> bool:
        """Say whether the CLI knows everything but what came after its own newest answer."""
        if items[: len(self._known)] != self._known:
            return False
        return all(each.role != "assistant" for each in items[len(self._known) + 1 :])

    async def _go_on(self, connection: Connection, new: Sequence[ReplayItem]) -> None:
        said = "\n\n".join(each.text for each in new if each.role == "user")
        if self._open or self._outputs:
            results = [each for each in new if each.role == "tool"]
            for pending, item in zip(self._open, results, strict=False):
                # Whoever plays the turn without `deliver` has the results in the conversation all the same.
                pending.deliver(ToolResult(item.text, success=True))
            for pending in self._outputs:
                pending.deliver(ToolResult.error("The answer was not taken; see what is said about it."))
            self._open, self._outputs = [], []
            connection.hooks.continue_with(said)
            return
        await connection.wait_until_idle()
        await connection.say(said or CONTINUE, new)

    # --- the CLI's life ---

    async def _start(self, offer: Offer, items: tuple[ReplayItem, ...]) -> Connection:
        """Start a CLI, on the conversation that it has of ours if that fits, and else on a new one."""
        newest = next((each for each in reversed(items) if each.role == "assistant"), None)
        known = self._vendor_session_id
        if known is not None and newest is not None:
            place = config_dir_in(self._settings.env)
            if await anyio.to_thread.run_sync(remembers, place, known, newest):
                connection = await self._connect(offer, resume=known)
                if connection is not None:
                    told = news(items)
                    await connection.say(since_newest_answer(told), told)
                    return connection
        begun = str(new_id())
        self._seat.began(begun)
        self._vendor_session_id = begun
        connection = await self._connect(offer, session_id=begun)
        assert connection is not None
        await connection.say(whole_conversation(items), items)
        return connection

    async def _connect(self, offer: Offer, **conversation: str) -> Connection | None:
        self._open, self._outputs = [], []
        self._connection = await connect(
            self._settings,
            offer,
            self._calls,
            native=self._native,
            root=self._seat.root,
            **conversation,
        )
        if self._connection is not None and self._group is not None:
            self._connection.read_in(self._group)
        return self._connection

    async def aclose(self) -> None:
        """End the CLI in good order if it can be, and by force if not. Nothing of it is left running."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        is_whole = not connection.is_broken and all(each.delivered.is_set() for each in self._open)
        is_finished = is_whole and self._group is not None and not connection.is_gone
        if is_finished:
            for each in self._outputs:
                each.deliver(ToolResult.ok(message="The answer was taken."))
            if self._open or self._outputs:
                connection.hooks.continue_with(None)
        await connection.close(is_finished=is_finished)

    # --- what the turn says about a call ---

    async def asked(self, call: ToolCall) -> str | None:
        """Wait until the CLI wants this call to be run; see `VendorRun`."""
        pending, connection = self._calls.get(call.id), self._connection
        if pending is None or connection is None:
            return None
        await pending.asked.wait()
        if pending.is_lost:
            raise connection.lost()
        return pending.said

    async def deliver(self, call: ToolCall, result: ToolResult[Any]) -> None:
        """Tell the CLI how a call ended."""
        pending = self._calls.get(call.id)
        if pending is not None:
            pending.deliver(result)

    async def _perform(self, name: str, params: dict[str, Any], *, context: Any) -> ToolResult[str]:
        """Be the handler of a native tool."""
        pending, connection = self._calls.get(context.call_id), self._connection
        if pending is None or connection is None:
            raise ToolError(
                f"{name} was cut off with the process that ran it, and nothing that it did was kept. "
                "Call it again if it is still needed."
            )
        check(name, params, self._seat.root)
        return await perform(name, pending, connection.cli)
