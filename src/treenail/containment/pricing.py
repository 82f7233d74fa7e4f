"""What a model call costs: from its usage afterwards, from the request's size before.

A `PriceTable` answers in USD, or None for "not known"; it never guesses. Usage is normalised to one meaning,
because vendors differ: `input_tokens` counts all input, cached and newly cached tokens included, and
`output_tokens` counts all output, reasoning included.

`prices.json` is the table that ships with the package; `scripts/price_table.py` writes it. A newer one that
`treenail prices fetch` has stored takes its place.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from treenail.containment.limits import check_fields, integer, number
from treenail.errors import UsageError

MILLION = 1_000_000
_PACKAGED = Path(__file__).with_name("prices.json")
logger = logging.getLogger("treenail.containment")


@dataclass(frozen=True, slots=True)
class CallUsage:
    """Tokens of one model call."""

    input_tokens: int = 0
    """All input, cached and newly cached tokens included."""
    output_tokens: int = 0
    """All output, reasoning included."""
    cached_input_tokens: int = 0
    """Input that was read from the provider's cache."""
    cache_write_tokens: int = 0
    """Input that was written to the provider's cache."""
    reasoning_tokens: int = 0
    """Output that was reasoning."""

    def __post_init__(self) -> None:
        check_fields(self, integer, *self.__dataclass_fields__, zero_ok=True)
        if self.cached_input_tokens + self.cache_write_tokens > self.input_tokens:
            raise UsageError(
                f"CallUsage.input_tokens ({self.input_tokens}) counts all input, so it cannot be less than "
                f"cached_input_tokens ({self.cached_input_tokens}) and cache_write_tokens "
                f"({self.cache_write_tokens}) together"
            )
        if self.reasoning_tokens > self.output_tokens:
            raise UsageError(
                f"CallUsage.output_tokens ({self.output_tokens}) counts all output, so it is not less than "
                f"reasoning_tokens ({self.reasoning_tokens})"
            )

    def __add__(self, other: CallUsage) -> CallUsage:
        return CallUsage(*map(operator.add, astuple(self), astuple(other)))


def usage_of(value: object) -> CallUsage | None:
    """Read the usage off a vendor's response, or off its `usage`; None if there is none.

    Understands the OpenAI Chat and Responses shapes, the Anthropic shape and our own, as objects or as
    mappings.
    """
    if value is None or isinstance(value, CallUsage):
        return value
    usage = _get(value, "usage")
    if isinstance(usage, CallUsage):
        return usage
    source = value if usage is None else usage
    into = _count(source, "input_tokens", "prompt_tokens")
    out = _count(source, "output_tokens", "completion_tokens")
    if into is None and out is None:
        return None
    details_in = _get(source, "input_tokens_details") or _get(source, "prompt_tokens_details")
    details_out = _get(source, "output_tokens_details") or _get(source, "completion_tokens_details")
    cached = (
        _count(source, "cached_input_tokens", "cached_tokens") or _count(details_in, "cached_tokens") or 0
    )
    written = _count(source, "cache_write_tokens") or 0
    reasoning = (
        _count(source, "reasoning_tokens") or _count(details_out, "reasoning_tokens", "thinking_tokens") or 0
    )
    into, out = into or 0, out or 0
    # Anthropic reports cached input next to the rest of the input, not within it. LiteLLM keeps these names,
    # beside a `prompt_tokens` to which it has added them.
    apart_read = _count(source, "cache_read_input_tokens")
    apart_written = _count(source, "cache_creation_input_tokens")
    if apart_read is not None or apart_written is not None:
        cached, written = apart_read or 0, apart_written or 0
        if _count(source, "prompt_tokens") is None:
            into += cached + written
    # Some vendors count reasoning beside the answer, and only in the total or in the details.
    total = _count(source, "total_tokens")
    if total is not None and total > into + out:
        out = total - into
    elif reasoning > out:
        out += reasoning
    cached = min(cached, into)
    return CallUsage(
        input_tokens=into,
        output_tokens=out,
        cached_input_tokens=cached,
        cache_write_tokens=min(written, into - cached),
        reasoning_tokens=min(reasoning, out),
    )


def _get(source: object, name: str) -> object:
    if isinstance(source, Mapping):
        return source.get(name)
    return getattr(source, name, None)


