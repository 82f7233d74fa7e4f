"""The sandbox: what a command may reach, and the command line that holds it to that.

`Layer` and `Grants` say what a command works on and what it may do besides; `confined` makes the command
line.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
