"""What a command does not see: the user's secrets, and the sockets of programs outside.

A list cannot be complete. It names where common programs keep keys, tokens, histories and browser profiles.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    ".electrum .ethereum .local/state/treenail"
)
_CONFIG = (
    "gh hub glab-cli gcloud op doctl rclone git/credentials containers/auth.json composer/auth.json "
    "openai anthropic google-chrome chromium BraveSoftware microsoft-edge vivaldi opera Signal Slack "
    "discord treenail configstore netlify heroku fly pip/pip.conf"
)
_OF_ROOT = "shadow shadow- gshadow gshadow- sudoers.d ssl/private"
"""Below `/etc`."""
_NAMED_BY = (
    "AWS_SHARED_CREDENTIALS_FILE AWS_CONFIG_FILE GOOGLE_APPLICATION_CREDENTIALS CLOUDSDK_CONFIG "
    "KUBECONFIG DOCKER_CONFIG GNUPGHOME NETRC PGPASSFILE NPM_CONFIG_USERCONFIG HISTFILE XAUTHORITY"
)
"""Variables whose values are the paths of secrets."""

_HOST_KEY = re.compile(r"ssh_host_.*_key")
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


def secret_paths(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Return the user's secrets that exist, each without links in its path."""
    homes = [environ.get("HOME") or str(Path.home())]
    if os.geteuid() == 0:
        host_keys = (f"ssh/{name}" for name in _names("/etc/ssh") if _HOST_KEY.fullmatch(name))
        yield from real_paths(f"/etc/{name}" for name in (*_OF_ROOT.split(), *host_keys))
        # Root can read what belongs to everybody.
        homes += [f"/home/{name}" for name in _names("/home")]
    for home in homes:
        yield from _existing(home, _HOME.split())
    for config in (environ.get("XDG_CONFIG_HOME"), *(f"{home}/.config" for home in homes)):
        if config:
            yield from _existing(config, _CONFIG.split())
    if state := environ.get("XDG_STATE_HOME"):
        yield from _existing(state, ["treenail"])
    for variable in _NAMED_BY.split():
        if value := environ.get(variable):
            yield from real_paths(each for each in value.split(os.pathsep) if os.path.isabs(each))


def _existing(directory: str, names: Sequence[str]) -> Iterator[str]:
    """Return those paths in a directory that exist. Listing it costs less than a look at each of them."""
    try:
        there = set(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError:  # it may still be entered
        there = {name.partition("/")[0] for name in names}
    yield from real_paths(f"{directory}/{name}" for name in names if name.partition("/")[0] in there)


def real_paths(paths: Iterable[str | Path]) -> Iterator[str]:
    """Return those paths that exist, without links in them."""
    return (os.path.realpath(each) for each in paths if os.path.lexists(each))


def listening_sockets() -> Iterator[str]:
    """Return the paths of sockets: a read-only mount does not keep anybody from connecting to one.

    Those that programs of this network namespace listen on, and those that are mounted into this system from
    another one, as docker's is into some containers.
    """
    found = [line.split(None, 7)[7:] for line in _lines("/proc/net/unix")]
    # What is mounted from the root of its filesystem is a directory.
    mounts = [fields for fields in map(str.split, _lines("/proc/self/mountinfo")) if fields[3] != "/"]
    found += [[_OCTAL.sub(lambda code: chr(int(code[1], 8)), fields[4])] for fields in mounts]
    for path in found:
        if path and path[0].startswith("/") and _is_socket(path[0]):
            yield path[0]


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _lines(place: str) -> list[str]:
    try:
        with open(place, encoding="utf-8", errors="surrogateescape") as file:
            return file.read().split("\n")[:-1]
    except OSError:
        return []


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False
