"""From the public price data of genai-prices to a table of ours.

The data is a list of vendors, as `prices/new_data/v2/data.json` of that project has it. A vendor is in the
table if the names of its models identify it. Of prices that begin on a date, the newest one that has begun
counts; of prices that depend on the time of day, the dearest one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Any

from treenail.containment.pricing import MILLION
from treenail.errors import UsageError

PRICES_URL = (
    "https://raw.githubusercontent.com/pydantic/genai-prices/refs/heads/main/prices/new_data/v2/data.json"
)
"""Where the newest data is."""

KEYS = ("input_mtok", "output_mtok", "cache_read_mtok", "cache_write_mtok")
"""The prices that are taken over, in the order in which a table has them."""


def table_text(data: object, *, day: date, source: str, max_output: Callable[[str, str], int | None]) -> str:
    """Return the table that the data amounts to, one line per model. `UsageError` if the data is none.

    `max_output` says how many tokens a vendor's model can write, which the data does not tell.
    """
    try:
        vendors = [_vendor(each, day, max_output) for each in _list(data) if each.get("model_match")]
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError, re.error) as error:
        raise UsageError(
            f"{source} is not price data as genai-prices publishes it ({type(error).__name__}: {error})"
        ) from error
    if sum(len(models) for _, models in vendors) == 0:
        raise UsageError(f"{source} holds no price of a model")
    lines = [f'{{"date": "{day}", "source": {json.dumps(source)},', '"vendors": [']
    for vendor, models in vendors:
        lines.append(json.dumps(vendor)[:-1] + ', "models": [')
        lines.extend(f" {json.dumps(model)}," for model in models)
        lines[-1] = lines[-1].rstrip(",") + "]},"
    lines[-1] = lines[-1].rstrip(",") + "]}"
    return "\n".join(lines) + "\n"


def _list(data: object) -> list[Mapping[str, Any]]:
    if not isinstance(data, list):
        raise TypeError("it is not a list of vendors")
    return data


def _vendor(
    given: Mapping[str, Any], day: date, max_output: Callable[[str, str], int | None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    models = []
    for model in given.get("models") or ():
        price = _current(model["prices"], day)
        if price.get("input_mtok") is None or price.get("output_mtok") is None:
            continue  # It does not answer in text.
        usd = [_figure(price.get(key)) for key in KEYS]
        entry = {"match": _patterns(model["match"]), "usd": usd, "context": model.get("context_window")}
        most = max_output(str(given["id"]), str(model["id"]))
        models.append(entry if most is None else {**entry, "output": most})
    return {"vendor": str(given["id"]), "match": _patterns(given["model_match"])}, models


def _patterns(clause: Mapping[str, Any]) -> list[str]:
    """Return the clause as patterns of which one must match; `*` is any text, and `~` begins a regex."""
    ((kind, value),) = clause.items()
    if kind == "or":
        return [pattern for each in value for pattern in _patterns(each)]
    if kind == "equals":
        return [value.lower()]
    if kind == "starts_with":
        return [f"{value.lower()}*"]
    if kind == "ends_with":
        return [f"*{value.lower()}"]
    if kind == "contains":
        return [f"*{value.lower()}*"]
    return [f"~{_regex(clause)}"]


def _regex(clause: Mapping[str, Any]) -> str:
    """Return the clause as a regular expression to search for."""
    ((kind, value),) = clause.items()
    if kind == "and":
        return "^" + "".join(f"(?={_regex(each)})" for each in value)
    if kind == "or":
        return "(?:" + "|".join(_regex(each) for each in value) + ")"
    made = {
        "regex": str(value),
        "equals": f"^{re.escape(str(value))}$",
        "starts_with": f"^{re.escape(str(value))}",
        "ends_with": f".*{re.escape(str(value))}$",
        "contains": f".*{re.escape(str(value))}",
    }[kind]
    re.compile(made)
    return made


def _current(prices: Mapping[str, Any] | Sequence[Mapping[str, Any]], day: date) -> Mapping[str, Any]:
    """Return the price that applies to a model on a day, whatever the hour."""
    if isinstance(prices, Mapping):
        return prices
    begun = [prices[0]["prices"]]
    at_some_hour = []
    for each in prices:
        constraint = each.get("constraint") or {}
        if "start_time" in constraint:
            at_some_hour.append(each["prices"])
        elif not constraint or date.fromisoformat(constraint["start_date"]) <= day:
            begun.append(each["prices"])
    return max([begun[-1], *at_some_hour], key=lambda price: _base(price.get("output_mtok")) or 0)


def _base(price: Any) -> float | None:
    if isinstance(price, Mapping):
        price = price["base"]
    return None if price is None else _usd(price)


def _usd(price: Any) -> float:
    if not 0 <= float(price) < MILLION:
        raise ValueError(f"{price!r} is not a price")
    return float(price)


def _figure(price: Any) -> Any:
    """Return a price as a number, or as [number, [tokens of input above which, number], ...]."""
    if isinstance(price, Mapping):
        return [_base(price), *([int(tier["start"]), _usd(tier["price"])] for tier in price["tiers"])]
    return _base(price)
