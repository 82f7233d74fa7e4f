"""Every command can be learnt from the command line itself."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

import treenail
from treenail.presenters.cli.main import app

GROUPS = {"hold", "config", "workflow"}
PROMISED = {
    *("demo", "run", "resume", "chat", "list", "show", "diff", "rollback", "fork", "replay", "diagnose"),
    *("hold list", "hold answer", "export", "erase", "prune", "doctor", "config show", "version", "salvage"),
}


def commands() -> dict[str, typer.core.TyperCommand]:
    """Every command by what one types."""
    found: dict[str, typer.core.TyperCommand] = {}
    for name, each in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]  # a group
        if hasattr(each, "commands"):
            found |= {f"{name} {inner}": made for inner, made in each.commands.items()}
        else:
            found[name] = each
    return found


def test_every_promised_command_is_there() -> None:
    assert commands().keys() >= PROMISED


@pytest.mark.parametrize("name", sorted(commands()))
def test_a_command_has_help_with_an_example_and_speaks_json(name: str) -> None:
    said = CliRunner().invoke(app, [*name.split(), "--help"])
    assert said.exit_code == 0
    if name != "version":
        assert f"Example: treenail {name}" in " ".join(said.output.split())
    if name != "demo":
        assert "--json" in said.output


def test_the_list_of_commands_fits_a_narrow_terminal() -> None:
    """Nothing is cut off: each command says what it does in one short sentence."""
    assert "..." not in CliRunner().invoke(app, ["--help"]).output.split("Commands:")[1]


def test_the_version_is_said_in_two_ways() -> None:
    assert CliRunner().invoke(app, ["--version"]).output.strip() == treenail.__version__
    assert CliRunner().invoke(app, ["version"]).output.strip() == treenail.__version__
