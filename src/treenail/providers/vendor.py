"""What the providers on vendors' SDKs share.

Theory of operation
-------------------
A `VendorProvider` is made of three parts that each vendor's module supplies: a function that
makes an SDK client, one that opens a stream with it, and an async generator that reads the
stream and yields model events. Around them this module keeps the promises of the seam:

- **One client per event loop.** A connection belongs to the loop in which it was opened, and
  the sync face of Treenail runs a loop per call. A client is made when a loop first needs
  one, kept for as long as that loop runs (so that connections are reused), and closed when
  it ends: asyncio closes the async generators that are still open then, and a client hangs
  on one. A client that the caller passed in is the caller's to close.
- **Closing.** The SDK's stream is closed whenever the generator is left, by its end, an
  error, `aclose` or cancellation; a connection with an unread answer is thereby closed, and
  the server sees it.
- **Errors.** What the SDK raises becomes a `ModelCallError` of the one classification. It is
  raised outside of the handler, without cause and context, because SDK exceptions hold the
  request with its headers, and those hold the key.
- **Text.** Halves of surrogate pairs that a server has split over two events are joined, and
  lone ones replaced, so that every event is text.
- **Truth about the end.** A stream that ends without saying that the answer is whole was
  cut, also if the connection was closed in good order.
- **Money.** Every request says how long its answer may be, and the estimate is for that length. A
  request that was refused, or never left, cost nothing; one whose answer was not counted to its
  end costs what was reserved.
"""

from __future__ import annotations

import copy
import functools
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import anyio
import httpx2
from anyio.lowlevel import RunVar

from treenail.containment import (
    CallUsage,
    PriceTable,
    current_call,
    default_prices,
    estimate_usage,
    most_usd,
    usual_output_tokens,
)
from treenail.conversation import ReasoningPart
from treenail.errors import CallRefused, ModelCallError, UsageError
from treenail.providers.base import (
    ModelEvent,
    ModelRequest,
    ReasoningBlock,
    ReasoningDelta,
    Stopped,
    TextDelta,
    UsageReported,
)
from treenail.providers.errors import Facts, classify, environment_secrets, model_call_error
from treenail.providers.usage import request_tokens, usage_reported
from treenail.providers.wire_formats import clean

C = TypeVar("C")

CUT_SHORT = "the stream ended before the answer did"
"""The error message of an answer without an end."""


class ClosableStream(Protocol):
    """An SDK's stream of events: the SDK's own objects, filled by a server."""

    def __aiter__(self) -> AsyncIterator[Any]:
        """Iterate over the events."""
        ...

    async def close(self) -> None:
        """Close the response, and the connection if it was not read to its end."""
        ...


_DRAIN_S = 0.5
"""How long a finished answer may keep its connection busy before that is closed instead of reused."""

_METERED = (
    "container", "conversation", "enable_search", "mcp_servers", "models", "plugins", "previous_response_id",
    "prompt", "search_parameters", "tools", "web_search_options",
)  # fmt: skip
"""Fields of a request by which it may cost more than its text and its answer: a vendor's own tools, which are
billed by use, other models, and input that the vendor has kept."""

_DEARER = {"service_tier": "priority", "speed": "fast"}
"""Fields of a request that have a price of their own, with that value."""

_NESTED = "extra_body"
"""Where LiteLLM takes fields of the body that it does not know."""

_NO_CONNECTION = ("ConnectError", "ConnectTimeout", "ClientConnectorError", "ClientConnectorDNSError")
"""What the HTTP libraries raise before anything is sent."""

_MAX_CAUSES = 16

_UNREADABLE = (AttributeError, LookupError, TypeError, ValueError, RecursionError)
"""What reading a malformed event raises: SDKs do not validate what they receive."""


@functools.cache
def tls() -> ssl.SSLContext:
    """Return the TLS settings of this process. Reading all certificates once per client would be slow."""
    return httpx2.create_ssl_context()


class LoopBound(Generic[C]):
    """An object that lives as long as the event loop in which it was first used."""

    def __init__(self, make: Callable[[], C], close: Callable[[C], Awaitable[object]]) -> None:
        self._make = make
        self._close = close
        self._kept: RunVar[tuple[C, AsyncGenerator[C, None]]] = RunVar("treenail.providers.client")

    async def get(self) -> C:
        """Return this loop's object, made now if there is none yet."""
        kept = self._kept.get(None)
        if kept is not None:
            return kept[0]
        keeper = self._keep()
        # Running the generator to its first yield registers it with the loop, which closes it.
        made = await anext(keeper)
        self._kept.set((made, keeper))
        return made

    async def _keep(self) -> AsyncGenerator[C, None]:
        made = self._make()
        try:
            yield made
        finally:
            with anyio.CancelScope(shield=True):
                await self._close(made)


