"""One session of an editor: prompts, questions, cancellation, and what the editor is shown."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol, TypeVar

import anyio
import anyio.to_thread
from acp import RequestError, schema

from treenail.containment import CancellationToken
from treenail.conversation import ImagePart
from treenail.errors import LeaseHeldError, TreenailError, UsageError
from treenail.history import Usage, counted, diff_run, redo_run, undo_run
from treenail.presenters.acp import wire
from treenail.presenters.acp.runs import EditorRuns
from treenail.presenters.acp.stops import AUTH_REQUIRED, Ending
from treenail.presenters.acp.updates import (
    CallShown,
    LiveUpdates,
    PlanShown,
    RunReader,
    Said,
    Update,
    call_ids,
    ending_of,
    history_updates,
    hunks_of,
    note,
)
from treenail.tools import Approval, PermissionMode, PermissionRequest, ToolHeld
from treenail.turns import (
    Lagged,
    LiveEvent,
    LiveFeed,
    ToolCallBegan,
    ToolCallFinished,
    ToolCallOutput,
    TurnState,
)

_logger = logging.getLogger("treenail.acp")

_CAPACITY = 100_000
"""How many events wait for an editor that is slow to read."""

_OUTPUT_S = 0.1
"""How long what a command writes is gathered before it is shown."""

_THREADS = 10_000
"""How many turns may be under way at once; each has a thread."""

T = TypeVar("T")


class Editor(Protocol):
    """The editor's side of the connection."""

    async def session_update(self, session_id: str, update: Any) -> None:
        """Show something."""
        ...

    async def request_permission(self, session_id: str, tool_call: Any, options: Any) -> Any:
        """Ask the person."""
        ...


