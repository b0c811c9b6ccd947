"""Samples read back for the probe: the list, the twin, ids on demand, and what is shown before
there are samples.
"""

import json
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from console import probe
from console.widgets.evidence import evidence
from console.widgets.line import plain
from core.errors import StoreError
from core.journal import load_view
from core.render.tokenizer import Tokenizer
from core.schema import Prompt, Rollout
from core.store import RunDir, encode_line, read_samples, write_samples
from core.store import samples as samples_module
from tests.console.recorded_run import write_run

USER = {"role": "user", "content": "Well?"}
TARGET = Path(probe.__file__).resolve().parents[1] / "core" / "embedded" / "target"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return write_run(tmp_path_factory.mktemp("runs"), "done", Tokenizer.load(TARGET))


@pytest.fixture(scope="module")
def rows(run: RunDir) -> list[probe.Row]:
    return probe.rows_of(run, load_view(run).outcomes)


def test_samples_come_first_then_outcomes_without_one(rows: list[probe.Row]) -> None:
    assert [r.verdict for r in rows[:3]] == ["exact", "mismatch", "rejected"]
    assert all(r.rebuilt for r in rows[:3])
    assert not any(r.rebuilt for r in rows[3:])
    assert len({r.prompt_id for r in rows}) == len(rows)


def test_a_sample_opens_with_its_ids_and_its_twin(run: RunDir, rows: list[probe.Row]) -> None:
    opened = probe.open_sample(run, rows[1])
    assert opened.sample is not None
    assert opened.twin is not None
    assert opened.tokenizer is not None
    assert opened.twin.arm == "local"
    text = opened.tokenizer.decode(opened.sample.completion_ids)
    assert text.startswith("Two cities, two calls.</think>\nLet me look.")
    assert opened.sample.segments[0].kind == "reasoning"


def test_the_twin_is_found_from_both_sides(run: RunDir, rows: list[probe.Row]) -> None:
    def twins(row: probe.Row, against: str = "") -> list[str]:
        sample = probe.open_sample(run, row).sample
        assert sample is not None
        return [t.sample_id for t in probe.twins_of(run, sample, against)]

    assert twins(rows[1]) == [rows[0].sample_id]
    assert twins(rows[0]) == [rows[1].sample_id]
    assert twins(rows[2]) == []
    assert twins(rows[2], against="0000aa") == [rows[0].sample_id]
    with pytest.raises(StoreError, match="no sample of this run"):
        twins(rows[2], against="zz")


def test_the_evidence_names_what_decided(run: RunDir, rows: list[probe.Row]) -> None:
    lines = [plain(x).strip() for x in evidence(probe.open_sample(run, rows[1]), 110)]
    assert lines[0].startswith("≠ mismatch")
    assert "2 more billed" in lines[0]
    assert "flags gap_changed" in lines[0]
    assert lines[2].startswith("not trained on · ")
    lines = [plain(x).strip() for x in evidence(probe.open_sample(run, rows[0]), 110)]
    assert "the counts agree" in lines[0]
    assert lines[2].startswith("trained on · ")


def test_before_the_samples_the_reply_is_shown_as_received(tmp_path: Path) -> None:
    run = write_run(tmp_path, "generate")
    rollout = Rollout(
        prompt_id="0004aa55",
        twin_id="t",
        dataset="chat",
        arm="declared",
        attempt=1,
        outcome="ok",
        backend="openrouter",
        reply_kind="json",
        reply_raw='{"choices": []}\x1b[2J',
    )
    about = msgspec.structs.replace(rollout, prompt_id="0005", reply_raw='{"prompt_id":"0004aa55"}')
    first = msgspec.structs.replace(rollout, reply_raw="first \ud83d")
    lines = [encode_line(r) for r in (first, rollout, about)]
    run.completions.write_bytes(b"".join(lines) + lines[1][:-20])
    row = probe.find_row(run, "0004", load_view(run).outcomes)
    opened = probe.open_sample(run, row)
    assert opened.sample is None
    assert opened.raw == '{"choices": []}\x1b[2J'
    assert "reconstruct" in opened.note
    run.completions.write_bytes(lines[2] + lines[0])
    assert probe.open_sample(run, row).raw == "first \ud83d"
    for bare in (lines[2], b""):
        run.completions.write_bytes(bare)
        assert probe.open_sample(run, row).raw == ""
    run.completions.unlink()
    assert probe.open_sample(run, row).raw == ""


