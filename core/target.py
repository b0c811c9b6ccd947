"""The target model as a source of hidden states, logits and greedy text.

Loads any Hugging Face causal language model whose decoder has `.layers` and a final `.norm`, and
takes states with hooks: the OUTPUT of chosen layers (0-based) and the INPUT of the final norm (the
last state, pre-norm). `TargetHead` is the part that training needs (embedding, final norm, output
matrix) read without loading the model. Knows nothing about runs, samples or drafters."""

# B rows, T positions, H hidden size, V target vocabulary, N any flat list of positions, C = 4
# captured states: low, mid, high aux layer output and last layer output before the final norm.

import hashlib
import inspect
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as hf_logging

from core.config import Config
from core.embedded import TARGET_DIR
from core.errors import CaptureError, ConfigError, boundary
from core.features import check_aux_layers

WHOLE_FILE_BYTES = 256 << 20
SMALL_HIDDEN = 1_024
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def target_dir(config: Config) -> Path:
    """The folder with config.json and weights."""
    directory = Path(config.target.path) if config.target.path else TARGET_DIR
    if not (directory / "config.json").exists():
        raise ConfigError(f"{directory}: no config.json of a model; set target.path")
    return directory


def text_config(directory: Path) -> Any:
    """The language part of the model's config (multi-modal wrappers nest it)."""
    with boundary(ConfigError, str(directory / "config.json")):
        return AutoConfig.from_pretrained(directory, local_files_only=True).get_text_config()


def settle_threads(threads: int, device: str, hidden_size: int) -> None:
    """Torch's CPU threads: `threads` when given; one for small models on a CPU, whose matrices gain
    nothing from a second thread that a busy machine makes them wait for; else torch's choice."""
    if threads or (device == "cpu" and hidden_size < SMALL_HIDDEN):
        torch.set_num_threads(threads or 1)


def eos_ids(directory: Path) -> list[int]:
    """End-of-text ids of config.json and generation_config.json, ascending."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        if path.exists():
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            found.update(value if isinstance(value, list) else [] if value is None else [value])
    return sorted(found)


def target_fingerprint(directory: Path) -> str:
    """sha256 over config.json and the weight files: whole files up to 256 MiB, above that their
    first and last 64 KiB (header, first and last tensor), so that a terabyte checkpoint is
    recognised in a second."""
    digest = hashlib.sha256()
    for path in sorted([directory / "config.json", *directory.glob("*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as f:
            if size <= WHOLE_FILE_BYTES:
                digest.update(f.read())
                continue
            digest.update(f.read(1 << 16))
            f.seek(-(1 << 16), os.SEEK_END)
            digest.update(f.read())
    return digest.hexdigest()


def rms_norm(hidden: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm in float32 (float64 stays), cast back, then the weight, as in Llama."""
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight_H * scaled.to(hidden.dtype)


@dataclass(frozen=True)
class TargetHead:
    """Embedding, final norm and output matrix of a target."""

    embed_VH: torch.Tensor
    norm_H: torch.Tensor
    lm_head_VH: torch.Tensor
    eps: float

    def post_norm(self, last_NH: torch.Tensor) -> torch.Tensor:
        return rms_norm(last_NH, self.norm_H, self.eps)

    def logits(self, last_NH: torch.Tensor) -> torch.Tensor:
        """[N, V] float32 from the PRE-norm last state."""
        return (self.post_norm(last_NH.to(self.norm_H.dtype)) @ self.lm_head_VH.T).float()

    def to(self, device: str | torch.device, dtype: torch.dtype | None = None) -> "TargetHead":
        kind = dtype or self.norm_H.dtype
        return TargetHead(
            self.embed_VH.to(device, kind),
            self.norm_H.to(device, kind),
            self.lm_head_VH.to(device, kind),
            self.eps,
        )


def load_head(directory: Path) -> TargetHead:
    """Read three tensors of a checkpoint; a tied output matrix is the embedding."""
    config = text_config(directory)
    where = _weight_files(directory)

    def read(*endings: str) -> torch.Tensor | None:
        for ending in endings:
            for name, path in where.items():
                if name == ending or name.endswith("." + ending):
                    with safe_open(path, framework="pt") as f:
                        tensor: torch.Tensor = f.get_tensor(name).float()
                        return tensor
        return None

    embed, norm = read("model.embed_tokens.weight"), read("model.norm.weight")
    if embed is None or norm is None:
        raise ConfigError(f"{directory}: no model.embed_tokens or model.norm among the weights")
    head = read("lm_head.weight")
    return TargetHead(embed, norm, embed if head is None else head, float(config.rms_norm_eps))


