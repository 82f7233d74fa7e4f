"""Transactions for agents of other frameworks: their loop and their tools, our transaction around each call.

`Transactions` is the whole of it: a workspace, a log and ceilings for the tool calls of a loop that is not
ours. The modules beside it fit it to one framework each, and are imported by their path, because each needs
that framework: `langchain`, `pydantic_ai` and `openai_agents`. `claude_store` keeps the transcripts of the
Claude Agent SDK in a log of ours.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
