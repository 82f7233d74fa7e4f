"""Fakes and conformance suites for those who build on Treenail and test what they build."""

from treenail.testing.clock import FakeClock

__all__ = ["FakeClock"]
