"""A copy of a workspace that costs nothing until it is changed, and what differs from the original.

Theory of operation
-------------------
An `IsolatedFilesystem` begins at a boundary of a workspace on disk and goes its own way from there. It
has four parts, each in a file of its own:

- **The past** (`past`): the other workspace as it was at the boundary. A path that nobody has changed since
  is read where it is; for one that was changed, the other workspace's own history knows what was there. So
  making a copy of 50,000 files copies none of them, and later changes of the original do not show.
- **The layer** (`overlay`): a directory of its own with what the copy has changed. It is a `HostFilesystem`,
  so that calls, crashes, boundaries and restores work in here as they do anywhere. A path that was changed or
  deleted has a *note* in the layer (`notes`): what was there at the boundary, and whether the past is hidden
  below it.
- **Commands** (`commands`): a command works on an overlay of the other workspace's directory that begins with
  what the copy shows otherwise, and what it leaves there is taken into the layer.
- **The scratch tree** (`scratch`): without overlays a process needs a directory of its own. During a foreign
  call every operation goes to a tree that was written out for it, and at the call's end what differs is taken
  into the layer.

What the copy has changed comes back as `ForkChange`s (`changes`). `apply_changes` brings them into a
workspace inside a tool call, whose transaction makes it all or nothing. A path that is not there what it was
at the boundary was changed by somebody else since: that is a conflict, it is reported, and nothing is
applied.

Memory needs none of this: there, two filesystems share what neither has changed
(`InMemoryFilesystem.fork`). `isolate` makes a copy of either kind.
"""

from treenail.workspace.isolated.changes import (
    ForkChange,
    apply_changes,
    conflicts_with,
    copy_file,
    diff_of,
)
from treenail.workspace.isolated.filesystem import IsolatedFilesystem
from treenail.workspace.isolated.fingerprints import NOTHING, Fingerprint, fingerprint
from treenail.workspace.isolated.isolate import IsolatedMemory, isolate, quiet_boundary
from treenail.workspace.isolated.notes import NOTES

__all__ = [
    "NOTES",
    "NOTHING",
    "Fingerprint",
    "ForkChange",
    "IsolatedFilesystem",
    "IsolatedMemory",
    "apply_changes",
    "conflicts_with",
    "copy_file",
    "diff_of",
    "fingerprint",
    "isolate",
    "quiet_boundary",
]
