"""The Claude Agent SDK: a vendor's loop in a process of its own, held at every step of ours.

Theory of operation
-------------------
The SDK starts the vendor's command line program (the CLI), which asks the model and wants to run
tools. Everything it does passes through this process, and waits here until our turn is ready:

    our turn                      the CLI
    stream()          ->          a message, or the hook behind a batch of tools is answered
                      <-          the answer, as raw events of the model's interface
    asked(call)       <-          the hook before a tool: the CLI has come to that call
    (the runner runs it, and its end is in the log)
    deliver(call)     ->          our tool: the result of its MCP call, served in this process
                                  a native one: the hook behind it is answered
    stream()          ->          the hook behind the batch is answered: the next model call

The CLI begins a tool while the model is still talking. Here it is not run before the answer is
whole and recorded, because only then does the turn ask for it. A native tool (Bash, Write ...) is
let go by the hook before it and ends with the hook behind it; in between stands a handler of ours
inside the runner's transaction. Whatever the runner refuses is denied through the hook before it.

The CLI keeps a conversation of its own, named by an id that we choose and that the log keeps. While
it lives and what we are to send extends what it knows, only the news are told. After a restart the
id is resumed, and what happened meanwhile (results of calls) is told as text. If the vendor no
longer has the conversation, or its newest answer is not ours, or ours was compacted, or another
provider has answered in it, a new one begins with the whole conversation as text.

A structured answer is asked for by a tool of ours, whose arguments are the answer. The CLI's own way
would make model calls that nobody has allowed. For the same reason it neither compacts nor retries
by itself; and where it cannot be told not to go on (an answer that reached its length limit, or that
is empty), it is killed as soon as the answer says so.

The CLI runs below the supervisor that commands run below (`holdfast.tools._supervisor`): when its
control pipe is closed, which our death does too, the CLI and all that it started are killed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import anyio
import anyio.to_thread
import claude_agent_sdk as sdk
from anyio.abc import TaskGroup
from mcp import types as mcp
from mcp.server import Server

from holdfast.clock import new_id
from holdfast.containment.costing import default_prices
from holdfast.containment.pricing import CallUsage, PriceTable, estimate_tokens, estimate_usage
from holdfast.conversation.messages import ReasoningPart
from holdfast.conversation.replay import ReplayItem
from holdfast.errors import ModelCallError, ToolError, UsageError
from holdfast.providers.base import (
    ModelEvent,
    ModelRequest,
    ReasoningBlock,
    ReasoningDelta,
    Stopped,
    StopReason,
    TextDelta,
    ToolCallRequested,
    UsageReported,
)
from holdfast.providers.collect import Collector
from holdfast.providers.errors import Facts, classify, environment_secrets, model_call_error
from holdfast.providers.translate import Wire, anthropic_images
from holdfast.providers.vendor import CUT_SHORT, Mender, ask_egress
from holdfast.providers.vendor_loop import VendorSeat
from holdfast.records import dataclass
from holdfast.state.budget import TokenUsage
from holdfast.tools._process import MARKER, command_environment, end_processes, processes_marked
from holdfast.tools.tool import Effects, Tool, ToolCall, ToolResult

T = TypeVar("T")

NAME = "claude.agent"
"""The interface's name, as it stands in the log."""

SERVER = "holdfast"
"""The name under which the CLI knows our tools: `mcp__holdfast__...`."""

NATIVE_EFFECTS: Mapping[str, Effects] = {
    "Bash": "workspace",
    "Edit": "workspace",
    "NotebookEdit": "workspace",
    "Write": "workspace",
    "Glob": "none",
    "Grep": "none",
    "Read": "none",
    "WebFetch": "none",
    "WebSearch": "none",
}
"""The vendor's own tools that can be held in a transaction, and what each does."""

CONTINUE = "Go on."
"""What the model is told when a cut-off conversation goes on and nobody said anything new."""

_PREFIX = f"mcp__{SERVER}__"
_OUTPUT_TOOL = "structured_output"
_SUPERVISOR = Path(sys.modules[command_environment.__module__].__file__ or "").with_name("_supervisor.py")
_HOOK_TIMEOUT_S = 7 * 24 * 3600
_CLOSE_GRACE_S = 2.0
"""How long the CLI may take to close its conversation before it is killed."""
_KILL_TIMEOUT_S = 15.0
_OWN_TOKENS = 2_000
"""About how much the CLI adds to each request of its own, and per native tool."""
_PATHS_OF = {"Write": "file_path", "Edit": "file_path", "NotebookEdit": "notebook_path"}
_STOPS: Mapping[str, StopReason] = {
    "end_turn": "end",
    "stop_sequence": "end",
    "pause_turn": "end",
    "tool_use": "tools",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "refused",
}

_ENDS = tuple(name for name, reason in _STOPS.items() if reason == "end")

_BASE_URL = "ANTHROPIC_BASE_URL"
_MOST_TOKENS = "CLAUDE_CODE_MAX_OUTPUT_TOKENS"
_ELSEWHERE = ("CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_FOUNDRY", "CLAUDE_CODE_USE_VERTEX")
"""Each makes the CLI call a cloud whose address it finds by itself."""

_QUIET = {
    # Each of these would make model calls, or talk to somebody, that the turn knows nothing of.
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",
    "CLAUDE_CODE_DISABLE_REFUSAL_FALLBACK": "1",
    "CLAUDE_CODE_DISABLE_REFUSAL_RETRY": "1",
    "CLAUDE_CODE_DISABLE_MODEL_ACCESS_FALLBACK": "1",
    "CLAUDE_CODE_MAX_RETRIES": "0",
    "DISABLE_AUTO_COMPACT": "1",
    "DISABLE_COMPACT": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
    # Work that outlives its call cannot be part of a transaction.
    "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
    "CLAUDE_CODE_DISABLE_CRON": "1",
    "CLAUDE_CODE_DISABLE_MCP_TASKS": "1",
    "CLAUDE_CODE_DISABLE_MCP_TASK_BACKGROUND": "1",
    # What the model is told is the prompt's business.
    "CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1",
    "CLAUDE_CODE_DISABLE_BUNDLED_SKILLS": "1",
    "CLAUDE_CODE_DISABLE_CLAUDE_MDS": "1",
    "CLAUDE_CODE_DISABLE_GIT_INSTRUCTIONS": "1",
    "ENABLE_TOOL_SEARCH": "0",
    "MAX_MCP_OUTPUT_TOKENS": "1000000",
    # Our tools have their own deadlines.
    "MCP_TIMEOUT": "60000",
    "MCP_TOOL_TIMEOUT": str(_HOOK_TIMEOUT_S * 1000),
}


