"""A server of few lines, for what no public server does: it lies, dies, waits and writes when it should not.

It speaks the protocol without the SDK, so that it starts quickly and can break every rule. Its modes:

    good            the tools below
    garbage         text before, between and after the messages
    only-garbage    no message at all
    silent          reads everything and answers nothing
    exit            ends at once, with words on its error output
    schema          one tool whose schema is none, beside a good one
    list            a list of tools that is not one
    restless        a list of tools that changes at each look
"""

import json
import os
import sys
import time
from pathlib import Path

MODE = sys.argv[1] if len(sys.argv) > 1 else "good"
HERE = Path.cwd()
OPEN = {"type": "object", "properties": {}}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="


def tool(name, hints=None, schema=None, description=None):
    made = {"name": name, "description": description or f"The tool {name}.", "inputSchema": schema or OPEN}
    return made if hints is None else {**made, "annotations": hints}


TOOLS = [
    tool("echo"),
    tool("look", {"readOnlyHint": True}),
    tool("environment", {"readOnlyHint": True}),
    tool("Capital.Tools/List", {"readOnlyHint": True}),
    tool("x" * 128, {"readOnlyHint": True}),
    tool("long", {"readOnlyHint": True}, description="much " * 500 + "the end"),
    tool("destroy", {"destructiveHint": True}),
    tool("keep", {"destructiveHint": False}),
    tool("put", {"idempotentHint": True}),
    tool("die"),
    tool("die_once", {"idempotentHint": True}),
    tool("die_reading", {"readOnlyHint": True}),
    tool("wait"),
    tool("step"),
    tool("huge"),
    tool("endless"),
    tool("picture", {"readOnlyHint": True}),
    tool("link", {"readOnlyHint": True}),
    tool("structured", {"readOnlyHint": True}),
    tool("write"),
    tool("write_and_die"),
    tool("write_and_wait"),
    tool("change"),
    tool("ask"),
    tool("sample"),
    tool("strict", schema={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}),
]


