"""The settings of the command line: flags, the environment, the project's file, the user's file, defaults.

The settings of an earlier run come right after the flags, and an agent file's limits before the project's
`treenail.toml`. The user's own file is `$XDG_CONFIG_HOME/treenail/treenail.toml`.

Each value remembers its source, so that `treenail config show` can name it. A file found in a directory may
be somebody else's, or an agent's: it may not decide where the user's key is sent, nor run code that can read
it, and what it widens takes effect only after the user has approved this very content (`treenail config
approve`). A setting widens if it runs something or allows more than the user's own settings do.

Rules (`allow`, `ask`, `deny`) are joined, not overridden: those of the user's file and of the user's file for
this directory. A project's own file may only narrow: it may have `ask` and `deny`, and not `allow`.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import ipaddress
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from treenail import providers
from treenail.errors import UsageError
from treenail.log import is_postgres, store_named
from treenail.sandbox import MODES
from treenail.tools import Hook, Rules, parse_rule

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


def _temperature(name: str, given: object) -> float:
    value = 0.0 if given in (0, 0.0, "0", "0.0") and not isinstance(given, bool) else _positive(name, given)
    if value > 2:
        raise UsageError(f"{name} must be a number from 0 to 2, not {given!r}")
    return value


def _fields(name: str, given: object) -> str:
    """Read one NAME=VALUE or several; several are joined, a line each."""
    each = given if isinstance(given, list | tuple) else str(given).split("\n")
    for field in each:
        if not isinstance(field, str) or not field.partition("=")[0].strip() or "=" not in field:
            raise UsageError(f"{name} must be NAME=VALUE, such as top_p=0.9, not {field!r}")
    return "\n".join(each)


def _hooks(name: str, given: object) -> str:
    """Read hooks: a list of tables, or that list as JSON. They are kept as JSON."""
    try:
        each = json.loads(given) if isinstance(given, str) else given
        hooks = hooks_of(each)
    except (ValueError, TypeError, UsageError) as error:
        raise UsageError(
            f"{name} must be tables with when, command, tools, paths, timeout_s: {error}"
        ) from error
    return json.dumps([asdict(hook) for hook in hooks], sort_keys=True)


def hooks_of(given: object) -> tuple[Hook, ...]:
    """Make hooks of plain values. Raises `UsageError`, `TypeError` or `ValueError`."""
    if not isinstance(given, list):
        raise TypeError("it is not a list")
    made = []
    for each in given:
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in each.items()
        }
        made.append(Hook(**fields))
    return tuple(made)


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
    Setting("temperature", _temperature, None, "How freely the model chooses its words: 0 to 2."),
    Setting("effort", _text, None, "How hard the model thinks: low, medium, high, or what its provider has."),
    Setting("option", _fields, None, "A further field of each request, NAME=VALUE; may be repeated."),
    Setting("store", _text, None, "The file that holds the runs, or a postgresql:// URL."),
    Setting(
        "permissions",
        _one_of("auto", "ask", "read_only"),
        "auto",
        "How tools with effects are run.",
    ),
    Setting(
        "questions",
        _one_of("auto", "on", "off"),
        "auto",
        "Whether the agent may ask questions; auto: if somebody is there, or with --ask.",
    ),
    Setting("sandbox", _one_of(*MODES), "auto", "Whether commands are confined: require, auto or off."),
    Setting("allow_network", _flag, False, "Let commands use the network."),
    Setting("allow_write", _paths, None, "A directory outside that commands may write to; may be repeated."),
    Setting(
        "background_write",
        _paths,
        None,
        "A directory of the project that background processes may write to; may be repeated.",
    ),
    Setting("max_cost", _positive, 2.0, "The most that a run may cost, in USD."),
    Setting(
        "max_output", _count, None, "How many tokens an answer may have; by default, what suits the model."
    ),
    Setting("max_steps", _count, 200, "How many model and tool calls a run may make."),
    Setting("max_retries", _count, 20, "How many failed calls a run may retry."),
    Setting("timeout", _positive, 1800.0, "How long a run may take, in seconds."),
    Setting("trust_model", _flag, False, "Do not ask the server first whether it has the model."),
    Setting(
        "hooks", _hooks, None, "Commands around tool calls, as JSON; better as [[hooks]] in a settings file."
    ),
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

_RUNS = ("check", "hooks", "agent", "allow_write", "background_write", "store", "option")
"""The settings that widen whatever their value is. A store's runs say how they are to be resumed, and a
field of a request may cost more than its text."""

_STRICTER: Mapping[str, Sequence[Value]] = {
    "sandbox": MODES,
    "allow_network": (False, True),
    "permissions": ("read_only", "ask", "auto"),
    "unknown_price": ("halt", "estimate", "warn"),
    "judge": (True, False),
}
"""The values of a setting, strictest first."""

REPEATED = {"allow_write": "DIR", "background_write": "DIR", "option": "NAME=VALUE"}
"""The settings whose flags may be repeated, and what each flag takes."""

_CEILINGS = ("max_cost", "max_steps", "max_retries", "timeout")

BY_NAME = {each.name: each for each in SETTINGS}


SERVERS = "mcp"
"""The table of MCP servers that a settings file may have."""

RULES = ("allow", "ask", "deny")
"""The lists of rules that a settings file may have; see `treenail.tools.rules`."""


@dataclass(frozen=True, slots=True)
class WrittenRule:
    """A rule of a settings file."""

    kind: str
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class WrittenServer:
    """An MCP server of a settings file: `[mcp.NAME]`."""

    name: str
    table: Mapping[str, object]
    source: str
    approved: bool = True


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting with its value and its source."""

    chosen: Mapping[str, Chosen]
    file: Path | None = None
    """The project's file."""
    unapproved: tuple[str, ...] = ()
    """The settings that the project's file widens and nobody has approved, also where a flag overrides them:
    an approval is for all of them. They have no effect."""
    waiting: tuple[str, ...] = ()
    """Those of them that would have an effect now; a run does not start without them."""
    wanted: str = ""
    """What the unapproved settings would be, as text for a person."""
    fingerprint: str = ""
    """The hash of what was read, which an approval is for."""
    rules: tuple[WrittenRule, ...] = ()
    servers: tuple[WrittenServer, ...] = ()
    """The MCP servers; those of a project's file only count once it is approved."""

    def rules_for(self, root: Path) -> Rules:
        """Return the rules in force in a workspace."""
        allow, ask, deny = ([each.text for each in self.rules if each.kind == kind] for kind in RULES)
        return Rules(allow, ask, deny, root)

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
        """Raise `UsageError` if the project's file would widen something that nobody has approved."""
        if self.waiting:
            raise UsageError(
                f"{self.file} sets {', '.join(self.unapproved)}, which you have not approved in this form; "
                "read it, then approve it with `treenail config approve`, or set with flags: "
                f"{', '.join(self.waiting)}"
            )

    def lines(self, name: str) -> tuple[str, ...]:
        """Return a setting that is a list of texts."""
        return tuple((self.text(name) or "").splitlines())

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
    mine = _read_file(own) if own.is_file() and not _is_exposed(own, directory) else {}
    fingerprint = "" if file is None else _fingerprint(file, written)
    approved = fingerprint in _approvals(environ, directory)
    chosen: dict[str, Chosen] = {}
    unapproved: list[str] = []
    waiting: list[str] = []
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
        if file is None or name not in written:
            continue
        # Whoever overrides the file now: an approval is for all of it, and lasts longer than a flag.
        value = each.read(f"{name} in {file}", written[name])
        if name == "model":
            widens = _is_foreign(str(value), written.get("base_url"), mine)
        else:
            widens = _widens(name, value, plain.value)
        wins = chosen[name].source == str(file)
        if widens and not approved:
            unapproved.append(name)
            waiting += [name] if wins else []
        if wins:
            value = _from_file(name, value, file)
            chosen[name] = plain if name in waiting else Chosen(value, str(file))
    servers = {each.name: each for each in _servers_in(mine, own)}
    if file is not None and SERVERS in written:
        servers |= {each.name: each for each in _servers_in(written, file, approved=approved)}
        unapproved += [] if approved else [SERVERS]
        waiting += [] if approved else [SERVERS]
    wanted = ", ".join(f"{name} = {shown_value(written[name])!r}" for name in unapproved)
    beside = rules_file(environ, directory)
    rules = [
        *_rules_in(mine, own),
        *_rules_in({} if _is_exposed(beside, directory) else _read_rules(beside), beside),
    ]
    if file is not None:
        if "allow" in written:
            raise UsageError(
                f"{file} has 'allow': a project may not allow itself anything; put these rules into {beside}"
            )
        rules += _rules_in(written, file)
    return Settings(
        chosen,
        file,
        tuple(unapproved),
        tuple(waiting),
        wanted,
        fingerprint,
        tuple(rules),
        tuple(servers.values()),
    )


