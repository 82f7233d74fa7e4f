"""Where a vendor's loop sits in a turn of ours.

The turn's loop stays what it is: it asks a provider and runs tools. If the provider brings a loop
of its own (`VendorLoop`), a seat is made for it for the length of the turn, and two things change:
the provider that is asked is the vendor's run, and each call waits until the vendor's loop has come
to it and is told to it when its end is in the log. For every other provider a seat does nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import anyio

from treenail.containment import CancellationToken, threadsafe
from treenail.conversation import HistoryCompacted, ProviderUsage
from treenail.errors import DeadlineExceededError, PromptEvaluationError, ToolValidationError
from treenail.providers import Provider, VendorLoop, VendorRun, VendorSeat, VendorSession, brings_loop
from treenail.state import Deadline, ExecutionState, Session
from treenail.tools import SessionForked, Tool, ToolCall, filesystem_of


@dataclass(frozen=True, slots=True)
class Seat:
    """What a turn asks, and how it runs calls, while a provider sits in it."""

    provider: Provider
    vendor: VendorRun | None = None
    deadline: Deadline | None = None
    cancellation: CancellationToken = field(default_factory=CancellationToken)

    @property
    def native_tools(self) -> Mapping[str, Tool[Any, Any]]:
        """The vendor's own tools, to be run beside the prompt's."""
        return {} if self.vendor is None else self.vendor.native_tools

    async def wait_until_asked(self, call: ToolCall, tools: Mapping[str, Tool[Any, Any]]) -> None:
        """Wait until the vendor's loop has come to a call. Raises if it refuses one that this run allows."""
        if self.vendor is None:
            return
        said = await self._in_time(self.vendor, call)
        if said is not None and call.name not in self.native_tools and _would_run(call, tools):
            raise PromptEvaluationError(
                f"{self.provider.name} refused a call of {call.name} that this run allows, so it was not run "
                f"({said}); look at the vendor's own settings",
                phase="response",
            )

    async def _in_time(self, vendor: VendorRun, call: ToolCall) -> str | None:
        seconds = None if self.deadline is None else max(self.deadline.remaining().total_seconds(), 0)
        with anyio.move_on_after(seconds):
            with anyio.CancelScope() as scope:
                forget = self.cancellation.on_cancel(threadsafe(scope.cancel))
                try:
                    return await vendor.asked(call)
                finally:
                    forget()
            self.cancellation.raise_if_cancelled()
        raise DeadlineExceededError(f"the deadline passed before {self.provider.name} came to {call.name}")


def _would_run(call: ToolCall, tools: Mapping[str, Tool[Any, Any]]) -> bool:
    tool = tools.get(call.name)
    if tool is None:
        return False
    try:
        tool.parse(call.arguments)
    except ToolValidationError:
        return False
    return True


def seated(
    provider: Provider,
    state: ExecutionState,
    *,
    deadline: Deadline | None = None,
    cancellation: CancellationToken | None = None,
) -> AbstractAsyncContextManager[Seat]:
    """Seat a provider for the length of a turn. When the block ends, nothing of a vendor's loop is left."""
    if not brings_loop(provider):
        return nullcontext(Seat(provider))
    return _vendor_seated(provider, state, deadline, cancellation)


@asynccontextmanager
async def _vendor_seated(
    provider: VendorLoop,
    state: ExecutionState,
    deadline: Deadline | None,
    cancellation: CancellationToken | None,
) -> AsyncIterator[Seat]:
    session, filesystem = state.session, filesystem_of(state)
    place = VendorSeat(
        root=None if filesystem is None else filesystem.host_root,
        vendor_session_id=vendor_session_of(session, provider.name),
        began=lambda vendor_session_id: session.dispatch(VendorSession(provider.name, vendor_session_id)),
    )
    async with provider.open(place) as run:
        yield Seat(run, run, deadline, cancellation or CancellationToken())


def vendor_session_of(session: Session, provider: str) -> str | None:
    """Return the vendor's conversation that knows all of ours up to its newest answer, or None.

    One that another provider has answered in since, or that was summarised since, does not: the vendor
    would see another conversation than the one that continues. A fork's log begins with its parent's, whose
    conversation with the vendor went elsewhere.
    """
    found: str | None = None
    for _, value in session.events():
        if isinstance(value, VendorSession) and value.provider == provider:
            found = value.vendor_session_id
        elif isinstance(value, HistoryCompacted | SessionForked) or (
            isinstance(value, ProviderUsage) and value.provider != provider
        ):
            found = None
    return found
