"""Check every extra on its own: that it resolves, and for two of them that they really work.

    python scripts/extras.py             # all of it, as CI does
    python scripts/extras.py litellm     # one extra: resolved, installed and used

Each extra is resolved without the others and without the versions that development is pinned to, as a user's
installer does. Two are installed into a new environment, in which the README's first command is run against a
server on this machine. It is run in the development environment, which has the server.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from treenail.testing.wire import WireServer

ROOT = Path(__file__).parent.parent
OURS = ("bench", "dev")
"""Extras for development; their versions are pinned, and `make test` installs them."""

USED = {
    "anthropic": ("anthropic/claude-sonnet-5-5", "anthropic_url"),
    "litellm": ("litellm/openai/gpt-6.1-terra", "openai_url"),
}
"""The extras that are installed: the model that is named, and the server's address for it."""

FIRST_COMMAND = ("run", "make the failing test pass", "--check", "true", "--max-cost", "0.50")
UV = shutil.which("uv")


def main(names: list[str]) -> None:
    """Check the extras that are named, or all."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    extras = names or [each for each in declared if each not in OURS]
    for extra in extras:
        resolve(extra)
        print(f"{extra}: resolves on its own", flush=True)
    for extra in [each for each in extras if each in USED]:
        use(extra)
        print(f"{extra}: installed, and the README's first command works", flush=True)


def resolve(extra: str) -> None:
    """Resolve an extra as a user's installer would, without installing it."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = f"{ROOT}[{extra}]"
        if UV:
            requirement = Path(folder, "wanted.in")
            requirement.write_text(f"treenail[{extra}] @ {ROOT.as_uri()}\n")
            command = [UV, "pip", "compile", "--quiet", "--no-annotate", "--python", sys.executable]
            run([*command, "--output-file", f"{folder}/found.txt", str(requirement)])
        else:
            run(
                [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", wanted]
            )


def use(extra: str) -> None:
    """Install an extra into a new environment and run the README's first command there."""
    model, address = USED[extra]
    with tempfile.TemporaryDirectory() as folder, WireServer(["The test passes."]) as server:
        python = f"{folder}/venv/bin/python"
        if UV:
            run([UV, "venv", "--quiet", "--python", sys.executable, f"{folder}/venv"])
            run([UV, "pip", "install", "--quiet", "--python", python, f"{ROOT}[{extra}]"])
        else:
            run([sys.executable, "-m", "venv", f"{folder}/venv"])
            run([python, "-m", "pip", "install", "--quiet", f"{ROOT}[{extra}]"])
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": folder,
            "ANTHROPIC_API_KEY": "k",
            "OPENAI_API_KEY": "k",
        }
        server_flags = ("--model", model, "--base-url", getattr(server, address))
        project = Path(folder, "project")
        project.mkdir()
        said = run([f"{folder}/venv/bin/treenail", *FIRST_COMMAND, *server_flags], cwd=project, env=environ)
        if "The test passes." not in said or len(server.requests) != 1:
            raise SystemExit(f"{extra}: the model was not asked once, or its answer was not shown: {said}")


def run(command: list[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a command to its end and return its output. Ends the program if it fails."""
    done = subprocess.run(command, cwd=cwd, env=env, text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
