"""The shape of the code: doors that tell the truth, one tree of errors, no hidden imports, no stray hosts."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Collection, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import pytest

import treenail
from treenail import errors

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "treenail"
MODULES = sorted(SRC.rglob("*.py"))
ROOMS = sorted(path.parent.name for path in SRC.glob("*/__init__.py"))
MAX_HIDDEN_IMPORTS = 9
HEAVY = [
    "agents",
    "anthropic",
    "claude_agent_sdk",
    "click",
    "genai_prices",
    "git",
    "langchain",
    "langgraph",
    "litellm",
    "obstore",
    "openai",
    "psycopg",
    "pydantic_ai",
    "pygit2",
    "rich",
    "sqlite3",
]
"""What only a part that is imported by its path may pull in."""


def door(room: str) -> types.ModuleType:
    return importlib.import_module(f"treenail.{room}" if room else "treenail")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


# --- doors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", ["", *ROOMS], ids=lambda room: room or "treenail")
def test_a_door_says_what_is_behind_it(room: str) -> None:
    """A room with anything in it has a docstring, and a sorted list of names that are all there."""
    module = door(room)
    folder = SRC / room
    if not any(path.name != "__init__.py" for path in folder.glob("*.py")):
        assert not getattr(module, "__all__", []), "an empty room lists names"
        return
    assert (module.__doc__ or "").strip(), f"treenail.{room} does not say what it is for"
    listed = module.__all__
    assert listed == sorted(set(listed))
    assert [name for name in listed if not hasattr(module, name)] == []
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations"
    }
    assert public - set(listed) == set(), "public names that the door does not list"


def explained_constants() -> set[str]:
    """Find the names that are assigned in a module and explained by a string right below."""
    found: set[str] = set()
    for path in MODULES:
        for statement, following in pairwise(tree_of(path).body):
            explained = (
                isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
                and isinstance(following.value.value, str)
            )
            if not explained:
                continue
            if isinstance(statement, ast.Assign):
                found.update(target.id for target in statement.targets if isinstance(target, ast.Name))
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                found.add(statement.target.id)
    return found


@pytest.mark.parametrize("room", ["", *ROOMS], ids=lambda room: room or "treenail")
def test_every_public_name_is_explained_where_it_is_made(room: str) -> None:
    """A class or function by its own docstring, a constant or an alias by the string below it."""
    module = door(room)
    explained = explained_constants()
    silent: list[str] = []
    for name in getattr(module, "__all__", []):
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            doc = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
            # A dataclass without a docstring gets its own signature as one.
            if not doc or doc.startswith(f"{name}("):
                silent.append(name)
        elif name not in explained and name != "__version__" and not isinstance(value, TypeVar):
            silent.append(name)
    assert silent == []


BY_PATH = re.compile(
    r"treenail\.(log\.(sqlite|postgres)|workspace\.host|telemetry\.otel"
    r"|providers\.(openai|anthropic|litellm|claude_agent|scripted)|presenters|testing)(\.|$)"
)
"""What is imported by its path, because it brings a driver, a vendor's SDK or a test suite along."""


def test_a_room_is_imported_by_its_door() -> None:
    """A room's inside is its own: other rooms use what its door lists, drivers excepted."""
    deep: list[str] = []
    for path in MODULES:
        own = path.relative_to(SRC).parts[0].removesuffix(".py")
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("treenail."):
                continue
            _, room, *inside = (node.module or "").split(".")
            if room != own and inside and not BY_PATH.match(node.module or ""):
                deep.append(f"{path.relative_to(ROOT)}:{node.lineno} imports {node.module}")
    assert deep == []


# --- the tree of errors --------------------------------------------------------------------------------


def drawn_tree() -> Iterator[tuple[str, str | None, str]]:
    """Read the tree in the docstring: each name, the name above it, and the remark beside it."""
    _, drawing, _ = (errors.__doc__ or "").split("```")
    ancestors: list[str] = []
    for line in drawing.strip().splitlines():
        match = re.match(r"(?P<branch>[│├└─ ]*)(?P<name>\w+)\s*(?P<remark>.*)", line)
        assert match is not None, line
        depth = len(match["branch"]) // 4
        del ancestors[depth:]
        yield match["name"], ancestors[-1] if ancestors else None, match["remark"]
        ancestors.append(match["name"])


def test_the_drawn_tree_is_the_tree() -> None:
    """Every public exception stands in the docstring, below its real parent, and nothing else does."""
    public = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException) and not name.startswith("_")
    }
    drawn = {name: (parent, remark) for name, parent, remark in drawn_tree()}
    assert set(drawn) == set(public)
    for name, (parent, remark) in drawn.items():
        bases = [base.__name__ for base in public[name].__bases__]
        assert bases[0] == (parent or "Exception"), name
        for claimed in re.findall(r"also an? (\w+)", remark):
            assert issubclass(public[name], getattr(builtins, claimed)), f"{name} is no {claimed}"
        assert (public[name].__dict__.get("__doc__") or "").strip(), f"{name} says nothing about itself"


def test_every_exception_of_ours_lives_in_the_tree() -> None:
    """No other module makes an exception that a caller could meet."""
    strays = [
        f"{path.relative_to(SRC)}: {node.name}"
        for path in MODULES
        if path.name != "errors.py"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
        and not node.name.startswith("_")
        and any(
            isinstance(base, ast.Name) and re.search(r"(Error|Exception)$", base.id) for base in node.bases
        )
    ]
    assert strays == []


# --- imports -------------------------------------------------------------------------------------------


def hidden_imports() -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES
        for function in ast.walk(tree_of(path))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]


