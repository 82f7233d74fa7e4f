"""`treenail worker`: works on submitted runs."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import click

from treenail.agent import RunOptions
from treenail.engine import SharedCeilings, Worker, WorkerAgent
from treenail.errors import UsageError
from treenail.presenters.cli import agents, models
from treenail.presenters.cli.engines import dispatcher_for, engine_options, opened_shared
from treenail.presenters.cli.options import directory_option, flags_of, options_but
from treenail.presenters.cli.setup import RunSetup
from treenail.telemetry import JsonFormatter
from treenail.tools import ProcessTable

_MONEY = click.FloatRange(min=0, min_open=True)


class WorkerSetup(RunSetup):
    """What the runs of one agent have in common on this worker."""

    def process_table(self) -> ProcessTable | None:
        """Return None: a background process cannot follow a run to another worker."""
        return None

    def agent_here(self) -> WorkerAgent:
        """Return the agent, and what each of its runs is given."""

        def options() -> RunOptions:
            return RunOptions(
                provider=models.provider_for(self.settings, os.environ),
                permissions=self.permissions(),
                sandbox=self.sandbox,
            )

        return WorkerAgent(self.agent, options, self.limits())


@click.command
@click.option(
    "--agent",
    "specs",
    multiple=True,
    metavar="[NAME=]SPEC",
    help="An agent to work as: path.py:name, a .toml or .yaml file, or coding; may be repeated.",
)
@click.option("--queue", "queues", multiple=True, default=("default",), help="A queue; may be repeated.")
@click.option(
    "--concurrency", type=click.IntRange(1, 256), default=4, show_default=True, help="Runs at once."
)
@click.option(
    "--lease",
    "lease_s",
    type=click.FloatRange(1, 3600),
    default=10.0,
    show_default=True,
    help="After how many seconds of silence another worker takes over.",
)
@click.option(
    "--drain",
    "drain_s",
    type=click.FloatRange(0, 86_400),
    default=30.0,
    show_default=True,
    help="How many seconds runs get to end after SIGTERM; then they are handed on.",
)
@click.option(
    "--checkouts",
    type=click.Path(path_type=Path),
    help="Where this machine keeps its copies of workspaces; else in your state directory.",
)
@click.option("--day-cost", type=_MONEY, help="The most that all runs may cost in a day, in USD.")
@click.option(
    "--tenant-day-cost", type=_MONEY, help="The most that a tenant's runs may cost in a day, in USD."
)
@click.option(
    "--tenant-cost",
    "tenants",
    multiple=True,
    metavar="TENANT=USD",
    help="Another one for a tenant; repeatable.",
)
@engine_options
@options_but("agent")
@directory_option
def worker(
    specs: tuple[str, ...],
    queues: tuple[str, ...],
    concurrency: int,
    lease_s: float,
    drain_s: float,
    checkouts: Path | None,
    day_cost: float | None,
    tenant_day_cost: float | None,
    tenants: tuple[str, ...],
    engine: str,
    directory: Path | None,
    **options: Any,
) -> int:
    """Work on submitted runs, until it is told to stop.

    It writes one line of JSON for each thing that happens. SIGTERM and Ctrl-C let the runs at work end, for
    as long as --drain says, and hand the others on; the same signal once more hands them on at once. The
    ceilings of the options hold for each run, and a submission may only lower them.

    Example: treenail worker --store postgresql://worker@db/agents --agent agents.py:fixer --concurrency 8
    """
    flags = flags_of(options)
    ceilings = SharedCeilings(day_cost, tenant_day_cost, dict(_money(each) for each in tenants))
    known = _agents(specs, flags, directory or Path.cwd())
    setup = next(iter(known.values()))
    with opened_shared(setup.store, max_connections=concurrency + 6) as log:
        made = Worker(
            log,
            dispatcher_for(engine, log),
            {name: each.agent_here() for name, each in known.items()},
            queues=queues,
            concurrency=concurrency,
            lease_s=lease_s,
            drain_s=drain_s,
            ceilings=ceilings,
            checkouts=checkouts,
        )
        _write_lines()
        _stop_on_signals(made)
        made.serve()
    return 0


def _agents(
    specs: tuple[str, ...], flags: Mapping[str, object | None], directory: Path
) -> Mapping[str, WorkerSetup]:
    """Return the agents of a worker by the names that submissions use."""
    found: dict[str, WorkerSetup] = {}
    for spec in specs or (agents.CODING,):
        name, equals, place = spec.rpartition("=")
        chosen = None if place == agents.CODING else place
        setup = WorkerSetup({**flags, "agent": chosen}, directory=directory)
        known_as = name if equals else setup.agent.name
        if known_as in found:
            raise UsageError(
                f"two agents are named {known_as!r}; give one another name: --agent NAME={place}"
            )
        found[known_as] = setup
    return found


def _money(given: str) -> tuple[str, float]:
    name, equals, amount = given.rpartition("=")
    try:
        return name, float(amount) if name and equals else float("nan")
    except ValueError:
        raise UsageError(f"--tenant-cost must be TENANT=USD, such as acme=5, not {given!r}") from None


def _write_lines() -> None:
    """Write what happens to the output, a line of JSON each."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger("treenail")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False


def _stop_on_signals(made: Worker) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        # In a thread of its own: a handler may have interrupted whoever holds a lock that stopping needs.
        threading.Thread(target=made.stop, name="treenail-stop").start()

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, stop)