class EditorSession:
    """One session. A turn runs on a thread; everything else here runs in the connection's event loop."""

    def __init__(self, session_id: str, runs: EditorRuns, editor: Editor) -> None:
        self.session_id = session_id
        self.runs = runs
        self._editor = editor
        self._loop = asyncio.get_running_loop()
        runs.asks = self._asked_now
        self._limiter = anyio.CapacityLimiter(_THREADS)
        self._reader: RunReader | None = None
        self._shown: set[str] = set()
        self._token: CancellationToken | None = None
        """Cancels what is under way."""
        self._prompting: CancellationToken | None = None
        """Cancels the prompt that is worked on, from its first moment on."""
        self._cancelled = asyncio.Event()
        self._resting = asyncio.Event()
        self._resting.set()
        self._background: asyncio.Task[None] | None = None
        self._is_asking = False
        self._form = ""
        """The hold whose form the person wants to fill in with the next message."""
        self._is_closing = False
        """Whether the editor leaves: a question stays open then."""

    # .. what the editor asks for ..

    async def prompt(self, text: str, images: Sequence[ImagePart]) -> schema.PromptResponse:
        """Work on a prompt, and return when the turn has ended. Raises `RequestError`."""
        if self._is_closing:
            raise RequestError(-32600, "this session is being closed; load it again")
        if self._prompting is not None:
            raise RequestError(-32600, _UNDER_WAY)
        self._prompting = CancellationToken()  # Before anything is waited for: a cancellation may come next.
        self._resting.clear()
        try:
            return await self._worked_on(text, images)
        finally:
            self._prompting = None
            self._resting.set()

    async def _worked_on(self, text: str, images: Sequence[ImagePart]) -> schema.PromptResponse:
        await self._end_background()
        if await self._answered_in_words(text):
            return await self._prompted(None)
        if await self._is_asked_for_fields():
            # It is neither a form nor a word to the model: the question is asked again, with its "Decline".
            await self._show(Said("agent", f"\n\n*[Treenail: {_NO_FIELDS}]*\n\n"))
            return await self._prompted(None, is_held=True)
        command, _, rest = text.partition(" ")
        if command in _COMMANDS and not rest.strip():
            return await self._command(command)
        return await self._prompted(text, images)

    async def _prompted(
        self, task: str | None, images: Sequence[ImagePart] = (), *, is_held: bool = False
    ) -> schema.PromptResponse:
        await self._end_background()
        if self._token is not None:
            raise RequestError(-32600, _UNDER_WAY)
        ending = await self._to_its_end(task, images, is_held=is_held)
        if ending.state is TurnState.HELD and any(
            map(self._wants_words, await self._beside(self.runs.holds))
        ):
            ending = replace(ending, details="type the answer to the question as your next message")
        return wire.answer(ending, await self._beside(self._usage))

    def cancel(
        self, reason: str = "cancelled", detail: str = "the person cancelled it in the editor"
    ) -> None:
        """Stop what is under way: a turn, or a question about a call."""
        for each in (self._token, self._prompting):
            if each is not None:
                each.cancel(reason, detail=detail)
                self._cancelled.set()

    async def stop(self, reason: str, detail: str) -> None:
        """Stop what is under way, and wait for its ending. A call that waits for a person still waits."""
        self._is_closing = True
        self.cancel(reason, detail)
        await self._resting.wait()

    async def choose_mode(self, mode: PermissionMode) -> None:
        """Run tools with effects in this mode from the next call on. The log has it when the turn ends."""
        self.runs.mode, self.runs.is_mode_chosen = mode, True
        if self._resting.is_set():
            await self._beside(self.runs.keep_mode)

    async def load(self) -> None:
        """Show the whole history."""
        reader = self._read()
        view = await self._beside(reader.read)
        updates = await self._beside(lambda: list(history_updates(view, reader.hunks)))
        for each in updates:
            if isinstance(each, CallShown):
                self._shown.add(each.call_id)
            await self._show(each)
        plan = await self._beside(reader.plan)
        if plan:
            await self._show(PlanShown(plan))

    async def greet(self) -> None:
        """Tell what can be typed; ask again about calls that still wait for a person, and resume then."""
        commands = schema.AvailableCommandsUpdate(
            session_update="available_commands_update", available_commands=list(wire.COMMANDS)
        )
        await self._editor.session_update(self.session_id, commands)
        if (await self._ending()).state is TurnState.HELD:
            self._background = asyncio.create_task(self._ask_again())

    async def _ask_again(self) -> None:
        """Ask about the calls that wait, and resume the run. There is no request to answer: it is shown."""
        with suppress(ConnectionError):
            try:
                ending = await self._to_its_end(None, (), is_held=True)
            except RequestError as error:
                await self._show(Said("agent", f"\n\n*[Treenail: {error}]*\n\n"))
            else:
                if ending.state not in (TurnState.COMPLETED, TurnState.HELD):
                    await self._show(Said("agent", note(ending)))

    async def _end_background(self) -> None:
        """A new prompt withdraws the questions of an earlier turn; one that runs already is waited for."""
        if self._background is not None:
            if self._is_asking:
                self._cancelled.set()
            await self._background
            self._background = None

    # .. a turn ..

    async def _to_its_end(
        self, task: str | None, images: Sequence[ImagePart], *, is_held: bool = False
    ) -> Ending:
        """Run a turn, with a question for each call that waits, until it is over."""
        self._token = token = self._prompting or CancellationToken()
        if self._is_closing:
            token.cancel("cancelled", detail="the editor left")
        if not token.is_cancelled:
            self._cancelled.clear()
        self._resting.clear()
        try:
            ending = await self._ending() if is_held else await self._run(task, images, token)
            while ending.state is TurnState.HELD and not token.is_cancelled:
                if not await self._ask(token):
                    break
                ending = await self._run(None, (), token)
            if ending.state is TurnState.HELD and token.is_cancelled and not self._is_closing:
                # The person stopped the turn at its question: that is its ending, and the log has it.
                ending = await self._run(None, (), token)
            return ending
        finally:
            self._token = None
            if self._prompting is None:
                self._resting.set()

    async def _run(self, task: str | None, images: Sequence[ImagePart], token: CancellationToken) -> Ending:
        """Run or resume a turn on a thread, and show what happens meanwhile."""
        feed = LiveFeed()
        subscription = feed.subscribe(capacity=_CAPACITY)
        live = LiveUpdates(self._read(), self._shown)

        async def show() -> None:
            async for first in subscription:
                seen: LiveEvent | Lagged | None = first
                if isinstance(seen, ToolCallOutput):
                    # A command that writes much is shown as few updates.
                    await anyio.sleep(_OUTPUT_S)
                    newest: dict[str, Update] = {}
                    while isinstance(seen, ToolCallOutput):
                        for each in live.take(seen):
                            newest[seen.call_id] = each
                        seen = subscription.get_nowait()
                    for each in newest.values():
                        await self._show(each)
                if seen is not None:
                    await self._show_event(live, seen)

        showing = asyncio.create_task(show())
        try:
            await self._beside(partial(self.runs.turn, task, images, feed.publish, token))
        finally:
            feed.close()
            try:
                await showing
                for each in await self._beside(live.left_open):
                    await self._show(each)
            except ConnectionError:
                pass  # The editor is gone; the turn is being stopped.
            except RequestError as error:
                _logger.warning("the editor was not shown all of a turn: %s", error)
        return await self._ending()

    async def _show_event(self, live: LiveUpdates, seen: LiveEvent | Lagged) -> None:
        # Only what happens to calls is read from the log, which takes a thread.
        is_call = isinstance(seen, ToolCallBegan | ToolCallFinished)
        for each in await self._beside(partial(live.take, seen)) if is_call else live.take(seen):
            await self._show(await self._with_conflicts(each))

    async def _with_conflicts(self, update: Update) -> Update:
        """Say of a call that it changed files whose unsaved changes the editor still has."""
        if not isinstance(update, CallShown) or not update.hunks:
            return update
        paths = await self._beside(partial(self.runs.conflicts, update.hunks))
        if not paths:
            return update
        told = (
            f"Conflict: {', '.join(paths)} has unsaved changes in your editor, and this call has changed the "
            "file on disk. Compare them before you save."
        )
        return replace(update, text=f"{told}\n{update.text or ''}".rstrip())

    async def _ending(self) -> Ending:
        view = await self._beside(self._read().read)
        return ending_of(view.turns[-1]) if view.turns else Ending(TurnState.UNFINISHED)

    # .. questions ..

    async def _answered_in_words(self, text: str) -> bool:
        """Take a prompt for the answer to a question, if that is what the turn waits for.

        A server's form takes nothing but fields: other words are never a yes to it.
        """
        if self._token is not None or text in _COMMANDS or (await self._ending()).state is not TurnState.HELD:
            return False
        open_questions = [each for each in await self._beside(self.runs.holds) if self._wants_words(each)]
        if not open_questions or (open_questions[0].wants_fields and not _is_object(text)):
            return False
        self._form = ""
        await self._beside(partial(self.runs.answer, open_questions[0], approved=True, words=text))
        return True

    async def _is_asked_for_fields(self) -> bool:
        form, self._form = self._form, ""
        return bool(form) and any(each.hold_id == form for each in await self._beside(self.runs.holds))

    def _wants_words(self, held: ToolHeld) -> bool:
        """Say whether the next message answers a call: a model's question, or a form that was chosen."""
        return wire.is_in_words(held) or held.hold_id == self._form

    async def _ask(self, token: CancellationToken) -> bool:
        """Ask about each call that waits, and record the answers. False if one was not answered."""
        for held in await self._beside(self.runs.holds):
            chosen = await self._answer_to(held, token)
            if chosen is None:
                return False
            if all(each.hold_id != held.hold_id for each in await self._beside(self.runs.holds)):
                raise RequestError(-32603, _ELSEWHERE, {"state": "busy", "kind": "answered_elsewhere"})
            if chosen == wire.FIELDS:
                self._form = held.hold_id
                told = f"{held.reason}\n\n{_TYPE_FIELDS}"
                await self._show(Said("agent", f"\n\n{told}\n\n"))
                return False
            if held.is_question and chosen.startswith(wire.OPTION):
                words = wire.options_of(held)[int(chosen.removeprefix(wire.OPTION))]
                await self._beside(partial(self.runs.answer, held, approved=True, words=words))
                continue
            await self._beside(partial(self.runs.answer, held, approved=chosen in (wire.ALLOW, wire.ALWAYS)))
            if chosen == wire.ALWAYS:
                try:
                    await self._beside(partial(self.runs.allow_always, held))
                except RequestError as error:
                    await self._show(Said("agent", f"\n\n*[Treenail: the rule is not kept: {error}]*\n\n"))
        return True

    def _asked_now(self, request: PermissionRequest) -> Approval | None:
        """Ask what a server wants to know while its call waits. It belongs on the turn's thread."""
        return asyncio.run_coroutine_threadsafe(self._choose(request), self._loop).result()

    async def _choose(self, request: PermissionRequest) -> Approval | None:
        """Let the person choose an answer; None if there are none to choose from."""
        now = datetime.now(UTC)
        asks = ToolHeld(request.call_id, request.tool_name, request.arguments, "", now, is_question=True)
        options = wire.options_of(asks)
        if not options or self._token is None:
            return None
        chosen = await self._answer_to(asks, self._token)
        if chosen is None or not chosen.startswith(wire.OPTION):
            return None if chosen is None else Approval(approved=False)
        return Approval(approved=True, note=options[int(chosen.removeprefix(wire.OPTION))])

    async def _answer_to(self, held: ToolHeld, token: CancellationToken) -> str | None:
        """Ask about one call. None if the person or the editor does not answer: then it still waits."""
        if wire.is_in_words(held) and not wire.options_of(held):
            await self._show(Said("agent", f"\n\n{wire.question_of(held)}\n\n"))
            return None
        view = await self._beside(self._read().read)
        calls = [
            each for each in view.turns[-1].items if each.kind == "tool" and each.call_id == held.call_id
        ]
        name = call_ids(view)[id(calls[-1])] if calls else held.call_id
        preview = self.runs.previews.pop(held.call_id, None)
        hunks = () if preview is None else tuple(hunks_of(preview.text))
        shown = CallShown(name, held.tool_name, held.arguments, "pending", hunks=hunks)
        call = wire.permission_call(held, shown, self.runs.root)
        options = wire.answer_options(held) or wire.permission_options(
            await self._beside(partial(self.runs.rule_for, held))
        )
        asked = asyncio.create_task(self._editor.request_permission(self.session_id, call, options))
        stopped = asyncio.create_task(self._cancelled.wait())
        self._is_asking = True
        try:
            await asyncio.wait((asked, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                return None
            outcome = asked.result().outcome
        except RequestError as error:
            _logger.warning("the editor could not ask about %s: %s", held.tool_name, error)
            return None
        except ConnectionError:
            return None
        finally:
            self._is_asking = False
            for each in (asked, stopped):
                each.cancel()
        if isinstance(outcome, schema.AllowedOutcome):
            return outcome.option_id
        token.cancel("cancelled", detail="the person closed the question in the editor")
        return None

    # .. commands ..

    async def _command(self, command: str) -> schema.PromptResponse:
        """Answer a command without the model."""
        view = await self._beside(self._read().read)
        if not view.turns:
            raise RequestError(-32600, f"{command}: nothing has happened in this session yet")
        if command == "/resume":
            if view.state is TurnState.COMPLETED:
                raise RequestError(-32600, "the last turn is completed; there is nothing to resume")
            return await self._prompted(None)
        await self._end_background()
        if self._token is not None:
            raise RequestError(-32600, _UNDER_WAY)
        text = await self._beside(partial(_COMMANDS[command], self))
        await self._show(Said("agent", text))
        return schema.PromptResponse(stop_reason="end_turn")

    def _diff(self) -> str:
        text = diff_run(self.runs.store, self.runs.run_id).diff.text
        return wire.fenced(text, "diff") if text else "This run has changed no files."

    def _undo(self) -> str:
        undone = undo_run(self.runs.store, self.runs.run_id, by="editor")
        calls = ", ".join(each.tool_name for each in undone.undone)
        return f"Undone: {calls or 'nothing'}. `/redo` takes this back."

    def _redo(self) -> str:
        redone = redo_run(self.runs.store, self.runs.run_id, by="editor")
        return f"These calls stand again: {', '.join(each.tool_name for each in redone.redone) or 'none'}."

    def _used(self) -> str:
        used = self._read().read().usage
        cost = "an unknown amount" if used.cost_usd is None else f"${used.cost_usd:.4f}"
        tokens = f"{used.input_tokens} tokens in, {used.output_tokens} out"
        return f"{counted(used.model_calls, 'model call')}, {tokens}, {cost}."

    # .. parts ..

    def _read(self) -> RunReader:
        if self._reader is None:
            self._reader = self.runs.reader()
        return self._reader

    def _usage(self) -> Usage:
        return self._read().read().turns[-1].usage

    async def _show(self, update: Update) -> None:
        await self._editor.session_update(self.session_id, wire.session_update(update, self.runs.root))

    async def _beside(self, work: Callable[[], T]) -> T:
        return await beside(work, self._limiter)


_COMMANDS: dict[str, Any] = {
    "/resume": None,
    "/diff": EditorSession._diff,
    "/undo": EditorSession._undo,
    "/redo": EditorSession._redo,
    "/usage": EditorSession._used,
}


_UNDER_WAY = "a turn is under way in this session; cancel it, or wait for its end"
_ELSEWHERE = "this question was answered elsewhere; load the session again to see what happened since"
_TYPE_FIELDS = 'Type the fields as one JSON object, such as `{"name": "value"}`, as your next message.'
_NO_FIELDS = "that is not a JSON object, so the server was told nothing"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


async def beside(work: Callable[[], T], limiter: anyio.CapacityLimiter | None = None) -> T:
    """Run a function on a worker thread. What it raises becomes an error that an editor can show."""
    try:
        return await anyio.to_thread.run_sync(work, limiter=limiter)
    except TreenailError as error:
        raise request_error(error) from error
    except OSError as error:
        raise RequestError(-32603, f"the operating system refused: {error}") from error


def request_error(error: TreenailError) -> RequestError:
    """Return an error as an editor shows it."""
    if isinstance(error, LeaseHeldError):
        end = "wait until it ends, or end it with `treenail resume --take-over`"
        said = f"{error.holder} is writing this run; {end}"
        return RequestError(-32603, said, {"state": "busy", "kind": "lease_held"})
    if isinstance(error, UsageError):
        # A missing key is what an editor shows its sign-in for.
        code = AUTH_REQUIRED if "API_KEY" in str(error) else -32602
        return RequestError(code, str(error))
    return RequestError(-32603, str(error), {"kind": type(error).__name__})
