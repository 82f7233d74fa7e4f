"""A run that goes in circles is reported once, and refused if so configured."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from treenail.containment import Decision, ExecutionConfig, ExecutionContext, LoopPolicy, WrapOptions
from treenail.containment.loops import LoopDetector

Config = Callable[..., ExecutionConfig]


def reports(ctx: ExecutionContext) -> list[str]:
    return [event.reason for event in ctx.get_snapshot().events if event.event_type == "loop_detected"]


def test_the_same_tool_three_times_is_reported_once(config: Config) -> None:
    """A repeat is reported when it is one, and the calls go on."""
    ctx = ExecutionContext(config(), loops=LoopPolicy())
    for _ in range(10):
        assert ctx.wrap_tool_call(lambda: None, WrapOptions("search")) is Decision.ALLOW
    assert reports(ctx) == ["tool search, 3 times in a row"]
    (event,) = ctx.get_snapshot().events
    assert (event.hook, event.decision) == ("LoopDetector", Decision.ALLOW)


def test_model_calls_are_given_more_room(config: Config) -> None:
    """The same model call is reported from the fifth on."""
    ctx = ExecutionContext(config(), loops=LoopPolicy())
    for _ in range(4):
        ctx.wrap_llm_call(lambda: None, WrapOptions("think"))
    assert reports(ctx) == []
    ctx.wrap_llm_call(lambda: None, WrapOptions("think"))
    assert reports(ctx) == ["llm think, 5 times in a row"]


def test_a_cycle_is_reported_once_wherever_it_is_entered(config: Config) -> None:
    """read, write, test, read, write, test ... is one cycle."""
    ctx = ExecutionContext(config(), loops=LoopPolicy())
    for _ in range(6):
        for name in ("read", "write", "test"):
            ctx.wrap_tool_call(lambda: None, WrapOptions(name))
    assert reports(ctx) == ["tool read -> tool write -> tool test, 3 times in a row"]


def test_a_call_that_comes_up_all_the_time_is_reported(config: Config) -> None:
    """Five of the newest eight tool calls are the same: reported once, and never refused."""
    ctx = ExecutionContext(config(), loops=LoopPolicy(tool_repeats=9, halt_repeats=99))
    every_other = [name for number in range(10) for name in ("search", f"other-{number}")]
    for name in every_other:
        assert ctx.wrap_tool_call(lambda: None, WrapOptions(name)) is Decision.ALLOW
    assert reports(ctx) == []
    for _ in range(3):
        assert ctx.wrap_tool_call(lambda: None, WrapOptions("search")) is Decision.ALLOW
    assert reports(ctx) == ["tool search, 5 times of late"]


def test_different_arguments_are_different_calls(config: Config) -> None:
    """The fingerprint tells calls of one tool apart."""
    ctx = ExecutionContext(config(), loops=LoopPolicy(halt_repeats=3))
    for page in range(20):
        options = WrapOptions("fetch", fingerprint=f"page={page}")
        assert ctx.wrap_tool_call(lambda: None, options) is Decision.ALLOW
    assert reports(ctx) == []


def test_a_repeat_is_refused_when_configured_and_another_call_breaks_it(config: Config) -> None:
    """The call that would be the fifth in a row is refused, again and again, until something else happens."""
    ctx = ExecutionContext(config(), loops=LoopPolicy(halt_repeats=5))
    search = WrapOptions("search")
    decisions = [ctx.wrap_tool_call(lambda: None, search) for _ in range(7)]
    assert decisions == [Decision.ALLOW] * 4 + [Decision.HALT] * 3
    assert ctx.wrap_tool_call(lambda: None, WrapOptions("think")) is Decision.ALLOW
    assert ctx.wrap_tool_call(lambda: None, search) is Decision.ALLOW
    assert ctx.get_snapshot().step_count == 6


def test_a_cycle_is_refused_when_configured(config: Config) -> None:
    """The call that would complete the fourth turn is refused."""
    ctx = ExecutionContext(config(), loops=LoopPolicy(halt_cycle_turns=4))
    decisions = [
        ctx.wrap_tool_call(lambda: None, WrapOptions(name)) for _ in range(4) for name in ("ask", "answer")
    ]
    assert decisions == [Decision.ALLOW] * 7 + [Decision.HALT]


def test_retries_are_no_loop(config: Config) -> None:
    """Attempts that the containment makes for one call are one call."""
    ctx = ExecutionContext(config(), loops=LoopPolicy(halt_repeats=3))

    def fail() -> None:
        raise OSError

    outcome = ctx.call_tool(fail, WrapOptions("flaky", retry_policy_override=5))
    assert outcome.node.attempts == 6
    assert reports(ctx) == []


def test_children_are_watched_with_their_parent(config: Config) -> None:
    """A loop that goes through child chains is one loop."""
    ctx = ExecutionContext(config(), loops=LoopPolicy(halt_repeats=4))
    children = [ctx.spawn_child() for _ in range(4)]
    decisions = [child.wrap_tool_call(lambda: None, WrapOptions("search")) for child in children]
    assert decisions == [Decision.ALLOW] * 3 + [Decision.HALT]
    assert [len(reports(child)) for child in children] == [0, 0, 1, 1]


def test_nothing_is_watched_unless_asked(config: Config) -> None:
    """Without a policy, repetition is nobody's business."""
    ctx = ExecutionContext(config())
    for _ in range(20):
        ctx.wrap_tool_call(lambda: None, WrapOptions("poll"))
    assert list(ctx.get_snapshot().events) == []


@given(
    noise=st.lists(st.sampled_from("xyz"), max_size=10),
    block=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=8, unique=True),
    turns=st.integers(2, 6),
)
def test_exactly_the_configured_turn_is_refused(noise: list[str], block: list[str], turns: int) -> None:
    """After any history, the call that completes turn N of a cycle, and no call before it, is refused."""
    policy = LoopPolicy(
        tool_repeats=99, llm_repeats=99, cycle_turns=99, halt_repeats=turns, halt_cycle_turns=turns
    )
    detector = LoopDetector(policy)
    for number, name in enumerate(noise):
        detector.observe("tool", name, str(number))
    calls = block * turns
    findings = [detector.observe("tool", name) for name in calls]
    assert [finding is not None and finding.must_halt for finding in findings] == [False] * (
        len(calls) - 1
    ) + [True]
