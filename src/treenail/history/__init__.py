"""History: the one reader of logs. It folds a log into the view of a run that every presenter draws.

Beside the view stand a summary, texts and diagnostics. What opens stores on disk is imported by its path:
`treenail.history.stores`, `treenail.history.store_diagnostics`, and `treenail.history.operations`, with
the operations on stored runs.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
