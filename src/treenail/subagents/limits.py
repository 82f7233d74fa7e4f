"""What the operator allows subagents, and how a request is brought within it.

The operator's word is a ceiling. Whoever asks for a subagent, above all a model, may ask for
less; what is asked beyond the ceiling is narrowed to it, and that is said.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from treenail.containment import ExecutionConfig, Limits
from treenail.containment.limits import as_config, integer, number


@dataclass(frozen=True, slots=True, kw_only=True)
class SubagentLimits:
    """Ceilings for the subagents of one parent."""

    max_threads: int = 6
    """How many run at once; the others wait in the order in which they came."""
    max_depth: int = 1
    """How deep children may have children. The children of a root session are at depth 1."""
    timeout_s: float = 120.0
    """How long one may run, counted from its start, also across a restart."""
    budget: ExecutionConfig | Limits = field(default_factory=Limits)
    """Ceilings of each one; the parent's hold on top of them. Its timeout counts if it is the lower one."""
    max_children: int = 100
    """How many a parent may ever start."""
    retries: int = 1
    """How often a read-only one is tried again after the connection to its model failed."""

    def __post_init__(self) -> None:
        integer("SubagentLimits", "max_threads", self.max_threads)
        integer("SubagentLimits", "max_depth", self.max_depth, zero_ok=True)
        number("SubagentLimits", "timeout_s", self.timeout_s)
        integer("SubagentLimits", "max_children", self.max_children)
        integer("SubagentLimits", "retries", self.retries, zero_ok=True)
        as_config(self.budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What one subagent is allowed, or is asked to be allowed; None for whatever the operator allows."""

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
    """Return what is granted, and a sentence for each wish that was narrowed."""
    config = as_config(limits.budget)
    time_s = limits.timeout_s
    if config.timeout_ms:
        time_s = min(time_s, config.timeout_ms / 1000)
    ceilings = Allowance(
        timeout_s=time_s,
        max_steps=config.max_steps,
        max_cost_usd=config.max_cost_usd,
    )
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
        # A pot of money is the operator's; it needs a ceiling, and the parent's chain has it already.
        budget_backend=whole.budget_backend if allowance.max_cost_usd is not None else None,
    )
