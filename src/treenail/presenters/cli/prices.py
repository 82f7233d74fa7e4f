"""The price table: what it says, and how a newer one is fetched."""

from __future__ import annotations

import json
import os
import urllib.request
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import click

from treenail.containment import (
    PRICES_URL,
    PackagedPrices,
    default_prices,
    fetched_prices_file,
    table_text,
)
from treenail.errors import UsageError
from treenail.presenters.cli.options import json_option
from treenail.presenters.cli.output import print_json

MAX_DATA_BYTES = 64 * 1024 * 1024
_TIMEOUT_S = 30.0
_HERE = ("127.0.0.1", "::1", "localhost")


@click.command
@click.argument("model", required=False)
@json_option
def show(model: str | None, as_json: bool) -> int:
    """Show the date of the price table, and the price of a model.

    Exits 1 if the model is not in it.

    Example: treenail prices show claude-sonnet-5-5
    """
    table = default_prices()
    price = None if model is None else table.price(model)
    if as_json:
        known = None if price is None else asdict(price)
        print_json({"date": table.date, "source": table.source, "model": model, "price": known})
    else:
        print(f"prices of {table.date} ({table.source}), {len(table)} models")
        if price is not None:
            per = f"{price.input_per_mtok:g} USD in, {price.output_per_mtok:g} USD out"
            print(f"{model}: {per}, per million tokens")
        elif model is not None:
            print(f"{model}: not known; `treenail prices fetch` fetches a newer table")
    return int(model is not None and price is None)


@click.command
@click.option(
    "--from", "source", default=PRICES_URL, help="An address, or a file, with data of genai-prices."
)
@json_option
def fetch(source: str, as_json: bool) -> int:
    """Fetch a newer price table.

    It comes from the public data of genai-prices, and is used by every run from then on.

    Example: treenail prices fetch
    """
    text = _table(_read(source), source)
    file = fetched_prices_file()
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = file.with_name(f".{file.name}-{os.getpid()}")
    try:
        new.write_text(text, encoding="utf-8")
        made = PackagedPrices(new)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
    if as_json:
        print_json({"date": made.date, "source": made.source, "models": len(made), "file": str(file)})
    else:
        print(f"the prices of {len(made)} models, of {made.date}, are in {file}")
    return 0


def _read(source: str) -> bytes:
    """Read the data. It decides what runs may cost, so a line that others can write to is refused."""
    place = urlsplit(source)
    try:
        if place.scheme in ("http", "https"):
            if place.scheme == "http" and place.hostname not in _HERE:
                raise UsageError(f"prices are not taken from {source}: use https")
            with urllib.request.urlopen(source, timeout=_TIMEOUT_S) as answer:
                data: bytes = answer.read(MAX_DATA_BYTES + 1)
        else:
            with Path(source).expanduser().open("rb") as file:
                data = file.read(MAX_DATA_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the prices could not be read from {source} ({error}); the table that was there is still used. "
            "Try again, or name a file or another address with --from"
        ) from error
    if len(data) > MAX_DATA_BYTES:
        raise UsageError(f"{source} has more than {MAX_DATA_BYTES} bytes, so it is not price data")
    return data


def _table(data: bytes, source: str) -> str:
    """Return the table that the data amounts to; what a model can write is known to the package's alone."""
    try:
        vendors = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source} is not price data as genai-prices publishes it: {error}") from error
    packaged = PackagedPrices()
    return table_text(
        vendors,
        day=datetime.now(UTC).date(),
        source=source,
        max_output=lambda vendor, model: packaged.max_output_tokens(model),
    )
