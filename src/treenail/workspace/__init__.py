"""Workspaces: trees of files that tool calls change wholly or not at all.

`HostFilesystem`, a directory on disk, is imported by path: `treenail.workspace.host`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
