"""Every vendor that LiteLLM reaches, through one provider.

The model's name says who is asked, as LiteLLM has it (`openai/…`, `anthropic/…`, `gemini/…`);
`base_url` leads to any compatible server. LiteLLM puts each vendor's answer into the words of
OpenAI's Chat Completions, and this module reads those.

Three things of LiteLLM are not taken at its word. It ends every stream with a reason to stop,
also one that was cut off, and calls a reason that it does not know "stop": what counts is the
vendor's own word, which is read off the lines of the response. It retries: that is switched off.
And it keeps its clients for the whole process: those that it marks as an event loop's are closed
with the loop. Those that it has for Anthropic's and for Gemini's streams are shared by all loops,
of which one would close what another reads; there each loop has a client of ours.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

# Read while LiteLLM is imported: without it the import would fetch a price table from the network.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import aiohttp
import anyio.lowlevel
import httpx
import litellm
import openai
from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler

from treenail.containment import CallUsage, PriceTable, default_prices, usual_output_tokens
from treenail.errors import UsageError
from treenail.providers.anthropic_answer import STOPS
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
from treenail.providers.openai import CHAT_BOUNDS, CHAT_STOPS, ChatCalls, call_usage, output_format
from treenail.providers.vendor import ClosableStream, VendorProvider, drain, tls
from treenail.providers.wire_formats import Wire, chat_tools, present, to_openai_chat

# It prints advice to standard output, which belongs to the program.
litellm.suppress_debug_info = True

_PREFIXES = re.compile(r"^(?:(?:litellm\.)?\w+(?:Error|Exception|Timeout)(?:: | - ))+", re.ASCII)
_MAX_CHAIN = 16
_DROPPED = ("chatgpt/",)
"""Prefixes of the models for which LiteLLM takes a bound and drops it without a word."""
_RETRIES = ("num_retries", "max_retries", "fallbacks", "context_window_fallback_dict")
"""Arguments by which LiteLLM makes several calls of one."""
_SHARED = ("anthropic/", "claude-", "gemini/")
"""Prefixes of the models for which LiteLLM shares one client between event loops."""


_WORD = re.compile(
    r'"(?:stop_reason|stopReason|finish_reason|finishReason|done_reason)"\s*:\s*(?:null|"([^"\\]+)")'
)
"""A vendor's word for why it stopped, in a line of its response; inside of a text the quotes are escaped."""

_COUNT = re.compile(r'"output_tokens"\s*:\s*\d')
"""Anthropic's count of an answer's tokens, in a line of its response."""

_STOPS: Mapping[str, FinishReason] = {
    **STOPS,
    **CHAT_STOPS,
    "COMPLETE": "end",
    "STOP": "end",
    "TOOL_CALL": "tools",
    "MAX_TOKENS": "length",
}
"""Why a model stopped, in the words of the vendors that LiteLLM reaches. Any other word is not an end."""


