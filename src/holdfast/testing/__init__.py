"""Fakes and conformance suites for those who build on Holdfast and test what they build."""

from holdfast.testing.clock import FakeClock

__all__ = ["FakeClock"]
