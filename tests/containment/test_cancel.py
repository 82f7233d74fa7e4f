"""A token tells everybody, whatever comes in between."""

from __future__ import annotations

import pytest

from treenail.containment import CancellationToken


def test_an_interrupt_in_the_middle_of_a_cancellation_leaves_nobody_untold() -> None:
    """A second Ctrl-C may come while listeners are told of the first: the work that they stop is stopped."""
    token = CancellationToken()
    told: list[str] = []
    interrupts = [KeyboardInterrupt()]

    def interrupted() -> None:
        if interrupts:
            raise interrupts.pop()
        told.append("interrupted")

    below = CancellationToken(token)
    below.on_cancel(lambda: told.append("below"))
    token.on_cancel(interrupted)
    token.on_cancel(lambda: told.append("last"))
    with pytest.raises(KeyboardInterrupt):
        token.cancel()
    assert told == ["below", "interrupted", "last"]
    assert token.is_cancelled
    assert not token.cancel()
