"""The short way in: an agent with instructions and tools, and the run that comes of a task."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