def _servers_in(
    written: Mapping[str, object], file: Path, *, approved: bool = True
) -> Iterator[WrittenServer]:
    """Return the MCP servers of a settings file."""
    tables = written.get(SERVERS, {})
    if not isinstance(tables, dict) or not all(isinstance(each, dict) for each in tables.values()):
        raise UsageError(f"{SERVERS} in {file} must be tables, one per server: [{SERVERS}.NAME]")
    for name, table in tables.items():
        yield WrittenServer(name, table, str(file), approved)


def shown_value(value: object) -> object:
    """Return a setting's value as it may be shown: the URL of a store without its password."""
    return str(store_named(value)) if isinstance(value, str) and is_postgres(value) else value


def _rules_in(written: Mapping[str, object], file: Path) -> list[WrittenRule]:
    """Return the rules of a settings file. Raises `UsageError` that names the rule and the file."""
    found = []
    for kind in RULES:
        given = written.get(kind, [])
        if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
            raise UsageError(f'{kind} in {file} must be a list of rules, such as ["run_command: pytest *"]')
        for each in given:
            try:
                parse_rule(each, kind)
            except UsageError as error:
                raise UsageError(f"{kind} in {file}: {error}") from error
            found.append(WrittenRule(kind, each, str(file)))
    return found


def rules_file(environ: Mapping[str, str], directory: Path) -> Path:
    """Return the user's file with the rules for a directory, which may not exist.

    Not for its whole project: the paths of a rule are those below the directory in which it was made.
    """
    return user_directory(environ) / "projects" / f"{_name_of(directory.resolve())}.toml"


