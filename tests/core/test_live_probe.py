"""`eyas probe live` without an engine: which questions are asked, what the run is told, what the
report says of replies."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.config import Config, load
from core.errors import EyasError, PromptError, UsageError
from core.pipeline.live_probe import Ask, callers, live_config, prepare_live
from core.pipeline.probe_report import first_divergence, report_of
from core.pipeline.setting import DEMO_CONFIG
from core.prompts import load_prompts
from core.render.source import renderer_of
from core.schema import Prompt, Rollout, Sample, SpendLine, Timings, Usage
from core.store import RunDir, Status, create_run, encode_line, holding, write_atomic, write_samples

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ASKED = {"messages": [{"role": "user", "content": "Look."}], "tools": [TOOL]}
ALL = ["local", "declared", "text"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def prompt(name: str, arm: str = "local", tools: bool = True) -> Prompt:
    return Prompt(
        prompt_id=f"{name}-{arm}",
        twin_id=name,
        dataset="d",
        messages=ASKED["messages"],
        tools=[TOOL] if tools else None,
        arm=arm,  # type: ignore[arg-type]
        backend="sglang" if arm == "local" else "openrouter",
    )


def sample(of: Prompt, completion: list[int], prompt_ids: list[int]) -> Sample:
    return Sample(
        sample_id=of.prompt_id,
        prompt_id=of.prompt_id,
        twin_id=of.twin_id,
        dataset=of.dataset,
        arm=of.arm,
        backend=of.backend,
        provider=None,
        token_ids=[*prompt_ids, *completion],
        prompt_len=len(prompt_ids),
        verdict="exact",
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Local samples: one that calls, one with the id in its prompt alone, one without tools; and an
    API sample that calls."""
    made = create_run(load(DEMO_CONFIG), tmp_path, "alpha")
    grammar = renderer_of(load(DEMO_CONFIG)).grammar
    assert grammar is not None
    section = grammar.section_begin
    cases = [
        (prompt("quoted"), [1, 2], [3, section]),
        (prompt("bare", tools=False), [section], [3]),
        (prompt("api", "declared"), [section], [3]),
        (prompt("first"), [5, section, 6, section], [3, 4]),
        (prompt("second"), [section], []),
    ]
    write_atomic(made.prompts, b"".join(encode_line(p) for p, _, _ in cases))
    write_samples(made, [sample(*case) for case in cases])
    return made


def test_questions_are_those_whose_local_answer_called_a_tool(run: RunDir) -> None:
    grammar = renderer_of(load(DEMO_CONFIG)).grammar
    assert grammar is not None
    assert holding(run, grammar.section_begin, "local") == [
        "bare-local",
        "first-local",
        "second-local",
    ]
    assert holding(run, grammar.section_begin, "text") is None
    assert [p.twin_id for p in callers(run, 1)] == ["first"]
    assert [p.twin_id for p in callers(run, 9)] == ["first", "second"]


def test_a_picked_question_is_asked_in_every_arm_from_the_run_s_own_config(run: RunDir) -> None:
    start = prepare_live(Ask(ALL, source="alpha", prompts=1, budget_usd=0.5), ["eyas"])
    config = start.run.load_config()
    asked = load_prompts(config)
    assert [(p.dataset, p.arm, p.backend) for p in asked] == [
        ("probe-local", "local", "sglang"),
        ("probe-declared", "declared", "openrouter"),
        ("probe-text", "text", "openrouter"),
    ]
    assert {json.dumps(p.messages) for p in asked} == {json.dumps(ASKED["messages"])}
    assert len({p.twin_id for p in asked}) == 1
    assert config.run.budget_usd == 0.5 and config.run.stages == ["generate", "reconstruct"]
    assert start.run.run_id.startswith("probe-") and start.new