class ClaudeAgent:
    """The vendor's agent loop, for one model. Usable wherever a provider is.

    In a turn it is opened as a `VendorLoop`; used as a plain provider, `stream` makes one model call
    from the conversation it is given.

    `native` names the vendor's own tools that the model may use (see `NATIVE_EFFECTS`); none by default.
    They work in the turn's workspace, which must be a directory on disk. `base_url` and `api_key` say
    where the model is, for a key or a gateway of your own; without them the CLI's own login counts.
    `config_dir` is where the CLI keeps its conversations. `env` is added to the CLI's environment,
    which is otherwise this process's without its secrets, except for those that `allow_env` names.
    """

    takes_output_schema: ClassVar[bool] = True
    """A structured answer is asked for by a tool."""

    def __init__(
        self,
        model: str,
        *,
        native: Sequence[str] = (),
        base_url: str | None = None,
        api_key: str | None = None,
        config_dir: str | Path | None = None,
        cli_path: str | Path | None = None,
        thinking: Literal["adaptive", "disabled"] | int | None = None,
        effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None,
        env: Mapping[str, str] | None = None,
        allow_env: Collection[str] = (),
        prices: PriceTable | None = None,
        max_output_tokens: int | None = None,
    ) -> None:
        if unknown := sorted(set(native) - set(NATIVE_EFFECTS)):
            raise UsageError(
                f"{', '.join(unknown)}: no native tools that can be held in a transaction; "
                f"there are {', '.join(sorted(NATIVE_EFFECTS))}"
            )
        self._model = model
        self._native = tuple(dict.fromkeys(native))
        self._cli_path = None if cli_path is None else Path(cli_path)
        self._thinking = thinking
        self._effort = effort
        self._allow_env = frozenset(allow_env)
        self._prices = prices
        self._max_output_tokens = max_output_tokens
        self._secrets = tuple(each for each in (api_key,) if each)
        given = {
            _BASE_URL: base_url,
            "ANTHROPIC_API_KEY": api_key,
            "CLAUDE_CONFIG_DIR": None if config_dir is None else str(Path(config_dir).absolute()),
            _MOST_TOKENS: None if max_output_tokens is None else str(max_output_tokens),
        }
        self._env = {
            **_QUIET,
            **{name: value for name, value in given.items() if value is not None},
            **(env or {}),
        }

    def __repr__(self) -> str:
        return f"ClaudeAgent({self._model!r}, native={list(self._native)})"

    @property
    def name(self) -> str:
        """The interface's name, as it stands in the log and on blocks of thought."""
        return NAME

    @property
    def model(self) -> str:
        """The model's name."""
        return self._model

    @property
    def native(self) -> tuple[str, ...]:
        """The vendor's own tools that the model may use."""
        return self._native

    def estimate_usd(self, request: ModelRequest) -> float | None:
        """Say what the call will cost at most; None if the model's price is not known."""
        size = sum(
            4 + estimate_tokens(item.text) + sum(estimate_tokens(call.arguments) for call in item.calls)
            for item in request.items
        )
        tools = [[tool.name, tool.description, tool.parameters_schema] for tool in request.tools]
        tokens = size + estimate_tokens(tools) + estimate_tokens(request.output_schema)
        tokens += _OWN_TOKENS * (1 + len(self._native))
        usage = estimate_usage(input_tokens=tokens, max_output_tokens=self._most(request))
        return self._price(usage, request.model)

    @asynccontextmanager
    async def open(self, seat: VendorSeat) -> AsyncIterator[ClaudeAgentRun]:
        """Make the vendor's loop ready for one turn; the CLI is started with the first model call.

        At the end of the block nothing of it is left running.
        """
        if self._native and seat.root is None:
            raise UsageError(
                f"the native tools {', '.join(self._native)} work on files of the host, and this run's "
                "workspace is not on disk; give it a directory, or make ClaudeAgent without them"
            )
        # Entered and left by hand: what is raised in the block must come out as it is, not in a group.
        group = anyio.create_task_group()
        await group.__aenter__()
        run = ClaudeAgentRun(self, seat, group)
        try:
            yield run
        finally:
            await run.aclose()
            group.cancel_scope.cancel()
            await group.__aexit__(None, None, None)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Call the model once, with the conversation told as text, and without native tools."""
        # A generator may be left for good between two events, so that no task group can stand around it.
        run = ClaudeAgentRun(self, VendorSeat(), None)
        try:
            async with aclosing(run.stream(request)) as events:
                async for each in events:
                    yield each
        finally:
            await run.aclose()

    def failed(self, facts: Facts, partial: str = "") -> ModelCallError:
        """Make the error of a failed model call; it holds no secrets."""
        return model_call_error(
            classify(facts, now=datetime.now(UTC)),
            provider=NAME,
            model=self._model,
            facts=facts,
            partial=partial,
            secrets=(*self._secrets, *environment_secrets({**os.environ, **self._env})),
        )

    def used(self, counts: Mapping[str, int], model: str) -> UsageReported:
        """Put the vendor's numbers into ours: it reports cached input next to the rest, not within it."""
        read, written, output = counts.get("read", 0), counts.get("written", 0), counts.get("output", 0)
        usage = CallUsage(
            input_tokens=counts.get("input", 0) + read + written,
            output_tokens=output,
            cached_input_tokens=read,
            cache_write_tokens=written,
            reasoning_tokens=min(counts.get("thinking", 0), output),
        )
        tokens = TokenUsage(usage.input_tokens, output, read, usage.reasoning_tokens)
        return UsageReported(tokens, self._price(usage, model), written, model=model)

    def _price(self, usage: CallUsage, model: str | None = None) -> float | None:
        table = self._prices if self._prices is not None else default_prices()
        return None if table is None else table.cost_usd(model or self._model, usage)

    def _most(self, request: ModelRequest) -> int | None:
        """Say how many tokens an answer may have: the request can ask for fewer than the agent does."""
        said = [each for each in (self._max_output_tokens, request.max_output_tokens) if each is not None]
        return min(said, default=None)

    @property
    def endpoint(self) -> str:
        """Where the CLI's model calls go; nothing if that is not known: then no shield lets them leave."""
        given = {name: self._env.get(name) or os.environ.get(name) for name in (_BASE_URL, *_ELSEWHERE)}
        if any(given[name] for name in _ELSEWHERE):
            return ""
        return given[_BASE_URL] or "https://api.anthropic.com"

    def options(self, offer: _Offer, cli: _Cli, **more: Any) -> sdk.ClaudeAgentOptions:
        """Say how the CLI is to be started: with our tools, our prompt and nothing of the machine's own."""
        thinking: Any = None
        if isinstance(self._thinking, int):
            thinking = {"type": "enabled", "budget_tokens": self._thinking}
        elif self._thinking is not None:
            thinking = {"type": self._thinking}
        most = offer.max_output_tokens
        return sdk.ClaudeAgentOptions(
            model=offer.model or self._model,
            # The prompt may change while the conversation goes on: a section was opened.
            system_prompt={"type": "custom", "prompt": offer.system_text, "snapshot": False},
            strict_mcp_config=True,
            setting_sources=[],
            # Nothing is allowed but by the hook before each tool.
            permission_mode="dontAsk",
            cwd=str(cli.cwd),
            cli_path=str(cli.launcher),
            env={**self._env, **({} if most is None else {_MOST_TOKENS: str(most)}), MARKER: cli.marker},
            include_partial_messages=True,
            verbatim_prompts=True,
            max_buffer_size=256 * 1024 * 1024,
            thinking=thinking,
            effort=self._effort,
            stderr=cli.said,
            **more,
        )

    def remembers(self, vendor_session_id: str, answer: ReplayItem) -> bool:
        """Say whether the newest answer in a conversation of the CLI's is this one.

        The CLI writes its conversations down when it gets to it: one that was killed may have missed the
        newest answer, and one that was cut off may have kept what is no answer of ours.
        """
        home = self._env.get("HOME") or os.environ.get("HOME") or "~"
        config = self._env.get("CLAUDE_CONFIG_DIR") or os.environ.get("CLAUDE_CONFIG_DIR")
        place = Path(config) if config else Path(home).expanduser() / ".claude"
        answers: dict[str, list[dict[str, Any]]] = {}
        for path in (place / "projects").glob(f"*/{vendor_session_id}.jsonl"):
            for line in path.read_text(errors="replace").splitlines():
                with suppress(ValueError, LookupError, TypeError, AttributeError):
                    entry = json.loads(line)
                    message = entry["message"]
                    if entry["type"] == "assistant" and message["model"] != "<synthetic>":
                        answers.setdefault(message["id"], []).extend(message["content"])
        if not answers:
            return False
        *_, newest = answers.values()
        if answer.calls:
            asked = {each.get("id") for each in newest if each.get("type") == "tool_use"}
            return any(each.call_id in asked for each in answer.calls)
        text = "".join(str(each.get("text", "")) for each in newest if each.get("type") == "text")
        return text == answer.text and all(each.get("type") != "tool_use" for each in newest)

    def launcher(self, directory: Path, cwd: Path) -> str:
        """Write the script that the SDK starts: it drops secrets and runs the CLI below the supervisor."""
        cli = self._cli_path or Path(sdk.__file__).parent / "_bundled" / "claude"
        if not cli.exists():
            found = shutil.which("claude")
            if found is None:
                raise UsageError(f"there is no CLI at {cli}; install claude-agent-sdk, or pass cli_path")
            cli = Path(found)
        kept = command_environment(allow=self._allow_env)
        dropped = [
            name
            for name in os.environ
            if name not in kept and name not in self._env and _IS_NAME.fullmatch(name)
        ]
        command = [sys.executable, "-I", "-S", "-X", "utf8", str(_SUPERVISOR), "3", "4", str(cli)]
        where = [str(os.getpid()), str(cwd.resolve())]
        control, status, itself, place = (
            shlex.quote(str(directory / each)) for each in ("control", "status", "claude", "")
        )
        return "\n".join(
            (
                "#!/bin/sh",
                *(f"unset {name}" for name in dropped if not name.startswith(("ANTHROPIC_", "CLAUDE_"))),
                f"exec 3<{control} 4>{status}",
                # Nobody else needs these names, and whoever is killed cannot clear up.
                f"rm -f {control} {status} {itself}; rmdir {place} 2> /dev/null",
                f'exec {shlex.join(command)} "$@" {shlex.join(where)}',
                "",
            )
        )


