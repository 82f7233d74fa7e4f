"""A server of the newer protocol (2026-07-28), on the SDK: it asks by answering, and tells who listens."""

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp_types import ElicitRequest, ElicitRequestFormParams, InputRequiredResult

server = MCPServer("modern", version="1")
FORM = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}


@server.tool()
async def ask(ctx: Context) -> str | InputRequiredResult:
    """Ask a person."""
    if ctx.input_responses:
        return str(ctx.input_responses["colour"].content["colour"])
    asked = ElicitRequest(params=ElicitRequestFormParams(message="Which colour?", requested_schema=FORM))
    return InputRequiredResult(input_requests={"colour": asked})


@server.tool()
async def grow(ctx: Context) -> str:
    """Have one more tool."""

    def more() -> str:
        """Do more."""
        return "more"

    server.add_tool(more)
    await ctx.notify_tools_changed()
    return "grown"


@server.tool()
def echo(a: int) -> str:
    """Say it again."""
    return str(a)


server.run()
