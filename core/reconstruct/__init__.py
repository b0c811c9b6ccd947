"""Rollout -> Sample with a verdict and its evidence, or rejected with a class (see `judging`)."""

from core.reconstruct.judging import judge
from core.reconstruct.offsets import StopOffsets, observe
from core.reconstruct.reply import read_reply

__all__ = ["StopOffsets", "judge", "observe", "read_reply"]