_IS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONNECTION = re.compile(r"connect|ECONN|ENOTFOUND|ETIMEDOUT|socket|network", re.IGNORECASE)


# --- one call of an answer ---------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Pending:
    """A call of an answer, seen from both sides."""

    asked: anyio.Event = field(default_factory=anyio.Event)
    """The CLI has come to it, or has answered it itself."""
    released: anyio.Event = field(default_factory=anyio.Event)
    """What the hook before it has to say is known."""
    denial: str | None = None
    ended: anyio.Event = field(default_factory=anyio.Event)
    """A native one has run, or was refused by the CLI."""
    succeeded: bool = False
    text: str = ""
    """What came of a native one."""
    said: str | None = None
    """What the CLI told the model about it by itself: it was never asked for."""
    delivered: anyio.Event = field(default_factory=anyio.Event)
    """Its end is in the log."""
    result: ToolResult[Any] | None = None
    is_closed: bool = False
    """The model has its result."""
    is_lost: bool = False
    """The CLI ended in the middle of it."""

    def answer(self, said: str) -> None:
        """The model has its result: ours, the native tool's, or one that the CLI made up itself."""
        self.is_closed = True
        if not self.delivered.is_set() and not self.ended.is_set():
            self.said, self.text = said, said
            self._open_all()

    def lose(self) -> None:
        """Nobody will say anything about it any more."""
        self.is_lost = self.is_lost or not self.ended.is_set()
        self._open_all()

    def _open_all(self) -> None:
        for each in (self.asked, self.released, self.ended):
            each.set()


class _Queue(Generic[T]):
    """Things that somebody waits for, one after the other."""

    def __init__(self) -> None:
        self._things: deque[T] = deque()
        self._arrived = anyio.Event()

    def put(self, thing: T) -> None:
        self._things.append(thing)
        self._arrived.set()

    async def take(self) -> T:
        while not self._things:
            self._arrived = anyio.Event()
            await self._arrived.wait()
        return self._things.popleft()

    def clear(self) -> None:
        self._things.clear()


