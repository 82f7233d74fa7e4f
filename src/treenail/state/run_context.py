"""Which run, which attempt, which trace: the ids that tie events of one request together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from uuid import UUID

from treenail.clock import new_id, new_span_id, new_trace_id
from treenail.errors import UsageError


@dataclass(frozen=True, slots=True)
class RunContext:
    """The identity of one attempt to serve one request.

    A request keeps its `request_id` however often it is tried; each attempt has a `run_id` of its
    own. Everything that serves the request, in whichever session, shares its `trace_id`.
    """

    run_id: UUID = field(default_factory=new_id)
    """This attempt. Never used twice."""
    request_id: UUID = field(default_factory=new_id)
    """The request, stable over its attempts and over its children."""
    session_id: UUID | None = None
    attempt: int = 1
    """Counts from 1."""
    worker_id: str = "local"
    trace_id: str | None = None
    span_id: str | None = None
    parent_span_id: str | None = None

    def __post_init__(self) -> None:
        attempt: object = self.attempt
        if isinstance(attempt, bool) or not isinstance(attempt, int) or attempt < 1:
            raise UsageError(f"RunContext.attempt counts from 1, so it cannot be {attempt!r}")

    @classmethod
    def new(
        cls,
        *,
        session_id: UUID | None = None,
        request_id: UUID | None = None,
        worker_id: str = "local",
        trace_id: str | None = None,
    ) -> RunContext:
        """Begin a first attempt, with a trace and a span. Pass `trace_id` to join a trace that exists."""
        return cls(
            request_id=request_id or new_id(),
            session_id=session_id,
            worker_id=worker_id,
            trace_id=trace_id or new_trace_id(),
            span_id=new_span_id(),
        )

    def child(self, session_id: UUID) -> RunContext:
        """Return the context of a nested run in a child session: a fresh run and span in the same trace."""
        return RunContext(
            request_id=self.request_id,
            session_id=session_id,
            worker_id=self.worker_id,
            trace_id=self.trace_id,
            span_id=new_span_id(),
            parent_span_id=self.span_id,
        )

    def next_attempt(self, *, worker_id: str | None = None) -> RunContext:
        """Return the context of the next try of the same request, perhaps by another worker."""
        return replace(
            self,
            run_id=new_id(),
            attempt=self.attempt + 1,
            span_id=new_span_id(),
            worker_id=self.worker_id if worker_id is None else worker_id,
        )
