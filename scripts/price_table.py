"""Write the price table that ships with the package, from the data of the installed `genai-prices`.

    python scripts/price_table.py

Run it after installing a newer `genai-prices`, and commit the changed file. A vendor is in the table if the
names of its models identify it. Of prices that begin on a date, the newest one that has begun counts; of
prices that depend on the time of day, the dearest one.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from genai_prices import data_snapshot, types

TABLE = Path(__file__).parent.parent / "src" / "treenail" / "containment" / "prices.json"
KEYS = ("input_mtok", "output_mtok", "cache_read_mtok", "cache_write_mtok")


def patterns(clause: Any) -> list[str]:
    """Return the clause as patterns of which one must match; `*` is any text, and `~` begins a regex."""
    if isinstance(clause, types.ClauseOr):
        return [pattern for each in clause.or_ for pattern in patterns(each)]
    if isinstance(clause, types.ClauseEquals):
        return [clause.equals.lower()]
    if isinstance(clause, types.ClauseStartsWith):
        return [f"{clause.starts_with.lower()}*"]
    if isinstance(clause, types.ClauseEndsWith):
        return [f"*{clause.ends_with.lower()}"]
    if isinstance(clause, types.ClauseContains):
        return [f"*{clause.contains.lower()}*"]
    return [f"~{regex(clause)}"]


def regex(clause: Any) -> str:
    """Return the clause as a regular expression to search for."""
    if isinstance(clause, types.ClauseRegex):
        return clause.regex
    if isinstance(clause, types.ClauseAnd):
        return "^" + "".join(f"(?={regex(each)})" for each in clause.and_)
    if isinstance(clause, types.ClauseOr):
        return "(?:" + "|".join(regex(each) for each in clause.or_) + ")"
    if isinstance(clause, types.ClauseEquals):
        return f"^{re.escape(clause.equals)}$"
    if isinstance(clause, types.ClauseStartsWith):
        return f"^{re.escape(clause.starts_with)}"
    if isinstance(clause, types.ClauseEndsWith):
        return f".*{re.escape(clause.ends_with)}$"
    return f".*{re.escape(clause.contains)}"


def current(model: types.ModelInfo, now: datetime) -> types.ModelPrice:
    """Return the price that applies to a model now, whatever the time of day."""
    if isinstance(model.prices, types.ModelPrice):
        return model.prices
    begun = [model.prices[0].prices]
    at_some_hour = []
    for each in model.prices:
        if isinstance(each.constraint, types.TimeOfDateConstraint):
            at_some_hour.append(each.prices)
        elif each.constraint is None or each.constraint.active(now):
            begun.append(each.prices)
    return max([begun[-1], *at_some_hour], key=lambda price: number(price.output_mtok) or 0)


def number(price: Any) -> float | None:
    """Return a price as one number; for a tiered one, its lowest tier."""
    if isinstance(price, types.TieredPrices):
        return float(price.base)
    return None if price is None else float(price)


def figure(price: Any) -> Any:
    """Return a price as a number, or as [number, [tokens of input above which, number], ...]."""
    if isinstance(price, types.TieredPrices):
        return [float(price.base), *([tier.start, float(tier.price)] for tier in price.tiers)]
    return number(price)


def main() -> None:
    """Write the table, one line per model."""
    now = datetime.now(UTC)
    vendors = []
    for provider in data_snapshot.get_snapshot().providers:
        if provider.model_match is None:
            continue
        models = []
        for model in provider.models:
            price = current(model, now)
            if price.input_mtok is None or price.output_mtok is None:
                continue  # It does not answer in text.
            usd = [figure(getattr(price, key)) for key in KEYS]
            models.append({"match": patterns(model.match), "usd": usd, "context": model.context_window})
        vendors.append({"vendor": provider.id, "match": patterns(provider.model_match), "models": models})
    lines = [
        f'{{"date": "{now.date()}", "source": "genai-prices {importlib.metadata.version("genai-prices")}",',
        '"vendors": [',
    ]
    for vendor in vendors:
        models = vendor.pop("models")
        lines.append(json.dumps(vendor)[:-1] + ', "models": [')
        lines.extend(f" {json.dumps(model)}," for model in models)
        lines[-1] = lines[-1].rstrip(",") + "]},"
    lines[-1] = lines[-1].rstrip(",") + "]}"
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
