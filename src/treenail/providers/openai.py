"""OpenAI's models, and every server that speaks one of OpenAI's two interfaces.

`api="responses"` is the newer interface: blocks of thought come encrypted and go back
unchanged, and nothing is stored at the provider. `api="chat"` is the older one, which most
compatible servers speak. Both are called as streams, with the SDK's own retries off.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import openai

from treenail.containment import CallUsage, PriceTable, default_prices, usage_of
from treenail.errors import UsageError
from treenail.providers.base import (
    FinishReason,
    ModelEvent,
    ModelRequest,
    ReasoningDelta,
    Stopped,
    TextDelta,
    ToolCallRequested,
)
from treenail.providers.errors import Facts
from treenail.providers.vendor import ClosableStream, VendorProvider, tls
from treenail.providers.wire_formats import (
    PHASE_KEY,
    Wire,
    chat_tools,
    fits_strict,
    present,
    responses_tools,
    to_openai_chat,
    to_openai_responses,
)
from treenail.tools import ToolCall

CHAT_STOPS: Mapping[str, FinishReason] = {
    "stop": "end",
    "end_turn": "end",
    "eos": "end",
    "eos_token": "end",
    "stop_sequence": "end",
    "tool_calls": "tools",
    "function_call": "tools",
    "length": "length",
    "max_tokens": "length",
    "content_filter": "filtered",
}
"""Why a model stopped, in the words of Chat Completions and its like. Any other word is not an end."""

CHAT_BOUNDS = ("max_completion_tokens", "max_tokens")
"""How Chat Completions calls the bound of an answer, and how it used to."""

_INCOMPLETE: Mapping[str, FinishReason] = {
    "max_output_tokens": "length",
    "max_messages": "length",
    "content_filter": "filtered",
    "incomplete": "length",  # Without a reason.
}
_OUTPUT_NAME = "output"
_NO_KEY = "none"


class OpenAI(VendorProvider[openai.AsyncOpenAI]):
    """A model behind OpenAI's Responses or Chat Completions interface.

    `base_url` leads to any compatible server. The key comes from `api_key` or the environment; a server of
    your own needs none. `reasoning_effort` is passed on as it is. `extra` holds further fields of the
    request body, such as `tool_choice`. A `client` of your own is used as it is, except that it does not
    retry, and it is yours to close.
    """

    _bound_names = (*CHAT_BOUNDS, "max_output_tokens")

    def __init__(
        self,
        model: str,
        *,
        api: Literal["responses", "chat"] = "responses",
        base_url: str | None = None,
        api_key: str | None = None,
        client: openai.AsyncOpenAI | None = None,
        max_output_tokens: int | None = None,
        temperature: float | None = None,
        reasoning_effort: str | None = None,
        timeout_s: float | None = None,
        extra: Mapping[str, Any] | None = None,
        prices: PriceTable | None = None,
    ) -> None:
        if api not in ("responses", "chat"):
            raise UsageError(f"OpenAI has no interface {api!r}; say api='responses' or api='chat'")
        if client is not None and (base_url is not None or api_key is not None):
            raise UsageError("a client of your own has its own base_url and api_key; pass one or the others")
        key = client.api_key if client is not None else api_key or os.environ.get("OPENAI_API_KEY")
        if client is None and not key and base_url is None:
            raise UsageError(
                "OpenAI needs a key: set OPENAI_API_KEY or pass api_key=; for a server that needs none "
                "pass base_url="
            )

        def make() -> openai.AsyncOpenAI:
            given: dict[str, Any] = {} if timeout_s is None else {"timeout": timeout_s}
            http = openai.DefaultAsyncHttpxClient(verify=tls(), **given)
            return openai.AsyncOpenAI(
                api_key=key or _NO_KEY, base_url=base_url, max_retries=0, http_client=http, **given
            )

        super().__init__(
            model,
            name=f"openai.{api}",
            make_client=make,
            close_client=openai.AsyncOpenAI.close,
            client=None if client is None else client.with_options(max_retries=0),
            max_output_tokens=max_output_tokens,
            extra=extra,
            prices=prices,
            secrets=(key,) if key else (),
        )
        self._api = api
        self._temperature = temperature
        self._reasoning_effort = reasoning_effort
        url = base_url or str(client.base_url if client is not None else "")
        is_foreign = bool(url) and "openai" not in url and default_prices().vendor(model) != "openai"
        # Servers of others may know the older name alone; OpenAI refuses a request that has both.
        known = CHAT_BOUNDS if is_foreign else CHAT_BOUNDS[:1]
        self._bound_by = tuple(name for name in CHAT_BOUNDS if name in (extra or {})) or known

    def __repr__(self) -> str:
        return f"OpenAI({self._model!r}, api={self._api!r})"

    async def _open(self, client: openai.AsyncOpenAI, request: ModelRequest) -> ClosableStream:
        # The body goes as it is: the SDK's parameter types would only narrow what a compatible server takes.
        if self._api == "chat":
            chat = self.chat_body(request)
            return await client.chat.completions.create(
                model=self._model, messages=chat["messages"], stream=True, extra_body=chat
            )
        return await client.responses.create(stream=True, extra_body=self.responses_body(request))

    def _read(self, opened: ClosableStream) -> AsyncGenerator[ModelEvent, None]:
        return self._read_chat(opened) if self._api == "chat" else self._read_responses(opened)

    def _facts(self, error: Exception) -> Facts | None:
        return facts_of(error)

    # --- Responses -------------------------------------------------------------------------------------

    def responses_body(self, request: ModelRequest) -> Wire:
        """Return what is sent to the Responses interface for a request."""
        instructions, items = to_openai_responses(request.items)
        body: Wire = {
            "model": self._model,
            "input": items,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            **present(
                instructions=instructions,
                tools=responses_tools(request.tools),
                max_output_tokens=self._max_output_tokens,
                temperature=self._temperature,
            ),
        }
        if request.output_schema is not None:
            schema = dict(request.output_schema)
            form = {"type": "json_schema", "name": _OUTPUT_NAME, "schema": schema}
            body["text"] = {"format": {**form, "strict": fits_strict(schema)}}
        if self._reasoning_effort is not None:
            body["reasoning"] = {"effort": self._reasoning_effort, "summary": "auto"}
        return {**body, **self._extra}

    async def _read_responses(self, events: ClosableStream) -> AsyncGenerator[ModelEvent, None]:
        chars = calls = 0
        refused = is_cut = False
        async for event in events:
            kind = event.type
            if kind in ("response.output_text.delta", "response.refusal.delta"):
                refused = refused or kind == "response.refusal.delta"
                chars += len(event.delta)
                yield TextDelta(event.delta)
            elif kind in ("response.reasoning_summary_text.delta", "response.reasoning_text.delta"):
                yield ReasoningDelta(event.delta)
            elif kind == "response.output_item.added":
                phase = getattr(event.item, "phase", None)
                if event.item.type == "message" and phase is not None:
                    yield self._thought({PHASE_KEY: phase}, chars, calls)
            elif kind == "response.output_item.done":
                item = event.item
                is_cut = is_cut or getattr(item, "status", None) == "incomplete"
                if item.type == "function_call":
                    calls += 1
                    yield ToolCallRequested(ToolCall(item.call_id, item.name, item.arguments))
                elif item.type == "reasoning":
                    yield self._thought(item.to_dict(mode="json"), chars, calls)
            elif kind in ("response.completed", "response.incomplete", "response.failed"):
                response = event.response
                usage = call_usage(response.usage)
                if usage is not None:
                    yield self._used(usage)
                # Some servers end every answer as completed, and report the failure inside it.
                is_failed = kind == "response.failed" or response.status in ("failed", "cancelled")
                if is_failed or getattr(response.error, "message", None):
                    raise self._failed(_error_facts(response.error))
                yield _responses_stop(kind, response, calls, refused=refused, is_cut=is_cut)
            elif kind == "error":
                raise self._failed(_error_facts(event))

    # --- Chat Completions ------------------------------------------------------------------------------

    def chat_body(self, request: ModelRequest) -> Wire:
        """Return what is sent to the Chat Completions interface for a request."""
        return {
            "model": self._model,
            "messages": to_openai_chat(request.items),
            "stream_options": {"include_usage": True},
            **present(
                tools=chat_tools(request.tools),
                response_format=output_format(request.output_schema),
                temperature=self._temperature,
                reasoning_effort=self._reasoning_effort,
            ),
            **dict.fromkeys(self._bound_by, self._max_output_tokens),
            **self._extra,
        }

    async def _read_chat(self, chunks: ClosableStream) -> AsyncGenerator[ModelEvent, None]:
        finish: str | None = None
        refused = False
        thoughts: list[str] = []
        calls = ChatCalls()
        async for chunk in chunks:
            for choice in (chunk.choices or ())[:1]:
                # Routers report a failure of the server behind them inside the choice.
                if error := getattr(choice, "error", None):
                    raise self._failed(_error_facts(error))
                if choice.finish_reason and is_good_end(finish):
                    finish = str(choice.finish_reason)
            usage = call_usage(chunk.usage)
            if usage is not None:
                yield self._used(usage, is_final=finish is not None)
            for choice in (chunk.choices or ())[:1]:
                delta = choice.delta
                if delta is None:
                    continue
                # Compatible servers put reasoning into one of two fields that OpenAI itself does not have.
                thought = getattr(delta, "reasoning_content", None) or getattr(delta, "reasoning", None)
                if isinstance(thought, str) and thought:
                    thoughts.append(thought)
                    yield ReasoningDelta(thought)
                if delta.content:
                    yield TextDelta(delta.content)
                if delta.refusal:
                    refused = True
                    yield TextDelta(delta.refusal)
                for piece in delta.tool_calls or ():
                    calls.add(piece)
        if finish is None:
            return  # Cut: the answer has no end.
        if thoughts:
            yield self._thought({"reasoning_content": "".join(thoughts)}, 0, 0)
        for call in calls.whole():
            yield ToolCallRequested(call)
        yield Stopped(chat_stop(finish, has_calls=bool(calls), refused=refused), finish)


def is_good_end(finish: str | None) -> bool:
    """Say whether a later word may replace this one: a bad end stays one, whatever comes after it."""
    return finish is None or CHAT_STOPS.get(finish) in ("end", "tools")


def chat_stop(finish: str, *, has_calls: bool, refused: bool) -> FinishReason:
    """Say why an answer over Chat Completions stopped, from the vendor's word and what came before it."""
    stop = CHAT_STOPS.get(finish, "broken_off")
    if stop not in ("end", "tools"):
        return stop
    if has_calls:
        return "tools"  # Some servers say "stop" and still ask for tools.
    if refused:
        return "refused"
    return "end" if stop == "end" else "broken_off"


