"""Rollout -> Sample with a verdict and its evidence, or rejected with a class (see `judging`)."""

from core.reconstruct.judging import judge
from core.reconstruct.offsets import StopOffsets, observe

__all__ = ["StopOffsets", "judge", "observe"]