class _Calls:
    """The calls of a turn's answers. One whose id was used before is told apart by the order of arrival."""

    def __init__(self) -> None:
        self._of: dict[str, list[_Pending]] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self._by_id: dict[str, _Pending] = {}

    def next(self, who: str, vendor_id: str, *, skip_closed: bool = True) -> _Pending:
        """Return the call that `who` sees now: everybody sees the calls of one id in the same order."""
        calls = self._of.setdefault(vendor_id, [])
        place = self._seen.get((who, vendor_id), 0)
        # Not everybody sees each call: one that was denied, say, is not called.
        while skip_closed and place < len(calls) and calls[place].is_closed:
            place += 1
        self._seen[who, vendor_id] = place + 1
        while len(calls) <= place:
            calls.append(_Pending())
        return calls[place]

    def name(self, call_id: str, pending: _Pending) -> None:
        """Note by which id the turn knows a call."""
        self._by_id[call_id] = pending

    def get(self, call_id: str) -> _Pending | None:
        return self._by_id.get(call_id)

    def all(self) -> list[_Pending]:
        return [each for calls in self._of.values() for each in calls]


# --- the process -------------------------------------------------------------------------------------


class _Cli:
    """The CLI's process: where it works, and how it is ended with everything that it started."""

    def __init__(self, agent: ClaudeAgent, root: Path | None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="holdfast-claude-"))
        self.cwd = root if root is not None else _nowhere(self.directory)
        self.errors: deque[str] = deque(maxlen=20)
        self.marker = str(new_id())
        for name in ("control", "status"):
            os.mkfifo(self.directory / name, 0o600)
        # Ours is the only writer of one and reader of the other, so that an end is seen on both sides.
        self._control: int | None = os.open(self.directory / "control", os.O_RDWR)
        self._status: int | None = os.open(self.directory / "status", os.O_RDONLY | os.O_NONBLOCK)
        self.launcher = self.directory / "claude"
        self.launcher.write_text(agent.launcher(self.directory, self.cwd))
        self.launcher.chmod(0o700)

    def said(self, line: str) -> None:
        """Keep what the CLI complains about: its last words explain its end."""
        self.errors.append(line)

    async def processes(self) -> frozenset[int]:
        """Return what runs for this CLI: itself, and whatever it started."""
        return await anyio.to_thread.run_sync(processes_marked, self.marker)

    async def end_others(self, known: frozenset[int]) -> None:
        """End what was started since: what a command leaves running would outlive its call."""
        new = await self.processes() - known
        if new:
            await anyio.to_thread.run_sync(end_processes, new)

    def kill(self) -> None:
        """End the CLI and everything below it. It has happened when `wait` returns."""
        control, self._control = self._control, None
        if control is not None:
            os.close(control)

    async def wait(self) -> None:
        """Wait until nothing of it is left."""
        if self._status is None:
            return
        with anyio.move_on_after(_KILL_TIMEOUT_S):
            while True:
                await anyio.wait_readable(self._status)
                if not os.read(self._status, 4_096):
                    return

    def forget(self) -> None:
        """Close and remove what belongs to the process."""
        self.kill()
        status, self._status = self._status, None
        if status is not None:
            os.close(status)
        shutil.rmtree(self.directory, ignore_errors=True)


def _nowhere(private: Path) -> Path:
    """Return an empty directory, the same each time: the CLI finds its conversations by where it worked."""
    place = Path(tempfile.gettempdir()) / f"holdfast-claude-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.is_symlink() or place.stat().st_uid != os.getuid():
        place = private / "empty"
        place.mkdir()
    return place


@dataclass(frozen=True, slots=True)
class _Offer:
    """What the model is given besides the conversation; if it changes, the CLI is started anew."""

    system: str
    tools: tuple[Tool[Any, Any], ...]
    schema: str | None
    model: str | None = None
    """Another model than the agent's, if the request names one."""
    max_output_tokens: int | None = None

    @property
    def system_text(self) -> str:
        if self.schema is None:
            return self.system
        return (
            f"{self.system}\n\nWhen your work is done, give your answer by calling the tool "
            f"{_PREFIX}{_OUTPUT_TOOL} once, with the answer as its arguments. Do not write it as text."
        )

    @property
    def is_wrapped(self) -> bool:
        """Whether the answer is one argument of the tool, because it is no object itself."""
        return self.schema is not None and json.loads(self.schema).get("type") != "object"

    def listed(self) -> list[mcp.Tool]:
        """Describe our tools to the CLI."""
        found = [
            _listed(each.name, each.description, dict(each.parameters_schema), free=each.effects == "none")
            for each in self.tools
        ]
        if self.schema is not None:
            schema = json.loads(self.schema)
            if self.is_wrapped:
                schema = {"type": "object", "properties": {"answer": schema}, "required": ["answer"]}
            found.append(_listed(_OUTPUT_TOOL, "Gives the answer.", schema, free=False))
        return found


def _listed(name: str, description: str, schema: dict[str, Any], *, free: bool) -> mcp.Tool:
    data = {
        "name": name,
        "description": description,
        "inputSchema": schema,
        "annotations": {"readOnlyHint": free},
        "_meta": {"anthropic/maxResultSizeChars": 500_000},
    }
    return mcp.Tool.model_validate(data)


def _content(text: str, *, success: bool) -> mcp.CallToolResult:
    # A text cannot be empty on the wire.
    block = {"type": "text", "text": text or "(empty)"}
    return mcp.CallToolResult.model_validate({"content": [block], "isError": not success})


# --- one turn ----------------------------------------------------------------------------------------


