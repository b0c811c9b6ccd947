"""The walk and real decoding count the same thing (case C69 for the counting); lossless; report "
"of the stage."""

import json

import msgspec
import pytest
import torch

from core import events as ev
from core import extract
from core.drafter import evaluate, train, vocab
from core.drafter.model import Drafter
from core.drafter.walk import (
    Speculator,
    Steps,
    chain_right,
    count,
    leading,
    unique_ngram_ratio,
    walk,
)
from core.errors import Halted, TrainError
from core.schema import AcceptanceCounts, EvalReport
from core.store import RunDir
from core.target import Target

from .brute import Brute
from .conftest import VOCAB, Recorder, tiny_drafter, tiny_llama
from .test_columns_and_masks import case


def test_case_c69_chained_acceptance_not_accuracies():
    c = case("C69.json")
    right_KN = torch.tensor(c["step_correct"], dtype=torch.bool).T
    n = leading(right_KN).tolist()
    assert n == [2, 1, 0, 3]
    counts = count([Steps([100 * i], [k], 100 * i + 50) for i, k in enumerate(n)], 3)
    assert sum(counts.accepted_by_position) / counts.steps == c["expect"]["accepted_mean"]
    assert counts.acceptance_length == c["expect"]["acceptance_length"]
    assert right_KN.float().mean(1).tolist() == c["expect"]["unconditional"]
    assert counts.accepted_by_position == [3, 2, 1]


def test_a_served_figure_far_below_the_walk_is_said():
    assert evaluate.served_warning(2.5, 2.0) is None
    warning = evaluate.served_warning(2.5, 1.9)
    assert warning is not None and "aux layer ids" in warning


def test_walk_and_counting_by_hand():
    # completion positions 3..9; right drafts by start position
    right = [0, 0, 2, 9, 9, 0, 3, 9, 1, 9]
    steps = walk(right, 3, 10)
    assert (steps.start, steps.right, steps.last) == ([2, 5, 6], [2, 0, 3], 9)
    counts = count([steps], 3)
    # from s=2: two right and the bonus; s=5: the bonus; s=6: room for two only, the third lies past
    # the end
    assert counts.tokens == 3 + 1 + 2 == 6
    assert counts.steps == 3
    assert counts.accepted_by_position == [2, 2, 0]
    assert counts.offered_by_position == [3, 3, 2]


@pytest.mark.parametrize("length", [4, 5])
def test_replies_of_one_or_two_tokens(length: int):
    steps = walk([3] * length, 3, length)
    assert len(steps.start) == length - 4
    counts = count([steps], 3)
    assert counts.tokens == length - 4
    assert (
        AcceptanceCounts(
            steps=0, tokens=0, accepted_by_position=[], offered_by_position=[]
        ).acceptance_length
        == 0
    )


def half_right(target: Target, seed: int) -> Drafter:
    """A drafter whose chains are right now and then: it drafts what the target's high layer "
    "already says."""
    drafter = tiny_drafter(target, seed, draft_vocab=VOCAB)
    with torch.no_grad():
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, 2 * drafter.c.hidden_size :] = torch.eye(drafter.c.hidden_size)
        for name, parameter in drafter.midlayer.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(3)
    return drafter


@pytest.mark.parametrize("double", [True, False])
def test_walk_equals_real_decoding_step_for_step(double: bool):
    """Same starts, same accepted drafts, same text as plain greedy decoding, whatever ends a "
    "reply."""
    model = tiny_llama(3)
    target = Target(model.double() if double else model)
    drafter = train_a_little(target)
    torch.manual_seed(5)
    prompts = [torch.randint(6, VOCAB, (2 + i,)).tolist() for i in range(4)]
    plain_long = [target.greedy(p, 24, []) for p in prompts]
    seen, accepted = set(), 0
    for prompt, free in zip(prompts, plain_long, strict=True):
        for limit in (1, 2, 7, 24):
            for stop in ([], [free[9], free[17]]):
                plain = target.greedy(prompt, limit, stop)
                ids, taken = Speculator(target, drafter, 3).decode(prompt, limit, stop)
                assert ids == plain
                text = torch.tensor(prompt + plain)
                aux = target.capture(text[None])[0, :, :3].flatten(1).to(drafter.fc.weight.dtype)
                walked = walk(
                    chain_right(drafter, text, aux, len(prompt), 3).tolist(),
                    len(prompt),
                    text.numel(),
                )
                assert walked == taken
                assert count([walked], 3) == count([taken], 3)
                assert count([walked], 3).tokens == len(plain) - 1
                seen.add(plain[-1] in stop)
                accepted += sum(taken.right)
    assert seen == {True, False}
    assert accepted > 20


def train_a_little(target: Target) -> Drafter:
    """Fit the drafter to the target's greedy text by its own loss until chains get long."""
    from core.drafter.data import Batch, supervised_KT
    from core.drafter.loss import teach, ttt_loss

    drafter = tiny_drafter(target, 1, draft_vocab=VOCAB).to(target.dtype)
    torch.manual_seed(5)
    prompts = [torch.randint(6, VOCAB, (2 + i,)).tolist() for i in range(8)]
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    rows = [torch.tensor(p + target.greedy(p, 30, [])) for p in prompts[::2]]
    batches = []
    for prompt, ids_T in zip(prompts[::2], rows, strict=True):
        states = target.capture(ids_T[None])
        mask = supervised_KT(torch.arange(ids_T.numel()) >= len(prompt), 3, "serving")
        batches.append(
            Batch(
                ids_T[None],
                states[:, :, :3].flatten(2),
                states[:, :, 3],
                torch.full((1, ids_T.numel()), -1),
                mask[:, None],
                torch.tensor([ids_T.numel()]),
            )
        )
    for _ in range(15):
        for batch in batches:
            optimizer.zero_grad()
            ttt_loss(
                drafter, batch, teach(batch, target.head(), drafter), 0.8, "valid"
            ).loss.backward()
            optimizer.step()
    return drafter


