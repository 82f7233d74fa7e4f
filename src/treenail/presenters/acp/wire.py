"""The stream of updates in version 1 of the Agent Client Protocol."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from acp import RequestError, schema

from treenail.history import Usage, short
from treenail.presenters.acp.stops import Ending
from treenail.presenters.acp.updates import CallShown, CallStatus, PlanShown, Said, Update, UsageShown
from treenail.printable import printable
from treenail.tools import ToolHeld
from treenail.turns import PlanEntry

META = "treenail"
"""The key of what is ours in `_meta`."""

_KINDS: Mapping[str, schema.ToolKind] = {
    "read_file": "read",
    "read_result": "read",
    "list_directory": "search",
    "glob_files": "search",
    "grep_files": "search",
    "write_file": "edit",
    "edit_file": "edit",
    "delete_file": "delete",
    "move_file": "move",
    "run_command": "execute",
}

_STATUSES: Mapping[CallStatus, schema.ToolCallStatus] = {
    "pending": "pending",
    "running": "in_progress",
    "kept": "completed",
    "failed": "failed",
}

_PLAN: Mapping[str, tuple[schema.PlanEntryStatus, str]] = {
    "in_progress": ("in_progress", ""),
    "done": ("completed", ""),
    "skipped": ("completed", " (skipped)"),
    "blocked": ("pending", " (blocked)"),
}

_ABOUT = ("path", "pattern", "question", "objective")
"""The arguments that say what a call is about; the first one that it has."""

_MAX_TITLE = 120

SessionUpdate = (
    schema.UserMessageChunk
    | schema.AgentMessageChunk
    | schema.AgentThoughtChunk
    | schema.ToolCallStart
    | schema.ToolCallProgress
    | schema.AgentPlanUpdate
    | schema.UsageUpdate
)
"""What is sent for one of our updates."""


def session_update(update: Update, root: Path) -> SessionUpdate:
    """Write an update for a session in `root`."""
    match update:
        case Said():
            content = _text(update.text)
            if update.who == "person":
                return schema.UserMessageChunk(session_update="user_message_chunk", content=content)
            if update.who == "agent":
                return schema.AgentMessageChunk(session_update="agent_message_chunk", content=content)
            return schema.AgentThoughtChunk(session_update="agent_thought_chunk", content=content)
        case CallShown():
            return _call(update, root)
        case PlanShown():
            return schema.AgentPlanUpdate(session_update="plan", entries=[_entry(e) for e in update.entries])
        case UsageShown():
            cost = None if update.cost_usd is None else schema.Cost(amount=update.cost_usd, currency="USD")
            return schema.UsageUpdate(
                session_update="usage_update", used=update.tokens, size=update.window, cost=cost
            )


def _text(text: str) -> schema.TextContentBlock:
    # Some clients print to a terminal.
    return schema.TextContentBlock(type="text", text=printable(text))


def _entry(entry: PlanEntry) -> schema.PlanEntry:
    status, remark = _PLAN.get(entry.status, ("pending", ""))
    return schema.PlanEntry(content=printable(entry.content) + remark, priority="medium", status=status)


def _call(call: CallShown, root: Path) -> schema.ToolCallStart | schema.ToolCallProgress:
    arguments = _arguments(call.arguments)
    content: list[Any] = [*_diffs(call, root), *(_shown(call.text) if call.text else ())]
    if not call.is_new:
        return schema.ToolCallProgress(
            session_update="tool_call_update",
            tool_call_id=call.call_id,
            status=_STATUSES[call.status],
            content=content or None,
        )
    return schema.ToolCallStart(
        session_update="tool_call",
        tool_call_id=call.call_id,
        title=title(call.name, arguments),
        kind=_KINDS.get(call.name, "other"),
        status=_STATUSES[call.status],
        locations=_locations(call.name, arguments, root),
        raw_input=arguments,
        content=content or None,
    )


def _arguments(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text or "{}")
    except ValueError:
        return {"arguments": text}
    return data if isinstance(data, dict) else {"arguments": data}


def title(name: str, arguments: Mapping[str, Any]) -> str:
    """Name a call for a person: the tool, and what it is about. A command is whole."""
    if name == "run_command" and isinstance(arguments.get("command"), str):
        return printable(arguments["command"])
    about = next((arguments[key] for key in _ABOUT if key in arguments), "")
    if "target" in arguments:
        about = f"{about} → {arguments['target']}"
    plain = name.replace("_", " ").capitalize()
    return printable(short(f"{plain} {about}".strip(), _MAX_TITLE))


def _locations(name: str, arguments: Mapping[str, Any], root: Path) -> list[schema.ToolCallLocation]:
    """Return the files that a call is about, for an editor that follows the agent."""
    line = arguments.get("start_line") if name == "read_file" else None
    found = []
    for key in ("path", "target"):
        given = arguments.get(key)
        place = _inside(root, given) if isinstance(given, str) else None
        if place is not None:
            found.append(schema.ToolCallLocation(path=place, line=line if isinstance(line, int) else None))
    return found


def _inside(root: Path, path: str) -> str | None:
    whole = os.path.normpath(root / path)
    return whole if Path(whole).is_relative_to(root) and "\0" not in whole else None


def _diffs(call: CallShown, root: Path) -> list[schema.FileEditToolCallContent]:
    return [
        schema.FileEditToolCallContent(
            type="diff",
            path=str(root / each.path),
            new_text=each.after,
            old_text=each.before,
        )
        for each in call.hunks
    ]


def _shown(text: str) -> list[schema.ContentToolCallContent]:
    return [schema.ContentToolCallContent(type="content", content=_text(fenced(text)))]


def fenced(text: str, language: str = "") -> str:
    """Write text as a block of code that nothing in it can end."""
    longest = max((len(each) for each in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


# --- permission --------------------------------------------------------------------------------------

ALLOW, ALWAYS, REJECT = "allow", "always", "reject"


def permission_options(rule: str) -> list[schema.PermissionOption]:
    """Return what a person can answer; `rule` is what "always" would write, empty if none can be written."""
    options = [schema.PermissionOption(option_id=ALLOW, name="Allow once", kind="allow_once")]
    if rule:
        name = f"Always allow {printable(short(rule))}"
        options.append(schema.PermissionOption(option_id=ALWAYS, name=name, kind="allow_always"))
    return [*options, schema.PermissionOption(option_id=REJECT, name="Reject", kind="reject_once")]


FIELDS = "fields"
"""The id of the answer that the fields of a server's form come as the next message."""

