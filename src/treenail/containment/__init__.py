"""Hard ceilings for a whole run: money, steps, retries and time, for any callables.

Start with `ExecutionContext` and `Limits`; `docs/containment.md` shows the rest.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