def test_what_the_run_is_told(tmp_path: Path) -> None:
    ask = Ask([*ALL, "local"], prompts=2, timeout_s=7.0)
    probe = live_config(load(DEMO_CONFIG), tmp_path / "p.jsonl", ask, "probe-x")
    generate = probe.generate
    assert [(d.arm, d.limit) for d in probe.dataset] == [("local", 2), ("declared", 2), ("text", 2)]
    assert generate.max_in_flight == 6 and generate.canary == 0 and generate.reserve == "all"
    assert (generate.attempts_paid, generate.attempts_unpaid) == (1, 1)
    clocks = (generate.first_event_timeout_s, generate.idle_timeout_s, generate.total_timeout_s)
    assert clocks == (7.0, 7.0, 7.0) and generate.patience_s == 7.0
    one = live_config(load(DEMO_CONFIG), tmp_path, ask._replace(one_by_one=True), "probe-x")
    assert one.generate.max_in_flight == 1


def test_a_prompt_file_is_read_to_its_end(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", ASKED, {"messages": 3})
    with pytest.raises(PromptError, match=r"p\.jsonl:2: messages is not a list"):
        prepare_live(Ask(["local"], prompt=path), [])
    path.write_text(json.dumps(ASKED) + "\n{", encoding="utf-8")
    with pytest.raises(PromptError, match=r"p\.jsonl:2: not JSON"):
        prepare_live(Ask(["local"], prompt=path), [])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (Ask(["loud"]), "--arms 'loud': not known"),
        (Ask([]), "--arms: none named"),
        (Ask(["local"], prompts=0), "above zero"),
        (Ask(["local"]), "no runs here"),
        (Ask(["local"], source="nobody"), "no such run"),
    ],
)
def test_what_cannot_be_asked_is_one_line(ask: Ask, message: str) -> None:
    with pytest.raises(EyasError, match=message) as refused:
        prepare_live(ask, [])
    assert "\n" not in str(refused.value) and refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ([], "no samples yet"),
        ([sample(prompt("api", "declared"), [1], [2])], "no local twins, nothing to compare with"),
        ([sample(prompt("mute"), [1], [2])], "no local sample called a tool"),
    ],
)
def test_a_run_without_a_question_says_why(tmp_path: Path, of: list[Sample], message: str) -> None:
    made = create_run(load(DEMO_CONFIG), tmp_path, "beta")
    if of:
        write_samples(made, of)
    with pytest.raises(UsageError, match=f"beta: {message}; name another run"):
        prepare_live(Ask(["local"], source="beta"), [])


def test_an_earlier_probe_is_no_source_of_its_own(tmp_path: Path, run: RunDir) -> None:
    """Otherwise the second probe would always repeat the first."""
    run.path.rename(run.path.with_name("probe-1"))
    with pytest.raises(UsageError, match="no runs here"):
        prepare_live(Ask(["local"]), [])


# ---- the report

ID_CALL = "functions.look:0"
STRUCTURED = [{"id": ID_CALL, "type": "function", "function": {"name": "look", "arguments": "{}"}}]
MARKERS = (
    f"<|tool_calls_section_begin|><|tool_call_begin|>{ID_CALL}<|tool_call_argument_begin|>{{}}"
    "<|tool_call_end|><|tool_calls_section_end|>"
)


def rollout(of: Prompt, body: dict[str, Any], **fields: Any) -> Rollout:
    given = {
        "prompt_id": of.prompt_id,
        "twin_id": of.twin_id,
        "dataset": of.dataset,
        "arm": of.arm,
        "attempt": 1,
        "outcome": "ok",
        "backend": of.backend,
        "provider": "merlin",
        "status": 200,
        "reply_kind": "json",
        "reply_raw": json.dumps(body),
        "request": {"input_ids": [3]} if of.arm == "local" else {"tools": [TOOL]},
        "timings": Timings(sent_at=1.0, total_s=0.5, ttft_s=0.1),
        "usage": Usage(),
    }
    return Rollout(**{**given, **fields})


