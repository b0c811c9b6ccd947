"""Training end to end on a tiny target: resume bit for bit, golden loss curve, guards, stop flag, "
"checkpoints."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from core import events as ev
from core import extract
from core.drafter import checkpoint, train, vocab
from core.drafter.data import masked_now
from core.drafter.vocab import load_vocab
from core.errors import Halted, StoreError, TrainError
from core.events import Train
from core.features import FeatureReader
from core.store import RunDir, read_samples, write_samples
from core.target import load_head

from .conftest import VOCAB, Recorder, sample


@pytest.fixture
def ready(run_dir: RunDir, make_config) -> RunDir:
    config, recorder = make_config(), Recorder()
    vocab.run(run_dir, config, recorder.emit, recorder.should_stop)
    extract.run(run_dir, config, recorder.emit, recorder.should_stop)
    return run_dir


def trainer_of(run: RunDir, config) -> train.Trainer:
    head = load_head(Path(config.target.path))
    return train.Trainer(
        config, FeatureReader(run.features), head, load_vocab(run.vocab), masked_now(run)
    )


SILENT = (lambda _: None, lambda: False)


def files(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir()}


def test_killed_and_resumed_training_ends_with_the_same_bytes(ready: RunDir, make_config, tmp_path):
    config = make_config(train={"checkpoint_every": 3, "epochs": 3})
    straight = trainer_of(ready, config)
    for _ in straight.steps():
        pass
    whole = straight.save(tmp_path / "straight")
    assert straight.total_steps >= 10
    # a kill between checkpoints: steps after the last one are lost and done again
    broken = trainer_of(ready, config)
    for _ in broken.steps():
        if broken.step == 3:
            broken.save(ready.checkpoints)
        if broken.step == 5:
            break
    recorder = Recorder()
    summary = train.run(ready, config, recorder.emit, recorder.should_stop)
    resumed = checkpoint.latest(ready.checkpoints)
    assert resumed is not None and resumed.name == whole.name
    assert files(resumed) == files(whole)
    assert summary["steps"] == straight.total_steps
    assert any("resumes at step 3" in e.message for e in recorder.of(ev.Log))


def test_stop_flag_is_seen_after_one_step_and_leaves_a_checkpoint(
    ready: RunDir, make_config, tmp_path
):
    config = make_config(train={"checkpoint_every": 1_000})
    straight = trainer_of(ready, config)
    for _ in straight.steps():
        pass
    whole = straight.save(tmp_path / "straight")
    stops, seen = iter([False, True]), Recorder()
    with pytest.raises(Halted, match="stopped at step 2 of"):
        train.run(ready, config, seen.emit, lambda: next(stops))
    told = [e for e in seen.events if isinstance(e, Train)][-1]
    assert (told.step, told.checkpoint_step) == (2, 2)
    left = checkpoint.latest(ready.checkpoints)
    assert left is not None and checkpoint.read_state(left).step == 2
    train.run(ready, config, lambda _: None, lambda: False)
    last = checkpoint.latest(ready.checkpoints)
    assert last is not None and files(last) == files(whole)
    assert checkpoint.read_state(last).finished
    again = train.run(ready, config, lambda _: None, lambda: False)
    assert again["steps"] == straight.total_steps
    assert files(last) == files(whole)


def test_golden_loss_curve(ready: RunDir, make_config):
    trainer = trainer_of(ready, make_config(train={"epochs": 4}))
    losses = [float(r.loss.detach()) for r in trainer.steps()]
    golden = json.loads((Path(__file__).parent / "golden_loss.json").read_text())
    assert losses == pytest.approx(golden, rel=1e-3)
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


def test_same_seed_same_curve_and_another_seed_another(ready: RunDir, make_config):
    curves = []
    for seed in (7, 7, 8):
        config = make_config(run={"seed": seed}, train={"epochs": 1})
        curves.append([float(r.loss.detach()) for r in trainer_of(ready, config).steps()])
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]


def test_events_are_sampled_and_the_last_is_never_left_out(ready: RunDir, make_config):
    config, recorder = make_config(train={"epochs": 3}), Recorder()
    summary = train.run(ready, config, recorder.emit, recorder.should_stop)
    events = recorder.of(ev.Train)
    assert events[-1].step == events[-1].total_steps == summary["steps"]
    assert len(events) < summary["steps"]
    assert len(events[-1].accuracy_K) == 3
    assert all(0 <= a <= 1 for a in events[-1].accuracy_K)
    assert events[-1].checkpoint_step == summary["steps"]
    assert all(ev.decode(ev.encode(e)) == e for e in recorder.events)


def test_nan_in_a_feature_stops_before_the_weights_are_touched(ready: RunDir, make_config):
    trainer = trainer_of(ready, make_config())
    before = {k: v.clone() for k, v in trainer.drafter.state_dict().items()}
    build = trainer._build

    def poisoned(indices):
        batch = build(indices)
        batch.aux_BTX[0, 0, 0] = float("nan")
        return batch

    trainer._build = poisoned
    with pytest.raises(TrainError, match="nothing of this step was kept") as caught:
        list(trainer.steps())
    assert caught.value.kind == "not_finite"
    assert trainer.step == 0
    assert all(torch.equal(v, before[k]) for k, v in trainer.drafter.state_dict().items())


def test_a_changed_setting_breaks_the_resume_contract_with_its_name(ready: RunDir, make_config):
    stops = iter([True])
    with pytest.raises(Halted):
        train.run(ready, make_config(), lambda _: None, lambda: next(stops))
    for change, word in (
        ({"train": {"lr": 3e-3}}, r"train\.lr"),
        ({"eval": {"holdout": 0.5}}, "features"),
    ):
        with pytest.raises(TrainError, match=word) as caught:
            train.run(ready, make_config(**change), lambda _: None, lambda: False)
        assert caught.value.kind == "resume_contract"
    # how often to save and how many to keep are no part of the trajectory
    train.run(
        ready,
        make_config(train={"checkpoint_every": 2, "keep_checkpoints": 2}),
        lambda _: None,
        lambda: False,
    )
    assert len(checkpoint.list_checkpoints(ready.checkpoints)) == 2


def test_an_audit_applied_after_extraction_is_obeyed(ready: RunDir, make_config):
    config = make_config(eval={"holdout": 0.0})
    everything = trainer_of(ready, config)
    rows = list(read_samples(ready))
    kept = [
        msgspec.structs.replace(s, dropped="audit")
        if i == 0
        else msgspec.structs.replace(s, masked=list(range(s.prompt_len, len(s.token_ids))))
        if i == 1
        else msgspec.structs.replace(s, masked=[s.prompt_len + 2])
        if i == 2
        else s
        for i, s in enumerate(rows)
    ]
    write_samples(ready, kept)
    now = trainer_of(ready, config)
    names = {x.ref.sample_id for x in now.lessons}
    assert {x.ref.sample_id for x in everything.lessons} - names == {"s0000", "s0001"}
    changed = next(x for x in now.lessons if x.ref.sample_id == "s0002")
    assert not changed.mask_T[rows[2].prompt_len + 2]
    assert int(changed.mask_T.sum()) == len(rows[2].completion_ids) - 1
    assert now.contract["features"] != everything.contract["features"]


def test_an_audit_applied_after_training_trains_anew_and_keeps_the_old(ready: RunDir, make_config):
    config = make_config(eval={"holdout": 0.0})
    train.run(ready, config, lambda _: None, lambda: False)
    first = checkpoint.latest(ready.checkpoints)
    assert first is not None
    before = files(first)
    rows = list(read_samples(ready))
    rows[0] = msgspec.structs.replace(rows[0], dropped="audit")
    write_samples(ready, rows)
    with pytest.raises(TrainError, match=r"train\.lr"):  # settings are another matter
        train.run(ready, make_config(eval={"holdout": 0.0}, train={"lr": 3e-3}), *SILENT)
    recorder = Recorder()
    summary = train.run(ready, config, recorder.emit, recorder.should_stop)
    assert summary["samples"] == len(rows) - 1
    assert any("training anew" in e.message for e in recorder.of(ev.Log))
    newest = checkpoint.latest(ready.checkpoints)
    assert newest is not None and checkpoint.read_state(newest).finished
    assert checkpoint.read_state(newest).contract == trainer_of(ready, config).contract
    assert files(ready.checkpoints / "earlier-1" / first.name) == before


def test_nothing_to_learn_from_is_an_error_not_a_zero_loss(tmp_path, make_config):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    write_samples(run, [sample(0, [7, 8, 9], 2), sample(1, [9, 9, 10], 2)])
    config = make_config(eval={"holdout": 0.0})
    vocab.run(run, config, lambda _: None, lambda: False)
    extract.run(run, config, lambda _: None, lambda: False)
    with pytest.raises(TrainError) as caught:
        train.run(run, config, lambda _: None, lambda: False)
    assert caught.value.kind == "no_supervision"
    with pytest.raises(TrainError) as caught:
        vocab.run(run, make_config(eval={"holdout": 1.0}), lambda _: None, lambda: False)
    assert caught.value.kind == "no_supervision"


def test_held_out_samples_never_train(ready: RunDir, make_config):
    trainer = trainer_of(ready, make_config(eval={"holdout": 0.5}))
    names = {x.ref.twin_id for x in trainer.lessons}
    assert 5 < len(names) < 35
    complement = trainer_of(ready, make_config(eval={"holdout": 0.0}))
    assert names < {x.ref.twin_id for x in complement.lessons}


def test_checkpoints_appear_whole_and_old_ones_go(ready: RunDir, make_config):
    config = make_config(train={"checkpoint_every": 1, "keep_checkpoints": 2})
    half = ready.checkpoints / ".step-00000001.tmp"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    (ready.checkpoints / "step-00000099").mkdir()  # no state.json: not a checkpoint
    train.run(ready, config, lambda _: None, lambda: False)
    names = [p.name for p in checkpoint.list_checkpoints(ready.checkpoints)]
    assert len(names) == 2
    newest = checkpoint.latest(ready.checkpoints)
    assert newest is not None
    state = checkpoint.read_state(newest)
    assert newest.name == f"step-{state.step:08d}"
    assert state.provenance["datasets"] == []
    tensors = load_file(newest / "model.safetensors")
    assert "embed_VH" not in tensors
    assert tensors["lm_head.weight"].shape == (64, 32)
    (newest / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(StoreError, match=r"model\.safetensors"):
        checkpoint.load_drafter(newest, load_head(Path(config.target.path)))


def test_shapes_that_no_engine_takes_are_refused(ready: RunDir, make_config):
    for draft in ({"num_heads": 5}, {"num_heads": 4, "num_kv_heads": 3}):
        with pytest.raises(TrainError, match=r"draft\.num_heads"):
            trainer_of(ready, make_config(draft=draft))
    with pytest.raises(TrainError, match="below the longest sample"):
        trainer_of(ready, make_config(draft={"max_position_embeddings": 8}))


def test_bfloat16_training_moves_and_stays_finite(ready: RunDir, make_config):
    trainer = trainer_of(ready, make_config(train={"dtype": "bfloat16", "epochs": 2}))
    losses = [float(r.loss.detach()) for r in trainer.steps()]
    assert all(torch.isfinite(torch.tensor(losses)))
    assert trainer.drafter.fc.weight.dtype == torch.float32
    assert sum(losses[-3:]) < sum(losses[:3])
    assert trainer.drafter.c.vocab_size == VOCAB
