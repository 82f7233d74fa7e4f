"""The settings of the command line: flags, the environment, the project's file, the user's file, defaults.

The settings of an earlier run come right after the flags, and an agent file's limits before the project's
`treenail.toml`. The user's own file is `$XDG_CONFIG_HOME/treenail/treenail.toml`.

Each value remembers its source, so that `treenail config show` can name it. A file found in a directory may
be somebody else's, or an agent's: it may not decide where the user's key is sent, nor run code that can read
it, and what it widens takes effect only after the user has approved this very content (`treenail config
approve`). A setting widens if it runs something or allows more than the user's own settings do.
"""

from __future__ import annotations

import difflib
import hashlib
import ipaddress
import math
import os
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from treenail.errors import UsageError
from treenail.sandbox import MODES

FILE_NAME = "treenail.toml"
APPROVALS = "approved"
"""The name of the user's list of approved contents, beside the user's settings."""
MAX_FILE_BYTES = 1_000_000

DEFAULT = "the default"
"""The source of a value that was not set."""

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting."""

    name: str
    read: Callable[[str, object], Value]
    default: Value
    help: str

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return "TREENAIL_" + self.name.upper()

    @property
    def flag(self) -> str:
        """The flag that sets it."""
        return "--" + self.name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A value and where it came from."""

    value: Value
    source: str


def _text(name: str, given: object) -> str:
    if not isinstance(given, str) or not given.strip():
        raise UsageError(f"{name} must be text, not {given!r}")
    return given


def _flag(name: str, given: object) -> bool:
    if isinstance(given, bool):
        return given
    word = given.strip().lower() if isinstance(given, str) else ""
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise UsageError(f"{name} must be true or false, not {given!r}")


def _positive(name: str, given: object) -> float:
    is_number = isinstance(given, str | int | float) and not isinstance(given, bool)
    try:
        value = float(str(given)) if is_number else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"{name} must be a number above 0, not {given!r}")
    return value


def _count(name: str, given: object) -> int:
    value = _positive(name, given)
    if value != int(value):
        raise UsageError(f"{name} must be a whole number, not {given!r}")
    return int(value)


def _paths(name: str, given: object) -> str:
    """Read one path or several; several are joined, as in PATH."""
    each = given if isinstance(given, list | tuple) else [given]
    return os.pathsep.join(_text(name, path) for path in each)


def _one_of(*known: str) -> Callable[[str, object], str]:
    def read(name: str, given: object) -> str:
        if given not in known:
            raise UsageError(f"{name} must be one of {', '.join(known)}, not {given!r}")
        return str(given)

    return read


SETTINGS = (
    Setting(
        "model",
        _text,
        None,
        "The model: NAME, or PROVIDER/NAME with openai, anthropic, litellm, claude-agent.",
    ),
    Setting("base_url", _text, None, "A server that speaks OpenAI's API, such as a local one."),
    Setting(
        "api",
        _one_of("responses", "chat"),
        None,
        "Which of OpenAI's APIs the server speaks: responses or chat.",
    ),
    Setting("store", _text, None, "The file that holds the runs."),
    Setting(
        "permissions",
        _one_of("auto", "ask", "read_only"),
        "auto",
        "How tools with effects are run.",
    ),
    Setting("sandbox", _one_of(*MODES), "auto", "Whether commands are confined: require, auto or off."),
    Setting("allow_network", _flag, False, "Let commands use the network."),
    Setting("allow_write", _paths, None, "A directory outside that commands may write to; may be repeated."),
    Setting("max_cost", _positive, 2.0, "The most that a run may cost, in USD."),
    Setting(
        "max_output", _count, None, "How many tokens an answer may have; by default, what suits the model."
    ),
    Setting("max_steps", _count, 200, "How many model and tool calls a run may make."),
    Setting("max_retries", _count, 20, "How many failed calls a run may retry."),
    Setting("timeout", _positive, 1800.0, "How long a run may take, in seconds."),
    Setting("check", _text, None, "A command that must exit 0 before the agent may stop."),
    Setting("judge", _flag, False, "Let a model judge the work before the agent may stop."),
    Setting("agent", _text, None, "The agent: path.py:name, or a .toml or .yaml file."),
    Setting(
        "unknown_price",
        _one_of("halt", "warn", "estimate"),
        "halt",
        "What --max-cost does for a model without a known price: halt, warn or estimate.",
    ),
)

