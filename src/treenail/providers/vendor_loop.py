"""The seam to a vendor's own agent loop: the vendor calls the model, and our turn stays in charge.

Theory of operation
-------------------
A vendor's loop wants to do everything: call the model, run tools, call the model again. Here
it is held at every step, so that a turn sees only a `Provider`, and the log, the transactions,
the ceilings and the endings are the same as for every provider:

    stream()    the vendor may call its model once; the answer arrives as events
    asked()     the vendor's loop has reached a tool call and wants it run: now the runner may run it
    deliver()   the call has ended and is in the log: the vendor may have its result

Between the last result and the next `stream()` the vendor's loop is paused, so that every
model call is reserved before it is made, and a refused one is not made.

A vendor may have *native* tools, which run in its own process. They are ordinary tools of the
turn whose body runs elsewhere: the handler lets the vendor begin and waits for its end, inside the
runner's transaction. If the runner refuses a call, the vendor is told to deny it.

A vendor keeps its own conversations, but ours is the truth: the log names the vendor's as a
`VendorSession`, which is reused after a restart if it still matches and replaced if it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard, runtime_checkable

from treenail.log import SlicePolicy
from treenail.providers.base import Provider
from treenail.state import event
from treenail.tools import Tool, ToolCall, ToolResult


@event(name="treenail.VendorSession", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class VendorSession:
    """A vendor's own conversation was begun for this session. Logged before its first model call."""

    provider: str
    vendor_session_id: str


def _forget(vendor_session_id: str) -> None:
    """Do not record the vendor's conversation: it will not be resumed."""


@dataclass(frozen=True, slots=True)
class VendorSeat:
    """What a vendor's loop is given for one turn."""

    root: Path | None = None
    """The workspace on disk, in which native tools work; without one there are none."""
    vendor_session_id: str | None = None
    """The vendor's conversation to resume: it has all of our answers up to the newest."""
    began: Callable[[str], object] = _forget
    """Called with the id of each conversation that the vendor begins, before anything else happens."""


@runtime_checkable
class VendorRun(Provider, Protocol):
    """A vendor's loop during one turn."""

    @property
    def native_tools(self) -> Mapping[str, Tool[Any, Any]]:
        """The tools that run in the vendor's process, by the names that the model uses."""
        ...

    async def asked(self, call: ToolCall) -> str | None:
        """Wait until the vendor's loop wants this call to be run.

        Returns None, or what the vendor told its model if it refused the call itself. A call that the
        vendor does not wait for, such as one of a dead process, returns at once.
        """
        ...

    async def deliver(self, call: ToolCall, result: ToolResult[Any]) -> None:
        """Tell the vendor's loop how a call ended. Its end is in the log already."""
        ...


@runtime_checkable
class VendorLoop(Provider, Protocol):
    """A provider that brings a loop of its own.

    Used as a plain `Provider` it makes one model call from the conversation it is given.
    """

    def open(self, seat: VendorSeat) -> AbstractAsyncContextManager[VendorRun]:
        """Start the vendor's loop for one turn. Nothing of it is left running after the block."""
        ...


def brings_loop(provider: Provider) -> TypeGuard[VendorLoop]:
    """Say whether a provider brings a loop of its own. Such a provider has a method `open`."""
    return hasattr(provider, "open")
