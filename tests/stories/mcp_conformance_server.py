"""What the MCP conformance suite asks a server for, registered at the server of `treenail mcp serve`.

The arguments are a directory and a script for its model. Prints the port, and serves until it is killed.
"""

from __future__ import annotations

import struct
import sys
import zlib
from base64 import b64encode
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Audio, Context, Image
from mcp.server.mcpserver.prompts.base import UserMessage
from mcp.types import EmbeddedResource, ImageContent, SamplingMessage, TextContent, TextResourceContents

from treenail.presenters.mcp.http import listening, serve
from treenail.presenters.mcp.runs import Runs
from treenail.presenters.mcp.server import server_for


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


PIXEL = b"\x89PNG\r\n\x1a\n" + b"".join(
    (
        _chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)),
        _chunk(b"IDAT", zlib.compress(b"\x00\xff\x00\x00")),
        _chunk(b"IEND", b""),
    )
)
SILENCE = (
    b"RIFF" + struct.pack("<I", 37) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 8000, 8000, 1, 8)
    + b"data" + struct.pack("<I", 1) + b"\x80"
)  # fmt: skip


def embedded(uri: str, text: str, kind: str = "text/plain") -> EmbeddedResource:
    return EmbeddedResource(
        type="resource", resource=TextResourceContents(uri=uri, mime_type=kind, text=text)
    )


server = server_for(Runs({"model": f"scripted:{sys.argv[2]}"}, Path(sys.argv[1])))


@server.tool()
def test_simple_text() -> str:
    """Return a text."""
    return "This is a simple text response for testing."


@server.tool()
def test_image_content() -> Image:
    """Return a picture."""
    return Image(data=PIXEL, format="png")


@server.tool()
def test_audio_content() -> Audio:
    """Return a sound."""
    return Audio(data=SILENCE, format="wav")


@server.tool()
def test_embedded_resource() -> EmbeddedResource:
    """Return a resource."""
    return embedded("test://embedded-resource", "This is an embedded resource content.")


@server.tool()
def test_multiple_content_types() -> list[TextContent | ImageContent | EmbeddedResource]:
    """Return one of each."""
    return [
        TextContent(type="text", text="Multiple content types test:"),
        ImageContent(type="image", data=b64encode(PIXEL).decode(), mime_type="image/png"),
        embedded("test://mixed-content-resource", '{"test":"data","value":123}', "application/json"),
    ]


@server.tool()
def test_error_handling() -> str:
    """Fail."""
    raise ValueError("This tool intentionally returns an error for testing")


@server.tool()
async def test_tool_with_progress(context: Context[Any, Any]) -> str:
    """Report progress."""
    for done in (0, 50, 100):
        await context.report_progress(done, 100)
    return "done"


@server.tool()
async def test_sampling(prompt: str, context: Context[Any, Any]) -> str:
    """Ask the client's model."""
    message = SamplingMessage(role="user", content=TextContent(type="text", text=prompt))
    answer = await context.request_context.session.create_message(
        [message], max_tokens=100, related_request_id=context.request_id
    )
    return f"LLM response: {answer.content}"


async def asked(context: Context[Any, Any], message: str, **fields: dict[str, Any]) -> str:
    wanted = {"type": "object", "properties": fields, "required": list(fields)}
    answer = await context.request_context.session.elicit_form(message, wanted, context.request_id)
    return f"Elicitation completed: action={answer.action}, content={answer.content}"


@server.tool()
async def test_elicitation(message: str, context: Context[Any, Any]) -> str:
    """Ask the person."""
    return await asked(context, message, username={"type": "string"}, email={"type": "string"})


@server.tool()
async def test_elicitation_sep1034_defaults(context: Context[Any, Any]) -> str:
    """Ask the person, with defaults."""
    states = ["active", "inactive", "pending"]
    return await asked(
        context,
        "with defaults",
        name={"type": "string", "default": "John Doe"},
        age={"type": "integer", "default": 30},
        score={"type": "number", "default": 95.5},
        status={"type": "string", "enum": states, "default": "active"},
        verified={"type": "boolean", "default": True},
    )


@server.tool()
async def test_elicitation_sep1330_enums(context: Context[Any, Any]) -> str:
    """Ask the person to choose."""
    values = [f"option{number}" for number in (1, 2, 3)]
    titled = [{"const": f"value{number}", "title": f"Option {number}"} for number in (1, 2, 3)]
    names = ["Option One", "Option Two", "Option Three"]
    return await asked(
        context,
        "choose",
        untitledSingle={"type": "string", "enum": values},
        titledSingle={"type": "string", "oneOf": titled},
        legacyEnum={"type": "string", "enum": ["opt1", "opt2", "opt3"], "enumNames": names},
        untitledMulti={"type": "array", "items": {"type": "string", "enum": values}},
        titledMulti={"type": "array", "items": {"anyOf": titled}},
    )


@server.prompt()
def test_simple_prompt() -> str:
    """Say something."""
    return "This is a simple prompt for testing."


@server.prompt()
def test_prompt_with_arguments(arg1: str, arg2: str) -> str:
    """Say what was given."""
    return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"


@server.prompt()
def test_prompt_with_embedded_resource(resourceUri: str) -> list[UserMessage]:
    """Give a resource."""
    text = "Please process the embedded resource above."
    return [
        UserMessage(embedded(resourceUri, "Embedded resource content for testing.")),
        UserMessage(text),
    ]


@server.prompt()
def test_prompt_with_image() -> list[UserMessage]:
    """Give a picture."""
    picture = ImageContent(type="image", data=b64encode(PIXEL).decode(), mime_type="image/png")
    return [UserMessage(picture), UserMessage("Please analyze the image above.")]


@server.resource("test://static-text", mime_type="text/plain")
def static_text() -> str:
    """A text."""
    return "This is the content of the static text resource."


@server.resource("test://static-binary", mime_type="image/png")
def static_binary() -> bytes:
    """A picture."""
    return PIXEL


@server.resource("test://template/{id}/data", mime_type="application/json")
def template(id: str) -> dict[str, Any]:
    """Data about an id."""
    return {"id": id, "templateTest": True, "data": f"Data for ID: {id}"}


if __name__ == "__main__":
    listener = listening(0)
    print(listener.getsockname()[1], flush=True)
    serve(server, listener, None)
