"""The EAGLE-3 draft model: one decoder layer over (token embedding, hidden state), and its two ways
of running.

`columns` runs TTT training and the offline walk: many positions at once, each with its own chain of
K steps. `extend` and `propose` run as a server does: a key/value cache, one chain, its own tokens.
Both compute the same function. Parameter names are those of the SGLang checkpoint. Knows tensors
only, no files, no losses."""

# B rows, T positions, H hidden size, X = 3H concatenated aux states, V target vocabulary, D draft
# vocabulary, N columns (drafting positions, flat), U columns of a row (padded), Q query heads, G
# key/value heads, R = Q / G, E head size, S new positions of one sequence, P cached positions of
# one sequence, K TTT steps

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from core.drafter.columns import Columns, pick, spread
from core.target import TargetHead, rms_norm

Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(query [N, Q, E], layer input [N, 2H]) -> [N, Q * E]"""


class DraftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a drafter. `aux_layers` uses the output-of-layer convention."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    vocab_size: int
    draft_vocab_size: int
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    aux_layers: list[int]
    bos_id: int | None = None
    eos_ids: list[int] = []


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, self.weight, self.eps)


class Projections(nn.Module):
    """q, k and v read 2H (embedding first), o writes H."""

    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.q_proj = nn.Linear(2 * c.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, c.hidden_size, bias=False)


class SwiGLU(nn.Module):
    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class Layer(nn.Module):
    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Projections(c), SwiGLU(c)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_eps)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_eps)


@dataclass
class DraftCache:
    """Step-0 keys and values of one sequence's positions 0..P-1, plus those of the chain under
    way."""

    keys_GPE: torch.Tensor
    values_GPE: torch.Tensor
    chain: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.keys_GPE.shape[1]


class Drafter(nn.Module):
    """Trainable: fc, midlayer, norm, lm_head. The embedding is the target's, frozen and not
    saved."""

    embed_VH: torch.Tensor
    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(
        self, c: DraftConfig, embed_VH: torch.Tensor, d2t_D: torch.Tensor, t2d_V: torch.Tensor
    ) -> None:
        super().__init__()
        self.c = c
        self.fc = nn.Linear(3 * c.hidden_size, c.hidden_size, bias=False)
        self.midlayer = Layer(c)
        self.norm = RMSNorm(c.hidden_size, c.rms_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        self.register_buffer("embed_VH", embed_VH.detach(), persistent=False)
        self.register_buffer("d2t", d2t_D.long())
        self.register_buffer("t2d", t2d_V.bool())
        self._rotary = LlamaRotaryEmbedding(rope_config(c))

    @classmethod
    def fresh(
        cls, c: DraftConfig, head: TargetHead, d2t_D: torch.Tensor, t2d_V: torch.Tensor, seed: int
    ) -> "Drafter":
        """An untrained drafter: output matrix and final norm are the target's (rows of the draft
        vocabulary), the rest is drawn from `seed`."""
        generator = torch.Generator().manual_seed(seed)
        drafter = cls(c, head.embed_VH, d2t_D, t2d_V)
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                if parameter.ndim == 2:
                    std = parameter.shape[1] ** -0.5
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
                    if name.endswith(("o_proj.weight", "down_proj.weight")):
                        parameter.mul_(0.1)
            drafter.lm_head.weight.copy_(head.lm_head_VH[t2d_V.bool().to(head.lm_head_VH.device)])
            drafter.norm.weight.copy_(head.norm_H)
        return drafter

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """[N, D]"""
        out: torch.Tensor = self.lm_head(self.norm(hidden_NH))
        return out

    def target_ids(self, logits_ND: torch.Tensor) -> torch.Tensor:
        """Greedy draft as target ids: d2t holds offsets."""
        best_N = logits_ND.argmax(-1)
        return best_N + self.d2t[best_N]

    # -- many columns at once: training and the walk

    def columns(
        self, ids_BT: torch.Tensor, aux_BTX: torch.Tensor, columns: Columns, steps: int
    ) -> list[torch.Tensor]:
        """Pre-norm output hidden [N, H] of every column after TTT steps 0..steps-1, fed with the
        text's own tokens.

        Step k at position s reads token s+1+k (0 past the row's end) and the column's previous
        output (fc of the aux states at step 0), attends to step-0 keys of positions <= s and to the
        column's own keys of steps 1..k, at rotary position s+k."""
        length = ids_BT.shape[1]
        padded_BT = F.pad(ids_BT, (0, steps + 1))
        cos, sin = self._rope(length + steps, aux_BTX)
        fused_BTH = self.fc(aux_BTX)
        mixed_BTX = self._mix(self.embed_VH[padded_BT[:, 1 : length + 1]], fused_BTH)
        key_BTGE, value_BTGE = self._key_value(mixed_BTX, cos[:length], sin[:length])
        key_BGTE, value_BGTE = key_BTGE.transpose(1, 2), value_BTGE.transpose(1, 2)

        row_N, pos_N = columns.row_N, columns.pos_N
        later_B1U1T = self._later(columns, length)
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        hidden_NH, outputs = pick(fused_BTH.flatten(0, 1), columns.flat_N), []
        for k in range(steps):
            cos_NE, sin_NE = cos[pos_N + k], sin[pos_N + k]

            def attend(
                query_NQE: torch.Tensor,
                mixed_NX: torch.Tensor,
                k: int = k,
                cos_NE: torch.Tensor = cos_NE,
                sin_NE: torch.Tensor = sin_NE,
            ) -> torch.Tensor:
                if k > 0:
                    own.append(self._key_value(mixed_NX, cos_NE, sin_NE))
                return self._attend(query_NQE, key_BGTE, value_BGTE, own, columns, later_B1U1T)

            embed_NH = self.embed_VH[padded_BT[row_N, pos_N + 1 + k]]
            hidden_NH = self._layer(embed_NH, hidden_NH, cos_NE, sin_NE, attend)
            outputs.append(hidden_NH)
        return outputs

    def _attend(
        self,
        query_NQE: torch.Tensor,
        key_BGTE: torch.Tensor,
        value_BGTE: torch.Tensor,
        own: list[tuple[torch.Tensor, torch.Tensor]],
        columns: Columns,
        later: torch.Tensor,
    ) -> torch.Tensor:
        """[N, Q * E]: one softmax over step-0 keys and the column's own."""
        n, (b, g, t, e) = query_NQE.shape[0], key_BGTE.shape
        u, r, place_N = columns.width, query_NQE.shape[1] // g, columns.place_N
        query_NGRE = query_NQE.view(n, g, r, e) * e**-0.5
        query_BGRUE = _to_rows(query_NGRE, columns)
        score = query_BGRUE.reshape(b, g, r * u, e) @ key_BGTE.transpose(2, 3)
        score_BGRUT = score.view(b, g, r, u, t).masked_fill(later, float("-inf"))
        if own:
            own_NGRK = torch.stack([(query_NGRE * key[:, :, None]).sum(-1) for key, _ in own], -1)
            score_BGRUT = torch.cat([score_BGRUT, _to_rows(own_NGRK, columns)], -1)
        wide = torch.promote_types(score.dtype, torch.float32)
        weight = torch.softmax(score_BGRUT, -1, dtype=wide).to(value_BGTE.dtype)
        mixed_BGRUE = (weight[..., :t].reshape(b, g, r * u, t) @ value_BGTE).view(b, g, r, u, e)
        out_NGRE = pick(mixed_BGRUE.permute(0, 3, 1, 2, 4).reshape(b * u, g, r, e), place_N)
        if own:
            weight_NGRK = pick(
                weight[..., t:].permute(0, 3, 1, 2, 4).reshape(b * u, g, r, len(own)), place_N
            )
            for i, (_, value_NGE) in enumerate(own):
                out_NGRE = out_NGRE + weight_NGRK[..., i : i + 1] * value_NGE[:, :, None]
        return out_NGRE.reshape(n, g * r * e)

    @staticmethod
    def _later(columns: Columns, length: int) -> torch.Tensor:
        """[B, 1, 1, U, T] True where a key lies after its query."""
        pos_BU = columns.padded_positions()
        key_T = torch.arange(length, device=pos_BU.device)
        return (key_T > pos_BU[..., None])[:, None, None]

    # -- one sequence, step by step: as served

    def empty_cache(self) -> DraftCache:
        shape = (self.c.num_kv_heads, 0, self.c.head_dim)
        weight = self.fc.weight
        return DraftCache(weight.new_empty(shape), weight.new_empty(shape))

    def extend(self, cache: DraftCache, next_S: torch.Tensor, aux_SX: torch.Tensor) -> torch.Tensor:
        """Add S positions whose target states are known. `next_S[i]` is the token AFTER position i.

        Drops the chain that was under way. Returns the last position's output hidden [1, H].
        """
        cache.chain = []
        start, size = cache.length, next_S.numel()
        cos, sin = self._rope(start + size, aux_SX)

        def attend(query_SQE: torch.Tensor, mixed_SX: torch.Tensor) -> torch.Tensor:
            key_SGE, value_SGE = self._key_value(mixed_SX, cos[start:], sin[start:])
            cache.keys_GPE = torch.cat([cache.keys_GPE, key_SGE.transpose(0, 1)], 1)
            cache.values_GPE = torch.cat([cache.values_GPE, value_SGE.transpose(0, 1)], 1)
            position_P = torch.arange(start + size, device=next_S.device)
            later_SP = position_P > torch.arange(start, start + size, device=next_S.device)[:, None]
            return _attend_plain(query_SQE, cache.keys_GPE, cache.values_GPE, later_SP)

        hidden_SH = self._layer(
            self.embed_VH[next_S], self.fc(aux_SX), cos[start:], sin[start:], attend
        )
        return hidden_SH[-1:]

    def propose(self, cache: DraftCache, hidden_1H: torch.Tensor, count: int) -> list[int]:
        """A greedy chain of `count` target ids that continues the sequence in the cache, from the
        output hidden that `extend` returned. The chain's keys stay out of the step-0 cache."""
        drafts = [int(self.target_ids(self.logits(hidden_1H)))]
        cos, sin = self._rope(cache.length + count, hidden_1H)
        for k in range(1, count):
            at = slice(cache.length - 1 + k, cache.length + k)

            def attend(
                query_1QE: torch.Tensor, mixed_1X: torch.Tensor, at: slice = at
            ) -> torch.Tensor:
                key_1GE, value_1GE = self._key_value(mixed_1X, cos[at], sin[at])
                cache.chain.append((key_1GE.transpose(0, 1), value_1GE.transpose(0, 1)))
                keys_GPE = torch.cat([cache.keys_GPE, *(key for key, _ in cache.chain)], 1)
                values_GPE = torch.cat([cache.values_GPE, *(value for _, value in cache.chain)], 1)
                return _attend_plain(query_1QE, keys_GPE, values_GPE, None)

            token_1 = torch.tensor([drafts[-1]], device=hidden_1H.device)
            hidden_1H = self._layer(self.embed_VH[token_1], hidden_1H, cos[at], sin[at], attend)
            drafts.append(int(self.target_ids(self.logits(hidden_1H))))
        return drafts

    # -- shared

    def _layer(
        self,
        embed_NH: torch.Tensor,
        hidden_NH: torch.Tensor,
        cos_NE: torch.Tensor,
        sin_NE: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """Pre-norm residual stream in, pre-norm out: what comes out is the next step's hidden."""
        attn = self.midlayer.self_attn
        mixed_NX = self._mix(embed_NH, hidden_NH)
        query_NQE = self._heads(attn.q_proj(mixed_NX), self.c.num_heads)
        query_NQE = _rotate(query_NQE, cos_NE[:, None], sin_NE[:, None])
        hidden_NH = hidden_NH + attn.o_proj(attend(query_NQE, mixed_NX))
        out: torch.Tensor = hidden_NH + self.midlayer.mlp(
            self.midlayer.post_attention_layernorm(hidden_NH)
        )
        return out

    def _key_value(
        self, mixed_X: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [..., G, E] of layer inputs [..., 2H] at rotary cos, sin [..., E]."""
        attn, heads = self.midlayer.self_attn, self.c.num_kv_heads
        key = _rotate(
            self._heads(attn.k_proj(mixed_X), heads), cos[..., None, :], sin[..., None, :]
        )
        return key, self._heads(attn.v_proj(mixed_X), heads)

    def _mix(self, embed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Embedding first."""
        embed = embed.to(hidden.dtype)
        return torch.cat(
            [self.midlayer.input_layernorm(embed), self.midlayer.hidden_norm(hidden)], -1
        )

    def _heads(self, flat: torch.Tensor, heads: int) -> torch.Tensor:
        return flat.view(*flat.shape[:-1], heads, self.c.head_dim)

    def _rope(self, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [length, E]"""
        position_1T = torch.arange(length, device=like.device)[None]
        cos, sin = self._rotary(self.fc.weight, position_1T)
        return cos[0], sin[0]


def rope_config(c: DraftConfig) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=c.hidden_size,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        vocab_size=c.vocab_size,
        max_position_embeddings=c.max_position_embeddings,
        rope_parameters=dict(c.rope_parameters),
    )


def _to_rows(flat: torch.Tensor, columns: Columns) -> torch.Tensor:
    """[N, G, R, *] -> [B, G, R, U, *]"""
    padded = spread(flat, columns.place_N, columns.rows * columns.width)
    return padded.view(columns.rows, columns.width, *flat.shape[1:]).permute(0, 2, 3, 1, 4)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Llama's rotate-half."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def _attend_plain(
    query_SQE: torch.Tensor,
    keys_GPE: torch.Tensor,
    values_GPE: torch.Tensor,
    later_SP: torch.Tensor | None,
) -> torch.Tensor:
    """[S, Q * E] of one sequence."""
    s, q, e = query_SQE.shape
    g = keys_GPE.shape[0]
    query_GRSE = query_SQE.view(s, g, q // g, e).permute(1, 2, 0, 3) * e**-0.5
    score_GRSP = query_GRSE @ keys_GPE[:, None].transpose(2, 3)
    if later_SP is not None:
        score_GRSP = score_GRSP.masked_fill(later_SP, float("-inf"))
    weight = torch.softmax(
        score_GRSP, -1, dtype=torch.promote_types(score_GRSP.dtype, torch.float32)
    )
    mixed_GRSE = weight.to(values_GPE.dtype) @ values_GPE[:, None]
    return mixed_GRSE.permute(2, 0, 1, 3).reshape(s, q * e)
