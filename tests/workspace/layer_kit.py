"""What the tests of layers share: a workspace, and a command on a layer of it, in the real sandbox."""

from __future__ import annotations

import subprocess
from pathlib import Path

from treenail.sandbox import Layer, confined
from treenail.workspace.host import HostFilesystem
from treenail.workspace.layers import CommandLayer


def fill(root: Path) -> None:
    """Make a small tree."""
    (root / "d/e").mkdir(parents=True)
    for name in ("a", "b", "d/x", "d/y", "d/e/z"):
        (root / name).write_text(f"1 {name}\n")
    (root / "l").symlink_to("a")


def on_layer(fs: HostFilesystem, script: str) -> CommandLayer:
    """Run a script on a layer of the open call."""
    layer = fs.open_layer()
    assert isinstance(layer, CommandLayer), layer
    mounted = Layer(Path(layer.lower), Path(layer.upper), Path(layer.work), layer.options)
    root = Path(fs.root)
    with confined(["bash", "-ec", script], root, workspace=root, layer=mounted) as line:
        done = subprocess.run(
            line.argv, pass_fds=line.descriptors, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    assert done.returncode == 0, done.stderr.decode()
    return layer


def layers_in(store: Path) -> list[str]:
    """Name the layers that are left in a store."""
    place = store / "treenail/main/layers"
    return sorted(each.name for each in place.iterdir()) if place.exists() else []
