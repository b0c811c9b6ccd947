"""The sampling forward equals transformers' Llama, alone and in any batch."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig as ReferenceConfig
from transformers import LlamaForCausalLM

from core.embedded.model import Llama, LlamaConfig, _by_length
from core.errors import UsageError
from tests.core.embedded.tiny import TINY, tiny_weights, write_tiny

PROMPTS = [[5, 9, 200, 3], [7, 7, 7, 7, 7, 7, 7, 250, 11], [1, 319]]


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    model = LlamaForCausalLM(ReferenceConfig(**TINY))
    model.load_state_dict(tiny_weights())
    return model.eval()


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(LlamaConfig(dict(TINY)), tiny_weights())


@torch.inference_mode()
def test_prefill_and_decode_equal_transformers(model: Llama, reference: LlamaForCausalLM) -> None:
    cache = model.new_cache(4)
    logits = model.prefill(cache, 0, PROMPTS)
    rows = [list(p) for p in PROMPTS]
    for step in range(6):
        for b, row in enumerate(rows):
            expected = reference(torch.tensor([row])).logits[0, -1]
            assert torch.allclose(logits[b], expected, atol=1e-4), (step, b)
        following = torch.tensor([(31 * step + 7 * b) % 320 for b in range(len(rows))])
        lengths = torch.tensor([len(row) for row in rows])
        logits = model.decode(cache, following, lengths)
        for row, token in zip(rows, following.tolist(), strict=True):
            row.append(token)


@torch.inference_mode()
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]])
def test_a_long_sequence_among_short_ones(
    model: Llama, reference: LlamaForCausalLM, order: list[int]
) -> None:
    mixed = [[5, 9], [8] * 200, [1, 319, 4], [77]]
    prompts = [mixed[i] for i in order]
    cache = model.new_cache(4)
    model.prefill(cache, 0, prompts)
    lengths = torch.tensor([len(p) for p in prompts])
    logits = model.decode(cache, torch.tensor([3, 4, 5, 6]), lengths)
    for row, prompt, token in zip(logits, prompts, [3, 4, 5, 6], strict=True):
        expected = reference(torch.tensor([[*prompt, token]])).logits[0, -1]
        assert torch.allclose(row, expected, atol=1e-4)


def test_runs_of_slots() -> None:
    assert _by_length([5]) == [slice(0, 1)]
    assert _by_length([90, 100, 95]) == [slice(0, 3)]
    assert _by_length([400, 50, 60, 55]) == [slice(0, 1), slice(1, 4)]
    assert _by_length([50, 60, 400, 390]) == [slice(0, 2), slice(2, 4)]


@torch.inference_mode()
def test_a_moved_slot_goes_on_as_before(model: Llama) -> None:
    cache = model.new_cache(4)
    model.prefill(cache, 0, PROMPTS)
    expected = model.decode(cache, torch.tensor([0, 0, 42]), torch.tensor([4, 9, 2]))[2]
    cache.move(2, 0, 2)
    moved = model.decode(cache, torch.tensor([42]), torch.tensor([2]))[0]
    assert torch.allclose(moved, expected, atol=1e-5)


def test_load_reads_half_precision_and_tied_heads(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weights = {k: v.bfloat16() for k, v in tiny_weights().items() if k != "lm_head.weight"}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    model = Llama.load(tmp_path)
    assert model.head is model.embed
    assert model.embed.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_scaling": {"factor": 2}}, "rotary"),
        ({"attention_bias": True}, "biases"),
        ({"hidden_size": None}, None),
    ],
)
def test_an_unservable_config_is_refused(change: dict[str, object], says: str | None) -> None:
    data = {**TINY, **change}
    if says is None:
        del data["hidden_size"]
        says = "no hidden_size"
    with pytest.raises(UsageError, match=says):
        LlamaConfig(data)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    write_tiny(tmp_path)
    weights = tiny_weights()
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        Llama.load(tmp_path)


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no readable model"):
        Llama.load(tmp_path)
