"""Prompts: typed sections with their tools, rendered for a model, and its answer read back as a type."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
