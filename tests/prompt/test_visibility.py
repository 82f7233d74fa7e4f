"""How much of a section is shown, and how the model asks for more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_kit import Plan, Review, call, everything, look, named_tool, plans, prompt_of

from treenail.errors import (
    PromptEvaluationError,
    PromptRenderError,
    PromptValidationError,
    VisibilityExpansionRequired,
)
from treenail.log import MemoryLog, SlicePolicy
from treenail.prompt import (
    MAX_EXPANSIONS,
    MarkdownSection,
    Prompt,
    SectionVisibility,
    SetVisibilityOverride,
    VisibilityOverrides,
    expand,
    register_visibility,
)
from treenail.prompt.visibility import ClearAllVisibilityOverrides, ClearVisibilityOverride
from treenail.state import (
    CompositeSnapshot,
    ExecutionState,
    ResourceRegistry,
    Session,
    snapshots_equivalent,
    spec_of,
)
from treenail.tools import ToolCall, ToolResult, ToolRunner

FULL, SUMMARY = SectionVisibility.FULL, SectionVisibility.SUMMARY


def session_with(*events: object) -> Session:
    session = Session()
    register_visibility(session)
    session.dispatch_all(events)
    return session


def state_of(session: Session) -> CompositeSnapshot:
    return ExecutionState(session=session, resources=ResourceRegistry()).snapshot()


# --- the slice -------------------------------------------------------------------------------------

paths = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3).map(tuple)
changes = st.one_of(
    st.builds(SetVisibilityOverride, paths, st.sampled_from(SectionVisibility)),
    st.builds(ClearVisibilityOverride, paths),
    st.builds(ClearAllVisibilityOverrides),
)


def as_dict(events: list[Any]) -> dict[tuple[str, ...], SectionVisibility]:
    model: dict[tuple[str, ...], SectionVisibility] = {}
    for each in events:
        if isinstance(each, SetVisibilityOverride):
            model[each.path] = each.visibility
        elif isinstance(each, ClearVisibilityOverride):
            model.pop(each.path, None)
        else:
            model.clear()
    return model


@settings(max_examples=60, deadline=None)
@given(st.lists(changes, max_size=20))
def test_overrides_fold_like_a_dictionary(events: list[Any]) -> None:
    """In the session that saw the events, and in one that reads them from the log."""
    log = MemoryLog()
    session = Session(log=log)
    register_visibility(session)
    session.dispatch_all(events)
    held = session[VisibilityOverrides].latest()
    assert (held.overrides if held else {}) == as_dict(events)
    assert len(session[VisibilityOverrides].all()) <= 1
    session.close()
    again = Session.open(log, session.session_id)
    register_visibility(again)
    held = again[VisibilityOverrides].latest()
    assert (held.overrides if held else {}) == as_dict(events)


@settings(max_examples=30, deadline=None)
@given(st.lists(changes, max_size=6), st.lists(changes, min_size=1, max_size=6))
def test_overrides_are_rolled_back(before: list[Any], during: list[Any]) -> None:
    session = session_with(*before)
    transaction = session.begin()
    transaction.session.dispatch_all(during)
    transaction.rollback()
    held = session[VisibilityOverrides].latest()
    assert (held.overrides if held else {}) == as_dict(before)


def test_overrides_are_working_state() -> None:
    assert spec_of(VisibilityOverrides).policy is SlicePolicy.STATE
    assert session_with().policy_of(VisibilityOverrides) is SlicePolicy.STATE


def test_registering_again_changes_nothing() -> None:
    session = session_with()
    register_visibility(session)
    session.dispatch(SetVisibilityOverride(("a",), FULL))
    held = session[VisibilityOverrides].latest()
    assert held is not None
    assert held.get(("a",)) is FULL
    assert held.get(("b",)) is None


# --- precedence ------------------------------------------------------------------------------------


def guide(**fields: Any) -> MarkdownSection[Any]:
    return MarkdownSection("Guide", "whole", summary="short", **fields)


@pytest.mark.parametrize(
    ("own", "held", "explicit", "shown"),
    [
        (FULL, None, None, "whole"),
        (SUMMARY, None, None, "short"),
        (SUMMARY, FULL, None, "whole"),
        (FULL, SUMMARY, None, "short"),
        (SUMMARY, FULL, SUMMARY, "short"),
        (FULL, SUMMARY, FULL, "whole"),
        (lambda: SUMMARY, FULL, None, "whole"),
        (lambda *, session: FULL if session is None else SUMMARY, None, None, "short"),
    ],
)
def test_the_caller_wins_over_the_session_and_the_session_over_the_section(
    own: Any, held: SectionVisibility | None, explicit: SectionVisibility | None, shown: str
) -> None:
    session = session_with(*([] if held is None else [SetVisibilityOverride(("guide",), held)]))
    said = None if explicit is None else {"guide": explicit}
    text = prompt_of(guide(visibility=own)).render(session, visibility=said).text
    assert text.startswith(f"## 1. Guide (guide)\n\n{shown}")


def test_a_section_can_refuse_overrides() -> None:
    """Then it stays as it says, nobody is told how to open it, and there is nothing to open it with."""
    prompt = prompt_of(guide(visibility=SUMMARY, accepts_overrides=False, tools=[look]))
    result = prompt.render(session_with(SetVisibilityOverride(("guide",), FULL)))
    assert result.text == "## 1. Guide (guide)\n\nshort"
    assert result.tools == ()


def test_an_override_for_a_section_that_is_not_there_does_no_harm() -> None:
    """It may belong to another prompt, or to an older form of this one."""
    session = session_with(SetVisibilityOverride(("gone",), SUMMARY))
    assert "whole" in prompt_of(guide()).render(session).text


def test_the_caller_cannot_set_what_is_not_there() -> None:
    with pytest.raises(PromptValidationError, match=r"no section 'gone' .*\(it has: guide\)"):
        prompt_of(guide()).render(visibility={"gone": FULL})


def test_a_summary_that_does_not_exist_cannot_be_asked_for() -> None:
    session = session_with(SetVisibilityOverride(("a",), SUMMARY))
    with pytest.raises(PromptRenderError, match=r"section 'a': .*ClearVisibilityOverride\(\('a',\)\)"):
        prompt_of(MarkdownSection("A", "x")).render(session)


def test_a_summary_has_its_values_in_place() -> None:
    section = MarkdownSection("A", "$x and $y", summary="Only $x.", visibility=SUMMARY)
    assert "Only 1." in prompt_of(section).with_variables(x=1, y=2).render().text


# --- the tools -------------------------------------------------------------------------------------


def handbook() -> Prompt[str]:
    """Return a prompt with a summarised section with tools, one without, and one that is open."""
    return prompt_of(
        MarkdownSection("Open", "in the open"),
        MarkdownSection(
            "Text",
            "the text",
            summary="Texts.",
            visibility=SUMMARY,
            children=[
                MarkdownSection("More", "more text", summary="More.", visibility=SUMMARY),
                MarkdownSection("Off", "never", enabled=False),
                MarkdownSection("Rest", "the rest"),
            ],
        ),
        MarkdownSection(
            "Work",
            "the work",
            summary="Works.",
            visibility=SUMMARY,
            children=[
                MarkdownSection(
                    "Power", "the power", summary="Powers.", visibility=SUMMARY, tools=[named_tool("zap")]
                )
            ],
        ),
        MarkdownSection(
            "Pinned",
            "x",
            summary="Pins.",
            visibility=SUMMARY,
            accepts_overrides=False,
            tools=[named_tool("pin")],
        ),
    )


def test_each_summary_says_how_to_see_the_rest() -> None:
    result = handbook().render()
    assert 'Call read_section with section_key "text"' in result.text
    assert 'Call open_sections with section_keys ["work"]' in result.text
    assert result.text.endswith("Pins.")
    assert [each.name for each in result.tools] == ["open_sections", "read_section"]
    assert all(each.effects == "none" for each in result.tools)


def test_only_the_tool_that_is_needed_is_offered() -> None:
    with_tools = prompt_of(guide(visibility=SUMMARY, tools=[look]))
    without = prompt_of(guide(visibility=SUMMARY))
    neither = prompt_of(guide(tools=[look]))
    assert [each.name for each in with_tools.render().tools] == ["open_sections"]
    assert [each.name for each in without.render().tools] == ["read_section"]
    assert [each.name for each in neither.render().tools] == ["look"]


def test_tools_of_a_disabled_subsection_do_not_count() -> None:
    off = MarkdownSection("Off", "x", enabled=lambda: False, tools=[look])
    prompt = prompt_of(guide(visibility=SUMMARY, children=[off]))
    assert [each.name for each in prompt.render().tools] == ["read_section"]


def test_reading_a_section_returns_its_whole_text_and_changes_nothing() -> None:
    """Its subsections are in it, with the numbers that they would have; what is disabled is not."""
    session = session_with()
    before = state_of(session)
    result = call(handbook(), session, "read_section", section_key="text")
    assert result.success
    assert result.render() == (
        "## 2. Text (text)\n\nthe text\n\n### 2.1. More (text.more)\n\nmore text\n\n"
        "### 2.2. Rest (text.rest)\n\nthe rest"
    )
    assert snapshots_equivalent(before, state_of(session))
    assert "the text" not in handbook().render(session).text


def test_a_section_below_a_summarised_one_can_be_read_by_itself() -> None:
    result = call(handbook(), session_with(), "read_section", section_key="text.more")
    assert result.render() == "### 2.1. More (text.more)\n\nmore text"


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("open", "shown in full already"),
        ("work", "has tools; open it: open_sections"),
        ("nope", "There is no section 'nope'. Summarised are: text, text.more, text.rest, work, work.power."),
        ("text.off", "There is no section"),
        ("pinned", "only available as its summary"),
        ("", "There is no section"),
    ],
)
def test_what_cannot_be_read_is_explained_to_the_model(key: str, says: str) -> None:
    result = call(handbook(), session_with(), "read_section", section_key=key)
    assert not result.success
    assert says in result.message


def open_them(session: Session, *keys: str) -> VisibilityExpansionRequired:
    with pytest.raises(VisibilityExpansionRequired) as caught:
        call(handbook(), session, "open_sections", section_keys=list(keys), reason="to work")
    return caught.value


def test_opening_a_section_reaches_the_loop() -> None:
    required = open_them(session_with(), "work")
    assert required.requested_overrides == {("work",): FULL}
    assert required.section_keys == ("work",)
    assert required.reason == "to work"


def test_opening_a_section_inside_opens_what_covers_it() -> None:
    required = open_them(session_with(), "work.power", "text.rest")
    assert required.requested_overrides == {("work",): FULL, ("work", "power"): FULL, ("text",): FULL}


def test_sections_that_are_open_already_are_passed_over() -> None:
    required = open_them(session_with(), "open", "work", "work")
    assert required.section_keys == ("work",)
    assert required.requested_overrides == {("work",): FULL}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["open"], "Nothing to open"),
        ([], "Nothing to open"),
        (["work", "nope"], "There is no section 'nope'"),
        (["pinned"], "only available as its summary"),
    ],
)
def test_what_cannot_be_opened_is_explained_to_the_model(keys: list[str], says: str) -> None:
    result = call(handbook(), session_with(), "open_sections", section_keys=keys, reason="r")
    assert not result.success
    assert says in result.message


def test_an_expansion_from_a_tool_of_ones_own_leaves_no_trace() -> None:
    def dig(*, context: Any) -> ToolResult[None]:
        """Dig."""
        context.session.dispatch(Review(1))
        context.session.dispatch(SetVisibilityOverride(("open",), SUMMARY))
        raise VisibilityExpansionRequired(requested_overrides={("text",): FULL}, section_keys=["text"])

    session = session_with()
    before = state_of(session)
    with pytest.raises(VisibilityExpansionRequired):
        call(prompt_of(MarkdownSection("A", "x", tools=[dig])), session, "dig")
    assert snapshots_equivalent(before, state_of(session))


# --- what the loop does with it --------------------------------------------------------------------


def test_a_loop_opens_sections_by_dispatching_what_expand_says() -> None:
    session = session_with()
    prompt = handbook()
    session.dispatch_all(expand(open_them(session, "work.power"), expansions=0, prompt_name=prompt.name))
    result = prompt.render(session)
    assert "the power" in result.text
    assert "zap" in result.tool_registry
    assert call(prompt, session, "zap", path="p").render() == "looked at p"


@settings(max_examples=40, deadline=None)
@given(plans())
def test_opening_everything_that_is_closed_ends_with_everything_shown(made: tuple[Plan, ...]) -> None:
    """Each expansion opens something, and no more of them are needed than there are levels."""
    prompt = prompt_of(*(each.section() for each in made))
    session = session_with()
    for expansions in range(4):
        result = prompt.render(session)
        closed = [each for each in result.sections if each.visibility is SUMMARY]
        if not closed:
            break
        required = VisibilityExpansionRequired(requested_overrides={each.path: FULL for each in closed})
        session.dispatch_all(expand(required, expansions=expansions))
    enabled = {
        plan.path
        for plan in everything(made)
        if all(each.enabled for each in everything(made) if plan.path[: len(each.path)] == each.path)
    }
    assert {each.path for each in prompt.render(session).sections} == enabled


@settings(max_examples=40, deadline=None)
@given(plans(), st.data())
def test_an_override_counts_whatever_was_rendered_before(made: tuple[Plan, ...], data: st.DataObject) -> None:
    """An override changes what is shown, and clearing it ends that."""
    prompt = prompt_of(*(each.section() for each in made))
    before = prompt.render()
    chosen = data.draw(
        st.dictionaries(
            st.sampled_from([each.path for each in everything(made)]), st.sampled_from(SectionVisibility)
        )
    )
    session = session_with(*(SetVisibilityOverride(path, shown) for path, shown in chosen.items()))
    anew = prompt_of(*(each.section(by_function=True) for each in made))
    for given_as in ({"session": session}, {"visibility": chosen}):
        one, other = prompt.render(**given_as), anew.render(**given_as)
        assert (one.text, one.sections) == (other.text, other.sections)
        assert one.tool_registry.keys() == other.tool_registry.keys()
    session.dispatch(ClearAllVisibilityOverrides())
    after = prompt.render(session)
    assert (after.text, after.sections) == (before.text, before.sections)


def test_expansions_have_an_end() -> None:
    required = VisibilityExpansionRequired(requested_overrides={("a",): FULL}, section_keys=["a"])
    assert expand(required, expansions=MAX_EXPANSIONS - 1) == (SetVisibilityOverride(("a",), FULL),)
    with pytest.raises(PromptEvaluationError, match="10 times") as caught:
        expand(required, expansions=MAX_EXPANSIONS, prompt_name="p")
    assert (caught.value.phase, caught.value.prompt_name) == ("request", "p")


def test_an_expansion_that_asks_for_nothing_is_an_error() -> None:
    """The loop would go round without end."""
    with pytest.raises(PromptEvaluationError, match="named none") as caught:
        expand(VisibilityExpansionRequired(), expansions=0)
    assert caught.value.phase == "request"


def test_functions_see_the_session_while_a_section_is_read() -> None:
    """What is read is the section as it is now, not as it was when the prompt was rendered."""

    @dataclass(frozen=True)
    class Ready:
        pass

    section = MarkdownSection(
        "Later", "now it is", enabled=lambda *, session: session is not None and bool(session[Ready].all())
    )
    prompt = prompt_of(guide(visibility=SUMMARY, children=[section]))
    session = session_with()
    rendered = prompt.render(session)
    session.dispatch(Ready())
    runner = ToolRunner(ExecutionState(session=session, resources=ResourceRegistry()), rendered.tool_registry)
    result = runner.execute(ToolCall("c", "read_section", {"section_key": "guide"}))
    assert result.render().endswith("now it is")
