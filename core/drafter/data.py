"""Which samples train, which positions are supervised, and which samples share a batch.

Pure decisions (hold-out, masks, batch order) and one small batch builder. Same seed, same batches,
whatever stopped in between. Knows stored features, nothing about networks."""

# B rows, T positions, H hidden size, K TTT steps, X = 3H concatenated aux states

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from core.features import FeatureRow
from core.schema import Sample
from core.store import RunDir, read_samples

MaskAlign = Literal["serving", "target", "legacy"]


def is_heldout(twin_id: str, share: float) -> bool:
    """Whether a prompt is kept out of training: by hash of twin_id, so that all arms of a question
    stay together."""
    digest = hashlib.sha256(twin_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def usable_samples(run: RunDir) -> Iterator[Sample]:
    """Samples that may be trained on: an admitting verdict and at least one completion token."""
    for sample in read_samples(
        run, ["sample_id", "twin_id", "dataset", "token_ids", "prompt_len", "verdict"]
    ):
        if sample.trainable and 0 < sample.prompt_len < len(sample.token_ids):
            yield sample


def masked_now(run: RunDir) -> dict[str, list[int]]:
    """sample_id -> positions taken out of the loss, for samples that may be trained on as the audit
    stands now: it may have been applied after their states were extracted."""
    samples = read_samples(run, ["sample_id", "verdict"])
    return {sample.sample_id: sample.masked for sample in samples if sample.trainable}


def supervised_KT(mask_T: torch.Tensor, steps: int, align: MaskAlign) -> torch.Tensor:
    """M_k[s]: whether TTT step k counts at position s. Step k at s reads token s+1+k and predicts
    token s+2+k; its teacher is the target at s+1+k.

    serving   l[s+1] .. l[s+2+k] all supervised: exactly the drafts that a server can make and use
    target    l[s+1+k]
    legacy    l[s+k], as SpecForge (issue 885), never on the row's end
    """
    length = mask_T.numel()

    def shifted(by: int) -> torch.Tensor:
        out = torch.zeros_like(mask_T)
        if by < length:
            out[: length - by] = mask_T[by:]
        return out

    rows = []
    inside = shifted(1)
    for k in range(steps):
        if align == "serving":
            inside = inside & shifted(2 + k)
            rows.append(inside)
        elif align == "target":
            rows.append(shifted(1 + k))
        else:
            legacy = shifted(k).clone()
            legacy[max(length - 1 - k, 0) :] = False
            rows.append(legacy)
    return torch.stack(rows)


def plan_batches(
    lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int
) -> list[list[int]]:
    """Indices of one epoch's batches: every sample once, rows x longest row <= batch_tokens (a
    longer sample is alone). Deterministic in (lengths, batch_tokens, seed, epoch). Rows of a batch
    have similar lengths; which rows meet and the order of batches change with the epoch."""
    rng = np.random.default_rng([seed, epoch])
    noise = rng.uniform(0.85, 1.15, len(lengths))
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i] * noise[i], i))
    batches: list[list[int]] = []
    current: list[int] = []
    longest = 0
    for i in order:
        if current and max(longest, lengths[i]) * (len(current) + 1) > batch_tokens:
            batches.append(current)
            current, longest = [], 0
        current.append(i)
        longest = max(longest, lengths[i])
    if current:
        batches.append(current)
    return [batches[i] for i in rng.permutation(len(batches))]


@dataclass(frozen=True)
class Batch:
    """Right-padded rows. `supervised_KBT` is M_k; `top1_BT` the target's argmax per position (-1:
    not known)."""

    ids_BT: torch.Tensor
    aux_BTX: torch.Tensor
    last_BTH: torch.Tensor
    top1_BT: torch.Tensor
    supervised_KBT: torch.Tensor
    length_B: torch.Tensor

    @property
    def tokens(self) -> int:
        return int(self.length_B.sum())


def collate(
    rows: Sequence[FeatureRow],
    steps: int,
    align: MaskAlign,
    dtype: torch.dtype,
    device: str = "cpu",
) -> Batch:
    """Pad to the longest row. Padding is never supervised and, lying to the right, never attended
    to."""
    longest = max(row.length for row in rows)
    hidden = rows[0].states_TCH.shape[-1]
    count = len(rows)
    ids_BT = torch.zeros(count, longest, dtype=torch.long)
    top1_BT = torch.full((count, longest), -1, dtype=torch.long)
    states_BTX = torch.zeros(count, longest, 4 * hidden, dtype=dtype)
    supervised_KBT = torch.zeros(steps, count, longest, dtype=torch.bool)
    for b, row in enumerate(rows):
        ids_BT[b, : row.length] = row.ids_T
        top1_BT[b, : row.length] = row.top1_T
        states_BTX[b, : row.length] = row.states_TCH.flatten(1).to(dtype)
        supervised_KBT[:, b, : row.length] = supervised_KT(row.mask_T, steps, align)
    states_BTX = states_BTX.to(device)
    return Batch(
        ids_BT=ids_BT.to(device),
        aux_BTX=states_BTX[..., : 3 * hidden],
        last_BTH=states_BTX[..., 3 * hidden :],
        top1_BT=top1_BT.to(device),
        supervised_KBT=supervised_KBT.to(device),
        length_B=torch.tensor([row.length for row in rows], device=device),
    )