class VendorProvider(ABC, Generic[C]):
    """A provider on a vendor's SDK: a client of type `C`, and one call with it."""

    takes_output_schema: ClassVar[bool] = True
    """The vendors enforce a schema on the answer."""

    _bound_names: ClassVar[tuple[str, ...]] = ("max_tokens",)
    """How the interface calls the bound of an answer; `extra` may name it too."""

    def __init__(
        self,
        model: str,
        *,
        name: str,
        make_client: Callable[[], C],
        close_client: Callable[[C], Awaitable[object]],
        client: C | None,
        max_output_tokens: int | None,
        extra: Mapping[str, Any] | None,
        prices: PriceTable | None,
        secrets: tuple[str, ...],
    ) -> None:
        self._model = model
        self._name = name
        self._own_client = client
        self._clients = LoopBound(make_client, close_client)
        self._extra = dict(extra or {})
        fields = [self._extra]
        if isinstance(self._extra.get(_NESTED), Mapping):
            fields.append(dict(self._extra[_NESTED]))
            self._extra[_NESTED] = fields[-1]
        said = [each.pop(name, None) for each in fields for name in self._bound_names]
        self._own_bound: int | None = min((each for each in (max_output_tokens, *said) if each), default=None)
        if self._extra.get("n", 1) != 1:
            raise UsageError("only one answer is read, and each is paid for; leave `n` out of `extra`")
        if any("model" in each for each in fields):
            raise UsageError("the model is the one that is priced; name it first, and not in `extra`")
        self._max_output_tokens: int | None = self._bound(model)
        self._prices = prices
        self._secrets = secrets

    @property
    def name(self) -> str:
        """The interface's name, as it stands in the log and on blocks of thought."""
        return self._name

    @property
    def model(self) -> str:
        """The model's name."""
        return self._model

    @property
    def bounds_output(self) -> bool:
        """Whether a request can bound what it costs; a vendor's own tools are billed besides the answer."""
        fields = {**self._extra, **(self._extra.get(_NESTED) or {})}
        # An empty mapping is a way to switch a search on.
        if any(fields.get(name) not in (None, False, []) for name in _METERED):
            return False
        # Input that is cached for an hour costs more than the price that is known for caching.
        cached = fields.get("cache_control")
        is_long = isinstance(cached, Mapping) and cached.get("ttl", "5m") != "5m"
        return not is_long and all(fields.get(name) != value for name, value in _DEARER.items())

    def output_bound(self, request: ModelRequest) -> int | None:
        """Return how many tokens the answer may have, as the request will say."""
        return self._for(request)._max_output_tokens

    def estimate_usd(self, request: ModelRequest) -> float | None:
        """Return the most the call can cost; None if the model's price is not known."""
        tokens = request_tokens(request)
        asked = self._for(request)
        usage = estimate_usage(input_tokens=tokens, max_output_tokens=asked._max_output_tokens)
        return most_usd(asked._price, usage)

    def _bound(self, model: str) -> int | None:
        """Return how many tokens an answer of a model may have, unless the request says less."""
        return self._own_bound or usual_output_tokens(model)

    def _for(self, request: ModelRequest) -> Self:
        """Return this provider as the request wants it: for another model, or for a shorter answer."""
        model = request.model or self._model
        bounds = (self._bound(model), request.max_output_tokens)
        most = min((each for each in bounds if each is not None), default=None)
        if (model, most) == (self._model, self._max_output_tokens):
            return self
        asked = copy.copy(self)  # It shares the client.
        asked._model, asked._max_output_tokens = model, most
        return asked

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Call the model once. Closing the generator closes the connection."""
        asked = self._for(request)
        said: list[str] = []
        used: UsageReported | None = None
        has_output = False
        failed: ModelCallError
        opened: ClosableStream | None = None
        try:
            client = asked._own_client or await asked._clients.get()
            ask_egress(asked._endpoint(client))
            opened = await asked._open(client, request)
            read = asked._read(asked._watched(opened, request.idle_timeout_s))
            async with aclosing(_mended(read)) as events:
                async for each in events:
                    if isinstance(each, TextDelta):
                        said.append(each.text)
                    if isinstance(each, UsageReported):
                        used = each
                    elif not isinstance(each, Stopped):
                        has_output = True
                    elif has_output and used is not None and not used.usage.output_tokens:
                        # Nothing for an answer is no count of it.
                        yield replace(used, cost_usd=None, is_final=False)
                    yield each
                    if isinstance(each, Stopped):
                        await drain(events)
                        return
            failed = asked._failed(Facts(message=CUT_SHORT))
        except ModelCallError as error:
            failed = error
        except Exception as error:
            facts = asked._facts(error)
            if facts is None and opened is not None and isinstance(error, _UNREADABLE):
                facts = Facts(message=f"the answer could not be read ({type(error).__name__}: {error})")
            if facts is None:
                raise
            if opened is None and (facts.status is not None or is_unsent(error)):
                cost_nothing()
            failed = asked._failed(facts)
        finally:
            if opened is not None:
                with anyio.CancelScope(shield=True):
                    await opened.close()
        if said:
            failed.partial, failed.phase = "".join(said), "response"
        raise failed

    def _watched(self, opened: ClosableStream, idle_timeout_s: float | None) -> ClosableStream:
        if idle_timeout_s is None:
            return opened
        said = f"the stream sent nothing for {idle_timeout_s:g} s"
        return _Watched(opened, idle_timeout_s, lambda: self._failed(Facts(message=said, timed_out=True)))

    def _failed(self, facts: Facts) -> ModelCallError:
        return model_call_error(
            classify(facts, now=datetime.now(UTC)),
            provider=self._name,
            model=self._model,
            facts=facts,
            secrets=(*self._secrets, *environment_secrets()),
        )

    def _endpoint(self, client: C) -> str:
        """Return the address of the call; empty if it is not known, and then a shield refuses it."""
        return str(getattr(client, "base_url", ""))

    @abstractmethod
    async def _open(self, client: C, request: ModelRequest) -> ClosableStream:
        """Begin a call, and return the SDK's stream. Raises what the SDK raises."""

    @abstractmethod
    def _read(self, opened: ClosableStream) -> AsyncGenerator[ModelEvent, None]:
        """Yield what the stream says, `Stopped` last. Raises what the SDK raises, or `self._failed(...)`."""

    @abstractmethod
    def _facts(self, error: Exception) -> Facts | None:
        """Read the facts off an exception of the SDK; None if it is another exception."""

    # --- helpers for the vendors' modules --------------------------------------------------------------

    def _thought(self, payload: dict[str, Any], after_text: int, after_calls: int) -> ReasoningBlock:
        part = ReasoningPart(self._model, self._name, payload, after_text, after_calls)
        return ReasoningBlock(part)

    def _used(self, usage: CallUsage, *, is_final: bool = True) -> UsageReported:
        return usage_reported(usage, self._price(usage), self._model, is_final=is_final)

    def _price(self, usage: CallUsage) -> float | None:
        table = self._prices if self._prices is not None else default_prices()
        return table.cost_usd(self._model, usage)


