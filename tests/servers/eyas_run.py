"""`eyas run` as a user starts it, on a config made here; the stages up to the audit."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomli_w

from core.store import RunDir
from tests.servers.serving import CHECKOUT

STAGES = ["generate", "reconstruct", "audit"]


def eyas_run(folder: Path, name: str, config: dict[str, Any]) -> RunDir:
    """The finished run. Raises RuntimeError with what was printed when it did not finish."""
    config = {**config, "run": {"dir": str(folder), "name": name, "stages": STAGES}}
    path = folder / f"{name}.toml"
    path.write_text(tomli_w.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "core.cli", "run", str(path), "--plain"],
        cwd=CHECKOUT,
        env=os.environ | {"EYAS_RUNS": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1_200,
    )
    if done.returncode:
        raise RuntimeError(f"eyas run ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return RunDir(folder / name)


def audited(run: RunDir) -> str:
    """What `eyas audit RUN` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "console", "audit", str(run.path)],
        cwd=CHECKOUT,
        env=os.environ | {"COLUMNS": "140"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout
