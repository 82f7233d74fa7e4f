"""Tools: what a model may call, and the transaction that each call is.

`tool` and `Tool` make one, `ToolRunner` runs them: a call that fails leaves no trace in the session or in
the workspace. `FILE_TOOLS`, `PLAN_TOOLS` and `run_command` are ready for use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
