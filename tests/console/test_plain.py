"""Lines and tables: what pipes, CI and screen readers get. Everything is plain text, errors are one
line.
"""

import asyncio
from pathlib import Path

import msgspec
import pytest

from console.__main__ import main
from console.plain import make_console, print_errors, print_halt, status_line
from console.watch import watch
from core import events as ev
from core.config import parse
from core.control import ControlServer
from core.journal import Journal
from core.render.tokenizer import Tokenizer
from core.store import RunDir, create_run
from tests.console import recording
from tests.console.recorded_run import write_run
from tests.console.test_probe import TARGET
from tests.console.test_sanitize import obeyed
from tests.console.test_session import until
from tests.console.test_state import replay

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EYAS_RUNS", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "140")
    write_run(tmp_path, "done", Tokenizer.load(TARGET))
    return tmp_path


def said(capsys: Captured, *words: str, code: int = 0) -> str:
    assert main(list(words)) == code
    out = capsys.readouterr().out
    assert not obeyed(out.replace("\n", ""))
    return out


def test_list(runs: Path, capsys: Captured) -> None:
    out = said(capsys, "list")
    assert recording.RUN_ID in out
    assert "✓ DONE" in out
    assert "204/204" in out


@pytest.mark.parametrize(("columns", "last"), [(60, "spent"), (80, "accept"), (140, "last seen")])
def test_a_narrow_list_leaves_columns_out_and_cuts_no_run_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, columns: int, last: str
) -> None:
    long = "a-run-with-a-name-of-its-own"
    run = write_run(tmp_path, "done")
    status = run.status.read_text().replace(recording.RUN_ID, long)
    run.status.write_text(status)
    run.path.rename(tmp_path / long)
    monkeypatch.setenv("EYAS_RUNS", str(tmp_path))
    monkeypatch.setenv("COLUMNS", str(columns))
    heading, row = said(capsys, "list").rstrip("\n").split("\n")
    assert heading.split("  ")[-1].strip() == last
    assert row.startswith(f"{long} ") and "…" not in row and len(row) <= columns


def test_status(runs: Path, capsys: Captured) -> None:
    out = said(capsys, "status", "2025")
    first = out.split("\n")[0]
    assert first.startswith(
        f"{recording.RUN_ID}  DONE · ok 195 rejected 8 failed 1 · $0.4345 of $10.00"
    )
    assert "kestrel" in out
    assert "▲ paused" in out
    assert "admitted 188 of 202 (93.1%)" in out
    assert "‹ESC›]0;owned" in out


def test_watch_of_a_finished_run_ends_with_its_code_and_page(runs: Path, capsys: Captured) -> None:
    out = said(capsys, "watch", "2025")
    assert "DONE" in out.split("\n")[0]
    assert "what this run made" in out
    assert "195 of 204 samples kept" in out
    assert "2.87 tokens per forward" in out


