"""A loop for one kind of request: how it becomes a prompt, and where its session comes from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from treenail.conversation.messages import enable_inner_message_recording
from treenail.errors import ConversationNotFound
from treenail.prompt.events import PromptResponse
from treenail.prompt.output import OutputT
from treenail.prompt.template import Prompt
from treenail.providers.adapter import ProviderAdapter
from treenail.state.budget import Budget, Deadline
from treenail.state.run_context import RunContext
from treenail.state.session import Session
from treenail.tools.context import Heartbeat

UserRequestT = TypeVar("UserRequestT")


class MainLoop(ABC, Generic[UserRequestT, OutputT]):
    """Serves requests of one type with one adapter.

    Say how a request becomes a prompt, and, if sessions are not to live in memory alone, where they
    come from. Messages are recorded from the first one on, so that an evaluation that was cut off can
    be resumed.
    """

    def __init__(self, adapter: ProviderAdapter, *, budget: Budget | None = None) -> None:
        self.adapter = adapter
        self.budget = budget

    @abstractmethod
    def create_prompt(self, request: UserRequestT) -> Prompt[OutputT]:
        """Make the prompt that serves a request."""

    def create_session(self) -> Session:
        """Make the session of a request; it lives in memory unless this is overridden."""
        return Session()

    def finalize(
        self, prompt: Prompt[OutputT], session: Session, response: PromptResponse[OutputT]
    ) -> PromptResponse[OutputT]:
        """Look at the answer before it is returned, or put another in its place."""
        return response

    def execute(
        self,
        request: UserRequestT,
        *,
        session: Session | None = None,
        deadline: Deadline | None = None,
        budget: Budget | None = None,
        heartbeat: Heartbeat | None = None,
        run_context: RunContext | None = None,
    ) -> PromptResponse[OutputT]:
        """Serve a request and return its answer. Not for use inside an event loop."""
        prompt = self.create_prompt(request)
        own = self._recording(session)
        given = self._given(deadline, budget, heartbeat, run_context)
        return self.finalize(prompt, own, self.adapter.evaluate(prompt, session=own, **given))

    async def aexecute(
        self,
        request: UserRequestT,
        *,
        session: Session | None = None,
        deadline: Deadline | None = None,
        budget: Budget | None = None,
        heartbeat: Heartbeat | None = None,
        run_context: RunContext | None = None,
    ) -> PromptResponse[OutputT]:
        """Serve a request and return its answer, inside an event loop."""
        prompt = self.create_prompt(request)
        own = self._recording(session)
        given = self._given(deadline, budget, heartbeat, run_context)
        return self.finalize(prompt, own, await self.adapter.aevaluate(prompt, session=own, **given))

    def resume(
        self,
        request: UserRequestT,
        session: Session,
        *,
        deadline: Deadline | None = None,
        budget: Budget | None = None,
        heartbeat: Heartbeat | None = None,
        run_context: RunContext | None = None,
    ) -> PromptResponse[OutputT]:
        """Go on with a request that was cut off in this session. Not for use inside an event loop.

        A session in which nothing was begun is served from the beginning: a request that died before
        its first message is not lost.
        """
        prompt = self.create_prompt(request)
        own = self._recording(session)
        given = self._given(deadline, budget, heartbeat, run_context)
        try:
            response = self.adapter.evaluate(prompt, session=own, resume=True, **given)
        except ConversationNotFound:
            response = self.adapter.evaluate(prompt, session=own, **given)
        return self.finalize(prompt, own, response)

    async def aresume(
        self,
        request: UserRequestT,
        session: Session,
        *,
        deadline: Deadline | None = None,
        budget: Budget | None = None,
        heartbeat: Heartbeat | None = None,
        run_context: RunContext | None = None,
    ) -> PromptResponse[OutputT]:
        """Go on with a request that was cut off in this session, inside an event loop. See `resume`."""
        prompt = self.create_prompt(request)
        own = self._recording(session)
        given = self._given(deadline, budget, heartbeat, run_context)
        try:
            response = await self.adapter.aevaluate(prompt, session=own, resume=True, **given)
        except ConversationNotFound:
            response = await self.adapter.aevaluate(prompt, session=own, **given)
        return self.finalize(prompt, own, response)

    def _recording(self, session: Session | None) -> Session:
        own = session if session is not None else self.create_session()
        enable_inner_message_recording(own)
        return own

    def _given(
        self,
        deadline: Deadline | None,
        budget: Budget | None,
        heartbeat: Heartbeat | None,
        run_context: RunContext | None,
    ) -> dict[str, Any]:
        return {
            "deadline": deadline,
            "budget": budget or self.budget,
            "heartbeat": heartbeat,
            "run_context": run_context,
        }
