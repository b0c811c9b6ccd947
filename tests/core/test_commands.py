"""The command line in this process: one line and the right exit code for every mistake, JSON where
it is promised."""

import json
from pathlib import Path

import msgspec
import pytest

from core import cli
from core.config import parse
from core.pipeline.doctor import Check
from core.store import (
    RunDir,
    Status,
    create_run,
    read_manifest,
    write_manifest,
    write_status,
)
from core.store.rundir import read_halt_file


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    run = create_run(parse({"run": {"min_free_disk_bytes": 1}}, "test"), tmp_path, "alpha")
    write_status(run, Status(run_id="alpha", state="halted", prompts=9, done=4, exit_code=3))
    return run


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["bogus"], 2, "No such command 'bogus'; see eyas --help"),
        (["run", "--bogus"], 2, "No such option: --bogus; see eyas run --help"),
        (["run"], 2, "config.toml: cannot be read (No such file or directory)"),
        (["run", "x.toml"], 2, "x.toml: cannot be read"),
        (["status", "nobody"], 2, "nobody: no such run in runs"),
        (["halt"], 2, "usage: eyas halt RUN"),
        (["halt", "alpha", "--hard"], 2, "unknown option --hard"),
        (["halt", "nobody"], 2, "no such run"),
        (["halt", "alpha"], 1, "no engine of this run is alive here"),
        (["drain", "alpha"], 1, "no engine of this run is alive here; nothing to drain"),
        (["abandon", "nobody"], 2, "no such run"),
        (["abandon", "alpha"], 2, "nothing is pending and no request is open"),
        (["stage", "trian", "--run", "alpha"], 2, "stage 'trian': not known"),
        (["export", "alpha", "--to", "gguf"], 2, "--to gguf: not known"),
        (["lint", ".", "--engine", "ollama"], 2, "--engine ollama: not known"),
        (["lint", "/tmp"], 2, "/tmp: for which engine? add --engine sglang|vllm|hf"),
        (["tokens", "count"], 2, "tokens count: not known"),
        (["tokens", "encode", "none.jsonl"], 2, "none.jsonl: cannot be read"),
        (["probe", "live"], 2, "(alpha: no samples yet); name a JSONL file with --prompt"),
        (["probe", "live", "--from", "alpha"], 2, "alpha: no samples yet; name another run"),
        (["probe", "live", "s1"], 2, "SAMPLE belongs to a run: eyas probe RUN; leave it out"),
        (["probe", "live", "--plain"], 2, "--plain belongs to a run"),
        (["probe", "live", "--against", "s1"], 2, "--against belongs to a run"),
        (["probe", "live", "--arms", "loud"], 2, "--arms 'loud': not known; use local, declared"),
        (["probe", "live", "--arms", ","], 2, "--arms: none named"),
        (["probe", "live", "--prompt", "p.jsonl"], 2, "p.jsonl: cannot be read"),
        (["probe", "live", "--timeout-s", "0"], 2, "--timeout-s"),
        (["probe", "alpha", "--json"], 2, "--json belongs to `probe live`, which asks anew"),
        (["probe", "alpha", "--budget-usd", "1"], 2, "--budget-usd belongs to `probe live`"),
        (["probe", "alpha", "--one-by-one"], 2, "--one-by-one belongs to `probe live`"),
        (["eval", "alpha"], 2, "nothing for evaluate to read, reconstruct has left nothing yet"),
        (["audit", "alpha", "--json"], 1, "not there yet; eyas stage audit"),
        (["demo", "--set", "run.budgt=1"], 2, "unknown key run.budgt"),
    ],
)
def test_mistakes_are_one_line(
    run: RunDir, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    assert cli.main(words) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("eyas: ") and said.err.count("\n") == 1 and message in said.err


def test_doctor_shows_what_servers_say_and_no_terminal_obeys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [Check("ok", "sglang", "version=0.5\x1b]0;owned\x07\n\u202eevil")]
    budgets: list[float] = []
    monkeypatch.setattr(
        "core.commands.tools.examine",
        lambda config, base: budgets.append(config.run.budget_usd) or said,
    )
    assert cli.main(["doctor", "--set", "run.budget_usd=0.5"]) == 0 and budgets == [0.5]
    shown = capsys.readouterr().out.removesuffix("\n")
    assert shown.isprintable() and shown.split()[2:] == ["version=0.5", "]0;owned", "evil"]


def test_halt_reaches_another_host_through_the_file(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = read_manifest(run)
    assert manifest is not None
    write_manifest(run, msgspec.structs.replace(manifest, boot_id="of another host"))
    assert cli.main(["halt", "alpha", "--reason", "smells"]) == 0
    assert run.halt_file.read_text() == "smells\n" and read_halt_file(run) == "smells"
    assert "HALT file left" in capsys.readouterr().out


def test_the_reason_in_a_halt_file_is_one_short_printable_line(run: RunDir) -> None:
    assert read_halt_file(run) is None
    run.halt_file.write_bytes(b"\x1b[2Jloss \xff " + b"x" * 999 + b"\nmore")
    said = read_halt_file(run)
    assert said is not None and said.isprintable()
    assert len(said) < 200 and said.startswith("[2Jloss \ufffd x")
    run.halt_file.unlink()
    run.halt_file.mkdir()  # not to be read, and still a halt
    assert read_halt_file(run) == ""


def test_json_for_programs(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "alpha", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert (one["run_id"], one["state"], one["done"], one["exit_code"]) == ("alpha", "halted", 4, 3)
    assert one["path"] == str(run.path)
    create_run(parse({"run": {"min_free_disk_bytes": 1}}, "test"), run.path.parent.parent, "beta")
    assert cli.main(["list", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {r["run_id"]: r["state"] for r in rows} == {"alpha": "halted", "beta": "crashed"}
    assert cli.main(["report", "alpha", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["made"]["samples"] == 0


def test_a_report_as_one_page(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    page = run.path.parent / "page.html"
    assert cli.main(["report", "alpha", "--html", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert capsys.readouterr().out == f"{page}: written\n"
    assert cli.main(["report", "alpha", "--html", str(page / "below")]) == 2
    assert "below: cannot be written (Not a directory); name a file" in capsys.readouterr().err


def test_tokens_answers_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"id": 2, "text": "hello"}\n\n{"id": 1, "text": "<|im_end|>"}\n')
    assert cli.main(["tokens", "encode", str(lines)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["id"] for r in rows] == [2, 1]
    assert all(len(r["ids"]) > 1 for r in rows)  # no special token is recognised


@pytest.mark.parametrize(
    ("words", "started"),
    [
        ([], []),
        (["attach", "alpha", "--read-only"], ["alpha", "--read-only"]),
        (["watch", "alpha"], ["watch", "alpha"]),
        (["list"], ["list"]),
        (["status", "alpha"], ["status", "alpha"]),
        (["probe", "alpha", "s1", "--against", "s2"], ["probe", "alpha", "s1", "--against", "s2"]),
        (["audit", "alpha"], ["audit", "alpha"]),
        (["report", "alpha"], ["report", "alpha"]),
    ],
)
def test_what_is_drawn_is_drawn_by_the_console(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, words: list[str], started: list[str]
) -> None:
    calls: list[list[str]] = []

    def call(command: list[str]) -> int:
        calls.append(command)
        return 7

    monkeypatch.setattr("core.commands.common.subprocess.call", call)
    assert cli.main(words) == 7
    (command,) = calls
    at = command.index("console")
    assert command[at - 1] == "-m"
    assert [w.removeprefix("runs/") for w in command[at + 1 :]] == started


@pytest.mark.parametrize(
    ("state", "code", "reason", "words"),
    [
        ("done", 0, "", "alpha: done; eyas report runs/alpha says what it made"),
        ("running", None, "", ""),
        ("crashed", None, "", "alpha: crashed; eyas resume runs/alpha goes on"),
        (
            "halted",
            3,
            "halted (me, key)",
            "alpha: halted (me, key); eyas resume runs/alpha goes on",
        ),
        ("failed", 1, "no key; set one", "alpha: failed: no key; set one; eyas resume runs/alpha"),
    ],
)
def test_a_console_that_is_left_says_where_the_run_stands(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: str,
    code: int | None,
    reason: str,
    words: str,
) -> None:
    stands = Status(run_id="alpha", state=state, exit_code=code, reason=reason)
    monkeypatch.setattr("core.commands.common.has_terminal", lambda: True)
    monkeypatch.setattr("core.commands.common.subprocess.call", lambda command: 0)
    monkeypatch.setattr("core.commands.common.observed_status", lambda run: stands)
    monkeypatch.setattr("core.commands.common.lc.launch", lambda start: {"run_id": "alpha"})
    assert cli.main(["resume", "alpha"]) == (1 if state == "crashed" else code or 0)
    said = capsys.readouterr().out
    assert said.startswith(words) and bool(said) == bool(words)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.count(".") == 2


def test_a_defect_of_ours_is_one_line_too(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("unforeseen")

    monkeypatch.setattr("core.commands.looks.observed_status", broken)
    assert cli.main(["status", "alpha", "--json"]) == 1
    said = capsys.readouterr().err
    assert said == "eyas: internal error: ValueError: unforeseen; --debug shows where\n"
    with pytest.raises(ValueError, match="unforeseen"):
        cli.main(["status", "alpha", "--json", "--debug"])
