"""Workflows: steps with dependencies over subagents, and the table of how they can end."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