def _weight_files(directory: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with boundary(ConfigError, str(path)), safe_open(path, framework="pt") as f:
            found.update(dict.fromkeys(f.keys(), path))
    if not found:
        raise ConfigError(f"{directory}: no safetensors weights; convert the model first")
    return found


class Target:
    """A target model and the layers whose outputs are captured. All methods run without
    gradients."""

    def __init__(self, model: nn.Module, aux_layers: Sequence[int] = ()) -> None:
        self.model = model.eval()
        hf = getattr(model, "config").get_text_config()  # noqa: B009  nn.Module types attributes as tensors
        self.num_layers, self.hidden_size = int(hf.num_hidden_layers), int(hf.hidden_size)
        self.vocab_size = int(hf.vocab_size)
        self.aux_layers = check_aux_layers(aux_layers, self.num_layers)
        decoder: Any = model
        while not hasattr(decoder, "layers"):
            inner = getattr(decoder, "model", None) or getattr(decoder, "language_model", None)
            if inner is None:
                raise CaptureError(
                    "the target has no .layers to capture from; name a decoder-only model"
                )
            decoder = inner
        self._decoder = decoder
        self._output: Any = getattr(model, "get_output_embeddings")()  # noqa: B009
        self.names = [f"layer {i}" for i in self.aux_layers] + [
            f"layer {self.num_layers - 1} (last)"
        ]
        # one argument, two names within transformers 5
        named = inspect.signature(decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype

    @classmethod
    def load(
        cls,
        directory: Path,
        aux_layers: Sequence[int] = (),
        dtype: str = "float32",
        device: str = "cpu",
    ) -> "Target":
        hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        with boundary(ConfigError, f"{directory}: the model cannot be loaded"):
            model: Any = AutoModelForCausalLM.from_pretrained(
                directory, dtype=DTYPES[dtype], local_files_only=True
            )
            model = model.to(device)
        return cls(model, aux_layers)

    def head(self) -> TargetHead:
        norm = self._decoder.norm
        eps = getattr(norm, "variance_epsilon", None) or norm.eps
        embed = self._decoder.embed_tokens.weight.detach()
        return TargetHead(embed, norm.weight.detach(), self._output.weight.detach(), float(eps))

    @torch.no_grad()
    def capture(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """[B, T, C, H] for right-padded rows: a real position never attends to what comes after it,
        so padding on the right needs no mask."""
        with self._hooks() as taken:
            self._decoder(input_ids=ids_BT.to(self.device), use_cache=False)
        return torch.stack([taken[i] for i in range(4)], dim=2)

    @torch.no_grad()
    def step(self, ids_BT: torch.Tensor, cache: DynamicCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed T more tokens after what the cache holds: (states [B, T, C, H], logits [B, T,
        V])."""
        with self._hooks() as taken:
            out = self._decoder(input_ids=ids_BT, use_cache=True, **{self._cache_argument: cache})
        logits_BTV = self._output(out.last_hidden_state)
        return torch.stack([taken[i] for i in range(4)], dim=2), logits_BTV

    @torch.no_grad()
    def logits(self, last_NH: torch.Tensor) -> torch.Tensor:
        """[N, V] float32 from the pre-norm last state, by the model's own norm and output
        matrix."""
        logits_NV: torch.Tensor = self._output(self._decoder.norm(last_NH.to(self.dtype))).float()
        return logits_NV

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], max_new_tokens: int, eos: Sequence[int]) -> list[int]:
        """A plain greedy reply, end token included."""
        cache, reply = DynamicCache(), list[int]()
        ids_1T = torch.tensor([list(prompt)], device=self.device)
        while True:
            out = self._decoder(input_ids=ids_1T, use_cache=True, **{self._cache_argument: cache})
            next_1 = self._output(out.last_hidden_state[:, -1]).argmax(-1)
            reply.append(int(next_1[0]))
            if reply[-1] in eos or len(reply) >= max_new_tokens:
                return reply
            ids_1T = next_1[:, None]

    @contextmanager
    def _hooks(self) -> Iterator[dict[int, torch.Tensor]]:
        taken: dict[int, torch.Tensor] = {}

        def keep_output(slot: int) -> Any:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                taken[slot] = output[0] if isinstance(output, tuple) else output

            return hook

        def keep_input(_module: nn.Module, args: Any) -> None:
            taken[3] = args[0]

        handles = [
            self._decoder.layers[layer].register_forward_hook(keep_output(slot))
            for slot, layer in enumerate(self.aux_layers)
        ]
        handles.append(self._decoder.norm.register_forward_pre_hook(keep_input))
        try:
            yield taken
        finally:
            for handle in handles:
                handle.remove()
