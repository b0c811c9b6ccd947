"""Loss (case C63), teacher, draft vocabulary (case C64), and the guard of a training step."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from core.drafter.data import Batch, supervised_KT
from core.drafter.guard import Guard, learning_rate
from core.drafter.loss import LossResult, mean_loss, teach, ttt_loss
from core.drafter.vocab import (
    build,
    check_maps,
    count_tokens,
    coverage,
    from_used,
    load_vocab,
    save_vocab,
)
from core.errors import StoreError, TrainError
from core.target import Target

from .brute import Brute
from .conftest import HIDDEN, VOCAB, sample, tiny_drafter
from .test_columns_and_masks import case


def test_case_c63_mean_over_supervised_positions_only():
    c = case("C63.json")
    per_token, mask = torch.tensor(c["per_token_loss"]), torch.tensor(c["mask"], dtype=torch.bool)
    assert float(mean_loss(per_token[mask], mask.numel(), "valid")) == pytest.approx(
        c["expect"]["loss"]
    )
    wrong = c["expect"]["wrong_mean_over_all"]
    assert float(mean_loss(per_token[mask], mask.numel(), "all")) == pytest.approx(wrong)


@pytest.mark.parametrize("normalise", ["valid", "all"])
def test_nothing_supervised_is_zero_and_not_nan(normalise):
    assert float(mean_loss(torch.zeros(0), 8, normalise)) == 0.0
    assert float(mean_loss(torch.zeros(0), 0, normalise)) == 0.0


def make_batch(target: Target, align: str, steps: int, lengths=(11, 9), prompt=4) -> Batch:
    torch.manual_seed(11)
    ids_BT = torch.randint(6, VOCAB, (len(lengths), max(lengths)))
    supervised = torch.zeros(steps, len(lengths), max(lengths), dtype=torch.bool)
    for b, n in enumerate(lengths):
        ids_BT[b, n:] = 0
        supervised[:, b, :n] = supervised_KT(torch.arange(n) >= prompt, steps, align)
    states = target.capture(ids_BT)
    return Batch(
        ids_BT=ids_BT,
        aux_BTX=states[:, :, :3].flatten(2),
        last_BTH=states[:, :, 3],
        top1_BT=torch.full(ids_BT.shape, -1),
        supervised_KBT=supervised,
        length_B=torch.tensor(lengths),
    )


@pytest.mark.parametrize("align", ["serving", "target", "legacy"])
@pytest.mark.parametrize("normalise", ["valid", "all"])
def test_loss_equals_its_definition_written_out(target: Target, align: str, normalise: str):
    """Sum over positions and steps in plain loops, drafter by the brute-force chain."""
    drafter, head, steps = tiny_drafter(target, 4).double(), target.head(), 3
    batch = make_batch(target, align, steps)
    result = ttt_loss(drafter, batch, teach(batch, head, drafter), 0.8, normalise)
    brute, used = Brute(drafter.state_dict(), drafter.c, drafter.embed_VH), None
    used = brute.used
    total, correct, supervised = 0.0, [0] * steps, [0] * steps
    for k in range(steps):
        terms = []
        for b, length in enumerate(batch.length_B.tolist()):
            teacher_logits = head.logits(batch.last_BTH[b])
            for s in range(length):
                if not batch.supervised_KBT[k, b, s]:
                    continue
                supervised[k] += 1
                wanted = int(teacher_logits[s + 1 + k].argmax())
                if wanted not in used:
                    continue
                ids = [*batch.ids_BT[b].tolist(), 0, 0, 0]
                _, logits = brute.chain(ids, batch.aux_BTX[b], s, k + 1, forced=True)
                probs = torch.softmax(teacher_logits[s + 1 + k][used], -1)
                terms.append(float(-(probs * F.log_softmax(logits[k].detach().float(), -1)).sum()))
                correct[k] += used[int(logits[k].argmax())] == wanted
        denominator = len(terms) if normalise == "valid" else batch.ids_BT.numel()
        assert result.loss_K[k] == pytest.approx(sum(terms) / denominator, rel=2e-5)
        assert result.counted_K[k] == len(terms)
        total += 0.8**k * sum(terms) / denominator
    assert float(result.loss.detach()) == pytest.approx(total, rel=2e-5)
    assert result.supervised_K == supervised
    assert result.correct_K == correct
    assert sum(result.counted_K) < sum(supervised)


def test_stored_argmax_gives_the_same_teacher_as_the_whole_vocabulary(target: Target):
    drafter, head = tiny_drafter(target, 4), target.head()
    batch = make_batch(target, "serving", 3)
    stored = dataclasses.replace(batch, top1_BT=head.logits(batch.last_BTH).argmax(-1))
    a, b = teach(batch, head, drafter), teach(stored, head, drafter)
    assert torch.equal(a.best_R, b.best_R)
    torch.testing.assert_close(a.probs_RD, b.probs_RD)
    assert a.probs_RD.shape[0] == int(
        batch.supervised_KBT[:, 0].any(0).sum() + batch.supervised_KBT[:, 1].any(0).sum()
    )


def test_gradient_of_the_first_drafted_token_and_none_at_the_stale_row(target: Target):
    """Case C60's gradients: position P - 1 has one, the position past the last useful draft has "
    "none."""
    drafter, head = tiny_drafter(target, 4, draft_vocab=VOCAB).double(), target.head()
    batch = make_batch(target, "serving", 1, lengths=(9,), prompt=4)
    aux = batch.aux_BTX.clone().requires_grad_()
    batch = dataclasses.replace(batch, aux_BTX=aux)
    ttt_loss(drafter, batch, teach(batch, head, drafter), 0.8, "valid").loss.backward()
    assert aux.grad is not None
    size_T = aux.grad[0].abs().sum(-1)
    assert float(size_T[3]) > 0
    assert float(size_T[6]) > 0
    assert size_T[7:].tolist() == [0.0, 0.0]


