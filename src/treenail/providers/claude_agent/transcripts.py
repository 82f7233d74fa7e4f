"""The conversations that the CLI writes down, in files of its own."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from treenail.conversation import ReplayItem


def remembers(config_dir: Path, vendor_session_id: str, answer: ReplayItem) -> bool:
    """Say whether the newest answer in a conversation of the CLI's is this one.

    The CLI writes its conversations down when it gets to it: one that was killed may have missed the
    newest answer, and one that was cut off may have kept something that is not our answer.
    """
    newest = _newest_answer(config_dir, vendor_session_id)
    if newest is None:
        return False
    asked = {each.get("id") for each in newest if each.get("type") == "tool_use"}
    if answer.calls:
        return any(each.call_id in asked for each in answer.calls)
    text = "".join(str(each.get("text", "")) for each in newest if each.get("type") == "text")
    return text == answer.text and not asked


def _newest_answer(config_dir: Path, vendor_session_id: str) -> list[dict[str, Any]] | None:
    """Return the blocks of the newest answer; None if there is none. It may be spread over several lines."""
    answers: dict[str, list[dict[str, Any]]] = {}
    for path in (config_dir / "projects").glob(f"*/{vendor_session_id}.jsonl"):
        for line in path.read_text(errors="replace").splitlines():
            with suppress(ValueError, LookupError, TypeError, AttributeError):
                entry = json.loads(line)
                message = entry["message"]
                if entry["type"] == "assistant" and message["model"] != "<synthetic>":
                    answers.setdefault(message["id"], []).extend(message["content"])
    return list(answers.values())[-1] if answers else None
