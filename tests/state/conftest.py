"""Each test of a session that asks for `log` runs on every store."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from treenail.log.memory import MemoryLog
from treenail.log.sqlite import SqliteLog

# Tests are imported one by one, without their folder; what they share lies beside them.
sys.path.insert(0, str(Path(__file__).parent))

from state_kit import opened_log


@pytest.fixture(params=["memory", "sqlite"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MemoryLog | SqliteLog]:
    with opened_log(request.param, tmp_path) as opened:
        yield opened
