"""The seam to a vendor's own agent loop: it asks the model itself, and we stay in charge of the turn.

Theory of operation
-------------------
A vendor's loop wants to do everything: call the model, run tools, call the model again. Here
it is held at every step where that matters, so that a turn sees nothing but a `Provider` and
the log, the transactions, the ceilings and the endings are the same as everywhere:

    stream()    the vendor may ask its model once; what the model says comes as events
    asked()     the vendor's loop has come to a call and wants it run: now the runner may
    deliver()   the call has ended and is in the log: the vendor may know its result

Between the last result and the next `stream()` the vendor's loop stands still, so that a
reservation is made before each model call and a refusal means that none is made.

A vendor may have *native* tools, which run in its own process. They are ordinary tools of the
turn with a body elsewhere: the handler lets the vendor begin and waits for its end, inside the
runner's transaction. What the runner refuses, the vendor is told to deny.

A vendor keeps conversations of its own. Ours is the truth: the vendor's is named in the log as
a `VendorSession`, used again after a restart if it still fits, and told anew if it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard, runtime_checkable

from treenail.log.event import SlicePolicy
from treenail.providers.base import Provider
from treenail.state.events import event
from treenail.tools.tool import Tool, ToolCall, ToolResult


@event(name="treenail.VendorSession", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class VendorSession:
    """A vendor's own conversation was begun for this session. Logged before its first model call."""

    provider: str
    vendor_session_id: str


def _forget(vendor_session_id: str) -> None:
    """Keep no record of a vendor's conversation: nobody will resume it."""


@dataclass(frozen=True, slots=True)
class VendorSeat:
    """What a turn tells a vendor's loop about where it works."""

    root: Path | None = None
    """The workspace on disk, in which native tools work; without one there are none."""
    vendor_session_id: str | None = None
    """The vendor's conversation to go on with: it knows all answers of ours up to the newest."""
    began: Callable[[str], object] = _forget
    """Is told the id of each conversation that the vendor begins, before it does anything."""


@runtime_checkable
class VendorRun(Provider, Protocol):
    """A vendor's loop at work for one turn."""

    @property
    def native_tools(self) -> Mapping[str, Tool[Any, Any]]:
        """The tools that run in the vendor's process, by the names that the model uses."""
        ...

    async def asked(self, call: ToolCall) -> str | None:
        """Wait until the vendor's loop wants this call to be run.

        Returns None, or what the vendor told its model if it refused the call itself. A call that the
        vendor does not wait for, such as one of a process that died, is wanted at once.
        """
        ...

    async def deliver(self, call: ToolCall, result: ToolResult[Any]) -> None:
        """Tell the vendor's loop how a call ended. Its end stands in the log already."""
        ...


@runtime_checkable
class VendorLoop(Provider, Protocol):
    """A provider that brings a loop of its own.

    Used as a plain `Provider` it makes one model call from the conversation it is given.
    """

    def open(self, seat: VendorSeat) -> AbstractAsyncContextManager[VendorRun]:
        """Start the vendor's loop for one turn. At the end of the block nothing of it is left running."""
        ...


def brings_loop(provider: Provider) -> TypeGuard[VendorLoop]:
    """Say whether a provider brings a loop of its own. Having `open` is what tells it from the others."""
    return hasattr(provider, "open")
