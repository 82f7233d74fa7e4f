"""The connection to a running CLI: its start, its messages in both directions, and its end.

Theory of operation
-------------------
The CLI sends one stream of messages. In a turn a task reads them as they arrive, also while no answer is
awaited, because they tell which results the model has. For a single model call the caller reads them itself.

A message becomes a raw event of the answer, or the error that there will be none. When the CLI ends, that is
reported once and everything that waits for it is released.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import anyio
import claude_agent_sdk as sdk
from anyio.abc import TaskGroup

from treenail.conversation import ReplayItem
from treenail.errors import ModelCallError
from treenail.providers.claude_agent.calls import Calls
from treenail.providers.claude_agent.environment import MOST_TOKENS
from treenail.providers.claude_agent.hooks import Hooks, text_of
from treenail.providers.claude_agent.messages import with_pictures
from treenail.providers.claude_agent.offer import SERVER, Offer
from treenail.providers.claude_agent.process import Cli
from treenail.providers.claude_agent.queue import Queue
from treenail.providers.claude_agent.settings import Settings
from treenail.providers.errors import Facts
from treenail.providers.wire_formats import anthropic_images
from treenail.tools import MARKER

_CLOSE_GRACE_S = 2.0
"""How long the CLI may take to close its conversation before it is killed."""
_LAST_WORDS_S = 0.5
"""How long what an ended CLI has said is waited for."""
_CONNECTION = re.compile(r"connect|ECONN|ENOTFOUND|ETIMEDOUT|socket|network", re.IGNORECASE)


class Connection:
    """One CLI, from its start to its end."""

    def __init__(
        self,
        settings: Settings,
        offer: Offer,
        calls: Calls,
        cli: Cli,
        client: sdk.ClaudeSDKClient,
        hooks: Hooks,
    ) -> None:
        self.offer = offer
        """What its model was given."""
        self.cli = cli
        self.hooks = hooks
        self.is_broken = False
        """Whether its newest answer failed, or is not whole yet: it cannot be asked again."""
        self.is_gone = False
        """Whether it has ended."""
        self._settings = settings
        self._calls = calls
        self._client = client
        self._messages: AsyncIterator[sdk.Message] = client.receive_messages()
        self._seen: Queue[Any] = Queue()
        self._is_read_by_task = False
        self._idle = anyio.Event()
        self._blamed: tuple[str, str] = ("", "")
        """What the CLI said of a model call that failed: its code, its text."""

    # --- what it says ---

    def read_in(self, group: TaskGroup) -> None:
        """Start a task that reads the CLI's messages until it ends."""
        self._is_read_by_task = True
        group.start_soon(self._read)

    async def _read(self) -> None:
        while not self.is_gone:
            seen = await self._take_one()
            if seen is not None:
                self._seen.put(seen)

    async def next(self) -> Any:
        """Return the next event of the model's answer, or the error that there will be none."""
        while True:
            seen = await (self._seen.take() if self._is_read_by_task else self._take_one())
            if seen is not None:
                return seen

    async def _take_one(self) -> Any:
        """Read one message of the CLI; return what the one who waits for an answer has to know."""
        try:
            return self._take(await anext(self._messages))
        except StopAsyncIteration:
            return self._ended(None)
        except Exception as error:  # noqa: BLE001  # whatever it is, the CLI says nothing more
            return self._ended(error)

    def _take(self, message: sdk.Message) -> Any:
        if isinstance(message, sdk.StreamEvent):
            return message.event if message.parent_tool_use_id is None else None
        if isinstance(message, sdk.AssistantMessage):
            if message.error is not None:
                text = "".join(each.text for each in message.content if isinstance(each, sdk.TextBlock))
                self._blamed = (message.error, text)
        elif isinstance(message, sdk.UserMessage):
            if message.parent_tool_use_id is None and isinstance(message.content, list):
                for block in message.content:
                    if isinstance(block, sdk.ToolResultBlock):
                        pending = self._calls.next("result", block.tool_use_id, skip_closed=False)
                        pending.answer(text_of(block.content))
        elif isinstance(message, sdk.ResultMessage):
            self._idle.set()
            return self._failure_of(message)
        return None

    def _failure_of(self, result: sdk.ResultMessage) -> ModelCallError:
        """Say why there will be no answer, for the one who still waits for it."""
        code, text = self._blamed
        self._blamed = ("", "")
        text = text or "; ".join(result.errors or ()) or (result.result or "")
        if not result.is_error:
            return self._settings.failed(Facts(message="the vendor's loop ended without an answer"))
        if result.api_error_status is None and (code == "unknown" or _CONNECTION.search(text)):
            code = ""  # Nobody answered: the CLI's own word for that is the server's fault.
        return self._settings.failed(Facts(status=result.api_error_status, code=code, message=text))

    def _ended(self, error: Exception | None) -> ModelCallError:
        self.is_gone = True
        self._idle.set()
        self._calls.lose_all()
        return self.lost(error)

    def lost(self, error: Exception | None = None) -> ModelCallError:
        """Make the error that says that the CLI has ended."""
        why = ("the CLI ended", str(error or ""), " ".join(self.cli.errors))
        return self._settings.failed(Facts(message=": ".join(each for each in why if each)))

    # --- what it is told ---

    async def wait_until_idle(self) -> None:
        """Wait until the CLI has nothing more to say behind its last answer, and forget what it said."""
        await self._idle.wait()
        self._seen.clear()
        self._idle = anyio.Event()

    async def say(self, text: str, told: Sequence[ReplayItem]) -> None:
        """Send a message: the text that something was told in, and the pictures that belong to that."""
        pictures = [each for item in told for each in anthropic_images(item.parts)]
        said: Any = text if not pictures else with_pictures(text, pictures)
        failure: Exception
        try:
            await self._client.query(said)
        except (sdk.ClaudeSDKError, OSError) as error:
            failure = error
        else:
            return
        self.is_broken = True
        raise self.lost(failure)

    # --- its end ---

    async def close(self, *, is_finished: bool) -> None:
        """End the CLI in good order if it can be, and by force if not. Nothing of it is left running.

        One that has finished its turn is given time to write it down; any other is interrupted.
        """
        with anyio.CancelScope(shield=True):
            try:
                async with anyio.create_task_group() as group:
                    group.start_soon(self._kill_after, 2 * _CLOSE_GRACE_S)
                    if not self.is_gone:
                        await self._leave(is_finished=is_finished)
                    with suppress(Exception):
                        await self._client.disconnect()
                    group.cancel_scope.cancel()
            finally:
                self.cli.kill()
                await self.cli.wait()
                self.cli.forget()
        self.is_gone = True
        self._calls.lose_all()

    async def _leave(self, *, is_finished: bool) -> None:
        with anyio.move_on_after(_CLOSE_GRACE_S):
            if is_finished:
                await self._idle.wait()
            elif not self._idle.is_set():
                with suppress(Exception):
                    await self._client.interrupt()

    async def _kill_after(self, seconds: float) -> None:
        await anyio.sleep(seconds)
        self.cli.kill()


