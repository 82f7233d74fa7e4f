"""What a run of an agent needs, from the settings: its store, agent, provider, sandbox and ceilings.

Every presenter that runs agents makes a `RunSetup`; nothing here writes to a screen.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from treenail.agent import AnyAgent, Run, RunOptions
from treenail.containment import CancellationToken, Limits, OnUnknownPrice
from treenail.conversation import ImagePart
from treenail.errors import UsageError
from treenail.history import find_run, opened_log
from treenail.judges import CommandChecker, LLMCompletionVerifier, NestedExecutionConfig
from treenail.mcp import McpServer
from treenail.presenters.cli import agents, models, settings, stores
from treenail.presenters.cli.model_options import MODEL_SETTINGS
from treenail.presenters.cli.servers import servers_of
from treenail.presenters.cli.settings import Settings
from treenail.providers import Provider
from treenail.sandbox import Grants, Mode, Sandbox, probe
from treenail.state import Session
from treenail.tools import Approver, PermissionMode, Permissions, ProcessTable, chosen_mode
from treenail.turns import Inbox, Watch, ceilings_of, model_settings_of

_REMEMBERED = tuple(each.name for each in settings.SETTINGS if each.name != "store")
"""The settings that a resume keeps unless it is given others: also the ceilings, or they would not hold."""

_TAG = "cli."


class RunSetup:
    """What a run of an agent needs: settings, store, agent, provider, sandbox."""

    keeps_processes = False
    """Whether background processes outlive a turn, until the program ends: there will be more turns."""

    def __init__(
        self,
        flags: Mapping[str, object | None],
        *,
        directory: Path | None = None,
        run: str | None = None,
        take_over: bool = False,
    ) -> None:
        self.take_over = take_over
        self.directory = (directory or Path.cwd()).resolve()
        if not self.directory.is_dir():
            raise UsageError(f"{self.directory} is not a directory; name the agent's working directory")
        said = settings.load(flags, os.environ, self.directory)
        self.store = stores.store_for(self.directory, said.text("store"), os.environ)
        self.run_id: UUID | None = None
        self.workspace: Path | None = self.directory
        """The directory to work in; None for that of the run, which remembers it."""
        remembered: dict[str, str] = {}
        self._before: Limits | None = None
        self._model_before: dict[str, str] | None = None
        """How the run named its model so far; None for a new run."""
        if run is not None:
            self.run_id, self.workspace = find_run(stores.existing(self.store), run), None
            remembered = self._remembered(self.run_id)
            self._model_before = {name: remembered[name] for name in MODEL_SETTINGS if name in remembered}
            remembered = self._forget_server(flags, remembered)
        else:
            stores.ready(self.store)
        known = settings.load(flags, os.environ, self.directory, remembered)
        if known.waiting:
            self._ask_to_approve(known)
            known = settings.load(flags, os.environ, self.directory, remembered)
        spec = known.text("agent")
        self.processes = self.process_table()
        """The processes that run beside the agent. They end with the run."""
        self.agent = _agent_for(known, self.directory, asks=self._may_ask(known), processes=self.processes)
        ceilings = {} if spec is None else agents.limits_of(spec, self.directory)
        self.settings = settings.load(flags, os.environ, self.directory, remembered, ceilings)
        self.provider: Provider = models.provider_for(self.settings, os.environ, asks=True)
        self.sandbox = self._sandbox()
        self.rules = self.settings.rules_for(self.directory)

    def permissions(self, approver: Approver | None = None) -> Permissions:
        """Return what the agent may do: the mode and the rules of the settings, and who is asked."""
        mode = PermissionMode(str(self.settings["permissions"]))
        return Permissions(mode, approver=approver, rules=self.rules)

    def rule_for(self, tool: str, arguments: str) -> str:
        """Return the rule that "always" would keep; empty if there is none, or no place to keep it."""
        return self.rules.rule_for(tool, arguments) if settings.can_remember(self.directory) else ""

    def allow_always(self, rule: str) -> None:
        """Allow what a rule says: now, and in later runs in this project. Raises `UsageError`."""
        settings.remember(rule, self.directory)
        self.rules.add(rule)

    def asks(self, question: str) -> bool | None:
        """Ask the person whether something may be; None if nobody can be asked."""
        return None

    def process_table(self) -> ProcessTable | None:
        """Return where the agent's background processes are kept; None if it may not have any."""
        return ProcessTable()

    def is_attended(self) -> bool:
        """Whether somebody is there who can answer a question at once."""
        return False

    def _may_ask(self, known: Settings) -> bool:
        """Say whether the agent may ask questions: where they are answered, now or later."""
        if known["questions"] == "auto":
            return self.is_attended() or known["permissions"] == "ask"
        return known["questions"] == "on"

    def _ask_to_approve(self, known: Settings) -> None:
        """Ask whether what a project's file widens may take effect. Raises `UsageError` if not."""
        if self.asks(f"{known.file} wants to set {known.wanted}. Approve this file as it is?"):
            settings.approve(known, os.environ)
        else:
            known.check_approved()

    def _sandbox(self) -> Sandbox:
        """Return how commands are confined. Where they cannot be, a person may allow to do without."""
        mode = cast(Mode, self.settings["sandbox"])
        found = None if mode == "off" else probe()
        if found is not None and mode == "require" and found.level != "bubblewrap":
            raise UsageError(f"{found.text}; {found.advice}" if found.advice else found.text)
        if found is None or found.confines:
            pass
        # Without a terminal the first command is refused: an agent may not need any.
        elif self.asks(f"Commands would be {found.text}. Run them all the same?"):
            mode = "off"
            chosen = {**self.settings.chosen, "sandbox": settings.Chosen("off", "your answer")}
            self.settings = replace(self.settings, chosen=chosen)
        network = bool(self.settings["allow_network"])
        live = tuple(map(str, self.settings.paths("background_write")))
        return Sandbox(mode, Grants(network, self.settings.paths("allow_write"), live))

    def _remembered(self, run_id: UUID) -> dict[str, str]:
        with opened_log(self.store) as log, Session.open(log, run_id, read_only=True) as session:
            tags = dict(log.info(run_id).tags)
            self._before = ceilings_of(session)
            switched = model_settings_of(session)
            mode = chosen_mode(session)
        given = {name: tags[_TAG + name] for name in _REMEMBERED if tags.get(_TAG + name)}
        if mode is not None:
            given["permissions"] = mode.value
        if switched is not None:
            given = {name: value for name, value in given.items() if name not in MODEL_SETTINGS} | {
                **switched
            }
        return given | _ceilings_since(self._before, given)

    def _forget_server(
        self, flags: Mapping[str, object | None], remembered: dict[str, str]
    ) -> dict[str, str]:
        """Drop what belongs to the provider that a run had, if a flag names a model of another one."""
        named = flags.get("model")
        if not isinstance(named, str) or models.same_provider(named, remembered):
            return remembered
        return {
            name: value
            for name, value in remembered.items()
            if name in ("max_output", "model") or name not in MODEL_SETTINGS
        }

    def model_settings(self) -> dict[str, str]:
        """Return the settings that say which model answers, and how."""
        return {
            name.removeprefix(_TAG): value
            for name, value in self.tags().items()
            if name.removeprefix(_TAG) in MODEL_SETTINGS
        }

    def tags(self) -> dict[str, str]:
        """Return the settings that a resume needs."""
        kept = {
            name: self.settings[name]
            for name in _REMEMBERED
            if self.settings.chosen[name].source != settings.DEFAULT
        }
        agent = kept.get("agent")
        if isinstance(agent, str):
            path, colon, name = agent.partition(":")
            kept["agent"] = str((self.directory / Path(path).expanduser()).resolve()) + colon + name
        # A resume offers the same tools, whoever is there then.
        kept["questions"] = "on" if self._may_ask(self.settings) else "off"
        if kept.get("allow_write"):
            kept["allow_write"] = os.pathsep.join(map(str, self.sandbox.grants.write))
        model = kept.get("model")
        if isinstance(model, str) and model.startswith("scripted:"):
            kept["model"] = "scripted:" + str(Path(model.removeprefix("scripted:")).resolve())
        return {_TAG + name: str(value) for name, value in kept.items() if value not in (None, False)}

    def limits(self) -> Limits:
        """Return the run's ceilings."""
        steps, retries = self.settings.number("max_steps"), self.settings.number("max_retries")
        return Limits(
            max_cost_usd=self.settings.number("max_cost"),
            max_steps=None if steps is None else int(steps),
            max_retries=None if retries is None else int(retries),
            timeout=self.settings.number("timeout"),
            on_unknown_price=cast(OnUnknownPrice, self.settings["unknown_price"]),
            # The command line has no option for this one.
            max_depth=None if self._before is None else self._before.max_depth,
        )

    def run(
        self,
        task: str | None,
        permissions: Permissions,
        watch: Watch,
        cancellation: CancellationToken | None = None,
        new_id: UUID | None = None,
        *,
        images: Sequence[ImagePart] = (),
        inbox: Inbox | None = None,
    ) -> Run[Any]:
        """Run one turn on a task, or resume the last one. `new_id` is the id of a new run.

        Not for use inside an event loop.
        """
        options = RunOptions(
            provider=self.provider,
            limits=self.limits(),
            permissions=permissions,
            watch=watch,
            cancellation=cancellation,
            sandbox=self.sandbox,
            take_over=self.take_over,
            inbox=inbox,
        )
        now = self.model_settings()
        if self._model_before not in (None, now):
            options["model_settings"] = now
            self._model_before = now
        try:
            return self._run(task, options, new_id, images)
        finally:
            if self.processes is not None and not self.keeps_processes:
                self.processes.close()

    def _run(
        self, task: str | None, options: RunOptions, new_id: UUID | None, images: Sequence[ImagePart]
    ) -> Run[Any]:
        if task is None:
            assert self.run_id is not None
            return self.agent.resume(self.store, self.run_id, **options)
        if self.workspace is not None:
            options["workspace"] = self.workspace
        return self.agent.run(
            task,
            store=self.store,
            run_id=self.run_id,
            tags=self.tags(),
            new_id=new_id,
            images=images,
            **options,
        )


