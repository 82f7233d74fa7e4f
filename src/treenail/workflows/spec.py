"""The specification of a workflow: steps with dependencies, checked when they are put together.

A specification is data. Creating one runs nothing and imports nothing, and an error names its place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal, cast

from treenail.errors import UsageError
from treenail.subagents import WORKSPACE_MODES, WorkspaceMode
from treenail.workflows.globs import check_glob
from treenail.workflows.schemas import schema_of

Posture = Literal["read", "write", "apply"]
"""What a step does to the workspace: read it, write it, or apply other steps' changes to it."""

POSTURES: tuple[Posture, ...] = ("read", "write", "apply")

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_STEPS = 1_000
MAX_RETRIES = 100
MAX_NUMBER = 1e9
"""The largest value of a limit: thirty years, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """One step of a workflow."""

    id: str
    """Unique in the workflow; letters, digits, `.`, `_` and `-`."""
    task: str = ""
    """What its agent is told to do. A step with posture `apply` has none."""
    agent: str = "agent"
    """The name of the agent that does it."""
    depends_on: tuple[str, ...] = ()
    """The steps that must be ready before this one starts."""
    posture: Posture = "write"
    read_set: tuple[str, ...] = ("**",)
    """What it reads, as globs."""
    write_set: tuple[str, ...] = ("**",)
    """What it may write or apply, as globs. A step that writes elsewhere is not ready."""
    workspace: WorkspaceMode | None = None
    """Where it works. The default is `read_only` for a step that reads, `isolated` for one that writes."""
    apply_from: tuple[str, ...] = ()
    """For posture `apply` only: the steps whose changes it applies."""
    auto_apply: bool = True
    """Whether an isolated step's changes are applied when it is ready. If not, another step must do it."""
    required: bool = True
    """Whether the workflow needs it to be complete."""
    timeout_s: float | None = None
    retries: int = 0
    """How often it is retried after it failed or timed out."""
    max_cost_usd: float | None = None
    max_steps: int | None = None
    output: Any = None
    """The value that it must return: a JSON schema, or a type (a dataclass, a pydantic model, a list of
    either ...), which is stored as its schema. None if it returns only a summary."""

    def __post_init__(self) -> None:
        if self.output is not None and not isinstance(self.output, Mapping):
            object.__setattr__(self, "output", schema_of(self.output, f"the step {self.id!r}, output"))

    @property
    def mode(self) -> WorkspaceMode:
        """Where it works."""
        if self.workspace is not None:
            return self.workspace
        return "read_only" if self.posture == "read" else "isolated"

    @property
    def writes(self) -> tuple[str, ...]:
        """The globs that it may write; none for a step that reads."""
        return () if self.posture == "read" else self.write_set

    @property
    def has_copy(self) -> bool:
        """Whether it works on a copy, so that its changes are invisible until they are applied."""
        return self.posture == "write" and self.mode == "isolated"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """An agent described in a workflow's file. The command that runs the file makes an `Agent` of it."""

    name: str
    instructions: str
    tools: tuple[str, ...] | None = None
    """Names of tool sets; None for the default ones."""
    max_iterations: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowSpec:
    """Steps with dependencies. Raises `UsageError` with the place of the first mistake."""

    id: str
    steps: tuple[StepSpec, ...]
    name: str = ""
    max_concurrency: int = 4
    """How many steps run at once."""
    timeout_s: float = 3600.0
    """How long the whole workflow may run, restarts included."""
    max_cost_usd: float | None = None
    """The most that all steps together may cost."""
    agents: tuple[AgentSpec, ...] = ()
    """Agents that the file describes. In Python, pass agents to `run_workflow` instead."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def title(self) -> str:
        """Its name, or its id if it has none."""
        return self.name or self.id

    def step(self, step_id: str) -> StepSpec:
        """Return a step. Raises `UsageError` for an unknown id."""
        for each in self.steps:
            if each.id == step_id:
                return each
        raise UsageError(f"the workflow {self.id!r} has no step {step_id!r}; it has: {_ids(self.steps)}")

    def dependents_of(self, step_id: str) -> frozenset[str]:
        """Return the steps that depend on this one, directly or indirectly."""
        found: set[str] = set()
        waiting = [step_id]
        while waiting:
            now = waiting.pop()
            for each in self.steps:
                if now in each.depends_on and each.id not in found:
                    found.add(each.id)
                    waiting.append(each.id)
        return frozenset(found)

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON data, which `spec_from_data` reads."""
        return cast("dict[str, Any]", _data(self))

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> WorkflowSpec:
        """Make a specification from what `to_data` returned. For data of others use `spec_from_data`."""
        try:
            made = {
                **data,
                "steps": tuple(StepSpec(**_tuples(each)) for each in data["steps"]),
                "agents": tuple(AgentSpec(**_tuples(each)) for each in data.get("agents", ())),
            }
            return cls(**made)
        except (TypeError, KeyError) as error:
            raise UsageError(f"this is not a workflow: {error!r}") from error


def _data(value: Any) -> Any:
    if isinstance(value, StepSpec | AgentSpec | WorkflowSpec):
        found = {each.name: _data(getattr(value, each.name)) for each in fields(value)}
        return {name: each for name, each in found.items() if each is not None}
    return [_data(each) for each in value] if isinstance(value, tuple) else value


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}


# --- checking --------------------------------------------------------------------------------------


def _ids(steps: Sequence[StepSpec]) -> str:
    return ", ".join(each.id for each in steps) or "none"