class LiteLLM(VendorProvider["_LoopClients"]):
    """A model behind any interface that LiteLLM speaks.

    `model` begins with the vendor's name, such as `anthropic/`. The key comes from `api_key` or from the
    environment variable that LiteLLM knows for the vendor. `reasoning_effort` is passed on as it is. `extra`
    holds further arguments of `litellm.acompletion`, such as `tool_choice`.
    """

    _bound_names = CHAT_BOUNDS

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        max_output_tokens: int | None = None,
        temperature: float | None = None,
        reasoning_effort: str | None = None,
        timeout_s: float | None = None,
        extra: Mapping[str, Any] | None = None,
        prices: PriceTable | None = None,
    ) -> None:
        again = [name for name in _RETRIES if (extra or {}).get(name)]
        if again:
            raise UsageError(
                f"each attempt is paid for, and LiteLLM's own are not seen; leave {', '.join(again)} out of "
                "`extra`, and give the agent a RetryPolicy"
            )
        super().__init__(
            model,
            name="litellm.chat",
            make_client=_LoopClients,
            close_client=_LoopClients.close,
            client=None,
            max_output_tokens=max_output_tokens,
            extra=extra,
            prices=prices,
            secrets=(api_key,) if api_key else (),
        )
        self._base_url = base_url
        self._api_key = api_key
        self._temperature = temperature
        self._reasoning_effort = reasoning_effort
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"LiteLLM({self._model!r})"

    @property
    def bounds_output(self) -> bool:
        """Whether LiteLLM passes a bound on to the model's vendor, and nothing else is billed."""
        return super().bounds_output and _takes_bound(self._model)

    def _bound(self, model: str) -> int | None:
        if not _takes_bound(model):
            return None  # LiteLLM would refuse the whole call.
        _, slash, bare = model.partition("/")
        known = default_prices().max_output_tokens(model) is not None
        return self._own_bound or usual_output_tokens(model if known or not slash else bare)

    def arguments(self, request: ModelRequest) -> Wire:
        """Return the arguments for LiteLLM, without the key."""
        return {
            "model": self._model,
            "messages": to_openai_chat(request.items),
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_retries": 0,
            "num_retries": 0,
            **present(
                tools=chat_tools(request.tools),
                response_format=output_format(request.output_schema),
                base_url=self._base_url,
                max_tokens=self._max_output_tokens,
                temperature=self._temperature,
                reasoning_effort=self._reasoning_effort,
                timeout=self._timeout_s,
            ),
            **self._extra,
        }

    def _endpoint(self, client: _LoopClients) -> str:
        return self._base_url or ""

    async def _open(self, client: _LoopClients, request: ModelRequest) -> ClosableStream:
        asked = self.arguments(request)
        if self._model.startswith(_SHARED):
            asked.setdefault("client", client.http())
        opened = await litellm.acompletion(**asked, api_key=self._api_key)
        return _Stream(opened, is_structured=request.output_schema is not None)

    async def _read(self, opened: ClosableStream) -> AsyncGenerator[ModelEvent, None]:
        assert isinstance(opened, _Stream)
        thoughts = _Thoughts()
        calls = ChatCalls()
        async for chunk in opened:
            usage = call_usage(getattr(chunk, "usage", None))
            if usage is not None and opened.has_usage:
                yield self._used(usage, is_final=opened.is_counted)
            for choice in (chunk.choices or ())[:1]:
                delta = choice.delta
                if thought := thoughts.add(delta):
                    yield ReasoningDelta(thought)
                if content := getattr(delta, "content", None):
                    yield TextDelta(content)
                if _said_of(delta, "stop_reason") == "refusal":
                    opened.refused = True
                for piece in getattr(delta, "tool_calls", None) or ():
                    calls.add(piece)
        finish = opened.finish_reason
        if finish is None:
            return  # Cut off: the vendor never said that the answer is complete, whatever LiteLLM reports.
        if payload := thoughts.payload():
            yield self._thought(payload, 0, 0)
        for call in calls.whole():
            yield ToolCallRequested(call)
        # An unknown word may still be one that LiteLLM knows as a filter's, or as a limit of length.
        stop = _STOPS.get(finish, CHAT_STOPS.get(opened.mapped_reason or "", "broken_off"))
        if finish not in _STOPS and stop in ("end", "tools"):
            stop = "broken_off"
        elif opened.refused and stop in ("end", "filtered"):
            stop = "refused"
        elif stop in ("end", "tools"):
            # A structured answer is a tool's call to some vendors, of which LiteLLM makes text.
            is_end = stop == "end" or opened.is_structured
            stop = "tools" if calls else "end" if is_end else "broken_off"
        yield Stopped(stop, finish)

    def _facts(self, error: Exception) -> Facts | None:
        return facts_of(error)

    def _price(self, usage: CallUsage) -> float | None:
        cost = super()._price(usage)
        _, slash, bare = self._model.partition("/")
        if cost is not None or not slash:
            return cost
        # Price tables know most models without the vendor's name in front.
        table = self._prices if self._prices is not None else default_prices()
        return table.cost_usd(bare, usage)


class _LoopClients:
    """LiteLLM's clients of one event loop; they cannot be used after it ends."""

    def __init__(self) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise UsageError(
                "LiteLLM runs under asyncio alone; run asyncio, or use the vendor's own provider"
            ) from None
        cache = litellm.in_memory_llm_clients_cache
        self._mark = str(cache.update_cache_key_with_event_loop(""))
        """How the names of this loop's clients end in LiteLLM's cache."""
        self._http: httpx.AsyncClient | None = None

    def http(self) -> AsyncHTTPHandler:
        """Return our client in place of the one that LiteLLM shares between loops."""
        if self._http is None:
            self._http = httpx.AsyncClient(verify=tls(), follow_redirects=True, timeout=None)
        # It creates a client at once; with a transport given that is cheap, and ours replaces it.
        handler = AsyncHTTPHandler(transport=httpx.AsyncHTTPTransport(verify=tls()))
        handler.client = self._http
        return handler

    async def close(self) -> None:
        """Close them all."""
        kept: dict[str, Any] = litellm.in_memory_llm_clients_cache.cache_dict
        clients = [kept.pop(name) for name in list(kept) if name.endswith(self._mark)]
        for each in clients:
            close = getattr(each, "close", None)
            if close is not None:
                await close()
        if self._http is not None:
            await self._http.aclose()
        # A connection needs one more round of the loop to be closed.
        await anyio.lowlevel.checkpoint()