def output_format(schema: Mapping[str, Any] | None) -> Wire | None:
    """Ask Chat Completions for an answer that follows a schema; None without one."""
    if schema is None:
        return None
    form = {"name": _OUTPUT_NAME, "schema": dict(schema), "strict": fits_strict(schema)}
    return {"type": "json_schema", "json_schema": form}


class ChatCalls:
    """Puts the calls of a Chat stream together from their pieces."""

    def __init__(self) -> None:
        self._calls: list[dict[str, Any]] = []
        self._at: dict[object, int] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, piece: Any) -> None:
        """Take the next piece of a call."""
        index, call_id, function = piece.index, piece.id, piece.function
        place = self._at.get(index)
        # A server without indexes sends each call whole, under the same number: another id is another call.
        if place is None or (call_id and self._calls[place]["id"] not in ("", call_id)):
            place = self._at[index] = len(self._calls)
            self._calls.append({"id": "", "name": "", "arguments": []})
        held = self._calls[place]
        held["id"] = held["id"] or call_id or ""
        if function is not None:
            held["name"] = held["name"] or function.name or ""
            if function.arguments:
                held["arguments"].append(function.arguments)

    def whole(self) -> list[ToolCall]:
        """Return the calls, as far as they have come."""
        return [
            ToolCall(each["id"], each["name"], "".join(each["arguments"]) or "{}") for each in self._calls
        ]