OPTION = "option-"
"""How the id of an answer to a model's question begins; its number follows."""


def is_in_words(held: ToolHeld) -> bool:
    """Say whether a call asks for words, with its question and answers to choose from as its arguments."""
    return held.is_question and not held.is_of_server


def question_of(held: ToolHeld) -> str:
    """Return what a call asks the person, in words."""
    asked = _arguments(held.arguments).get("question")
    return asked if is_in_words(held) and isinstance(asked, str) else held.reason


def options_of(held: ToolHeld) -> list[str]:
    """Return the answers that a question names."""
    named = _arguments(held.arguments).get("options") if is_in_words(held) else None
    return [each for each in named if isinstance(each, str)] if isinstance(named, list) else []


def answer_options(held: ToolHeld) -> list[schema.PermissionOption]:
    """Return what a person can choose where a model or a server asks; nothing for another call."""
    if held.is_of_server:
        yes = (
            schema.PermissionOption(option_id=FIELDS, name="Answer with the next message", kind="allow_once")
            if held.wants_fields
            else schema.PermissionOption(option_id=ALLOW, name="Accept: I have done it", kind="allow_once")
        )
        return [yes, schema.PermissionOption(option_id=REJECT, name="Decline", kind="reject_once")]
    options = [
        schema.PermissionOption(option_id=f"{OPTION}{n}", name=printable(short(each)), kind="allow_once")
        for n, each in enumerate(options_of(held))
    ]
    if not options:
        return []
    return [*options, schema.PermissionOption(option_id=REJECT, name="Do not answer", kind="reject_once")]


def permission_call(held: ToolHeld, preview: CallShown, root: Path) -> schema.ToolCallUpdate:
    """Show the call that waits, with all that it would do."""
    arguments = _arguments(held.arguments)
    content: list[Any] = list(_diffs(preview, root))
    if held.is_of_server or held.is_question:
        content = list(_shown(question_of(held)))
    elif not content:
        whole = arguments.get("command")
        shown = whole if isinstance(whole, str) else json.dumps(arguments, ensure_ascii=False, indent=2)
        content = list(_shown(shown))
    return schema.ToolCallUpdate(
        tool_call_id=preview.call_id,
        title=title(held.tool_name, arguments),
        kind=_KINDS.get(held.tool_name, "other"),
        status="pending",
        content=content,
        locations=_locations(held.tool_name, arguments, root),
        raw_input=arguments,
    )


# --- the session -------------------------------------------------------------------------------------

MODES = (
    schema.SessionMode(id="ask", name="Ask", description="Ask before each call with effects."),
    schema.SessionMode(id="auto", name="Auto", description="Run each call without asking."),
    schema.SessionMode(id="read-only", name="Read only", description="Refuse each call with effects."),
)
"""How tools with effects are run."""

COMMANDS = (
    schema.AvailableCommand(name="resume", description="Resume the last turn where it stopped."),
    schema.AvailableCommand(name="diff", description="Show what this run has changed in the files."),
    schema.AvailableCommand(name="undo", description="Undo everything that this run did to the files."),
    schema.AvailableCommand(name="redo", description="Take the last undo back."),
    schema.AvailableCommand(name="usage", description="Show what this run has used."),
)
"""The commands that are answered without the model."""


def modes(current: str) -> schema.SessionModeState:
    """Return the modes and the one that holds."""
    return schema.SessionModeState(current_mode_id=current, available_modes=list(MODES))


def config_options(mode: str, model: str, models: Sequence[str]) -> list[Any]:
    """Return what a person can choose for a session: its mode and its model."""
    return [
        schema.SessionConfigOptionSelect(
            type="select",
            id="mode",
            name="Permissions",
            category="mode",
            current_value=mode,
            options=[
                schema.SessionConfigSelectOption(value=each.id, name=each.name, description=each.description)
                for each in MODES
            ],
        ),
        schema.SessionConfigOptionSelect(
            type="select",
            id="model",
            name="Model",
            category="model",
            current_value=model,
            options=[schema.SessionConfigSelectOption(value=each, name=each) for each in models],
        ),
    ]


def answer(ending: Ending, used: Usage) -> schema.PromptResponse:
    """Answer a prompt with its turn's ending. Raises `RequestError` for one that has no stop reason."""
    if ending.stop_reason is None:
        raise RequestError(ending.error_code, ending.sentence, ending.to_data())
    return schema.PromptResponse(
        stop_reason=ending.stop_reason,
        usage=schema.Usage(
            total_tokens=used.input_tokens + used.output_tokens,
            input_tokens=used.input_tokens,
            output_tokens=used.output_tokens,
            cached_read_tokens=used.cached_tokens,
        ),
        field_meta={META: ending.to_data()},
    )