class _Stream:
    """LiteLLM's stream, plus what it omits of the vendor's."""

    def __init__(self, opened: Any, *, is_structured: bool = False) -> None:
        self._opened = opened
        self.is_structured = is_structured
        self.refused = False
        self.word: str | None = None
        """The vendor's word for why it stopped, if it was seen."""
        self._has_count = False
        self._is_messages = False
        """Whether these are Anthropic's lines: LiteLLM takes the first count in them for the last."""
        self._has_words = False
        """Whether the lines have a place for the word: then LiteLLM's own is not needed."""
        self._has_lines = False
        if opened.completion_stream is not None:
            lines = getattr(opened.completion_stream, "streaming_response", None)
            if lines is not None and hasattr(lines, "__aiter__"):
                opened.completion_stream.streaming_response = self._watched(lines)
                self._has_lines = True
            opened.completion_stream = _Tapped(opened.completion_stream, self)

    def __aiter__(self) -> AsyncIterator[Any]:
        chunks: AsyncIterator[Any] = self._opened.__aiter__()
        return chunks

    async def close(self) -> None:
        await self._opened.aclose()

    async def _watched(self, lines: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Yield the lines of the response, and note the vendor's word for why it stopped."""
        async for line in lines:
            text = line.decode(errors="replace") if isinstance(line, bytes) else str(line)
            self._is_messages = self._is_messages or '"message_start"' in text
            for found in _WORD.finditer(text):
                self.word, self._has_words = found[1] or self.word, True
            self._has_count = self._has_count or (self.word is not None and bool(_COUNT.search(text)))
            yield line

    def note(self, chunk: Any) -> None:
        """Note the word in a chunk, where there are no lines to read it off."""
        choice = next(iter(getattr(chunk, "choices", None) or ()), None)
        if not self._has_lines and (word := getattr(choice, "finish_reason", None)):
            self.word = str(word)

    @property
    def finish_reason(self) -> str | None:
        """The vendor's finish reason, in its own word if that was seen; None if it gave none."""
        return self.word if self.word is not None or self._has_words else self.mapped_reason

    @property
    def is_counted(self) -> bool:
        """Whether the vendor counted the answer to its end."""
        return self._has_count if self._is_messages else self.finish_reason is not None

    @property
    def mapped_reason(self) -> str | None:
        """The finish reason as LiteLLM tells it."""
        opened = self._opened
        said = opened.received_finish_reason or getattr(opened, "intermittent_finish_reason", None)
        return None if said is None else str(said)

    @property
    def has_usage(self) -> bool:
        """Whether the vendor reported usage; if not, LiteLLM invents numbers."""
        return any(getattr(each, "usage", None) is not None for each in self._opened.chunks)


class _Tapped:
    """The vendor's stream below LiteLLM's, which drops the text of a refusal; here it is kept."""

    def __init__(self, inner: Any, into: _Stream) -> None:
        self._inner = inner
        self._each = aiter(inner)
        self._into = into

    def __aiter__(self) -> _Tapped:
        return self

    async def __anext__(self) -> Any:
        chunk = await anext(self._each)
        self._into.note(chunk)
        for choice in (getattr(chunk, "choices", None) or ())[:1]:
            delta: Any = getattr(choice, "delta", None)
            if said := getattr(delta, "refusal", None):
                self._into.refused = True
                delta.content, delta.refusal = said, None
        return chunk

    async def aclose(self) -> None:
        if self._into.finish_reason is not None:
            # LiteLLM closes a stream early; a connection is reused only if all was read.
            await drain(self)
        for each in (self._each, self._inner):
            for name in ("aclose", "close"):
                if (close := getattr(each, name, None)) is not None:
                    await close()
                    break


class _Thoughts:
    """Collects an answer's reasoning, as text and as the signed blocks that some vendors want back."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._blocks: list[dict[str, Any]] = []

    def add(self, delta: Any) -> str:
        """Take a piece of the answer, and return the reasoning in it."""
        for piece in getattr(delta, "thinking_blocks", None) or ():
            self._add_block(dict(piece))
        text = getattr(delta, "reasoning_content", None)
        if not isinstance(text, str) or not text:
            return ""
        self._text.append(text)
        return text

    def _add_block(self, piece: dict[str, Any]) -> None:
        last = self._blocks[-1] if self._blocks else {}
        is_next = last.get("type") != "thinking" or last.get("signature")
        if is_next or piece.get("type") != "thinking":
            self._blocks.append(piece)
            return
        last["thinking"] = (last.get("thinking") or "") + (piece.get("thinking") or "")
        if piece.get("signature"):
            last["signature"] = piece["signature"]

    def payload(self) -> dict[str, Any]:
        """Return what is sent back with the next request: all blocks but an unsigned one."""
        kept = [each for each in self._blocks if each.get("type") != "thinking" or each.get("signature")]
        told: dict[str, Any] = {"reasoning_content": "".join(self._text)} if self._text else {}
        return {**told, "thinking_blocks": kept} if kept else told


@functools.cache
def _takes_bound(model: str) -> bool:
    """Say whether LiteLLM tells the vendor of a model how long its answer may be."""
    if model.startswith(_DROPPED):
        return False
    try:
        taken = litellm.get_supported_openai_params(model)
    except Exception:  # noqa: BLE001 - a name that LiteLLM does not know; the call will say so
        return True
    return not taken or any(name in taken for name in CHAT_BOUNDS)


def _said_of(delta: Any, name: str) -> object:
    """Return a field of the vendor's own response, where LiteLLM passes it on."""
    fields = getattr(delta, "provider_specific_fields", None)
    return fields.get(name) if isinstance(fields, Mapping) else None


def facts_of(error: Exception) -> Facts | None:
    """Read the facts off an exception of LiteLLM; None if it is another exception."""
    chain = list(_chain(error))
    known = [each for each in chain if type(each).__module__ == litellm.exceptions.__name__]
    if not known:
        return None
    # The cause of a broken stream is nested in the error; the innermost says most.
    inner = known[-1]
    told, code = _vendor_words(inner)
    timed_out = any(isinstance(each, _TIMED_OUT) for each in chain)
    if timed_out or any(isinstance(each, _BROKEN) for each in chain):
        # LiteLLM reports it as a server error, with an invented status.
        return Facts(message=told, timed_out=timed_out)
    status = getattr(inner, "status_code", None)
    for kind, meaning in _MEANINGS:
        if isinstance(inner, kind):
            code = f"{meaning} {code}".strip()
    return Facts(
        status=status if isinstance(status, int) and status >= 400 else None,
        code=code,
        message=told,
        headers=_headers(known),
    )


_BROKEN = (httpx.TransportError, aiohttp.ClientError, openai.APIConnectionError)
_TIMED_OUT = (httpx.TimeoutException, openai.APITimeoutError, TimeoutError)
_MEANINGS = (
    (litellm.exceptions.ContextWindowExceededError, "context_length_exceeded"),
    (litellm.exceptions.ContentPolicyViolationError, "content_policy"),
)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, the original one it wraps, and its causes."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting and len(seen) < _MAX_CHAIN:
        each = waiting.pop(0)
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [getattr(each, "original_exception", None), each.__cause__ or each.__context__]


def _vendor_words(error: BaseException) -> tuple[str, str]:
    """Extract the vendor's message and codes from LiteLLM's text."""
    text = str(getattr(error, "message", None) or error)
    text = _PREFIXES.sub("", text)
    body = getattr(error, "body", None)
    if not isinstance(body, Mapping):
        begin, end = text.find("{"), text.rfind("}")
        try:
            body = json.loads(text[begin : end + 1])
        except ValueError:
            body = {}
        body = body.get("error", body) if isinstance(body, Mapping) else {}
    if not isinstance(body, Mapping):
        return text, ""
    said = body.get("message")
    codes = " ".join(str(body[name]) for name in ("code", "type") if body.get(name))
    return said if isinstance(said, str) else text, codes


def _headers(errors: Sequence[BaseException]) -> dict[str, str]:
    for each in reversed(errors):
        headers = getattr(each, "litellm_response_headers", None)
        if headers:
            return {str(name): str(value) for name, value in dict(headers).items()}
    return {}