def test_a_missing_tokenizer_is_said_not_raised(
    run: RunDir, rows: list[probe.Row], tmp_path: Path
) -> None:
    copy = write_run(tmp_path, "done", Tokenizer.load(TARGET))
    text = copy.config_toml.read_text(encoding="utf-8")
    copy.config_toml.write_text(
        text.replace('tokenizer = ""', 'tokenizer = "/nowhere"'), encoding="utf-8"
    )
    opened = probe.open_sample(copy, rows[0])
    assert opened.tokenizer is None
    assert opened.note.startswith("shown as ids: ")
    assert opened.sample is not None
    assert opened.sample.token_ids


def test_names_must_be_unambiguous(run: RunDir, rows: list[probe.Row]) -> None:
    assert probe.find_row(run, "0001aa55") == rows[1]
    with pytest.raises(StoreError, match="no sample of this run"):
        probe.find_row(run, "zz")
    with pytest.raises(StoreError, match="several samples of this run begin like this"):
        probe.find_row(run, "00")


def test_opening_one_sample_reads_no_other(
    run: RunDir, rows: list[probe.Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 83,000 samples the others stay on disk: row groups without it are not read whole."""
    whole: list[int] = []
    real = pq.ParquetFile.read_row_group

    def counted(file: pq.ParquetFile, group: int, columns: list[str] | None = None) -> object:
        if columns is None:
            whole.append(group)
        return real(file, group, columns=columns)

    copies = [
        msgspec.structs.replace(sample, sample_id=f"{n}{sample.sample_id}", twin_id=f"t{n}")
        for n in range(20)
        for sample in read_samples(run)
    ]
    elsewhere = RunDir(run.path.parent / "many")
    elsewhere.path.mkdir(exist_ok=True)
    monkeypatch.setattr(samples_module, "ROWS_PER_BATCH", 3)
    write_samples(elsewhere, copies)
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    monkeypatch.setattr(probe, "read_samples", None)
    opened = probe.open_sample(elsewhere, probe.find_row(elsewhere, f"7{rows[1].sample_id}"))
    assert opened.sample == copies[7 * 3 + 1]
    assert [t.sample_id for t in opened.twins] == [copies[21].sample_id, copies[23].sample_id]
    assert set(whole) == {7}


def test_hypotheses_are_shown_with_what_they_count(tmp_path: Path) -> None:
    """One newline too few in the reply: the trial that explains the bill is marked."""
    tokenizer = Tokenizer.load(TARGET)
    made = write_run(tmp_path, "done", tokenizer)
    asked = Prompt(prompt_id="h", twin_id="h", dataset="d", messages=[USER])
    message = {"role": "assistant", "reasoning": "hm", "content": "Fine."}
    body = {"choices": [{"message": message, "finish_reason": "stop"}]}
    rollout = Rollout(
        prompt_id="h",
        twin_id="h",
        dataset="d",
        arm="declared",
        attempt=1,
        outcome="ok",
        backend="openrouter",
        status=200,
        reply_kind="json",
        reply_raw=json.dumps(body),
    )
    counted = len(tokenizer.encode_special("hm</think>\n\nFine.<|im_end|>"))
    sample = msgspec.structs.replace(
        next(iter(read_samples(made))),
        sample_id="h",
        prompt_id="h",
        twin_id="h",
        verdict="hypothesis",
        hypothesis="trimmed_newline",
        rebuilt_tokens=counted - 1,
        billed_tokens=counted,
    )
    write_samples(made, [sample])
    made.prompts.write_bytes(encode_line(asked))
    made.completions.write_bytes(encode_line(rollout))
    opened = probe.open_sample(made, probe.find_row(made, "h"))
    tried = {t.name: t.tokens for t in opened.trials}
    assert tried["trimmed_newline"] == counted and tried["no_think_close"] == counted - 2
    assert "spaced_markers" in tried and "renumbered_id" not in tried
    lines = [plain(x) for x in evidence(opened, 200)]
    assert f"✓ trimmed_newline {counted}" in lines[3] and "· no_think_close" in lines[3]
    mismatch = opened._replace(sample=msgspec.structs.replace(sample, hypothesis=None))
    assert "none of them explains the bill" in plain(evidence(mismatch, 200)[3])
