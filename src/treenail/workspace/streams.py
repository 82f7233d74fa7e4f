"""Streams that write a file, whose content appears when the stream is closed and not before."""

from __future__ import annotations

import io
import warnings
from types import TracebackType

from treenail.errors import WorkspaceError
from treenail.workspace.packs import CHUNK_BYTES


class Draft(io.RawIOBase):
    """A file that is being written. Closing a draft that was not published discards it."""

    name: str
    """The path in the workspace."""

    def writable(self) -> bool:
        """Say that it can be written to."""
        return True

    def publish(self) -> None:
        """Let the content take its place."""
        raise NotImplementedError


class WriteStream(io.BufferedWriter):
    """Writes a draft and publishes it when closed, unless an exception came first."""

    def __init__(self, draft: Draft) -> None:
        super().__init__(draft, CHUNK_BYTES)
        self._draft: Draft | None = draft

    def close(self) -> None:
        """Let the content appear. Closing again does nothing."""
        draft, self._draft = self._draft, None
        try:
            if draft is not None:
                self.flush()
                draft.publish()
        finally:
            super().close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._draft = None
        self.close()

    def __del__(self) -> None:
        draft = getattr(self, "_draft", None)
        if draft is not None:
            # The writer may have been in the middle of writing: a part must not appear.
            self._draft = None
            warnings.warn(
                f"the stream for {draft.name!r} was never closed; its content was discarded",
                ResourceWarning,
                stacklevel=1,
                source=self,
            )
        super().close()


def closed_too_late(path: str) -> WorkspaceError:
    """Return the error for a stream that outlived the tool call that opened it."""
    return WorkspaceError(
        f"the stream for {path!r} was closed after the tool call that opened it had ended; "
        f"its content was discarded: close streams before the call returns"
    )