class ClaudeAgentRun:
    """The vendor's loop at work for one turn: a provider that keeps its conversation in the CLI."""

    takes_output_schema: ClassVar[bool] = True
    """A structured answer is asked for by a tool."""

    def __init__(self, agent: ClaudeAgent, seat: VendorSeat, group: TaskGroup | None) -> None:
        self._agent = agent
        self._seat = seat
        self._group = group
        self._vendor_session_id = seat.vendor_session_id
        # Alone, for one model call, there is nobody who would run them.
        self._native = {name: self._native_tool(name) for name in agent.native if group is not None}
        self._client: sdk.ClaudeSDKClient | None = None
        self._cli: _Cli | None = None
        self._messages: AsyncIterator[sdk.Message] | None = None
        self._offer: _Offer | None = None
        self._known: tuple[ReplayItem, ...] = ()
        """The conversation as it was when the CLI was last asked."""
        self._calls = _Calls()
        self._open: list[tuple[str, _Pending]] = []
        """The calls of the newest answer, by the turn's ids."""
        self._outputs: list[_Pending] = []
        """The calls of the newest answer that are the structured answer."""
        self._is_broken = False
        """Whether the newest answer failed: the CLI is started anew before it is asked again."""
        self._blamed: tuple[str, str] = ("", "")
        """What the CLI said of a model call that failed: its code, its text."""
        self._start_over()

    def _start_over(self) -> None:
        """Forget the state of a CLI that has ended."""
        self._idle = anyio.Event()
        self._gone = anyio.Event()
        self._seen: _Queue[Any] = _Queue()
        # Each lets the CLI go on behind one batch of tools, with news for the model; None ends its turn.
        self._leave_to_go_on: _Queue[str | None] = _Queue()
        self._open, self._outputs, self._is_broken = [], [], False

    @property
    def name(self) -> str:
        """The interface's name."""
        return self._agent.name

    @property
    def model(self) -> str:
        """The model's name."""
        return self._agent.model

    @property
    def native_tools(self) -> Mapping[str, Tool[Any, Any]]:
        """The tools that run in the CLI, by the names that the model uses."""
        return self._native

    def estimate_usd(self, request: ModelRequest) -> float | None:
        """Say what the call will cost at most; None if the model's price is not known."""
        return self._agent.estimate_usd(request)

    # .. one model call ..

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Let the CLI ask the model once, and yield what it says."""
        ask_egress(self._agent.endpoint)
        await self._ask(request)
        # Until the answer is whole: whoever leaves in the middle leaves the CLI in the middle, too.
        self._is_broken = True
        collector, reading = Collector(), _Reading(self._agent, request.model or self.model)
        while True:
            seen = await self._next()
            if isinstance(seen, ModelCallError):
                if collector.text:
                    seen.partial, seen.phase = collector.text, "response"
                raise seen
            taken = reading.take(seen)
            if reading.is_nudged and self._cli is not None:
                # What it would say to the model, and the model to it, nobody has asked for.
                self._cli.kill()
                taken += reading.take({"type": "message_stop"})
            for each in taken:
                shown = self._note(each, collector) if isinstance(each, ToolCallRequested) else each
                if shown is not each and isinstance(shown, TextDelta):
                    # The structured answer is the answer's text; that it came as a call is nobody's business.
                    reading.chars += len(shown.text)
                if isinstance(shown, Stopped):
                    reason = shown.reason
                    self._is_broken = reading.is_nudged or reason not in ("end", "tools")
                    yield Stopped("end") if reason == "tools" and not self._open else shown
                    return
                if not isinstance(shown, ToolCallRequested):
                    collector.add(shown)
                yield shown
            if reading.is_cut:
                raise self._agent.failed(Facts(message=CUT_SHORT), collector.text)

    def _note(self, seen: ToolCallRequested, collector: Collector) -> ModelEvent:
        """Find out whose call this is."""
        call, offer = seen.call, self._offer
        pending = self._calls.next("answer", call.id, skip_closed=False)
        if offer is not None and offer.schema is not None and call.name == _PREFIX + _OUTPUT_TOOL:
            self._outputs.append(pending)
            return TextDelta(_output_of(call, wrapped=offer.is_wrapped))
        name = call.name.removeprefix(_PREFIX)
        if name == call.name and offer is not None and any(name == each.name for each in offer.tools):
            # The CLI knows our tools by their long names only, and has refused this one.
            name = f"{name} (not by this name)"
        ours = ToolCallRequested(ToolCall(call.id, name, call.arguments))
        before = len(collector.answer().calls)
        collector.add(ours)
        kept = collector.answer().calls
        if len(kept) > before:
            self._calls.name(kept[-1].id, pending)
            self._open.append((kept[-1].id, pending))
        else:
            # Too many for one answer: the turn will not run it.
            pending.result = ToolResult.error("This call was not run: the answer asked for too much at once.")
            pending.denial = pending.result.message
            pending.released.set()
            pending.delivered.set()
        return ours

    async def _next(self) -> Any:
        """Return the next event of the model's answer, or the error that there will be none."""
        while True:
            if self._group is not None:
                seen = await self._seen.take()
            else:
                seen = await self._take_one()
            if seen is not None:
                return seen

    async def _take_one(self) -> Any:
        """Read one message of the CLI; return what the one who waits for an answer has to know."""
        assert self._messages is not None
        try:
            return self._take(await anext(self._messages))
        except StopAsyncIteration:
            return self._ended(None)
        except Exception as error:  # noqa: BLE001  # whatever it is, the CLI says nothing more
            return self._ended(error)

    async def _read(self) -> None:
        """Read what the CLI says until it ends: nobody else may have to wait for this."""
        while not self._gone.is_set():
            seen = await self._take_one()
            if seen is not None:
                self._seen.put(seen)

    def _take(self, message: sdk.Message) -> Any:
        if isinstance(message, sdk.StreamEvent):
            return message.event if message.parent_tool_use_id is None else None
        if isinstance(message, sdk.AssistantMessage):
            if message.error is not None:
                text = "".join(each.text for each in message.content if isinstance(each, sdk.TextBlock))
                self._blamed = (message.error, text)
            return None
        if isinstance(message, sdk.UserMessage):
            if message.parent_tool_use_id is None and isinstance(message.content, list):
                for block in message.content:
                    if isinstance(block, sdk.ToolResultBlock):
                        pending = self._calls.next("result", block.tool_use_id, skip_closed=False)
                        pending.answer(_text_of(block.content))
            return None
        if isinstance(message, sdk.ResultMessage):
            self._idle.set()
            return self._failure_of(message)
        return None

    def _failure_of(self, result: sdk.ResultMessage) -> ModelCallError:
        """Say why there will be no answer, for the one who still waits for it."""
        code, text = self._blamed
        self._blamed = ("", "")
        text = text or "; ".join(result.errors or ()) or (result.result or "")
        if not result.is_error:
            return self._agent.failed(Facts(message="the vendor's loop ended without an answer"))
        if result.api_error_status is None and (code == "unknown" or _CONNECTION.search(text)):
            code = ""  # Nobody answered: the CLI's own word for that is the server's fault.
        return self._agent.failed(Facts(status=result.api_error_status, code=code, message=text))

    def _ended(self, error: Exception | None) -> ModelCallError:
        self._gone.set()
        self._idle.set()
        for each in self._calls.all():
            each.lose()
        return self._lost(error)

    def _lost(self, error: Exception | None = None) -> ModelCallError:
        last = "" if self._cli is None else " ".join(self._cli.errors)
        why = ": ".join(each for each in ("the CLI ended", str(error or ""), last) if each)
        return self._agent.failed(Facts(message=why))

    # .. what the CLI is told ..

    async def _ask(self, request: ModelRequest) -> None:
        """Make the CLI ask its model: by a message, or by letting it go on behind its tools."""
        first = request.items[0] if request.items else None
        system = first.text if first is not None and first.role == "system" else ""
        items = tuple(each for each in request.items if each.role != "system")
        schema = None if request.output_schema is None else json.dumps(request.output_schema, sort_keys=True)
        most = self._agent._most(request)
        offer = _Offer(system, tuple(request.tools), schema, request.model, most)
        extends = self._extends(items)
        if self._client is not None and (
            self._is_broken or self._gone.is_set() or offer != self._offer or not extends
        ):
            await self.aclose()
        if self._client is None:
            if self._known and not extends:
                self._vendor_session_id = None
            await self._start(offer, items)
        else:
            await self._go_on(items[len(self._known) :])
        self._known = items

    def _extends(self, items: tuple[ReplayItem, ...]) -> bool:
        """Say whether the CLI knows everything but what came after its own newest answer."""
        if items[: len(self._known)] != self._known:
            return False
        return all(each.role != "assistant" for each in items[len(self._known) + 1 :])

    async def _go_on(self, new: Sequence[ReplayItem]) -> None:
        news = "\n\n".join(each.text for each in new if each.role == "user")
        client = self._client
        assert client is not None
        if self._open or self._outputs:
            results = [each for each in new if each.role == "tool"]
            for (call_id, pending), item in zip(self._open, results, strict=False):
                # Whoever plays the turn without `deliver` has the results in the conversation all the same.
                self._deliver(call_id, pending, ToolResult(item.text, success=True))
            for pending in self._outputs:
                pending.result = ToolResult.error("The answer was not taken; see what is said about it.")
                pending.delivered.set()
            self._open, self._outputs = [], []
            self._leave_to_go_on.put(news)
            return
        await self._idle.wait()
        self._seen.clear()  # What the CLI said behind its last answer.
        self._idle = anyio.Event()
        await self._say(client, news or CONTINUE, new)

    async def _say(self, client: sdk.ClaudeSDKClient, text: str, told: Sequence[ReplayItem]) -> None:
        """Send a message: the text that something was told in, and the pictures that belong to that."""
        pictures = [each for item in told for each in anthropic_images(item.parts)]
        said: Any = text if not pictures else _with_pictures(text, pictures)
        failure: Exception
        try:
            await client.query(said)
        except (sdk.ClaudeSDKError, OSError) as error:
            failure = error
        else:
            return
        self._is_broken = True
        raise self._lost(failure)

    # .. the CLI's life ..

    async def _start(self, offer: _Offer, items: tuple[ReplayItem, ...]) -> None:
        text, told = "", items
        client: sdk.ClaudeSDKClient | None = None
        newest = next((each for each in reversed(items) if each.role == "assistant"), None)
        if self._vendor_session_id is not None and newest is not None:
            remembers = partial(self._agent.remembers, self._vendor_session_id, newest)
            if await anyio.to_thread.run_sync(remembers):
                told = _news(items)
                text = _since_newest_answer(told)
                client = await self._connect(offer, resume=self._vendor_session_id)
        if client is None:
            vendor_session_id = str(new_id())
            self._seat.began(vendor_session_id)
            self._vendor_session_id = vendor_session_id
            text, told = _whole_conversation(items), items
            client = await self._connect(offer, session_id=vendor_session_id)
            assert client is not None
        await self._say(client, text, told)

    async def _connect(self, offer: _Offer, **conversation: str) -> sdk.ClaudeSDKClient | None:
        """Start the CLI on a conversation; None if it does not have the one that it is to resume."""
        self._start_over()
        cli = _Cli(self._agent, self._seat.root)
        failure: Exception
        try:
            options = self._agent.options(
                offer,
                cli,
                tools=list(self._native),
                mcp_servers={SERVER: {"type": "sdk", "name": SERVER, "instance": self._server(offer)}},
                hooks=self._hooks(),
                **conversation,
            )
            client = sdk.ClaudeSDKClient(options)
            try:
                await client.connect()
            except Exception as error:  # noqa: BLE001  # the SDK raises bare ones, too
                failure = error
            else:
                self._client, self._cli, self._offer = client, cli, offer
                self._messages = client.receive_messages()
                if self._group is not None:
                    self._group.start_soon(self._read)
                return client
        finally:
            if self._cli is not cli:
                cli.forget()
        said = f"{failure} {' '.join(cli.errors)}"
        if "resume" in conversation and "No conversation found" in said:
            return None
        raise self._agent.failed(Facts(message=f"the CLI did not start: {said}"))

    async def aclose(self) -> None:
        """End the CLI in good order if it can be, and by force if not. Nothing of it is left running."""
        client, self._client = self._client, None
        cli, self._cli = self._cli, None
        if client is None or cli is None:
            return
        with anyio.CancelScope(shield=True):
            try:
                async with anyio.create_task_group() as group:
                    group.start_soon(self._kill_after, cli, 2 * _CLOSE_GRACE_S)
                    if not self._gone.is_set():
                        await self._leave(client)
                    with suppress(Exception):
                        await client.disconnect()
                    group.cancel_scope.cancel()
            finally:
                cli.kill()
                await cli.wait()
                cli.forget()
        self._gone.set()
        for each in self._calls.all():
            each.lose()

    async def _leave(self, client: sdk.ClaudeSDKClient) -> None:
        """Let the CLI finish what is finished, and interrupt what is not."""
        is_whole = not self._is_broken and all(each.delivered.is_set() for _, each in self._open)
        with anyio.move_on_after(_CLOSE_GRACE_S):
            if is_whole and self._group is not None:
                for each in self._outputs:
                    each.result = ToolResult.ok(message="The answer was taken.")
                    each.delivered.set()
                if self._open or self._outputs:
                    self._leave_to_go_on.put(None)
                await self._idle.wait()
            elif not self._idle.is_set():
                with suppress(Exception):
                    await client.interrupt()

    async def _kill_after(self, cli: _Cli, seconds: float) -> None:
        await anyio.sleep(seconds)
        cli.kill()

    # .. what the CLI asks for ..

    def _hooks(self) -> Any:
        def matcher(callback: Any, **more: Any) -> list[sdk.HookMatcher]:
            return [sdk.HookMatcher(hooks=[callback], timeout=_HOOK_TIMEOUT_S, **more)]

        return {
            # A hook that fails, because this process has died say, must not let anything through.
            "PreToolUse": matcher(self._before_tool, on_failure="block"),
            "PostToolUse": matcher(self._after_tool),
            "PostToolUseFailure": matcher(self._after_tool),
            "PostToolBatch": matcher(self._after_batch, on_failure="block"),
        }

    async def _before_tool(self, seen: Any, vendor_id: str | None, _: Any) -> Any:
        """The CLI has come to a call. A native one waits here until the runner has begun it, or refused."""
        name = str(seen["tool_name"])
        if seen.get("agent_id"):
            return _denied("Subagents of the vendor's own cannot use tools here.")
        pending = self._calls.next("before", str(seen["tool_use_id"]))
        pending.asked.set()
        if name.startswith(_PREFIX):
            return _ALLOWED
        if name not in self._native:
            return _denied(f"{name} is not available in this run.")
        await pending.released.wait()
        return _ALLOWED if pending.denial is None else _denied(pending.denial)

    async def _after_tool(self, seen: Any, vendor_id: str | None, _: Any) -> Any:
        """A native tool has run: its end goes to the log before the CLI goes on."""
        if seen["tool_name"] not in self._native:
            return {}
        event = seen["hook_event_name"]
        pending = self._calls.next("after", str(seen["tool_use_id"]))
        pending.succeeded = event == "PostToolUse"
        pending.text = _text_of(seen.get("tool_response") if pending.succeeded else seen.get("error"))
        pending.ended.set()
        await pending.delivered.wait()
        result = pending.result
        if result is None or result.success:
            return {}
        told = "What this call had changed in the workspace was rolled back."
        if pending.succeeded:
            told = f"This call was not kept: {result.message} {told}"
        return {"hookSpecificOutput": {"hookEventName": event, "additionalContext": told}}

    async def _after_batch(self, seen: Any, vendor_id: str | None, _: Any) -> Any:
        """All calls of an answer have ended: the next model call needs leave."""
        news = await self._leave_to_go_on.take()
        if news is None:
            return {"continue_": False, "stopReason": "the turn is over"}
        if not news:
            return {}
        return {"hookSpecificOutput": {"hookEventName": "PostToolBatch", "additionalContext": news}}

    def _server(self, offer: _Offer) -> Server[Any]:
        """Serve our tools to the CLI, in this process."""

        async def listed(context: Any, params: Any) -> mcp.ListToolsResult:
            return mcp.ListToolsResult(tools=offer.listed())

        async def called(context: Any, params: Any) -> mcp.CallToolResult:
            vendor_id = str((params.meta or {}).get("claudecode/toolUseId", ""))
            pending = self._calls.next("call", vendor_id)
            pending.asked.set()
            await pending.delivered.wait()
            result = pending.result or ToolResult.error("This call was not run.")
            return _content(result.render(), success=result.success)

        return Server(SERVER, version="1", on_list_tools=listed, on_call_tool=called)

    # .. what the turn says about a call ..

    async def asked(self, call: ToolCall) -> str | None:
        """Wait until the CLI wants this call to be run; see `VendorRun`."""
        pending = self._calls.get(call.id)
        if pending is None or self._client is None:
            return None
        await pending.asked.wait()
        if pending.is_lost:
            raise self._lost()
        return pending.said

    async def deliver(self, call: ToolCall, result: ToolResult[Any]) -> None:
        """Tell the CLI how a call ended."""
        pending = self._calls.get(call.id)
        if pending is not None:
            self._deliver(call.id, pending, result)

    def _deliver(self, call_id: str, pending: _Pending, result: ToolResult[Any]) -> None:
        if pending.delivered.is_set():
            return
        pending.result = result
        if not pending.released.is_set():
            pending.denial = result.render()
            pending.released.set()
        pending.delivered.set()

    # .. native tools ..

    def _native_tool(self, name: str) -> Tool[Any, Any]:
        """Make the tool of ours whose body is a tool of the CLI's."""
        effects = NATIVE_EFFECTS[name]
        return Tool(
            name=name.lower(),
            description=f"The vendor's own tool {name}.",
            handler=partial(self._perform, name),
            effects=effects,
            foreign=effects != "none",
            params_type=dict[str, Any],
        )

    async def _perform(self, name: str, params: dict[str, Any], *, context: Any) -> ToolResult[str]:
        """Let the CLI run a tool, and wait for its end. If the turn does not wait, nothing of it goes on."""
        pending = self._calls.get(context.call_id)
        if pending is None or self._client is None or self._cli is None:
            raise ToolError(
                f"{name} was cut off with the process that ran it, and nothing that it did was kept. "
                "Call it again if it is still needed."
            )
        self._check(name, params)
        cli = self._cli
        try:
            known = await cli.processes() if name == "Bash" else None
            pending.released.set()
            await pending.ended.wait()
            if known is not None:
                await cli.end_others(known)
        except BaseException:
            # The files cannot be put back while the tool is at work on them.
            with anyio.CancelScope(shield=True):
                cli.kill()
                await cli.wait()
            raise
        if pending.is_lost:
            raise ToolError(f"{name} was cut off: the process that ran it has ended.")
        return ToolResult(pending.text or "OK", success=pending.succeeded)

    def _check(self, name: str, params: Mapping[str, Any]) -> None:
        """Refuse what cannot be undone: work in the background, and files outside the workspace."""
        if params.get("run_in_background"):
            raise ToolError("A command cannot run in the background here: it would outlive its call.")
        key = _PATHS_OF.get(name)
        root = self._seat.root
        if key is None or root is None or not isinstance(params.get(key), str):
            return
        path = (root / params[key]).resolve()
        if not path.is_relative_to(root.resolve()):
            raise ToolError(f"{params[key]} is outside the workspace {root}; write inside it.")


