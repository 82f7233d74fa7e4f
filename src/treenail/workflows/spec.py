"""What a workflow is: steps with dependencies, as Python values or as YAML or JSON. Mistakes are found here.

A specification says nothing about how a run of it went. It is data: reading one runs nothing and imports
nothing, and what is wrong in it is named with its place.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from treenail.errors import UsageError
from treenail.subagents.events import WORKSPACE_MODES, WorkspaceMode
from treenail.workflows.globs import check_glob, overlaps
from treenail.workflows.schemas import schema_of

Posture = Literal["read", "write", "apply"]
"""What a step does to the workspace: looks at it, changes it, or brings other steps' changes into it."""

POSTURES: tuple[Posture, ...] = ("read", "write", "apply")

yaml: Any = importlib.import_module("yaml")  # It comes without types.

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_STEPS = 1_000
MAX_RETRIES = 100
MAX_NUMBER = 1e9
"""The largest number that a limit may be: thirty years, in seconds."""
MAX_FILE_BYTES = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """One step of a workflow."""

    id: str
    """Unique in the workflow; letters, digits, `.`, `_` and `-`."""
    task: str = ""
    """What is to be done. A step that applies has none."""
    agent: str = "agent"
    """Who does it, by name."""
    depends_on: tuple[str, ...] = ()
    """The steps that must be ready before this one starts."""
    posture: Posture = "write"
    read_set: tuple[str, ...] = ("**",)
    """What it reads, as globs."""
    write_set: tuple[str, ...] = ("**",)
    """What it may write, as globs; what it writes elsewhere is not taken. For a step that applies: what
    it may bring home."""
    workspace: WorkspaceMode | None = None
    """Where it works; by default read-only for a step that reads, and a copy for one that writes."""
    apply_from: tuple[str, ...] = ()
    """For a step that applies: whose changes. For others: nothing."""
    auto_apply: bool = True
    """Whether what an isolated step has changed is applied when it is ready; else a step must do it."""
    required: bool = True
    """Whether the workflow can be complete without it."""
    timeout_s: float | None = None
    retries: int = 0
    """How often it is tried again after it failed or ran out of time."""
    max_cost_usd: float | None = None
    max_steps: int | None = None
    output: Any = None
    """The value that it must return: a JSON schema, or a type (a dataclass, a pydantic model, a list of one
    of them ...), which is kept as its schema. None for a summary alone."""

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
        """What it may write, as globs; nothing for a step that reads."""
        return () if self.posture == "read" else self.write_set

    @property
    def has_copy(self) -> bool:
        """Whether it works on a copy, so that nobody sees what it does before it is applied."""
        return self.posture == "write" and self.mode == "isolated"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """An agent as a file tells it. Whoever runs the file turns it into one; nothing else reads it."""

    name: str
    instructions: str
    tools: tuple[str, ...] | None = None
    """Names of tool sets that the reader of the file knows; None for the usual ones."""
    max_iterations: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowSpec:
    """Steps with dependencies. Raises `UsageError`, with the place, if they do not fit together."""

    id: str
    steps: tuple[StepSpec, ...]
    name: str = ""
    max_concurrency: int = 4
    """How many steps run at once."""
    timeout_s: float = 3600.0
    """How long the whole of it may take, restarts included."""
    max_cost_usd: float | None = None
    """What all steps together may cost."""
    agents: tuple[AgentSpec, ...] = ()
    """Agents that the file itself describes. In Python, hand agents to whatever runs the workflow."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def title(self) -> str:
        """What people call it."""
        return self.name or self.id

    def step(self, step_id: str) -> StepSpec:
        """Return a step. Raises `UsageError` if there is none with that id."""
        for each in self.steps:
            if each.id == step_id:
                return each
        raise UsageError(f"the workflow {self.id!r} has no step {step_id!r}; it has: {_ids(self.steps)}")

    def dependents_of(self, step_id: str) -> frozenset[str]:
        """Return the steps that wait for this one, directly or not."""
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
        """Return it as JSON data, from which `spec_from_data` makes it again."""
        return {
            "id": self.id,
            "name": self.name,
            "max_concurrency": self.max_concurrency,
            "timeout_s": self.timeout_s,
            "max_cost_usd": self.max_cost_usd,
            "agents": [_agent_data(each) for each in self.agents],
            "steps": [_step_data(each) for each in self.steps],
        }


def _step_data(step: StepSpec) -> dict[str, Any]:
    data: dict[str, Any] = {"id": step.id, "agent": step.agent, "posture": step.posture}
    for name in (
        "task",
        "depends_on",
        "workspace",
        "apply_from",
        "timeout_s",
        "retries",
        "max_cost_usd",
        "max_steps",
        "output",
    ):
        value = getattr(step, name)
        if value not in (None, "", (), 0):
            data[name] = list(value) if isinstance(value, tuple) else value
    data["read_set"], data["write_set"] = list(step.read_set), list(step.write_set)
    data["required"], data["auto_apply"] = step.required, step.auto_apply
    return data


def _agent_data(agent: AgentSpec) -> dict[str, Any]:
    return {
        "name": agent.name,
        "instructions": agent.instructions,
        "tools": None if agent.tools is None else list(agent.tools),
        "max_iterations": agent.max_iterations,
    }


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
            raise UsageError(f"{where}.depends_on[{number}]: a step cannot wait for itself")
    if step.posture not in POSTURES:
        raise UsageError(f"{where}.posture: {step.posture!r} is none of {', '.join(POSTURES)}")
    if step.workspace is not None and step.workspace not in WORKSPACE_MODES:
        raise UsageError(f"{where}.workspace: {step.workspace!r} is none of {', '.join(WORKSPACE_MODES)}")
    if step.posture == "read" and step.mode != "read_only":
        raise UsageError(f"{where}.workspace: a step that reads works read_only, not {step.mode}")
    if step.posture == "write" and step.mode == "read_only":
        raise UsageError(f"{where}.workspace: a step that writes needs shared or isolated, not read_only")
    if step.posture != "apply" and not step.task.strip():
        raise UsageError(f"{where}.task: say what is to be done")
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
            raise UsageError(f"{where}.apply_from: only a step with posture apply takes changes of others")
        return
    if step.task.strip():
        raise UsageError(f"{where}.task: a step that applies has no task; let another step do the work")
    if not step.apply_from:
        raise UsageError(f"{where}.apply_from: say whose changes are to be applied")
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
    done: set[str] = set()
    by_id = {each.id: each for each in spec.steps}
    for root in spec.steps:
        path: list[str] = []
        waiting: list[Iterator[str]] = [iter((root.id,))]
        while waiting:
            following = next(waiting[-1], None)
            if following is None:
                waiting.pop()
                if path:
                    done.add(path.pop())
                continue
            if following in done:
                continue
            if following in path:
                circle = " -> ".join((*path[path.index(following) :], following))
                raise UsageError(f"the steps wait for each other in a circle: {circle}; break it somewhere")
            path.append(following)
            waiting.append(iter(by_id[following].depends_on))


def _check_id(what: str, value: object) -> None:
    if not isinstance(value, str) or not _ID.fullmatch(value) or value in (".", ".."):
        raise UsageError(
            f"{what}: {value!r} is no id; use 1 to 64 letters, digits, '.', '_' and '-', beginning with a "
            "letter or digit"
        )


def _check_number(what: str, value: object, *, whole: bool = False, zero: bool = False) -> None:
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise UsageError(f"{what}: {value!r:.40} is no {'whole ' if whole else ''}number")
    if not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise UsageError(f"{what}: {value!r:.40} is no number that can be meant")
    if value < 0 or (value == 0 and not zero):
        raise UsageError(f"{what}: {value!r} must be {'0 or more' if zero else 'above 0'}")


# --- order -----------------------------------------------------------------------------------------


def conflict(first: StepSpec, second: StepSpec) -> str | None:
    """Say why two steps must not run at the same time; None if they may.

    Two that write what overlaps never run together. One that reads does not run beside one that writes
    what it reads, or brings it home, in the same workspace. A copy of its own disturbs nobody; what is
    changed there is applied when nobody reads it.
    """
    for one in first.writes:
        for other in second.writes:
            if overlaps(one, other):
                return f"both write {one if one == other else f'{one} and {other}'}"
    for reader, writer in ((first, second), (second, first)):
        if writer.has_copy:
            continue
        for one in reader.read_set:
            for other in writer.writes:
                if overlaps(one, other):
                    return f"{reader.id} reads {one} while {writer.id} writes {other}"
    return None


def waves(spec: WorkflowSpec) -> tuple[tuple[str, ...], ...]:
    """Return the steps in the order in which they can run: each wave together, one wave after the other."""
    left = list(spec.steps)
    done: set[str] = set()
    found: list[tuple[str, ...]] = []
    while left:
        wave: list[StepSpec] = []
        for each in left:
            if not set(each.depends_on) <= done or len(wave) >= spec.max_concurrency:
                continue
            if all(conflict(each, other) is None for other in wave):
                wave.append(each)
        found.append(tuple(each.id for each in wave))
        done.update(each.id for each in wave)
        left = [each for each in left if each.id not in done]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class DryRun:
    """How a workflow would go: what could run together, and what keeps steps apart."""

    waves: tuple[tuple[str, ...], ...]
    conflicts: tuple[tuple[str, str, str], ...]
    """Two steps that do not depend on each other and yet never run together, and why."""

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "waves": [list(each) for each in self.waves],
            "conflicts": [{"steps": [one, other], "because": why} for one, other, why in self.conflicts],
        }


def dry_run(spec: WorkflowSpec) -> DryRun:
    """Say how a workflow would go. Nothing is run, and no agent and no workspace is needed."""
    below = {each.id: spec.dependents_of(each.id) for each in spec.steps}
    found = []
    for place, one in enumerate(spec.steps):
        for other in spec.steps[place + 1 :]:
            if other.id in below[one.id] or one.id in below[other.id]:
                continue
            why = conflict(one, other)
            if why is not None:
                found.append((one.id, other.id, why))
    return DryRun(waves(spec), tuple(found))


# --- from files ------------------------------------------------------------------------------------

_STEP_KINDS: Mapping[str, str] = {
    "id": "text",
    "task": "text",
    "prompt": "text",
    "agent": "text",
    "depends_on": "texts",
    "posture": "text",
    "read_set": "texts",
    "write_set": "texts",
    "workspace": "text",
    "apply_from": "texts",
    "auto_apply": "flag",
    "required": "flag",
    "timeout_s": "number",
    "retries": "number",
    "max_cost_usd": "number",
    "max_steps": "number",
    "output": "schema",
}
_WORKFLOW_KINDS: Mapping[str, str] = {
    "id": "text",
    "name": "text",
    "max_concurrency": "number",
    "timeout_s": "number",
    "max_cost_usd": "number",
    "steps": "steps",
    "agents": "agents",
}
_AGENT_KINDS: Mapping[str, str] = {
    "name": "text",
    "instructions": "text",
    "tools": "texts",
    "max_iterations": "number",
}


def spec_from_data(data: object, *, where: str = "the workflow") -> WorkflowSpec:
    """Make a specification from JSON data. Raises `UsageError` with the place of what is wrong."""
    fields = _fields(data, _WORKFLOW_KINDS, where)
    fields["agents"] = _agents(fields.pop("agents", None), where)
    steps = fields.pop("steps", None)
    if not isinstance(steps, list):
        raise UsageError(f"{where}: steps must be a list of steps")
    made = []
    for number, each in enumerate(steps):
        step = _fields(each, _STEP_KINDS, f"{where}, steps[{number}]")
        if "prompt" in step:
            if "task" in step:
                raise UsageError(f"{where}, steps[{number}]: task and prompt are the same; say one of them")
            step["task"] = step.pop("prompt")
        try:
            made.append(StepSpec(**step))
        except TypeError as error:
            raise UsageError(f"{where}, steps[{number}]: {error}") from error
    if "id" not in fields:
        raise UsageError(f"{where}: id is missing; name the workflow")
    try:
        return WorkflowSpec(steps=tuple(made), **fields)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _agents(data: object, where: str) -> tuple[AgentSpec, ...]:
    """Read agents: a list of them, or what each is by its name."""
    if data is None:
        return ()
    if isinstance(data, dict):
        data = [{"name": name, **each} if isinstance(each, dict) else each for name, each in data.items()]
    if not isinstance(data, list):
        raise UsageError(f"{where}: agents must be a list of agents, or agents by name")
    made = []
    for number, each in enumerate(data):
        agent = _fields(each, _AGENT_KINDS, f"{where}, agents[{number}]")
        for name in ("name", "instructions"):
            if name not in agent:
                raise UsageError(f"{where}, agents[{number}]: {name} is missing")
        made.append(AgentSpec(**agent))
    return tuple(made)


def _fields(data: object, kinds: Mapping[str, str], where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise UsageError(f"{where}: must be keys and values, not {type(data).__name__}")
    found: dict[str, Any] = {}
    for name, value in data.items():
        if name not in kinds:
            raise UsageError(f"{where}: {name!r:.80} is not known here; there are: {', '.join(kinds)}")
        if value is not None:
            found[name] = _value(kinds[name], value, f"{where}: {name}")
    return found


def _value(kind: str, value: object, where: str) -> object:
    fits = {
        "text": isinstance(value, str),
        "texts": isinstance(value, list) and all(isinstance(each, str) for each in value),
        "flag": isinstance(value, bool),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "schema": isinstance(value, dict),
    }.get(kind, True)
    if not fits:
        wanted = {"texts": "a list of texts", "flag": "true or false", "schema": "a JSON schema"}.get(
            kind, f"a {kind}"
        )
        raise UsageError(f"{where} must be {wanted}, not {value!r:.80}")
    return tuple(cast("list[str]", value)) if kind == "texts" else value


def read_data(path: Path) -> object:
    """Read a YAML or JSON file as data. Raises `UsageError` with what is wrong."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path} is larger than {MAX_FILE_BYTES} bytes; it is no workflow")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is no JSON: {error}") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, where: str) -> object:
    """Read YAML as data; nothing that it names is made or run."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{where} is no YAML: {error}") from error


def load_spec(path: str | Path) -> WorkflowSpec:
    """Read a specification from a YAML or JSON file. Raises `UsageError` with the place of what is wrong."""
    return spec_from_data(read_data(Path(path)), where=str(path))


def spec_schema() -> dict[str, Any]:
    """Return a JSON schema of a specification, for editors and for models."""
    simple: dict[str, dict[str, Any]] = {
        "text": {"type": "string"},
        "texts": {"type": "array", "items": {"type": "string"}},
        "flag": {"type": "boolean"},
        "number": {"type": "number"},
        "schema": {"type": "object"},
    }
    step: dict[str, Any] = {name: dict(simple[kind]) for name, kind in _STEP_KINDS.items()}
    step["posture"]["enum"], step["workspace"]["enum"] = list(POSTURES), list(WORKSPACE_MODES)
    whole: dict[str, Any] = {name: dict(simple.get(kind, {})) for name, kind in _WORKFLOW_KINDS.items()}
    agent: dict[str, Any] = {name: dict(simple[kind]) for name, kind in _AGENT_KINDS.items()}
    whole["agents"] = {
        "description": "Agents of this file: a list, or what each is by its name.",
        "anyOf": [
            {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": agent,
                    "required": ["name", "instructions"],
                    "additionalProperties": False,
                },
            },
            {"type": "object"},
        ],
    }
    whole["steps"] = {
        "type": "array",
        "minItems": 1,
        "items": {"type": "object", "properties": step, "required": ["id"], "additionalProperties": False},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Treenail workflow",
        "type": "object",
        "properties": whole,
        "required": ["id", "steps"],
        "additionalProperties": False,
    }
