"""Continuous batching: the sample of a request is its own, whatever shares the batch."""

import threading

import numpy as np
import pytest
import torch

from core.embedded.jobs import Ask, Sampled
from core.embedded.model import Llama, LlamaConfig
from core.embedded.sampler import Batch, Sampler, complete, draw, nucleus, uniforms
from tests.core.embedded.tiny import TINY, tiny_weights


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(LlamaConfig(dict(TINY)), tiny_weights())


def asks(n: int, **kwargs: object) -> list[Ask]:
    return [
        Ask([3 + i, 5, 2 * i + 1] + [9] * (i % 5), seed=i % 3, max_tokens=8 + i % 7, **kwargs)  # type: ignore[arg-type]
        for i in range(n)
    ]


def test_batched_equals_single(model: Llama) -> None:
    together = complete(model, asks(20, temperature=0.8, top_p=0.9), slots=6)
    for ask, sampled in zip(asks(20, temperature=0.8, top_p=0.9), together, strict=True):
        alone = complete(model, [ask])[0]
        assert alone.out == sampled.out
        assert alone.logprobs == pytest.approx(sampled.logprobs, abs=1e-4)
        assert sampled.finish == "length"
        assert len(sampled.out) == ask.max_tokens


def test_seed_and_prompt_fix_the_sample(model: Llama) -> None:
    first, again, other_seed, other_prompt = (
        complete(model, [Ask(ids, seed=seed, max_tokens=24)])[0].out
        for ids, seed in (([4, 5], 7), ([4, 5], 7), ([4, 5], 8), ([4, 6], 7))
    )
    assert first == again
    assert first != other_seed
    assert first != other_prompt


def test_temperature_zero_is_argmax(model: Llama) -> None:
    ids = [4, 5, 6]
    sampled = complete(model, [Ask(list(ids), temperature=0.0, max_tokens=5)])[0]
    for token in sampled.out:
        with torch.inference_mode():
            logits = model.prefill(model.new_cache(1), 0, [ids])[0]
        assert token == int(logits.argmax())
        ids.append(token)


def test_stop_token_ends_and_is_kept(model: Llama) -> None:
    free = complete(model, [Ask([4, 5], seed=1, max_tokens=30)])[0].out
    stop = free[6]
    sampled = complete(model, [Ask([4, 5], seed=1, max_tokens=30, stop_ids=frozenset({stop}))])[0]
    assert sampled.out == free[: free.index(stop) + 1]
    assert sampled.finish == "stop"


def test_context_end_is_length(model: Llama) -> None:
    sampled = complete(model, [Ask([1] * 250, max_tokens=100)])[0]
    assert len(sampled.out) == 6
    assert sampled.finish == "length"
    too_long = complete(model, [Ask([1] * 256, max_tokens=100)])[0]
    assert (too_long.out, too_long.finish) == ([], "length")


def test_noisy_rows_do_not_touch_their_neighbours(model: Llama) -> None:
    clean = complete(model, asks(4))
    mixed = complete(model, asks(4) + asks(4, noisy=True))
    assert [s.out for s in mixed[:4]] == [s.out for s in clean]
    assert [s.out for s in mixed[4:]] != [s.out for s in clean]


def test_cancel_frees_the_slot_for_the_next(model: Llama) -> None:
    batch = Batch(model, slots=1)
    first, second = (Sampled(Ask([4, i], max_tokens=50)) for i in (1, 2))
    batch.add(first)
    batch.add(second)
    for _ in range(5):
        batch.step()
    assert (len(first.out), len(second.out)) == (5, 0)
    first.cancelled = True
    while not batch.idle:
        batch.step()
    assert (first.finish, len(first.out)) == ("abort", 5)
    assert second.out == complete(model, [Ask([4, 2], max_tokens=50)])[0].out


def test_a_waiting_sequence_can_be_cancelled(model: Llama) -> None:
    batch = Batch(model, slots=1)
    sequences = [Sampled(Ask([4, i], max_tokens=4)) for i in range(3)]
    for sampled in sequences:
        batch.add(sampled)
    sequences[1].cancelled = True
    while not batch.idle:
        batch.step()
    assert [(s.finish, len(s.out)) for s in sequences] == [
        ("length", 4),
        ("abort", 0),
        ("length", 4),
    ]


def test_thread_reports_the_same_samples(model: Llama) -> None:
    finished: list[Sampled] = []
    complete_event = threading.Event()

    def notify(moved: list[Sampled]) -> None:
        finished.extend(s for s in moved if s.finish is not None)
        if len(finished) == 10:
            complete_event.set()

    sampler = Sampler(model, notify, slots=4)
    sequences = [Sampled(ask, listening=False) for ask in asks(10)]
    for sampled in sequences:
        sampler.submit(sampled)
    assert complete_event.wait(30)
    sampler.close()
    assert [s.out for s in sequences] == [s.out for s in complete(model, asks(10))]
    assert sampler.load() == (0, 0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failing_forward_ends_every_sequence(model: Llama) -> None:
    ended: list[Sampled] = []
    told = threading.Event()

    def notify(moved: list[Sampled]) -> None:
        ended.extend(moved)
        told.set()

    sampler = Sampler(model, notify, slots=2)
    outside = Sampled(Ask([5, 10_000]))
    sampler.submit(outside)
    assert told.wait(30)
    sampler.close()
    assert [s.finish for s in ended] == ["abort"]
    with pytest.raises(RuntimeError, match="ended"):
        sampler.submit(Sampled(Ask([1])))


def test_uniforms_are_uniform_and_repeatable() -> None:
    keys = np.arange(20_000, dtype=np.uint64)
    draws = uniforms(keys, np.zeros(20_000, dtype=np.uint64))
    assert draws.min() >= 0 and draws.max() < 1
    # Standard error of the mean of 20,000 uniforms is 0.002.
    assert abs(draws.mean() - 0.5) < 0.01
    counts = np.histogram(draws, 10, (0, 1))[0]
    assert abs(counts - 2_000).max() < 200
    assert (draws == uniforms(keys, np.zeros(20_000, dtype=np.uint64))).all()


def test_nucleus_keeps_the_smallest_sufficient_set() -> None:
    probs = torch.tensor([[0.1, 0.5, 0.05, 0.3, 0.05], [0.2, 0.2, 0.2, 0.2, 0.2]])
    kept = nucleus(probs, torch.tensor([0.75, 0.1]))
    assert kept[0].tolist() == pytest.approx([0, 0.5, 0, 0.3, 0])
    assert kept[1].tolist() == pytest.approx([0.2] * 5)


def test_nucleus_wider_than_the_candidates_sorts_everything() -> None:
    probs = torch.full((1, 200), 1 / 200)
    probs[0, :100] *= 1.5
    probs[0, 100:] *= 0.5
    kept = nucleus(probs, torch.tensor([0.7]))
    assert int((kept > 0).sum()) == 100


def test_draw_follows_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.2, 0.25, 0.05])
    points = (torch.arange(1_000, dtype=torch.float64) + 0.5) / 1_000
    logits = probs.log().repeat(1_000, 1)
    tokens = draw(logits, torch.ones(1_000), torch.ones(1_000), points)
    assert torch.bincount(tokens, minlength=4).tolist() == [500, 200, 250, 50]
    mixed = draw(logits[:2], torch.tensor([0.0, 1.0]), torch.ones(2), torch.tensor([0.99, 0.99]))
    assert mixed.tolist() == [0, 3]
