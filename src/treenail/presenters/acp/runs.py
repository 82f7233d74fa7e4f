"""The runs of one editor's session: a turn at a time, each on a thread of its own.

A turn has its own event loop, so that whatever blocks in it never delays the protocol: a cancellation is
heard while a tool works. Everything here is called from worker threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import UUID

from treenail.agent import workspace_of
from treenail.containment import CancellationToken
from treenail.conversation import ImagePart
from treenail.errors import LeaseHeldError
from treenail.history import Projection, answer_run, list_holds, opened_log, opened_run
from treenail.log import Store, open_log
from treenail.mcp import McpServer
from treenail.presenters.acp.buffers import Buffers, same_text, with_buffers
from treenail.presenters.acp.updates import Hunk, RunReader, before
from treenail.presenters.cli import models, settings, stores
from treenail.presenters.cli.setup import RunSetup
from treenail.state import Session
from treenail.tools import (
    Approval,
    Approver,
    PermissionMode,
    PermissionModeChosen,
    PermissionRequest,
    Permissions,
    Tool,
    ToolHeld,
    chosen_mode,
    rule_for,
)
from treenail.turns import Watch
from treenail.workspace import WorkspaceDiff

_STRICTEST_LAST = (PermissionMode.AUTO, PermissionMode.ASK, PermissionMode.READ_ONLY)


@dataclass(frozen=True, slots=True)
class ChangingPermissions(Permissions):
    """Permissions whose mode a person may change while a turn runs; `mode` is what it never goes below."""

    current: Callable[[], PermissionMode] = field(default=lambda: PermissionMode.ASK)

    def mode_for(self, tool: Tool[object, object]) -> PermissionMode:
        """Return the mode of a tool: with the mode that holds now, or a subagent's, whichever is stricter."""
        mode = max(self.mode, self.current(), key=_STRICTEST_LAST.index)
        return Permissions(mode, self.tools).mode_for(tool)


class EditorSetup(RunSetup):
    """What a run needs, where a person sits in front of an editor."""

    def is_attended(self) -> bool:
        """There is somebody who can answer."""
        return True


