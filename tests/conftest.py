"""What holds for every test: what Hypothesis does, that Ctrl-C counts, and which bits new files have."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

# A loaded machine is no failure: an example has no deadline, the test as a whole has one.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# CI says the same of the same commit; new examples are looked for wherever people work.
settings.register_profile("ci", settings.get_profile("here"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

# What a script starts in the background ignores Ctrl-C, and so does whatever that starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What a test makes has the bits that it says, however careful whoever runs it is.
os.umask(0o022)