_ALLOWED: Any = {"hookSpecificOutput": {"hookEventName": "PreToolUse", "permissionDecision": "allow"}}


def _denied(reason: str) -> Any:
    return {
        "hookSpecificOutput": {
            "hookEventName": "PreToolUse",
            "permissionDecision": "deny",
            "permissionDecisionReason": reason,
        }
    }


# --- reading an answer -------------------------------------------------------------------------------


class _Reading:
    """Turns the raw events of one answer into ours."""

    def __init__(self, agent: ClaudeAgent, model: str) -> None:
        self._agent = agent
        self._model = model
        self._block: dict[str, Any] = {}
        self._pieces: list[str] = []
        self._signature: list[str] = []
        self._counts: dict[str, int] = {}
        self._mender = Mender()
        self._thought_mender = Mender()
        self._stop: str | None = None
        self._has_begun = False
        self._is_seen = False
        self._calls = 0
        self.chars = 0
        self.is_cut = False
        """Whether the answer ended without saying that it is whole."""
        self.is_nudged = False
        """Whether the CLI would now make its model go on by itself: the answer was too long, or empty."""

    def take(self, event: Mapping[str, Any]) -> list[ModelEvent]:
        """Return what an event says."""
        kind = event.get("type")
        if kind == "message_start":
            self.is_cut, self._has_begun = self._has_begun, True
            return [self._used(event["message"].get("usage"))]
        if kind == "content_block_start":
            self._block = dict(event["content_block"])
            self._pieces, self._signature = [], []
            return self._text(self._block.get("text", "")) if self._block.get("type") == "text" else []
        if kind == "content_block_delta":
            return self._delta(event["delta"])
        if kind == "content_block_stop":
            return self._end_of_block()
        if kind == "message_delta":
            self._stop = event["delta"].get("stop_reason") or self._stop
            is_empty = self._stop in _ENDS and not self._calls and not self._is_seen
            self.is_nudged = is_empty or _STOPS.get(self._stop or "") == "length"
            return [self._used(event.get("usage"))]
        if kind == "message_stop":
            if self._stop is None:
                self.is_cut = True
                return []
            rest: list[ModelEvent] = [TextDelta(text) for text in (self._mender.flush(),) if text]
            reason = _STOPS.get(self._stop, "end")
            return [*rest, Stopped("tools" if reason == "end" and self._calls else reason)]
        return []

    def _text(self, piece: str) -> list[ModelEvent]:
        text = self._mender.feed(piece)
        self._is_seen = self._is_seen or bool(piece.strip())
        self.chars += len(text)
        return [TextDelta(text)] if text else []

    def _delta(self, delta: Mapping[str, Any]) -> list[ModelEvent]:
        kind = delta.get("type")
        if kind == "text_delta":
            return self._text(delta["text"])
        if kind == "thinking_delta":
            self._pieces.append(delta["thinking"])
            thought = self._thought_mender.feed(delta["thinking"])
            return [ReasoningDelta(thought)] if thought else []
        if kind == "signature_delta":
            self._signature.append(delta["signature"])
        elif kind == "input_json_delta":
            self._pieces.append(delta["partial_json"])
        return []

    def _end_of_block(self) -> list[ModelEvent]:
        block, self._block = self._block, {}
        kind = block.get("type")
        if kind == "tool_use":
            self._calls += 1
            text = "".join(self._pieces)
            arguments: Any = text if text.strip() else block.get("input") or "{}"
            call = ToolCall(str(block.get("id") or ""), str(block.get("name") or ""), arguments)
            return [ToolCallRequested(call)]
        payload: dict[str, Any] | None = None
        if kind == "redacted_thinking":
            payload = block
        elif kind == "thinking":
            signature = block.get("signature", "") + "".join(self._signature)
            thinking = block.get("thinking", "") + "".join(self._pieces)
            payload = {**block, "thinking": thinking, "signature": signature} if signature else None
        if payload is None:
            return []
        part = ReasoningPart(self._model, self._agent.name, payload, self.chars, self._calls)
        return [ReasoningBlock(part)]

    def _used(self, usage: Mapping[str, Any] | None) -> UsageReported:
        """Take over the vendor's numbers: they are running totals, and some may be left out."""
        given = usage or {}
        details = given.get("output_tokens_details") or {}
        for name, value in (
            ("input", given.get("input_tokens")),
            ("output", given.get("output_tokens")),
            ("read", given.get("cache_read_input_tokens")),
            ("written", given.get("cache_creation_input_tokens")),
            ("thinking", details.get("thinking_tokens")),
        ):
            if isinstance(value, int) and value >= 0:
                self._counts[name] = value
        return self._agent.used(self._counts, self._model)


