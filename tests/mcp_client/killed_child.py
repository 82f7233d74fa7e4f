"""A process that is killed in the middle of a server's call: see `test_calls.py`."""

import sys
from pathlib import Path

from tests.mcp_client.mcp_kit import calls, fake, run

workspace, notes, store = map(Path, sys.argv[1:])
server = fake(env={"NOTES": str(notes)}, allow_write=[notes], effects="workspace")
run(server, calls(("fake__write_and_wait", {})), workspace=workspace, store=store)
