"""Positions: which count (cases C60), how batches are planned, how columns move without adding "
"up."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.drafter.columns import columns_of, pick, spread
from core.drafter.data import is_heldout, plan_batches, supervised_KT

CASES = Path(__file__).resolve().parents[4] / "shared" / "cases"


def case(name: str) -> dict:
    path = CASES / name
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    return json.loads(path.read_text(encoding="utf-8"))


def brute_serving(mask: list[bool], steps: int) -> list[list[bool]]:
    """Draft k made at s is usable when x_{s+1} .. x_{s+2+k} all belong to one supervised turn."""
    n = len(mask)
    return [
        [all(i < n and mask[i] for i in range(s + 1, s + 3 + k)) for s in range(n)]
        for k in range(steps)
    ]


def test_case_c60_first_drafted_token_is_trained_and_the_stale_row_is_not():
    c = case("C60.json")
    given_mask = torch.tensor(c["mask"], dtype=torch.bool)
    target = supervised_KT(given_mask, 1, "target")[0]
    assert target.int().tolist() == c["expect"]["shifted_mask"]
    assert [c["ids"][p + 2] for p in target.nonzero().flatten().tolist()] == c["expect"][
        "supervised_labels"
    ]
    # The turn's real mask includes its end token; serving needs the drafted token itself inside the
    # turn.
    whole = torch.arange(len(c["ids"])) >= c["assistant_start"]
    serving = supervised_KT(whole, 1, "serving")[0]
    assert serving.int().tolist() == c["expect"]["shifted_mask"]
    legacy = supervised_KT(given_mask, 1, "legacy")[0]
    assert legacy.nonzero().flatten().tolist() == c["expect"]["wrong_supervised_positions"]


@given(st.lists(st.booleans(), min_size=1, max_size=24), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_masks_equal_their_definitions(mask: list[bool], steps: int):
    mask_T, n = torch.tensor(mask), len(mask)
    assert supervised_KT(mask_T, steps, "serving").tolist() == brute_serving(mask, steps)
    for k, row in enumerate(supervised_KT(mask_T, steps, "target").tolist()):
        assert row == [s + 1 + k < n and mask[s + 1 + k] for s in range(n)]
    for k, row in enumerate(supervised_KT(mask_T, steps, "legacy").tolist()):
        assert row == [s + 1 + k < n and mask[s + k] for s in range(n)]


def test_serving_mask_of_a_prompt_and_reply_spans_p_minus_1_to_the_end_token():
    mask = supervised_KT(torch.arange(10) >= 4, 3, "serving")
    assert mask[0].nonzero().flatten().tolist() == [3, 4, 5, 6, 7]
    assert mask[1].nonzero().flatten().tolist() == [3, 4, 5, 6]
    assert mask[2].nonzero().flatten().tolist() == [3, 4, 5]


def test_two_turns_never_share_a_chain():
    turns = torch.tensor([0, 1, 1, 1, 0, 1, 1], dtype=torch.bool)
    assert supervised_KT(turns, 2, "serving").int().tolist() == [
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 0, 0, 0],
    ]


@given(st.lists(st.integers(1, 300), max_size=40), st.integers(1, 500), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_every_sample_once_and_no_batch_over_budget(lengths: list[int], budget: int, epoch: int):
    batches = plan_batches(lengths, budget, 3, epoch)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= budget
    assert batches == plan_batches(lengths, budget, 3, epoch)


def test_epochs_and_seeds_differ():
    lengths = [20 + i % 13 for i in range(64)]
    plans = {
        str(plan_batches(lengths, 120, seed, epoch))
        for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]
    }
    assert len(plans) == 4


def test_holdout_is_by_hash_and_about_its_share():
    ids = [f"twin{i}" for i in range(4_000)]
    kept_out = [i for i in ids if is_heldout(i, 0.1)]
    assert 330 <= len(kept_out) <= 470
    assert set(kept_out) <= {i for i in ids if is_heldout(i, 0.3)}
    assert not any(is_heldout(i, 0.0) for i in ids)
    assert all(is_heldout(i, 1.0) for i in ids)


def test_pick_and_spread_are_each_others_gradients():
    wanted = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)
    columns = columns_of(wanted)
    assert columns.row_N.tolist() == [0, 0, 1]
    assert columns.pos_N.tolist() == [1, 2, 0]
    assert columns.flat_N.tolist() == [1, 2, 4]
    assert columns.place_N.tolist() == [0, 1, 2]
    assert columns.padded_positions().tolist() == [[1, 2], [0, 0]]
    source = torch.arange(8.0, requires_grad=True)
    picked = pick(source, columns.flat_N)
    assert picked.tolist() == [1.0, 2.0, 4.0]
    padded = spread(picked, columns.place_N, 4)
    assert padded.tolist() == [1.0, 2.0, 4.0, 0.0]
    (padded * torch.tensor([1.0, 10.0, 100.0, 1000.0])).sum().backward()
    assert source.grad is not None
    assert source.grad.tolist() == [0.0, 1.0, 10.0, 0.0, 100.0, 0.0, 0.0, 0.0]


def test_no_column_at_all():
    columns = columns_of(torch.zeros(2, 3, dtype=torch.bool))
    assert columns.width == 0
    assert columns.padded_positions().shape == (2, 0)
