"""What must hold, whatever happened: the log compared with what the world saw."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING
from uuid import UUID

from simulation.actors import ASKED_TOOLS, PRICE_USD, Counted
from simulation.disk import expected_files, workspace_name
from simulation.world import World
from treenail.containment import RetryTaken
from treenail.conversation import InnerMessage, Replayer, ReplayItem, enable_inner_message_recording
from treenail.history import diagnose
from treenail.log import MemoryLog
from treenail.providers.wire_formats import to_anthropic, to_openai_chat, to_openai_responses
from treenail.state import Session
from treenail.testing.wire_rules import (
    anthropic_violations,
    openai_chat_violations,
    openai_responses_violations,
)
from treenail.tools import HoldAnswered, ToolInvoked, ToolStarted
from treenail.tools.events import OutboxPut
from treenail.turns import TurnState, spent_usd_of, turn_state

if TYPE_CHECKING:
    from simulation.run import SimulatedRun

_ROUNDING_USD = 1e-9


def check_run(world: World, store: MemoryLog, run: SimulatedRun) -> None:
    """Compare one run, children included, with the world."""
    say = _Problems(world, run.name)
    family = [run.session_id, *_below(store, run.session_id)]
    sessions = [_opened(store, world, each) for each in family]
    root = sessions[0]
    committed = {
        run.disk.attempt(workspace_name(session.session_id, str(each.call_id)))
        for session in sessions
        for each in session[ToolInvoked].all()
        if each.success
    }
    _check_files(say, run, committed)
    for session in sessions:
        _check_state(say, session)
        _check_effects(say, world, session)
        _check_holds(say, run, session)
        _check_prefixes(say, session)
    _check_ceilings(say, world, run, root)
    _check_ending(say, world, run, root)
    for session in sessions:
        session.close()


def check_world(world: World, store: MemoryLog, runs: Sequence[SimulatedRun]) -> None:
    """Check what holds for all runs together."""
    known = {str(each.session_id) for each in store.sessions()}
    strangers = [each for each in world.delivered if each.partition(":")[0] not in known]
    if strangers:
        world.problems.append(f"deliveries of nobody's: {strangers}")


class _Problems:
    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name

    def __call__(self, text: str) -> None:
        self._world.problems.append(f"{self._name}: {text}")


def _below(store: MemoryLog, session_id: UUID) -> Iterable[UUID]:
    for each in store.sessions(parent_id=session_id):
        yield each.session_id
        yield from _below(store, each.session_id)


def _opened(store: MemoryLog, world: World, session_id: UUID) -> Session:
    session = Session.open(store, session_id, read_only=True, clock=world.clock)
    enable_inner_message_recording(session)
    return session


def _check_files(say: _Problems, run: SimulatedRun, committed: set[str]) -> None:
    expected = expected_files(run.disk, committed, {f"person of {run.name}"})
    if run.disk.open_call is not None:
        say(f"the call {run.disk.open_call.call_id} still holds the workspace")
    for path in sorted(expected.keys() | run.disk.files.keys()):
        there, wanted = run.disk.files.get(path), expected.get(path)
        if there != wanted:
            say(f"{path} holds {there!r}, but committed calls and people left {wanted!r}")


def _check_state(say: _Problems, session: Session) -> None:
    counted = [each.call_id for each in session[Counted].all()]
    wanted = [
        str(each.call_id)
        for each in session[ToolInvoked].all()
        if each.success and each.name in ("write", "write_two")
    ]
    if counted != wanted:
        say(f"the state counts {counted}, but the committed calls are {wanted}")


def _check_effects(say: _Problems, world: World, session: Session) -> None:
    ended = {each.attempt_id: each for each in session[ToolInvoked].all()}
    for started in session[ToolStarted].all():
        happened = world.effects[f"{started.tool_name} {started.call_id}"]
        if started.effects == "external" and happened > 1:
            say(f"{started.call_id} acted outside {happened} times")
        end = ended.get(started.attempt_id)
        if end is not None and end.success and started.effects == "external" and not happened:
            say(f"{started.call_id} is said to have succeeded, and never happened")
    sent = {each.key for each in session[OutboxPut].all()}
    mine = {each for each in world.delivered if each.startswith(f"{session.session_id}:")}
    mailed = sum(each.success and each.name == "mail" for each in session[ToolInvoked].all())
    if len(sent) != mailed:
        say(f"{mailed} calls have put a message into the outbox, and it holds {len(sent)}")
    if mine - sent:
        say(f"delivered, although their calls were not committed: {sorted(mine - sent)}")


def _check_holds(say: _Problems, run: SimulatedRun, session: Session) -> None:
    answers = {each.hold_id: each for each in session[HoldAnswered].all()}
    for each in session[ToolInvoked].all():
        answer = answers.get(each.hold_id)
        if (
            each.success
            and run.is_asked
            and each.name in ASKED_TOOLS
            and (answer is None or not answer.approved)
        ):
            say(f"{each.call_id} ran, although a person had not approved it")


def _check_prefixes(say: _Problems, session: Session) -> None:
    replayer, known = Replayer(), ""
    for envelope, value in session.events():
        replayer.add(envelope.seq, value, envelope.type)
        replayed = replayer.input()
        if not replayed.items or replayed.digest == known:
            continue
        known = replayed.digest
        found = _violations(replayed.items)
        if found:
            say(f"a provider would refuse the first {envelope.seq} events: {found[0]}")
            return


def _violations(items: Sequence[ReplayItem]) -> list[str]:
    return [
        *openai_chat_violations(to_openai_chat(items)),
        *openai_responses_violations(to_openai_responses(items)[1]),
        *anthropic_violations(to_anthropic(items)[1]),
    ]


def _check_ceilings(say: _Problems, world: World, run: SimulatedRun, root: Session) -> None:
    charged, ceiling = world.spent_usd[run.name], run.limits.max_cost_usd or 0.0
    if charged > ceiling + _ROUNDING_USD:
        say(f"the vendor charged ${charged:.4f} under a ceiling of ${ceiling}")
    booked = spent_usd_of(root) or 0.0
    if booked + _ROUNDING_USD < charged:
        say(f"the vendor charged ${charged:.4f}, and the ledger says ${booked:.4f}")
    if booked > charged + PRICE_USD * (world.requests[run.name] + run.lives):
        say(f"the ledger says ${booked:.4f}, and the vendor charged ${charged:.4f}")
    if world.requests[run.name] > (run.limits.max_steps or 0):
        say(f"{world.requests[run.name]} requests under a ceiling of {run.limits.max_steps} steps")


def _check_ending(say: _Problems, world: World, run: SimulatedRun, root: Session) -> None:
    state = turn_state(root)
    if not state.is_terminal or state is TurnState.INTERRUPTED:
        say(f"the run ended as {state.value}")
    if state is TurnState.COMPLETED:
        said = [each.content for each in root[InnerMessage].all() if each.role == "assistant"][-1]
        stop = world.stops.get((run.name, said))
        if stop != "end":
            say(f"the run is completed, but its last answer, {said!r}, ended as {stop}")
    if len(root[RetryTaken].all()) > (run.limits.max_retries or 0):
        say(f"{len(root[RetryTaken].all())} retries under a ceiling of {run.limits.max_retries}")
    for check in diagnose(root).checks:
        if check.status == "failed":
            say(f"diagnostics: {check.id}: {check.message}")