def call_usage(reported: Any) -> CallUsage | None:
    """Normalise the provider's usage; None if it reports none."""
    usage = usage_of(reported)
    if usage is None:
        return None
    details = getattr(reported, "input_tokens_details", None) or getattr(
        reported, "prompt_tokens_details", None
    )
    written = getattr(details, "cache_write_tokens", None)
    if not isinstance(written, int) or written <= 0:
        return usage
    room = usage.input_tokens - usage.cached_input_tokens
    return replace(usage, cache_write_tokens=min(written, room))


def _error_facts(error: Any) -> Facts:
    """Read the facts off an error inside a stream."""
    read = error.get if isinstance(error, Mapping) else partial(getattr, error)
    code, message = read("code", None), read("message", None)
    return Facts(code=str(code or "server_error"), message=str(message or ""))


def _responses_stop(kind: str, response: Any, calls: int, *, refused: bool, is_cut: bool) -> Stopped:
    # Not every compatible server has the status; the event says the same. If one of them, or a part of the
    # answer, says that it is not whole, it is not.
    event = kind.removeprefix("response.")
    status = response.status or event
    why = getattr(response.incomplete_details, "reason", None)
    if status == event == "completed" and not why and not is_cut:
        return Stopped("tools" if calls else "refused" if refused else "end", status)
    said = str(why or (status if status != "completed" else "incomplete"))
    return Stopped(_INCOMPLETE.get(said, "broken_off"), said)


def facts_of(error: Exception) -> Facts | None:
    """Read the facts off an exception of the SDK; None if it is another exception."""
    if isinstance(error, openai.APIStatusError):
        return Facts(
            status=error.status_code,
            code=_codes(error),
            message=_message(error),
            headers=dict(error.response.headers),
        )
    if isinstance(error, openai.APIConnectionError):
        return Facts(message=str(error), timed_out=isinstance(error, openai.APITimeoutError))
    if isinstance(error, openai.APIError):
        return Facts(code=_codes(error) or "server_error", message=_message(error))
    if isinstance(error, openai.OpenAIError):
        return Facts(status=400, message=str(error))
    return None


def _codes(error: openai.APIError) -> str:
    return " ".join(str(each) for each in (error.code, error.type) if each)


def _message(error: openai.APIError) -> str:
    body = error.body
    said = body.get("message") if isinstance(body, Mapping) else None
    return said if isinstance(said, str) else str(error.message)
