"""Runs commands in sandboxes as the user whose number it is given. Orders and results are lines of JSON.

A second argument is a directory with a Python and our scripts, for users who cannot read the usual ones.

A process of its own, because the interpreter may lie where only root can start it: everything is imported, by
running a command, before the user is changed.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from treenail.errors import ToolError
from treenail.sandbox import Grants, Layer, Sandbox, landlock, probe
from treenail.tools import command_environment, process
from treenail.tools.process import run_command


def main(user: int, public: str = "") -> None:
    run_command("true", cwd="/usr/share", sandbox=Sandbox("auto"))
    probe.cache_clear()  # another user may find something else
    if public:
        sys.executable = f"{public}/python/bin/{Path(sys.executable).resolve().name}"
        process.SUPERVISOR = Path(public, "treenail/tools/supervisor.py")
        landlock.SCRIPT = Path(public, "treenail/sandbox/landlock_exec.py")
    if os.geteuid() != user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        os.environ["HOME"] = order["home"]
        env = command_environment(extra=order["env"])
        if order["mode"] == "off":
            ran = subprocess.run(
                ["bash", "-c", order["command"]],
                cwd=order["workspace"],
                env=env,
                check=False,
                capture_output=True,
                stdin=subprocess.DEVNULL,
            )
            said = {"exit_code": ran.returncode, "stdout": ran.stdout.decode(), "stderr": ran.stderr.decode()}
            print(json.dumps(said), flush=True)
            continue
        grants = Grants(order["network"], tuple(map(Path, order["write"])))
        hidden = tuple(map(Path, order["hidden"]))
        try:
            result = run_command(
                order["command"],
                cwd=order["workspace"],
                env=env,
                timeout_s=60,
                sandbox=Sandbox(order["mode"], grants, hidden),
                layer=Layer(*map(Path, order["layer"])) if order["layer"] else None,
            )
            said = {**asdict(result), "elapsed": 0}
        except ToolError as error:
            said = {"error": str(error)}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