# --- texts -------------------------------------------------------------------------------------------


def _text_of(content: Any) -> str:
    """Write what a tool of the CLI's came to as the text that its model reads, about."""
    if isinstance(content, str):
        return content.removeprefix("<tool_use_error>").removesuffix("</tool_use_error>")
    if isinstance(content, list):
        texts = [each.get("text", "") for each in content if isinstance(each, dict)]
        return "\n".join(each for each in texts if each)
    if isinstance(content, dict):
        if "stdout" in content:
            return "\n".join(each for each in (content["stdout"], content.get("stderr")) if each)
        if "filePath" in content:
            return f"{content.get('type', 'changed')}: {content['filePath']}"
        return json.dumps(content, ensure_ascii=False)
    return "" if content is None else str(content)


def _output_of(call: ToolCall, *, wrapped: bool) -> str:
    """Return the structured answer as text: the call's arguments, or the one that is the answer."""
    text = call.arguments_json
    if not wrapped:
        return text
    try:
        return json.dumps(json.loads(text)["answer"], ensure_ascii=False)
    except (ValueError, KeyError, TypeError):
        return text


def _whole_conversation(items: Sequence[ReplayItem]) -> str:
    """Tell a conversation to a model that was not there."""
    if len(items) == 1 and items[0].role == "user":
        return items[0].text
    *before, last = items or (ReplayItem("user", CONTINUE),)
    ends_with_request = last.role == "user"
    told = "\n".join(_told(each) for each in (before if ends_with_request else items))
    said = last.text if ends_with_request else CONTINUE
    return f"This conversation began elsewhere. So far:\n<conversation>\n{told}\n</conversation>\n\n{said}"


