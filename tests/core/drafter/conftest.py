"""A tiny random target on disk and a run directory with samples drawn from it."""

# B rows, T positions, V target vocabulary

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from core import config as cfg
from core import events as ev
from core.drafter.model import DraftConfig, Drafter
from core.drafter.vocab import from_used
from core.schema import Sample
from core.store import RunDir, write_samples
from core.target import Target

VOCAB, HIDDEN, LAYERS, EOS = 97, 32, 8, 5


def tiny_llama(seed: int = 0, kv_heads: int = 2, layers: int = LAYERS) -> LlamaForCausalLM:
    """Random weights, but a confident output: the argmax leads by far more than rounding."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            vocab_size=VOCAB,
            max_position_embeddings=256,
            bos_token_id=4,
            eos_token_id=EOS,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
        model.lm_head.weight.mul_(5)
    return model.eval()


def tiny_drafter(
    target: Target, seed: int = 0, draft_vocab: int = 60, rope: dict | None = None
) -> Drafter:
    """Untrained, over a random part of the vocabulary; its heads differ from the target's."""
    generator = torch.Generator().manual_seed(seed)
    used = torch.randperm(target.vocab_size, generator=generator)[:draft_vocab].sort().values
    vocab = from_used(used.tolist(), target.vocab_size)
    draft = DraftConfig(
        hidden_size=target.hidden_size,
        intermediate_size=target.hidden_size * 3 // 2,
        num_heads=8 if target.hidden_size == HIDDEN else 4,
        num_kv_heads=4,
        head_dim=6 if target.hidden_size == HIDDEN else 32,
        rms_eps=1e-6,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        max_position_embeddings=256,
        aux_layers=target.aux_layers,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 10_000.0},
        bos_id=4,
        eos_ids=[EOS],
    )
    d2t_D, t2d_V = torch.from_numpy(vocab.d2t_D), torch.from_numpy(vocab.t2d_V)
    return Drafter.fresh(draft, target.head(), d2t_D, t2d_V, seed)


def sample(number: int, ids: list[int], prompt_len: int, **fields: object) -> Sample:
    defaults: dict[str, object] = {
        "sample_id": f"s{number:04d}",
        "prompt_id": f"s{number:04d}",
        "twin_id": f"t{number:04d}",
        "dataset": "even" if number % 2 == 0 else "odd",
        "arm": "local",
        "backend": "sglang",
        "provider": None,
        "token_ids": ids,
        "prompt_len": prompt_len,
        "verdict": "exact",
    }
    return Sample(**{**defaults, **fields})  # type: ignore[arg-type]


def draw_samples(model: LlamaForCausalLM, count: int, seed: int = 0) -> list[Sample]:
    """Prompts of 3 to 9 random tokens, each continued by the target at temperature 0.5."""
    torch.manual_seed(seed)
    out = []
    for number in range(count):
        prompt = torch.randint(6, VOCAB, (3 + number % 7,)).tolist()
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(8 + number % 9):
                logits_V = model(torch.tensor([ids])).logits[0, -1]
                ids.append(int(torch.multinomial(torch.softmax(logits_V / 0.5, -1), 1)))
                if ids[-1] == EOS:
                    break
        out.append(sample(number, ids, len(prompt)))
    return out


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    tiny_llama().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def target() -> Target:
    return Target(tiny_llama().double())


@pytest.fixture(scope="session")
def drawn() -> list[Sample]:
    return draw_samples(tiny_llama(), 40)


@pytest.fixture
def make_config(target_path: Path) -> Callable[..., cfg.Config]:
    def make(**sections: dict[str, object]) -> cfg.Config:
        base: dict[str, dict[str, object]] = {
            "run": {"seed": 7},
            "target": {"kind": "hf", "path": str(target_path), "tokenizer": str(target_path)},
            "extract": {
                "batch_tokens": 200,
                "shard_bytes": 20_000,
                "dtype": "float32",
                "max_length": 64,
            },
            "draft": {"vocab_size": 64},
            "train": {
                "ttt_steps": 3,
                "lr": 2e-3,
                "batch_tokens": 200,
                "epochs": 2,
                "checkpoint_every": 4,
            },
            "eval": {"holdout": 0.2, "max_new_tokens": 24},
        }
        for name, fields in sections.items():
            base.setdefault(name, {}).update(fields)
        return cfg.parse(msgspec.to_builtins(base), "test")

    return make


@pytest.fixture
def run_dir(tmp_path: Path, drawn: list[Sample]) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    write_samples(run, drawn)
    return run


class Recorder:
    """Collects events; asks to stop once `after` events of a kind have come."""

    def __init__(self, kind: type[ev.Event] = ev.Event, after: int = 10**9) -> None:
        self.events: list[ev.Event] = []
        self._kind, self._after = kind, after

    def emit(self, event: ev.Event) -> None:
        self.events.append(event)

    def should_stop(self) -> bool:
        return sum(isinstance(e, self._kind) for e in self.events) >= self._after

    def of(self, kind: type[ev.Event]) -> list[ev.Event]:
        return [e for e in self.events if isinstance(e, kind)]
