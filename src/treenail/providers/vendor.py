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
"""

from __future__ import annotations

import copy
import functools
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import anyio
import httpx2
from anyio.lowlevel import RunVar

from treenail.containment import CallUsage, PriceTable, current_call, default_prices, estimate_usage
from treenail.conversation import ReasoningPart
from treenail.errors import CallRefused, ModelCallError
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

    def __init__(
        self,
        model: str,
        *,
        name: str,
        make_client: Callable[[], C],
        close_client: Callable[[C], Awaitable[object]],
        client: C | None,
        max_output_tokens: int | None,
        prices: PriceTable | None,
        secrets: tuple[str, ...],
    ) -> None:
        self._model = model
        self._name = name
        self._own_client = client
        self._clients = LoopBound(make_client, close_client)
        self._max_output_tokens = max_output_tokens
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

    def estimate_usd(self, request: ModelRequest) -> float | None:
        """Return the most the call can cost; None if the model's price is not known."""
        tokens = request_tokens(request)
        asked = self._for(request)
        return asked._price(estimate_usage(input_tokens=tokens, max_output_tokens=asked._max_output_tokens))

    def _for(self, request: ModelRequest) -> Self:
        """Return this provider as the request wants it: for another model, or for a shorter answer."""
        most = min(
            (each for each in (self._max_output_tokens, request.max_output_tokens) if each is not None),
            default=None,
        )
        model = request.model or self._model
        if (model, most) == (self._model, self._max_output_tokens):
            return self
        asked = copy.copy(self)  # It shares the client.
        asked._model, asked._max_output_tokens = model, most
        return asked

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Call the model once. Closing the generator closes the connection."""
        asked = self._for(request)
        if asked is not self:
            # `asked` has taken over what the request asked for.
            async with aclosing(asked.stream(replace(request, model=None, max_output_tokens=None))) as told:
                async for each in told:
                    yield each
            return
        said: list[str] = []
        failed: ModelCallError
        opened: ClosableStream | None = None
        try:
            client = self._own_client or await self._clients.get()
            ask_egress(self._endpoint(client))
            opened = await self._open(client, request)
            async with aclosing(_mended(self._read(opened))) as events:
                async for each in events:
                    if isinstance(each, TextDelta):
                        said.append(each.text)
                    yield each
                    if isinstance(each, Stopped):
                        await drain(events)
                        return
            failed = self._failed(Facts(message=CUT_SHORT))
        except ModelCallError as error:
            failed = error
        except Exception as error:
            facts = self._facts(error)
            if facts is None and opened is not None and isinstance(error, _UNREADABLE):
                facts = Facts(message=f"the answer could not be read ({type(error).__name__}: {error})")
            if facts is None:
                raise
            failed = self._failed(facts)
        finally:
            if opened is not None:
                with anyio.CancelScope(shield=True):
                    await opened.close()
        if said:
            failed.partial, failed.phase = "".join(said), "response"
        raise failed

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

    def _used(self, usage: CallUsage) -> UsageReported:
        return usage_reported(usage, self._price(usage), self._model)

    def _price(self, usage: CallUsage) -> float | None:
        table = self._prices if self._prices is not None else default_prices()
        return table.cost_usd(self._model, usage)


def ask_egress(url: str) -> None:
    """Ask the shield of the current contained call whether a request may leave; `CallRefused` if not."""
    call = current_call()
    if call is not None:
        try:
            call.check_egress(url, "POST")
        except CallRefused:
            call.report(cost_usd=0.0)  # Nothing was sent.
            raise


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
