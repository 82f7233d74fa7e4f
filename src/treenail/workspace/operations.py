"""Operations that every filesystem performs in the same way, given how it lists, opens and writes."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import BinaryIO, TextIO

from treenail.workspace.base import (
    MAX_GREP_MATCHES,
    MAX_READ_LINES,
    FileEntry,
    GlobMatch,
    GrepMatch,
    ReadBytesResult,
    ReadResult,
    WriteMode,
    WriteResult,
)
from treenail.workspace.lines import check_loadable, check_range, read_lines
from treenail.workspace.paths import ROOT, encode_content, normalize
from treenail.workspace.search import glob_tree, grep_tree


class CommonOperations(ABC):
    """The operations of `Filesystem` that need only `list`, `open_read` and `write_bytes`."""

    @abstractmethod
    def list(self, path: str = ROOT) -> Sequence[FileEntry]:
        """List a directory, sorted by name."""

    @abstractmethod
    def open_read(self, path: str) -> BinaryIO:
        """Open a file for streaming reads; a later write does not disturb the stream."""

    @abstractmethod
    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write bytes. Readers see the old content or the new, never a part."""

    def read(self, path: str, *, offset: int = 0, limit: int = MAX_READ_LINES) -> ReadResult:
        """Read text lines from `offset`; `limit=-1` reads all. Line endings are kept as they are."""
        path = normalize(path)
        check_range(offset, limit)
        with self.open_read(path) as stream:
            check_loadable(path, stream.seek(0, os.SEEK_END))
            stream.seek(0)
            return read_lines(path, stream.read(), offset=offset, limit=limit)

    def read_bytes(self, path: str, *, offset: int = 0, limit: int = -1) -> ReadBytesResult:
        """Read bytes from `offset`; `limit=-1` reads all."""
        path = normalize(path)
        check_range(offset, limit)
        with self.open_read(path) as stream:
            size = stream.seek(0, os.SEEK_END)
            end = size if limit == -1 else min(size, offset + limit)
            wanted = max(0, end - offset)
            check_loadable(path, wanted)
            stream.seek(offset)
            content = stream.read(wanted)
        return ReadBytesResult(
            content=content,
            path=path,
            size_bytes=size,
            offset=offset,
            limit=limit,
            truncated=offset + len(content) < size,
        )

    def open_text(self, path: str) -> TextIO:
        """Open a text file for streaming reads; line endings are kept as they are."""
        return io.TextIOWrapper(self.open_read(path), encoding="utf-8", newline="\n")

    def glob(self, pattern: str, *, path: str = ROOT) -> Sequence[GlobMatch]:
        """Match paths below `path`, sorted. `**` crosses directories; links are not followed."""
        return glob_tree(self.list, pattern, path=normalize(path))

    def grep(
        self,
        pattern: str,
        *,
        path: str = ROOT,
        glob: str | None = None,
        max_matches: int = MAX_GREP_MATCHES,
    ) -> Sequence[GrepMatch]:
        """Search text files for a regular expression, one match per line, in path order."""
        path = normalize(path)
        try:
            self.list(path)
            is_file = False
        except NotADirectoryError:
            is_file = True
        return grep_tree(
            self.list,
            self.open_read,
            pattern,
            path=path,
            is_file=is_file,
            glob=glob,
            max_matches=max_matches,
        )

    def write(
        self, path: str, content: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        """Write text as UTF-8."""
        data = encode_content(path, content)
        return self.write_bytes(path, data, mode=mode, create_parents=create_parents)
