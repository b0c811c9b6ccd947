"""The shipped target: tokenizer files made again to the byte, a small model that answers."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from core.embedded import TARGET_DIR, make_target
from core.embedded.corpus import examples
from core.embedded.grammar import completion_ids, prompt_ids
from core.embedded.make_tokenizer import tokenizer_config, train_ranks
from core.embedded.replies import MARKERS
from core.embedded.score_target import Score, score, table
from core.render.base import load_renderer
from core.render.tokenizer import NAMED_OFFSETS, Tokenizer

MIB_12 = 12 * 1_000_000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TARGET_DIR)


def test_the_script_makes_the_shipped_tokenizer_files_to_the_byte(tmp_path: Path) -> None:
    assert make_target.main(["--out", str(tmp_path), "--tokenizer-only"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "tiktoken.model",
        "tokenizer_config.json",
    ]
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (TARGET_DIR / path.name).read_bytes(), path.name


def test_every_piece_is_encoded_as_itself_and_no_number_is_one(tokenizer: Tokenizer) -> None:
    assert (tokenizer.num_base, tokenizer.vocab_size) == (1_024, 1_280)
    for token_id in range(256):
        assert tokenizer.token_bytes(token_id) == bytes([token_id])
    for token_id in range(256, 1_024):
        piece = tokenizer.token_bytes(token_id)
        assert not any(a in b"0123456789" and b in b"0123456789" for a, b in pairwise(piece))
        try:
            text = piece.decode()
        except UnicodeDecodeError as e:
            # The first bytes of one character, never a tail: `train_ranks` cuts between characters.
            assert (e.start, e.reason) == (0, "unexpected end of data")
            continue
        assert tokenizer.encode_ordinary(text) == [token_id], piece


def test_special_tokens_stand_where_kimi_has_them_with_its_flags() -> None:
    decoder = tokenizer_config(1_024)["added_tokens_decoder"]
    assert isinstance(decoder, dict)
    assert {row["content"]: int(key) - 1_024 for key, row in decoder.items()} == NAMED_OFFSETS
    assert {row["content"] for row in decoder.values() if not row["special"]} == set(MARKERS)
    assert decoder["1026"]["content"] == "<|im_end|>"


def test_merges_are_counted_over_words_and_ties_go_to_the_smaller_bytes() -> None:
    ranks = train_ranks(["abab abab 111 zz", "ab"], size=260)
    learned = sorted((rank, piece) for piece, rank in ranks.items() if rank >= 256)
    # `ab` 5 times; then `abab` stands twice (once after the space), a tie that `ab`+`ab` wins over
    # ` `+`ab` only by its count: 2 against 1.
    assert learned[0] == (256, b"ab")
    assert learned[1] == (257, b"abab")
    assert b"11" not in ranks


def test_the_package_stays_small() -> None:
    sizes = {path.name: path.stat().st_size for path in TARGET_DIR.iterdir()}
    assert set(sizes) == {
        "tiktoken.model",
        "tokenizer_config.json",
        "config.json",
        "model.safetensors",
    }
    assert sum(sizes.values()) < MIB_12


def test_the_model_loads_and_has_distinct_aux_layers(tokenizer: Tokenizer) -> None:
    model = LlamaForCausalLM.from_pretrained(TARGET_DIR, dtype=torch.float32)
    config = model.config
    layers = config.num_hidden_layers
    assert len({1, layers // 2 - 1, layers - 4}) == 3
    assert config.vocab_size == tokenizer.vocab_size
    assert config.eos_token_id == tokenizer.specials["<|im_end|>"]
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert sum(p.numel() for p in model.parameters()) < 5_000_000


def test_it_answers_heldout_prompts() -> None:
    """The issue asks 95 % and 80 % of many; a sample of 63 may miss by what chance allows."""
    everything = score(TARGET_DIR, n=63, temperature=0.6, seed=0)[-1]
    assert everything.n == 63 and everything.should_call == 27
    assert everything.well_formed >= 60
    assert everything.right_calls >= 23
    assert everything.right >= 50


def test_it_knows_a_heldout_completion_better_than_chance() -> None:
    """Mean log-probability of true completions: a table of trained prompts could not have it."""
    renderer = load_renderer(TARGET_DIR, "kimi-k2.5")
    model = LlamaForCausalLM.from_pretrained(TARGET_DIR, dtype=torch.float32)
    nats, count = 0.0, 0
    for example in examples("heldout", 1, limit=20):
        prompt = prompt_ids(example, renderer)
        ids = torch.tensor([prompt + completion_ids(example, renderer.tokenizer)])
        with torch.inference_mode():
            log_probs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        nats -= log_probs.gather(1, ids[0, len(prompt) :, None]).sum().item()
        count += ids.shape[1] - len(prompt)
    assert nats / count < 0.12 < math.log(1_280)


def test_the_learning_rate_rises_stays_and_falls_to_almost_nothing() -> None:
    values = [make_target.learning_rate_factor(step, 1_000) for step in range(1, 1_001)]
    assert values[0] == pytest.approx(1 / make_target.WARMUP_STEPS)
    assert max(values) == 1.0 and values[500] == 1.0
    assert values[-1] == pytest.approx(1 / 400)
    assert values[800] == pytest.approx(0.5, abs=0.01)


def test_the_loss_sees_completions_only() -> None:
    ids, where, following = make_target.padded([([5, 6, 7], 1), ([8, 9, 10, 11], 3)], pad=0)
    assert ids.shape == (2, 32)
    assert ids[:, :5].tolist() == [[5, 6, 7, 0, 0], [8, 9, 10, 11, 0]]
    assert where[:4].tolist() == [0, 1, 34, 0]
    assert following[:4].tolist() == [6, 7, 11, make_target.IGNORED]
    assert where.shape == following.shape == (256,)
    assert set(following[3:].tolist()) == {make_target.IGNORED}


def test_training_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_target, "BATCH_TOKENS", 256)
    monkeypatch.setattr(make_target, "SAVE_EVERY", 1)
    renderer = load_renderer(TARGET_DIR, "kimi-k2.5")
    straight, stopped, state = tmp_path / "straight", tmp_path / "stopped", tmp_path / "state.pt"
    straight.mkdir()
    stopped.mkdir()
    with torch.random.fork_rng():
        make_target.train(renderer, seed=0, steps=3, out=straight)
        make_target.train(renderer, seed=0, steps=2, out=stopped, state=state)
        make_target.train(renderer, seed=0, steps=3, out=stopped, state=state)
    for name in ("config.json", "model.safetensors"):
        assert (straight / name).read_bytes() == (stopped / name).read_bytes(), name
    model = LlamaForCausalLM.from_pretrained(straight, dtype=torch.float32)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    size = (straight / "model.safetensors").stat().st_size
    assert size == pytest.approx(2 * sum(p.numel() for p in model.parameters()), rel=0.01)


def test_the_score_table_names_families_and_hides_what_it_cannot_say() -> None:
    counts = {"n": 4, "well_formed": 4, "right": 3, "canonical": 4}
    rows = [
        Score(family="emoji", should_call=0, right_calls=0, **counts),
        Score(family="weather", should_call=4, right_calls=3, **counts),
    ]
    lines = table(rows).splitlines()
    assert lines[1].split() == ["emoji", "4", "100.0", "%", "75.0", "%", "-", "100.0", "%"]
    assert lines[2].split()[6:9] == ["3/4", "75.0", "%"]
