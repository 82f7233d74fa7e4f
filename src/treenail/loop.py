"""A loop for one kind of request: how it becomes a prompt, and where its session comes from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypedDict, TypeVar, Unpack

from treenail.conversation import enable_inner_message_recording
from treenail.errors import ConversationNotFound
from treenail.prompt import OutputT, Prompt, PromptResponse
from treenail.providers import ProviderAdapter
from treenail.state import Budget, Deadline, RunContext, Session
from treenail.tools import Heartbeat, run_blocking

UserRequestT = TypeVar("UserRequestT")


class RequestOptions(TypedDict, total=False):
    """Options that every method of `MainLoop` passes on to its adapter."""

    deadline: Deadline | None
    budget: Budget | None
    """The ceiling of this request, in place of the loop's own."""
    heartbeat: Heartbeat | None
    run_context: RunContext | None


class MainLoop(ABC, Generic[UserRequestT, OutputT]):
    """Serves requests of one type with one adapter.

    Override `create_prompt`, and `create_session` if sessions are to outlive the process. Messages are
    recorded from the first one on, so that an interrupted evaluation can be resumed.
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
        """Check the answer before it is returned, or replace it.

        `execute` and `resume` call it outside of any event loop, so it may evaluate prompts itself.
        """
        return response

    def execute(
        self, request: UserRequestT, *, session: Session | None = None, **options: Unpack[RequestOptions]
    ) -> PromptResponse[OutputT]:
        """Serve a request and return its answer. Not for use inside an event loop."""
        return self._serve_blocking(request, session, False, options)

    async def aexecute(
        self, request: UserRequestT, *, session: Session | None = None, **options: Unpack[RequestOptions]
    ) -> PromptResponse[OutputT]:
        """Serve a request and return its answer, inside an event loop."""
        return await self._serve(request, session, False, options)

    def resume(
        self, request: UserRequestT, session: Session, **options: Unpack[RequestOptions]
    ) -> PromptResponse[OutputT]:
        """Resume a request that was interrupted in this session. Not for use inside an event loop.

        If the session holds no evaluation yet, the request is served from the beginning: a request that
        died before its first message is not lost.
        """
        return self._serve_blocking(request, session, True, options)

    async def aresume(
        self, request: UserRequestT, session: Session, **options: Unpack[RequestOptions]
    ) -> PromptResponse[OutputT]:
        """Resume a request that was interrupted in this session, inside an event loop. See `resume`."""
        return await self._serve(request, session, True, options)

    def _serve_blocking(
        self, request: UserRequestT, session: Session | None, resume: bool, options: RequestOptions
    ) -> PromptResponse[OutputT]:
        prompt, own = self.create_prompt(request), self._recording(session)
        response = run_blocking(
            lambda: self._evaluate(prompt, own, resume, options),
            face="MainLoop.resume" if resume else "MainLoop.execute",
            instead="aresume" if resume else "aexecute",
        )
        return self.finalize(prompt, own, response)

    async def _serve(
        self, request: UserRequestT, session: Session | None, resume: bool, options: RequestOptions
    ) -> PromptResponse[OutputT]:
        prompt, own = self.create_prompt(request), self._recording(session)
        return self.finalize(prompt, own, await self._evaluate(prompt, own, resume, options))

    async def _evaluate(
        self, prompt: Prompt[OutputT], session: Session, resume: bool, options: RequestOptions
    ) -> PromptResponse[OutputT]:
        options = {**options, "budget": options.get("budget") or self.budget}
        try:
            return await self.adapter.aevaluate(prompt, session=session, resume=resume, **options)
        except ConversationNotFound:
            if not resume:
                raise
        return await self.adapter.aevaluate(prompt, session=session, **options)

    def _recording(self, session: Session | None) -> Session:
        own = session if session is not None else self.create_session()
        enable_inner_message_recording(own)
        return own
