"""What an editor sends and gets, with a real process of `treenail acp`."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.editors.editor import Editor, Refused, editor, environment, script


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"calls": [{"name": name, "arguments": arguments}]}


SCRIPTS: dict[str, Any] = {
    "write": [
        {"text": "I write it."} | call("write_file", path="a.txt", content="one\nTWO\nthree\n"),
        "All done.",
    ],
    "edit and fail": [call("edit_file", path="a.txt", old_text="absent", new_text="x"), "It failed."],
    "twice": [
        call("write_file", path="a.txt", content="1\n") | {"text": "First."},
        call("write_file", path="b.txt", content="2\n"),
        "Both.",
    ],
    "read": [call("read_file", path="a.txt"), "Read."],
    "sleep": [{"text": "Wait."} | call("run_command", command="echo up; sleep 600"), "Awake."],
    "change": [call("run_command", command="sed -i s/two/TWO/ a.txt"), "Changed."],
    "plan": [
        call("setup_plan", objective="o", steps=["first", "second"]),
        call("update_step", step=1, status="in_progress"),
        "Planned.",
    ],
    "time": [call("my-clock__get_current_time", timezone="UTC"), "Told."],
    "choose": [call("ask_person", question="Which database?", options=["SQLite", "Postgres"]), "Chosen."],
    "ask": [call("ask_person", question="What is its name?"), "Named."],
    "pay": [call("fake__ask", url=True), "Asked."],
    "colour": [call("fake__ask"), "Asked."],
    "escape": ["\x1b]0;title\x07plain"],
    "": ["An answer."],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def model(home: Path) -> str:
    return script(home / "script.json", SCRIPTS)


@pytest.fixture(scope="module")
def shared(home: Path, model: str) -> Iterator[Editor]:
    with editor(home, "--model", model, "--auto") as opened:
        opened.initialize(fs={"readTextFile": True})
        yield opened


@pytest.fixture
def zed(shared: Editor) -> Editor:
    """The editor, as if nothing had been said yet."""
    shared.answers.clear()
    shared.updates.clear()
    shared.asked.clear()
    return shared


@pytest.fixture
def ws(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    return tmp_path


def allow(option: str) -> Any:
    return lambda params: {"outcome": {"outcome": "selected", "optionId": option}}


def test_initialize_says_what_the_agent_can_do(home: Path, model: str) -> None:
    """The version, sessions that can be loaded and listed, pictures and embedded files."""
    with editor(home, "--model", model) as opened:
        answer = opened.initialize()
        assert answer["protocolVersion"] == 1
        able = answer["agentCapabilities"]
        assert able["loadSession"] is True
        assert able["sessionCapabilities"] == {"list": {}}
        assert able["promptCapabilities"] == {"image": True, "audio": False, "embeddedContext": True}
        # The editor leaves: the process ends by itself.
        assert opened.process.stdin is not None
        opened.process.stdin.close()
        assert opened.process.wait(timeout=240) == 0


def test_a_turn_is_shown_while_it_runs(zed: Editor, ws: Path) -> None:
    """Text, a call with its kind, place and input, its outcome with a real diff, then one stop reason."""
    session = zed.new(ws)
    answer = zed.prompt(session, "write it")
    assert answer["stopReason"] == "end_turn"
    assert answer["_meta"]["treenail"]["state"] == "completed"
    assert answer["usage"]["totalTokens"] == 240
    assert zed.said() == "I write it.All done."
    [begun], [done] = zed.of("tool_call"), zed.of("tool_call_update")
    assert (begun["kind"], begun["status"], begun["title"]) == ("edit", "in_progress", "Write file a.txt")
    assert begun["locations"] == [{"path": str(ws / "a.txt")}]
    assert begun["rawInput"] == {"path": "a.txt", "content": "one\nTWO\nthree\n"}
    assert (done["toolCallId"], done["status"]) == (begun["toolCallId"], "completed")
    assert done["content"][0] == {
        "type": "diff",
        "path": str(ws / "a.txt"),
        "oldText": "one\ntwo\nthree\n",
        "newText": "one\nTWO\nthree\n",
    }
    assert zed.wait_for(lambda e: e.of("available_commands_update"))


def test_a_failed_call_is_shown_as_failed_and_has_no_diff(zed: Editor, ws: Path) -> None:
    """The text says why."""
    zed.prompt(zed.new(ws), "edit and fail")
    [done] = zed.of("tool_call_update")
    assert done["status"] == "failed"
    assert [each["type"] for each in done["content"]] == ["content"]
    assert "does not occur" in done["content"][0]["content"]["text"]


def test_a_plan_is_shown_as_one(zed: Editor, ws: Path) -> None:
    """Each change of it, with the status of each step."""
    zed.prompt(zed.new(ws), "plan it")
    plans = [[(each["content"], each["status"]) for each in plan["entries"]] for plan in zed.of("plan")]
    assert plans[-1] == [("first", "in_progress"), ("second", "pending")]


def test_a_loaded_session_is_told_from_its_beginning_before_the_answer(zed: Editor, ws: Path) -> None:
    """Whatever was shown while it ran is shown again, in order, and can be continued."""
    session = zed.new(ws)
    zed.prompt(session, "twice")
    zed.updates.clear()
    zed.lines.clear()
    zed.request("session/load", sessionId=session, cwd=str(ws), mcpServers=[])
    messages = [json.loads(line) for line in zed.lines]
    answered = next(place for place, each in enumerate(messages) if "result" in each)
    told = [each["params"]["update"] for each in messages[:answered]]
    assert [each["sessionUpdate"] for each in told] == [
        "user_message_chunk",
        "agent_message_chunk",
        "tool_call",
        "tool_call",
        "agent_message_chunk",
    ]
    assert [each["status"] for each in told if each["sessionUpdate"] == "tool_call"] == ["completed"] * 2
    assert told[2]["content"][0]["newText"] == "1\n"
    assert told[3]["content"][0] == {"type": "diff", "path": str(ws / "b.txt"), "newText": "2\n"}
    listed = zed.request("session/list", cwd=str(ws))["sessions"]
    assert [(each["sessionId"], each["title"], each["cwd"]) for each in listed] == [
        (session, "twice", str(ws))
    ]


@pytest.mark.parametrize(("option", "line"), [("allow", "TWO"), ("reject", "two")])
def test_a_call_runs_if_the_person_allows_it(zed: Editor, ws: Path, option: str, line: str) -> None:
    """The question shows the change as a diff; a refusal changes nothing, and the model is told."""
    session = zed.new(ws)
    zed.request("session/set_mode", sessionId=session, modeId="ask")
    zed.answers["session/request_permission"] = allow(option)
    assert zed.prompt(session, "write it")["stopReason"] == "end_turn"
    [question] = [each["params"] for each in zed.asked if "permission" in each["method"]]
    assert question["toolCall"]["content"][0]["newText"] == "one\nTWO\nthree\n"
    assert [each["kind"] for each in question["options"]] == ["allow_once", "allow_always", "reject_once"]
    assert (ws / "a.txt").read_text() == f"one\n{line}\nthree\n"
    assert zed.of("tool_call_update")[-1]["status"] == ("completed" if option == "allow" else "failed")


def test_read_only_refuses_and_takes_effect_at_once(zed: Editor, ws: Path) -> None:
    """A mode holds from the next call on; both ways of choosing it agree."""
    session = zed.new(ws)
    zed.request("session/set_config_option", sessionId=session, configId="mode", value="read-only")
    assert zed.of("current_mode_update")[-1]["currentModeId"] == "read-only"
    zed.prompt(session, "write it")
    assert zed.of("tool_call_update")[-1]["status"] == "failed"
    assert (ws / "a.txt").read_text() == "one\ntwo\nthree\n"
    with pytest.raises(Refused, match="there is no mode 'yolo'; there are ask, auto, read-only"):
        zed.request("session/set_mode", sessionId=session, modeId="yolo")


def test_the_model_can_be_chosen(zed: Editor, ws: Path, home: Path) -> None:
    """The next turn uses it; one that cannot be used is refused, and the old one stays."""
    session = zed.new(ws)
    other = script(home / "other.json", ["Another model."])
    with pytest.raises(Refused, match="no-such"):
        zed.request(
            "session/set_config_option", sessionId=session, configId="model", value="scripted:/no-such"
        )
    answer = zed.request("session/set_config_option", sessionId=session, configId="model", value=other)
    assert [each["currentValue"] for each in answer["configOptions"]] == ["auto", other]
    zed.prompt(session, "who are you")
    assert zed.said() == "Another model."


def test_what_a_command_writes_is_shown_while_it_runs(zed: Editor, ws: Path) -> None:
    """Before its end, which here is a cancellation."""
    session = zed.new(ws)
    answer = zed.begin_prompt(session, "sleep")
    shown = zed.wait_for(lambda e: [each for each in e.of("tool_call_update") if "up" in json.dumps(each)])
    assert shown[0]["status"] == "in_progress"
    assert shown[0]["content"][0]["content"]["text"] == "```\nup\n\n```"
    zed.notify("session/cancel", sessionId=session)
    assert answer()["stopReason"] == "cancelled"


def test_a_command_that_changes_a_file_with_unsaved_changes_says_so(zed: Editor, ws: Path) -> None:
    """The person is told with the call; an editor that still shows the old text has no conflict."""
    zed.answers["fs/read_text_file"] = lambda params: {"content": "one\nUNSAVED\n"}
    zed.prompt(zed.new(ws), "change by command")
    assert "Conflict: a.txt has unsaved changes in your editor" in json.dumps(zed.of("tool_call_update"))
    assert (ws / "a.txt").read_text() == "one\nTWO\nthree\n"
    (ws / "a.txt").write_text("one\ntwo\nthree\n")
    zed.updates.clear()
    zed.answers["fs/read_text_file"] = lambda params: {"content": "one\ntwo\nthree\n"}
    zed.prompt(zed.new(ws), "change by command")
    assert zed.of("tool_call_update")[-1]["status"] == "completed"
    assert "Conflict" not in json.dumps(zed.updates)


def test_cancel_while_a_call_runs(zed: Editor, ws: Path) -> None:
    """The command is killed, the answer is `cancelled`, and the log says interrupted."""
    session = zed.new(ws)
    answer = zed.begin_prompt(session, "sleep")
    zed.wait_for(lambda e: e.of("tool_call"))
    with pytest.raises(Refused, match="a turn is under way"):
        zed.prompt(session, "meanwhile")
    zed.notify("session/cancel", sessionId=session)
    stopped = answer()
    assert stopped["stopReason"] == "cancelled"
    assert stopped["_meta"]["treenail"]["state"] == "interrupted"
    assert zed.of("tool_call_update")[-1]["status"] == "failed"


def test_cancel_while_a_question_is_open(zed: Editor, ws: Path) -> None:
    """The question is given up, whether or not the editor answers it, and the call is not run."""
    session = zed.new(ws)
    zed.request("session/set_mode", sessionId=session, modeId="ask")
    zed.answers["session/request_permission"] = lambda params: None
    answer = zed.begin_prompt(session, "write it")
    zed.wait_for(lambda e: e.asked)
    zed.notify("session/cancel", sessionId=session)
    assert answer()["stopReason"] == "cancelled"
    assert (ws / "a.txt").read_text() == "one\ntwo\nthree\n"
    zed.answers["session/request_permission"] = lambda params: {"outcome": {"outcome": "cancelled"}}
    assert zed.prompt(session, "/resume")["stopReason"] == "cancelled"
    zed.answers["session/request_permission"] = allow("allow")
    assert zed.prompt(session, "/resume")["stopReason"] == "end_turn"
    assert (ws / "a.txt").read_text() == "one\nTWO\nthree\n"


def test_several_sessions_work_at_once(zed: Editor, ws: Path) -> None:
    """One that waits delays no other, and a cancellation reaches only its own."""
    slow, quick = zed.new(ws), zed.new(ws)
    waiting = zed.begin_prompt(slow, "sleep")
    zed.wait_for(lambda e: e.of("tool_call"))
    assert zed.prompt(quick, "just answer")["stopReason"] == "end_turn"
    zed.notify("session/cancel", sessionId=slow)
    assert waiting()["stopReason"] == "cancelled"


def test_pictures_files_and_links_reach_the_model(zed: Editor, ws: Path, home: Path) -> None:
    """A picture as itself, an embedded file with its path and text, a link as a path in the workspace."""
    session = zed.new(ws)
    (ws / "a b.txt").write_text("")
    zed.request(
        "session/prompt",
        sessionId=session,
        prompt=[
            {"type": "text", "text": "Look at "},
            {"type": "resource_link", "name": "x", "uri": f"file://{ws}/a%20b.txt"},
            {"type": "resource", "resource": {"uri": f"file://{ws}/a.txt", "text": "embedded text"}},
            {"type": "image", "mimeType": "image/png", "data": base64.b64encode(b"png").decode()},
        ],
    )
    zed.updates.clear()
    shown = treenail(home, ws, "export", session).stdout
    asked = next(json.loads(line) for line in shown.splitlines() if '"role":"user"' in line.replace(" ", ""))
    said = json.dumps(asked)
    assert "@a b.txt" in said
    assert '<file path=\\"a.txt\\">\\nembedded text\\n</file>' in said
    assert "image/png" in said
    with pytest.raises(Refused, match="audio"):
        zed.request(
            "session/prompt",
            sessionId=session,
            prompt=[{"type": "audio", "data": "", "mimeType": "audio/wav"}],
        )


def test_commands_are_answered_without_the_model(zed: Editor, ws: Path) -> None:
    """What a run did is shown, undone and redone; a command that cannot do its work is an error."""
    session = zed.new(ws)
    with pytest.raises(Refused, match="nothing has happened"):
        zed.prompt(session, "/undo")
    zed.prompt(session, "write it")
    zed.updates.clear()
    assert zed.prompt(session, "/diff")["stopReason"] == "end_turn"
    assert "-two\n+TWO" in zed.said()
    zed.prompt(session, "/undo")
    assert (ws / "a.txt").read_text() == "one\ntwo\nthree\n"
    zed.prompt(session, "/redo")
    assert (ws / "a.txt").read_text() == "one\nTWO\nthree\n"
    with pytest.raises(Refused):
        zed.prompt(session, "/redo")
    with pytest.raises(Refused, match="nothing to resume"):
        zed.prompt(session, "/resume")
    zed.updates.clear()
    zed.prompt(session, "/usage")
    assert "2 model calls" in zed.said()


def test_servers_that_the_editor_names_are_used(zed: Editor, ws: Path) -> None:
    """A public MCP server, started for the run; a call of it is a call like any other."""
    clock = {
        "name": "My Clock",
        "command": sys.executable,
        "args": ["-m", "mcp_server_time", "--local-timezone", "UTC"],
        "env": [{"name": "SECRET", "value": "s3cr3t-value"}],
    }
    zed.answers["session/request_permission"] = allow("allow")
    session = zed.request("session/new", cwd=str(ws), mcpServers=[clock])["sessionId"]
    assert zed.prompt(session, "time")["stopReason"] == "end_turn"
    done = zed.of("tool_call_update")[-1]
    assert done["status"] == "completed"
    assert "UTC" in json.dumps(done)
    assert b"s3cr3t-value" not in b"".join(zed.lines)
    with pytest.raises(Refused, match="the same name"):
        zed.request("session/new", cwd=str(ws), mcpServers=[clock, clock])


def test_a_question_of_the_model_is_asked_with_its_answers(zed: Editor, ws: Path) -> None:
    """The person chooses one of them, and the model is told which."""
    zed.answers["session/request_permission"] = allow("option-1")
    assert zed.prompt(zed.new(ws), "choose")["stopReason"] == "end_turn"
    assert [each["name"] for each in zed.asked[0]["params"]["options"]] == [
        "SQLite",
        "Postgres",
        "Do not answer",
    ]
    assert "The person answers: Postgres" in json.dumps(zed.of("tool_call_update"))


def test_a_question_in_words_is_answered_by_the_next_message(zed: Editor, ws: Path) -> None:
    """The turn has not ended, so there is no stop reason; the answer resumes it."""
    session = zed.new(ws)
    with pytest.raises(Refused, match="type the answer to the question as your next message") as held:
        zed.prompt(session, "ask")
    assert held.value.data["state"] == "held"
    assert "What is its name?" in zed.said()
    assert zed.prompt(session, "Call it Ada")["stopReason"] == "end_turn"
    assert "The person answers: Call it Ada" in json.dumps(zed.of("tool_call_update"))
    assert zed.asked == []


FAKE = {
    "name": "fake",
    "command": sys.executable,
    "args": ["-I", "-S", str(Path(__file__).parents[1] / "mcp_client" / "fake_server.py"), "good"],
    "env": [],
}


def answering(*options: str) -> Any:
    """A person who allows each call, and chooses these answers to the questions of its server."""
    left = iter(options)

    def answer(params: Any) -> Any:
        offered = [each["optionId"] for each in params["options"]]
        return allow("allow" if "always" in offered or offered[:1] == ["allow"] else next(left))(params)

    return answer


def results(zed: Editor) -> list[Any]:
    """What the server was told, which is what it answers."""
    done = [each for each in zed.updates if each.get("status") == "completed"]
    return [json.loads(each["content"][0]["content"]["text"].strip("`\n")) for each in done]


@pytest.mark.parametrize(("option", "action"), [("reject", "decline"), ("option-0", "accept")])
def test_a_server_that_sends_a_person_to_an_address_gets_their_own_word(
    zed: Editor, ws: Path, option: str, action: str
) -> None:
    """They accept or decline by choosing, while the call waits; nothing that they type is taken for a yes."""
    zed.answers["session/request_permission"] = answering(option)
    session = zed.request("session/new", cwd=str(ws), mcpServers=[FAKE])["sessionId"]
    assert zed.prompt(session, "pay")["stopReason"] == "end_turn"
    permission, asked = zed.asked
    assert permission["params"]["toolCall"]["toolCallId"] == asked["params"]["toolCall"]["toolCallId"]
    assert "https://example.com/pay" in json.dumps(asked["params"]["toolCall"]["content"])
    assert "--yes" not in json.dumps(asked)
    assert [each["kind"] for each in asked["params"]["options"]] == ["allow_once", "reject_once"]
    assert results(zed) == [{"action": action}]


def test_words_are_never_a_yes_to_a_form_of_a_server(zed: Editor, ws: Path) -> None:
    """The form takes fields; other words ask again, and it can be declined then."""
    zed.answers["session/request_permission"] = answering("fields", "fields", "reject")
    session = zed.request("session/new", cwd=str(ws), mcpServers=[FAKE])["sessionId"]
    with pytest.raises(Refused, match="as your next message"):
        zed.prompt(session, "colour")
    assert "Type the fields as one JSON object" in zed.said()
    with pytest.raises(Refused, match="as your next message"):
        zed.prompt(session, "No! Stop.")
    assert "the server was told nothing" in zed.said()
    assert zed.prompt(session, "No! Stop.")["stopReason"] == "end_turn"
    assert results(zed) == [{"action": "decline"}]


def test_a_form_of_a_server_is_filled_in_with_the_next_message(zed: Editor, ws: Path) -> None:
    zed.answers["session/request_permission"] = answering("fields")
    session = zed.request("session/new", cwd=str(ws), mcpServers=[FAKE])["sessionId"]
    with pytest.raises(Refused, match="as your next message"):
        zed.prompt(session, "colour")
    assert zed.prompt(session, '{"colour": "red"}')["stopReason"] == "end_turn"
    assert results(zed) == [{"action": "accept", "content": {"colour": "red"}}]


def test_an_unsaved_buffer_is_read_and_said_to_be_one(zed: Editor, ws: Path) -> None:
    """The model reads what the person sees; a buffer that equals its file is an ordinary read."""
    zed.answers["fs/read_text_file"] = lambda params: {"content": "one\ntwo\nthree\n"}
    zed.prompt(zed.new(ws), "read it")
    assert "unsaved" not in json.dumps(zed.of("tool_call_update"))
    zed.answers["fs/read_text_file"] = lambda params: {"content": "one\nUNSAVED\n"}
    zed.updates.clear()
    zed.prompt(zed.new(ws), "read it")
    text = zed.of("tool_call_update")[-1]["content"][0]["content"]["text"]
    assert "has unsaved changes in the person's editor" in text
    assert "2\tUNSAVED" in text
    assert {each["params"]["path"] for each in zed.asked} == {str(ws / "a.txt")}


def test_a_write_to_a_file_with_an_unsaved_buffer_is_a_conflict_that_is_told(zed: Editor, ws: Path) -> None:
    """Neither the disk nor the buffer is written, and the model is told what to do."""
    zed.answers["fs/read_text_file"] = lambda params: {"content": "one\nUNSAVED\n"}
    zed.prompt(zed.new(ws), "write it")
    done = zed.of("tool_call_update")[-1]
    assert done["status"] == "failed"
    assert "Conflict: a.txt has unsaved changes" in done["content"][0]["content"]["text"]
    assert (ws / "a.txt").read_text() == "one\ntwo\nthree\n"
    assert {each["method"] for each in zed.asked} == {"fs/read_text_file"}


def test_an_editor_that_cannot_tell_its_buffers_is_worked_with(zed: Editor, ws: Path) -> None:
    """Without an answer the disk is what there is."""
    assert zed.prompt(zed.new(ws), "write it")["stopReason"] == "end_turn"
    assert (ws / "a.txt").read_text() == "one\nTWO\nthree\n"


def test_escape_sequences_of_a_model_are_shown_not_sent(zed: Editor, ws: Path) -> None:
    """Some clients print to a terminal."""
    zed.prompt(zed.new(ws), "escape")
    assert zed.said() == "\\x1b]0;title\\x07plain"


def test_what_is_wrong_with_a_request_is_said(zed: Editor, ws: Path) -> None:
    """Unknown sessions, relative directories, empty prompts, ids that are none."""
    for method, params, match in (
        ("session/prompt", {"sessionId": "x", "prompt": []}, "there is no session 'x' here; load it first"),
        ("session/new", {"cwd": "relative", "mcpServers": []}, "must be an absolute path"),
        ("session/new", {"cwd": "/no/such/place", "mcpServers": []}, "is not a directory"),
        ("session/load", {"sessionId": "x", "cwd": str(ws), "mcpServers": []}, "is not the id of a session"),
        ("session/list", {"cwd": str(ws), "cursor": "x"}, "is not a cursor"),
        ("no/such", {}, "Method not found"),
    ):
        with pytest.raises(Refused, match=match):
            zed.request(method, **params)
    session = zed.new(ws)
    with pytest.raises(Refused, match="the prompt is empty"):
        zed.prompt(session, " ")
    assert zed.request("session/list", cwd=str(ws))["sessions"] == []


def treenail(home: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "treenail", *arguments],
        cwd=cwd,
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
