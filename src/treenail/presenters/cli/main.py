"""`treenail`: the table of commands. The module of a command is imported when that command runs."""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence

import click

import treenail
from treenail.errors import LeaseHeldError, LogDamagedError, TreenailError, UsageError
from treenail.presenters.cli.output import guarded


class LazyGroup(click.Group):
    """A group that knows a command by its place (`module:function`) and one line of help until it runs."""

    def __init__(self, name: str | None = None, *, table: Mapping[str, tuple[str, str]], help: str) -> None:
        super().__init__(name, help=help, no_args_is_help=True)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in the order of the table."""
        return [*self.table, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command."""
        if cmd_name not in self.table:
            return super().get_command(ctx, cmd_name)
        module, _, function = self.table[cmd_name][0].partition(":")
        if module in ("run", "chat_command"):
            _show_life()
        found: click.Command = getattr(importlib.import_module(f"{__package__}.{module}"), function)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table, without importing them."""
        rows = [(name, text) for name, (_, text) in self.table.items()]
        rows += [(name, each.help or "") for name, each in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


app = LazyGroup(
    help="Run agents that can be trusted: failed tools leave no trace, killed runs resume, budgets hold.",
    table={
        "run": ("run:run", "Run an agent in this directory."),
        "resume": ("run:resume", "Resume a run that has stopped."),
        "chat": ("chat_command:chat", "Talk with an agent, several turns in one run."),
        "submit": ("submit:submit", "Have workers run an agent on a task."),
        "status": ("submit:status", "Show how submitted runs stand."),
        "cancel": ("submit:cancel", "Cancel a submitted run, wherever it is."),
        "list": ("run_list:list_runs", "List the runs of this project, oldest first."),
        "show": ("timeline:show", "Show what happened in a run, with its children."),
        "view": ("viewing:view", "Look at runs in the browser, live."),
        "diff": ("files:diff", "Show what a run changed in the files, as a diff."),
        "rollback": ("files:rollback", "Restore files and state to before a tool call."),
        "undo": ("files:undo", "Undo everything that a run did to the files, or that its newest turn did."),
        "redo": ("files:redo", "Take the last undo or rollback of a run back."),
        "recover": ("recover:recover", "Bring back a file that an undo took away."),
        "fork": ("files:fork", "Try another way from a tool call, in a new workspace."),
        "fetch": ("files:fetch", "Get the files of a run that workers worked on."),
        "replay": ("logs:replay", "Show what the model would be sent next."),
        "diagnose": ("logs:diagnose", "Check a run's log and say what can be done."),
        "attend": ("logs:attend", "Mark a run's problem as fixed by hand."),
        "export": ("logs:export", "Write every event of a run as a line of JSON."),
        "prune": ("logs:prune", "Delete the oldest events of a run."),
        "erase": ("logs:erase", "Delete a run for good. Your files stay as they are."),
        "salvage": ("logs:salvage", "Copy the readable part of a damaged store."),
        "permissions": ("config:permissions", "Show the rules about calls, and change what you allow."),
        "acp": ("editors:acp", "Work in an editor, by the Agent Client Protocol."),
        "worker": ("worker:worker", "Work on submitted runs, until it is told to stop."),
        "migrate": ("submit:migrate", "Prepare a database for runs and for workers."),
        "doctor": ("doctor:doctor", "Check that everything a run needs is here."),
        "demo": ("demo:demo", "See what happens when things go wrong. Offline."),
    },
)
app.context_settings = {"help_option_names": ["-h", "--help"]}
app.epilog = "Try it without any model: treenail demo"
app = click.version_option(treenail.__version__, message="%(version)s", help="Print the version.")(app)
app.add_command(
    LazyGroup(
        "hold",
        help="Calls that wait for a person.",
        table={
            "list": ("holds:list_waiting", "List the calls of a run that wait for a person."),
            "answer": ("holds:answer", "Answer a call that waits for a person."),
        },
    )
)
app.add_command(
    LazyGroup(
        "config",
        help="The settings and where they come from.",
        table={
            "show": ("config:show", "Show every setting, its value, and its source."),
            "approve": ("config:approve", "Let the project's settings file take effect as it is now."),
        },
    )
)
app.add_command(
    LazyGroup(
        "prices",
        help="The prices of models.",
        table={
            "show": ("prices:show", "Show the date of the price table, and the price of a model."),
            "fetch": ("prices:fetch", "Fetch a newer price table."),
        },
    )
)
app.add_command(
    LazyGroup(
        "mcp",
        help="Tools by the Model Context Protocol.",
        table={
            "list": ("mcp_servers:list_servers", "List the servers whose tools agents use here."),
            "test": ("mcp_servers:test", "Start a server, log in if it asks for it, and show its tools."),
            "add": ("mcp_servers:add", "Add a server to your settings."),
            "serve": ("mcp_serve:serve", "Serve the runs of this directory as tools for other programs."),
        },
    )
)
app.add_command(
    LazyGroup(
        "workflow",
        help="Steps with dependencies, each done by an agent.",
        table={
            "run": ("workflow:run", "Run a workflow in this directory."),
            "status": ("workflow:status", "Show the state of a workflow and of its steps."),
            "resume": ("workflow:resume", "Resume a workflow. Finished steps stay."),
        },
    )
)


@app.command("version")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def version(as_json: bool) -> None:
    """Print the version."""
    print(f'{{"version": "{treenail.__version__}"}}' if as_json else treenail.__version__)


@functools.cache
def _show_life() -> None:
    """Print a line at a terminal, once, before the slow part: importing agents, judges and a vendor's SDK."""
    if sys.stderr.isatty() and not {"--json", "--help", "-h"} & set(sys.argv):
        click.echo(f"treenail {treenail.__version__}", err=True)


