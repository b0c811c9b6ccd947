"""Checkpoints: weights, optimizer, random state and data cursor in a folder that appears by rename.

    checkpoints/step-00000100/   model.safetensors   optimizer.safetensors   state.json

Nothing is pickled. Loading a drafter needs the target's embedding beside it. Knows no training
loop."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from core.drafter.model import DraftConfig, Drafter
from core.errors import StoreError, TrainError, boundary
from core.features import disk_boundary, fsync
from core.target import TargetHead


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """`epoch` and `batch` name the next batch to train on. `contract` holds what a resume must not
    change; `provenance` says where the weights come from."""

    v: int = 1
    step: int
    total_steps: int
    epoch: int
    batch: int
    tokens: int
    loss: float
    accuracy_K: list[float]
    draft: DraftConfig
    contract: dict[str, Any]
    provenance: dict[str, Any]
    finished: bool = False


def save(
    directory: Path,
    state: CheckpointState,
    drafter: Drafter,
    optimizer: torch.optim.Optimizer,
    keep: int,
) -> Path:
    """Write one checkpoint and drop the oldest beyond `keep`. Weights are stored as they are
    trained (float32)."""
    directory.mkdir(parents=True, exist_ok=True)
    final = directory / f"step-{state.step:08d}"
    temporary = directory / f".{final.name}.tmp"
    with disk_boundary(final):
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir()
        weights = {k: v.detach().cpu().contiguous() for k, v in drafter.state_dict().items()}
        save_file(weights, temporary / "model.safetensors")
        save_file(_optimizer_tensors(drafter, optimizer), temporary / "optimizer.safetensors")
        (temporary / "state.json").write_bytes(msgspec.json.format(msgspec.json.encode(state)))
        for written in (*temporary.iterdir(), temporary):
            fsync(written)
        if final.exists():
            shutil.rmtree(final)
        temporary.replace(final)
    for old in list_checkpoints(directory)[:-keep]:
        shutil.rmtree(old)
    return final


def list_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in directory.glob("step-*") if (p / "state.json").exists())


def latest(directory: Path) -> Path | None:
    found = list_checkpoints(directory)
    return found[-1] if found else None


def set_aside(directory: Path) -> Path:
    """Move all checkpoints into a folder `earlier-N` of their own, where nothing looks for them."""
    numbers = [int(p.name.removeprefix("earlier-")) for p in directory.glob("earlier-*")]
    aside = directory / f"earlier-{1 + max(numbers, default=0)}"
    with disk_boundary(aside):
        aside.mkdir()
        for path in list_checkpoints(directory):
            path.rename(aside / path.name)
    return aside


def read_state(path: Path) -> CheckpointState:
    with boundary(StoreError, f"{path / 'state.json'}"):
        return msgspec.json.decode((path / "state.json").read_bytes(), type=CheckpointState)


def load_drafter(path: Path, head: TargetHead) -> tuple[Drafter, CheckpointState]:
    """The drafter of a checkpoint on the head's device, in float32."""
    state = read_state(path)
    with boundary(StoreError, f"{path / 'model.safetensors'}"):
        weights = load_file(path / "model.safetensors")
        drafter = Drafter(state.draft, head.embed_VH, weights["d2t"], weights["t2d"])
        drafter.load_state_dict(weights)
    return drafter.to(head.embed_VH.device), state


def restore_optimizer(path: Path, drafter: Drafter, optimizer: torch.optim.Optimizer) -> None:
    """Put moments and torch's random state back, bit for bit."""
    with boundary(StoreError, f"{path / 'optimizer.safetensors'}"):
        tensors = load_file(path / "optimizer.safetensors")
        torch.set_rng_state(tensors.pop("rng"))
        for name, parameter in drafter.named_parameters():
            optimizer.state[parameter] = {
                key: tensors[f"{name}/{key}"].to(parameter.device)
                for key in ("step", "exp_avg", "exp_avg_sq")
            }


def check_contract(path: Path, stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """TrainError when something that shapes the trajectory differs from the checkpoint's."""
    changed = sorted(k for k in stored.keys() | now.keys() if stored.get(k) != now.get(k))
    if changed:
        first = changed[0]
        raise TrainError(
            f"{path}: {', '.join(changed)} changed since this checkpoint "
            f"({first}: {stored.get(first)} -> {now.get(first)}); undo the change, or remove the "
            "checkpoints folder to train anew",
            kind="resume_contract",
        )


def _optimizer_tensors(
    drafter: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    tensors = {"rng": torch.get_rng_state()}
    for name, parameter in drafter.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = torch.as_tensor(value).detach().cpu().contiguous()
    return tensors
