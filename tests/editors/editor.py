"""An editor for tests: a process of `treenail acp`, and whatever it says, line by line."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TIMEOUT_S = 240.0
Answer = Callable[[dict[str, Any]], Any]


class Refused(Exception):
    """An error that the agent answered with."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["message"])
        self.code = error["code"]
        self.data = error.get("data")


class Editor:
    """One connection. Requests of the agent are answered by functions, by their methods."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.answers: dict[str, Answer] = {}
        self.updates: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.errors: list[dict[str, Any]] = []
        """Errors that answer no request."""
        self.lines: list[bytes] = []
        """Everything that came from the agent's output."""
        self.garbage: list[bytes] = []
        """What was not a message."""
        self.arrived = threading.Condition()
        self._responses: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._next = 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.arrived:
                self.lines.append(line)
                try:
                    message = json.loads(line)
                except ValueError:
                    self.garbage.append(line)
                    continue
                if message.get("id") is None and "error" in message:
                    self.errors.append(message["error"])
                elif "method" not in message:
                    self._responses[message["id"]].put(message)
                elif "id" not in message:
                    self.updates.append(message["params"]["update"])
                else:
                    self.asked.append(message)
                    threading.Thread(target=self._answer, args=(message,), daemon=True).start()
                self.arrived.notify_all()

    def _answer(self, message: dict[str, Any]) -> None:
        answer = self.answers.get(message["method"])
        reply: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        try:
            if answer is None:
                raise KeyError(message["method"])
            result = answer(message["params"])
            if result is None:
                return  # It is never answered.
            reply["result"] = result
        except KeyError:
            reply["error"] = {"code": -32601, "message": "Method not found"}
        self._write(reply)

    def _write(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def begin(self, method: str, **params: Any) -> Callable[[], Any]:
        """Send a request; call what is returned to wait for its answer."""
        self._next += 1
        wait = self.expect(self._next)
        self._write({"jsonrpc": "2.0", "id": self._next, "method": method, "params": params})
        return wait

    def expect(self, number: int) -> Callable[[], Any]:
        """Return a function that waits for the answer to a request."""
        waiting = self._responses[number] = queue.Queue[dict[str, Any]]()

        def wait() -> Any:
            answer = waiting.get(timeout=TIMEOUT_S)
            if "error" in answer:
                raise Refused(answer["error"])
            return answer["result"]

        return wait

    def request(self, method: str, **params: Any) -> Any:
        return self.begin(method, **params)()

    def notify(self, method: str, **params: Any) -> None:
        self._write({"jsonrpc": "2.0", "method": method, "params": params})

    def initialize(self, **capabilities: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.request(
            "initialize", protocolVersion=1, clientCapabilities=capabilities or {}
        )
        return found

    def new(self, cwd: Path) -> str:
        return str(self.request("session/new", cwd=str(cwd), mcpServers=[])["sessionId"])

    def prompt(self, session: str, text: str) -> dict[str, Any]:
        return self.begin_prompt(session, text)()  # type: ignore[no-any-return]

    def begin_prompt(self, session: str, text: str) -> Callable[[], Any]:
        return self.begin("session/prompt", sessionId=session, prompt=[{"type": "text", "text": text}])

    def wait_for(self, what: Callable[[Editor], Any]) -> Any:
        """Wait until the agent has said something."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: what(self), timeout=TIMEOUT_S), "it did not come"
            return what(self)

    def of(self, kind: str) -> list[dict[str, Any]]:
        with self.arrived:
            return [each for each in self.updates if each["sessionUpdate"] == kind]

    def said(self) -> str:
        return "".join(each["content"]["text"] for each in self.of("agent_message_chunk"))


def environment(home: Path, **more: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return {**kept, "HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "LANG": "C.UTF-8", **more}


@contextmanager
def editor(
    home: Path, *options: str, cwd: Path | None = None, env: dict[str, str] | None = None
) -> Iterator[Editor]:
    """Start `treenail acp`, and end it whatever happens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "treenail", "acp", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=cwd or home,
        env=environment(home, **(env or {})),
    )
    try:
        yield Editor(process)
    finally:
        process.kill()
        process.wait()
        for each in (process.stdin, process.stdout):
            assert each is not None
            each.close()


def script(path: Path, answers: Any) -> str:
    """Write a script for a model, and return the option's value that names it."""
    path.write_text(json.dumps(answers))
    return f"scripted:{path}"