def test_a_batch_without_supervision_has_zero_loss_and_no_columns(target: Target):
    drafter, head = tiny_drafter(target, 4), target.head()
    batch = make_batch(target, "serving", 3)
    empty = dataclasses.replace(
        batch, supervised_KBT=torch.zeros_like(batch.supervised_KBT), aux_BTX=batch.aux_BTX.float()
    )
    result = ttt_loss(drafter, empty, teach(empty, head, drafter), 0.8, "valid")
    assert float(result.loss.detach()) == 0.0
    assert result.counted_K == result.supervised_K == [0, 0, 0]


def test_training_gradients_do_not_depend_on_batch_mates(target: Target):
    drafter, head = tiny_drafter(target, 4).double(), target.head()
    both = make_batch(target, "serving", 3)
    grads = []
    for rows in ([0, 1], [0], [1]):
        part = Batch(
            both.ids_BT[rows],
            both.aux_BTX[rows],
            both.last_BTH[rows],
            both.top1_BT[rows],
            both.supervised_KBT[:, rows],
            both.length_B[rows],
        )
        drafter.zero_grad()
        result = ttt_loss(drafter, part, teach(part, head, drafter), 0.8, "all")
        (result.loss * part.ids_BT.numel()).backward()
        assert drafter.fc.weight.grad is not None
        grads.append(drafter.fc.weight.grad.clone())
    torch.testing.assert_close(grads[0], grads[1] + grads[2], rtol=1e-5, atol=1e-9)


def test_case_c64_d2t_holds_offsets():
    c = case("C64.json")
    vocab = from_used(c["used_tokens_sorted"], c["target_vocab"])
    assert vocab.d2t_D.tolist() == c["expect"]["d2t"]
    assert np.flatnonzero(vocab.t2d_V).tolist() == c["expect"]["t2d_true"]
    assert vocab.used_D.tolist() == c["expect"]["targets"]
    assert build({}, 4, 0).d2t_D.tolist() == c["expect"]["identity_d2t"]
    assert check_maps(vocab.d2t_D, vocab.t2d_V) == []
    ids_as_offsets = vocab.used_D
    assert any("outside" in p or "ascend" in p for p in check_maps(ids_as_offsets, vocab.t2d_V))
    assert check_maps(np.arange(4), vocab.t2d_V)[0].startswith("t2d")


