"""Other people's tools: MCP servers, whose tools are transactions like any other.

server      what a program says about a server: how to reach it, what it may do, whom to trust
names       a server's names for its tools, and the names that models see
pins        what the log keeps of a server: the list of tools that a run began with, and changes to it
effects     what a tool may change, by the operator's word and the hints of a trusted server
stdio       a server's process, in the sandbox, with an environment of named variables
oauth       tokens for a server that asks for a login
connection  the protocol: one thread and event loop per server, with the official SDK
questions   what a server asks a person in the middle of a call
results     what a server answers, as a tool's result
tools       one call: from the run's event loop to the server and back
attachment  a server for the length of a run
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
