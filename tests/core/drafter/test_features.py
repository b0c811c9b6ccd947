"""Shards: exactly once, rows equal ids (case C67), damage found; extraction: cases C62 and C66, "
"self-checks, resume."""

import json

import msgspec
import pytest
import torch
from safetensors import SafetensorError

from core import events as ev
from core import extract
from core.errors import CaptureError, DiskFull, Halted, StoreError
from core.features import (
    FeatureMeta,
    FeatureReader,
    FeatureRow,
    FeatureWriter,
    bytes_per_token,
    check_aux_layers,
    check_finite,
    check_rows,
    check_same_states,
    default_aux_layers,
    disk_boundary,
    refuse_if_too_big,
    to_boundaries,
)
from core.store import RunDir, read_samples, write_samples
from core.target import Target, load_head, target_fingerprint

from .conftest import EOS, HIDDEN, VOCAB, Recorder, sample, tiny_llama
from .test_columns_and_masks import CASES, case

META = FeatureMeta(
    aux_layers=[1, 3, 4],
    aux_boundaries=[2, 4, 5],
    num_layers=8,
    hidden_size=4,
    dtype="float32",
    max_length=64,
    target_sha256="t",
)


def row(name: str, length: int = 5, prompt_len: int = 2) -> FeatureRow:
    generator = torch.Generator().manual_seed(length * 100 + int(name[1:]))
    return FeatureRow(
        sample_id=name,
        twin_id="t" + name,
        dataset="d",
        prompt_len=prompt_len,
        ids_T=torch.arange(length),
        mask_T=torch.arange(length) >= prompt_len,
        states_TCH=torch.randn(length, 4, 4, generator=generator),
        logprob_T=torch.zeros(length),
        top1_T=torch.full((length,), -1),
    )


def shards(directory) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(directory.glob("*.safetensors"))}


def index_ids(directory) -> list[str]:
    return [
        json.loads(line)["sample_id"]
        for line in (directory / "index.jsonl").read_text().splitlines()
    ]


def test_round_trip_is_bitwise_and_checked(tmp_path):
    writer = FeatureWriter(tmp_path, META, shard_bytes=700)
    rows = [row(f"s{i}", length=3 + i) for i in range(6)]
    for r in rows:
        writer.add(r)
    writer.flush()
    reader = FeatureReader(tmp_path)
    assert reader.meta == META
    assert len({ref.shard for ref in reader.refs}) > 1
    for r, ref in zip(rows, reader.refs, strict=True):
        back = reader.load(ref, verify=True)
        assert torch.equal(back.states_TCH, r.states_TCH)
        assert torch.equal(back.mask_T, r.mask_T) and torch.equal(reader.mask(ref), r.mask_T)
        assert (back.sample_id, back.twin_id, back.prompt_len) == (r.sample_id, r.twin_id, 2)
        assert (ref.num_tokens, ref.supervised) == (r.length, r.length - 2)


