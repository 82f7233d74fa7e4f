"""A prune knows every kind of event that Treenail writes."""

from __future__ import annotations

import re
from pathlib import Path

from treenail.history.kinds import MODULES

PACKAGE = Path(__file__).resolve().parents[2] / "src/treenail"
BY_THEIR_OWN = {"integrations.claude_store"}
"""Modules whose events stand in logs of their own, which no run has."""


def test_every_module_that_declares_events_is_listed() -> None:
    declaring = {
        ".".join(each.relative_to(PACKAGE).with_suffix("").parts)
        for each in PACKAGE.rglob("*.py")
        if re.search(r'event\(\s*name=f?"treenail\.[A-Z{]', each.read_text("utf-8"))
    }
    assert declaring - BY_THEIR_OWN == set(MODULES) & declaring
    assert set(MODULES) - declaring <= {"judges.prompts", "workflows.outcomes", "tools.plan", "state.events"}