def _count(source: object, *names: str) -> int | None:
    for name in names:
        value = _get(source, name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None


class PriceTable(Protocol):
    """Knows what models cost."""

    def cost_usd(self, model: str, usage: CallUsage) -> float | None:
        """Return the cost of a call with that usage, or None if the model's price is not known."""
        ...


@dataclass(frozen=True, slots=True)
class Price:
    """USD per million tokens.

    Cached input, cache writes and reasoning cost what input and output do unless set.
    """

    input_per_mtok: float
    output_per_mtok: float
    cached_input_per_mtok: float | None = None
    cache_write_per_mtok: float | None = None
    reasoning_per_mtok: float | None = None

    def __post_init__(self) -> None:
        required, optional = fields(self)[:2], fields(self)[2:]
        check_fields(self, number, *(each.name for each in required), zero_ok=True)
        check_fields(self, number, *(each.name for each in optional), zero_ok=True, none_ok=True)

    def cost_usd(self, usage: CallUsage) -> float:
        """Return the cost of a call with that usage."""
        plain = usage.input_tokens - usage.cached_input_tokens - usage.cache_write_tokens
        said = usage.output_tokens - usage.reasoning_tokens
        parts = (
            (plain, self.input_per_mtok),
            (usage.cached_input_tokens, _or(self.cached_input_per_mtok, self.input_per_mtok)),
            (usage.cache_write_tokens, _or(self.cache_write_per_mtok, self.input_per_mtok)),
            (said, self.output_per_mtok),
            (usage.reasoning_tokens, _or(self.reasoning_per_mtok, self.output_per_mtok)),
        )
        return sum(tokens * price for tokens, price in parts) / MILLION


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


class StaticPrices:
    """Prices that you write down yourself, by exact model name."""

    def __init__(self, prices: Mapping[str, Price]) -> None:
        self._prices = dict(prices)

    def cost_usd(self, model: str, usage: CallUsage) -> float | None:
        """Return the cost, or None if the model is not listed."""
        price = self._prices.get(model)
        return None if price is None else price.cost_usd(usage)


class PackagedPrices:
    """A price table in a file, for models that their names alone identify: by default, the package's."""

    def __init__(self, file: Path | None = None) -> None:
        table: dict[str, Any] = json.loads((file or _PACKAGED).read_text("utf-8"))
        self.date: str = table["date"]
        """The day on which the table was made, as YYYY-MM-DD."""
        self.source: str = table["source"]
        self._vendors: list[dict[str, Any]] = table["vendors"]
        self._found: dict[str, dict[str, Any] | None] = {}

    def cost_usd(self, model: str, usage: CallUsage) -> float | None:
        """Return the cost, or None if the table does not know the model."""
        found = self._find(model)
        if found is None:
            return None
        return Price(*(_tier(price, usage.input_tokens) for price in found["usd"])).cost_usd(usage)

    def __len__(self) -> int:
        """How many models it knows."""
        return sum(len(each["models"]) for each in self._vendors)

    def price(self, model: str) -> Price | None:
        """Return a model's price for a short input, or None if the table does not know it."""
        found = self._find(model)
        return None if found is None else Price(*(_tier(price, 0) for price in found["usd"]))

    def vendor(self, model: str) -> str | None:
        """Return whose model a name is, or None if the table does not know."""
        return next((each["vendor"] for each in self._vendors if _matches(each, model.lower())), None)

    def max_output_tokens(self, model: str) -> int | None:
        """Return how many tokens a model can write at most, or None if the table does not know."""
        found = self._find(model)
        return None if found is None else found.get("output")

    def context_window(self, model: str) -> int | None:
        """Return how many tokens fit into a model's context, or None if the table does not know."""
        found = self._find(model)
        return None if found is None else found["context"]

    def _find(self, model: str) -> dict[str, Any] | None:
        if model not in self._found:
            name = model.lower()
            # Some gateways write the date in a model's name without dashes.
            dashed = _COMPACT_DATE.sub(r"-\1-\2-\3", name)
            models: list[dict[str, Any]] = next(
                (each["models"] for each in self._vendors if _matches(each, name)), []
            )
            found = (each for name in (name, dashed) for each in models if _matches(each, name))
            self._found[model] = next(found, None)
        return self._found[model]


_COMPACT_DATE = re.compile(r"-(20\d\d)(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])(?=-|:|$)")


def _matches(entry: Mapping[str, Any], name: str) -> bool:
    return any(_fits(pattern, name) for pattern in entry["match"])


def _fits(pattern: str, name: str) -> bool:
    """Compare a name with a pattern: `*` at either end is any text, and `~` begins a regular expression."""
    text = pattern.strip("*")
    if pattern.startswith("~"):
        return re.search(pattern[1:], name) is not None
    if pattern.startswith("*"):
        return text in name if pattern.endswith("*") else name.endswith(text)
    return name.startswith(text) if pattern.endswith("*") else name == text


def _tier(price: Any, input_tokens: int) -> Any:
    """Return a price as one number: a long input may make all tokens of the call dearer."""
    if not isinstance(price, list):
        return price
    base, *tiers = price
    return next((usd for above, usd in reversed(tiers) if input_tokens > above), base)


def fetched_prices_file() -> Path:
    """Return where a fetched table is kept: beside the runs, or where `TREENAIL_PRICES` says."""
    named = os.environ.get("TREENAIL_PRICES")
    if named:
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME") or Path(os.environ.get("HOME") or Path.home(), ".local/state")
    return Path(state, "treenail", "prices.json")


@functools.cache
def default_prices() -> PackagedPrices:
    """Return the newer one of the package's table and the fetched one; it is read on first use."""
    packaged, file = PackagedPrices(), fetched_prices_file()
    try:
        fetched = PackagedPrices(file) if file.is_file() else packaged
    except (OSError, ValueError, LookupError, TypeError) as error:
        logger.warning("the price table %s cannot be read (%s); the package's own is used", file, error)
        return packaged
    return fetched if fetched.date >= packaged.date else packaged


def usual_output_tokens(model: str) -> int:
    """Return how much output is asked of a model by default."""
    table = default_prices()
    most, context = table.max_output_tokens(model), table.context_window(model)
    bound = DEFAULT_MAX_OUTPUT_TOKENS if most is None else min(most, USUAL_MAX_OUTPUT_TOKENS)
    # Input and answer share the context; some interfaces refuse a request that could outgrow it.
    return bound if context is None else min(bound, max(context // 2, 1))


class FirstKnown:
    """Several tables as one: the first that knows the model answers."""

    def __init__(self, *tables: PriceTable) -> None:
        self._tables = tables

    def cost_usd(self, model: str, usage: CallUsage) -> float | None:
        """Return the first table's answer that is not None."""
        for table in self._tables:
            cost = table.cost_usd(model, usage)
            if cost is not None:
                return cost
        return None


def estimate_tokens(request: object) -> int:
    """Estimate the input tokens of a text, of bytes or of a list of messages, rather too high than too low.

    Three bytes a token is dense for prose and about right for code and JSON; each message costs a little
    more.
    """
    if request is None:
        return 0
    if isinstance(request, str):
        return math.ceil(len(request.encode("utf-8", "surrogatepass")) / 3)
    if isinstance(request, bytes):
        return math.ceil(len(request) / 3)
    if isinstance(request, Mapping):
        return 4 + sum(estimate_tokens(key) + estimate_tokens(item) for key, item in request.items())
    if isinstance(request, Sequence):
        return 4 + sum(estimate_tokens(item) for item in request)
    return estimate_tokens(str(request))


DEFAULT_MAX_OUTPUT_TOKENS = 8_192
"""The most output of a call that asks for no other bound, to a model of which the table knows none."""

USUAL_MAX_OUTPUT_TOKENS = 32_000
"""The most output that is asked of a model by default, reasoning included, however much it could write."""

MIN_OUTPUT_TOKENS = 1_024
"""The shortest answer that is worth its call when little money is left."""


def most_usd(price: Callable[[CallUsage], float | None], usage: CallUsage) -> float | None:
    """Return the most that so many tokens can cost: written to a cache, or thought, if that is dearer."""
    into, out = usage.input_tokens, usage.output_tokens
    kinds = (CallUsage(into, out), CallUsage(into, out, cache_write_tokens=into, reasoning_tokens=out))
    return max((cost for each in kinds if (cost := price(each)) is not None), default=None)


# Dearer than any common model: what an unknown one is taken for when the caller asked for an estimate.
FALLBACK_PRICE = Price(input_per_mtok=15.0, output_per_mtok=75.0)


def estimate_usage(
    *, input_tokens: int | None = None, request: object = None, max_output_tokens: int | None = None
) -> CallUsage:
    """Return the most that a call is expected to use: its input, and all the output that it may produce."""
    return CallUsage(
        input_tokens=estimate_tokens(request) if input_tokens is None else input_tokens,
        output_tokens=DEFAULT_MAX_OUTPUT_TOKENS if max_output_tokens is None else max_output_tokens,
    )