_PATHS = ("store", "agent", "allow_write")

_RUNS = ("check", "agent", "allow_write", "store")
"""The settings that widen whatever their value is. A store's runs say how they are to be resumed."""

_STRICTER: Mapping[str, Sequence[Value]] = {
    "sandbox": MODES,
    "allow_network": (False, True),
    "permissions": ("read_only", "ask", "auto"),
    "unknown_price": ("halt", "estimate", "warn"),
    "judge": (True, False),
}
"""The values of a setting, strictest first."""

_CEILINGS = ("max_cost", "max_steps", "max_retries", "timeout")

BY_NAME = {each.name: each for each in SETTINGS}


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting with its value and its source."""

    chosen: Mapping[str, Chosen]
    file: Path | None = None
    """The project's file."""
    unapproved: tuple[str, ...] = ()
    """The settings that the project's file widens and nobody has approved; they have no effect."""
    wanted: str = ""
    """What these settings would be, as text for a person."""
    fingerprint: str = ""
    """The hash of what was read, which an approval is for."""

    def __getitem__(self, name: str) -> Value:
        return self.chosen[name].value

    def text(self, name: str) -> str | None:
        """Return a setting that is a text."""
        value = self[name]
        return None if value is None else str(value)

    def paths(self, name: str) -> tuple[Path, ...]:
        """Return a setting that is a list of paths."""
        return tuple(Path(each) for each in (self.text(name) or "").split(os.pathsep) if each)

    def check_approved(self) -> None:
        """Raise `UsageError` if the project's file widens something that nobody has approved."""
        if self.unapproved:
            raise UsageError(
                f"{self.file} sets {', '.join(self.unapproved)}, which you have not approved in this form; "
                "read it, then approve it with `treenail config approve`, or set these with flags"
            )

    def number(self, name: str) -> float | None:
        """Return a setting that is a number."""
        value = self[name]
        return None if value is None or isinstance(value, str) else float(value)


def load(
    flags: Mapping[str, object | None],
    environ: Mapping[str, str],
    directory: Path,
    remembered: Mapping[str, str] | None = None,
    agent: Mapping[str, object] | None = None,
) -> Settings:
    """Collect the settings. An error names the setting and the place that sets it.

    `remembered` are the settings of an earlier run; only flags override them. `agent` is what the agent's own
    file sets; it overrides the project's settings file.
    """
    file = find_file(directory)
    written = {} if file is None else _read_file(file)
    own = user_file(environ)
    # In a workspace that holds them, an agent could change the user's own settings and approvals.
    mine = _read_file(own) if own.is_file() and not own.is_relative_to(directory) else {}
    fingerprint = "" if file is None else _fingerprint(file, written)
    approved = fingerprint in _approvals(environ, directory)
    chosen: dict[str, Chosen] = {}
    unapproved: list[str] = []
    for each in SETTINGS:
        name = each.name
        plain = Chosen(each.default, DEFAULT)
        if name in mine:
            value = each.read(f"{name} in {own}", mine[name])
            plain = Chosen(_from_file(name, value, own, trusted=True), str(own))
        # Where a value may come from, as an error names it and as `config show` names it: the first one wins.
        places = (
            (each.flag, each.flag, flags.get(name)),
            (name, "the run", (remembered or {}).get(name)),
            (each.variable, f"the variable {each.variable}", environ.get(each.variable) or None),
            (f"{name} in the agent's file", "the agent's file", (agent or {}).get(name)),
            (f"{name} in {file}", str(file), written.get(name)),
        )
        chosen[name] = plain
        for place, source, given in places:
            if given is not None:
                chosen[name] = Chosen(each.read(place, given), source)
                break
        if file is not None and chosen[name].source == str(file):
            value = _from_file(name, chosen[name].value, file)
            if approved or not _widens(name, value, plain.value):
                chosen[name] = Chosen(value, str(file))
            else:
                chosen[name] = plain
                unapproved.append(name)
    wanted = ", ".join(f"{name} = {written[name]!r}" for name in unapproved)
    return Settings(chosen, file, tuple(unapproved), wanted, fingerprint)