def _sentence(error: TreenailError) -> str:
    """Say an error to a person at a command line: in commands, not in calls."""
    if isinstance(error, LeaseHeldError):
        return f"{error.holder} is writing this run; wait until it ends, or end it with --take-over"
    if isinstance(error, LogDamagedError):
        damage = str(error).partition("; nothing was")[0].partition(", and nothing was")[0]
        return (
            f"{damage}; nothing was changed or deleted; see what is readable with `treenail diagnose --store "
            "FILE`, copy it with `treenail salvage NEW --store FILE`"
        )
    return str(error)


_OWN_FLAGS = ("-h", "--help", "--version")


def _with_command(given: Sequence[str]) -> list[str]:
    """Return what was typed with the command that it means: a task alone is `run`, nothing at all is `chat`.

    The name of a command is always that command. One word that is not is more likely a slip than a task.
    Raises `UsageError`, which suggests what was meant.
    """
    words = list(given)
    if "_TREENAIL_COMPLETE" in os.environ:
        return words
    known = app.list_commands(click.Context(app))
    if not words:
        return ["chat"] if sys.stdin.isatty() and sys.stdout.isatty() else words
    first = words[0]
    if first in known or first in _OWN_FLAGS:
        return words
    if first.startswith("-"):
        # Flags of a run without a command: with a task among them it is `run`, without one a chat.
        found = app.get_command(click.Context(app), "run")
        assert found is not None
        said, _, _ = found.make_parser(click.Context(found)).parse_args(list(words))
        return ["run" if isinstance(said.get("task"), str) else "chat", *words]
    if len(first.split()) > 1:
        return ["run", *words]
    near = difflib.get_close_matches(first, known, n=1)
    task = " ".join(words if not any(each.startswith("-") for each in words) else words[:1])
    as_task = f"to run it as a task: treenail run {shlex.quote(task)}"
    hint = (
        f"did you mean `treenail {near[0]}`? Else, {as_task}"
        if near
        else f"`treenail --help` lists them; {as_task}"
    )
    raise UsageError(f"there is no command {first!r}; {hint}")


def main() -> None:
    """Run the command line. An error that we raise on purpose is one sentence, not a traceback."""
    with guarded():
        code = _main()
    raise SystemExit(code or 0)


def _main() -> int:
    code: int | str | None = 0
    try:
        code = app.main(_with_command(sys.argv[1:]), prog_name="treenail", standalone_mode=False)
    except TreenailError as error:
        print(f"treenail: {_sentence(error)}", file=sys.stderr)
        code = 2 if isinstance(error, UsageError) else 1
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except BrokenPipeError:
        # The reader of the output is gone. Python would complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else error
        print(f"treenail: the operating system refused: {what}; fix that, and try again", file=sys.stderr)
        code = 1
    return int(code or 0)
