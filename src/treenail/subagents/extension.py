"""Give a loop subagents for the length of its run: the tools, and the supervision behind them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from treenail.agent import AnyAgent, Extension
from treenail.prompt import MarkdownSection
from treenail.providers import Provider
from treenail.subagents.limits import SubagentLimits
from treenail.subagents.runner import ChildRunner, LoopRunner
from treenail.subagents.supervision import Subagents
from treenail.subagents.tools import subagent_tools
from treenail.turns import InnerLoop, prompt_extended

GUIDE = (
    "You can hand parts of the work to subagents. They do not see this conversation, so a task must say "
    "everything. Start those that do not depend on each other together, and wait for them before you rely on "
    "their work; subagents that are still running when you give your answer are cancelled."
)
"""What a model is told about its subagents, besides the descriptions of the tools."""


def with_subagents(
    agents: Sequence[AnyAgent] | Mapping[str, AnyAgent],
    *,
    limits: SubagentLimits | None = None,
    provider: Provider | Callable[[AnyAgent], Provider] | None = None,
    runner: ChildRunner | None = None,
) -> Extension:
    """Let a loop's model use these agents as subagents.

    They use the loop's own provider unless another is given, have its `deps`, and work inside its containment
    and permissions. When the turn has ended, running subagents are cancelled, with evidence.
    """

    @asynccontextmanager
    async def extend(loop: InnerLoop) -> AsyncIterator[Subagents]:
        async with Subagents(
            loop.state,
            agents,
            runner=runner or LoopRunner(loop.provider if provider is None else provider, deps=loop.deps),
            limits=limits,
            containment=loop.containment,
            permissions=loop.permissions,
        ) as subagents:
            section: MarkdownSection[Any] = MarkdownSection(
                "Subagents", template=GUIDE, tools=subagent_tools(subagents)
            )
            with prompt_extended(loop, section):
                yield subagents

    return extend
