"""The command that checks a run's log."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

from treenail.history.store_diagnostics import diagnose_store
from treenail.presenters.cli.looking import print_json


def diagnose(store: Path, run_id: UUID | None, *, as_json: bool) -> int:
    """Check a run's log, or every log of a store that is damaged. Returns 1 if something blocks a run."""
    reports = diagnose_store(store, run_id)
    if as_json:
        data = [each.to_data() for each in reports]
        print_json(data[0] if len(data) == 1 else data)
    else:
        print("\n\n".join(each.render() for each in reports))
    return 0 if all(each.ok for each in reports) else 1
