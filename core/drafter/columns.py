"""Columns: the positions that draft, as one flat list and as rows padded to equal width.

Linear layers run on the flat list, attention on the padded rows. Moving between the two never adds
two values into one place, so gradients are deterministic on any number of threads (advanced
indexing's are not)."""

# B rows, T positions, N columns (flat), U columns of a row (padded)

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Columns:
    """Column n is position `pos_N[n]` of row `row_N[n]`: `flat_N[n]` in B*T, `place_N[n]` in
    B*U."""

    row_N: torch.Tensor
    pos_N: torch.Tensor
    flat_N: torch.Tensor
    place_N: torch.Tensor
    rows: int
    width: int

    def padded_positions(self) -> torch.Tensor:
        """[B, U] position of each slot; 0 in unused ones, which keeps their attention finite."""
        out = self.pos_N.new_zeros(self.rows * self.width)
        out[self.place_N] = self.pos_N
        return out.view(self.rows, self.width)


def columns_of(wanted_BT: torch.Tensor) -> Columns:
    """All True positions, row by row."""
    rows, length = wanted_BT.shape
    row_N, pos_N = wanted_BT.nonzero(as_tuple=True)
    count_B = wanted_BT.sum(1)
    width = int(count_B.max()) if rows else 0
    first_B = count_B.cumsum(0) - count_B
    slot_N = torch.arange(row_N.numel(), device=wanted_BT.device) - first_B[row_N]
    return Columns(row_N, pos_N, row_N * length + pos_N, row_N * width + slot_N, rows, width)


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index_N)
        ctx.size = source.shape[0]
        return source.index_select(0, index_N)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index_N,) = ctx.saved_tensors
        return _place(grads[0], index_N, ctx.size), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, index_N: torch.Tensor, size: int) -> torch.Tensor:
        ctx.save_for_backward(index_N)
        return _place(source, index_N, size)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (index_N,) = ctx.saved_tensors
        return grads[0].index_select(0, index_N), None, None


def pick(source: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
    """source[index_N] for distinct indices."""
    out: torch.Tensor = _Pick.apply(source, index_N)  # type: ignore[no-untyped-call]
    return out


def spread(source: torch.Tensor, index_N: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of `source` at distinct indices of a zero tensor with `size` rows: the transpose of
    `pick`."""
    out: torch.Tensor = _Spread.apply(source, index_N, size)  # type: ignore[no-untyped-call]
    return out


def _place(source: torch.Tensor, index_N: torch.Tensor, size: int) -> torch.Tensor:
    out = source.new_zeros((size, *source.shape[1:]))
    return out.index_copy_(0, index_N, source)
