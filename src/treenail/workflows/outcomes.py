"""The answer of a step's agent, and the checkpoint that is made of it: typed values, never prose.

A step's agent answers with a `StepAnswer`, which is a claim. From the claim and the evidence (did the turn
complete, do the files exist, does the value fit) the workflow makes a `Checkpoint`, on which other steps
rely. A step whose claim is missing or does not hold is not ready.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from treenail.codec import register_type
from treenail.log import Channel, SlicePolicy
from treenail.state import event

Readiness = Literal["checkpoint_ready", "partial", "failed", "held", "needs_orchestrator"]
"""Whether other steps can build on a step."""

BUNDLE_VERSION = 2


@event(name="treenail.StepAnswer", channel=Channel.AUDIT, policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class StepAnswer:
    """The answer of an agent at the end of a step."""

    status: Readiness = field(
        metadata={
            "description": (
                "checkpoint_ready only if the task is done and checked; partial if some of it can be used; "
                "failed; held if a person must do something; needs_orchestrator if a decision is needed."
            )
        }
    )
    summary: str = field(metadata={"description": "What was done and found, for the steps that build on it."})
    evidence: tuple[str, ...] = field(
        default=(), metadata={"description": "What proves it: commands and their output."}
    )
    artifacts: tuple[str, ...] = field(
        default=(), metadata={"description": "The files that hold the result, as paths in the workspace."}
    )
    known_limitations: tuple[str, ...] = field(
        default=(), metadata={"description": "What is not done, or uncertain."}
    )
    next_actions: tuple[str, ...] = field(
        default=(), metadata={"description": "What should be done next, if the step is not ready."}
    )
    payload_json: str = field(
        default="", metadata={"description": "The step's value as JSON text, if a value was asked for."}
    )


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file that a step made, identified by its content."""

    path: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was decided about a step that has ended; dependent steps and people are shown it."""

    step_id: str
    status: Readiness
    summary: str
    agent_id: str = ""
    """The subagent that did the step; empty if there was none."""
    child_session_id: str = ""
    known_limitations: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    artifacts: tuple[Artifact, ...] = ()
    payload_json: str = ""
    """The step's value, checked against its schema."""
    next_actions: tuple[str, ...] = ()
    verified_by: str = "turn"
    """Who decided: `turn` (the agent's answer and the log), `person`, or `engine`."""
    timed_out: bool = False
    reason: str = ""
    """Why it is not ready, in one word: `no_answer`, `artifact_missing`, `outside_write_set` ..."""
    changes_wanted: bool = False
    """A person called it ready, and its copy's changes must be applied before other steps build on it."""
    version: int = BUNDLE_VERSION

    @property
    def dependent_safe(self) -> bool:
        """Whether other steps may build on it."""
        return self.status == "checkpoint_ready"

    @property
    def is_usable(self) -> bool:
        """Whether it has a result that can be used."""
        return self.status in ("checkpoint_ready", "partial")

    @property
    def value(self) -> Any:
        """The step's value as JSON data; None if it has none."""
        return json.loads(self.payload_json) if self.payload_json else None

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON data."""
        payloads = []
        if self.payload_json:
            payloads.append({"schema_id": "workflow_checkpoint.v1", "payload_json": self.payload_json})
        return {
            "version": self.version,
            "step_id": self.step_id,
            "agent_id": self.agent_id,
            "child_session_id": self.child_session_id,
            "status": self.status,
            "dependent_safe": self.dependent_safe,
            "summary": self.summary,
            "known_limitations": list(self.known_limitations),
            "verification": {"source": self.verified_by, "evidence": list(self.evidence)},
            "typed_payloads": payloads,
            "artifacts": [
                {"schema_id": "artifact_ref.v1", "path": each.path, "sha256": each.sha256, "size": each.size}
                for each in self.artifacts
            ],
            "safe_next_actions": list(self.next_actions),
            "timed_out": self.timed_out,
            "reason": self.reason,
        }


for _kind in (Artifact, Checkpoint):
    register_type(_kind, name=f"treenail.workflows.{_kind.__name__}")
