"""The commands that change a stored run: rollback, fork, hold, erase, prune."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

from treenail.agent import erase_run, reopened
from treenail.errors import UsageError
from treenail.history.operations import resolve_attention
from treenail.log.sqlite import SqliteLog
from treenail.presenters.cli.looking import print_json
from treenail.presenters.cli.places import flag_for
from treenail.presenters.cli.stored import reading
from treenail.state.execution import ExecutionState
from treenail.state.session import Session
from treenail.tools.boundaries import Boundary, boundaries, fork_at, rollback_to_call
from treenail.tools.policies import answer_hold, pending_holds


def _chosen(session: Session, call: str | None) -> Boundary:
    """Return the call that a person means: its id, its number in the list, or the newest."""
    known = boundaries(session)
    if not known:
        raise UsageError("this run has no finished tool call; there is nothing to go back to")
    if call is None:
        return known[-1]
    if call.isdigit() and 1 <= int(call) <= len(known):
        return known[int(call) - 1]
    found = [each for each in known if each.call_id.startswith(call)]
    if len({each.call_id for each in found}) == 1:
        return found[-1]
    shown = ", ".join(f"{number}={each.call_id} ({each.tool_name})" for number, each in enumerate(known, 1))
    raise UsageError(
        f"{'several calls begin' if found else 'no call begins'} with {call!r}; the calls are: {shown}"
    )


def rollback(store: Path, run_id: UUID, *, call: str | None, as_json: bool) -> None:
    """Put files and state back to where they were before a tool call."""
    with reopened(store, run_id) as state:
        boundary = _chosen(state.session, call)
        rollback_to_call(state, boundary.call_id)
    _say(
        as_json,
        {"run": str(run_id), "rolled_back_to": boundary.call_id, "side": "before"},
        f"files and state are as they were before {boundary.tool_name} ({boundary.call_id})",
    )


def fork(store: Path, run_id: UUID, *, call: str | None, after: bool, into: Path, as_json: bool) -> None:
    """Make another run that goes on from a tool call, in a workspace of its own."""
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise UsageError(
            f"{into} is there already; name a new or an empty directory for the fork's workspace"
        )
    with reopened(store, run_id) as state:
        boundary = _chosen(state.session, call)
        into.mkdir(parents=True, exist_ok=True)
        made: ExecutionState = fork_at(
            state, boundary.call_id, side="after" if after else "before", workspace=into
        )
        new_id = made.session.session_id
        made.session.close()
    _say(
        as_json,
        {"run": str(new_id), "from": str(run_id), "call": boundary.call_id, "workspace": str(into)},
        f"run {str(new_id)[:8]} goes on from {boundary.tool_name} ({boundary.call_id}) in {into}\n"
        f"go on with: treenail resume {str(new_id)[:8]}{flag_for(store)}",
    )


def list_holds(store: Path, run_id: UUID, *, as_json: bool) -> None:
    """List the calls that wait for a person."""
    with reading(store, run_id) as session:
        holds = pending_holds(session)
    data = [
        {
            "call": each.call_id,
            "tool": each.tool_name,
            "arguments": each.arguments,
            "reason": each.reason,
            "since": each.created_at.isoformat(),
        }
        for each in holds
    ]
    lines = [f"{each.call_id}  {each.tool_name}  {each.arguments}\n    {each.reason}" for each in holds]
    _say(as_json, data, "\n".join(lines) or "no call waits for an answer")


def answer(store: Path, run_id: UUID, *, call: str | None, approved: bool, note: str, as_json: bool) -> None:
    """Answer a call that waits."""
    with reopened(store, run_id) as state:
        holds = pending_holds(state.session)
        if not holds:
            raise UsageError("no call of this run waits for an answer; see `treenail hold list`")
        chosen = [each for each in holds if call is None or each.call_id.startswith(call)]
        if len(chosen) != 1:
            shown = ", ".join(f"{each.call_id} ({each.tool_name})" for each in holds)
            raise UsageError(f"say which call you mean; these wait: {shown}")
        answer_hold(state.session, chosen[0].call_id, approved=approved, note=note, answered_by="cli")
    _say(
        as_json,
        {"run": str(run_id), "call": chosen[0].call_id, "approved": approved},
        f"{'approved' if approved else 'refused'}: {chosen[0].tool_name} ({chosen[0].call_id})\n"
        f"go on with: treenail resume {str(run_id)[:8]}{flag_for(store)}",
    )


def erase(store: Path, run_id: UUID, *, abandon: bool, as_json: bool) -> None:
    """Forget a run and its children: their logs, and the file contents kept for them. Files stay."""
    erase_run(store, run_id, abandon=abandon)
    _say(
        as_json,
        {"erased": str(run_id)},
        f"forgot run {str(run_id)[:8]} with everything below it; your files are untouched",
    )


def prune(store: Path, run_id: UUID, *, keep_last: int, as_json: bool) -> None:
    """Forget the oldest events of a run. What was spent is not forgotten."""
    if keep_last < 0:
        raise UsageError(f"--keep-last must be 0 or more, not {keep_last}")
    with reopened(store, run_id) as state:
        gone = state.session.prune(keep_last=keep_last)
    _say(as_json, {"run": str(run_id), "forgotten_events": gone}, f"forgot {gone} events")


def salvage(store: Path, into: Path, *, as_json: bool) -> None:
    """Copy what is whole in a damaged store into a new file."""
    reports = SqliteLog.salvage(store, into)
    data = [
        {
            "run": str(each.session_id),
            "whole": each.ok,
            "last_event": each.last_good_seq,
            "damage": [found.message for found in each.damage],
        }
        for each in reports
    ]
    whole = sum(each.ok for each in reports)
    cut = [
        f"  {str(each.session_id)[:8]} up to event {each.last_good_seq}: {each.damage[0].message}"
        for each in reports
        if not each.ok
    ]
    copied = f"copied {len(reports)} sessions into {into}, {whole} of them whole"
    if cut:
        cut.append("what a run did after that is not in the copy, but the files are as it left them")
    _say(
        as_json,
        {"into": str(into), "sessions": data},
        "\n".join((copied, *cut, f"see them with: treenail list --store {into}")),
    )


def attend(store: Path, run_id: UUID, *, note: str, as_json: bool) -> None:
    """Record that a person has put right what a run needed one for."""
    with reopened(store, run_id) as state:
        resolved = resolve_attention(state.session, note, by="cli")
    if resolved is None:
        raise UsageError("nothing in this run needs a person; see `treenail diagnose`")
    _say(as_json, {"run": str(run_id), "note": note}, "noted; the run can go on")


def _say(as_json: bool, data: object, text: str) -> None:
    if as_json:
        print_json(data)
    else:
        print(text)