class _Watched:
    """A stream whose next event has to come in time."""

    def __init__(
        self, opened: ClosableStream, idle_timeout_s: float, late: Callable[[], ModelCallError]
    ) -> None:
        self._opened, self._idle_timeout_s, self._late = opened, idle_timeout_s, late

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    async def __aiter__(self) -> AsyncIterator[Any]:
        events = aiter(self._opened)
        while True:
            with anyio.move_on_after(self._idle_timeout_s) as scope:
                try:
                    event = await anext(events)
                except StopAsyncIteration:
                    return
            if scope.cancelled_caught:
                raise self._late()
            yield event

    async def close(self) -> None:
        await self._opened.close()


def ask_egress(url: str) -> None:
    """Ask the shield of the current contained call whether a request may leave; `CallRefused` if not."""
    call = current_call()
    if call is not None:
        try:
            call.check_egress(url, "POST")
        except CallRefused:
            cost_nothing()
            raise


def cost_nothing() -> None:
    """Report that the current contained call cost nothing: it was not sent, or not accepted."""
    call = current_call()
    if call is not None:
        call.report(cost_usd=0.0)


def is_unsent(error: BaseException | None) -> bool:
    """Say whether a request failed because there was no connection that it could have been sent by."""
    for _ in range(_MAX_CAUSES):
        if error is None:
            return False
        if type(error).__name__ in _NO_CONNECTION:
            return True
        error = error.__cause__ or error.__context__
    return False


async def drain(events: AsyncIterator[object]) -> None:
    """Read the rest of the stream after the answer's end, so that the connection can be reused."""
    try:
        with anyio.move_on_after(_DRAIN_S):
            async for _ in events:
                pass
    except Exception:  # noqa: BLE001 - the answer is complete; a later error changes nothing
        pass


async def _mended(events: AsyncGenerator[ModelEvent, None]) -> AsyncGenerator[ModelEvent, None]:
    """Yield the events with whole characters only."""
    kinds = {TextDelta: Mender(), ReasoningDelta: Mender()}
    async with aclosing(events):
        async for each in events:
            if isinstance(each, (TextDelta, ReasoningDelta)):
                if text := kinds[type(each)].feed(each.text):
                    yield type(each)(text)
                continue
            if isinstance(each, Stopped) and (rest := kinds[TextDelta].flush()):
                yield TextDelta(rest)
            yield each


class Mender:
    """Joins surrogate pairs that were split over two pieces of text."""

    def __init__(self) -> None:
        self._half = ""

    def feed(self, text: str) -> str:
        """Take a piece, and return the complete characters so far."""
        text = self._half + text
        self._half = ""
        if text and "\ud800" <= text[-1] <= "\udbff":
            text, self._half = text[:-1], text[-1]
        return clean(text)

    def flush(self) -> str:
        """Return a replacement character for a half that was held back and never completed."""
        half, self._half = self._half, ""
        return clean(half)
