"""`eyas probe live`: one prompt, asked in several ways, as a run of its own that ends with the
rebuilt samples.

Knows which backend an arm uses; asking and judging are the run's.
"""

import time
from pathlib import Path
from typing import get_args

import msgspec

from core.config import Backend, Config, Dataset, load
from core.errors import UsageError
from core.pipeline.launch import Start, prepare_new
from core.schema import Arm
from core.store.rundir import new_run_id


def prepare_live(config_path: Path, prompt: Path, arms: list[str], argv: list[str]) -> Start:
    """A new run of one request an arm. Raises UsageError for an unknown arm or a missing file."""
    known = get_args(Arm)
    if unknown := [a for a in arms if a not in known]:
        raise UsageError(f"--arms {unknown[0]}: not known; use {', '.join(known)}")
    if not prompt.is_file():
        raise UsageError(f"{prompt}: no such file; give a JSONL file with one prompt")
    config = load(config_path)
    return prepare_new(live_config(config, prompt.resolve(), arms), Path.cwd(), argv)


def live_config(config: Config, prompt: Path, arms: list[str]) -> Config:
    """The config with one dataset an arm, no canary, and no stage after reconstruct. Pure."""
    replace = msgspec.structs.replace
    datasets = [
        Dataset(
            name=f"probe-{arm}",
            kind="messages",
            path=str(prompt),
            limit=1,
            arm=arm,  # type: ignore[arg-type]
            backend=backend_of(config, arm),
        )
        for arm in dict.fromkeys(arms)
    ]
    run = replace(
        config.run, name=f"probe-{new_run_id(time.time())}", stages=["generate", "reconstruct"]
    )
    return replace(config, run=run, dataset=datasets, generate=replace(config.generate, canary=0))


def backend_of(config: Config, arm: str) -> Backend:
    """The backend that the config's datasets use for this arm, else the usual one."""
    for dataset in config.dataset:
        if dataset.arm == arm:
            return dataset.backend
    return "sglang" if arm == "local" else "openrouter"
