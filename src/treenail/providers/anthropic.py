"""Anthropic's models, over the Messages interface.

Blocks of thought come signed and go back unchanged and in their place; a block that was cut
off before its signature is not kept. The stable beginning of a request is marked for the
provider's cache. Calls are streams, with the SDK's own retries off.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Self

import anthropic
import httpx2

from treenail.containment import PriceTable
from treenail.conversation import EMPTY_TEXT
from treenail.errors import UsageError
from treenail.providers.anthropic_answer import AnthropicAnswer
from treenail.providers.base import ModelEvent, ModelRequest
from treenail.providers.errors import Facts
from treenail.providers.vendor import ClosableStream, VendorProvider, tls
from treenail.providers.wire_formats import Wire, anthropic_tools, mark_cached, present, to_anthropic

_LEAST_THINKING = 1024
"""The smallest reasoning budget that the interface accepts."""

_NO_KEY = "no key was found; set ANTHROPIC_API_KEY, or pass api_key="


class Anthropic(VendorProvider[anthropic.AsyncAnthropic]):
    """A model behind Anthropic's Messages interface.

    `cache=True` marks the stable beginning of each request for the provider's cache. `thinking` is a number
    of tokens to think with, `"adaptive"`, or the interface's own mapping. `effort` is passed on as it is.
    `extra` holds further fields of the request body. A `client` of your own is used as it is, except that it
    does not retry, and it is yours to close.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        client: anthropic.AsyncAnthropic | None = None,
        max_output_tokens: int | None = None,
        temperature: float | None = None,
        thinking: int | str | Mapping[str, Any] | None = None,
        effort: str | None = None,
        cache: bool = True,
        timeout_s: float | None = None,
        extra: Mapping[str, Any] | None = None,
        prices: PriceTable | None = None,
    ) -> None:
        if client is not None and (base_url is not None or api_key is not None):
            raise UsageError("a client of your own has its own base_url and api_key; pass one or the others")

        def make() -> anthropic.AsyncAnthropic:
            given: dict[str, Any] = {} if timeout_s is None else {"timeout": timeout_s}
            http = anthropic.DefaultAsyncHttpxClient(verify=tls(), **given)
            return anthropic.AsyncAnthropic(
                api_key=api_key, base_url=base_url, max_retries=0, http_client=http, **given
            )

        key = client.api_key if client is not None else api_key
        super().__init__(
            model,
            name="anthropic.messages",
            make_client=make,
            close_client=anthropic.AsyncAnthropic.close,
            client=None if client is None else client.with_options(max_retries=0),
            max_output_tokens=max_output_tokens,
            extra=extra,
            prices=prices,
            secrets=(key,) if key else (),
        )
        self._temperature = temperature
        self._thinking = _thinking(thinking, self._max_output_tokens or 0)
        self._effort = effort
        self._cache = cache

    def __repr__(self) -> str:
        return f"Anthropic({self._model!r})"

    def _for(self, request: ModelRequest) -> Self:
        asked = super()._for(request)
        budget = (asked._thinking or {}).get("budget_tokens")
        if asked is not self and budget is not None and asked._max_output_tokens is not None:
            # Reasoning is part of the answer, and the interface accepts no smaller budget.
            room = asked._max_output_tokens - 1
            asked._thinking = (
                {**(asked._thinking or {}), "budget_tokens": min(budget, room)}
                if room >= _LEAST_THINKING
                else None
            )
        return asked

    def messages_body(self, request: ModelRequest) -> Wire:
        """Return what is sent to the Messages interface for a request."""
        system, messages = to_anthropic(request.items)
        if messages and messages[-1]["role"] == "assistant":
            # A paused answer goes on from its own end, where the interface accepts no blank.
            *before, last = messages[-1]["content"]
            if last["type"] == "text":
                last = {**last, "text": last["text"].rstrip() or EMPTY_TEXT}
            messages[-1] = {"role": "assistant", "content": [*before, last]}
        told: str | list[Wire] | None = system
        if self._cache:
            told, messages = mark_cached(system, messages)
        config = present(effort=self._effort)
        if request.output_schema is not None:
            config["format"] = {"type": "json_schema", "schema": _accepted(request.output_schema)}
        may_think = self._thinking is not None and _may_think(self._thinking, messages)
        return {
            "model": self._model,
            "max_tokens": self._max_output_tokens,
            "messages": messages,
            **present(
                system=told,
                tools=anthropic_tools(request.tools),
                output_config=config or None,
                thinking=self._thinking if may_think else None,
                temperature=self._temperature,
            ),
            **self._extra,
        }

    def can_follow(self, schema: Mapping[str, Any]) -> bool:
        """Say whether the interface takes a schema as it is: it closes objects to keys that are not named."""
        return not _is_open(schema)

    async def _open(self, client: anthropic.AsyncAnthropic, request: ModelRequest) -> ClosableStream:
        body = self.messages_body(request)
        return await client.messages.create(
            model=self._model,
            max_tokens=body["max_tokens"],
            messages=body["messages"],
            stream=True,
            extra_body=body,
        )

    async def _read(self, opened: ClosableStream) -> AsyncGenerator[ModelEvent, None]:
        answer = AnthropicAnswer(self._model, self._name, self._used)
        async for event in opened:
            for each in answer.take(event.to_dict(mode="python", warnings=False)):
                yield each

    def _facts(self, error: Exception) -> Facts | None:
        return facts_of(error)