@given(st.dictionaries(st.integers(0, 30), st.integers(1, 9)), st.integers(0, 40))
@settings(max_examples=80, deadline=None)
def test_vocabulary_invariants(counts: dict[int, int], size: int):
    vocab = build(counts, 31, size)
    expected = 31 if size == 0 or size >= 31 else size
    assert len(vocab.d2t_D) == vocab.t2d_V.sum() == expected
    assert check_maps(vocab.d2t_D, vocab.t2d_V) == []
    kept = set(vocab.used_D.tolist())
    dropped = [counts[t] for t in counts if t not in kept]
    assert not dropped or max(dropped) <= min(counts[t] for t in counts if t in kept)


def test_most_frequent_then_lowest_unused():
    assert build({9: 5, 3: 1, 7: 5}, 12, 2).used_D.tolist() == [7, 9]
    assert build({9: 5}, 12, 4).used_D.tolist() == [0, 1, 2, 9]


def test_only_supervised_tokens_of_training_samples_count():
    rows = [
        sample(0, [1, 2, 3, 3], 2),
        sample(1, [1, 2, 4, 5, 6], 2, masked=[3]),
        sample(2, [1, 8, 9], 1, twin_id="t0000"),
    ]
    train, heldout = count_tokens(rows, 0.0, 4, 12)
    assert {k: dict(v) for k, v in train.items()} == {"even": {3: 2, 8: 1, 9: 1}, "odd": {4: 1}}
    assert heldout == {}
    _, everything = count_tokens(rows, 1.0, 4, 12)
    assert set(everything) == {"even", "odd"}
    assert coverage(from_used([3, 4], 12), train) == {"even": 0.5, "odd": 1.0}
    with pytest.raises(TrainError, match="outside the target's vocabulary"):
        count_tokens(rows, 0.0, 9, 6)


def test_vocabulary_file_round_trip_and_damage(tmp_path):
    path = tmp_path / "vocab.safetensors"
    with pytest.raises(StoreError, match="run the vocab stage first"):
        load_vocab(path)
    vocab = from_used([2, 5, 7], 12)
    save_vocab(vocab, path)
    again = load_vocab(path)
    assert again.d2t_D.tolist() == [2, 4, 5]
    assert again.sha256 == vocab.sha256
    save_vocab(dataclasses.replace(vocab, d2t_D=vocab.used_D), path)
    with pytest.raises(StoreError, match="offsets"):
        load_vocab(path)


def result(loss: float, counted: int) -> LossResult:
    return LossResult(torch.tensor(loss), [loss], [counted], [counted], [0])


@pytest.mark.parametrize(
    ("loss", "norm"),
    [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, float("nan")), (1.0, float("inf"))],
)
def test_guard_stops_at_the_first_nan_or_infinity(loss: float, norm: float):
    with pytest.raises(TrainError, match="step 12") as caught:
        Guard().check(12, result(loss, 5), norm, "step 8")
    assert caught.value.kind == "not_finite"
    assert "step 8" in str(caught.value)


def test_guard_stops_a_dead_signal_and_forgives_a_short_one():
    guard = Guard(dead_after=3)
    for step, counted in enumerate([0, 0, 4, 0, 0]):
        guard.check(step, result(1.0 if counted else 0.0, counted), 1.0, "")
    with pytest.raises(TrainError) as caught:
        guard.check(5, result(0.0, 0), 0.0, "")
    assert caught.value.kind == "dead_loss"
    guard = Guard(dead_after=2)
    guard.check(0, result(0.0, 4), 0.0, "")
    with pytest.raises(TrainError, match="exactly zero"):
        guard.check(1, result(0.0, 4), 0.0, "")


def test_learning_rate_is_a_function_of_the_step():
    rates = [learning_rate(s, 100, 1e-3, 0.1, "cosine") for s in range(100)]
    assert rates[0] == pytest.approx(1e-4)
    assert rates[9] == rates[10] == pytest.approx(1e-3)
    assert rates[55] == pytest.approx(0.5e-3)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[99] < 1e-6
    assert learning_rate(99, 100, 1e-3, 0.1, "constant") == 1e-3
    assert HIDDEN == 32
