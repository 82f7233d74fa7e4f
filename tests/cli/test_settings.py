"""Settings: flags over environment over the project's file over defaults, and each knows its place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.errors import UsageError
from treenail.presenters.cli import stores
from treenail.presenters.cli.settings import SETTINGS, approve, load, user_file


def write(directory: Path, text: str) -> Path:
    file = directory / "treenail.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_flags_come_before_the_environment_the_file_and_the_default(tmp_path: Path) -> None:
    file = write(tmp_path, 'max_cost = 1.5\nmodel = "in-file"\n')
    told = load({"max_cost": 1.0}, {"TREENAIL_MAX_COST": "2", "TREENAIL_MAX_STEPS": "7"}, tmp_path)
    assert (told["max_cost"], told.chosen["max_cost"].source) == (1.0, "--max-cost")
    assert (told["max_steps"], told.chosen["max_steps"].source) == (7, "the variable TREENAIL_MAX_STEPS")
    assert (told["model"], told.chosen["model"].source) == ("in-file", str(file))
    assert (told["timeout"], told.chosen["timeout"].source) == (1800.0, "the default")
    assert load({}, {"TREENAIL_MAX_COST": "2"}, tmp_path)["max_cost"] == 2.0
    assert load({}, {}, tmp_path)["max_cost"] == 1.5


def test_what_a_run_was_told_counts_more_than_anything_but_flags(tmp_path: Path) -> None:
    told = load({}, {"TREENAIL_MODEL": "other"}, tmp_path, {"model": "mine"})
    assert (told["model"], told.chosen["model"].source) == ("mine", "the run")
    assert load({"model": "flag"}, {}, tmp_path, {"model": "mine"})["model"] == "flag"


def test_the_file_is_looked_for_up_to_the_repository_and_not_further(tmp_path: Path) -> None:
    write(tmp_path, "max_steps = 5\n")
    inner = tmp_path / "repo" / "src"
    inner.mkdir(parents=True)
    assert load({}, {}, inner)["max_steps"] == 5
    (tmp_path / "repo" / ".git").mkdir()
    assert load({}, {}, inner)["max_steps"] == 200


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max_costs = 1", "did you mean max_cost"),
        ("max_cost = -1", "above 0"),
        ("max_cost = nan", "above 0"),
        ("max_cost = true", "above 0"),
        ("max_steps = 1.5", "whole number"),
        ('permissions = "yolo"', "auto, ask, read_only"),
        ("judge = 3", "true or false"),
        ("model = 3", "must be text"),
        ("model = ", "cannot be read as TOML"),
        ('base_url = "https://evil.example/v1"', "if you want that"),
        ('base_url = "http://127.0.0.1.evil.example/v1"', "if you want that"),
        ('base_url = "//evil.example"', "if you want that"),
        ('agent = "evil.py:agent"', "if you want that"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_what_to_do(tmp_path: Path, text: str, told: str) -> None:
    file = write(tmp_path, text + "\n")
    with pytest.raises(UsageError, match=told) as refused:
        load({}, {}, tmp_path)
    assert str(file) in str(refused.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8080/v1", "http://localhost/v1", "http://[::1]:1/v1"])
def test_a_file_may_name_a_server_on_this_machine(tmp_path: Path, url: str) -> None:
    write(tmp_path, f'base_url = "{url}"\n')
    assert load({}, {}, tmp_path)["base_url"] == url


def test_a_person_may_name_any_server(tmp_path: Path) -> None:
    assert load({"base_url": "https://models.example/v1"}, {}, tmp_path)["base_url"]
    assert load({}, {"TREENAIL_BASE_URL": "https://models.example/v1"}, tmp_path)["base_url"]


@given(text=st.text(max_size=200))
def test_any_file_is_read_or_refused_in_words(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("any")
    (directory / "treenail.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        said = set(load({}, {}, directory).chosen)
    except UsageError as error:
        said = {"refused"} if "treenail.toml" in str(error) else {str(error)}
    assert said in ({"refused"}, {each.name for each in SETTINGS})


def test_runs_are_kept_outside_the_project_and_projects_apart(tmp_path: Path) -> None:
    one, two = tmp_path / "a" / "app", tmp_path / "b" / "app"
    for each in (one, two):
        (each / ".git").mkdir(parents=True)
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    found = {stores.store_for(each, None, env) for each in (one, two)}
    assert len(found) == 2
    assert all(each.is_relative_to(tmp_path / "state") for each in found)
    (one / "src").mkdir()
    assert stores.store_for(one / "src", None, env) in found, (
        "a project has one store, from wherever it is asked"
    )


def test_a_store_in_a_repository_is_ignored_by_it(tmp_path: Path) -> None:
    store = stores.ready(stores.store_for(tmp_path, ".treenail/runs.db", {}))
    assert store == tmp_path / ".treenail/runs.db"
    assert (tmp_path / ".treenail/.gitignore").read_text() == "*\n"


def test_a_place_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(UsageError, match="--store"):
        stores.ready(blocker / "runs.db")


def test_an_agents_file_counts_more_than_the_projects_and_less_than_a_person(tmp_path: Path) -> None:
    write(tmp_path, "max_steps = 5\nmax_cost = 5\n")
    agent = {"max_steps": 4, "max_cost": 4}
    told = load({}, {"TREENAIL_MAX_COST": "3"}, tmp_path, None, agent)
    assert (told["max_steps"], told.chosen["max_steps"].source) == (4, "the agent's file")
    assert told["max_cost"] == 3
    with pytest.raises(UsageError, match="the agent's file must be a number above 0"):
        load({}, {}, tmp_path, None, {"max_cost": -1})


def test_paths_in_a_settings_file_lie_beside_it(tmp_path: Path) -> None:
    write(tmp_path, 'store = ".runs/runs.db"\nagent = "agents/mine.toml"\n')
    inner = tmp_path / "src"
    inner.mkdir()
    env = {"XDG_CONFIG_HOME": str(tmp_path.parent / f"{tmp_path.name}-config")}
    approve(load({}, env, inner), env)
    told = load({}, env, inner)
    assert told["store"] == str(tmp_path / ".runs/runs.db")
    assert told["agent"] == str(tmp_path / "agents/mine.toml")


def test_the_flag_for_a_store_is_given_only_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TREENAIL_STORE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    here = stores.store_for(tmp_path, None, {"XDG_STATE_HOME": str(tmp_path / "state")})
    assert stores.flag_for(here) == ""
    assert stores.flag_for(tmp_path / "a b.db") == f" --store '{tmp_path}/a b.db'"


# --- what a project's file may not do by itself --------------------------------------------------------


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(tmp_path / "config")}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    made.mkdir()
    return made


WIDENING = {
    "check": 'check = "make evil"',
    "allow_network": "allow_network = true",
    "allow_write": 'allow_write = ["/etc", "~/.ssh"]',
    "sandbox": 'sandbox = "off"',
    "max_cost": "max_cost = 1000",
    "timeout": "timeout = 1000000",
    "unknown_price": 'unknown_price = "warn"',
    "agent": 'agent = "agent.toml"',
    "store": 'store = ".runs/runs.db"',
}


@pytest.mark.parametrize(
    ("own", "given", "is_free"),
    [
        ("", 'model = "scripted:evil.json"', False),
        ("", 'model = "scripted/evil.json"', False),
        ("", 'model = "litellm/deepseek/x"', False),
        ("", 'model = "claude-agent/sonnet"', False),
        ("", 'model = "anthropic/claude-haiku-4-5"', True),
        ("", 'model = "gpt-5"', True),
        ("", 'model = "Qwen/Qwen3"\nbase_url = "http://localhost:8000/v1"', True),
        ('model = "claude-opus-4-5"', 'model = "anthropic/claude-haiku-4-5"', True),
        ('model = "claude-opus-4-5"', 'model = "openai/gpt-5"', False),
        ('model = "claude-opus-4-5"', 'model = "claude-x"\nbase_url = "http://localhost:8000/v1"', False),
        ('model = "litellm/deepseek/x"', 'model = "litellm/deepseek/y"', True),
        ('model = "litellm/deepseek/x"', 'model = "litellm/moonshot/y"', False),
        ('model = "scripted:mine.json"', 'model = "scripted:evil.json"', False),
        ('model = "a"\nbase_url = "https://models.example/v1"', 'model = "claude-x"', True),
    ],
)
def test_a_project_names_models_of_the_users_own_provider_only(
    project: Path, env: dict[str, str], own: str, given: str, is_free: bool
) -> None:
    """A script makes calls that no model has thought of, and another provider is sent the files."""
    user_file(env).parent.mkdir(parents=True)
    user_file(env).write_text(own)
    plain = load({}, env, project)["model"]
    write(project, given)
    found = load({}, env, project)
    assert found.unapproved == (() if is_free else ("model",))
    assert is_free or found["model"] == plain
    load({"model": "scripted:mine.json"}, env, project).check_approved()
    approve(found, env)
    assert str(load({}, env, project)["model"]) in given


@pytest.mark.parametrize("name", sorted(WIDENING))
def test_a_cloned_project_widens_nothing_until_its_file_is_approved(
    project: Path, env: dict[str, str], name: str
) -> None:
    """What a person sets with a flag needs no approval; what the file sets has no effect without one."""
    plain = load({}, env, project)[name]
    write(project, WIDENING[name] + "\n")
    found = load({}, env, project)
    assert (found[name], found.unapproved) == (plain, (name,))
    with pytest.raises(UsageError, match=f"{name}.*treenail config approve"):
        found.check_approved()
    approve(load({}, env, project), env)
    found = load({}, env, project)
    assert found[name] != plain and found.unapproved == ()


def test_an_approval_is_for_that_content_at_that_place(project: Path, env: dict[str, str]) -> None:
    """A changed file, its agent file, or a copy in another project has to be approved again."""
    (project / "agent.toml").write_text('instructions = "good"')
    file = write(project, 'check = "make test"\nagent = "agent.toml"\n')
    approve(load({}, env, project), env)
    assert load({}, env, project)["check"] == "make test"
    other = project.with_name("other")
    shutil.copytree(project, other)
    assert load({}, env, other).unapproved == ("check", "agent")
    (project / "agent.toml").write_text('instructions = "evil"')
    assert load({}, env, project).unapproved == ("check", "agent")
    approve(load({}, env, project), env)
    file.write_text(file.read_text() + "allow_network = true\n")
    assert load({}, env, project)["allow_network"] is False
    load({"check": "true", "agent": "x", "allow_network": True}, env, project).check_approved()


def test_an_approval_shows_all_that_it_covers(project: Path, env: dict[str, str]) -> None:
    """What a flag, a variable or a run overrides now has an effect later, so it is shown as well."""
    write(
        project, 'check = "curl evil"\nsandbox = "off"\nallow_network = true\nbackground_write = ["build"]\n'
    )
    named = ("sandbox", "allow_network", "background_write", "check")
    overriding = env | {"TREENAIL_SANDBOX": "auto"}
    found = load({"check": "pytest"}, overriding, project, {"allow_network": "false"})
    assert (found.unapproved, found.waiting) == (named, ("background_write",))
    assert "curl evil" in found.wanted and "allow_network = True" in found.wanted and "'off'" in found.wanted
    with pytest.raises(UsageError, match=r"check, which you have .* with flags: background_write$"):
        found.check_approved()
    assert found["check"] == "pytest"


def test_a_project_may_be_stricter_than_its_user(project: Path, env: dict[str, str]) -> None:
    """Narrowing needs no approval."""
    text = 'sandbox = "require"\npermissions = "ask"\nmax_cost = 0.1\njudge = true\nmodel = "small"\n'
    write(project, text)
    found = load({}, env, project)
    assert (found["sandbox"], found["permissions"], found["max_cost"]) == ("require", "ask", 0.1)
    assert found.unapproved == ()


def test_the_users_own_settings_are_below_the_projects(project: Path, env: dict[str, str]) -> None:
    """They need no approval, and what they forbid a project cannot allow."""
    own = user_file(env)
    own.parent.mkdir(parents=True)
    own.write_text('permissions = "ask"\nallow_network = true\nmax_cost = 9\nallow_write = ["~/shared"]\n')
    file = write(project, 'permissions = "auto"\nmax_cost = 5\n')
    found = load({}, env, project)
    assert (found["permissions"], found["max_cost"], found["allow_network"]) == ("ask", 5.0, True)
    assert (found.unapproved, found.chosen["max_cost"].source) == (("permissions",), str(file))
    assert found.chosen["allow_network"].source == str(own)
    assert found.paths("allow_write") == (Path.home() / "shared",)


def test_settings_that_an_agent_could_write_are_not_the_users(tmp_path: Path) -> None:
    """In a workspace that holds the settings directory, neither settings nor approvals count."""
    env = {"XDG_CONFIG_HOME": str(tmp_path / "home" / ".config")}
    home = tmp_path / "home"
    own = user_file(env)
    own.parent.mkdir(parents=True)
    own.write_text("allow_network = true\n")
    write(home, 'sandbox = "off"\n')
    approve(load({}, env, home), env)
    found = load({}, env, home)
    assert (found["allow_network"], found["sandbox"]) == (False, "auto")


@pytest.mark.parametrize("linked", ["file", "directory", "home", "above", "on the way"])
def test_settings_that_a_link_leads_to_in_the_workspace_are_not_the_users(
    tmp_path: Path, linked: str
) -> None:
    """An agent in the workspace could change the file, or the link."""
    home, space = tmp_path / "home", tmp_path / "space"
    kept = space / "kept" if linked != "on the way" else tmp_path / "kept"
    place = home / ".config" / "treenail"
    directory = space
    if linked == "home":
        space.mkdir()
        home.symlink_to(space)
    if linked == "above":
        space.mkdir()
        directory = tmp_path / "link"
        directory.symlink_to(space)
        home = space / "home"
        place = home / ".config" / "treenail"
    if linked in ("home", "above"):
        place.mkdir(parents=True)
        kept = place
    else:
        kept.mkdir(parents=True)
    if linked == "directory":
        place.parent.mkdir(parents=True)
        place.symlink_to(kept)
    if linked == "file":
        place.mkdir(parents=True)
        for name in ("treenail.toml", "approved"):
            (place / name).symlink_to(kept / name)
    if linked == "on the way":
        space.mkdir()
        (space / "way").symlink_to(kept)
        place.parent.mkdir(parents=True)
        place.symlink_to(space / "way")
    env = {"HOME": str(home)}
    (kept / "treenail.toml").write_text('allow_network = true\nallow = ["run_command"]\n')
    write(space, 'sandbox = "off"\n')
    approve(load({}, env, directory), env)
    found = load({}, env, directory)
    assert (found["allow_network"], found["sandbox"], found.rules) == (False, "auto", ())
    assert found.unapproved == ("sandbox",)
    (tmp_path / "elsewhere").mkdir()
    assert load({}, env, tmp_path / "elsewhere")["allow_network"] is True
