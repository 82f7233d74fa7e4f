"""A model server for tests: three vendors' interfaces on a real socket, answering from a script.

Theory of operation
-------------------
`WireServer` speaks OpenAI's Chat Completions and Responses and Anthropic's Messages over
HTTP/1.1 on loopback, from a thread of its own, so that sync and async code can be tested
against it. Which interface is meant is told by the path. A script is a list of steps, one
per request: an `Answer` of `treenail.providers.scripted` (the same script can thereby be
played by the scripted provider), a `Fault` instead of an answer, or a `Broken` answer whose
stream goes wrong on the way. Each step is put into the words of the interface that asked.

It is as strict as the real thing where that matters: a request that a provider would refuse
(unpaired calls, an empty text, a block of thought that was changed) is refused with a 400,
by the rules in `treenail.testing.wire_rules`. It is honest about connections: it sees when a
client leaves before the answer is over. It waits for nothing but its peer: a stream that
hangs does so until the client leaves or the test says `release()`.

Requests are recorded without their secrets.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from treenail.errors import UsageError
from treenail.providers.scripted import Answer
from treenail.testing.wire_rules import (
    anthropic_violations,
    openai_chat_violations,
    openai_responses_violations,
)
from treenail.tools import ToolCall

Api = Literal["openai.chat", "openai.responses", "anthropic.messages"]
"""An interface, by the name that its provider has in the log."""

FaultKind = Literal[
    "throttled",
    "quota",
    "server_error",
    "overloaded",
    "context_too_long",
    "content_filtered",
    "unauthorized",
    "bad_request",
    "drop",
]
"""What can be wrong instead of an answer; `drop` closes the connection without a word."""

MAX_BODY_BYTES = 256 * 1024 * 1024
"""The largest request that is read."""

_PATHS: Mapping[str, Api] = {
    "/v1/chat/completions": "openai.chat",
    "/v1/responses": "openai.responses",
    "/v1/messages": "anthropic.messages",
}
_SECRET_HEADERS = frozenset({"authorization", "x-api-key", "api-key", "cookie", "proxy-authorization"})
_PIECE_CHARS = 32 * 1024
_START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Fault:
    """An error instead of an answer. Status, code and text are the interface's own unless they are given."""

    kind: FaultKind = "server_error"
    retry_after: str | None = None
    """The value of a Retry-After header: seconds, or a date."""
    status: int | None = None
    code: str | None = None
    message: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Broken:
    """An answer whose stream goes wrong after some pieces of its content.

    `cut` breaks the connection, `ended` ends the stream in good order but without the answer's end,
    `error` sends an error event, `garbage` sends an event that is no JSON, `hang` sends nothing more until
    the client leaves or `WireServer.release` is called, and then goes on. `unsaid` sends everything but the
    event that says why the answer stops.
    """

    answer: Answer
    how: Literal["cut", "ended", "error", "garbage", "hang", "unsaid"] = "cut"
    after: int = 1
    """How many pieces arrive before it: lines of text, thoughts, calls."""
    waits: bool = False
    """Whether it goes wrong only after `WireServer.release`: by then the client can have read the pieces."""


Step = Answer | Fault | Broken | str
"""What one request gets. A string is an answer of that text."""


@dataclass(slots=True)
class WireRequest:
    """One request, as the server saw it; its secrets are gone."""

    number: int
    """The first request is 1."""
    api: Api
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    answers_so_far: int = 0
    """How many answers of a model the conversation in it holds."""
    violations: tuple[str, ...] = ()
    """What a provider would refuse it for."""
    _closed: threading.Event = field(default_factory=threading.Event, repr=False)
    _done: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def allowed_output(self) -> int | None:
        """How many tokens the answer may have by the request; None if it may have any number."""
        names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
        said = [self.body[name] for name in names if isinstance(self.body.get(name), int)]
        return min(said, default=None)

    @property
    def was_closed(self) -> bool:
        """Whether the client left before the answer was over."""
        return self._closed.is_set()

    def wait_closed(self, timeout_s: float = 60.0) -> bool:
        """Wait until the answer is over, and say whether the client left before that."""
        self._done.wait(timeout_s)
        return self._closed.is_set()


