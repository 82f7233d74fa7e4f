"""How commands print: JSON for machines, text for people."""

from __future__ import annotations

import json


def print_json(data: object) -> None:
    """Print one JSON document."""
    print(json.dumps(data, ensure_ascii=False, indent=2))


def print_result(as_json: bool, data: object, text: str) -> None:
    """Print a result: as JSON, or as text."""
    if as_json:
        print_json(data)
    else:
        print(text)
