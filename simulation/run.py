"""One simulated world from its beginning to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from uuid import UUID

from simulation.actors import AGENT, JUDGED, LIFE, SimulatedModel, edit_files, interrupt
from simulation.disk import Disk, SimulatedFilesystem
from simulation.oracle import check_run, check_world
from simulation.store import SimulatedLog
from simulation.world import Killed, Life, Stop, World
from treenail.clock import ids_from
from treenail.containment import CancellationToken, Limits
from treenail.conversation import enable_inner_message_recording
from treenail.errors import LeaseHeldError, LogError, StaleWorkspaceError, WorkspaceBusyError
from treenail.log import MemoryLog
from treenail.state import ExecutionState, ResourceRegistry, Session
from treenail.subagents import with_subagents
from treenail.tools import Outbox, PermissionMode, Permissions, answer_hold, pending_holds
from treenail.tools.events import OutboxPut
from treenail.turns import InnerLoop, ModelAdapter, RetryPolicy, TurnState, contain, newest_turn, turn_state
from treenail.workspace import Filesystem

MAX_LIVES = 300
"""How often a run is taken up again; it must have ended by then."""

MAX_TIME_S = 4 * 3600.0

GRACE_S = 10.0
"""How long a run may take to end after its time is up."""


@dataclass
class SimulatedRun:
    """One run of an agent, and what it works on."""

    name: str
    session_id: UUID
    disk: Disk
    limits: Limits
    is_asked: bool
    has_children: bool
    is_judged: bool
    is_over: bool = False
    lives: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a world."""

    seed: int
    problems: tuple[str, ...]
    trace: str
    strikes: tuple[str, ...]
    met: dict[tuple[str, str], int]
    simulated_s: float


def simulate(seed: int, spared: frozenset[str] = frozenset()) -> Outcome:
    """Let a world run from its seed; `spared` are faults that are left out."""
    world = World(seed, spared)
    logging.disable(logging.CRITICAL)
    with ids_from(world.rng("ids")):
        world.loop.set_exception_handler(lambda _, context: _unhandled(world, context))
        asyncio.set_event_loop(world.loop)
        try:
            world.loop.run_until_complete(_live(world))
        except Stop as error:
            world.problems.append(str(error))
        finally:
            _finish(world)
            logging.disable(logging.NOTSET)
    return Outcome(
        seed,
        tuple(world.problems),
        "\n".join(world.trace) + "\n",
        tuple(map(str, world.strikes)),
        dict(world.met),
        world.loop.time(),
    )


def _finish(world: World) -> None:
    asyncio.set_event_loop(None)
    for task in asyncio.all_tasks(world.loop):
        task.cancel()
    with contextlib.suppress(Stop, RuntimeError):
        world.loop.run_until_complete(asyncio.sleep(0))
    world.loop.close()


def _unhandled(world: World, context: dict[str, object]) -> None:
    error = context.get("exception")
    if not isinstance(error, Killed | None):
        world.problems.append(f"an exception reached the event loop: {error!r}")


async def _live(world: World) -> None:
    store = MemoryLog(clock=world.clock, heartbeat=False)
    rng = world.rng("runs")
    runs = [_make_run(world, f"r{number}") for number in range(rng.randint(1, 3))]
    async with asyncio.TaskGroup() as group:
        for run in runs:
            group.create_task(_see_through(world, store, run))
    for run in runs:
        check_run(world, store, run)
    check_world(world, store, runs)


def _make_run(world: World, name: str) -> SimulatedRun:
    chosen = world.rng("run", name)
    limits = Limits(
        max_cost_usd=chosen.choice((0.05, 0.12, 1.0, 1.0)),
        max_steps=chosen.choice((8, 20, 60, 200)),
        max_retries=chosen.choice((3, 20)),
        timeout=chosen.choice((None, None, 120.0, 600.0)),
    )
    return SimulatedRun(
        name,
        UUID(int=chosen.getrandbits(128), version=4),
        Disk(world),
        limits,
        is_asked=chosen.random() < 0.3,
        has_children=chosen.random() < 0.3,
        is_judged=chosen.random() < 0.3,
    )


async def _see_through(world: World, store: MemoryLog, run: SimulatedRun) -> None:
    """Take a run up again and again until it has ended, as workers do: sometimes two at once."""
    person = asyncio.create_task(edit_files(world, run.name, run.disk, lambda: run.is_over))
    rng = world.rng("workers", run.name)
    workers: set[asyncio.Task[None]] = set()
    while not run.is_over:
        if run.lives >= MAX_LIVES or world.loop.time() > MAX_TIME_S:
            world.problems.append(f"{run.name} has not ended after {run.lives} lives")
            break
        run.lives += 1
        life = Life(world, f"{run.name}.{run.lives}")
        life.task = asyncio.create_task(_one_life(world, store, run, life))
        workers.add(life.task)
        # The next worker comes when this one has ended, or after a while, while it may still be stopped.
        await asyncio.wait(workers, timeout=rng.uniform(8.0, 40.0), return_when=asyncio.FIRST_COMPLETED)
        workers = {each for each in workers if not each.done()}
        await asyncio.sleep(rng.uniform(0.5, 5.0))
    if workers:
        await asyncio.wait(workers)
    person.cancel()


