"""The client that the conformance suite starts: it hands the address to the test's process, and waits.

There our client is loaded already. Twenty-six processes that each load the SDK would cost a minute.
"""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as asked:
    asked.connect(os.environ["CONFORMANCE_SOCKET"])
    context = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))
    scenario = os.environ["MCP_CONFORMANCE_SCENARIO"]
    asked.sendall(
        json.dumps({"url": sys.argv[-1], "scenario": scenario, "context": context}).encode() + b"\n"
    )
    said = asked.makefile().read()
sys.stderr.write(said)
