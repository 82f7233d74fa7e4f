"""What the log keeps of a server: the list of tools that a run began with, and every change to it.

The list is pinned: a resumed run shows its model the same tools, whatever the server says by then. A change
is told, to the person and to the model, and a tool whose parameters or hints have changed is not called any
more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treenail.codec import sparse
from treenail.log import SlicePolicy
from treenail.state import Session, event


@sparse
@dataclass(frozen=True, slots=True)
class PinnedTool:
    """One tool as the server described it when the run began."""

    name: str
    """The server's own name for it."""
    shown_as: str
    """The name that the model sees."""
    description: str
    schema: str
    """The JSON schema of its parameters, as text."""
    read_only: bool | None = None
    destructive: bool | None = None
    idempotent: bool | None = None
    open_world: bool | None = None

    @property
    def contract(self) -> tuple[object, ...]:
        """What a call relies on: the parameters and the hints."""
        return (self.schema, self.read_only, self.destructive, self.idempotent, self.open_world)

    def parameters(self) -> Mapping[str, Any]:
        """Return the schema of its parameters."""
        found: dict[str, Any] = json.loads(self.schema)
        return found


@event(name="treenail.McpServerPinned", policy=SlicePolicy.LOG)
@sparse
@dataclass(frozen=True, slots=True)
class McpServerPinned:
    """A run uses a server, with this list of tools until its end."""

    server: str
    fingerprint: str
    """The hash of the list."""
    tools: tuple[PinnedTool, ...] = ()
    refused: tuple[str, ...] = ()
    """The tools that are left out, each with the reason."""
    title: str = ""
    """What the server calls itself, and its version."""
    protocol: str = ""
    """The version of the protocol that both speak."""
    instructions: str = ""
    """What a trusted server tells models about itself."""
    reached: str = ""
    """The program or the address, without secrets."""
    confinement: str = ""
    """What confines the server's process; empty for one that is reached over the network."""


@event(name="treenail.McpToolsChanged", policy=SlicePolicy.LOG)
@sparse
@dataclass(frozen=True, slots=True)
class McpToolsChanged:
    """A server's list of tools is no longer the one that the run began with. The run keeps the old one."""

    server: str
    fingerprint: str
    """The hash of the new list."""
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    """Tools whose parameters or hints differ: they are not called any more."""
    reworded: tuple[str, ...] = ()
    """Tools of which only the description differs."""

    def told(self) -> str:
        """Say what changed, for the model and for a person."""
        parts = (
            ("new, and not usable in this run", self.added),
            ("gone", self.removed),
            ("changed, and not usable in this run any more", self.changed),
            ("described in other words", self.reworded),
        )
        said = "; ".join(f"{label}: {_some(names)}" for label, names in parts if names)
        return f"The server {self.server} has changed its tools since this run began. {said}."


@event(name="treenail.McpServerFailed", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class McpServerFailed:
    """A server could not be used; the run continues without it."""

    server: str
    reason: str


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(each[:128] for each in names[:10])
    return shown if len(names) <= 10 else f"{shown} and {len(names) - 10} more"


def fingerprint(tools: Sequence[PinnedTool]) -> str:
    """Return the hash of a list of tools."""
    whole = [[each.name, each.description, *each.contract] for each in tools]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def pin_of(session: Session, server: str) -> McpServerPinned | None:
    """Return the list of tools that a run began with, if it has used the server before."""
    return next((each for each in session[McpServerPinned].all() if each.server == server), None)


def compared(pin: McpServerPinned, tools: Sequence[PinnedTool]) -> McpToolsChanged | None:
    """Return how a list differs from the pinned one; None if it does not."""
    now = fingerprint(tools)
    if now == pin.fingerprint:
        return None
    before, after = ({each.name: each for each in some} for some in (pin.tools, tools))
    both = [name for name in before if name in after]
    return McpToolsChanged(
        pin.server,
        now,
        added=tuple(name for name in after if name not in before),
        removed=tuple(name for name in before if name not in after),
        changed=tuple(name for name in both if before[name].contract != after[name].contract),
        reworded=tuple(
            name
            for name in both
            if before[name].contract == after[name].contract
            and before[name].description != after[name].description
        ),
    )
