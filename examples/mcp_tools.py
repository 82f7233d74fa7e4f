"""Other people's tools: a public MCP server, whose calls are transactions like any other."""

from __future__ import annotations

from treenail import Agent
from treenail.mcp import McpServer
from treenail.providers.scripted import Answer, ScriptedProvider

agent = Agent("clerk", tools=[McpServer("time", command=["mcp-server-time"], trust=True)])
model = ScriptedProvider(
    [
        Answer(
            calls=[
                (
                    "time__convert_time",
                    {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"},
                )
            ]
        ),
        "It is nine in the evening in Tokyo.",
    ]
)


def main() -> None:
    """Run it, and show what the server said."""
    with agent.run("What time is it in Tokyo at noon UTC?", provider=model) as run:
        print(run.output)
        assert run.tool_calls[0].success
        assert any("21:00" in each.content for each in run.messages if each.role == "tool")


if __name__ == "__main__":
    main()
