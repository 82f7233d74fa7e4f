"""What the tests of workers share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.engine_kit import Fleet, fleet_in
from tests.postgres import Shared


@pytest.fixture
def fleet(postgres: Shared, tmp_path: Path) -> Iterator[Fleet]:
    """Workers of this test alone, on a schema of its own."""
    with fleet_in(postgres.url(), tmp_path / "fleet") as made:
        yield made