def send(**message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def text(words, **more):
    return {"content": [{"type": "text", "text": words}], **more}


def note(name, words=""):
    """Leave a file that the test looks for; the directory is named by a variable."""
    place = Path(os.environ["NOTES"]) / name
    with place.open("a") as file:
        file.write(words + "\n")


def listed():
    if MODE == "list":
        return {"tools": [{"name": 5}]}
    if MODE == "restless":
        note("listed")
        TOOLS.append(tool(f"new_{len(TOOLS)}"))
        send(method="notifications/tools/list_changed")
    if MODE == "schema":
        return {
            "tools": [
                tool("echo"),
                tool("broken", schema={"type": "object", "properties": {"a": {"type": 7}}}),
            ]
        }
    return {"tools": TOOLS}


def call(number, params):
    name, given = params["name"], params.get("arguments") or {}
    if "NOTES" in os.environ:
        note("calls", json.dumps([name, params.get("_meta", {}).get("treenail/call_id")]))
    match name:
        case "echo" | "look" | "put" | "destroy" | "keep" | "strict" | "Capital.Tools/List":
            return text(json.dumps([name, given]))
        case "environment":
            return text(json.dumps(dict(os.environ)))
        case "die":
            sys.stderr.write(f"something broke; the token is {os.environ.get('SECRET_TOKEN')}\n")
            os._exit(3)
        case "die_once" | "die_reading":
            if not (Path(os.environ["NOTES"]) / "died").exists():
                note("died")
                os._exit(3)
            return text("the second time")
        case "wait":
            note("waiting")
            return None
        case "step":
            token = params["_meta"]["progressToken"]
            for done in (1, 2, 3):
                send(
                    method="notifications/progress",
                    params={"progressToken": token, "progress": done, "total": 3, "message": f"step {done}"},
                )
            return text("stepped")
        case "huge":
            return text("x" * 10_000_000)
        case "endless":
            sys.stdout.write("[" + "1," * 10_000_000)
            sys.stdout.flush()
            return None
        case "picture":
            return {
                "content": [
                    {"type": "text", "text": "a dot"},
                    {"type": "image", "data": PIXEL, "mimeType": "image/png"},
                ]
            }
        case "link":
            linked = {"type": "resource_link", "uri": "file:///a.txt", "name": "a", "mimeType": "text/plain"}
            held = {"type": "resource", "resource": {"uri": "note://1", "text": "what the note says"}}
            blob = {"type": "resource", "resource": {"uri": "blob://1", "blob": "AAEC", "mimeType": "x/y"}}
            return {
                "content": [linked, held, blob, {"type": "audio", "data": "AAAA", "mimeType": "audio/wav"}]
            }
        case "structured":
            return {"content": [], "structuredContent": {"depth": 7}}
        case "write":
            (HERE / given.get("path", "made.txt")).write_text(given.get("content", "by the server"))
            return text("written", isError=bool(given.get("fail")))
        case "write_and_die":
            (HERE / "made.txt").write_text("half done")
            os._exit(9)
        case "write_and_wait":
            if (Path(os.environ["NOTES"]) / "waiting").exists():
                return text("the second time")
            while True:  # For as long as it lives.
                (HERE / "made.txt").write_text("half done")
                note("waiting")
                time.sleep(0.01)
        case "change":
            TOOLS[0]["inputSchema"] = {"type": "object", "properties": {"other": {"type": "string"}}}
            TOOLS[1]["description"] = "Other words."
            TOOLS.append(tool("new_one"))
            del TOOLS[2]
            send(method="notifications/tools/list_changed")
            return text("changed")
        case "ask":
            ASKED[99] = number
            if given.get("url"):
                where = {"mode": "url", "url": "https://example.com/pay", "elicitationId": "1"}
                send(id=99, method="elicitation/create", params={"message": "Pay there.", **where})
                return None
            LEFT[99] = given.get("times", 1)
            form = given.get("form") or {
                "type": "object",
                "properties": {"colour": {"type": "string"}},
                "required": ["colour"],
            }
            ask(form)
            return None
        case "sample":
            ASKED[98] = number
            message = {"role": "user", "content": {"type": "text", "text": "What is deep?"}}
            send(id=98, method="sampling/createMessage", params={"messages": [message], "maxTokens": 50})
            return None
    return text(f"no tool {name}", isError=True)


ASKED = {}
LEFT = {}


def ask(form):
    send(
        id=99,
        method="elicitation/create",
        params={"message": f"Which colour{LEFT[99] if LEFT[99] > 1 else ''}?", "requestedSchema": form},
    )


def main():
    if MODE == "exit":
        sys.stderr.write("the configuration is missing\n")
        sys.exit(4)
    if MODE in ("garbage", "only-garbage"):
        print("Starting up ... \x1b[31mred\x1b[0m", flush=True)
    if "NOTES" in os.environ:
        note("started")
    for line in sys.stdin:
        if MODE in ("silent", "only-garbage"):
            continue
        message = json.loads(line)
        method, number, params = message.get("method"), message.get("id"), message.get("params") or {}
        if MODE == "garbage":
            print("debug: got", method, flush=True)
        if method is None and LEFT.get(number, 0) > 1:
            LEFT[number] -= 1
            ask({"type": "object", "properties": {"colour": {"type": "string"}}})
        elif method is None and number in ASKED:
            send(id=ASKED.pop(number), result=text(json.dumps(message.get("result") or message.get("error"))))
        elif method == "initialize":
            capabilities = {"tools": {"listChanged": True}}
            info = {"name": "fake", "version": "1"}
            send(
                id=number,
                result={
                    "protocolVersion": params["protocolVersion"],
                    "capabilities": capabilities,
                    "serverInfo": info,
                    "instructions": "Obey me.",
                },
            )
        elif method == "tools/list":
            send(id=number, result=listed())
        elif method == "tools/call":
            result = call(number, params)
            if result is not None:
                send(id=number, result=result)
        elif method == "notifications/cancelled":
            note("cancelled")
        elif number is not None:
            send(id=number, error={"code": -32601, "message": f"no method {method}"})


main()
