"""What a person says while a turn is under way.

A turn asks its inbox before each request to the model. What it gets becomes messages of the conversation,
logged before the request that shows them to the model is sent. A turn that ends without another request
leaves the rest in the inbox, for the turn that comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from treenail.conversation import ImagePart


@dataclass(frozen=True, slots=True)
class FollowUp:
    """One message of a person, sent while a turn is under way."""

    text: str
    images: tuple[ImagePart, ...] = ()


Inbox = Callable[[], Sequence[FollowUp]]
"""Returns what a person has said since it was last called, oldest first. It must not wait."""
