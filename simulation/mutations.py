"""Small changes to the code that would break a promise: the simulation must find each of them.

`python -m simulation.mutations` applies each one to a copy of the package, runs worlds until one fails, and prints a
table. A change that no world finds, or whose text is no longer in the code, is a failure.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_WORLDS = 120
MAX_S = 240.0


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change: what it breaks, in which file, and the text before and after."""

    breaks: str
    file: str
    before: str
    after: str


MUTATIONS = (
    # The log's fence.
    Mutation("a stale writer may append", "log/memory.py", "            stored = self._writable(lease)\n            rules.check_head(lease, expected_seq=expected_seq, head=stored.head)\n", "            stored = self._find(lease.session_id)\n"),
    Mutation("events are logged and not folded", "state/core.py", "changes = self._replace_slices(working.changes)", "changes = self._replace_slices({})"),
    # The transaction of a call.
    Mutation("a failed tool is not rolled back", "tools/transaction.py", '        return self._roll_back(ToolResult.error(f"{name} failed: {describe(error)}"), "failed")', '        return ToolResult.error(f"{name} failed: {describe(error)}")'),
    Mutation("an interrupted tool is not rolled back", "tools/transaction.py", '            self._cut_off(_interrupted(name), "interrupted")\n            raise error', "            raise error"),
    Mutation("a rollback forgets the files", "tools/transaction.py", 'report = undo.part("the workspace", self.workspace.rollback)', "self.workspace.finish()"),
    Mutation("a call is finished in the files before the log has it", "tools/transaction.py", "        self.is_committing = True\n", "        self.is_committing = True\n        if self.workspace is not None:\n            self.workspace.finish()\n"),
    Mutation("files are not finished after the commit", "tools/transaction.py", "            self.workspace.finish()\n        except", "            pass\n        except"),
    Mutation("a commit that failed counts as one", "tools/transaction.py", "        if not self.is_committing:\n            return False", "        if not self.is_committing:\n            return True"),
    Mutation("staged events are lost at the commit", "state/transaction.py", "batch = [*self._staged, *stage(core, extra)]", "batch = [*stage(core, extra)]"),
    Mutation("events of a call do not wait for its commit", "state/transaction.py", "<= {SlicePolicy.LOG}:", "<= {SlicePolicy.LOG, SlicePolicy.STATE}:"),
    Mutation("a rollback keeps what was staged", "state/transaction.py", "if waiting.logged is not None and SlicePolicy.LOG in core.fold.policies_of(waiting.event)", "if waiting.logged is not None"),
    Mutation("the outbox is not part of the commit", "tools/transaction.py", "self.transaction.commit(*messages, *recorded, invoked)", "self.transaction.commit(*recorded, invoked)"),
    Mutation("the outbox of a failed call is sent", "tools/transaction.py", "        events: list[object] = list(recorded)\n", "        events: list[object] = [*recorded, *(self.made_context.outbox._messages if self.made_context else ())]\n"),
    Mutation("the model is not told the result in the same append", "tools/transaction.py", "self.transaction.commit(*messages, *recorded, invoked)", "self.transaction.commit(*messages, invoked)"),
    Mutation("no start of a call is logged", "tools/transaction.py", "            environment.state.session.dispatch(started)\n", "            pass\n"),
    Mutation("calls with effects run side by side", "tools/runner.py", 'return tool is None or tool.effects == "none"', "return True"),
    Mutation("calls with effects take no ticket", "tools/runner.py", "            plan.tickets = Tickets(self.environment.gates)\n", "            pass\n"),
    # Recovery.
    Mutation("recovery keeps what was not committed", "tools/boundaries.py", "committed = call_id in rolled_back or (end is not None and end.success)", "committed = True"),
    Mutation("recovery undoes what was committed", "tools/boundaries.py", "committed = call_id in rolled_back or (end is not None and end.success)", "committed = False"),
    Mutation("recovery forgets the files", "tools/boundaries.py", "for call_id, workspace_id in _left_open(state):", "for call_id, workspace_id in ():"),
    Mutation("an effect outside that was cut off is repeated", "tools/boundaries.py", 'unknown = attempt.effects == "external" and not attempt.idempotent', "unknown = False"),
    Mutation("an unknown outcome may be repeated", "tools/admission.py", 'if last is None or last.outcome != "unknown" or start is None:', "if True:"),
    Mutation("a resumed turn forgets its pending calls", "turns/turn.py", "return await self._to_its_end(pending, traced)", "return await self._to_its_end((), traced)"),
    Mutation("a resumed turn runs finished calls again", "conversation/messages.py", "                    del pending[index]\n", "                    pass\n"),
    Mutation("a crashed turn is not closed", "turns/endings.py", "if fold is None or fold.ended is not None or _is_forked(session, fold):", "if True:"),
    # People.
    Mutation("a call runs although a person refused", "tools/admission.py", "            if answer.approved:\n", "            if True:\n"),
    Mutation("nobody is asked", "tools/admission.py", 'if mode is PermissionMode.ASK and verdict != "allow":', "if False:"),
    # Ceilings.
    Mutation("money is not reserved", "containment/ledger.py", "                tally.reserved += cost\n", ""),
    Mutation("steps are not counted", "containment/ledger.py", "                tally.steps += 1\n                tally.reserved", "                tally.reserved"),
    Mutation("the last call may go over the ceiling", "containment/ledger.py", "if committed >= account.max_cost or committed + cost > account.max_cost:", "if committed >= account.max_cost:"),
    Mutation("what a call cost is not booked", "containment/ledger.py", "                account.tally.spent += cost\n", ""),
    Mutation("a reservation stays when its call has ended", "containment/ledger.py", "                account.tally.reserved -= reserved\n                account.tally.spent += cost", "                account.tally.spent += cost"),
    Mutation("a reservation is not logged before the call", "containment/context.py", "            self.chain.journal_reserved(attempt)\n", "            pass\n"),
    Mutation("a settlement is not logged", "containment/chain.py", "        self._write(Settled, attempt, status=status, cost_usd=to_usd(attempt.settled))\n", ""),
    Mutation("a call that was never heard of again is free", "containment/ledger.py", "cost = reserved[reservation_id] if is_open else settled[reservation_id]", "cost = 0 if is_open else settled[reservation_id]"),
    Mutation("a resumed run forgets what it spent", "turns/ledger.py", "[*ledger_of(session), *also,", "[*also,"),
    Mutation("children spend on their own", "containment/ledger.py", "            for account in self.accounts:\n                tally = account.tally\n                tally.steps", "            for account in self.accounts[:1]:\n                tally = account.tally\n                tally.steps"),
    Mutation("retries are not counted", "containment/ledger.py", "                account.tally.retries += 1\n", ""),
    Mutation("time does not end a run", "containment/chain.py", "def elapsed_ms(self) -> float:", "def elapsed_ms(self) -> float:\n        return 0.0\n\n    def _elapsed_ms(self) -> float:"),
    # Endings and replay.
    Mutation("an answer that was not finished is an answer", "turns/model_calls.py", "        if no_answer is not None:\n            frame", "        if False:\n            frame"),
    Mutation("an orphan call has no result on the wire", "conversation/replay.py", "            behind = (*map(_orphan, waiting), *self._later)", "            behind = (*self._later,)"),
    Mutation("a later message comes before an open call's result", "conversation/replay.py", "            self._close_open()\n        if role", "            pass\n        if role"),
    Mutation("a result that nobody asked for is sent", "conversation/replay.py", "        if not waiting:\n            self._leave_out", "        if not waiting:\n            self._items.append(ReplayItem('tool', 'x', (), call_id, message.tool_name, (), seq))\n            self._leave_out"),
    Mutation("an ending needs no evidence", "turns/endings.py", "    if missing:\n        needed", "    if False:\n        needed"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """How a mutation was found: after how many worlds and seconds; None if it was not."""

    mutation: Mutation
    worlds: int | None
    seconds: float
    first_problem: str


def try_one(mutation: Mutation, *, first_seed: int = 0) -> Found:
    """Apply a mutation to a copy of the package, and run worlds until one fails."""
    with tempfile.TemporaryDirectory(prefix="mutated-") as place:
        shutil.copytree(ROOT / "src/treenail", Path(place, "treenail"))
        file = Path(place, "treenail", mutation.file)
        text = file.read_text("utf-8")
        if text.count(mutation.before) < 1:
            return Found(mutation, None, 0.0, f"{mutation.file} no longer has the text {mutation.before!r}")
        file.write_text(text.replace(mutation.before, mutation.after, 1), "utf-8")
        began = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "simulation",
            "--seed",
            str(first_seed),
            "--worlds",
            str(MAX_WORLDS),
            "--plain",
        ]
        environment = os.environ | {"PYTHONPATH": f"{place}:{ROOT}", "PYTHONHASHSEED": "0"}
        try:
            ended = subprocess.run(
                command,
                cwd=place,
                env=environment,
                capture_output=True,
                text=True,
                timeout=MAX_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Found(mutation, None, MAX_S, "no world failed in time")
        seconds = time.monotonic() - began
    seed = re.search(r"^seed (\d+) breaks a promise:\n +(.*)$", ended.stdout, re.MULTILINE)
    if seed is None:
        said = "no world failed" if ended.returncode == 0 else (ended.stderr or ended.stdout)[-300:]
        return Found(mutation, None, seconds, said)
    return Found(mutation, int(seed[1]) - first_seed + 1, seconds, seed[2])


def main() -> int:
    """Try all mutations, or those whose names contain a text. Returns 1 if one was not found."""
    parser = argparse.ArgumentParser(prog="python -m simulation.mutations", description=__doc__)
    parser.add_argument("names", nargs="?", default="")
    chosen = [each for each in MUTATIONS if parser.parse_args().names in each.breaks]
    missed = 0
    for mutation in chosen:
        found = try_one(mutation)
        missed += found.worlds is None
        shown = "NOT FOUND" if found.worlds is None else f"world {found.worlds}, {found.seconds:.0f} s"
        print(f"{mutation.breaks:60} {shown:20} {found.first_problem[:110]}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
