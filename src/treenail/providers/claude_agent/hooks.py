"""What the CLI asks for: leave for each tool and for each next model call, and the results of our tools.

Theory of operation
-------------------
The CLI calls the hooks and the server of our tools, and waits for what they return. So a step of its loop is
held by not answering; `PendingCall` says what each waits for. A hook that fails, because this process has
died, say, must not let anything through.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Collection
from typing import Any

import claude_agent_sdk as sdk
from mcp import types as mcp
from mcp.server import Server

from treenail.providers.claude_agent.calls import Calls
from treenail.providers.claude_agent.environment import PATIENCE_S
from treenail.providers.claude_agent.offer import PREFIX, SERVER, Offer
from treenail.providers.claude_agent.queue import Queue
from treenail.tools import ToolResult


class Hooks:
    """Where one CLI is held at each of its steps."""

    def __init__(self, calls: Calls, native: Collection[str]) -> None:
        self._calls = calls
        self._native = native
        self._leave_to_go_on: Queue[str | None] = Queue()

    def continue_with(self, news: str | None) -> None:
        """Let the CLI continue after one batch of tools, with news for the model; None ends its turn."""
        self._leave_to_go_on.put(news)

    def matchers(self) -> Any:
        """Return the hooks as the SDK's options take them."""

        def matcher(callback: Any, **more: Any) -> list[sdk.HookMatcher]:
            return [sdk.HookMatcher(hooks=[callback], timeout=PATIENCE_S, **more)]

        return {
            "PreToolUse": matcher(self._before_tool, on_failure="block"),
            "PostToolUse": matcher(self._after_tool),
            "PostToolUseFailure": matcher(self._after_tool),
            "PostToolBatch": matcher(self._after_batch, on_failure="block"),
        }

    def server(self, offer: Offer) -> Server[Any]:
        """Serve our tools to the CLI, in this process."""

        async def listed(context: Any, params: Any) -> mcp.ListToolsResult:
            return mcp.ListToolsResult(tools=offer.listed())

        async def called(context: Any, params: Any) -> mcp.CallToolResult:
            vendor_id = str((params.meta or {}).get("claudecode/toolUseId", ""))
            pending = self._calls.next("call", vendor_id)
            pending.asked.set()
            await pending.delivered.wait()
            result = pending.result or ToolResult.error("This call was not run.")
            # A text cannot be empty on the wire.
            content = [{"type": "text", "text": result.render() or "(empty)"}]
            for kind, data in result.pictures():
                content.append({"type": "image", "mimeType": kind, "data": b64encode(data).decode()})
            return mcp.CallToolResult.model_validate({"content": content, "isError": not result.success})

        return Server(SERVER, version="1", on_list_tools=listed, on_call_tool=called)

    async def _before_tool(self, seen: Any, vendor_id: str | None, _: Any) -> Any:
        """The CLI has come to a call. A native one waits here until the runner has begun it, or refused."""
        name = str(seen["tool_name"])
        if seen.get("agent_id"):
            return _denied("Subagents of the vendor's own cannot use tools here.")
        pending = self._calls.next("before", str(seen["tool_use_id"]))
        pending.asked.set()
        if name.startswith(PREFIX):
            return _ALLOWED
        if name not in self._native:
            return _denied(f"{name} is not available in this run.")
        await pending.released.wait()
        return _ALLOWED if pending.denial is None else _denied(pending.denial)

    async def _after_tool(self, seen: Any, vendor_id: str | None, _: Any) -> Any:
        """A native tool has run: its end goes to the log before the CLI continues."""
        if seen["tool_name"] not in self._native:
            return {}
        event = seen["hook_event_name"]
        pending = self._calls.next("after", str(seen["tool_use_id"]))
        pending.succeeded = event == "PostToolUse"
        pending.text = text_of(seen.get("tool_response") if pending.succeeded else seen.get("error"))
        pending.ended.set()
        await pending.delivered.wait()
        result = pending.result
        if result is None or result.success:
            return {}
        told = "What this call had changed in the workspace was rolled back."
        if pending.succeeded:
            told = f"This call was not kept: {result.message} {told}"
        return {"hookSpecificOutput": {"hookEventName": event, "additionalContext": told}}

    async def _after_batch(self, seen: Any, vendor_id: str | None, _: Any) -> Any:
        """All calls of an answer have ended: the next model call needs leave."""
        news = await self._leave_to_go_on.take()
        if news is None:
            return {"continue_": False, "stopReason": "the turn is over"}
        if not news:
            return {}
        return {"hookSpecificOutput": {"hookEventName": "PostToolBatch", "additionalContext": news}}


_ALLOWED: Any = {"hookSpecificOutput": {"hookEventName": "PreToolUse", "permissionDecision": "allow"}}


def _denied(reason: str) -> Any:
    return {
        "hookSpecificOutput": {
            "hookEventName": "PreToolUse",
            "permissionDecision": "deny",
            "permissionDecisionReason": reason,
        }
    }


def text_of(content: Any) -> str:
    """Write what a tool of the CLI's came to as the text that its model reads, about."""
    if isinstance(content, str):
        return content.removeprefix("<tool_use_error>").removesuffix("</tool_use_error>")
    if isinstance(content, list):
        texts = [each.get("text", "") for each in content if isinstance(each, dict)]
        return "\n".join(each for each in texts if each)
    if isinstance(content, dict):
        if "stdout" in content:
            return "\n".join(each for each in (content["stdout"], content.get("stderr")) if each)
        if "filePath" in content:
            return f"{content.get('type', 'changed')}: {content['filePath']}"
        return json.dumps(content, ensure_ascii=False)
    return "" if content is None else str(content)