def test_resume_after_a_kill_anywhere_stores_each_sample_once(tmp_path):
    writer = FeatureWriter(tmp_path, META, shard_bytes=1)
    for i in range(3):
        writer.add(row(f"s{i}"))
    before = shards(tmp_path)
    # killed between rename and index append, in the middle of a line, and while writing a shard
    lines = (tmp_path / "index.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "index.jsonl").write_bytes(lines[0] + lines[1][:30])
    (tmp_path / ".000004.safetensors.tmp").write_bytes(b"half")
    again = FeatureWriter(tmp_path, META, shard_bytes=1)
    assert set(again.done) == {"s0", "s1", "s2"}
    with pytest.raises(StoreError, match="stored already"):
        again.add(row("s1"))
    again.add(row("s3"))
    assert index_ids(tmp_path) == ["s0", "s1", "s2", "s3"]
    after = shards(tmp_path)
    assert {name: after[name] for name in before} == before
    assert sorted(after) == [f"00000{i}.safetensors" for i in (1, 2, 3, 4)]
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_sample_with_other_ids_takes_the_place_of_its_old_states(tmp_path):
    writer = FeatureWriter(tmp_path, META, shard_bytes=1)
    old, new = row("s0", length=5), row("s0", length=7)
    writer.add(old)
    writer.add(row("s1"))
    again = FeatureWriter(tmp_path, META, shard_bytes=1)
    assert again.holds("s0", old.ids_T) and not again.holds("s0", new.ids_T)
    again.add(new)
    assert again.holds("s0", new.ids_T) and not again.holds("s0", old.ids_T)
    lines = (tmp_path / "index.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "index.jsonl").write_bytes(b"".join(lines[:2]))  # killed before the last line
    FeatureWriter(tmp_path, META, shard_bytes=1)
    reader = FeatureReader(tmp_path)
    assert [ref.sample_id for ref in reader.refs] == ["s0", "s1"]
    back = reader.load(reader.refs[0], verify=True)
    assert torch.equal(back.ids_T, new.ids_T) and torch.equal(back.states_TCH, new.states_TCH)


def test_a_torn_line_that_no_writer_has_mended_is_left_out_by_readers(tmp_path):
    writer = FeatureWriter(tmp_path, META, shard_bytes=1)
    writer.add(row("s0"))
    with (tmp_path / "index.jsonl").open("ab") as f:
        f.write(b'{"sample_id":"s1"')
    assert [ref.sample_id for ref in FeatureReader(tmp_path).refs] == ["s0"]


@pytest.mark.parametrize(
    ("fault", "kind", "remedy"),
    [
        (
            SafetensorError("I/O error: No space left on device (os error 28)"),
            DiskFull,
            "free space",
        ),
        (OSError(28, "No space left on device"), DiskFull, "free space"),
        (SafetensorError("I/O error: Permission denied (os error 13)"), StoreError, "mend it"),
    ],
)
def test_tensors_that_cannot_be_written_are_one_line(tmp_path, fault, kind, remedy):
    with pytest.raises(StoreError) as caught, disk_boundary(tmp_path / "step-1"):
        raise fault
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"{tmp_path}/step-1: not written (")
    assert str(caught.value).endswith(f"; {remedy}, then resume")


def test_another_meta_is_refused(tmp_path):
    FeatureWriter(tmp_path, META, 1)
    with pytest.raises(CaptureError, match=r"aux_layers was \[1, 3, 4\] and is now \[2, 4, 5\]"):
        FeatureWriter(tmp_path, msgspec.structs.replace(META, aux_layers=[2, 4, 5]), 1)


def test_changed_bytes_are_found(tmp_path):
    writer = FeatureWriter(tmp_path, META, 1)
    writer.add(row("s0"))
    path = tmp_path / "000001.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 0xFF
    path.write_bytes(bytes(data))
    reader = FeatureReader(tmp_path)
    with pytest.raises(StoreError, match="has changed on disk"):
        reader.load(reader.refs[0], verify=True)
    path.write_bytes(b"junk")
    with pytest.raises(StoreError, match="000001"):
        FeatureReader(tmp_path).load(reader.refs[0])


def test_no_features_says_what_to_run(tmp_path):
    with pytest.raises(StoreError, match="run the extract stage first"):
        FeatureReader(tmp_path)


def test_case_c67_rows_must_equal_ids():
    c = case("C67.json")
    s = c["sample"]
    with pytest.raises(CaptureError, match="25 hidden rows for 57 ids") as caught:
        check_rows("s", s["ids_len"], s["hidden_rows"])
    assert caught.value.kind == c["expect"][0]["class"]
    for pair in c["batch"]:
        with pytest.raises(CaptureError) as caught:
            check_rows("s", pair["ids_len"], pair["hidden_rows"])
        assert caught.value.kind == c["expect"][1]["class"]
    check_rows("s", 57, 57)


def test_a_row_with_missing_states_never_reaches_a_shard(tmp_path):
    writer = FeatureWriter(tmp_path, META, 1)
    short = row("s0")
    with pytest.raises(CaptureError) as caught:
        writer.add(FeatureRow(**{**short.__dict__, "states_TCH": short.states_TCH[2:]}))
    assert caught.value.kind == "hidden_rows_mismatch"
    assert shards(tmp_path) == {}


def test_non_finite_names_layer_and_position():
    states = torch.zeros(6, 4, 3)
    states[4, 2, 1] = float("nan")
    with pytest.raises(CaptureError, match="layer 4 is not finite at position 4"):
        check_finite("s", states, ["layer 1", "layer 3", "layer 4", "layer 7 (last)"])
    check_finite("s", torch.zeros(6, 4, 3), [])


def test_aux_layers_default_and_refusals():
    assert default_aux_layers(61) == [1, 29, 57]
    assert to_boundaries([1, 29, 57]) == [2, 30, 58]
    assert check_aux_layers([], 8) == [1, 3, 4]
    for layers, n in (
        ([], 4),
        ([1, 1, 2], 8),
        ([1, 3, 8], 8),
        ([-1, 3, 4], 8),
        ([4, 3, 1], 8),
        ([1, 2], 8),
    ):
        with pytest.raises(CaptureError, match=r"extract\.aux_layers"):
            check_aux_layers(layers, n)


def test_captured_states_are_the_outputs_of_the_layers_and_the_pre_norm_last(target: Target):
    ids = torch.randint(VOCAB, (2, 9))
    states = target.capture(ids)
    with torch.no_grad():
        out = target.model(ids, output_hidden_states=True)
    for slot, layer in enumerate(target.aux_layers):
        assert torch.equal(states[:, :, slot], out.hidden_states[layer + 1])
    assert not torch.equal(states[:, :, 3], out.hidden_states[-1])
    torch.testing.assert_close(
        target.logits(states[:, :, 3]).double(), out.logits, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        target.head().logits(states[:, :, 3]).double(), out.logits, rtol=1e-5, atol=1e-5
    )


def test_case_c66_states_of_the_next_layers_fail_the_self_test(target: Target):
    c = case("C66.json")
    assert to_boundaries(c["same_as_output_of"]) == c["default_capture_before"]
    assert default_aux_layers(c["num_hidden_layers"]) == c["same_as_output_of"]
    ids = torch.randint(VOCAB, (1, 8))
    stored = target.capture(ids)[0]
    assert check_same_states(stored, Target(tiny_llama().double()).capture(ids)[0], 1e-9) < 1e-9
    shifted = Target(tiny_llama().double(), [layer + 1 for layer in target.aux_layers]).capture(
        ids
    )[0]
    with pytest.raises(CaptureError, match="captured state 0 differs") as caught:
        check_same_states(stored, shifted, 0.05)
    assert caught.value.kind == "states_mismatch"


def test_case_c62_truncation_cuts_ids_and_mask_together():
    path = CASES / "C62.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    expected = json.loads((CASES / "C62.expect.json").read_text())
    for line, want in zip(path.read_text().splitlines(), expected, strict=True):
        c = json.loads(line)
        if want["verdict"] == "accept":
            ids, mask, flags = extract.fit(c["ids"], c["mask"], c["max_length"])
            assert len(ids) == len(mask) == want["len"]
            assert int(mask.sum()) == want["supervised"]
            assert list(flags) == want["flags"]
            assert ids.tolist() == c["ids"][: want["len"]]
        else:
            with pytest.raises(CaptureError) as caught:
                extract.fit(c["ids"], c["mask"], c["max_length"])
            assert caught.value.kind == want["class"]


def test_forecast_refuses_before_the_first_shard(tmp_path):
    assert bytes_per_token(7168, torch.bfloat16) == 57_344 + 13
    with pytest.raises(DiskFull, match="hidden states need"):
        refuse_if_too_big(tmp_path, 1 << 60, 0)
    refuse_if_too_big(tmp_path, 1, 0)


def test_stage_extracts_every_trainable_sample_with_scores(
    run_dir: RunDir, make_config, target_path
):
    config, recorder = make_config(), Recorder()
    summary = extract.run(run_dir, config, recorder.emit, recorder.should_stop)
    samples = {s.sample_id: s for s in read_samples(run_dir)}
    reader = FeatureReader(run_dir.features)
    assert {ref.sample_id for ref in reader.refs} == set(samples)
    assert summary["samples"] == len(samples)
    assert summary["completion_tokens"] == sum(len(s.completion_ids) for s in samples.values())
    assert summary["bytes"] >= summary["forecast_bytes"] > 0
    assert summary["batch_against_single"] < 1e-4
    assert reader.meta.aux_layers == [1, 3, 4] and reader.meta.aux_boundaries == [2, 4, 5]
    assert reader.meta.target_sha256 == target_fingerprint(target_path)
    model, chosen, total = Target.load(target_path), 0, 0
    for ref in reader.refs:
        r, s = reader.load(ref, verify=True), samples[ref.sample_id]
        assert r.ids_T.tolist() == s.token_ids
        assert r.mask_T.tolist() == s.loss_mask
        with torch.no_grad():
            logits = model.model(r.ids_T[None]).logits[0].float()
        expected = torch.log_softmax(logits[:-1], -1).gather(1, r.ids_T[1:, None])[:, 0]
        torch.testing.assert_close(
            r.logprob_T[s.prompt_len :], expected[s.prompt_len - 1 :], atol=1e-3, rtol=1e-3
        )
        assert r.logprob_T[: s.prompt_len].abs().max() == 0
        assert (
            r.top1_T[s.prompt_len - 1 :].tolist() == logits[s.prompt_len - 1 :].argmax(-1).tolist()
        )
        assert r.top1_T[: s.prompt_len - 1].tolist() == [-1] * (s.prompt_len - 1)
        chosen += int((logits[s.prompt_len - 1 : -1].argmax(-1) == r.ids_T[s.prompt_len :]).sum())
        total += len(s.completion_ids)
    assert summary["argmax_match"] == pytest.approx(chosen / total)
    head = load_head(target_path)
    torch.testing.assert_close(head.lm_head_VH, model.head().lm_head_VH)


def test_stage_stops_and_resumes_without_doing_anything_twice(run_dir: RunDir, make_config):
    config = make_config()
    stopping = Recorder(ev.StageProgress, after=2)
    with pytest.raises(Halted, match="resume goes on there"):
        extract.run(run_dir, config, stopping.emit, stopping.should_stop)
    before = shards(run_dir.features)
    done = index_ids(run_dir.features)
    assert 0 < len(done) < 40
    recorder = Recorder()
    summary = extract.run(run_dir, config, recorder.emit, recorder.should_stop)
    assert summary["already_done"] == len(done)
    assert summary["samples"] == 40 - len(done)
    assert {k: v for k, v in shards(run_dir.features).items() if k in before} == before
    assert sorted(index_ids(run_dir.features)) == sorted(s.sample_id for s in read_samples(run_dir))
    third = extract.run(run_dir, config, recorder.emit, recorder.should_stop)
    assert (third["samples"], third["already_done"]) == (0, 40)


def test_a_sample_that_was_asked_again_is_extracted_again(run_dir: RunDir, make_config):
    config, recorder = make_config(), Recorder()
    extract.run(run_dir, config, recorder.emit, recorder.should_stop)
    samples = list(read_samples(run_dir))
    changed = samples[3].token_ids[:-2] + samples[3].token_ids[-1:]
    samples[3] = msgspec.structs.replace(samples[3], token_ids=changed)
    write_samples(run_dir, samples)
    again = extract.run(run_dir, config, recorder.emit, recorder.should_stop)
    assert (again["samples"], again["already_done"]) == (1, 39)
    reader = FeatureReader(run_dir.features)
    stored = {ref.sample_id: reader.load(ref).ids_T.tolist() for ref in reader.refs}
    assert stored == {s.sample_id: s.token_ids for s in samples}


def test_unusable_samples_are_counted_not_hidden(tmp_path, make_config):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    write_samples(
        run,
        [
            sample(0, [7, 8, 9, EOS], 2),
            sample(1, [7] * 80 + [8], 80),
            sample(2, [7, 8, 9], 2, verdict="mismatch"),
            sample(3, [7, 8, 9], 3),
            sample(4, list(range(6, 86)), 30),
        ],
    )
    recorder = Recorder()
    summary = extract.run(run, make_config(), recorder.emit, recorder.should_stop)
    assert summary["samples"] == 2
    assert summary["truncated"] == 1
    assert summary["dropped_why"] == "all_masked 2"
    assert {ref.num_tokens for ref in FeatureReader(run.features).refs} == {4, 64}


def test_ids_of_another_tokenizer_are_refused(tmp_path, make_config):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    write_samples(run, [sample(0, [7, 8, VOCAB + 3], 2)])
    with pytest.raises(CaptureError, match="do not belong together"):
        extract.run(run, make_config(), lambda _: None, lambda: False)


def test_half_precision_overflow_is_said_with_its_layer(target: Target):
    rows = [extract.fit_sample(sample(0, [7, 8, 9, 10], 2), 64)]
    with torch.no_grad():
        loud = Target(tiny_llama().double())
        loud._decoder.layers[3].mlp.down_proj.weight.mul_(1e12)
    (error,) = extract.capture_rows(loud, rows, torch.float16)
    assert isinstance(error, CaptureError)
    assert "layer 3 as torch.float16" in str(error)
    assert loud.hidden_size == HIDDEN


def test_a_damaged_shard_says_how_its_states_come_back(tmp_path):
    writer = FeatureWriter(tmp_path / "run" / "features", META, shard_bytes=1)
    writer.add(row("s0"))
    (shard,) = (tmp_path / "run" / "features").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:100])
    words = rf"{shard.name}: damaged; `eyas stage extract --run {tmp_path / 'run'}` makes all"
    with pytest.raises(StoreError, match=words):
        FeatureWriter(tmp_path / "run" / "features", META, shard_bytes=1)
    reader = FeatureReader(tmp_path / "run" / "features")
    with pytest.raises(StoreError, match=words):
        reader.load(reader.refs[0])