def _read_rules(file: Path) -> dict[str, object]:
    written = _read_toml(file) if file.is_file() else {}
    for name in written:
        if name not in RULES:
            raise UsageError(f"{file} has {name!r}; it may have: {', '.join(RULES)}")
    return written


def can_remember(directory: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether rules for a directory count: not where an agent in it could change them."""
    return not _is_exposed(rules_file(environ, directory), directory)


def remember(rule: str, directory: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Add a rule to what the user allows in a directory, and return the file that it is in.

    Raises `UsageError` if the rule cannot be read, or if an agent in this directory could change the file.
    """
    parse_rule(rule)
    line, opening = _rule_line(rule), "allow = [\n"

    def added(text: str, known: list[str]) -> tuple[str, list[str]]:
        if rule in known:
            return text, known
        if opening in text:
            return text.replace(opening, opening + line, 1), [rule, *known]
        return f"{opening}{line}]\n{text}", [rule, *known]

    return _change_rules(rule, directory, environ, added)


def forget(rule: str, directory: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Take a rule back that `remember` has added. Raises `UsageError` if there is no such rule."""

    def without(text: str, known: list[str]) -> tuple[str, list[str]]:
        if rule not in known:
            raise UsageError(
                f"{rule!r} is not in {rules_file(environ, directory)}; `treenail permissions` shows the rules"
            )
        return text.replace(_rule_line(rule), "", 1), [each for each in known if each != rule]

    return _change_rules(rule, directory, environ, without)


def _rule_line(rule: str) -> str:
    return f"    {json.dumps(rule, ensure_ascii=False)},\n"


def _change_rules(
    rule: str,
    directory: Path,
    environ: Mapping[str, str],
    change: Callable[[str, list[str]], tuple[str, list[str]]],
) -> Path:
    """Change the text of the user's rules for a directory; everything else in the file stays as it is."""
    file = rules_file(environ, directory)
    if not can_remember(directory, environ):
        raise UsageError(
            f"{file} lies in this project, where an agent could change it, so it does not count; set "
            "XDG_CONFIG_HOME to another directory"
        )
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (file.parent / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = _read_rules(file)
        known = [each.text for each in _rules_in(before, file) if each.kind == "allow"]
        text = file.read_text(encoding="utf-8") if file.is_file() else f"# Rules for {directory}\n"
        text, wanted = change(text, known)
        try:
            is_as_meant = {"allow": [], **tomllib.loads(text)} == before | {"allow": wanted}
        except tomllib.TOMLDecodeError:
            is_as_meant = False
        if not is_as_meant:
            raise UsageError(
                f"{file} is written in a way that cannot be changed here; change {rule!r} by hand"
            )
        temporary = file.with_name(f"{file.name}.{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    return file


def _widens(name: str, value: Value, plain: Value) -> bool:
    """Say whether a value runs something, or allows more than the user's own settings do."""
    if name in _CEILINGS:
        return isinstance(value, int | float) and isinstance(plain, int | float) and value > plain
    if name in _STRICTER:
        order = _STRICTER[name]
        return order.index(value) > order.index(plain)
    return name in _RUNS


def _is_foreign(model: str, base_url: object, mine: Mapping[str, object]) -> bool:
    """Say whether a project's model is a script, or of another provider than the user's own model.

    Without a model of their own, OpenAI and Anthropic are the user's: neither answers without their key.
    """
    server = mine.get("base_url")
    named = _provider_of(model, has_server=bool(base_url or server))
    own = mine.get("model")
    if own is None:
        return named not in ("openai", "anthropic")
    return named == "scripted" or named != _provider_of(str(own), has_server=bool(server))


def _provider_of(model: str, *, has_server: bool) -> str:
    """Return the provider that a model's name leads to; for litellm with the vendor that it passes on to."""
    kind, slash, name = model.partition("/")
    if model.startswith("scripted:") or (slash and kind == "scripted"):
        return "scripted"
    if slash and kind in providers.PROVIDERS:
        return f"{kind}/{name.partition('/')[0]}" if kind == "litellm" else kind
    return "anthropic" if model.startswith("claude") and not has_server else "openai"


def _is_exposed(file: Path, directory: Path) -> bool:
    """Say whether an agent in a directory could change a file of the user's: it, or a link that leads to it,
    lies there."""
    place = directory.resolve()
    try:
        if file.resolve().is_relative_to(place):
            return True
        for each in (file.absolute(), *file.absolute().parents):
            if (each.parent.resolve() / each.name).is_relative_to(place):
                return True
            if each.is_symlink() and _is_exposed(each.parent / each.readlink(), directory):
                return True
    except (OSError, RuntimeError):
        # Links in a circle, or too many of them.
        return True
    return False


def user_directory(environ: Mapping[str, str]) -> Path:
    """Return the directory of the user's own settings."""
    base = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or str(Path.home()), ".config")
    return Path(base) / "treenail"


def user_file(environ: Mapping[str, str]) -> Path:
    """Return the file of the user's own settings, which may not exist."""
    return user_directory(environ) / FILE_NAME


def project_of(directory: Path) -> Path:
    """Return the project of a directory: the nearest parent with a settings file or a repository."""
    for each in (directory, *directory.parents):
        if (each / FILE_NAME).is_file() or (each / ".git").exists():
            return each
    return directory


def project_name(directory: Path) -> str:
    """Return the name of a directory's project, for files outside of it that belong to it."""
    return _name_of(project_of(directory.resolve()))


def _name_of(directory: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", directory.name) or "root"
    return f"{name}-{hashlib.sha256(os.fsencode(directory)).hexdigest()[:12]}"


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
        return () if _is_exposed(known, directory) else known.read_text("utf-8", "replace").split()
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
    is_path = name in _PATHS and not is_postgres(value)
    return _beside(str(value), file, trusted=trusted) if is_path else value


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
    written = _read_toml(file)
    for name in written:
        known = [*BY_NAME, *RULES, SERVERS]
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it may have: {', '.join(known)}"
            raise UsageError(f"{file} has {name!r}, which is not a setting; {hint}")
    return written


def _read_toml(file: Path) -> dict[str, object]:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{file} is larger than {MAX_FILE_BYTES} bytes, so it is not a settings file")
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{file} cannot be read as TOML: {error}; fix it, or remove it") from error


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
