"""The command that talks with a person, or reads lines for a program: chat."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from treenail.conversation import ImagePart
from treenail.errors import UsageError
from treenail.presenters.cli import stores
from treenail.presenters.cli.attachments import all_images
from treenail.presenters.cli.chat import Chat, ChatRun
from treenail.presenters.cli.console import GuardedConsole
from treenail.presenters.cli.options import (
    agent_options,
    directory_option,
    flags_of,
    image_option,
    json_option,
    take_over_option,
)
from treenail.presenters.cli.run import TerminalRun, newest_here


@click.command
@click.option("--run", help="Continue this run: an id, the beginning of it, or @last.")
@click.option("--continue", "-c", "follows", is_flag=True, help="Continue the newest run in this directory.")
@image_option
@agent_options
@directory_option
@take_over_option
@json_option
def chat(
    run: str | None,
    follows: bool,
    images: tuple[str, ...],
    directory: Path | None,
    take_over: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Talk with an agent, several turns in one run.

    At a terminal, /help shows commands and keys. With --json, or without a terminal, each line of the input
    is a turn, and an empty line or the end of the input ends the chat.

    Example: treenail chat --ask
    """
    flags = flags_of(options)
    if run is not None and follows:
        raise UsageError("use only one of --run and --continue")
    wanted = newest_here(flags, directory) if follows else run
    pictures = all_images(images)
    given: dict[str, Any] = {"directory": directory, "run": wanted, "is_chat": True, "take_over": take_over}
    is_person = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
    if is_person and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown"):
        return _talk(flags, given, pictures)
    setup = TerminalRun(flags, as_json=as_json, **given)
    code = 0
    while (line := sys.stdin.readline()).strip():
        code = setup.turn(line.strip(), pictures)
        pictures = ()
    return code


def _talk(flags: dict[str, object | None], given: dict[str, Any], images: Sequence[ImagePart]) -> int:
    """Talk with a person at a terminal."""
    setup = ChatRun(flags, **given)
    talk = Chat(setup, flags=flags, images=images)
    code = talk.talk()
    if talk.run.run_id is not None:
        again = f"treenail chat --run {str(talk.run.run_id)[:8]}{stores.flag_for(talk.run.store)}"
        said = f"continue with: {again}"
        GuardedConsole(stderr=True).print(said, style="dim", markup=False, highlight=False, soft_wrap=True)
    return code
