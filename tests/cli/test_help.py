"""Every command can be learnt from the command line itself."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

import treenail
from treenail.presenters.cli.main import LazyGroup, app

GROUPS = {"hold", "config", "workflow"}
PROMISED = {
    *("demo", "run", "resume", "chat", "list", "show", "diff", "rollback", "fork", "replay", "diagnose"),
    *("hold list", "hold answer", "export", "erase", "prune", "doctor", "config show", "version", "salvage"),
}


def commands() -> dict[str, tuple[str, click.Command]]:
    """Every command by what one types, with the line that the table has for it."""
    context = click.Context(app)
    found: dict[str, tuple[str, click.Command]] = {}
    for name in app.list_commands(context):
        each = app.get_command(context, name)
        assert each is not None
        if isinstance(each, LazyGroup):
            for inner in each.list_commands(context):
                made = each.get_command(context, inner)
                assert made is not None
                found[f"{name} {inner}"] = (each.table[inner][1], made)
        else:
            found[name] = (app.table[name][1] if name in app.table else str(each.help), each)
    return found


def test_every_promised_command_is_there() -> None:
    assert commands().keys() >= PROMISED


@pytest.mark.parametrize("name", sorted(commands()))
def test_the_table_has_the_first_sentence_of_a_commands_help(name: str) -> None:
    """The list of commands is printed without importing them, so the table repeats it."""
    listed, command = commands()[name]
    assert (command.help or "").partition("\n")[0] == listed


@pytest.mark.parametrize("name", sorted(commands()))
def test_a_command_has_help_with_an_example_and_speaks_json(name: str) -> None:
    said = CliRunner().invoke(app, [*name.split(), "--help"])
    assert said.exit_code == 0
    if name != "version":
        assert f"Example: treenail {name}" in " ".join(said.output.split())
    if name not in ("demo", "acp", "mcp serve", "worker"):  # These speak JSON already.
        assert "--json" in said.output


def test_the_list_of_commands_fits_a_narrow_terminal() -> None:
    """Nothing is cut off: each command says what it does in one short sentence."""
    assert "..." not in CliRunner().invoke(app, ["--help"]).output.split("Commands:")[1]


def test_the_version_is_said_in_two_ways() -> None:
    assert CliRunner().invoke(app, ["--version"]).output.strip() == treenail.__version__
    assert CliRunner().invoke(app, ["version"]).output.strip() == treenail.__version__
