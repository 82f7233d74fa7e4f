"""What the tests share lies beside them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Tests are imported one by one, without their folder.
sys.path.insert(0, str(Path(__file__).parent))

from telemetry_kit import Seen  # the path above comes first

from treenail import telemetry


@pytest.fixture
def seen() -> Iterator[Seen]:
    yield Seen()
    telemetry.use(None)
