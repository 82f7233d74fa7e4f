"""The command that checks a run's log."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

from holdfast.presenters.cli.looking import print_json
from holdfast.presenters.cli.stored import reading
from holdfast.turns.diagnostics import diagnose as diagnose_session


def diagnose(store: Path, run_id: UUID, *, as_json: bool) -> int:
    """Check a run's log. Returns 1 if something blocks the run, else 0."""
    with reading(store, run_id) as session:
        report = diagnose_session(session)
    if as_json:
        print_json(report.to_data())
    else:
        print(report.render())
    return 0 if report.ok else 1