def _check(spec: WorkflowSpec) -> None:
    _check_id("the workflow's id", spec.id)
    if not spec.steps:
        raise UsageError(f"the workflow {spec.id!r} has no steps; give it at least one")
    if len(spec.steps) > MAX_STEPS:
        raise UsageError(f"the workflow {spec.id!r} has {len(spec.steps)} steps; {MAX_STEPS} is the most")
    _check_number("max_concurrency", spec.max_concurrency, whole=True)
    _check_number("timeout_s", spec.timeout_s)
    if spec.max_cost_usd is not None:
        _check_number("max_cost_usd", spec.max_cost_usd)
    _check_agents(spec)
    known: dict[str, int] = {}
    for place, step in enumerate(spec.steps):
        where = f"steps[{place}]"
        _check_id(f"{where}.id", step.id)
        if step.id in known:
            raise UsageError(f"{where}.id: {step.id!r} is also the id of steps[{known[step.id]}]; rename one")
        known[step.id] = place
    for place, step in enumerate(spec.steps):
        _check_step(spec, step, f"steps[{place}] ({step.id})", known)
    _check_cycles(spec)
    for place, step in enumerate(spec.steps):
        _check_applies(spec, step, f"steps[{place}] ({step.id})")


def _check_agents(spec: WorkflowSpec) -> None:
    known: set[str] = set()
    for place, each in enumerate(spec.agents):
        where = f"agents[{place}]"
        _check_id(f"{where}.name", each.name)
        if each.name in known:
            raise UsageError(f"{where}.name: there are two agents named {each.name!r}; rename one")
        known.add(each.name)
        if not each.instructions.strip():
            raise UsageError(f"{where}.instructions: say what the agent is and does")
        if each.max_iterations is not None:
            _check_number(f"{where}.max_iterations", each.max_iterations, whole=True)


def _check_step(spec: WorkflowSpec, step: StepSpec, where: str, known: Mapping[str, int]) -> None:
    for number, each in enumerate(step.depends_on):
        if each not in known:
            raise UsageError(
                f"{where}.depends_on[{number}]: there is no step {each!r}; there are: {_ids(spec.steps)}"
            )
        if each == step.id:
            raise UsageError(f"{where}.depends_on[{number}]: a step cannot depend on itself")
    if step.posture not in POSTURES:
        raise UsageError(f"{where}.posture: {step.posture!r} is not one of {', '.join(POSTURES)}")
    if step.workspace is not None and step.workspace not in WORKSPACE_MODES:
        raise UsageError(f"{where}.workspace: {step.workspace!r} is not one of {', '.join(WORKSPACE_MODES)}")
    if step.posture == "read" and step.mode != "read_only":
        raise UsageError(f"{where}.workspace: a step that reads works read_only, not {step.mode}")
    if step.posture == "write" and step.mode == "read_only":
        raise UsageError(f"{where}.workspace: a step that writes needs shared or isolated, not read_only")
    if step.posture != "apply" and not step.task.strip():
        raise UsageError(f"{where}.task: say what the agent should do")
    for name in ("read_set", "write_set"):
        for number, glob in enumerate(getattr(step, name)):
            try:
                check_glob(glob)
            except UsageError as error:
                raise UsageError(f"{where}.{name}[{number}]: {error}") from error
    for name in ("timeout_s", "max_cost_usd"):
        if getattr(step, name) is not None:
            _check_number(f"{where}.{name}", getattr(step, name))
    if step.max_steps is not None:
        _check_number(f"{where}.max_steps", step.max_steps, whole=True)
    _check_number(f"{where}.retries", step.retries, whole=True, zero=True)
    if step.retries > MAX_RETRIES:
        raise UsageError(f"{where}.retries: {step.retries} is more than {MAX_RETRIES}")
    if step.output is not None:
        schema_of(step.output, f"{where}.output")


def _check_applies(spec: WorkflowSpec, step: StepSpec, where: str) -> None:
    if step.posture != "apply":
        if step.apply_from:
            raise UsageError(f"{where}.apply_from: only a step with posture apply has this field")
        return
    if step.task.strip():
        raise UsageError(f"{where}.task: a step with posture apply has no task; give it to another step")
    if not step.apply_from:
        raise UsageError(f"{where}.apply_from: name the steps whose changes it applies")
    for number, each in enumerate(step.apply_from):
        if each not in step.depends_on:
            raise UsageError(f"{where}.apply_from[{number}]: {each!r} must be among depends_on as well")
        source = spec.step(each)
        if source.posture != "write" or source.mode != "isolated" or source.auto_apply:
            raise UsageError(
                f"{where}.apply_from[{number}]: {each!r} must write in an isolated workspace with "
                "auto_apply: false, or there is nothing left to apply"
            )


def _check_cycles(spec: WorkflowSpec) -> None:
    try:
        TopologicalSorter({each.id: each.depends_on for each in spec.steps}).prepare()
    except CycleError as error:
        cycle = " -> ".join(reversed(error.args[1]))
        raise UsageError(
            f"the steps depend on each other in a cycle: {cycle}; remove one of these dependencies"
        ) from None


def _check_id(what: str, value: object) -> None:
    if not isinstance(value, str) or not _ID.fullmatch(value) or value in (".", ".."):
        raise UsageError(
            f"{what}: {value!r} is not an id; use 1 to 64 letters, digits, '.', '_' and '-', beginning with "
            "a letter or digit"
        )


def _check_number(what: str, value: object, *, whole: bool = False, zero: bool = False) -> None:
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise UsageError(f"{what}: {value!r:.40} is not a {'whole ' if whole else ''}number")
    if not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise UsageError(f"{what}: {value!r:.40} is out of range")
    if value < 0 or (value == 0 and not zero):
        raise UsageError(f"{what}: {value!r} must be {'0 or more' if zero else 'above 0'}")
