"""Workspaces: trees of files that tool calls change wholly or not at all.

`HostFilesystem`, a directory on disk, is imported by path: `treenail.workspace.host`.
"""

from treenail.workspace.base import (
    MAX_CONVENIENCE_BYTES,
    MAX_GREP_MATCHES,
    MAX_READ_LINES,
    Change,
    ChangeKind,
    FileEntry,
    FileStat,
    Filesystem,
    FilesystemSnapshot,
    GlobMatch,
    GrepMatch,
    ReadBytesResult,
    ReadResult,
    RestoreReport,
    WorkspaceCall,
    WorkspaceDiff,
    WriteMode,
    WriteResult,
)
from treenail.workspace.memory import InMemoryFilesystem
from treenail.workspace.views import ReadOnlyFilesystem

__all__ = [
    "MAX_CONVENIENCE_BYTES",
    "MAX_GREP_MATCHES",
    "MAX_READ_LINES",
    "Change",
    "ChangeKind",
    "FileEntry",
    "FileStat",
    "Filesystem",
    "FilesystemSnapshot",
    "GlobMatch",
    "GrepMatch",
    "InMemoryFilesystem",
    "ReadBytesResult",
    "ReadOnlyFilesystem",
    "ReadResult",
    "RestoreReport",
    "WorkspaceCall",
    "WorkspaceDiff",
    "WriteMode",
    "WriteResult",
]
