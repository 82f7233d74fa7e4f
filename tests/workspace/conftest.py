"""Let the tests of workspaces import what they share, which lies beside them, and give nobody a place."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def public_path() -> Iterator[Path]:
    """A directory in which any user may work; pytest's own are closed to others whenever pytest starts."""
    with TemporaryDirectory(prefix="treenail-public-") as name:
        place = Path(name)
        place.chmod(0o777)
        for parent in place.parents:
            if parent.stat().st_uid == os.getuid() and not parent.stat().st_mode & 0o001:
                parent.chmod(parent.stat().st_mode | 0o011)
        yield place