def test_few_imports_hide_in_functions() -> None:
    """One that dodges a cycle means that the code is in the wrong room; a few load what is optional."""
    found = sorted(set(hidden_imports()))
    assert len(found) <= MAX_HIDDEN_IMPORTS, found


def loaded_by(statement: str, heavy: Collection[str] = HEAVY) -> set[str]:
    """Say which of the heavy modules a fresh interpreter has loaded after a statement."""
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.split()) & set(heavy)


def test_importing_treenail_pulls_in_no_driver() -> None:
    assert loaded_by("import treenail") == set()


def test_the_quickstarts_names_load_nothing_that_describes_types() -> None:
    """Pydantic's models take longer to import than all of Treenail, and not every program has one."""
    late = {"pydantic.main", "pydantic.type_adapter", "pydantic.types", "importlib.metadata"}
    assert loaded_by("from treenail import Agent, Limits, tool", late) == set()
    assert loaded_by("from treenail import tool\n@tool\ndef echo(text: str):\n    'Say it.'", late) == late


def test_no_door_pulls_in_a_driver() -> None:
    """Presenters are the exception: they are what the terminal's libraries are for."""
    statement = "import " + ", ".join(f"treenail.{room}" for room in ROOMS if room != "presenters")
    assert loaded_by(statement) == set()


def test_the_contract_is_exhaustive_and_names_what_exists() -> None:
    """A new room fails until somebody says where it belongs."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    (contract,) = [each for each in config["tool"]["importlinter"]["contracts"] if each["type"] == "layers"]
    layers = {name.strip() for layer in contract["layers"] for name in layer.split("|")}
    present = {path.stem for path in SRC.glob("*.py")} | set(ROOMS)
    assert contract["exhaustive"] is True
    assert layers == present - {"__init__", *contract["exhaustive_ignores"]}


def test_the_package_is_typed_and_has_a_docstring() -> None:
    assert (SRC / "py.typed").exists()
    assert (treenail.__doc__ or "").strip()


# --- other people's privates ---------------------------------------------------------------------------

DOCUMENTED = {"_asdict", "_current_frames", "_exit", "_field_defaults", "_fields", "_make", "_replace"}
"""Names of the standard library that begin with an underscore and are public all the same."""


def room_of(path: Path) -> str:
    """Name the room of a module; a module of the root is a room of its own."""
    inside = path.relative_to(SRC)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def is_private(name: str) -> bool:
    """Say whether a name is private. Those that end with an underscore belong to the language or to enums."""
    return name.startswith("_") and not name.endswith("_") and name not in DOCUMENTED


def private_names_made_in(tree: ast.Module) -> Iterator[str]:
    """Find what a module makes that is private: functions, classes, variables, attributes, slots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_itself(node):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def of_itself(node: ast.Attribute) -> bool:
    owner = node.value
    if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name):
        return owner.func.id == "super"
    return isinstance(owner, ast.Name) and owner.id in {"self", "cls", "owner"}


@cache
def private_names_of_rooms() -> dict[str, set[str]]:
    made: dict[str, set[str]] = {}
    for path in MODULES:
        made.setdefault(room_of(path), set()).update(filter(is_private, private_names_made_in(tree_of(path))))
    return made


def imported_privates(path: Path) -> Iterator[tuple[int, str]]:
    """Find the private modules and names that a module imports from a library or from another room."""
    own = f"treenail.{room_of(path)}"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if any(map(is_private, name.split("."))) and not name.startswith(own):
                yield node.lineno, name


def used_privates(path: Path) -> Iterator[tuple[int, str]]:
    """Find the private attributes that a module uses and that nothing in its room makes."""
    own = private_names_of_rooms()[room_of(path)]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield node.lineno, ast.unparse(node)


def test_no_module_uses_the_privates_of_a_library_or_of_another_room() -> None:
    """What begins with an underscore belongs to the room that makes it, and may change without notice."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in MODULES
        for line, name in (*imported_privates(path), *used_privates(path))
    ]
    assert found == []


# --- forks in tests ------------------------------------------------------------------------------------


def test_only_one_helper_forks_in_tests() -> None:
    """A forked child that returns into pytest reports a test twice; `tests/forks.py` has no way back."""
    strays = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path != ROOT / "tests" / "forks.py"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute | ast.Import | ast.ImportFrom)
        and re.search(r"\b(os|posix|pty)\b.*\b(fork|forkpty|spawn)$|multiprocessing", ast.unparse(node))
    ]
    assert strays == []


# --- what no file may name -----------------------------------------------------------------------------

TEXT = {".cfg", ".json", ".md", ".py", ".sh", ".sql", ".toml", ".txt", ".yaml", ".yml", ""}
FORBIDDEN = {
    "a registry's host": re.compile(
        r"pypi\.org|pythonhosted\.org|registry\.npmjs\.org|registry\.yarnpkg\.com|crates\.io", re.IGNORECASE
    ),
    "a home directory": re.compile(r"(?<![\w.])/(?:home|Users)/\w|(?<![\w.])/root/\w|[A-Z]:\\+Users\\+\w"),
    "this checkout": re.compile(re.escape(str(ROOT)) + r"/(?:src|tests|docs|bench|\.venv)\b"),
}


def project_files() -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.suffix in TEXT)
    for folder in ("src", "tests", "docs", "bench", ".ci"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts:
                yield path


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names(what: str) -> None:
    """The project builds anywhere: it knows neither a mirror nor the machine that it was written on."""
    files = list(project_files())
    assert Path(__file__) in files
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1)
        if FORBIDDEN[what].search(line)
    ]
    assert found == []
