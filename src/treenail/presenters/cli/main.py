"""`treenail`: the commands. Heavy parts are imported by the command that needs them."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from treenail.errors import LeaseHeldError, LogDamagedError, TreenailError, UsageError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Run agents that can be trusted: failed tools leave no trace, killed runs go on, budgets hold.",
    epilog="Try it without any model: treenail demo",
    context_settings={"help_option_names": ["-h", "--help"]},
)
hold_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Calls that wait for a person.")
config_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="The settings and where they come from."
)
workflow_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Steps with dependencies, each done by an agent."
)
app.add_typer(hold_app, name="hold")
app.add_typer(config_app, name="config")
app.add_typer(workflow_app, name="workflow")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(importlib.import_module("treenail").__version__)
        raise typer.Exit


@app.callback()
def every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take what stands before a command."""


# .. what several commands take ..


def _known_runs(incomplete: str) -> list[str]:
    """Complete the id of a run in a shell."""
    try:
        infos = _part("stored").known(_store(None))
    except (TreenailError, OSError):
        return []
    return [each for each in ("@last", *infos) if each.startswith(incomplete)]


RunId = Annotated[
    str,
    typer.Argument(help="The run: its id, the beginning of it, or @last.", autocompletion=_known_runs),
]
Store = Annotated[str | None, typer.Option("--store", help="The file that holds the runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Model = Annotated[
    str | None, typer.Option(help="NAME or PROVIDER/NAME: openai, anthropic, litellm, claude-agent.")
]
BaseUrl = Annotated[str | None, typer.Option(help="A server that speaks OpenAI's interface.")]
Api = Annotated[str | None, typer.Option(help="responses or chat.")]
AgentFile = Annotated[str | None, typer.Option("--agent", help="path.py:name, or a .toml or .yaml file.")]
Ask = Annotated[bool, typer.Option("--ask", help="Ask before each call with effects.")]
Auto = Annotated[bool, typer.Option("--auto", help="Run every call unasked (the default).")]
ReadOnly = Annotated[bool, typer.Option("--read-only", help="Refuse every call with effects.")]
MaxCost = Annotated[float | None, typer.Option(help="What the run may cost at most, in USD.")]
MaxSteps = Annotated[int | None, typer.Option(help="How many model and tool calls it may make.")]
MaxRetries = Annotated[int | None, typer.Option(help="How many failed calls are tried again.")]
Timeout = Annotated[float | None, typer.Option(help="How long it may take, in seconds.")]
Check = Annotated[str | None, typer.Option(help="A command that must exit 0 before the agent may stop.")]
Judge = Annotated[
    bool | None, typer.Option("--judge", help="Let a model look at the work before it may end.")
]
UnknownPrice = Annotated[
    str | None,
    typer.Option(help="What a model without a known price does under --max-cost: halt, warn or estimate."),
]
Directory = Annotated[
    Path | None, typer.Option("--directory", "-C", help="The directory to work in, instead of this one.")
]


def _part(name: str) -> Any:
    """Load the part of the command line that a command needs, and no other: `--help` stays quick."""
    gc.disable()
    part = importlib.import_module(f"treenail.presenters.cli.{name}")
    gc.freeze()  # It stays to the end, so nobody needs to look for garbage in it.
    gc.enable()
    return part


def _store(given: str | None) -> Path:
    """Return the store that a command looks into. Raises `UsageError` if it is not there."""
    places, settings = _part("places"), _part("settings")

    directory = Path.cwd()
    said = settings.load({"store": given}, os.environ, directory).text("store")
    store: Path = places.existing(places.store_for(directory, said, os.environ))
    return store


def _one(given: str | None, run: str) -> tuple[Path, Any]:
    stored = _part("stored")

    store = _store(given)
    return store, stored.find(store, run)


def _mode(ask: bool, auto: bool, read_only: bool) -> str | None:
    chosen = [name for name, on in (("ask", ask), ("auto", auto), ("read_only", read_only)) if on]
    if len(chosen) > 1:
        raise UsageError("say one of --ask, --auto and --read-only")
    return chosen[0] if chosen else None


# .. running ..


@app.command()
def demo(
    fast: Annotated[bool, typer.Option("--fast", help="Do not pause between the scenes.")] = False,
    keep: Annotated[Path | None, typer.Option(help="A directory to work in, kept afterwards.")] = None,
    work_in: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """See what happens when things go wrong. Offline; nothing in it is faked.

    Example: treenail demo --keep /tmp/demo
    """
    show = _part("demo")

    if work_in is not None:
        show.work(work_in)
        return
    raise typer.Exit(show.demo(keep, fast=fast))


@app.command()
def run(
    task: Annotated[str, typer.Argument(help="What is to be done; - reads it from the input.")],
    model: Model = None,
    base_url: BaseUrl = None,
    api: Api = None,
    agent: AgentFile = None,
    ask: Ask = False,
    auto: Auto = False,
    read_only: ReadOnly = False,
    max_cost: MaxCost = None,
    max_steps: MaxSteps = None,
    max_retries: MaxRetries = None,
    timeout: Timeout = None,
    check: Check = None,
    judge: Judge = None,
    unknown_price: UnknownPrice = None,
    directory: Directory = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Run an agent in this directory.

    Exits 0 for a clean answer, 1 if it failed, 3 with partial work, 4 if a call waits for a person, 5 if time
    ran out, 6 if a ceiling stopped it, 130 if it was interrupted.

    Example: treenail run "make the failing test pass" --check "pytest -q" --max-cost 0.50
    """
    running = _part("running")

    flags = _flags(locals(), _mode(ask, auto, read_only))
    raise typer.Exit(running.run(flags, task, directory=directory, as_json=as_json))


@app.command()
def resume(
    run: RunId = "@last",
    model: Model = None,
    base_url: BaseUrl = None,
    api: Api = None,
    agent: AgentFile = None,
    ask: Ask = False,
    auto: Auto = False,
    read_only: ReadOnly = False,
    max_cost: MaxCost = None,
    max_steps: MaxSteps = None,
    max_retries: MaxRetries = None,
    timeout: Timeout = None,
    check: Check = None,
    judge: Judge = None,
    unknown_price: UnknownPrice = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Go on with a run that has stopped.

    After a crash, an interrupt, a limit or an answered question. It keeps the model, the agent and the
    ceilings that it had, unless they are given anew.

    Example: treenail resume @last --max-cost 1.00
    """
    running = _part("running")

    flags = _flags(locals(), _mode(ask, auto, read_only))
    raise typer.Exit(running.resume(flags, run, as_json=as_json))


@app.command()
def chat(
    run: Annotated[str | None, typer.Option("--run", help="Go on with this run: an id or @last.")] = None,
    model: Model = None,
    base_url: BaseUrl = None,
    api: Api = None,
    agent: AgentFile = None,
    ask: Ask = False,
    auto: Auto = False,
    read_only: ReadOnly = False,
    max_cost: MaxCost = None,
    max_steps: MaxSteps = None,
    max_retries: MaxRetries = None,
    timeout: Timeout = None,
    unknown_price: UnknownPrice = None,
    directory: Directory = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Talk with an agent, several turns in one run.

    Each line is a turn. With --json, or without a terminal, the lines are read from the input.

    Example: treenail chat --ask
    """
    running = _part("running")

    flags = _flags(locals(), _mode(ask, auto, read_only))
    raise typer.Exit(running.chat(flags, run, directory=directory, as_json=as_json))


def _flags(given: dict[str, Any], mode: str | None) -> dict[str, object | None]:
    return {**{name: given.get(name) for name in _part("settings").BY_NAME}, "permissions": mode}


# .. workflows ..

StepIds = list[str] | None


@workflow_app.command(name="run")
def workflow_run(
    spec: Annotated[Path, typer.Argument(help="The workflow: a YAML or JSON file.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would run when.")] = False,
    model: Model = None,
    base_url: BaseUrl = None,
    api: Api = None,
    agent: AgentFile = None,
    ask: Ask = False,
    auto: Auto = False,
    read_only: ReadOnly = False,
    max_cost: MaxCost = None,
    max_steps: MaxSteps = None,
    max_retries: MaxRetries = None,
    timeout: Timeout = None,
    unknown_price: UnknownPrice = None,
    directory: Directory = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Run a workflow in this directory.

    Exits 0 if every required step is ready, 1 if it failed, 3 with partial work, 4 if somebody must decide,
    5 if time ran out, 130 if it was interrupted.

    Example: treenail workflow run release.yaml --dry-run
    """
    workflow = _part("workflow")

    flags = _flags(locals(), _mode(ask, auto, read_only))
    raise typer.Exit(workflow.run(flags, spec, directory=directory, is_dry=dry_run, as_json=as_json))


@workflow_app.command(name="status")
def workflow_status(run: RunId = "@last", store: Store = None, as_json: AsJson = False) -> None:
    """Say how a workflow and each of its steps stand; exits as its run did.

    Example: treenail workflow status @last
    """
    workflow = _part("workflow")

    raise typer.Exit(workflow.status(*_one(store, run), as_json=as_json))


@workflow_app.command(name="resume")
def workflow_resume(
    run: RunId = "@last",
    rerun: Annotated[
        StepIds, typer.Option(help="A step to run again, with what depends on it; or: failed.")
    ] = None,
    ready: Annotated[
        StepIds, typer.Option(help="A step that counts as ready, with what it has changed.")
    ] = None,
    failed: Annotated[StepIds, typer.Option(help="A step that counts as failed.")] = None,
    note: Annotated[str, typer.Option(help="Why, for those who build on the step.")] = "",
    apply: Annotated[
        bool | None,
        typer.Option(
            "--apply/--no-apply", help="Whether a ready step's changes are applied; not over a conflict."
        ),
    ] = None,
    model: Model = None,
    base_url: BaseUrl = None,
    api: Api = None,
    agent: AgentFile = None,
    ask: Ask = False,
    auto: Auto = False,
    read_only: ReadOnly = False,
    max_cost: MaxCost = None,
    max_steps: MaxSteps = None,
    max_retries: MaxRetries = None,
    timeout: Timeout = None,
    unknown_price: UnknownPrice = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Go on with a workflow: after a crash, an answer, or to run steps again. Finished steps stay.

    Example: treenail workflow resume @last --rerun failed
    """
    workflow = _part("workflow")

    flags = _flags(locals(), _mode(ask, auto, read_only))
    code = workflow.resume(
        flags,
        run,
        rerun=rerun or (),
        ready=ready or (),
        failed=failed or (),
        note=note,
        with_changes=apply,
        as_json=as_json,
    )
    raise typer.Exit(code)


# .. looking ..


@app.command(name="list")
def list_runs(
    store: Store = None,
    as_json: AsJson = False,
    everything: Annotated[bool, typer.Option("--all", help="Child sessions as well.")] = False,
) -> None:
    """List the runs of this project, oldest first. Exits 1 if one of them is damaged.

    Example: treenail list --json
    """
    looking = _part("looking")

    raise typer.Exit(looking.list_runs(_store(store), as_json=as_json, everything=everything))


@app.command()
def show(run: RunId = "@last", store: Store = None, as_json: AsJson = False) -> None:
    """Show what happened in a run, event by event, with its children.

    Of a damaged run it shows what can be read; it exits 1 then.

    Example: treenail show 3f2a
    """
    looking = _part("looking")

    raise typer.Exit(looking.show(*_one(store, run), as_json=as_json))


@app.command()
def diff(
    run: RunId = "@last",
    call: Annotated[str | None, typer.Option(help="One call, or the first of several.")] = None,
    upto: Annotated[str | None, typer.Option(help="The last of several calls.")] = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run changed in the files, as a diff.

    Example: treenail diff @last --call call_3_1
    """
    looking = _part("looking")

    looking.diff(*_one(store, run), first=call, last=upto, as_json=as_json)


@app.command()
def replay(
    run: RunId = "@last",
    at: Annotated[int | None, typer.Option(help="After this event instead of now.")] = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Show what the model would see next.

    And what was left out, and why.

    Example: treenail replay @last --at 12
    """
    looking = _part("looking")

    looking.replay(*_one(store, run), at=at, as_json=as_json)


@app.command()
def diagnose(run: RunId = "@last", store: Store = None, as_json: AsJson = False) -> None:
    """Check a run's log and say what can be done.

    Is it whole, how did it end, what comes next. Exits 1 if something blocks the run.

    Example: treenail diagnose @last
    """
    checking = _part("checking")

    place = _store(store)
    try:
        run_id = _part("stored").find(place, run)
    except LogDamagedError:
        run_id = None  # Whatever is still there is looked at.
    raise typer.Exit(checking.diagnose(place, run_id, as_json=as_json))


@app.command()
def export(
    run: RunId = "@last",
    out: Annotated[Path | None, typer.Option(help="The file to write, instead of the output.")] = None,
    store: Store = None,
    as_json: Annotated[bool, typer.Option("--json", help="It is always JSON.")] = False,
) -> None:
    """Write every event of a run as a line of JSON.

    Example: treenail export @last --out run.jsonl
    """
    looking = _part("looking")

    place, run_id = _one(store, run)
    looking.export(place, run_id, out)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say whether everything is here that a run needs.

    Example: treenail doctor
    """
    examining = _part("doctor")

    raise typer.Exit(examining.doctor(Path.cwd(), as_json=as_json))


@config_app.command(name="show")
def config_show(as_json: AsJson = False) -> None:
    """Show every setting, its value, and where the value came from.

    Example: treenail config show
    """
    _part("looking").show_config(Path.cwd(), os.environ, as_json=as_json)


# .. changing ..


@app.command()
def rollback(
    run: RunId = "@last",
    call: Annotated[
        str | None, typer.Option(help="The call to undo, with all after it; the newest one.")
    ] = None,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Put files and state back to where they were before a tool call.

    Example: treenail rollback @last --call call_2_1
    """
    changing = _part("changing")

    changing.rollback(*_one(store, run), call=call, as_json=as_json)


@app.command()
def fork(
    into: Annotated[Path, typer.Argument(help="A new directory for the fork's workspace.")],
    run: Annotated[
        str, typer.Option("--run", help="The run: its id, the beginning of it, or @last.")
    ] = "@last",
    call: Annotated[str | None, typer.Option(help="The call to fork at; the newest one.")] = None,
    after: Annotated[bool, typer.Option("--after", help="From after the call instead of before it.")] = False,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Try another way from a tool call on, in a workspace of its own.

    Example: treenail fork ../try-2 --call call_2_1
    """
    changing = _part("changing")

    place, run_id = _one(store, run)
    changing.fork(place, run_id, call=call, after=after, into=into, as_json=as_json)


@hold_app.command(name="list")
def hold_list(run: RunId = "@last", store: Store = None, as_json: AsJson = False) -> None:
    """List the calls of a run that wait for a person.

    Example: treenail hold list @last
    """
    changing = _part("changing")

    changing.list_holds(*_one(store, run), as_json=as_json)


@hold_app.command(name="answer")
def hold_answer(
    run: RunId = "@last",
    call: Annotated[str | None, typer.Option(help="Which call, if several wait.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="The call may run.")] = False,
    no: Annotated[bool, typer.Option("--no", help="The call is refused.")] = False,
    note: Annotated[str, typer.Option(help="What the model is told with a refusal.")] = "",
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Answer a call that waits; `treenail resume` then goes on.

    Example: treenail hold answer @last --no --note "not in this file"
    """
    changing = _part("changing")

    if yes == no:
        raise UsageError("say --yes or --no")
    changing.answer(*_one(store, run), call=call, approved=yes, note=note, as_json=as_json)


@app.command()
def erase(
    run: RunId,
    sure: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    abandon: Annotated[
        bool, typer.Option("--abandon", help="Leave what a call that was cut off has changed.")
    ] = False,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Forget a run for good. Your files stay as they are.

    Its log goes, everything below it, and the file contents that were kept for it. If a crash cut off
    one of its calls, resume or roll back the run first, or say --abandon.

    Example: treenail erase 3f2a --yes
    """
    changing = _part("changing")

    place, run_id = _one(store, run)
    if not sure:
        if not sys.stdin.isatty():
            raise UsageError("erasing cannot be undone; say --yes")
        typer.confirm(f"Forget run {str(run_id)[:8]} for good?", abort=True)
    changing.erase(place, run_id, abandon=abandon, as_json=as_json)


@app.command()
def prune(
    run: RunId,
    keep_last: Annotated[int, typer.Option(help="How many of the newest events stay.")] = 1000,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Forget the oldest events of a run. What it spent is not forgotten.

    Example: treenail prune 3f2a --keep-last 200
    """
    changing = _part("changing")

    changing.prune(*_one(store, run), keep_last=keep_last, as_json=as_json)


@app.command()
def attend(
    run: RunId,
    note: Annotated[str, typer.Option(help="What was done about it.")],
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Say that you have put right what a run needed a person for.

    Example: treenail attend 3f2a --note "restored data.txt by hand"
    """
    changing = _part("changing")

    changing.attend(*_one(store, run), note=note, as_json=as_json)


@app.command()
def salvage(
    into: Annotated[Path, typer.Argument(help="A new file for what is whole.")],
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Copy what is whole in a damaged store into a new one.

    The damaged file stays as it is.

    Example: treenail salvage whole.db --store runs.db
    """
    changing = _part("changing")

    changing.salvage(_store(store), into, as_json=as_json)


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the version."""
    said = importlib.import_module("treenail").__version__
    print(f'{{"version": "{said}"}}' if as_json else said)


def _sentence(error: TreenailError) -> str:
    """Say an error to somebody at a command line: in commands, not in calls."""
    if isinstance(error, LeaseHeldError):
        # The owner's name: who, which machine, which process namespace, which process ...
        parts = (error.owner or "").split("/")
        who = f"process {parts[3]}" if len(parts) > 4 and parts[0] == "treenail" else error.owner
        return f"this run is being written by {who}; wait until it ends, or stop it with Ctrl-C where it runs"
    if isinstance(error, LogDamagedError):
        return (
            f"{_part('stored').in_words(str(error))}; nothing was changed or deleted; see what "
            "is whole with `treenail diagnose --store FILE`, copy it with `treenail salvage NEW --store FILE`"
        )
    return str(error)


def main() -> None:
    """Run the command line; an error that we raise on purpose is one sentence, not a traceback."""
    gc.disable()  # Until a part is loaded: what a short command does most is to load things, which all stay.
    try:
        app()
    except TreenailError as error:
        print(f"treenail: {_sentence(error)}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from None
    except BrokenPipeError:
        # Whoever read the output has gone. Python would complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else error
        print(f"treenail: the system refused something: {what}; mend that, and try again", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        gc.enable()