async def _with_pictures(text: str, pictures: Sequence[Wire]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the one message that a text with pictures is."""
    content = [{"type": "text", "text": text}, *pictures]
    yield {"type": "user", "message": {"role": "user", "content": content}, "parent_tool_use_id": None}


def _news(items: tuple[ReplayItem, ...]) -> tuple[ReplayItem, ...]:
    """Return what came after the newest answer."""
    answers = [place for place, each in enumerate(items) if each.role == "assistant"]
    return items[answers[-1] + 1 :] if answers else items


def _since_newest_answer(new: Sequence[ReplayItem]) -> str:
    """Tell what happened after the newest answer, which the model has given itself."""
    results = "\n".join(_told(each) for each in new if each.role == "tool")
    said = "\n\n".join(each.text for each in new if each.role == "user") or CONTINUE
    if not results:
        return said
    return (
        "The conversation was cut off and goes on now. What the calls of your last answer really came to, "
        f"whatever stands above:\n{results}\n\n{said}"
    )


def _told(item: ReplayItem) -> str:
    if item.role == "tool":
        return f'<result call="{item.call_id}" tool="{item.name or ""}">\n{item.text}\n</result>'
    calls = "".join(
        f'\n<call id="{each.call_id}" tool="{each.name}">{each.arguments}</call>' for each in item.calls
    )
    return f"<{item.role}>\n{item.text}{calls}\n</{item.role}>"
