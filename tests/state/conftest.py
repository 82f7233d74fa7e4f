"""The log that tests of sessions run on: in memory, unless a module says otherwise.

What differs between stores is the matter of the conformance suite of logs and of the session's laws, which
run on both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from treenail.log import Log

# Tests are imported one by one, without their folder; what they share lies beside them.
sys.path.insert(0, str(Path(__file__).parent))

from state_kit import opened_log


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with opened_log("memory", tmp_path) as opened:
        yield opened
