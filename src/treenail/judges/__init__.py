"""Judges: feedback while a run goes on and verification before it may stop, by rules and by a model."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
