"""The TTT loss: soft cross-entropy against the target, on the draft vocabulary, at supervised
columns only.

The teacher is the target's distribution renormalised over the draft vocabulary; a position counts
when it is supervised and the target's full-vocabulary argmax can be drafted. Nothing is computed
anywhere else: not the teacher, not the drafter's own logits. Definitions: EAGLE-3 as in SpecForge
algorithms/eagle3/model.py and core/loss.py."""

# B rows, T positions, H hidden size, D draft vocabulary, K TTT steps, N columns, R teacher rows
# (positions with a teacher, flat), M the columns that count at one step

from dataclasses import dataclass
from typing import Literal

import torch

from core.drafter.columns import Columns, columns_of, pick
from core.drafter.data import Batch
from core.drafter.model import Drafter
from core.target import TargetHead

Normalise = Literal["valid", "all"]
TEACHER_CHUNK_ROWS = 2_048


@dataclass(frozen=True)
class Teacher:
    """`probs_RD` renormalised over the draft vocabulary; `best_R` the draft id of the
    full-vocabulary argmax, -1 when it cannot be drafted; `index_BT` maps a position to its row in R
    (-1: no teacher there)."""

    probs_RD: torch.Tensor
    best_R: torch.Tensor
    index_BT: torch.Tensor


@dataclass(frozen=True)
class LossResult:
    """`loss` is differentiable. Counts per step: `supervised_K`, of these `counted_K` with a
    draftable argmax and `correct_K` whose draft equals the full-vocabulary argmax."""

    loss: torch.Tensor
    loss_K: list[float]
    supervised_K: list[int]
    counted_K: list[int]
    correct_K: list[int]


def mean_loss(counted_M: torch.Tensor, positions: int, normalise: Normalise) -> torch.Tensor:
    """Mean of the counted positions' losses: over themselves (`valid`, case C63) or over all B * T
    positions (`all`, as SpecForge). Nothing counted gives 0, never NaN."""
    return counted_M.sum() / (
        max(counted_M.numel(), 1) if normalise == "valid" else max(positions, 1)
    )


@torch.no_grad()
def teach(batch: Batch, head: TargetHead, drafter: Drafter) -> Teacher:
    """Teacher rows where some step needs one: step k at position s is taught by the target at s + 1
    + k.

    The argmax over the full vocabulary comes from extraction when it is stored there (`top1_BT`),
    which leaves only the draft rows of the output matrix to multiply."""
    needed_BT = torch.zeros_like(batch.supervised_KBT[0])
    for k, wanted_BT in enumerate(batch.supervised_KBT):
        needed_BT[:, 1 + k :] |= wanted_BT[:, : wanted_BT.shape[1] - 1 - k]
    index_BT = torch.full(needed_BT.shape, -1, dtype=torch.long, device=needed_BT.device)
    last_RH, top1_R = batch.last_BTH[needed_BT], batch.top1_BT[needed_BT]
    index_BT[needed_BT] = torch.arange(last_RH.shape[0], device=needed_BT.device)
    used_D = drafter.d2t + torch.arange(drafter.d2t.numel(), device=drafter.d2t.device)
    draft_of_V = torch.full((drafter.t2d.numel(),), -1, dtype=torch.long, device=used_D.device)
    draft_of_V[used_D] = torch.arange(used_D.numel(), device=used_D.device)

    known = bool((top1_R >= 0).all())
    rows_DH = head.lm_head_VH[used_D] if known else head.lm_head_VH
    probs, tops = [], []
    for chunk_RH in torch.split(last_RH, TEACHER_CHUNK_ROWS):
        logits = (head.post_norm(chunk_RH.to(head.norm_H.dtype)) @ rows_DH.T).float()
        tops.append(logits.argmax(-1))
        probs.append(torch.softmax(logits if known else logits[:, used_D], -1))
    if not probs:
        return Teacher(last_RH.new_zeros((0, used_D.numel())), top1_R, index_BT)
    return Teacher(torch.cat(probs), draft_of_V[top1_R if known else torch.cat(tops)], index_BT)


def ttt_loss(
    drafter: Drafter, batch: Batch, teacher: Teacher, decay: float, normalise: Normalise
) -> LossResult:
    """Sum over k of decay^k times the mean soft cross-entropy of step k."""
    columns = columns_of(batch.supervised_KBT.any(0))
    steps, positions = batch.supervised_KBT.shape[0], batch.ids_BT.numel()
    hidden_KNH = drafter.columns(batch.ids_BT, batch.aux_BTX, columns, steps)
    loss = batch.aux_BTX.new_zeros((), dtype=torch.float32)
    losses, supervised_K, counted_K, correct_K = [], [], [], []
    for k, hidden_NH in enumerate(hidden_KNH):
        wanted_N, taught_N, best_N = _column_teacher(columns, batch.supervised_KBT[k], teacher, k)
        chosen_M = (wanted_N & (best_N >= 0)).nonzero().squeeze(-1)
        logits_MD = drafter.logits(pick(hidden_NH, chosen_M)).float()
        probs_MD = teacher.probs_RD[taught_N[chosen_M]]
        loss_k = mean_loss(
            -(probs_MD * torch.log_softmax(logits_MD, -1)).sum(-1), positions, normalise
        )
        loss = loss + decay**k * loss_k
        losses.append(loss_k.detach())
        supervised_K.append(wanted_N.sum())
        counted_K.append(torch.tensor(chosen_M.numel()))
        correct_K.append((logits_MD.detach().argmax(-1) == best_N[chosen_M]).sum())
    return LossResult(
        loss,
        [float(x) for x in losses],
        [int(x) for x in supervised_K],
        [int(x) for x in counted_K],
        [int(x) for x in correct_K],
    )


def _column_teacher(
    columns: Columns, wanted_BT: torch.Tensor, teacher: Teacher, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per column: does step k count, which teacher row, which draft id is right (-1: none)."""
    wanted_N = wanted_BT[columns.row_N, columns.pos_N]
    taught_at_N = (columns.pos_N + 1 + k).clamp_max(wanted_BT.shape[1] - 1)
    taught_N = teacher.index_BT[columns.row_N, taught_at_N].clamp_min(0)
    if teacher.best_R.numel() == 0:
        return wanted_N, taught_N, torch.full_like(taught_N, -1)
    return wanted_N, taught_N, teacher.best_R[taught_N]
