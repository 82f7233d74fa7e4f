"""Claude's session store on a log of ours: transcripts of the Claude Agent SDK, in SQLite or Postgres.

    with ClaudeSessionStore("runs.db") as store:
        options = ClaudeAgentOptions(session_store=store, resume=session_id)

Each transcript is a session of the log, so an append is all there or not at all, damage is noticed, and a
second process that writes the same transcript is refused.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid5

import anyio.to_thread
from claude_agent_sdk import SessionKey, fold_session_summary
from claude_agent_sdk.types import (
    SessionListSubkeysKey,
    SessionStore,
    SessionStoreEntry,
    SessionStoreListEntry,
    SessionSummaryEntry,
)

from treenail.agent import RunStore
from treenail.errors import SessionNotFoundError
from treenail.log import SessionInfo, SlicePolicy, open_log
from treenail.state import Session, event
from treenail.turns import LoopAttached

_TRANSCRIPTS = UUID("5d0f2f0e-93a5-4f0e-8f8b-2f6f0c1f7a42")
"""The namespace of the ids that are made from a transcript's key."""

_PROJECT, _SESSION, _SUBPATH = "claude_project", "claude_session", "claude_subpath"


@event(name="treenail.ClaudeEntry", policy=SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class ClaudeEntry:
    """One line of a transcript, as the vendor's CLI wrote it."""

    text: str


class ClaudeSessionStore(SessionStore):
    """Keeps transcripts of the Claude Agent SDK in a store of ours; close it when the client is closed.

    An entry that is sent again, which its `uuid` tells, is kept once.
    """

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._log = open_log(store)
        self._lock = threading.Lock()
        self._written: dict[UUID, tuple[Session, set[str]]] = {}

    def close(self) -> None:
        """Let other processes write these transcripts."""
        with self._lock:
            for session, _ in self._written.values():
                session.close()
            self._written.clear()
            if self._log is not self._store:
                self._log.close()

    def __enter__(self) -> ClaudeSessionStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def append(self, key: SessionKey, entries: list[SessionStoreEntry]) -> None:
        """Add lines to a transcript, in one append. `LeaseHeldError` while another process writes it."""
        await anyio.to_thread.run_sync(self._append, key, entries)

    async def load(self, key: SessionKey) -> list[SessionStoreEntry] | None:
        """Return a transcript; None if there is none."""
        return await anyio.to_thread.run_sync(self._load, key)

    async def list_sessions(self, project_key: str) -> list[SessionStoreListEntry]:
        """List the transcripts of a project, without those of subagents."""
        return await anyio.to_thread.run_sync(self._listed, project_key)

    async def list_session_summaries(self, project_key: str) -> list[SessionSummaryEntry]:
        """Return the SDK's summaries of a project's transcripts; nothing of them is stored."""
        return await anyio.to_thread.run_sync(self._summaries, project_key)

    async def delete(self, key: SessionKey) -> None:
        """Erase a transcript; the main one with those of its subagents."""
        await anyio.to_thread.run_sync(self._delete, key)

    async def list_subkeys(self, key: SessionListSubkeysKey) -> list[str]:
        """List the transcripts of a session's subagents."""
        found = await anyio.to_thread.run_sync(self._of, key["project_key"], key["session_id"])
        return [tags[_SUBPATH] for _, tags in found if tags[_SUBPATH]]

    # .. the same, blocking ..

    def _append(self, key: SessionKey, entries: list[SessionStoreEntry]) -> None:
        if not entries:
            return
        with self._lock:
            session, known = self._writer(key)
            seen, new = set(known), []
            for each in entries:
                uuid = each.get("uuid")
                if uuid is None or uuid not in seen:
                    new.append(ClaudeEntry(json.dumps(each, separators=(",", ":"))))
                seen |= set() if uuid is None else {uuid}
            session.dispatch_all(new)
            known |= seen

    def _writer(self, key: SessionKey) -> tuple[Session, set[str]]:
        """Return the open session of a transcript, and the ids of its entries."""
        session_id = _id_of(key)
        if session_id not in self._written:
            try:
                session = Session.open(self._log, session_id)
            except SessionNotFoundError:
                tags = {_PROJECT: key["project_key"], _SESSION: key["session_id"]}
                tags |= {_SUBPATH: key.get("subpath") or "", "agent": key["session_id"]}
                session = Session(session_id=session_id, log=self._log, tags=tags)
                session.dispatch(LoopAttached(key["session_id"]))
            known = {each["uuid"] for each in _entries_of(session) if "uuid" in each}
            self._written[session_id] = session, known
        return self._written[session_id]

    def _load(self, key: SessionKey) -> list[SessionStoreEntry] | None:
        try:
            with Session.open(self._log, _id_of(key), read_only=True) as session:
                return _entries_of(session)
        except SessionNotFoundError:
            return None

    def _listed(self, project_key: str) -> list[SessionStoreListEntry]:
        return [
            {"session_id": tags[_SESSION], "mtime": self._changed_ms(info)}
            for info, tags in self._transcripts(project_key)
        ]

    def _summaries(self, project_key: str) -> list[SessionSummaryEntry]:
        made = []
        for info, tags in self._transcripts(project_key):
            key: SessionKey = {"project_key": project_key, "session_id": tags[_SESSION]}
            summary = fold_session_summary(None, key, self._load(key) or [])
            made.append(SessionSummaryEntry({**summary, "mtime": self._changed_ms(info)}))
        return made

    def _delete(self, key: SessionKey) -> None:
        with self._lock:
            for info, tags in self._of(key["project_key"], key["session_id"]):
                if not key.get("subpath") or tags[_SUBPATH] == key.get("subpath"):
                    session, _ = self._written.pop(info.session_id, (None, set()))
                    if session is not None:
                        session.close()
                    self._log.erase(info.session_id)

    def _of(self, project: str, session: str | None = None) -> list[tuple[SessionInfo, Mapping[str, str]]]:
        known = ((each, dict(each.tags)) for each in self._log.sessions())
        return [
            (info, tags)
            for info, tags in known
            if tags.get(_PROJECT) == project and session in (None, tags.get(_SESSION))
        ]

    def _transcripts(self, project: str) -> list[tuple[SessionInfo, Mapping[str, str]]]:
        return [(info, tags) for info, tags in self._of(project) if not tags[_SUBPATH]]

    def _changed_ms(self, info: SessionInfo) -> int:
        newest = next(iter(self._log.read(info.session_id, after=info.head - 1, upto=info.head)), None)
        return round((info.created_at if newest is None else newest.at).timestamp() * 1000)


def _id_of(key: SessionKey) -> UUID:
    parts = [key["project_key"], key["session_id"], key.get("subpath") or ""]
    return uuid5(_TRANSCRIPTS, json.dumps(parts))


def _entries_of(session: Session) -> list[Any]:
    return [json.loads(each.text) for each in session[ClaudeEntry].all()]