def _agent_for(chosen: Settings, directory: Path, *, asks: bool, processes: ProcessTable | None) -> AnyAgent:
    """Return the agent, with the judges that the settings add to its own.

    A judge that was asked for is a gate: if it cannot decide, the run is not complete.
    """
    spec = chosen.text("agent")
    if spec is None:
        agent = agents.coding_agent(asks=asks, processes=processes)
    else:
        agent = agents.load_agent(spec, directory)
    check = chosen.text("check")
    asked = agents.joined(
        None if check is None else CommandChecker(check), LLMCompletionVerifier() if chosen["judge"] else None
    )
    if chosen.servers:
        own = {each.name for each in agent.sources if isinstance(each, McpServer)}
        servers = [each for each in servers_of(chosen) if each.name not in own]
        agent = replace(agent, tools=[*agent.own_tools, *agent.sources, *servers])
    if chosen.text("hooks"):
        agent = replace(
            agent, hooks=(*agent.hooks, *settings.hooks_of(json.loads(chosen.text("hooks") or "")))
        )
    if asked is None:
        return agent
    nested = agent.nested or NestedExecutionConfig()
    return replace(
        agent,
        completion=agents.joined(agent.completion, asked),
        nested=replace(nested, on_completion_failure="closed"),
    )


def _ceilings_since(limits: Limits | None, given: Mapping[str, str]) -> dict[str, str]:
    """Return a run's present ceilings as settings, where they are not those of its beginning.

    `given` is what the run was started with. A default ceiling is not remembered: the environment and the
    settings file may set another.
    """
    if limits is None:
        return {}
    now = {
        "max_cost": limits.max_cost_usd,
        "max_steps": limits.max_steps,
        "max_retries": limits.max_retries,
        "timeout": limits.timeout,
        "unknown_price": limits.on_unknown_price,
    }
    return {
        name: str(value)
        for name, value in now.items()
        if value is not None and (name in given or value != settings.BY_NAME[name].default)
    }
