"""Settings for every test: the profile of Hypothesis, the handler of Ctrl-C, and the umask."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.postgres"]

# A slow example on a busy machine is not a failure; the test as a whole has a time limit.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# CI gives the same result for the same commit; new examples are tried on people's machines.
settings.register_profile("ci", settings.get_profile("here"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

# A process that a script starts in the background ignores Ctrl-C, and its children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Files have the permission bits that a test gives them, whatever the umask of the caller.
os.umask(0o022)
