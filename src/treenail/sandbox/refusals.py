"""What a sandbox refused a command, as far as the command's output tells.

The kernel refuses with the same errors that a missing cable or a read-only disk gives. So the texts that
programs print for these errors are searched, and the model and the person are told what they mean here.
"""

from __future__ import annotations

import re
from typing import Literal

from treenail.sandbox.policy import WITHOUT, Level, Sandbox

Refusal = Literal["network", "write", "privilege", "command"]
"""What a sandbox can refuse."""

_SIGNS: dict[Refusal, re.Pattern[str]] = {
    "network": re.compile(
        r"[Nn]etwork is unreachable|Temporary failure in name resolution|[Cc]ould not resolve"
        r"|Name or service not known|nodename nor servname|EAI_AGAIN|ENETUNREACH|ENOTFOUND"
        r"|dial (?:tcp|udp)\b|failed to lookup address|Failed to resolve|Temporary failure resolving"
    ),
    "write": re.compile(r"[Rr]ead-only file ?system|EROFS|os error 30\b"),
    "privilege": re.compile(
        r"no new privileges|must be superuser|unshare failed|(?:mount|ptrace|PTRACE\w*|setns|bpf)\b.{0,60}"
        r"(?:[Oo]peration not permitted|[Pp]ermission denied|EPERM)"
    ),
}

_DENIED = re.compile(r"[Pp]ermission denied|EACCES|os error 13\b")
"""How Landlock refuses a write."""

_FOR_THE_MODEL: dict[Refusal, str] = {
    "network": (
        "Commands have no network here, so this cannot work, whatever program is used; do not try again. If "
        "the task needs it, say so at the end: a person can allow it with --allow-network."
    ),
    "write": (
        "Commands can write to the workspace and to $TMPDIR or /tmp (emptied after each command), and "
        "nowhere else; do not try again. If the task needs another directory, say so: a person can allow it "
        "with --allow-write DIR."
    ),
    "command": "No command can run here, so do not try another one. Use the file tools.",
    "privilege": (
        "Commands cannot gain privileges, mount, trace or make namespaces here; do not try again another way."
    ),
}

FOR_THE_PERSON: dict[Refusal, str] = {
    "network": "the sandbox refused the network; allow it with --allow-network",
    "write": "the sandbox refused a write outside of the workspace; allow a directory with --allow-write DIR",
    "command": f"commands were refused, because they cannot be confined; see `treenail doctor`, or {WITHOUT}",
    "privilege": "the sandbox refused a privileged operation; no flag allows it but --sandbox off",
}
"""What a person is told about each refusal."""


def refusals(
    sandbox: Sandbox, output: str, errors: str, exit_code: int | None, level: Level = "bubblewrap"
) -> tuple[Refusal, ...]:
    """Return what a command was refused: its errors tell, and its output if it failed."""
    if sandbox.mode == "off":
        return ()
    text = errors if exit_code == 0 else f"{errors}\n{output}"
    signs = _SIGNS if level == "bubblewrap" else {**_SIGNS, "write": _DENIED}
    return tuple(
        kind
        for kind, sign in signs.items()
        if not (kind == "network" and sandbox.grants.network) and sign.search(text)
    )


def told_to_the_model(refused: tuple[Refusal, ...]) -> str:
    """Return what a model is told about refusals; empty if there is none."""
    return "".join(f"\n[sandbox] {_FOR_THE_MODEL[each]}" for each in refused)
