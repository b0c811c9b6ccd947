"""The parts of the pipeline that need no process: markers, rebuild, heartbeat, last page, starts,
doctor."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core import events as ev
from core import view as vw
from core.config import Config, load, parse
from core.errors import Halted, StoreError, UsageError
from core.pipeline import doctor, rebuild
from core.pipeline import launch as lc
from core.pipeline.gateway import KEY_ENV, _with_addresses, needs_gateway
from core.pipeline.heartbeat import status_of
from core.pipeline.setting import DEMO_CONFIG, read_prompts, write_prompts
from core.pipeline.stages import BY_NAME, ORDER, Markers, clear_outputs, selected, stage_named
from core.pipeline.summary import summarise, summary_lines
from core.schema import AcceptanceCounts, EvalReport, Prompt, Rollout, SpendLine, Usage
from core.store import RunDir, create_run, encode_line, read_samples, write_atomic


def config(**sections: Any) -> Config:
    raw = {
        "run": {"min_free_disk_bytes": 1},
        "dataset": [{"name": "d", "kind": "embedded", "families": ["greeting"], "limit": 4}],
        **sections,
    }
    return parse(raw, "test")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return create_run(config(), tmp_path, "alpha")


def reply(prompt: Prompt, text: str, **fields: Any) -> Rollout:
    body = {
        "id": f"gen-{prompt.prompt_id}",
        "model": "eyas/embedded",
        "provider": "Alder",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, "reasoning": " hm"},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 9, "completion_tokens": 9, "cost": 0.001},
    }
    return Rollout(
        **{
            "prompt_id": prompt.prompt_id,
            "twin_id": prompt.twin_id,
            "dataset": prompt.dataset,
            "arm": prompt.arm,
            "attempt": 1,
            "outcome": "ok",
            "backend": "openrouter",
            "provider": "Alder",
            "status": 200,
            "reply_kind": "json",
            "reply_raw": json.dumps(body),
            "usage": Usage(prompt_tokens=9, completion_tokens=9, cost_usd=0.001),
            **fields,
        }
    )


def never() -> bool:
    return False


def rebuilt(run: RunDir) -> dict[str, Any]:
    return rebuild.run(run, run.load_config(), lambda event: None, never)


# ---- stages


def test_the_order_of_the_stages() -> None:
    assert tuple(s.name for s in ORDER) == ev.STAGES
    for i, stage in enumerate(ORDER):
        assert all(ORDER.index(BY_NAME[need]) < i for need in stage.needs)
    chosen = selected(config(run={"stages": ["export", "generate"]}))
    assert [s.name for s in chosen] == ["generate", "export"]
    with pytest.raises(UsageError, match="stage 'trian': not known"):
        stage_named("trian")


def test_a_stage_is_skipped_exactly_when_nothing_changed(run: RunDir) -> None:
    stage = BY_NAME["vocab"]
    run.samples.joinpath("000000.parquet").write_bytes(b"samples")
    run.vocab.write_bytes(b"vocabulary")

    def markers(settings: Config | None = None) -> Markers:
        return Markers(run, settings or config())

    assert markers().finished(stage) is None
    markers().finish(stage, 1.0, 2.0, {"size": 3})
    found = markers().finished(stage)
    assert found is not None and (found.seconds, found.summary) == (2.0, {"size": 3})
    assert markers(config(export={"engines": ["hf"]})).finished(stage) is not None
    assert markers(config(draft={"vocab_size": 7})).finished(stage) is None
    run.samples.joinpath("000000.parquet").write_bytes(b"samplez")
    assert markers().finished(stage) is None
    run.samples.joinpath("000000.parquet").write_bytes(b"samples")
    assert markers().finished(stage) is not None
    run.vocab.unlink()
    assert markers().finished(stage) is None
    run.stages.write_bytes(b"{half")
    assert markers().finished(stage) is None


@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_what_an_audit_did_to_the_samples_is_trained_and_evaluated_anew(
    run: RunDir, name: str
) -> None:
    """Marks change neither states nor vocabulary, but what is left to train on and held out."""
    run.samples.joinpath("000000.parquet").write_bytes(b"samples")
    Markers(run, config()).finish(BY_NAME[name], 1.0, 2.0, {})
    assert Markers(run, config()).finished(BY_NAME[name]) is not None
    run.samples.joinpath("000000.parquet").write_bytes(b"marked!")
    assert Markers(run, config()).finished(BY_NAME[name]) is None


def test_doing_a_stage_again_never_removes_what_was_paid_for(run: RunDir) -> None:
    run.completions.write_bytes(b"{}\n")
    run.eval.write_bytes(b"{}")
    (run.checkpoints / "step-1").mkdir(parents=True)
    (run.checkpoints / "step-1" / "model.safetensors").write_bytes(b"x")
    for name in ("generate", "train", "evaluate"):
        clear_outputs(run, BY_NAME[name])
    assert run.completions.exists() and not run.eval.exists()
    assert not (run.checkpoints / "step-1" / "model.safetensors").exists()


# ---- reconstruct


def test_rebuild_takes_one_final_reply_a_prompt_in_the_order_of_the_prompts(run: RunDir) -> None:
    prompts = write_prompts(run, config())
    assert read_prompts(run) == prompts and len(prompts) == 4
    a, b, c, d = prompts
    lines = [
        reply(c, "third"),
        reply(a, "cut", outcome="aborted", final=False),
        reply(
            b, "", outcome="failed", error_class="server_error", reply_kind="none", reply_raw=None
        ),
        reply(a, "first"),
        reply(a, "second life of the first"),
        reply(d, "", outcome="rejected", error_class="body_not_json", reply_raw="<html>"),
    ]
    data = [encode_line(line) for line in lines]
    run.completions.write_bytes(b"".join(data[:3]) + b'{"torn\n' + b"".join(data[3:]) + b'{"tail')
    warned: list[str] = []

    def emit(event: ev.Event) -> None:
        if isinstance(event, ev.Log):
            warned.append(event.message)

    summary = rebuild.run(run, config(), emit, never)
    samples = list(read_samples(run))
    assert [s.prompt_id for s in samples] == [a.prompt_id, c.prompt_id, d.prompt_id]
    assert summary["samples"] == 3 and summary["without_reply"] == {"failed": 1}
    assert sum(summary["verdicts"].values()) == 3 and samples[2].verdict == "rejected"
    assert warned == [f"corrupt_line at byte {sum(map(len, data[:3]))}"]


@pytest.mark.parametrize("damage", ["cut", "middle"])
def test_prompts_that_cannot_be_read_are_not_left_out_in_silence(run: RunDir, damage: str) -> None:
    write_prompts(run, config())
    data = run.prompts.read_bytes()
    half = len(data) // 2
    run.prompts.write_bytes(data[:half] + (b"" if damage == "cut" else b"\xff" + data[half + 1 :]))
    with pytest.raises(StoreError, match=r"prompts.jsonl: 1 prompts cannot be read; delete it"):
        read_prompts(run)
    run.prompts.unlink()
    assert read_prompts(run) == []


def test_rebuild_is_the_same_on_one_core_and_on_all(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(
        dataset=[{"name": "d", "kind": "embedded", "families": ["arithmetic"], "limit": 24}]
    )
    prompts = write_prompts(run, settings)
    lines = [encode_line(reply(p, f"answer {i}")) for i, p in enumerate(prompts)]
    run.completions.write_bytes(b"".join(lines))
    rebuilt(run)
    first = {p.name: p.read_bytes() for p in run.samples.iterdir()}
    monkeypatch.setattr(rebuild, "PARALLEL_FROM", 1)
    monkeypatch.setattr(rebuild, "CHUNK", 5)
    monkeypatch.setattr(rebuild, "_cores", lambda: 2)
    rebuilt(run)
    assert {p.name: p.read_bytes() for p in run.samples.iterdir()} == first
    assert len(list(read_samples(run))) == 24


def test_rebuild_stops_when_asked(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = write_prompts(run, config())
    run.completions.write_bytes(b"".join(encode_line(reply(p, "x")) for p in prompts))
    monkeypatch.setattr(rebuild, "CHUNK", 2)
    with pytest.raises(Halted):
        rebuild.run(run, config(), lambda event: None, lambda: True)
    assert list(run.samples.glob("*.parquet")) == []


# ---- heartbeat and last page


def test_status_is_read_off_the_view() -> None:
    view = vw.RunView()
    events: list[ev.Event] = [
        ev.RunStarted(run_id="r", prompts=9, budget_usd=2.0),
        ev.StateChanged(state="running"),
        ev.StageStarted(stage="generate"),
        ev.StageFinished(stage="generate"),
        ev.StageStarted(stage="train", total=10),
        ev.StageProgress(stage="train", done=4),
        ev.Stats(done=8, ok=7, rejected=1, in_flight=3, spent_usd=0.5, budget_usd=2.0),
        ev.Evaluated(checkpoint="c", draft_tokens=3, acceptance_length=2.25),
    ]
    for seq, event in enumerate(events, 1):
        vw.fold(view, msgspec.structs.replace(event, seq=seq))
    status = status_of("r", view, 5.0, consoles=2, exit_code=None)
    assert (status.state, status.stage, status.stage_done, status.stage_total) == (
        "running", "train", 4, 10,
    )  # fmt: skip
    assert (status.prompts, status.done, status.ok, status.in_flight) == (9, 8, 7, 3)
    assert (status.spent_usd, status.budget_usd, status.acceptance_length) == (0.5, 2.0, 2.25)
    assert (status.seq, status.consoles, status.exit_code) == (8, 2, None)
    assert status_of("r", view, 5.0, 0, exit_code=3).in_flight == 0


def test_the_last_page_counts_what_is_in_the_files(run: RunDir) -> None:
    prompts = write_prompts(run, config())
    lines = [reply(p, f"answer {i}") for i, p in enumerate(prompts[:3])]
    run.completions.write_bytes(b"".join(map(encode_line, lines)))
    spend = [
        SpendLine(ts=0, kind=kind, prompt_id=f"p{i}", attempt=1, backend="b", cost_usd=usd)
        for i, (closing, cost) in enumerate([("billed", 0.25), ("uncertain", 0.5), ("free", 0.0)])
        for kind, usd in (("dispatch", 0.0), (closing, cost))
    ]
    run.spend.write_bytes(b"".join(map(encode_line, spend)))
    rebuilt(run)
    report = EvalReport(
        checkpoint="step-1",
        draft_tokens=3,
        prompts=2,
        walk=AcceptanceCounts(
            steps=4, tokens=10, accepted_by_position=[3, 2, 1], offered_by_position=[4, 4, 4]
        ),
        lossless_prompts=2,
    )
    write_atomic(run.eval, msgspec.json.encode(report))
    summary = summarise(run, config(), {})
    data = summary.data
    assert (data["samples"], data["spent_usd"], data["uncertain_usd"]) == (3, 0.75, 0.5)
    assert data["outcomes"] == {"ok": 3} and data["finished_prompts"] == 3
    assert data["drafter"]["acceptance_length"] == 2.5 and data["drafter"]["untrained"] is None
    text = "\n".join(summary.lines)
    assert "2.50 tokens per target forward with 3 draft tokens" in text
    assert "2 of 2 outputs equal plain greedy" in text
    assert "$0.7500 of $10.00" in text and "$0.5000 of it uncertain" in text
    assert summary.lines == summary_lines(data)
    lost = summary_lines({**data, "classes": {"empty_answer": 2, "count_mismatch": 1}})
    assert "not kept  2 empty_answer · 1 count_mismatch" in lost
    json.dumps(data)


def test_the_last_page_of_a_run_that_made_nothing(run: RunDir) -> None:
    summary = summarise(run, config(), {})
    assert "samples" not in summary.data
    assert summary.lines == [
        "asked     prompts: none; no samples yet",
        "cost      $0.0000 of $10.00",
    ]


# ---- starting


def test_a_new_start_keeps_relative_paths_working(tmp_path: Path) -> None:
    base = tmp_path / "project"
    base.mkdir()
    settings = config(dataset=[{"name": "d", "path": "data.jsonl"}])
    start = lc.prepare_new(settings, base, ["eyas", "run"])
    stored = start.run.load_config()
    assert stored.dataset[0].path == str(base / "data.jsonl")
    assert start.run.path.parent == base / "runs" and start.new


def test_resume_takes_the_halt_file_away_and_applies_overrides(run: RunDir) -> None:
    run.halt_file.write_text("x")
    name = str(run.path)
    assert lc.prepare_resume(name, []).fresh_prompts is False
    assert not run.halt_file.exists()
    start = lc.prepare_resume(name, [], overrides=["run.budget_usd=42.0", "run.name=other"])
    stored = run.load_config()
    assert start.fresh_prompts and stored.run.budget_usd == 42.0
    assert stored.run.name == "" and stored.dataset == config().dataset
    with pytest.raises(UsageError, match="not known"):
        lc.prepare_stage("nonsense", name, [])
    run.halt_file.write_text("x")
    with pytest.raises(UsageError, match="alpha: nothing for train to read, reconstruct has left"):
        lc.prepare_stage("train", name, [])
    assert run.halt_file.exists() and lc.prepare_stage("generate", name, []).only == "generate"


def test_an_engine_that_dies_at_once_is_reported_with_its_last_words(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lc, "python_command", lambda *a: ["sh", "-c", "echo bad interpreter >&2"])
    with pytest.raises(lc.LaunchError, match="the engine did not start: bad interpreter"):
        lc.launch(lc.Start(run, []))
    assert run.path.exists()  # it was there before this start
    with pytest.raises(lc.LaunchError):
        lc.launch(lc.Start(run, [], new=True))
    assert not run.path.exists()


def test_the_gateway_fills_only_what_was_left_empty() -> None:
    ready = {"base_url_openrouter": "http://o", "base_url_sglang": "http://s"}
    demo = load(DEMO_CONFIG)
    assert needs_gateway(demo)
    filled = _with_addresses(demo, ready).generate
    assert (filled.openrouter.base_url, filled.openrouter.api_key_env) == ("http://o", KEY_ENV)
    assert filled.sglang.urls == ["http://s"]
    outside = parse(
        {
            "dataset": [{"name": "d", "kind": "embedded"}],
            "generate": {"openrouter": {"base_url": "http://mine"}},
        },
        "test",
    )
    assert not needs_gateway(outside)
    assert _with_addresses(outside, ready).generate.openrouter == outside.generate.openrouter
    real = parse({"target": {"kind": "hf", "path": "p", "tokenizer": "t"}}, "test")
    assert not needs_gateway(real)


# ---- doctor


def test_doctor_finds_what_is_wrong_and_what_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = {c.what: c for c in doctor.examine(load(DEMO_CONFIG), tmp_path)}
    assert {c.level for c in checks.values()} == {"ok"}
    assert "special ids as expected" in checks["tokenizer"].detail
    assert checks["prompts"].detail.endswith("from 3 datasets")
    assert "one reply costs at most $" in checks["openrouter"].detail  # asked of the gateway
    long = load(DEMO_CONFIG, ["generate.max_tokens=2048"])
    found = {c.what: c for c in doctor.examine(long, tmp_path)}
    assert found["openrouter"].level == "fail"
    assert "alder: max_tokens 2048 above its 1024" in found["openrouter"].detail
    assert "; lower generate.max_tokens or loosen" in found["openrouter"].detail
    bad = config(
        target={"kind": "hf", "path": "nothing", "tokenizer": "nothing"},
        dataset=[{"name": "d", "path": "missing.jsonl"}],
        generate={"openrouter": {"api_key_env": "EYAS_TEST_NO_KEY"}},
    )
    monkeypatch.delenv("EYAS_TEST_NO_KEY", raising=False)
    found = {c.what: c for c in doctor.examine(bad, tmp_path)}
    assert found["tokenizer"].level == "fail" and found["prompts"].level == "fail"
    assert found["openrouter"].level == "fail" and "EYAS_TEST_NO_KEY" in found["openrouter"].detail


def test_doctor_names_the_schema_that_is_declared_as_json(tmp_path: Path) -> None:
    def row(schema: dict[str, Any]) -> str:
        parameters = {"type": "object", "properties": {"x": schema}}
        function = {"name": "look", "parameters": parameters}
        tools = [{"type": "function", "function": function}]
        asked = [{"role": "user", "content": json.dumps(schema)}]
        return json.dumps({"messages": asked, "tools": tools}) + "\n"

    rows = [row({"type": "string"}), row({"description": "any"}), row({"$ref": "#/definitions/X"})]
    path = tmp_path / "d.jsonl"

    def told(lines: list[str], variant: str = "kimi-k2.5") -> doctor.Check | None:
        path.write_text("".join(lines))
        dataset = [{"name": "d", "path": str(path)}]
        found = doctor.examine(config(dataset=dataset, target={"variant": variant}), tmp_path)
        return next((c for c in found if c.what == "tool schemas"), None)

    check = told(rows)
    assert check is not None and check.level == "warn"
    assert check.detail.startswith("2 of 3 prompts with tools are declared as JSON")
    assert "first d row 2, tools[0] look.x: no type" in check.detail
    good = told(rows[:1])
    assert good == doctor.Check("ok", "tool schemas", "all 1 declarations as TypeScript")
    assert told(rows, "kimi-k2") is None  # that template declares in JSON always
