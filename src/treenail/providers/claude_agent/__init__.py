"""The Claude Agent SDK: a vendor's loop in a process of its own, held at every step of ours.

Theory of operation
-------------------
The SDK starts the vendor's command line program (the CLI), which asks the model and wants to run
tools. Everything it does passes through this process, and waits here until our turn is ready:

    our turn                      the CLI
    stream()          ->          a message, or the hook behind a batch of tools is answered
                      <-          the answer, as raw events of the model's interface
    asked(call)       <-          the hook before a tool: the CLI has come to that call
    (the runner runs it, and its end is in the log)
    deliver(call)     ->          our tool: the result of its MCP call, served in this process
                                  a native one: the hook behind it is answered
    stream()          ->          the hook behind the batch is answered: the next model call

The CLI begins a tool while the model is still talking. Here it is not run before the answer is
whole and recorded, because only then does the turn ask for it. A native tool (Bash, Write ...) is
let go by the hook before it and ends with the hook behind it; in between stands a handler of ours
inside the runner's transaction. Whatever the runner refuses is denied through the hook before it.

The CLI keeps a conversation of its own, named by an id that we choose and that the log keeps. While
it lives and what we are to send extends what it knows, only the news are told. After a restart the
id is resumed, and what happened meanwhile (results of calls) is told as text. If the vendor no
longer has the conversation, or its newest answer is not ours, or ours was compacted, or another
provider has answered in it, a new one begins with the whole conversation as text.

A structured answer is asked for by a tool of ours, whose arguments are the answer. The CLI's own way
would make model calls that nobody has allowed. For the same reason it neither compacts nor retries
by itself; and where it cannot be told not to go on (an answer that reached its length limit, or that
is empty), it is killed as soon as the answer says so.

The CLI runs below the supervisor that commands run below (`treenail.tools._supervisor`): when its
control pipe is closed, which our death does too, the CLI and all that it started are killed.

The parts, from the outside in:

    agent         the provider, and the settings that everything below goes by (`settings`, `environment`)
    run           one turn: which model call is made how, and what the turn says about its calls
    connection    one CLI, from its start to its end
    hooks         where the CLI is held; `calls` is what it and the turn wait for
    process       the CLI's process and its supervisor
    offer, telling, reading, transcripts
                  what the model is given, what it is told, what it answers, what the CLI remembers
    native        the vendor's own tools
"""

from treenail.providers.claude_agent.agent import ClaudeAgent
from treenail.providers.claude_agent.messages import CONTINUE
from treenail.providers.claude_agent.native import NATIVE_EFFECTS
from treenail.providers.claude_agent.offer import SERVER
from treenail.providers.claude_agent.run import ClaudeAgentRun
from treenail.providers.claude_agent.settings import NAME

__all__ = ["CONTINUE", "NAME", "NATIVE_EFFECTS", "SERVER", "ClaudeAgent", "ClaudeAgentRun"]
