"""Providers: ways to call a model. Each is imported by path, so that no vendor's SDK is pulled in."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
