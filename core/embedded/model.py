"""A Llama forward for sampling on a CPU: float32, slots of one key-value cache, batched decode and
prefill.

Reads `config.json` and `model.safetensors` in the Hugging Face Llama layout. Knows tensors only: no
sampling, no text, no threads. Sequences live in slots 0..n-1, so every step works on a view of the
cache and never gathers.

    B sequences  T tokens  D hidden  H query heads  G key-value heads  R = H // G  E head size  V
    vocabulary  S slots
"""

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from core.errors import UsageError


class LlamaConfig:
    """The fields of `config.json` that decide the forward; rope_theta may sit in `rope_parameters`
    (transformers 5)."""

    def __init__(self, data: dict[str, Any], where: str = "config.json") -> None:
        rope = data.get("rope_parameters") or {}
        try:
            self.vocab_size = int(data["vocab_size"])
            self.hidden = int(data["hidden_size"])
            self.layers = int(data["num_hidden_layers"])
            self.heads = int(data["num_attention_heads"])
        except KeyError as e:
            raise UsageError(f"{where}: no {e.args[0]}; give the directory of a Llama model") from e
        self.kv_heads = int(data.get("num_key_value_heads") or self.heads)
        self.head_size = int(data.get("head_dim") or self.hidden // self.heads)
        self.eps = float(data.get("rms_norm_eps", 1e-6))
        self.rope_theta = float(data.get("rope_theta") or rope.get("rope_theta") or 10_000.0)
        self.max_positions = int(data.get("max_position_embeddings", 2_048))
        if rope.get("rope_type", "default") != "default" or data.get("rope_scaling"):
            raise UsageError(
                f"{where}: scaled rotary embeddings are not served; use the default rope"
            )
        if data.get("attention_bias") or data.get("mlp_bias"):
            raise UsageError(
                f"{where}: biased projections are not served; use a Llama without biases"
            )


class Cache:
    """Keys and values of S slots, [layers, S, G, T, E]. Zeroed pages are committed by the system
    on first use."""

    def __init__(self, config: LlamaConfig, slots: int, max_length: int) -> None:
        shape = (config.layers, slots, config.kv_heads, max_length, config.head_size)
        self.k = torch.zeros(shape)
        self.v = torch.zeros(shape)
        self.slots = slots
        self.max_length = max_length

    def move(self, source: int, target: int, length: int) -> None:
        """Copy one sequence of `length` tokens from slot `source` to slot `target`."""
        for store in (self.k, self.v):
            store[:, target, :, :length] = store[:, source, :, :length]


class _Layer:
    def __init__(self, weights: dict[str, Tensor], prefix: str) -> None:
        def take(*names: str) -> Tensor:
            return torch.cat([weights[f"{prefix}{n}.weight"] for n in names]).contiguous()

        self.norm_in = take("input_layernorm")
        self.norm_post = take("post_attention_layernorm")
        self.qkv = take("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.out = take("self_attn.o_proj")
        self.gate_up = take("mlp.gate_proj", "mlp.up_proj")
        self.down = take("mlp.down_proj")


class Llama:
    """`prefill` fills fresh slots and `decode` advances all of them by one token; both return last
    logits [B, V]."""

    def __init__(self, config: LlamaConfig, weights: dict[str, Tensor]) -> None:
        weights = {name: tensor.float() for name, tensor in weights.items()}
        self.config = config
        self.embed = weights["model.embed_tokens.weight"]
        self.head = weights.get("lm_head.weight", self.embed)
        self.norm = weights["model.norm.weight"]
        self.layers = [_Layer(weights, f"model.layers.{i}.") for i in range(config.layers)]
        half = torch.arange(0, config.head_size, 2, dtype=torch.int64).float() / config.head_size
        angles = torch.outer(torch.arange(config.max_positions).float(), config.rope_theta**-half)
        self.cos_TE = torch.cat([angles.cos()] * 2, -1)
        self.sin_TE = torch.cat([angles.sin()] * 2, -1)

    @classmethod
    def load(cls, directory: Path) -> "Llama":
        """Raises UsageError when the directory does not hold a Llama."""
        config_path = directory / "config.json"
        try:
            data = json.loads(config_path.read_text(encoding="utf-8"))
            weights = load_file(directory / "model.safetensors")
        except (OSError, ValueError) as e:
            raise UsageError(f"{directory}: no readable model ({e}); give --model-dir") from e
        try:
            return cls(LlamaConfig(data, str(config_path)), weights)
        except KeyError as e:
            raise UsageError(
                f"{directory}/model.safetensors: no tensor {e.args[0]}; not a Llama"
            ) from e

    def new_cache(self, slots: int) -> Cache:
        return Cache(self.config, slots, self.config.max_positions)

    def prefill(self, cache: Cache, first_slot: int, prompts: list[list[int]]) -> Tensor:
        """Fill slots first_slot.. with `prompts`, padded on the right; the padding is never
        attended to."""
        lengths = torch.tensor([len(p) for p in prompts])
        width = int(lengths.max())
        ids_BT = torch.zeros((len(prompts), width), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids_BT[row, : len(prompt)] = torch.tensor(prompt)
        cos, sin = self.cos_TE[:width], self.sin_TE[:width]
        slots = slice(first_slot, first_slot + len(prompts))
        hidden_BTD = self.embed[ids_BT]
        for i, layer in enumerate(self.layers):
            q, k, v = self._qkv(layer, hidden_BTD, cos, sin)
            cache.k[i, slots, :, :width] = k
            cache.v[i, slots, :, :width] = v
            mixed = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=self.config.heads != self.config.kv_heads
            )
            hidden_BTD = self._finish(layer, hidden_BTD, mixed.transpose(1, 2).flatten(2))
        return self._logits(hidden_BTD[torch.arange(len(prompts)), lengths - 1])

    def decode(self, cache: Cache, tokens_B: Tensor, lengths_B: Tensor) -> Tensor:
        """Advance slots 0..B-1 by `tokens_B`; `lengths_B` tokens of each are cached already
        (int64)."""
        c, batch = self.config, len(tokens_B)
        rows = torch.arange(batch)
        cos, sin = self.cos_TE[lengths_B][:, None, None], self.sin_TE[lengths_B][:, None, None]
        groups = [(part, _mask(lengths_B[part])) for part in _by_length(lengths_B.tolist())]
        hidden_B1D = self.embed[tokens_B].unsqueeze(1)
        for i, layer in enumerate(self.layers):
            q, k, v = self._qkv(layer, hidden_B1D, cos, sin)
            cache.k[i, :batch][rows, :, lengths_B] = k[:, :, 0]
            cache.v[i, :batch][rows, :, lengths_B] = v[:, :, 0]
            # The R queries of a key-value head stand as R rows of one attention: nothing repeats.
            q_BGRE = q.view(batch, c.kv_heads, -1, c.head_size)
            mixed = [
                F.scaled_dot_product_attention(
                    q_BGRE[part],
                    cache.k[i, part, :, : mask.shape[-1]],
                    cache.v[i, part, :, : mask.shape[-1]],
                    attn_mask=mask,
                )
                for part, mask in groups
            ]
            mixed_BGRE = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
            hidden_B1D = self._finish(layer, hidden_B1D, mixed_BGRE.reshape(batch, 1, -1))
        return self._logits(hidden_B1D[:, 0])

    def _qkv(
        self, layer: _Layer, hidden_BTD: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        fused = F.linear(F.rms_norm(hidden_BTD, (c.hidden,), layer.norm_in, c.eps), layer.qkv)
        heads_BNTE = fused.view(*fused.shape[:2], -1, c.head_size).transpose(1, 2)
        turned = c.heads + c.kv_heads
        qk = heads_BNTE[:, :turned]
        half = c.head_size // 2
        qk = qk * cos + torch.cat([-qk[..., half:], qk[..., :half]], -1) * sin
        return qk[:, : c.heads], qk[:, c.heads :], heads_BNTE[:, turned:]

    def _finish(self, layer: _Layer, hidden_BTD: Tensor, mixed_BTD: Tensor) -> Tensor:
        c = self.config
        hidden_BTD = hidden_BTD + F.linear(mixed_BTD, layer.out)
        gate, up = F.linear(
            F.rms_norm(hidden_BTD, (c.hidden,), layer.norm_post, c.eps), layer.gate_up
        ).chunk(2, -1)
        return hidden_BTD + F.linear(F.silu(gate) * up, layer.down)

    def _logits(self, hidden_BD: Tensor) -> Tensor:
        normed = F.rms_norm(hidden_BD, (self.config.hidden,), self.norm, self.config.eps)
        return F.linear(normed, self.head)


def _mask(lengths_B: Tensor) -> Tensor:
    """Additive mask [B, 1, 1, T] over the cached tokens and the new one."""
    width = int(lengths_B.max()) + 1
    hidden_BT = torch.arange(width) > lengths_B[:, None]
    return torch.zeros(hidden_BT.shape).masked_fill_(hidden_BT, float("-inf"))[:, None, None]


def _by_length(lengths: list[int]) -> list[slice]:
    """One or two runs of slots whose padded attention costs least: one long sequence in a batch of
    short ones would otherwise make all of them read its width. A second run must save a quarter."""
    batch = len(lengths)
    heads = list(itertools.accumulate(lengths, max))
    tails = list(itertools.accumulate(reversed(lengths), max))[::-1]
    costs = [h * heads[h - 1] + (batch - h) * tails[h] for h in range(1, batch)]
    if not costs or min(costs) > 0.75 * batch * heads[-1]:
        return [slice(0, batch)]
    cut = costs.index(min(costs)) + 1
    return [slice(0, cut), slice(cut, batch)]