def chat(finish: str = "tool_calls", **message: Any) -> dict[str, Any]:
    choice = {"message": {"role": "assistant", **message}, "finish_reason": finish}
    return {"choices": [choice], "usage": {"completion_tokens": 9}}


def test_the_report_says_how_calls_came_and_where_an_arm_leaves_the_local_one(
    tmp_path: Path,
) -> None:
    config: Config = load(DEMO_CONFIG)
    made = create_run(config, tmp_path, "probe-1")
    renderer = renderer_of(config)
    encode = renderer.tokenizer.encode_special
    ids = encode(f" hm</think>{MARKERS}<|im_end|>")
    local, declared, text = (prompt("q", arm) for arm in ALL)
    finish = {"type": "stop"}
    replies = [
        rollout(local, {"output_ids": ids, "meta_info": {"finish_reason": finish}}),
        rollout(declared, chat(reasoning=" hm", content="", tool_calls=STRUCTURED)),
        rollout(text, chat("stop", reasoning=" ha", content=MARKERS)),
    ]
    write_atomic(made.prompts, b"".join(encode_line(p) for p in (local, declared, text)))
    write_atomic(made.completions, b"".join(encode_line(r) for r in replies))
    spent = SpendLine(
        ts=1.0,
        kind="looked_up",
        prompt_id=declared.prompt_id,
        attempt=1,
        backend="openrouter",
        cost_usd=0.002,
    )
    write_atomic(made.spend, encode_line(spent))
    report = report_of(made, Status(run_id="probe-1", state="done", spent_usd=0.002))
    a, b, c = report.answers
    assert (a.call_form, b.call_form, c.call_form) == ("by ids", "structured", "raw markers")
    assert a.calls == b.calls == c.calls == ["look"]
    assert a.verdict == "exact" and a.same_as_local is None
    assert b.same_as_local is True and b.divergence is None
    assert (b.bill, b.cost_usd, b.latency_s, b.ttft_s) == ("looked_up", 0.002, 0.5, 0.1)
    assert c.same_as_local is False and c.divergence is not None
    assert c.divergence.at == 0 or c.divergence.local != c.divergence.here
    assert (c.bill, c.cost_usd, c.finish_reason) == ("", None, "tool_calls")
    assert report.complete and report.spent_usd == 0.002


def test_an_arm_that_was_never_asked_is_in_the_report(tmp_path: Path) -> None:
    made = create_run(load(DEMO_CONFIG), tmp_path, "probe-2")
    page = rollout(
        prompt("q", "declared"),
        {},
        outcome="failed",
        error_class="html_body",
        error="<html>\x1b[2J",
        status=502,
        reply_raw="<html>",
    )
    write_atomic(
        made.prompts, b"".join(encode_line(prompt("q", arm)) for arm in ("local", "declared"))
    )
    write_atomic(made.completions, encode_line(page))
    report = report_of(made, Status(run_id="probe-2", state="halted", reason="stopped"))
    asked = {a.arm: (a.outcome, a.error_class, a.call_form) for a in report.answers}
    assert asked == {
        "local": ("aborted", None, "none"),
        "declared": ("failed", "html_body", "none"),
    }
    assert not report.complete
    assert msgspec.json.decode(msgspec.json.encode(report))["state"] == "halted"


def test_first_divergence() -> None:
    tokenizer = renderer_of(load(DEMO_CONFIG)).tokenizer
    one, two = tokenizer.encode_ordinary("a")[0], tokenizer.encode_ordinary("b")[0]
    assert first_divergence([one], [one], tokenizer) is None
    found = first_divergence([one, two], [one, one], tokenizer)
    assert found is not None and found.local is not None and found.here is not None
    assert (found.at, found.local.text, found.here.text) == (1, "b", "a")
    shorter = first_divergence([one], [one, 10**6], tokenizer)
    assert shorter is not None and shorter.here is not None
    assert (shorter.at, shorter.local, shorter.here.id, shorter.here.text) == (1, None, 10**6, "")
