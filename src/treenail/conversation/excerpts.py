"""Excerpts of a conversation: its oldest part is not sent, and the rest is still a valid conversation.

Unlike a compaction this holds for one call only: nothing is summarised or recorded, and the next call may
send everything again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from treenail.conversation.messages import ImagePart, ReasoningPart
from treenail.conversation.replay import IMAGE_BYTES, Replay, ReplayItem


def size_bytes(item: ReplayItem) -> int:
    """Return the approximate size of an item, as `Replay.size_bytes` counts it."""
    images = sum(not isinstance(each, ReasoningPart) for each in item.parts)
    return len(item.canonical()) + IMAGE_BYTES * images


def trimmed(items: Sequence[ReplayItem], max_bytes: int) -> tuple[ReplayItem, ...]:
    """Drop the oldest items after the system text until the rest fits into `max_bytes`.

    Answers are dropped first, each with the results of its tool calls; requests only if that is not
    enough. The system text, the newest request and the newest exchange stay, even if they are larger.
    """
    blocks = _blocks(items)
    sizes = [sum(size_bytes(each) for each in block) for block in blocks]
    requests = [place for place, block in enumerate(blocks) if block[0].role == "user"]
    answers = [place for place, block in enumerate(blocks) if block[0].role in ("assistant", "tool")]
    kept = {len(blocks) - 1, *requests[-1:]}
    dropped: set[int] = set()
    left = sum(sizes)
    for place in (*answers, *requests):
        if left <= max_bytes:
            break
        if place not in kept:
            dropped.add(place)
            left -= sizes[place]
    return tuple(each for place, block in enumerate(blocks) if place not in dropped for each in block)


def as_sent(replayed: Replay, items: Sequence[ReplayItem]) -> Replay:
    """Return a replay as it was sent: without some items, which breaks the provider's cached prefix."""
    said = "some items were not sent this once"
    return replace(
        replayed,
        items=items,
        size_bytes=sum(size_bytes(each) for each in items),
        breaks=(*replayed.breaks, said) if len(items) < len(replayed.items) else replayed.breaks,
        digest="",
    )


UNSEEN_IMAGE = "[a picture stands here, which this model cannot be shown]"
"""What a model that takes text alone is told instead of a picture."""


def without_images(replayed: Replay) -> Replay:
    """Return a replay for a model that takes text alone: it may continue what another one began."""
    if not any(isinstance(part, ImagePart) for each in replayed.items for part in each.parts):
        return replayed
    return as_sent(replayed, tuple(_as_text(each) for each in replayed.items))


def _as_text(item: ReplayItem) -> ReplayItem:
    kept = tuple(each for each in item.parts if not isinstance(each, ImagePart))
    unseen = [UNSEEN_IMAGE] * (len(item.parts) - len(kept))
    return replace(item, text="\n".join([item.text, *unseen]), parts=kept) if unseen else item


def _blocks(items: Sequence[ReplayItem]) -> list[tuple[ReplayItem, ...]]:
    """Divide items where they may be cut: before each item that is not a tool's result."""
    blocks: list[list[ReplayItem]] = []
    for each in items:
        if each.role == "tool" and blocks:
            blocks[-1].append(each)
        else:
            blocks.append([each])
    return [tuple(block) for block in blocks]
