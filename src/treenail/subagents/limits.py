"""The operator's limits for subagents, and how a request is narrowed to them.

Code or a model that spawns a subagent may ask for less than the operator allows. A larger request is
narrowed to the operator's ceiling, and the answer says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from treenail.containment import ExecutionConfig, Limits, as_config, integer, number


@dataclass(frozen=True, slots=True, kw_only=True)
class SubagentLimits:
    """Ceilings for the subagents of one parent."""

    max_threads: int = 6
    """How many run at once; the others wait in a queue, first come, first served."""
    max_depth: int = 1
    """How deep subagents may nest. The subagents of a root session are at depth 1."""
    timeout_s: float = 120.0
    """How long a subagent may run, counted from its start, across restarts."""
    budget: ExecutionConfig | Limits = field(default_factory=Limits)
    """Ceilings of each subagent, besides the parent's. The lower of its timeout and `timeout_s` counts."""
    max_children: int = 100
    """How many subagents a parent may ever start."""

    def __post_init__(self) -> None:
        integer("SubagentLimits", "max_threads", self.max_threads)
        integer("SubagentLimits", "max_depth", self.max_depth, zero_ok=True)
        number("SubagentLimits", "timeout_s", self.timeout_s)
        integer("SubagentLimits", "max_children", self.max_children)
        as_config(self.budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """The limits of one subagent, requested or granted. None asks for the operator's limit."""

    timeout_s: float | None = None
    max_steps: int | None = None
    max_cost_usd: float | None = None

    def __post_init__(self) -> None:
        for name in ("timeout_s", "max_cost_usd"):
            value = getattr(self, name)
            if value is not None:
                number("Allowance", name, value)
        if self.max_steps is not None:
            integer("Allowance", "max_steps", self.max_steps)


def narrow(limits: SubagentLimits, asked: Allowance) -> tuple[Allowance, tuple[str, ...]]:
    """Return what is granted, and a sentence for each request that was narrowed."""
    config = as_config(limits.budget)
    time_s = limits.timeout_s
    if config.timeout_ms:
        time_s = min(time_s, config.timeout_ms / 1000)
    ceilings = Allowance(timeout_s=time_s, max_steps=config.max_steps, max_cost_usd=config.max_cost_usd)
    granted, notes = ceilings, []
    for name, unit in (("timeout_s", " s"), ("max_steps", ""), ("max_cost_usd", " USD")):
        wish, ceiling = getattr(asked, name), getattr(ceilings, name)
        if wish is None:
            continue
        if ceiling is not None and wish > ceiling:
            notes.append(
                f"{name} was narrowed from {wish:g}{unit} to {ceiling:g}{unit}, the operator's ceiling"
            )
        else:
            granted = replace(granted, **{name: wish})
    return granted, tuple(notes)


def config_of(allowance: Allowance, budget: ExecutionConfig | Limits) -> ExecutionConfig:
    """Return an allowance as the ceilings of a child chain."""
    whole = as_config(budget)
    timeout_s = allowance.timeout_s
    return replace(
        whole,
        max_cost_usd=allowance.max_cost_usd,
        max_steps=allowance.max_steps,
        timeout_ms=0 if timeout_s is None else max(1, round(timeout_s * 1000)),
        # A shared budget needs a ceiling; without one here, the parent's chain already draws on it.
        budget_backend=whole.budget_backend if allowance.max_cost_usd is not None else None,
    )
