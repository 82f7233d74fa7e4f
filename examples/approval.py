"""Approval by webhook: a call that needs a person is posted to a chat, and a button there answers it."""

from __future__ import annotations

import json
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.request import Request, urlopen

from treenail import Agent, ToolContext, tool
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.tools import PermissionMode, Permissions, ToolHeld


@tool(effects="workspace")
def publish(text: str, context: ToolContext) -> str:
    """Publish a text."""
    context.filesystem.write("published.txt", text)
    return "published"


agent = Agent("editor", tools=[publish])
model = ScriptedProvider([Answer(calls=[("publish", {"text": "Rope is back."})]), "It is out."])


class Chat(BaseHTTPRequestHandler):
    """A stand-in for a chat: whoever is asked presses Approve."""

    def do_POST(self) -> None:
        """Take a question, and answer it."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"call_id": asked["call_id"], "approved": asked["tool"] == "publish"}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def ask(address: str, held: ToolHeld) -> bool:
    """Post a question to the chat, and wait for the answer."""
    body = json.dumps({"call_id": held.call_id, "tool": held.tool_name, "arguments": held.arguments}).encode()
    with urlopen(Request(address, body, {"Content-Type": "application/json"})) as said:
        return bool(json.load(said)["approved"])


def main() -> None:
    """Run it with a chat on this machine."""
    chat = HTTPServer(("127.0.0.1", 0), Chat)
    threading.Thread(target=chat.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{chat.server_port}"
    with tempfile.TemporaryDirectory() as scratch:
        asks = Permissions(PermissionMode.ASK)
        with agent.stream(
            "Tell them.", provider=model, workspace=scratch, store=Path(scratch) / "runs.db", permissions=asks
        ) as run:
            for event in run:
                if isinstance(event.value, ToolHeld):
                    run.answer(event.value.call_id, approved=ask(address, event.value), by="the chat")
            print(run.result().output)
        assert (Path(scratch) / "published.txt").read_text() == "Rope is back."
    chat.shutdown()
    chat.server_close()


if __name__ == "__main__":
    main()