@pytest.mark.parametrize(("phase", "code"), [("halted", 3), ("tripped", 4)])
def test_the_exit_code_is_the_runs(
    phase: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    monkeypatch.setenv("EYAS_RUNS", str(tmp_path))
    write_run(tmp_path, phase)
    assert phase.upper() in said(capsys, "watch", "2025", code=code)


def test_no_terminal_means_lines(
    runs: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "what this run made" in said(capsys, "2025")
    monkeypatch.setenv("TERM", "dumb")
    assert recording.RUN_ID in said(capsys)
    assert "\x1b" not in said(capsys, "2025", "--plain")


def test_probe(runs: Path, capsys: Captured) -> None:
    out = said(capsys, "probe", "2025")
    assert "≠ mismatch" in out
    assert "merlin" in out
    out = said(capsys, "probe", "2025", "0001")
    assert out.startswith("≠ mismatch")
    assert "FIRST DIVERGENCE @" in out
    assert "3 hunks" in out
    assert " ≠ " in out
    assert " index      id loss segment    token" in out
    out = said(capsys, "probe", "2025", "0000", "--against", "0000")
    assert "IDENTICAL" in out
    out = said(capsys, "probe", "2025", "0002")
    assert "‹ESC›" in out
    assert "‹RLO›" in out


def test_audit(runs: Path, capsys: Captured) -> None:
    out = said(capsys, "audit", "2025")
    assert "2.0e-05" in out
    assert "tools / harrier: triggers tools far less often" in out
    assert "name_undeclared 2" in out


def test_report(runs: Path, capsys: Captured) -> None:
    out = said(capsys, "report", "2025")
    for part in (
        "✓ done",
        "acceptance length 2.87 ",
        "accepted by position: 1 81%",
        "loss 7.",
        "█",
        "ok 194, spent $0.4345",
    ):
        assert part in out
    assert "{'" not in out


def test_status_and_report_of_a_halted_run_show_its_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("EYAS_RUNS", str(tmp_path))
    write_run(tmp_path, "halted")
    account = "37 cancelled, 11 received; spent $0.2631, saved $0.0892, uncertain $0.0021"
    for page in ("status", "report"):
        out = said(capsys, page, "2025")
        assert f"halt by alice (key): {account}" in out
        assert "HALTED · ok 113 rejected 5 failed 1 pending 85 · " in out
    assert "generate     ■ stopped" in out and "running" not in out


@pytest.mark.parametrize(("columns", "whole"), [("90", False), ("200", True)])
def test_what_an_error_said_gets_the_room_that_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, columns: str, whole: bool
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    said_by_it = "33052 prompt tokens, max_tokens leaves 768 in the largest context; shorten it"
    row = ev.ErrorRow(provider="alder", error_class="prompt_too_long", count=2, example=said_by_it)
    state = replay("halted")
    assert state.view.stats is not None
    state.view.stats = msgspec.structs.replace(state.view.stats, errors=[row])
    print_errors(make_console(), state, 5)
    last = capsys.readouterr().out.split("\n")[2].rstrip()
    assert last.endswith(said_by_it) if whole else last.endswith("…") and 80 < len(last) <= 90


def test_a_budget_that_ended_a_run_is_named_once(capsys: Captured) -> None:
    state = replay("halted")
    reason = "budget: $1.0000 spent or reserved; 85 prompts pending"
    state.apply(ev.Halt(seq=99_998, source=reason, spent_usd=1.0, complete=True), 1.0)
    state.apply(ev.StateChanged(seq=99_999, state="halted", reason=reason), 1.0)
    assert status_line(state, 1.0).endswith(reason)
    print_halt(make_console(), state)
    assert capsys.readouterr().out == "halt: 0 cancelled, 0 received; spent $1.00, saved $0.00\n"


def test_errors_are_one_line(runs: Path, capsys: Captured) -> None:
    assert main(["status", "nothing"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("eyas: nothing: no such run in ")
    assert err.count("\n") == 1
    assert main(["probe", "2025", "zz"]) == 1
    assert capsys.readouterr().err.startswith("eyas: zz: no sample of this run")


async def test_watch_follows_a_live_engine(tmp_path: Path, capsys: Captured) -> None:
    run = RunDir(tmp_path / "live")
    run.path.mkdir()
    run.manifest.write_text('{"run_id":"live"}', encoding="utf-8")
    journal = Journal(run)
    server = ControlServer(run, lambda request, peer: journal.view.state, lambda: journal.view)
    await server.start()
    journal.subscribe(server.publish)
    journal.emit(ev.RunStarted(run_id="live", budget_usd=5.0, stages=["generate"]))
    journal.emit(ev.StateChanged(state="running"))
    task = asyncio.create_task(watch(run, make_console(), every_s=60))
    await until(lambda: server.consoles == 1, "the watcher attached")
    journal.emit(ev.Log(level="warn", message="harrier \x1b[31mwaits", stage="generate"))
    wire = ev.Tripwire(name="leak", scope="merlin", saw="3 of 40", advice="stop merlin")
    journal.emit(wire)
    journal.emit(ev.StateChanged(state="tripped", reason="leak"))
    assert await asyncio.wait_for(task, 20) == 4
    await server.close()
    journal.close()
    out = capsys.readouterr().out
    assert "RUNNING" in out.split("\n")[0]
    assert "warn: harrier ‹ESC›[31mwaits" in out
    assert "error: leak [merlin] 3 of 40; stop merlin" in out
    assert "TRIPPED" in out.strip().split("\n")[-1]


async def test_a_failure_is_said_once_and_on_stderr(tmp_path: Path, capsys: Captured) -> None:
    """Live and from the files of the finished run alike."""
    run = RunDir(tmp_path / "live")
    run.path.mkdir()
    run.manifest.write_text('{"run_id":"live"}', encoding="utf-8")
    journal = Journal(run)
    server = ControlServer(run, lambda request, peer: journal.view.state, lambda: journal.view)
    await server.start()
    journal.subscribe(server.publish)
    journal.emit(ev.RunStarted(run_id="live", budget_usd=5.0, stages=["generate"]))
    journal.emit(ev.StateChanged(state="running"))
    task = asyncio.create_task(watch(run, make_console(), every_s=60))
    await until(lambda: server.consoles == 1, "the watcher attached")
    why = "openrouter: no model 'org/m'; check \x1b[31m it"
    journal.emit(ev.StageStarted(stage="generate"))
    journal.emit(ev.StageFailed(stage="generate", error=why))
    journal.emit(ev.StateChanged(state="failed", reason=why))
    assert await asyncio.wait_for(task, 20) == 1
    await server.close()
    journal.close()
    live = capsys.readouterr()
    assert await asyncio.wait_for(watch(run, make_console(), every_s=60), 20) == 1
    later = capsys.readouterr()
    for said in (live, later):
        assert said.err == "eyas: openrouter: no model 'org/m'; check ‹ESC›[31m it\n"
        assert "no model" not in said.out
        assert "FAILED" in said.out.strip().split("\n")[-1]
    assert later.out.count("\n") == 1


def test_a_long_reason_leaves_the_names_of_the_stages_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = create_run(parse({}, "test"), tmp_path, "failed")
    journal = Journal(run)
    journal.emit(ev.RunStarted(run_id="failed", stages=["generate", "reconstruct"]))
    journal.emit(ev.StageStarted(stage="generate"))
    why = "openrouter: no endpoint is left (" + "quantization fp8; " * 12 + "); loosen it"
    journal.emit(ev.StageFailed(stage="generate", error=why))
    journal.close()
    text = said(capsys, "report", str(run.path))
    assert "generate     ✗ failed" in text and "reconstruct  ○ waiting" in text
    assert text.count("quantization") == 12 and "loosen it" in text


@pytest.mark.parametrize(
    ("said", "width"), [("abc", 120), ("", 120), ("0", 120), ("-5", 120), ("88", 88)]
)
def test_any_columns_in_the_environment_are_survived(
    monkeypatch: pytest.MonkeyPatch, said: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", said)
    assert make_console().width == width