class WireServer:
    """A model server that answers from a script. Use it in a `with` block.

    `script` is a list of steps, one per request, or a function of the request. With `by_conversation`
    a step is chosen by how many answers the conversation already has, not by how many requests came, so that
    a run that was killed and resumed goes on where the script was.
    """

    def __init__(
        self, script: Sequence[Step] | Callable[[WireRequest], Step], *, by_conversation: bool = False
    ) -> None:
        self._script = script if callable(script) else tuple(script)
        self._by_conversation = by_conversation
        self._requests: list[WireRequest] = []
        self._arrived = threading.Condition()
        self._port = 0
        self._connections = 0
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._released: asyncio.Event | None = None

    @property
    def url(self) -> str:
        """The server's address, which is Anthropic's `base_url`."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def openai_url(self) -> str:
        """The `base_url` for OpenAI's interfaces."""
        return f"{self.url}/v1"

    @property
    def anthropic_url(self) -> str:
        """The `base_url` for Anthropic's interface."""
        return self.url

    @property
    def requests(self) -> tuple[WireRequest, ...]:
        """The requests so far, in order."""
        with self._arrived:
            return tuple(self._requests)

    @property
    def connections(self) -> int:
        """How many connections were opened so far."""
        return self._connections

    def wait_for_requests(self, count: int, timeout_s: float = 60.0) -> tuple[WireRequest, ...]:
        """Wait until that many requests have come. `timeout_s` only guards against a test that would hang."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(self._requests) >= count, timeout_s):
                raise UsageError(
                    f"{len(self._requests)} requests came in {timeout_s} s; {count} were expected"
                )
            return tuple(self._requests)

    def release(self) -> None:
        """Let hanging streams go on, now and from now on."""
        if self._loop is not None and self._released is not None:
            self._loop.call_soon_threadsafe(self._released.set)

    def __enter__(self) -> WireServer:
        self._thread = threading.Thread(target=self._run, name="wire-server", daemon=True)
        self._thread.start()
        if not self._ready.wait(_START_TIMEOUT_S):
            raise UsageError(f"the wire server did not start within {_START_TIMEOUT_S} s")
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None and self._stop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_START_TIMEOUT_S)

    # --- the server ------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop, self._released = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._connections += 1
            task = asyncio.ensure_future(self._connection(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (received := await _read_request(reader)) is not None:
                path, headers, body = received
                if not await self._answer(path, headers, body, reader, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            pass  # The client left; what that means was noted where it matters.
        except (ValueError, LookupError, asyncio.LimitOverrunError):
            pass  # What came is no request that this server could answer; it hangs up.
        finally:
            writer.close()

    async def _answer(
        self,
        path: str,
        headers: Mapping[str, str],
        body: Mapping[str, Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Answer one request; return whether the connection can be used again."""
        api = _PATHS.get(path)
        if api is None:
            await _send_json(writer, 404, {"error": {"message": f"there is nothing at {path}"}}, {})
            return True
        request = self._record(api, headers, body)
        sender = _Sender(reader, writer, request)
        try:
            return await self._play(request, sender)
        except ConnectionError:
            request._closed.set()
            raise
        finally:
            await sender.end()

    def _record(self, api: Api, headers: Mapping[str, str], body: Mapping[str, Any]) -> WireRequest:
        kept = {name: "[redacted]" if name in _SECRET_HEADERS else value for name, value in headers.items()}
        answers, violations = self._read(api, body)
        with self._arrived:
            request = WireRequest(
                number=len(self._requests) + 1,
                api=api,
                headers=kept,
                body=body,
                answers_so_far=answers,
                violations=violations,
            )
            self._requests.append(request)
            self._arrived.notify_all()
        return request

    def _read(self, api: Api, body: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
        """Say how many answers a request holds, and what a provider would refuse it for."""
        return _answers_in(api, body), tuple(violations_of(api, body))

    def _step(self, request: WireRequest) -> Step:
        if request.violations:
            return Fault("bad_request", message=f"the request is not valid: {request.violations[0]}")
        if callable(self._script):
            return self._script(request)
        place = request.answers_so_far if self._by_conversation else request.number - 1
        if place >= len(self._script):
            return Fault("bad_request", message=f"the script has {len(self._script)} steps, and no more")
        return self._script[place]

    async def _play(self, request: WireRequest, sender: _Sender) -> bool:
        step = self._step(request)
        if isinstance(step, Fault):
            if step.kind == "drop":
                sender.abort()
                return False
            await sender.json(*fault_response(request.api, step))
            return True
        broken = step if isinstance(step, Broken) else None
        answer = step.answer if isinstance(step, Broken) else Answer(step) if isinstance(step, str) else step
        if not request.body.get("stream"):
            await sender.json(200, _whole(request, answer), {})
            return True
        return await self._stream(request, answer, broken, sender)

    async def _stream(
        self, request: WireRequest, answer: Answer, broken: Broken | None, sender: _Sender
    ) -> bool:
        await sender.begin_stream()
        seen = 0
        for kind, frame in _frames(request, answer):
            if broken is not None and broken.how == "unsaid":
                if kind != "why":
                    await sender.frame(frame)
                continue
            if broken is not None and (
                kind in ("why", "tail") or (kind == "content" and seen >= broken.after)
            ):
                if broken.how == "hang" or broken.waits:
                    assert self._released is not None
                    await sender.hang(self._released)
                if broken.how == "cut":
                    sender.abort()
                    return False
                if broken.how != "hang":
                    if broken.how == "error":
                        await sender.frame(_error_frame(request.api))
                    elif broken.how == "garbage":
                        await sender.frame(_sse("{this is not JSON", "content_block_delta"))
                    break
                broken = None
            seen += kind == "content"
            await sender.frame(frame)
        await sender.end_stream()
        return True


class _Sender:
    """Writes one answer, and notices if the client leaves meanwhile."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: WireRequest
    ) -> None:
        self._writer = writer
        self._request = request
        # Nothing is expected from the client before the answer is over: if anything, it is the end.
        self._left = asyncio.ensure_future(reader.read(1))

    def abort(self) -> None:
        # Out with what was written already, then break: a reset would take it back.
        transport: Any = self._writer.transport
        transport.close()

    async def json(self, status: int, body: object, headers: Mapping[str, str]) -> None:
        await _send_json(self._writer, status, body, headers)

    async def begin_stream(self) -> None:
        await self._write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )

    async def frame(self, data: bytes) -> None:
        await self._write(b"%x\r\n%s\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self._write(b"0\r\n\r\n")

    async def hang(self, released: asyncio.Event) -> None:
        waiting = asyncio.ensure_future(released.wait())
        await asyncio.wait({waiting, self._left}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        self._check()

    async def _write(self, data: bytes) -> None:
        self._check()
        self._writer.write(data)
        await self._writer.drain()

    def _check(self) -> None:
        if self._left.done() and not self._left.cancelled():
            raise ConnectionResetError("the client left")

    async def end(self) -> None:
        self._left.cancel()
        await asyncio.gather(self._left, return_exceptions=True)
        self._request._done.set()


async def _read_request(
    reader: asyncio.StreamReader,
) -> tuple[str, Mapping[str, str], Mapping[str, Any]] | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {
        name.strip().lower(): value.strip()
        for name, colon, value in (line.partition(":") for line in lines)
        if colon
    }
    length = int(headers.get("content-length", "0"))
    if length > MAX_BODY_BYTES:
        raise ConnectionError("the request is too large")
    raw = await reader.readexactly(length)
    path = first.split(" ")[1].split("?")[0]
    body = json.loads(raw) if raw else {}
    return path, headers, body if isinstance(body, dict) else {}


async def _send_json(
    writer: asyncio.StreamWriter, status: int, body: object, headers: Mapping[str, str]
) -> None:
    data = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Scripted", "content-type: application/json", f"content-length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
    await writer.drain()


# --- what is asked -------------------------------------------------------------------------------------


def _answers_in(api: Api, body: Mapping[str, Any]) -> int:
    if api != "openai.responses":
        return sum(message.get("role") == "assistant" for message in body.get("messages", ()))
    # An answer is a run of items that are the model's own.
    items = body.get("input")
    count, within = 0, False
    for item in items if isinstance(items, list) else ():
        ours = item.get("role") == "user" or item.get("type") == "function_call_output"
        count += not ours and not within
        within = not ours
    return count


def violations_of(api: Api, body: Mapping[str, Any]) -> Iterator[str]:
    """Say what a provider would refuse a request for."""
    if api == "openai.responses":
        items = body.get("input")
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        if not isinstance(items, list):
            yield "the input is neither a text nor a list"
            return
        yield from openai_responses_violations(items)
        for item in items:
            if item.get("type") == "reasoning" and item != _reasoning_item(_thought_of(item)):
                yield "a reasoning item that was changed"
        return
    messages = body.get("messages")
    if not isinstance(messages, list):
        yield "there are no messages"
        return
    if api == "openai.chat":
        yield from openai_chat_violations(messages)
        return
    blocks = [each for message in messages for each in _blocks(message)]
    yield from anthropic_violations([{**message, "content": _blocks(message)} for message in messages])
    if not isinstance(body.get("max_tokens"), int):
        yield "max_tokens is missing"
    for block in blocks:
        if block.get("type") == "thinking" and block.get("signature") != _signature(block["thinking"]):
            yield "a thinking block that was changed"
    if (body.get("thinking") or {}).get("type") == "enabled" and not _thinks(messages):
        yield "thoughts are asked for in the middle of a turn that began without one"
    if sum("cache_control" in each for each in (*blocks, *_system_blocks(body), *body.get("tools", ()))) > 4:
        yield "more than four cache_control marks"


def _thinks(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Say whether the turn with tools that goes on now, if one does, began with a thought."""
    first: Mapping[str, Any] = {}
    for message in reversed(messages):
        if message.get("role") == "assistant":
            first = message
        elif all(block.get("type") != "tool_result" for block in _blocks(message)):
            break
    return all(block.get("type") in ("thinking", "redacted_thinking") for block in _blocks(first)[:1])


def _blocks(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())


def _system_blocks(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    system = body.get("system")
    return list(system) if isinstance(system, list) else []


# --- what is answered: faults --------------------------------------------------------------------------

_TEXTS: Mapping[FaultKind, str] = {
    "throttled": "Rate limit reached for requests.",
    "quota": "You exceeded your current quota, please check your plan and billing details.",
    "server_error": "The server had an error while processing the request.",
    "overloaded": "Overloaded",
    "context_too_long": "This model's maximum context length is 8192 tokens; the messages have 9000 tokens.",
    "content_filtered": "The response was filtered because the prompt triggered the content policy.",
    "unauthorized": "Incorrect credentials were provided.",
    "bad_request": "The request is not valid.",
}
_OPENAI: Mapping[FaultKind, tuple[int, str, str | None]] = {
    "throttled": (429, "requests", "rate_limit_exceeded"),
    "quota": (429, "insufficient_quota", "insufficient_quota"),
    "server_error": (500, "server_error", None),
    "overloaded": (503, "server_error", "overloaded"),
    "context_too_long": (400, "invalid_request_error", "context_length_exceeded"),
    "content_filtered": (400, "invalid_request_error", "content_filter"),
    "unauthorized": (401, "invalid_request_error", "invalid_api_key"),
    "bad_request": (400, "invalid_request_error", None),
}
_ANTHROPIC: Mapping[FaultKind, tuple[int, str]] = {
    "throttled": (429, "rate_limit_error"),
    "quota": (400, "invalid_request_error"),
    "server_error": (500, "api_error"),
    "overloaded": (529, "overloaded_error"),
    "context_too_long": (400, "invalid_request_error"),
    "content_filtered": (400, "invalid_request_error"),
    "unauthorized": (401, "authentication_error"),
    "bad_request": (400, "invalid_request_error"),
}
_ANTHROPIC_TEXTS: Mapping[FaultKind, str] = {
    "quota": "Your credit balance is too low to access the API.",
    "context_too_long": "prompt is too long: 210000 tokens > 200000 maximum",
    "content_filtered": "Output blocked by content filtering policy",
}


def fault_response(api: Api, fault: Fault) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    """Say what a fault looks like on an interface: status, body, headers."""
    headers = {**fault.headers}
    if fault.retry_after is not None:
        headers["retry-after"] = fault.retry_after
    text = fault.message or _TEXTS[fault.kind]
    if api == "anthropic.messages":
        status, kind = _ANTHROPIC[fault.kind]
        text = fault.message or _ANTHROPIC_TEXTS.get(fault.kind, text)
        error: dict[str, Any] = {"type": "error", "error": {"type": fault.code or kind, "message": text}}
    else:
        status, kind, code = _OPENAI[fault.kind]
        error = {"error": {"message": text, "type": kind, "param": None, "code": fault.code or code}}
    return fault.status or status, error, headers


def _error_frame(api: Api) -> bytes:
    kind: FaultKind = "overloaded" if api == "anthropic.messages" else "server_error"
    _, body, _ = fault_response(api, Fault(kind))
    if api == "openai.responses":
        body = {**body["error"], "type": "error", "code": kind, "sequence_number": 99}
    return _sse(json.dumps(body), None if api == "openai.chat" else "error")


# --- what is answered: streams -------------------------------------------------------------------------

Frame = tuple[Literal["head", "content", "why", "tail"], bytes]


def _frames(request: WireRequest, answer: Answer) -> Iterator[Frame]:
    if request.api == "openai.chat":
        return _chat_frames(request, answer)
    if request.api == "openai.responses":
        return _responses_frames(request, answer)
    return _anthropic_frames(request, answer)


def _sse(data: str, event: str | None = None) -> bytes:
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {data}\n\n".encode()


def _pieces(text: str) -> Iterator[str]:
    """Cut a text as a model would send it: by lines, and long lines by length."""
    for line in text.splitlines(keepends=True):
        for start in range(0, len(line), _PIECE_CHARS):
            yield line[start : start + _PIECE_CHARS]


def _calls(request: WireRequest, answer: Answer) -> list[ToolCall]:
    return answer.tool_calls(request.answers_so_far + 1)


def _halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]


def _signature(thought: str) -> str:
    return "sig_" + hashlib.sha256(thought.encode("utf-8", "surrogatepass")).hexdigest()


def _model(request: WireRequest) -> str:
    return str(request.body.get("model", ""))


def _total(answer: Answer) -> tuple[int, int, int, int]:
    usage = answer.usage
    return (
        usage.input_tokens or 0,
        usage.output_tokens or 0,
        usage.cached_tokens or 0,
        usage.reasoning_tokens or 0,
    )


# Chat Completions


_CHAT_FINISH = {
    "end": "stop",
    "tools": "tool_calls",
    "length": "length",
    "filtered": "content_filter",
    "refused": "stop",
    "paused": "stop",
    "broken_off": "error",
}


def _chat_usage(answer: Answer) -> dict[str, Any]:
    into, out, cached, reasoning = _total(answer)
    return {
        "prompt_tokens": into,
        "completion_tokens": out,
        "total_tokens": into + out,
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": answer.cache_write_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def _chat_frames(request: WireRequest, answer: Answer) -> Iterator[Frame]:
    counts = bool((request.body.get("stream_options") or {}).get("include_usage"))
    base = _chat_base(request, "chat.completion.chunk")

    def chunk(delta: Mapping[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        # Whoever asks for the usage has the field in every chunk, and the numbers in the last one.
        return _sse(json.dumps({**base, "choices": [choice], **({"usage": None} if counts else {})}))

    opening_text = "" if answer.text or not answer.calls else None
    yield "head", chunk({"role": "assistant", "content": opening_text})
    for thought in answer.thoughts:
        yield "content", chunk({"reasoning_content": thought})
    said = "refusal" if answer.stop_reason == "refused" else "content"
    for piece in _pieces(answer.text):
        yield "content", chunk({said: piece})
    for index, call in enumerate(_calls(request, answer)):
        opening = {"index": index, "id": call.id, "type": "function"}
        yield (
            "content",
            chunk({"tool_calls": [{**opening, "function": {"name": call.name, "arguments": ""}}]}),
        )
        for half in _halves(call.arguments_json):
            yield "head", chunk({"tool_calls": [{"index": index, "function": {"arguments": half}}]})
    yield "why", chunk({}, answer.stop_said or _CHAT_FINISH[answer.stop_reason])
    if counts and answer.usage.total is not None:
        yield "tail", _sse(json.dumps({**base, "choices": [], "usage": _chat_usage(answer)}))
    yield "tail", _sse("[DONE]")


def _chat_base(request: WireRequest, kind: str) -> dict[str, Any]:
    name = f"chatcmpl-{request.number}"
    return {"id": name, "object": kind, "created": 1_767_225_600, "model": _model(request)}


# Responses


def _thought_of(item: Mapping[str, Any]) -> str:
    return "".join(str(each.get("text", "")) for each in item.get("summary", ()))


def _reasoning_item(thought: str) -> dict[str, Any]:
    signature = _signature(thought)
    return {
        "id": f"rs_{signature[4:20]}",
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": thought}],
        "encrypted_content": signature,
    }


def _responses_output(request: WireRequest, answer: Answer) -> list[dict[str, Any]]:
    output = [_reasoning_item(thought) for thought in answer.thoughts]
    if answer.text:
        if answer.stop_reason == "refused":
            part: dict[str, Any] = {"type": "refusal", "refusal": answer.text}
        else:
            part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        message = {"id": f"msg_{request.number}", "type": "message", "role": "assistant"}
        output.append({**message, "status": "completed", "content": [part]})
    for place, call in enumerate(_calls(request, answer)):
        output.append(
            {
                "id": f"fc_{request.number}_{place}",
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments_json,
                "status": "completed",
            }
        )
    return output


_INCOMPLETE = {"length": "max_output_tokens", "filtered": "content_filter", "broken_off": "steered"}


def _response(request: WireRequest, answer: Answer | None) -> dict[str, Any]:
    response: dict[str, Any] = {
        "id": f"resp_{request.number}",
        "object": "response",
        "created_at": 1_767_225_600,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": request.body.get("instructions"),
        "metadata": {},
        "model": _model(request),
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }
    if answer is None:
        return response
    into, out, cached, reasoning = _total(answer)
    reason = answer.stop_said or _INCOMPLETE.get(answer.stop_reason)
    return {
        **response,
        "status": "completed" if reason is None else "incomplete",
        "incomplete_details": None if reason is None else {"reason": reason},
        "output": _responses_output(request, answer),
        "usage": None
        if answer.usage.total is None
        else {
            "input_tokens": into,
            "input_tokens_details": {
                "cached_tokens": cached,
                "cache_write_tokens": answer.cache_write_tokens,
            },
            "output_tokens": out,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": into + out,
        },
    }


def _responses_frames(request: WireRequest, answer: Answer) -> Iterator[Frame]:
    number = -1

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return _sse(json.dumps({"type": kind, "sequence_number": number, **fields}), kind)

    yield "head", event("response.created", response=_response(request, None))
    yield "head", event("response.in_progress", response=_response(request, None))
    for index, item in enumerate(_responses_output(request, answer)):
        where = {"item_id": item["id"], "output_index": index}
        kind = item["type"]
        if kind == "reasoning":
            started = {**item, "summary": [], "encrypted_content": ""}
            yield "content", event("response.output_item.added", output_index=index, item=started)
            part = {"type": "summary_text", "text": ""}
            yield "head", event("response.reasoning_summary_part.added", **where, summary_index=0, part=part)
            text = _thought_of(item)
            yield (
                "head",
                event("response.reasoning_summary_text.delta", **where, summary_index=0, delta=text),
            )
            yield "head", event("response.reasoning_summary_text.done", **where, summary_index=0, text=text)
            part = {"type": "summary_text", "text": text}
            yield "head", event("response.reasoning_summary_part.done", **where, summary_index=0, part=part)
        elif kind == "message":
            started = {**item, "content": [], "status": "in_progress"}
            yield "head", event("response.output_item.added", output_index=index, item=started)
            (part,) = item["content"]
            what = "text" if part["type"] == "output_text" else "refusal"
            empty = {**part, what: ""}
            yield "head", event("response.content_part.added", **where, content_index=0, part=empty)
            name = "response.output_text" if what == "text" else "response.refusal"
            more: dict[str, Any] = {"logprobs": []} if what == "text" else {}
            for piece in _pieces(part[what]):
                yield "content", event(f"{name}.delta", **where, content_index=0, delta=piece, **more)
            done = {what: part[what], **more}
            yield "head", event(f"{name}.done", **where, content_index=0, **done)
            yield "head", event("response.content_part.done", **where, content_index=0, part=part)
        else:
            started = {**item, "arguments": "", "status": "in_progress"}
            yield "content", event("response.output_item.added", output_index=index, item=started)
            for half in _halves(item["arguments"]):
                yield "head", event("response.function_call_arguments.delta", **where, delta=half)
            yield (
                "head",
                event(
                    "response.function_call_arguments.done",
                    **where,
                    name=item["name"],
                    arguments=item["arguments"],
                ),
            )
        yield "head", event("response.output_item.done", output_index=index, item=item)
    response = _response(request, answer)
    yield "why", event(f"response.{response['status']}", response=response)


# Messages


_ANTHROPIC_STOPS = {
    "end": "end_turn",
    "tools": "tool_use",
    "length": "max_tokens",
    "filtered": "refusal",
    "refused": "refusal",
    "paused": "pause_turn",
    "broken_off": "unknown",
}


def _anthropic_usage(answer: Answer) -> dict[str, Any]:
    into, out, cached, reasoning = _total(answer)
    return {
        "input_tokens": max(into - cached - answer.cache_write_tokens, 0),
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": answer.cache_write_tokens,
        "output_tokens": out,
        "output_tokens_details": {"thinking_tokens": reasoning},
    }


def _anthropic_message(request: WireRequest, answer: Answer) -> dict[str, Any]:
    content: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": thought, "signature": _signature(thought)}
        for thought in answer.thoughts
    ]
    if answer.text:
        content.append({"type": "text", "text": answer.text, "citations": None})
    for call in _calls(request, answer):
        try:
            parsed = json.loads(call.arguments_json)
        except ValueError:
            parsed = {}
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": parsed})
    return {
        "id": f"msg_{request.number}",
        "type": "message",
        "role": "assistant",
        "model": _model(request),
        "content": content,
        "stop_reason": answer.stop_said or _ANTHROPIC_STOPS[answer.stop_reason],
        "stop_sequence": None,
        "usage": _anthropic_usage(answer),
    }


def _anthropic_frames(request: WireRequest, answer: Answer) -> Iterator[Frame]:
    def event(kind: str, **fields: Any) -> bytes:
        return _sse(json.dumps({"type": kind, **fields}), kind)

    whole = _anthropic_message(request, answer)
    started = {**whole["usage"], "output_tokens": 1, "output_tokens_details": None}
    opened = {**whole, "content": [], "stop_reason": None, "usage": started}
    yield "head", event("message_start", message=opened)
    yield "head", event("ping")
    calls = iter(_calls(request, answer))
    empty: dict[str, Any]
    for index, block in enumerate(whole["content"]):
        if block["type"] == "thinking":
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            yield "content", event("content_block_start", index=index, content_block=empty)
            for half in _halves(block["thinking"]):
                delta = {"type": "thinking_delta", "thinking": half}
                yield "head", event("content_block_delta", index=index, delta=delta)
            delta = {"type": "signature_delta", "signature": block["signature"]}
            yield "head", event("content_block_delta", index=index, delta=delta)
        elif block["type"] == "text":
            empty = {"type": "text", "text": ""}
            yield "head", event("content_block_start", index=index, content_block=empty)
            for piece in _pieces(block["text"]):
                delta = {"type": "text_delta", "text": piece}
                yield "content", event("content_block_delta", index=index, delta=delta)
        else:
            empty = {**block, "input": {}}
            yield "content", event("content_block_start", index=index, content_block=empty)
            for half in _halves(next(calls).arguments_json):
                delta = {"type": "input_json_delta", "partial_json": half}
                yield "head", event("content_block_delta", index=index, delta=delta)
        yield "head", event("content_block_stop", index=index)
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    counted = {} if answer.usage.total is None else {"usage": whole["usage"]}
    yield "why", event("message_delta", delta=ended, **counted)
    yield "tail", event("message_stop")


# Answers in one piece


def _whole(request: WireRequest, answer: Answer) -> object:
    if request.api == "openai.responses":
        return _response(request, answer)
    if request.api == "anthropic.messages":
        return _anthropic_message(request, answer)
    refused = answer.stop_reason == "refused"
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if refused else answer.text or None,
        "refusal": answer.text if refused else None,
    }
    calls = _calls(request, answer)
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json},
            }
            for call in calls
        ]
    finish = answer.stop_said or _CHAT_FINISH[answer.stop_reason]
    choice = {"index": 0, "message": message, "finish_reason": finish}
    usage = _chat_usage(answer)
    return {
        **_chat_base(request, "chat.completion"),
        "choices": [{**choice, "logprobs": None}],
        "usage": usage,
    }
