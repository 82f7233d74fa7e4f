"""Files that travel: a run's workspace on more than one machine.

Theory of operation
-------------------
A workspace that travels begins at an *origin* (`origins.py`): a directory, a commit of a git repository or a
tar, put into a *depot* whole. A depot (`depot.py`) keeps objects by name, once each, for every machine.

Whoever works on the run has a *checkout* (`checkout.py`): a directory of its own, made from the last boundary
that the log has. Each boundary is in the depot before anybody is told of it, the log above all: its content,
its trees, its commit, and a *record* (`records.py`), which says what changed since the boundary before. The
log names the record. So the log never names what is not there, and whatever a process does that has lost the
run happens in its own directory.

An origin's record holds the whole tree, and each later one what has changed: together they say what every
path is at a boundary. A checkout that is there already is compared with that, and only what differs is
fetched.
"""
