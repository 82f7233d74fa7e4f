"""A test that asks for `world` runs once in memory and once on disk."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Tests are imported one by one, without their folder; what they share lies beside them.
sys.path.insert(0, str(Path(__file__).parent))

from tools_kit import World, make_world


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["memory-memory", "sqlite-host"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    log_kind, _, workspace_kind = request.param.partition("-")
    made = make_world(log_kind, workspace_kind, tmp_path)
    yield made
    made.log.close()


@pytest.fixture
def small_world(tmp_path: Path) -> Iterator[World]:
    """A world in memory, for promises that have nothing to do with where things are kept."""
    made = make_world("memory", "memory", tmp_path)
    yield made
    made.log.close()
