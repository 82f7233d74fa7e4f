"""A service: start a run, stream its events, answer its questions. It may be killed at any time.

    uvicorn examples.service:app

A client names its work by a key. If the server was killed meanwhile, the client sends the same request again:
the run continues where it stopped, and nothing that was finished is done twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from treenail import Agent, ToolContext, TurnState, tool
from treenail.agent import RunHandle, follow
from treenail.errors import TreenailError
from treenail.providers.scripted import Answer, ScriptedProvider
from treenail.tools import PermissionMode, Permissions

PLACE = Path(os.environ.get("SERVICE_PLACE", "service-data")).resolve()
STORE = PLACE / "runs.db"
MODEL = ScriptedProvider(  # a script, so that it runs offline; "openai/gpt-5" is a real one
    [
        Answer("I write it down.\n", [("note", {"text": "one"})]),
        Answer("And once more.\n", [("note", {"text": "two"})]),
        "Done.",
    ]
)


@tool(effects="workspace")
def note(text: str, context: ToolContext) -> str:
    """Write a note."""
    context.filesystem.write("notes.txt", f"{text}\n", mode="append")
    return "noted"


agent = Agent("writer", tools=[note])
app = FastAPI(title="An agent as a service")
running: dict[UUID, RunHandle[str]] = {}


class Work(BaseModel):
    """What a client wants done."""

    key: str
    task: str
    asks: bool = False


class Verdict(BaseModel):
    """A person's answer to a call that waits for one."""

    call_id: str
    approved: bool


@app.post("/runs")
def start(work: Work) -> dict[str, str]:
    """Start a run, or find the one of this key; one that was cut off continues."""
    files = PLACE / "work" / work.key
    files.mkdir(parents=True, exist_ok=True)
    mode = PermissionMode.ASK if work.asks else PermissionMode.AUTO
    try:
        handle = agent.start(
            work.task,
            provider=MODEL,
            store=STORE,
            key=work.key,
            workspace=files,
            permissions=Permissions(mode),
        )
    except TreenailError as error:
        raise HTTPException(409, str(error)) from error
    running[handle.id] = handle
    return {"id": str(handle.id)}


@app.get("/runs/{run_id}/events")
async def events(run_id: UUID, after: int = 0) -> StreamingResponse:
    """Stream a run's events; a client that comes back continues behind the last number that it saw."""
    handle = running.get(run_id)
    source = follow(STORE, run_id, after=after) if handle is None else handle.events(after=after)

    async def lines() -> AsyncIterator[str]:
        async for event in source:
            yield f"id: {event.seq}\ndata: {json.dumps(event.to_data())}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


@app.post("/runs/{run_id}/answer")
def answer(run_id: UUID, verdict: Verdict) -> dict[str, bool]:
    """Answer a call that waits for a person; the run continues."""
    try:
        running[run_id].answer(verdict.call_id, approved=verdict.approved, by="a client")
    except (KeyError, TreenailError) as error:
        raise HTTPException(409, f"nothing waits here: {error}") from error
    return {"recorded": True}


@app.get("/runs/{run_id}/result")
async def result(run_id: UUID) -> dict[str, str]:
    """Wait for the end of a run."""
    if run_id not in running:
        raise HTTPException(404, "start it with its key first")
    run = await running[run_id].aresult()
    return {"state": run.state.value, "output": run.output if run.state is TurnState.COMPLETED else ""}
