"""What to reserve for a call, and what it really cost.

Before a call: the caller's hint, or the price table's answer for the request's size and all the output that
it may ask for. After it: what the called function reported, what `cost_of` says, the price of the usage that
the response carries; and if nobody knows, the reservation. A model without a price is treated as configured,
and never silently.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from treenail.containment.attempts import Attempt
from treenail.containment.limits import OnUnknownPrice, number, to_pico
from treenail.containment.pricing import (
    FALLBACK_PRICE,
    CallUsage,
    PriceTable,
    default_prices,
    estimate_usage,
    most_usd,
    usage_of,
)
from treenail.containment.shield import Decision, DegradePlan
from treenail.containment.threads import describe

Tell = Callable[[str, Decision, str], None]


class Costs:
    """Costs for one chain. `tell` records an event: type, decision, reason."""

    def __init__(
        self,
        prices: PriceTable | None,
        on_unknown_price: OnUnknownPrice | None,
        tell: Tell,
    ) -> None:
        self.prices = prices
        self.on_unknown_price = on_unknown_price
        """None: no ceiling in USD applies, so prices do not matter."""
        self._tell = tell
        self._told: set[str] = set()

    def estimate(self, attempt: Attempt) -> int | None:
        """Return what to reserve; None if that is not known and a ceiling in USD cannot be kept without.

        The caller knows best, also of an attempt that is made with less. What the caller does not know of
        another model, the price table may.
        """
        options, plan = attempt.options, attempt.plan
        if attempt.affordable_tokens is not None:
            less = DegradePlan(max_output_tokens=attempt.affordable_tokens)
            plan = less if plan is None else plan.merged(less)
        if options.is_unbounded and self._is_told_unbounded(attempt):
            return None
        if plan is not None and options.estimate_degraded is not None:
            cost = options.estimate_degraded(plan)
            if cost is not None:
                return to_pico(number("WrapOptions", "estimate_degraded", cost, zero_ok=True))
            if plan.model not in (None, options.model):
                return self._estimate_by_table(attempt)
        if options.cost_estimate_hint:
            return to_pico(options.cost_estimate_hint)
        return 0 if attempt.is_free else self._estimate_by_table(attempt)

    def _estimate_by_table(self, attempt: Attempt) -> int | None:
        options, model = attempt.options, attempt.model()
        if model is None:
            return 0
        usage = estimate_usage(
            input_tokens=options.input_tokens,
            request=options.request,
            max_output_tokens=attempt.max_output_tokens,
        )
        cost = self._price(model, usage, is_estimate=True)
        if cost is None:
            if self.on_unknown_price == "halt":
                return None
            cost = self._fallback(model, usage)
        return to_pico(cost)

    def fit(self, attempt: Attempt, left: int) -> bool:
        """Shorten the answer to what `left` pays for, and estimate it anew; False if it would be of no use.

        The cost of a call is a straight line over the tokens of its answer.
        """
        least, most = attempt.options.min_output_tokens, attempt.max_output_tokens
        if least is None or most is None or most <= least or left <= 0:
            return False
        before, high = attempt.affordable_tokens, attempt.estimate
        attempt.affordable_tokens = least
        low = self.estimate(attempt)
        if low is None or not low <= left < high:
            attempt.affordable_tokens = before
            return False
        exact = least + (most - least) * (left - low) // (high - low)
        for tokens in (exact, exact - 1, least):  # One less, for a rounded fraction.
            attempt.affordable_tokens = tokens
            cost = self.estimate(attempt)
            if cost is not None and cost <= left:
                attempt.estimate = cost
                return True
        return False

    def least(self, attempt: Attempt) -> int:
        """Return what an attempt costs with the shortest answer that is of use."""
        least, most = attempt.options.min_output_tokens, attempt.max_output_tokens
        if least is None or most is None or most <= least:
            return attempt.estimate
        before, attempt.affordable_tokens = attempt.affordable_tokens, least
        cost = self.estimate(attempt)
        attempt.affordable_tokens = before
        return attempt.estimate if cost is None else cost

    def _is_told_unbounded(self, attempt: Attempt) -> bool:
        """Say whether a call whose answer nothing bounds must not be made; else tell of it, once."""
        if self.on_unknown_price is None or self.on_unknown_price == "halt":
            return self.on_unknown_price is not None
        name = f"the answer of {attempt.call.name}"
        if name not in self._told:
            self._told.add(name)
            self._tell("answer_unbounded", Decision.ALLOW, f"nothing bounds {name}; its cost is a guess")
        return False

    def real(self, attempt: Attempt, value: object) -> int:
        """Return what an attempt cost, given what it returned; the reservation if that is not known."""
        if attempt.reported is not None:
            return attempt.reported
        options = attempt.options
        if value is None and attempt.usage is None and options.response_hint is None:
            return attempt.reserved
        try:
            if options.cost_of is not None and value is not None:
                return to_pico(number("WrapOptions", "cost_of", options.cost_of(value), zero_ok=True))
            usage = attempt.usage = attempt.usage or usage_of(value) or usage_of(options.response_hint)
            model = attempt.model()
            if usage is not None and model is not None and not attempt.is_free:
                return self._priced(attempt, model, usage)
        except Exception as error:  # noqa: BLE001 - the call is over; its reservation stands in for its cost
            reason = f"the cost of {attempt.call.name} could not be read ({describe(error)})"
            self._tell("cost_unknown", Decision.ALLOW, f"{reason}; the reservation was charged")
        return attempt.reserved

    def _priced(self, attempt: Attempt, model: str, usage: CallUsage) -> int:
        if self.prices is None and self.on_unknown_price is None:
            return attempt.reserved
        cost = self._price(model, usage)
        if cost is None:
            # A table that knew a price before the call and knows none after it makes nothing free.
            if attempt.options.cost_estimate_hint or self.on_unknown_price != "estimate":
                return attempt.reserved
            cost = self._fallback(model, usage)
        return to_pico(cost)

    def _price(self, model: str, usage: CallUsage, *, is_estimate: bool = False) -> float | None:
        table = self.prices
        if table is None:
            if self.on_unknown_price is None:
                return 0.0
            table = default_prices()
        try:
            price = partial(table.cost_usd, model)
            cost = most_usd(price, usage) if is_estimate else price(usage)
            return None if cost is None else number("PriceTable", "cost_usd", cost, zero_ok=True)
        except Exception as error:  # noqa: BLE001 - a table that fails, or says nonsense, does not know the price
            self._tell("price_unknown", Decision.ALLOW, f"the price table failed: {describe(error)}")
            return None

    def _fallback(self, model: str, usage: CallUsage) -> float:
        estimates = self.on_unknown_price == "estimate"
        if self.on_unknown_price is not None and model not in self._told:
            self._told.add(model)
            taken = "it is estimated" if estimates else "its cost is not counted"
            self._tell("price_unknown", Decision.ALLOW, f"no price is known for {model!r}; {taken}")
        return FALLBACK_PRICE.cost_usd(usage) if estimates else 0.0
