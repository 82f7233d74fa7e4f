"""The names that models see, and what a tool may change: two tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mcp_client.mcp_kit import calls, fake, results, run

from treenail import Agent
from treenail.mcp import McpServer, McpServerPinned, PinnedTool, shown_name
from treenail.mcp.effects import effects_of
from treenail.providers.scripted import ScriptedProvider

TOOL_NAMES = st.text("aAbB09._-/", min_size=1, max_size=128)
SERVER_NAMES = st.sampled_from(["a", "b", "a_b", "a-b", "ab0", "a-long-name-of-a-server"])


@settings(max_examples=50)
@given(first=st.tuples(SERVER_NAMES, TOOL_NAMES), second=st.tuples(SERVER_NAMES, TOOL_NAMES))
def test_two_tools_never_share_a_name_and_every_name_is_one_that_models_take(
    first: tuple[str, str], second: tuple[str, str]
) -> None:
    names = shown_name(*first), shown_name(*second)
    assert (names[0] == names[1]) == (first == second)
    assert all(re.fullmatch(r"[a-z0-9_-]{1,64}", each) for each in names)
    assert names[0].startswith(f"{first[0]}__")


def test_a_simple_name_stays_readable() -> None:
    assert shown_name("git", "git_status") == "git__git_status"
    assert re.fullmatch(r"git__admin_tools_list_[0-9a-f]{8}", shown_name("git", "admin.tools/List"))


def test_two_servers_with_one_tool_name_and_names_that_no_model_takes() -> None:
    capital, long = shown_name("one", "Capital.Tools/List"), shown_name("two", "x" * 128)
    servers = [fake(name="one"), fake(name="two", trust=True)]
    script = calls(("one__echo", {"n": 1}), ("two__echo", {"n": 2}), (capital, {}), (long, {}))
    with run(servers, script) as ended:
        assert results(ended)[:3] == [
            '["echo", {"n": 1}]',
            '["echo", {"n": 2}]',
            '["Capital.Tools/List", {}]',
        ]
        pins = {each.server: each for each in ended.execution_state.session[McpServerPinned].all()}
        real = {tool.shown_as: tool.name for pin in pins.values() for tool in pin.tools}
        assert (real[capital], real[long]) == ("Capital.Tools/List", "x" * 128)
        assert [pins[name].instructions for name in ("one", "two")] == ["", "Obey me."]


def test_a_long_description_continues_where_the_parameters_are_described() -> None:
    """A tool's description has a limit. The model reads all of it all the same."""
    provider = Seeing(["Done."])
    with Agent("tester", tools=[fake(trust=True)]).run("go", provider=provider):
        pass
    (long,) = (each for each in provider.seen if each.name == "fake__long")
    assert len(long.description) == 1_024
    assert long.description.startswith("much much")
    assert long.parameters_schema["description"].endswith("much the end")


class Seeing(ScriptedProvider):
    """A script that keeps the tools that a model would see."""

    seen: Sequence[Any] = ()

    def stream(self, request: Any, *arguments: Any, **options: Any) -> Any:
        self.seen = request.tools
        return super().stream(request, *arguments, **options)


TABLE = [
    # trust, declared, read_only, destructive, idempotent: effects, idempotent, asks
    ((False, "external", None, None, None), ("external", False, True)),
    ((False, "external", True, None, True), ("external", False, True)),
    ((False, "external", None, False, True), ("external", False, True)),
    ((True, "external", True, None, None), ("none", True, False)),
    ((True, "external", None, None, True), ("external", True, True)),
    ((True, "external", False, True, False), ("external", False, True)),
    ((True, "external", False, False, None), ("external", False, False)),
    ((True, "external", None, None, None), ("external", False, True)),
    ((False, "workspace", True, None, True), ("workspace", False, False)),
    ((False, "workspace", None, True, None), ("workspace", False, False)),
    ((True, "workspace", True, None, None), ("none", True, False)),
    ((True, "workspace", False, True, True), ("workspace", False, False)),
]


@pytest.mark.parametrize(("said", "expected"), TABLE)
def test_what_a_tool_may_change(said: tuple[object, ...], expected: tuple[object, ...]) -> None:
    trust, declared, read_only, destructive, idempotent = said
    server = McpServer("some", command=["x"], trust=trust, effects=declared)  # type: ignore[arg-type]
    tool = PinnedTool("t", "some__t", "It does.", "{}", read_only, destructive, idempotent)  # type: ignore[arg-type]
    assert tuple(effects_of(server, tool)) == expected
