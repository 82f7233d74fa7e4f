"""Let the tests of crashes import what they share, which lies beside them, and give them a fast disk."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def base() -> Iterator[Path]:
    """Provide a directory, in memory if there is such a place: to a killed process all disks are the same."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as directory:
        yield Path(directory)