@dataclass(slots=True)
class EditorRuns:
    """One run of a project, as an editor's session works on it."""

    directory: Path
    run_id: UUID
    flags: dict[str, object | None]
    """What the command line and the editor have chosen."""
    servers: tuple[McpServer, ...] = ()
    """The MCP servers that the editor names."""
    buffers: Buffers | None = None
    asks: Approver = field(default=lambda request: None)
    """Asks the person at once what an MCP server wants to know in the middle of a call."""
    mode: PermissionMode = PermissionMode.ASK
    is_mode_chosen: bool = False
    """Whether the person has chosen the mode in the editor."""
    model: str = ""
    previews: dict[str, WorkspaceDiff] = field(default_factory=dict)
    """What a call that waits would change, by its id."""
    root: Path = field(init=False)
    """The directory that the run works in."""
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        self.root = self.directory

    def begin(self) -> None:
        """Make a run that nothing has happened in: an id that an editor was given can be loaded from now on.

        What is wrong with the settings is told here. Raises `UsageError`.
        """
        setup = EditorSetup(self.flags, directory=self.directory)
        self._use(setup)
        log = open_log(setup.store)
        try:
            Session(log=log, session_id=self.run_id, tags={**setup.tags(), "agent": setup.agent.name}).close()
        finally:
            log.close()

    def open(self) -> None:
        """Find the run in the project's store. Raises `UsageError`."""
        self._use(self._setup())
        with opened_run(self.store, self.run_id, must_be_whole=False) as session:
            place = Path(workspace_of(session) or self.directory)
            self.mode = chosen_mode(session) or self.mode
        # The editor's own name for the directory, which may have links in it, is what it knows files by.
        self.root = self.directory if place == self.directory.resolve() else place

    def _setup(self, **flags: object) -> RunSetup:
        return EditorSetup({**self.flags, **flags}, directory=self.directory, run=str(self.run_id))

    def _use(self, setup: RunSetup) -> None:
        self.store = setup.store
        self.mode = PermissionMode(str(setup.settings["permissions"]))
        self.model = setup.settings.text("model") or f"{setup.provider.name}/{setup.provider.model}"

    def keep_mode(self) -> None:
        """Log the mode that the person has chosen: it holds until they choose another."""
        with suppress(LeaseHeldError), opened_log(self.store) as log:
            if log.info(self.run_id).head:  # Nothing has happened yet in a run that is empty.
                with Session.open(log, self.run_id) as session:
                    if chosen_mode(session) is not self.mode:
                        session.dispatch(PermissionModeChosen(self.mode.value))

    def models(self) -> list[str]:
        """Return the models to choose from: the one that is used, and those whose keys are set."""
        vendors = {name.partition("/")[0] for key, name in models.DEFAULTS if os.environ.get(key)}
        known = [name for name in models.known_names() if name.partition("/")[0] in vendors]
        return list(dict.fromkeys([self.model, *known]))

    def choose_model(self, name: str) -> None:
        """Use another model from the next turn on. Raises `UsageError`."""
        self._setup(model=name)
        self.flags["model"] = self.model = name

    def reader(self) -> RunReader:
        """Return a reader of the run's log."""
        return RunReader(self.store, self.run_id, Projection())

    def turn(
        self,
        task: str | None,
        images: Sequence[ImagePart],
        watch: Watch,
        cancellation: CancellationToken,
    ) -> None:
        """Run one turn on a task, or resume the last one, until it ends or waits; the log has the ending."""
        setup = self._setup()
        setup.workspace = self.root
        # A server of the settings comes first: its entry may say what it is allowed.
        known = {getattr(each, "name", "") for each in setup.agent.sources}
        servers = [each for each in self.servers if each.name not in known]
        setup.agent = replace(setup.agent, tools=[*setup.agent.tools, *servers])
        if self.buffers is not None:
            setup.agent = with_buffers(setup.agent, self.buffers)
        permissions = ChangingPermissions(approver=self._asked, rules=setup.rules, current=lambda: self.mode)
        try:
            setup.run(task, permissions, watch, cancellation, images=images).close()
        finally:
            if self.is_mode_chosen:
                self.keep_mode()

    def _asked(self, request: PermissionRequest) -> bool | Approval | None:
        """Keep what a call would change, for the question about it. The call itself waits, durably."""
        if request.tool is None:
            return self.asks(request)
        found = request.preview()
        if found is not None:
            self.previews[request.call_id] = found
        return None

    def conflicts(self, hunks: Sequence[Hunk]) -> list[str]:
        """Return the files that a call has changed while the editor had unsaved changes of them."""
        if self.buffers is None:
            return []
        return [path for path in dict.fromkeys(each.path for each in hunks) if self._conflicts(path, hunks)]

    def _conflicts(self, path: str, hunks: Sequence[Hunk]) -> bool:
        assert self.buffers is not None
        try:
            now = (self.root / path).read_text("utf-8")
        except (OSError, ValueError):
            return False
        text = self.buffers(path)
        # An editor without changes of its own shows the file as it is, or still as it was.
        return text is not None and not any(same_text(text, each) for each in (now, before(now, path, hunks)))

    def holds(self) -> Sequence[ToolHeld]:
        """Return the calls that wait for a person."""
        return list_holds(self.store, self.run_id)

    def rule_for(self, held: ToolHeld) -> str:
        """Return the rule that "always" would write for a call; empty if none can be written for certain."""
        return rule_for(held.tool_name, held.arguments, self.root)

    def allow_always(self, held: ToolHeld) -> None:
        """Remember, for this user and project, that calls like this one need no question."""
        settings.remember(self.rule_for(held), self.directory)

    def answer(self, held: ToolHeld, *, approved: bool, words: str = "") -> None:
        """Record a person's answer; a resume then runs the call, or tells the model."""
        answer_run(self.store, self.run_id, held.call_id, approved=approved, note=words, by="editor")


def store_of(directory: Path, flags: Mapping[str, object | None]) -> Store:
    """Return the store of a directory's project, which may not exist yet."""
    said = settings.load(flags, os.environ, directory).text("store")
    return stores.store_for(directory, said, os.environ)
