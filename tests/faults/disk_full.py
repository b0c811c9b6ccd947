"""Case C75 inside a mount namespace: `unshare -rm python -m tests.faults.disk_full FOLDER
GATEWAY.json`.

A run on a file system of a few hundred kilobytes fills it with answers; then there is space again,
and it resumes. Prints one JSON line of what was seen in between."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from core.store import read_status
from tests.faults.rig import Engine, lines_in, new_run, run_config

SMALL, LARGE = "700k", "64m"


def mount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)


def main(folder: Path, address: dict[str, Any]) -> int:
    mount(folder, f"size={SMALL}")
    gateway: Any = SimpleNamespace(address=address)
    # no floor: the watch, looking once a second, would sometimes halt before a write fails
    config = run_config(
        gateway, limit=60, generate={"max_in_flight": 4}, run={"min_free_disk_bytes": 0}
    )
    run = new_run(config, folder, "full")
    code = Engine(run).wait()
    status = read_status(run)
    data = run.completions.read_bytes()
    seen = {
        "code": code,
        "state": status.state if status else "",
        "reason": status.reason if status else "",
        "partial_line_left": not data.endswith(b"\n"),
        "replies": lines_in(run.completions),
        "resumed": 0,
    }
    mount(folder, f"remount,size={LARGE}")
    seen["resumed"] = Engine(run).wait()
    subprocess.run(["cp", "-r", str(run.path), str(folder.parent / "kept")], check=True)
    sys.stdout.write(json.dumps(seen) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_bytes())))
