"""Two pure decisions of training: the learning rate of a step, and whether a step may be taken at
all."""

import math

from core.drafter.loss import LossResult
from core.errors import TrainError

DEAD_AFTER_BATCHES = 20


def learning_rate(step: int, total: int, lr: float, warmup_ratio: float, schedule: str) -> float:
    """Linear warmup from lr / warmup steps, then cosine to zero or constant. `step` counts from
    0."""
    warmup = math.ceil(total * warmup_ratio)
    if step < warmup:
        return lr * (step + 1) / warmup
    if schedule == "constant":
        return lr
    return lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))


class Guard:
    """Decides whether a step may be taken. Raises TrainError on NaN, infinity, or a signal that has
    died."""

    def __init__(self, dead_after: int = DEAD_AFTER_BATCHES) -> None:
        self._dead_after, self._silent, self._motionless = dead_after, 0, 0

    def check(self, step: int, result: LossResult, grad_norm: float, last: str) -> None:
        loss = float(result.loss.detach())
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            raise TrainError(
                f"step {step}: loss {loss:g}, gradient norm {grad_norm:g}; nothing of this step "
                "was kept. "
                f"Lower train.lr or train.clip and resume from {last}",
                kind="not_finite",
            )
        self._silent = self._silent + 1 if sum(result.counted_K) == 0 else 0
        if self._silent >= self._dead_after:
            raise TrainError(
                f"step {step}: no supervised position of the last {self._silent} batches can be "
                "drafted; "
                "check the loss mask and the draft vocabulary's coverage",
                kind="dead_loss",
            )
        moving = grad_norm > 0 or sum(result.counted_K) == 0
        self._motionless = 0 if moving else self._motionless + 1
        if self._motionless >= self._dead_after:
            raise TrainError(
                f"step {step}: the gradient has been exactly zero for {self._motionless} batches; "
                "check the features and the learning rate",
                kind="dead_loss",
            )
