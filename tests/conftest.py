"""What holds for every test: how long Hypothesis may take, and when it repeats itself."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# A loaded machine is no failure: an example has no deadline, the test as a whole has one.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# CI says the same of the same commit; new examples are looked for wherever people work.
settings.register_profile("ci", settings.get_profile("here"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
