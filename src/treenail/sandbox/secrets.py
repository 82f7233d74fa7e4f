"""What a command does not see: the user's secrets, and the sockets of programs outside.

A list cannot be complete. It names where common programs keep keys, tokens, histories and browser profiles.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

_HOME = (
    ".ssh .aws .azure .gnupg .kube .docker .netrc .pgpass .my.cnf .git-credentials .npmrc .yarnrc.yml "
    ".pypirc .cargo/credentials .cargo/credentials.toml .gem/credentials .m2/settings.xml "
    ".gradle/gradle.properties .composer/auth.json .vault-token .terraform.d .terraformrc .password-store "
    ".mozilla .thunderbird .claude .claude.json .codex .gemini .Xauthority .local/share/keyrings "
    ".local/share/kwalletd .local/share/python_keyring .bash_history .zsh_history .python_history "
    ".psql_history .mysql_history .sqlite_history .node_repl_history .rediscli_history "
    ".local/share/fish/fish_history .lesshst .viminfo snap/firefox snap/chromium "
    ".var/app/org.mozilla.firefox .var/app/org.chromium.Chromium .var/app/com.google.Chrome .bitcoin "
    ".electrum .ethereum"
)
_CONFIG = (
    "gh hub glab-cli gcloud op doctl rclone git/credentials containers/auth.json composer/auth.json "
    "openai anthropic google-chrome chromium BraveSoftware microsoft-edge vivaldi opera Signal Slack "
    "discord treenail configstore netlify heroku fly pip/pip.conf"
)
_OF_ROOT = (
    "/etc/shadow",
    "/etc/shadow-",
    "/etc/gshadow",
    "/etc/gshadow-",
    "/etc/sudoers.d",
    "/etc/ssl/private",
)
_NAMED_BY = (
    "AWS_SHARED_CREDENTIALS_FILE AWS_CONFIG_FILE GOOGLE_APPLICATION_CREDENTIALS CLOUDSDK_CONFIG "
    "KUBECONFIG DOCKER_CONFIG GNUPGHOME NETRC PGPASSFILE NPM_CONFIG_USERCONFIG HISTFILE XAUTHORITY"
)
"""Variables whose values are the paths of secrets."""

_OCTAL = re.compile(r"\\([0-7]{3})")

SOCKET_VARIABLES = frozenset(
    {
        "SSH_AUTH_SOCK",
        "GPG_AGENT_INFO",
        "DBUS_SESSION_BUS_ADDRESS",
        "DOCKER_HOST",
        "WAYLAND_DISPLAY",
        "DISPLAY",
    }
)
"""Variables that lead to programs outside of the sandbox."""


def secret_paths(environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Return where the user's secrets would be; most of these paths do not exist."""
    home = Path(environ.get("HOME") or Path.home())
    homes = [home]
    if os.geteuid() == 0:
        yield from (*map(Path, _OF_ROOT), *Path("/etc/ssh").glob("ssh_host_*_key"))
        # Root can read what belongs to everybody.
        homes += [each for each in Path("/home").glob("*") if each != home]
    for each in homes:
        yield from (each / name for name in _HOME.split())
        yield from (each / ".config" / name for name in _CONFIG.split())
        yield each / ".local/state/treenail"
    if config := environ.get("XDG_CONFIG_HOME"):
        yield from (Path(config) / name for name in _CONFIG.split())
    if state := environ.get("XDG_STATE_HOME"):
        yield Path(state) / "treenail"
    for name in _NAMED_BY.split():
        yield from (Path(each) for each in environ.get(name, "").split(os.pathsep) if os.path.isabs(each))


def listening_sockets() -> Iterator[str]:
    """Return the paths of sockets: a read-only mount does not keep anybody from connecting to one.

    Those that programs of this network namespace listen on, and those that are mounted into this system from
    another one, as docker's is into some containers.
    """
    found = [line.split(None, 7)[7:] for line in _lines("/proc/net/unix")]
    found += [
        [_OCTAL.sub(lambda code: chr(int(code[1], 8)), line.split()[4])]
        for line in _lines("/proc/self/mountinfo")
    ]
    for path in found:
        if path and path[0].startswith("/") and _is_socket(path[0]):
            yield path[0]


def _lines(place: str) -> list[str]:
    try:
        return Path(place).read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return []


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False