def _widens(name: str, value: Value, plain: Value) -> bool:
    """Say whether a value runs something, or allows more than the user's own settings do."""
    if name in _CEILINGS:
        return isinstance(value, int | float) and isinstance(plain, int | float) and value > plain
    if name in _STRICTER:
        order = _STRICTER[name]
        return order.index(value) > order.index(plain)
    return name in _RUNS


def user_directory(environ: Mapping[str, str]) -> Path:
    """Return the directory of the user's own settings."""
    base = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or str(Path.home()), ".config")
    return Path(base) / "treenail"


def user_file(environ: Mapping[str, str]) -> Path:
    """Return the file of the user's own settings, which may not exist."""
    return user_directory(environ) / FILE_NAME


def _fingerprint(file: Path, written: Mapping[str, object]) -> str:
    """Return the hash of what a settings file says, its place, and the agent file that it names."""
    agent = written.get("agent")
    named = file.parent / Path(agent.partition(":")[0]).expanduser() if isinstance(agent, str) else None
    content = named.read_bytes() if named is not None and named.is_file() else b""
    whole = [str(file.resolve()), sorted((name, repr(value)) for name, value in written.items())]
    return hashlib.sha256(repr(whole).encode("utf-8", "surrogateescape") + content).hexdigest()


def _approvals(environ: Mapping[str, str], directory: Path) -> Collection[str]:
    """Return the fingerprints that the user has approved; none if an agent could write them."""
    known = user_directory(environ) / APPROVALS
    try:
        return () if known.is_relative_to(directory) else known.read_text("utf-8", "replace").split()
    except OSError:
        return ()


def approve(found: Settings, environ: Mapping[str, str]) -> None:
    """Record that the user approves the project's settings file as it was read."""
    known = user_directory(environ) / APPROVALS
    known.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with known.open("a", encoding="utf-8") as lines:
        lines.write(found.fingerprint + "\n")


def _from_file(name: str, value: Value, file: Path, *, trusted: bool = False) -> Value:
    """Return a value of a settings file, with its path resolved.

    A server on another machine is refused, and an agent in Python, unless the file is the user's own.
    """
    if name == "base_url" and not trusted:
        _check_is_here(str(value), file)
    if name == "allow_write":
        return os.pathsep.join(_beside(each, file) for each in str(value).split(os.pathsep))
    return _beside(str(value), file, trusted=trusted) if name in _PATHS else value


def find_file(directory: Path) -> Path | None:
    """Find the settings file of a project: here, or above, up to the repository's root."""
    for each in (directory, *directory.parents):
        candidate = each / FILE_NAME
        if candidate.is_file():
            return candidate
        if (each / ".git").exists():
            return None
    return None


def _read_file(file: Path) -> dict[str, object]:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{file} is larger than {MAX_FILE_BYTES} bytes, so it is not a settings file")
        written = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{file} cannot be read as TOML: {error}; fix it, or remove it") from error
    for name in written:
        if name not in BY_NAME:
            near = difflib.get_close_matches(name, BY_NAME, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it may have: {', '.join(BY_NAME)}"
            raise UsageError(f"{file} has {name!r}, which is not a setting; {hint}")
    return written


def _beside(path: str, file: Path, *, trusted: bool = False) -> str:
    """Resolve a path in a settings file relative to that file; a Python file is refused."""
    place, colon, name = path.partition(":")
    if place.endswith(".py") and not trusted:
        raise UsageError(
            f"{file} would run {place}, which could read your keys; if you want that, name it with "
            "--agent or TREENAIL_AGENT"
        )
    return os.path.normpath(file.parent / Path(place).expanduser()) + colon + name


def _check_is_here(url: str, file: Path) -> None:
    """Refuse a server on another machine: the user's key would be sent there."""
    host = urlsplit(url).hostname or ""
    try:
        is_here = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = False
    if not is_here:
        raise UsageError(
            f"{file} would send your key and your files to {host or url!r}; if you want that, name it "
            "with --base-url or TREENAIL_BASE_URL"
        )
