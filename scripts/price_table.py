"""Write the price table that ships with the package.

    python scripts/price_table.py

Prices are those of the installed `genai-prices`; how much a model can write is what the installed LiteLLM
says. Run it after installing newer ones, and commit the changed file.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from genai_prices import data_snapshot, types

from treenail.containment.price_data import KEYS, table_text

TABLE = Path(__file__).parent.parent / "src" / "treenail" / "containment" / "prices.json"
LITELLM = "model_prices_and_context_window_backup.json"
LITELLM_NAMES = {"x-ai": "xai", "google": "gemini", "fireworks": "fireworks_ai", "moonshotai": "moonshot"}


def clause(given: Any) -> dict[str, Any]:
    """Return a clause as the published data has it."""
    ((name, value),) = vars(given).items()
    kind = name.rstrip("_")
    return {kind: [clause(each) for each in value] if isinstance(value, list) else value}


def price(given: types.ModelPrice) -> dict[str, Any]:
    """Return a price as the published data has it."""
    found = {key: getattr(given, key, None) for key in KEYS}
    return {
        key: {"base": each.base, "tiers": [vars(tier) for tier in each.tiers]}
        if isinstance(each, types.TieredPrices)
        else each
        for key, each in found.items()
    }


def prices(model: types.ModelInfo) -> Any:
    """Return a model's prices as the published data has them."""
    if isinstance(model.prices, types.ModelPrice):
        return price(model.prices)
    return [
        {
            "constraint": {name: str(at) for name, at in vars(each.constraint).items()}
            if each.constraint
            else None,
            "prices": price(each.prices),
        }
        for each in model.prices
    ]


def published() -> list[dict[str, Any]]:
    """Return the installed data as it is published."""
    return [
        {
            "id": vendor.id,
            "model_match": None if vendor.model_match is None else clause(vendor.model_match),
            "models": [
                {
                    "id": model.id,
                    "match": clause(model.match),
                    "context_window": model.context_window,
                    "prices": prices(model),
                }
                for model in vendor.models
            ],
        }
        for vendor in data_snapshot.get_snapshot().providers
    ]


def outputs() -> dict[str, int]:
    """Return how many tokens each model can write, by the names that LiteLLM has for them."""
    # Importing LiteLLM would fetch something from the network.
    (place,) = importlib.util.find_spec("litellm").submodule_search_locations  # type: ignore[union-attr, misc]
    known: dict[str, Any] = json.loads((Path(place) / LITELLM).read_text("utf-8"))
    return {
        name.lower(): model["max_output_tokens"]
        for name, model in known.items()
        if model.get("mode") in ("chat", "responses") and isinstance(model.get("max_output_tokens"), int)
    }


def main() -> None:
    """Write the table."""
    known = outputs()

    def max_output(vendor: str, model: str) -> int | None:
        # Of resellers, the strictest one: their limits differ.
        bare = model.rpartition("/")[2].lower()
        sold = [most for name, most in known.items() if name.rpartition("/")[2] == bare]
        names = (model.lower(), f"{LITELLM_NAMES.get(vendor, vendor)}/{bare}", bare)
        return next((known[name] for name in names if name in known), min(sold, default=None))

    source = f"genai-prices {importlib.metadata.version('genai-prices')}"
    text = table_text(published(), day=datetime.now(UTC).date(), source=source, max_output=max_output)
    TABLE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
