"""The order of steps: which may run together, and which must not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from treenail.workflows.globs import overlaps
from treenail.workflows.spec import StepSpec, WorkflowSpec


def conflict(first: StepSpec, second: StepSpec) -> str | None:
    """Return why two steps must not run at the same time; None if they may.

    Steps with overlapping write sets never run together. A step that reads does not run beside one that
    writes or applies the same files in the shared workspace. A step with a copy disturbs no reader: its
    changes are applied when no step reads those files.
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
    """Return the order in which the steps can run: each wave together, one wave after the other."""
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
    """The plan of a workflow: which steps can run together, and which conflicts keep steps apart."""

    waves: tuple[tuple[str, ...], ...]
    conflicts: tuple[tuple[str, str, str], ...]
    """Pairs of steps that are independent but never run together, with the reason."""

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "waves": [list(each) for each in self.waves],
            "conflicts": [{"steps": [one, other], "because": why} for one, other, why in self.conflicts],
        }


def dry_run(spec: WorkflowSpec) -> DryRun:
    """Plan a workflow without running it. Needs no agents and no workspace."""
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
