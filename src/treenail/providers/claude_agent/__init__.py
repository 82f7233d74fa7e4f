"""The Claude Agent SDK: a vendor's loop in a process of its own, paused at every step of our turn.

Theory of operation
-------------------
The SDK starts the vendor's command line program (the CLI), which calls the model and wants to run
tools. Everything it does passes through this process, and waits here until our turn is ready:

    our turn                      the CLI
    stream()          ->          a message, or the hook behind a batch of tools is answered
                      <-          the answer, as raw events of the model's interface
    asked(call)       <-          the hook before a tool: the CLI has come to that call
    (the runner runs it, and its end is in the log)
    deliver(call)     ->          our tool: the result of its MCP call, served in this process
                                  a native one: the hook behind it is answered
    stream()          ->          the hook behind the batch is answered: the next model call

The CLI starts a tool while the model is still writing. Here it does not run before the answer is
complete and recorded, because only then does the turn ask for it. A native tool (Bash, Write ...) is
released by the hook before it and ends with the hook after it; in between, a handler of ours waits
inside the runner's transaction. A call that the runner refuses is denied through the hook before it.

The CLI keeps its own conversation, under an id that we choose and that the log keeps. While the CLI
lives and our conversation extends the one it has, only what is new is sent. After a restart the id
is resumed, and what happened meanwhile (results of calls) is sent as text. If the vendor no longer
has the conversation, or its newest answer is not ours, or ours was compacted, or another provider
has answered in it, a new one begins with the whole conversation as text.

A structured answer is requested with a tool of ours, whose arguments are the answer; the CLI's own
way would make model calls that were not reserved. For the same reason its compaction and retries are
off; and where it cannot be told to stop (an answer that reached its length limit, or that is empty),
it is killed as soon as such an answer arrives.

The CLI runs below the supervisor that commands run below (`treenail.tools.supervisor`): when its
control pipe is closed, which our death does too, the CLI and all that it started are killed.

The parts, from the outside in:

    agent         the provider, and its settings (`settings`, `environment`)
    run           one turn: how each model call is made, and what the turn reports about its tool calls
    connection    one CLI, from its start to its end
    hooks         where the CLI is paused; `calls` holds what it and the turn wait for
    process       the CLI's process and its supervisor
    offer, messages, answer, transcripts
                  what the model is given, the messages to it, its answer, what the CLI remembers
    native        the vendor's own tools
"""

from treenail.providers.claude_agent.agent import ClaudeAgent
from treenail.providers.claude_agent.messages import CONTINUE
from treenail.providers.claude_agent.native import NATIVE_EFFECTS
from treenail.providers.claude_agent.offer import SERVER
from treenail.providers.claude_agent.run import ClaudeAgentRun
from treenail.providers.claude_agent.settings import NAME

__all__ = ["CONTINUE", "NAME", "NATIVE_EFFECTS", "SERVER", "ClaudeAgent", "ClaudeAgentRun"]
