"""Async tests run on asyncio; what the tests share lies beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Tests are imported one by one, without their folder.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