async def connect(
    settings: Settings,
    offer: Offer,
    calls: Calls,
    *,
    native: Collection[str],
    root: Path | None,
    **conversation: str,
) -> Connection | None:
    """Start the CLI on a conversation; None if it does not have the one that it is to resume.

    `conversation` is the `session_id` of a new one, or the one to `resume`.
    """
    hooks = Hooks(calls, native)
    cli = Cli(settings, root)
    failure: Exception
    with ExitStack() as undoing:
        undoing.callback(cli.forget)
        client = sdk.ClaudeSDKClient(_options(settings, offer, cli, hooks, native, **conversation))
        try:
            await _start(client, cli)
        except Exception as error:  # noqa: BLE001  # the SDK raises bare ones, too
            failure = error
        else:
            undoing.pop_all()
            return Connection(settings, offer, calls, cli, client, hooks)
    said = f"{failure} {' '.join(cli.errors)}"
    if "resume" in conversation and "No conversation found" in said:
        return None
    why = f"the CLI did not start ({said.strip()}); run {cli.program} by hand to see why"
    raise settings.failed(Facts(message=why))


async def _start(client: sdk.ClaudeSDKClient, cli: Cli) -> None:
    """Start the CLI and wait until it answers. Raises an error if it ends before that.

    The SDK would wait for the answer of one that has ended, and gives one that is cut off ten seconds.
    """
    is_started = False

    async def watch() -> None:
        try:
            await cli.wait_until_ended()
            await anyio.sleep(_LAST_WORDS_S)
            group.cancel_scope.cancel()
        finally:
            if not is_started:
                cli.kill()

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            await client.connect()
            is_started = True
            group.cancel_scope.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    if not is_started:
        raise sdk.ClaudeSDKError("it ended without an answer")


def _options(
    settings: Settings, offer: Offer, cli: Cli, hooks: Hooks, native: Collection[str], **conversation: Any
) -> sdk.ClaudeAgentOptions:
    """Say how the CLI is to be started: with our tools, our prompt and nothing of the machine's own."""
    thinking: Any = None
    if isinstance(settings.thinking, int):
        thinking = {"type": "enabled", "budget_tokens": settings.thinking}
    elif settings.thinking is not None:
        thinking = {"type": settings.thinking}
    most = offer.max_output_tokens
    return sdk.ClaudeAgentOptions(
        model=offer.model or settings.model,
        # The prompt may change during a conversation: a section was opened.
        system_prompt={"type": "custom", "prompt": offer.system_text, "snapshot": False},
        tools=list(native),
        mcp_servers={SERVER: {"type": "sdk", "name": SERVER, "instance": hooks.server(offer)}},
        strict_mcp_config=True,
        setting_sources=[],
        # Nothing is allowed but by the hook before each tool.
        permission_mode="dontAsk",
        hooks=hooks.matchers(),
        cwd=str(cli.cwd),
        cli_path=str(cli.launcher),
        env={**settings.env, **({} if most is None else {MOST_TOKENS: str(most)}), MARKER: cli.marker},
        include_partial_messages=True,
        verbatim_prompts=True,
        max_buffer_size=256 * 1024 * 1024,
        thinking=thinking,
        effort=settings.effort,
        stderr=cli.said,
        **conversation,
    )
