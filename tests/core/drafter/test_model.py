"""The drafter against an independent brute-force serving chain, in float64, and against "
"well-known mistakes."""

import pytest
import torch

from core.drafter.columns import columns_of
from core.drafter.walk import chain_right
from core.target import Target

from .brute import Brute
from .conftest import VOCAB, tiny_drafter

STEPS = 4
MISTAKES = (
    "rope without k",
    "no own column",
    "hidden first",
    "normed residual",
    "no token shift",
    "not its own hidden",
)


@pytest.fixture(scope="module")
def setting(target: Target):
    torch.manual_seed(3)
    drafter = tiny_drafter(target, seed=2).double()
    with torch.no_grad():
        for parameter in drafter.midlayer.parameters():
            parameter.mul_(2)  # strong enough that every term shows in the logits
    ids_BT = torch.randint(VOCAB, (2, 12))
    aux_BTX = target.capture(ids_BT)[:, :, :3].flatten(2)
    columns = columns_of(torch.ones(2, 12, dtype=torch.bool))
    with torch.no_grad():
        hidden = drafter.columns(ids_BT, aux_BTX, columns, STEPS)
        logits = [drafter.logits(h).view(2, 12, -1) for h in hidden]
    return drafter, ids_BT, aux_BTX, logits


def gap(setting, mutate: str = "", b: int = 0, s: int = 6) -> float:
    """Largest logit difference over the chain from s, tokens forced to the text's."""
    drafter, ids_BT, aux_BTX, logits = setting
    brute = Brute(drafter.state_dict(), drafter.c, drafter.embed_VH, mutate)
    _, theirs = brute.chain(ids_BT[b].tolist(), aux_BTX[b], s, STEPS, forced=True)
    return max(float((logits[k][b, s] - theirs[k]).abs().max()) for k in range(STEPS))


def test_every_step_equals_the_brute_force_chain(setting):
    # rotary tables are float32 in transformers, hence not 1e-12
    assert max(gap(setting, b=b, s=s) for b in (0, 1) for s in (0, 1, 4, 7)) < 2e-5


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_would_show(setting, mistake: str):
    assert gap(setting, mistake) > 1e-2


def test_first_step_ignores_what_only_later_steps_use(setting):
    drafter, ids_BT, aux_BTX, logits = setting
    brute = Brute(drafter.state_dict(), drafter.c, drafter.embed_VH, "rope without k")
    _, theirs = brute.chain(ids_BT[0].tolist(), aux_BTX[0], 6, 1, forced=True)
    assert float((logits[0][0, 6] - theirs[0]).abs().max()) < 2e-5


def test_incremental_drafting_equals_brute_force_with_its_own_tokens(setting):
    drafter, ids_BT, aux_BTX, _ = setting
    brute = Brute(drafter.state_dict(), drafter.c, drafter.embed_VH)
    for b in (0, 1):
        ids = ids_BT[b].tolist()
        cache = drafter.empty_cache()
        with torch.no_grad():
            drafter.extend(cache, ids_BT[b, 1:5], aux_BTX[b, :4])
            drafter.propose(cache, drafter.extend(cache, ids_BT[b, 5:6], aux_BTX[b, 4:5]), 3)
            hidden = drafter.extend(cache, ids_BT[b, 6:9], aux_BTX[b, 5:8])
            drafts = drafter.propose(cache, hidden, STEPS)
        assert cache.length == 8
        assert drafts == brute.chain(ids, aux_BTX[b], 7, STEPS)[0]


def test_teacher_forced_joint_correctness_equals_the_serving_chain_on_every_column(target: Target):
    drafter = tiny_drafter(target, seed=5, draft_vocab=90).double()
    torch.manual_seed(1)
    brute, agreed, right_somewhere = None, 0, 0
    for _ in range(3):
        prompt = torch.randint(6, VOCAB, (4,)).tolist()
        # a text that the drafter itself wrote half of: chains of every length occur
        ids = list(prompt)
        while len(ids) < 13:
            aux = target.capture(torch.tensor([[*ids, 0]]))[0, :, :3].flatten(1)
            brute = Brute(drafter.state_dict(), drafter.c, drafter.embed_VH)
            ids.append(int(torch.randint(6, VOCAB, (1,))))
            drafts, _ = brute.chain([*ids, 0], aux, len(ids) - 2, 2)
            ids += drafts[: int(torch.randint(0, 3, (1,)))]
        ids = ids[:13]
        aux_TX = target.capture(torch.tensor([ids]))[0, :, :3].flatten(1)
        right_T = chain_right(drafter, torch.tensor(ids), aux_TX, 4, 3)
        for s in range(3, 11):
            drafts, _ = brute.chain(ids, aux_TX, s, 3)
            text = ids[s + 2 : s + 5]
            n = next((i for i, t in enumerate(text) if drafts[i] != t), len(text))
            assert int(right_T[s]) == n
            agreed += 1
            right_somewhere += n > 0
    assert agreed == 24
    assert right_somewhere >= 3


def test_padding_and_neighbours_change_nothing(setting):
    drafter, ids_BT, aux_BTX, logits = setting
    wanted = torch.zeros(3, 15, dtype=torch.bool)
    wanted[0, 3:9] = True
    wanted[2, 5] = True
    ids = torch.zeros(3, 15, dtype=torch.long)
    aux = torch.full((3, 15, aux_BTX.shape[-1]), 7.0, dtype=torch.float64)
    ids[0, :12], ids[2, :12] = ids_BT[0], ids_BT[1]
    aux[0, :12], aux[2, :12] = aux_BTX[0], aux_BTX[1]
    columns = columns_of(wanted)
    with torch.no_grad():
        hidden = drafter.columns(ids, aux, columns, 3)
    for k in range(3):
        mine = drafter.logits(hidden[k])
        expected = torch.cat([logits[k][0, 3:9], logits[k][1, 5:6]])
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-9)


def test_scaled_rope_is_the_library_s(target: Target):
    rope = {
        "rope_type": "yarn",
        "rope_theta": 50_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
    }
    scaled, plain = tiny_drafter(target, rope=rope).double(), tiny_drafter(target).double()
    ids = torch.randint(6, VOCAB, (1, 10))
    aux = target.capture(ids)[:, :, :3].flatten(2)
    columns = columns_of(torch.ones(1, 10, dtype=torch.bool))
    with torch.no_grad():
        hidden = scaled.columns(ids, aux, columns, 2)[1][7]
        cache = scaled.empty_cache()
        scaled.extend(cache, ids[0, 1:9], aux[0, :8])
        other = plain.columns(ids, aux, columns, 2)[1][7]
    assert float((hidden - other).abs().max()) > 1e-4
    assert cache.length == 8


def test_fresh_takes_head_and_norm_from_the_target_and_is_seeded(target: Target):
    a, b, c = tiny_drafter(target, 1), tiny_drafter(target, 1), tiny_drafter(target, 1)
    head = target.head()
    used = (a.d2t + torch.arange(a.d2t.numel())).tolist()
    torch.testing.assert_close(
        a.lm_head.weight.double(), head.lm_head_VH[used], rtol=1e-6, atol=1e-6
    )
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not c.embed_VH.requires_grad
    assert "embed_VH" not in a.state_dict()
