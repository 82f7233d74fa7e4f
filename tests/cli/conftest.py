"""The command line, run in the process of the test."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from treenail.presenters.cli.main import main


class Said:
    """What a command said, and how it exited."""

    def __init__(self, code: object, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def data(self) -> object:
        return json.loads(self.out)


Command = Callable[..., Said]


@pytest.fixture
def treenail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Run the command line in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def run(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["treenail", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return Said(ended.value.code or 0, *capsys.readouterr())

    return run
