"""The provider: a `ClaudeAgent` is made once, and opened for each turn."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import ClassVar, Literal

import anyio

from treenail.containment import PriceTable
from treenail.errors import UsageError
from treenail.providers.base import ModelEvent, ModelRequest
from treenail.providers.claude_agent.environment import cli_environment
from treenail.providers.claude_agent.native import NATIVE_EFFECTS
from treenail.providers.claude_agent.run import ClaudeAgentRun
from treenail.providers.claude_agent.settings import NAME, Settings
from treenail.providers.vendor_loop import VendorSeat


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
        self._settings = Settings(
            model=model,
            native=tuple(dict.fromkeys(native)),
            cli_path=None if cli_path is None else Path(cli_path),
            thinking=thinking,
            effort=effort,
            env=cli_environment(
                base_url=base_url,
                api_key=api_key,
                config_dir=config_dir,
                max_output_tokens=max_output_tokens,
                more=env or {},
            ),
            allow_env=frozenset(allow_env),
            prices=prices,
            max_output_tokens=max_output_tokens,
            secrets=(api_key,) if api_key else (),
        )

    def __repr__(self) -> str:
        return f"ClaudeAgent({self.model!r}, native={list(self.native)})"

    @property
    def name(self) -> str:
        """The interface's name, as it stands in the log and on blocks of thought."""
        return NAME

    @property
    def model(self) -> str:
        """The model's name."""
        return self._settings.model

    @property
    def native(self) -> tuple[str, ...]:
        """The vendor's own tools that the model may use."""
        return self._settings.native

    @property
    def endpoint(self) -> str:
        """Where the CLI's model calls go; nothing if that is not known: then no shield lets them leave."""
        return self._settings.endpoint

    def output_bound(self, request: ModelRequest) -> int:
        """Say how many tokens the answer may have."""
        return self._settings.most_tokens(request)

    def estimate_usd(self, request: ModelRequest) -> float | None:
        """Say what the call will cost at most; None if the model's price is not known."""
        return self._settings.estimate_usd(request)

    @asynccontextmanager
    async def open(self, seat: VendorSeat) -> AsyncIterator[ClaudeAgentRun]:
        """Make the vendor's loop ready for one turn; the CLI is started with the first model call.

        At the end of the block nothing of it is left running.
        """
        if self.native and seat.root is None:
            raise UsageError(
                f"the native tools {', '.join(self.native)} work on files of the host, and this run's "
                "workspace is not on disk; give it a directory, or make ClaudeAgent without them"
            )
        # Entered and left by hand: what is raised in the block must come out as it is, not in a group.
        group = anyio.create_task_group()
        await group.__aenter__()
        run = ClaudeAgentRun(self._settings, seat, group)
        try:
            yield run
        finally:
            await run.aclose()
            group.cancel_scope.cancel()
            await group.__aexit__(None, None, None)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Call the model once, with the conversation told as text, and without native tools."""
        # A generator may be left for good between two events, so that no task group can stand around it.
        run = ClaudeAgentRun(self._settings, VendorSeat(), None)
        try:
            async with aclosing(run.stream(request)) as events:
                async for each in events:
                    yield each
        finally:
            await run.aclose()
