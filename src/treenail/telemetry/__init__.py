"""Telemetry: spans, metrics and structured logs. Without an exporter they cost next to nothing."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
