"""The inspector's server: the views of runs as JSON, and what changes in them as server-sent events.

The server projects and the page draws. What a view shows comes from `treenail.history`, and what acts goes
through its operations, as for the command line. Reading a log blocks, so it happens in threads.
"""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Any
from uuid import UUID

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from treenail.errors import LogError, SessionNotFoundError, TreenailError
from treenail.presenters.web.actions import ACTIONS
from treenail.presenters.web.guard import Guard
from treenail.presenters.web.inspector import Inspector

_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
_MAX_ROWS = 500
_RETRY_MS = 400
"""How soon a browser asks again when the connection is lost."""
_BEAT_S = 10.0
"""How often a silent stream says that it is alive."""
_THREADS = 64
"""How many requests may read logs at the same time."""

Answer = Callable[[Inspector, Request], Any]


def application(inspector: Inspector, *, token: str, hosts: list[str], read_only: bool) -> Starlette:
    """Make the application."""
    limiter = anyio.CapacityLimiter(_THREADS)

    def answers(make: Answer) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            data = await anyio.to_thread.run_sync(make, inspector, request, limiter=limiter)
            return data if isinstance(data, Response) else JSONResponse(data)

        return answer

    def acts(act: Callable[[Inspector, UUID, Mapping[str, Any]], Any]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            given = await _json_of(request)
            call = partial(act, inspector, _run_id(request), given)
            return JSONResponse(await anyio.to_thread.run_sync(call, limiter=limiter))

        return answer

    async def follow_run(request: Request) -> Response:
        after = _number(request.headers.get("last-event-id") or request.query_params.get("after") or "0")
        follower = await anyio.to_thread.run_sync(inspector.follow, _run_id(request), limiter=limiter)
        return _stream(follower, after, limiter, close=follower.close)

    async def follow_list(request: Request) -> Response:
        after = _number(request.headers.get("last-event-id") or request.query_params.get("after") or "0")
        return _stream(inspector.list_updates, after, limiter)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        inspector.close()

    run = "/api/runs/{run:uuid}"
    return Starlette(
        routes=[
            Route("/", _page),
            Route("/page/{name:path}", _page_file),
            Route("/api/about", answers(lambda it, request: it.about(read_only=read_only))),
            Route("/api/runs", answers(_list)),
            Route("/api/stream", follow_list),
            Route(run, answers(lambda it, request: it.run(_run_id(request)))),
            Route(f"{run}/rows", answers(_rows)),
            Route(f"{run}/rows/{{index:int}}", answers(_row)),
            Route(
                f"{run}/at/{{seq:int}}", answers(lambda it, r: it.row_at(_run_id(r), r.path_params["seq"]))
            ),
            Route(f"{run}/events/{{seq:int}}", answers(_event)),
            Route(f"{run}/diff", answers(_diff)),
            Route(f"{run}/spending", answers(lambda it, request: it.spending(_run_id(request)))),
            Route(f"{run}/stream", follow_run),
            *(Route(f"{run}/{name}", acts(act), methods=["POST"]) for name, act in ACTIONS.items()),
        ],
        middleware=[Middleware(Guard, token=token, hosts=hosts, read_only=read_only)],
        exception_handlers={TreenailError: _told, HTTPException: _http_error, Exception: _broken},
        lifespan=lifespan,
    )


def serve(app: Starlette, listener: socket.socket) -> None:
    """Serve until a signal ends it."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
        server_header=False,
        date_header=False,
    )
    uvicorn.Server(config).run(sockets=[listener])


# --- what a request says -------------------------------------------------------------------------------


def _run_id(request: Request) -> UUID:
    found = request.path_params["run"]
    assert isinstance(found, UUID)
    return found


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise HTTPException(400, f"{text[:40]!r} is not a number")
    return int(text)


def _asked(request: Request, name: str, default: int) -> int:
    given = request.query_params.get(name)
    return default if given is None else _number(given)


async def _json_of(request: Request) -> Mapping[str, Any]:
    try:
        data = json.loads(await request.body() or b"{}")
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise HTTPException(400, "the body must be a JSON object")
    return data


# --- answers -------------------------------------------------------------------------------------------


def _list(inspector: Inspector, request: Request) -> Any:
    query = request.query_params
    parent = query.get("parent")
    try:
        above = None if parent is None else UUID(parent)
    except ValueError:
        raise HTTPException(400, "the parent is not a run's id") from None
    return inspector.runs.page(
        _asked(request, "first", 0),
        _asked(request, "count", 100),
        text=query.get("text", "")[:200],
        state=query.get("state", "")[:40],
        order=query.get("order", ""),
        parent=above,
    )


def _rows(inspector: Inspector, request: Request) -> Any:
    count = min(_asked(request, "count", 200), _MAX_ROWS)
    return inspector.rows(_run_id(request), _asked(request, "first", 0), count)


def _row(inspector: Inspector, request: Request) -> Any:
    return inspector.row(_run_id(request), request.path_params["index"])


def _event(inspector: Inspector, request: Request) -> Any:
    return inspector.event(_run_id(request), request.path_params["seq"])


def _diff(inspector: Inspector, request: Request) -> Any:
    call = request.query_params.get("call")
    return inspector.diff(_run_id(request), None if call is None else _number(call))


async def _page(request: Request) -> Response:
    return _file("index.html")


async def _page_file(request: Request) -> Response:
    return _file(request.path_params["name"])


def _file(name: str) -> Response:
    """Return a file of the page. Only names that are there are known, so no path leads elsewhere."""
    known = page_files()
    if name not in known:
        raise HTTPException(404, "there is no such page")
    kind = _TYPES[name[name.rindex(".") :]]
    return Response(known[name], media_type=kind, headers={"cache-control": "no-cache"})


def page_files() -> dict[str, bytes]:
    """Return the files that the page is made of, by name."""
    top = files("treenail.presenters.web") / "page"
    found = {}
    for folder, prefix in ((top, ""), (top / "vendor", "vendor/")):
        for each in folder.iterdir():
            if each.is_file() and each.name[each.name.rfind(".") :] in _TYPES:
                found[prefix + each.name] = each.read_bytes()
    return found


# --- streams -------------------------------------------------------------------------------------------

Follower = Callable[[int], tuple[int, Any]]
"""Waits a moment for something newer than a number; returns the new number, and what to say or None."""


def _stream(
    follower: Follower,
    after: int,
    limiter: anyio.CapacityLimiter,
    close: Callable[[], None] = lambda: None,
) -> Response:
    """Tell what is new, each time with the number that a reconnect begins after."""

    async def told() -> AsyncIterator[str]:
        try:
            async for each in news():
                yield each
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(close, limiter=limiter)

    async def news() -> AsyncIterator[str]:
        seq, silent_since = after, anyio.current_time()
        yield f"retry: {_RETRY_MS}\n: watching\n\n"
        while True:
            try:
                seq, data = await anyio.to_thread.run_sync(follower, seq, limiter=limiter)
            except SessionNotFoundError:
                yield "event: gone\ndata: {}\n\n"
                return
            except LogError as error:
                yield f"event: trouble\ndata: {json.dumps({'error': str(error)})}\n\n"
                await anyio.sleep(1)
                continue
            if data is not None:
                silent_since = anyio.current_time()
                yield f"id: {seq}\ndata: {json.dumps(data)}\n\n"
            elif anyio.current_time() - silent_since > _BEAT_S:
                silent_since = anyio.current_time()
                yield ": still here\n\n"

    return StreamingResponse(
        told(),
        media_type="text/event-stream",
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


# --- errors --------------------------------------------------------------------------------------------


async def _told(request: Request, error: Exception) -> Response:
    status = 404 if isinstance(error, SessionNotFoundError) else 409
    return JSONResponse({"error": str(error)}, status_code=status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, status_code=error.status_code)


async def _broken(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"the inspector failed: {type(error).__name__}: {error}"}, status_code=500)