def _thinking(given: int | str | Mapping[str, Any] | None, most: int) -> dict[str, Any] | None:
    if given is None:
        return None
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, str):
        return {"type": given}
    if not _LEAST_THINKING <= given < most:
        raise UsageError(
            f"thinking={given} must be at least {_LEAST_THINKING} tokens and less than max_output_tokens "
            f"({most}), of which it is a part"
        )
    return {"type": "enabled", "budget_tokens": given}


def _may_think(thinking: Mapping[str, Any], messages: Sequence[Wire]) -> bool:
    """Say whether reasoning can be requested now.

    A turn with tools that began without reasoning, say with another model, has to continue without it:
    the interface refuses a reasoning budget in the middle of a turn.
    """
    if thinking.get("type") != "enabled":
        return True
    first: Wire | None = None
    for message in reversed(messages):
        if message["role"] == "assistant":
            first = message
        elif not any(block["type"] == "tool_result" for block in message["content"]):
            break
    if first is None:
        return True
    return first["content"][0]["type"] in ("thinking", "redacted_thinking")


def _is_open(schema: object) -> bool:
    """Say whether a schema has an object with keys of the model's own choice."""
    if isinstance(schema, list):
        return any(map(_is_open, schema))
    if not isinstance(schema, Mapping):
        return False
    if schema.get("type") == "object" and ("properties" not in schema or schema.get("additionalProperties")):
        return True
    return any(_is_open(each) for key, each in schema.items() if key not in ("enum", "const", "default"))


def _accepted(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without the keywords that the interface refuses; they move into descriptions."""
    try:
        return anthropic.transform_schema(dict(schema))
    except ValueError:
        return dict(schema)


def facts_of(error: Exception) -> Facts | None:
    """Read the facts off an exception of the SDK; None if it is another exception."""
    if isinstance(error, anthropic.APIStatusError):
        # An error event inside a stream comes with the status of the stream, which was fine.
        status = error.status_code if error.status_code >= 400 else None
        codes = " ".join(str(each) for each in (error.error_code, error.type) if each)
        return Facts(
            status=status,
            code=codes or ("" if status else "api_error"),
            message=error.api_message or str(error.message),
            headers=dict(error.response.headers),
        )
    if isinstance(error, anthropic.APIConnectionError):
        return Facts(message=str(error), timed_out=isinstance(error, anthropic.APITimeoutError))
    if isinstance(error, anthropic.CredentialsError):
        return Facts(status=401, code="authentication_error", message=f"{_NO_KEY} ({error})")
    if isinstance(error, anthropic.AnthropicError):
        return Facts(status=400, message=str(error))
    if isinstance(error, TypeError) and "authentication method" in str(error):
        return Facts(status=401, code="authentication_error", message=_NO_KEY)
    # The SDK passes transport errors through once the stream is open.
    if isinstance(error, httpx2.HTTPError):
        return Facts(
            message=f"{type(error).__name__}: {error}", timed_out=isinstance(error, httpx2.TimeoutException)
        )
    return None