def test_decoding_follows_the_brute_force_server(target: Target):
    """An independent loop: brute-force chains, full target forwards, no cache anywhere."""
    drafter = half_right(target, 2).double()
    brute = Brute(drafter.state_dict(), drafter.c, drafter.embed_VH)
    prompt = [8, 30, 12, 55]

    def best(ids: list[int]) -> int:
        return int(target.logits(target.capture(torch.tensor([ids]))[0, -1:, 3])[0].argmax())

    ids = [*prompt, best(prompt)]
    starts, right = [], []
    while len(ids) < len(prompt) + 12:
        s = len(ids) - 2
        aux = target.capture(torch.tensor([ids]))[0, :, :3].flatten(1)
        drafts, _ = brute.chain(ids, aux, s, 3)
        n, room = 0, len(prompt) + 12 - len(ids)
        while n < min(3, room) and drafts[n] == best(ids):
            ids.append(drafts[n])
            n += 1
        if n < room:
            ids.append(best(ids))
        starts.append(s)
        right.append(n)
    reply, taken = Speculator(target, drafter, 3).decode(prompt, 12, [])
    assert prompt + reply == ids
    assert (taken.start, taken.right) == (starts, right)


def test_degenerate_text_shows_in_the_ngram_ratio():
    assert unique_ngram_ratio([[1, 2] * 20]) == pytest.approx(2 / 37)
    assert unique_ngram_ratio([list(range(20))]) == 1.0
    assert unique_ngram_ratio([[1, 2]]) is None


@pytest.fixture
def trained(run_dir: RunDir, make_config):
    config = make_config(
        train={"epochs": 6, "lr": 4e-3}, eval={"holdout": 0.25, "decode_prompts": 6}
    )
    for stage in (vocab, extract, train):
        stage.run(run_dir, config, lambda _: None, lambda: False)
    return run_dir, config


def test_stage_report_walk_equals_decoding_and_is_lossless(trained):
    run, config = trained
    recorder = Recorder()
    summary = evaluate.run(run, config, recorder.emit, recorder.should_stop)
    report = msgspec.json.decode(run.eval.read_bytes(), type=EvalReport)
    assert report.decoded == report.walk
    assert report.lossless_prompts == report.prompts == 6
    assert report.walk_text == "greedy"
    assert report.untrained is not None and report.untrained.tokens == report.walk.tokens
    assert report.walk.acceptance_length > report.untrained.acceptance_length
    for parts in (report.by_dataset, report.by_length):
        assert sum(c.steps for c in parts.values()) == report.walk.steps
        assert sum(c.tokens for c in parts.values()) == report.walk.tokens
    assert set(report.by_dataset) == {"even", "odd"}
    assert report.recorded is not None
    assert sum(c.tokens for c in report.recorded_by_dataset.values()) == report.recorded.tokens
    assert set(report.coverage_by_dataset) == {"even", "odd"}
    (event,) = recorder.of(ev.Evaluated)
    assert event.acceptance_length == summary["acceptance_length"] == report.walk.acceptance_length
    assert event.lossless == "6/6"
    assert json.dumps(summary)
    assert all(v is None or isinstance(v, int | float | str) for v in summary.values())


def test_stage_without_decoding_walks_the_recorded_text(trained, make_config):
    run, config = trained
    only_walk = make_config(
        train={"epochs": 6, "lr": 4e-3}, eval={"holdout": 0.25, "decode_prompts": 0}
    )
    evaluate.run(run, only_walk, lambda _: None, lambda: False)
    report = msgspec.json.decode(run.eval.read_bytes(), type=EvalReport)
    assert report.walk_text == "recorded"
    assert report.decoded is None and report.lossless_prompts is None
    assert report.walk == report.recorded
    assert config.eval.decode_prompts == 6


def test_stage_refusals(run_dir: RunDir, trained, make_config, tmp_path):
    run, config = trained
    with pytest.raises(TrainError, match="run the train stage first"):
        evaluate.run(RunDir(tmp_path / "none"), config, lambda _: None, lambda: False)
    with pytest.raises(TrainError, match=r"undo the change of extract\.aux_layers"):
        evaluate.run(
            run, make_config(extract={"aux_layers": [2, 4, 5]}), lambda _: None, lambda: False
        )
    with pytest.raises(Halted):
        evaluate.run(run, config, lambda _: None, lambda: True)
    with pytest.raises(TrainError, match="no held-out sample"):
        evaluate.run(run, make_config(eval={"holdout": 0.0}), lambda _: None, lambda: False)
    assert not run.eval.exists()


def test_greedy_takes_the_likeliest_token_until_an_end_or_the_limit(target: Target):
    prompt = [7, 8, 9]
    reply = target.greedy(prompt, 10, [])
    assert len(reply) == 10
    for n, token in enumerate(reply):
        seen = torch.tensor([[*prompt, *reply[:n]]])
        assert token == int(target.logits(target.capture(seen)[0, -1:, 3]).argmax())
    assert target.greedy(prompt, 10, [reply[4]]) == reply[: reply.index(reply[4]) + 1]
