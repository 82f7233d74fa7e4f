"""What an editor sends as a prompt: text, pictures, files and links, as a task for an agent."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from acp import schema

from treenail.conversation import ImagePart
from treenail.errors import UsageError


def task_of(blocks: Sequence[Any], root: Path) -> tuple[str, list[ImagePart]]:
    """Return the task's text and its pictures. Raises `UsageError` for what no model here can be given."""
    parts: list[str] = []
    images: list[ImagePart] = []
    for block in blocks:
        match block:
            case schema.TextContentBlock():
                parts.append(block.text)
            case schema.ImageContentBlock():
                images.append(ImagePart(block.mime_type, _bytes(block.data, "an image")))
            case schema.ResourceContentBlock():
                parts.append(f"@{place_of(block.uri, root)}")
            case schema.EmbeddedResourceContentBlock():
                resource = block.resource
                place = place_of(resource.uri, root)
                if isinstance(resource, schema.TextResourceContents):
                    parts.append(f'\n<file path="{place}">\n{resource.text}\n</file>\n')
                elif (resource.mime_type or "").startswith("image/"):
                    images.append(ImagePart(str(resource.mime_type), _bytes(resource.blob, place)))
                else:
                    raise UsageError(f"{place} is binary and not an image; it cannot be shown to a model")
            case _:
                raise UsageError(
                    f"a prompt cannot have {getattr(block, 'type', 'this kind of')} content here"
                )
    text = "".join(parts).strip()
    if not text and not images:
        raise UsageError("the prompt is empty; write what to do")
    return text or "Look at the picture.", images


def place_of(uri: str, root: Path) -> str:
    """Return where a link leads: a path relative to the workspace if it is in there, else the link itself."""
    split = urlsplit(uri)
    if split.scheme not in ("file", ""):
        return uri
    path = Path(unquote(split.path))
    for each, top in ((path, root), (path.resolve(), root.resolve())):
        if each.is_relative_to(top):
            path = each.relative_to(top)
            break
    return f"{path}#{split.fragment}" if split.fragment else str(path)


def _bytes(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError(f"{what} is not base64: {error}") from error
