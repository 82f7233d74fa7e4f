"""A simulation of the whole runtime in one process, from one seed.

Theory of operation
-------------------
Turn, runner, containment, history and judges are the real code. What they touch is simulated: the log's
store, the files, the clock, ids, randomness, the model, and people. Every decision of the simulated parts
is drawn from the seed, time passes only in the event loop's own clock, and no thread takes part, so a
seed gives the same trace each time.

A **process** is a `Life`: a task of its own with handles on the simulated world. A kill ends the life.
From then on every handle of it raises `Killed`, so that no cleanup of the real code can change anything,
as after SIGKILL. A stop (SIGSTOP) freezes a life at a point where it waits; its lease runs out, another
life takes over, and it wakes up again.

While it runs, the world writes down what really happened: each write to a file and who made it, each
effect outside, each request that a model was paid for. Afterwards `oracle` compares that with the log.
"""