async def _one_life(world: World, store: MemoryLog, run: SimulatedRun, life: Life) -> None:
    log = SimulatedLog(store, life)
    beats = asyncio.create_task(log.keep_leases())
    world.note(f"{life.name} begins")
    LIFE.set(life)
    began = world.loop.time()
    try:
        await _work(world, log, run, life)
        took_s, timeout_s = world.loop.time() - began, run.limits.timeout
        if timeout_s is not None and took_s > timeout_s + GRACE_S and not life.was_stopped:
            world.problems.append(
                f"{life.name} worked for {took_s:.0f} s under a ceiling of {timeout_s:.0f} s"
            )
    except (LeaseHeldError, WorkspaceBusyError, StaleWorkspaceError, LogError) as error:
        world.note(f"{life.name} gives way: {type(error).__name__}")
    except Killed:
        pass
    except asyncio.CancelledError:
        if not life.is_dead:
            raise
    except BaseExceptionGroup as group:
        rest = group.subgroup(lambda each: not isinstance(each, Killed | asyncio.CancelledError | LogError))
        if rest is not None and not life.is_dead:
            world.problems.append(f"{life.name} ended with {rest!r}")
    except Exception as error:  # noqa: BLE001 - whatever else comes out of the real code is a finding
        if not life.is_dead:
            world.problems.append(f"{life.name} ended with {error!r}")
    finally:
        life.is_dead = True
        beats.cancel()
        world.note(f"{life.name} ends")


async def _work(world: World, log: SimulatedLog, run: SimulatedRun, life: Life) -> None:
    """Open the run or begin it, and drive its turn: what a worker does."""
    exists = any(each.session_id == run.session_id and each.head for each in log.sessions())
    if any(each.session_id == run.session_id for each in log.sessions()):
        session = Session.open(log, run.session_id, clock=world.clock)
        enable_inner_message_recording(session)
    else:
        session = Session(session_id=run.session_id, log=log, clock=world.clock)
        exists = False
    try:
        if exists and _has_ended(session):
            _deliver(world, session, life)
            run.is_over = True
            return
        _answer_holds(world, session, run)
        await _turn(world, session, run, life)
        if _has_ended(session):
            run.is_over = True
    finally:
        if not life.is_dead:
            session.close()


def _has_ended(session: Session) -> bool:
    """Say whether nothing more is to be done: an interrupted, held or unfinished run is taken up again."""
    state = turn_state(session)
    return state.is_terminal and state is not TurnState.INTERRUPTED


def _answer_holds(world: World, session: Session, run: SimulatedRun) -> None:
    for hold in pending_holds(session):
        allow = world.rng("answer", run.name, hold.call_id).random() < 0.7
        world.note(f"a person answers {hold.call_id}: {'yes' if allow else 'no'}")
        answer_hold(session, hold.call_id, approved=allow)


async def _turn(world: World, session: Session, run: SimulatedRun, life: Life) -> None:
    filesystem = SimulatedFilesystem(run.disk, life)
    state = ExecutionState(
        session,
        ResourceRegistry.build({Filesystem: filesystem}),
        clock=world.clock,
        rng=world.rng("state", life.name),
    )
    token = CancellationToken()
    model, retry = SimulatedModel(world, life, run.name), RetryPolicy(attempts=3)
    loop = InnerLoop(
        state=state,
        provider=model,
        adapter=ModelAdapter(model, retry=retry),
        prompt=(JUDGED if run.is_judged else AGENT).prompt,
        agent=AGENT.name,
        containment=contain(session, run.limits),
        permissions=Permissions(PermissionMode.ASK if run.is_asked else PermissionMode.AUTO),
        retry=retry,
        cancellation=token,
        max_iterations=30,
    )
    ctrl_c = asyncio.create_task(interrupt(world, life.name, token))
    try:
        async with contextlib.AsyncExitStack() as stack:
            assert loop.containment is not None
            stack.callback(loop.containment.close)
            if run.has_children:
                await stack.enter_async_context(with_subagents({"child": AGENT})(loop))
            result = await (loop.resume() if newest_turn(session) else loop.run("the task"))
        world.note(f"{life.name}: {result.state.value} {result.error_kind or ''}".rstrip())
        _deliver(world, session, life)
    finally:
        ctrl_c.cancel()


def _deliver(world: World, session: Session, life: Life) -> None:
    """Deliver what committed calls have put into the outbox: at least once, with stable keys."""

    def mail(message: OutboxPut) -> None:
        life.may_die("deliver", 0.05)
        world.delivered[message.key] += 1
        life.may_die("delivered", 0.05)

    Outbox({"mail": mail}).flush(session)
