"""A call whose body runs elsewhere is a transaction like any other."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest
from tools_kit import World, make_world

from treenail.errors import UsageError
from treenail.tools import PendingToolTracker


def test_a_native_tool_is_kept_if_it_succeeds_and_undone_if_not(tmp_path: Any) -> None:
    """Its body writes past us, between two hooks, and still its changes are its own."""
    world = make_world("sqlite", "host", tmp_path)
    tracker = PendingToolTracker(world.runner())
    root = world.filesystem.host_root
    assert tracker.begin("n1", "Bash") is None
    (root / "kept.txt").write_text("kept")
    assert tracker.end("n1", True) is False
    assert tracker.begin("n2", "Bash") is None
    (root / "kept.txt").write_text("spoiled")
    assert tracker.end("n2", False, "exit code 1") is True
    assert tracker.begin("n3", "Bash") is None
    (root / "gone.txt").write_text("x")
    assert tracker.abort("n3") is True
    assert world.files() == {"file.txt": "original", "kept.txt": "kept"}
    assert [(each.name, each.outcome) for each in world.ends()] == [
        ("Bash", "ok"),
        ("Bash", "failed"),
        ("Bash", "failed"),
    ]
    assert (tracker.end("n9", True), tracker.abort("n9")) == (False, False)
    world.log.close()


def test_native_tools_that_overlap_wait_for_each_other(small_world: World) -> None:
    """In an event loop the second waits without blocking it; one without effects does not wait at all."""
    tracker = PendingToolTracker(small_world.runner(), files="context")
    order: list[str] = []

    async def second() -> None:
        await tracker.abegin("n2", "Write")
        order.append("n2 began")
        tracker.end("n2", True)

    async def main() -> None:
        await tracker.abegin("n1", "Write")
        async with anyio.create_task_group() as group:
            group.start_soon(second)
            await anyio.lowlevel.checkpoint()
            await tracker.abegin("n3", "Read", effects="none")
            tracker.end("n3", True)
            with pytest.raises(UsageError, match="abegin"):
                tracker.begin("n4", "Write")
            order.append("n1 ends")
            tracker.end("n1", True)

    anyio.run(main)
    assert order == ["n1 ends", "n2 began"]
    assert [each.call_id for each in small_world.ends()] == ["n3", "n1", "n2"]
