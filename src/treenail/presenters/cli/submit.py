"""The commands for runs that workers do: submit, status, cancel, migrate."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import click

from treenail.containment import Limits
from treenail.engine import TENANT, cancel_run, submit_run
from treenail.errors import UsageError
from treenail.history import find_run, summarize
from treenail.log import HasAgenda
from treenail.presenters.cli import settings, stores
from treenail.presenters.cli.engines import (
    ABSURD,
    dispatcher_for,
    engine_options,
    opened_shared,
    queue_option,
    who,
)
from treenail.presenters.cli.options import (
    complete_run,
    json_option,
    required_run,
    run_named,
    store_named,
    store_option,
)
from treenail.presenters.cli.output import print_result
from treenail.presenters.cli.stores import flag_for
from treenail.printable import printable_line

_NUMBER = click.FloatRange(min=0, min_open=True)
_COUNT = click.IntRange(min=1)


@click.command
@click.argument("task")
@click.option(
    "--agent", default="coding", show_default=True, help="The agent, by the name that workers have."
)
@click.option("--tenant", help="Whose run it is: its money is counted with theirs.")
@click.option("--tag", "tags", multiple=True, metavar="NAME=VALUE", help="A label; may be repeated.")
@click.option(
    "--files",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="The directory whose files it begins with; without it, it begins with none.",
)
@click.option("--max-cost", type=_NUMBER, help="The most that the run may cost, in USD.")
@click.option("--max-steps", type=_COUNT, help="How many model and tool calls it may make.")
@click.option("--max-retries", type=_COUNT, help="How many failed calls it may retry.")
@click.option("--timeout", type=_NUMBER, help="How long it may take, in seconds.")
@queue_option
@engine_options
@store_option
@json_option
def submit(
    task: str,
    agent: str,
    tenant: str | None,
    tags: tuple[str, ...],
    files: Path | None,
    max_cost: float | None,
    max_steps: int | None,
    max_retries: int | None,
    timeout: float | None,
    queue: str,
    engine: str,
    store: str | None,
    as_json: bool,
) -> None:
    """Have workers run an agent on a task.

    TASK says what to do; - reads it from the input. It prints the id of the run, and returns as soon as the
    run is in the log: a worker takes it then, or later. A worker's own ceilings hold as well.

    Example: treenail submit "make the failing test pass" --agent fixer --max-cost 0.50
    """
    if task == "-":
        task = sys.stdin.read()
    limits = Limits(max_cost_usd=max_cost, max_steps=max_steps, max_retries=max_retries, timeout=timeout)
    labels = dict(_label(each) for each in tags)
    if tenant is not None:
        labels[TENANT] = tenant
    place = store_named(store)
    with opened_shared(place) as log:
        run_id = submit_run(
            log,
            dispatcher_for(engine, log),
            task,
            agent=agent,
            limits=None if limits == Limits() else limits,
            tags=labels,
            queue=queue,
            by=who(),
            files=files,
        )
    short = str(run_id)[:8]
    print_result(
        as_json,
        {"run": str(run_id), "queue": queue},
        f"{run_id}\nsee how it stands with: treenail status {short}{flag_for(place)}",
    )


def _label(given: str) -> tuple[str, str]:
    name, equals, value = given.partition("=")
    if not name.strip() or not equals:
        raise UsageError(f"--tag must be NAME=VALUE, such as team=search, not {given!r}")
    return name, value


@click.command
@click.argument("run", required=False, shell_complete=complete_run)
@store_option
@json_option
def status(run: str | None, store: str | None, as_json: bool) -> None:
    """Show how submitted runs stand.

    Without RUN, it counts the runs of each queue: those that wait for a worker, that are at work, and that
    wait for a person. RUN is a run's id, the beginning of it, or @last.

    Example: treenail status @last
    """
    place = store_named(store)
    with opened_shared(place) as log:
        assert isinstance(log, HasAgenda)
        if run is None:
            counts = log.agenda.counts()
            lines = [
                f"{each.queue}: {each.waiting} waiting, {each.running} at work, {each.parked} held"
                for each in counts
            ]
            data: Any = [
                {"queue": each.queue, "waiting": each.waiting, "running": each.running, "held": each.parked}
                for each in counts
            ]
            print_result(as_json, data, "\n".join(lines) or "no submitted run waits or is at work")
            return
        run_id = find_run(place, run)
        summary, entry = summarize(log, log.info(run_id)), log.agenda.entry(run_id)
    data = summary.to_data() | {"queue": None if entry is None else entry.queue}
    what = f"{summary.state} ({summary.reason})" if summary.reason else summary.state
    lines = [f"{run_id}  {printable_line(what)}", f"  {printable_line(summary.task)}"]
    if entry is not None:
        lines.append(f"  queue {entry.queue}")
    if summary.info.owner is not None:
        lines.append(f"  at work: {summary.info.owner}")
    print_result(as_json, data, "\n".join(lines))


@click.command
@required_run
@engine_options
@store_option
@json_option
def cancel(run: str, engine: str, store: str | None, as_json: bool) -> None:
    """Cancel a submitted run, wherever it is.

    One that waits is cancelled at once. A worker that is at work on it interrupts its turn within half of a
    lease; what its tools have finished stays. `treenail resume` has it continued.

    Example: treenail cancel 3f2a
    """
    place, run_id = run_named(store, run)
    with opened_shared(place) as log:
        is_over = cancel_run(log, dispatcher_for(engine, log), run_id, by=who())
    text = "cancelled" if is_over else "a worker is at work on it, and interrupts it in a moment"
    print_result(as_json, {"run": str(run_id), "cancelled": is_over}, f"{run_id}: {text}")


@click.command
@click.option("--queue", "queues", multiple=True, default=("default",), help="A queue; may be repeated.")
@engine_options
@store_option
@json_option
def migrate(queues: tuple[str, ...], engine: str, store: str | None, as_json: bool) -> None:
    """Prepare a database for runs and for workers.

    It makes the tables of the log, or brings them up to date, and installs the engine Absurd with its queues.
    What is there already stays as it is. It needs a role that may create schemas; workers do not.

    Example: treenail migrate --store postgresql://owner@db/agents
    """
    directory = Path.cwd()
    said = settings.load({"store": store}, os.environ, directory).text("store")
    with opened_shared(stores.store_for(directory, said, os.environ), create=True) as log:
        if engine == ABSURD:
            dispatcher_for(engine, log)  # It says which extra is missing.
            importlib.import_module("treenail.engine.absurd").install(log, queues)
    made = {"engine": engine, "queues": list(queues)}
    print_result(as_json, made, f"ready for workers: engine {engine}, queues {', '.join(queues)}")
