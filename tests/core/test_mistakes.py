"""Mistakes at the command line that touch files and names: one line, the right exit code, nothing
left behind."""

import json
from pathlib import Path

import pytest

from core import cli
from core import events as ev
from core.config import parse
from core.journal import Journal
from core.store import RunDir, create_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    return create_run(parse({"run": {"min_free_disk_bytes": 1}}, "test"), tmp_path, "alpha")


def said_in_one_line(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("eyas: ") and said.err.endswith("\n")
    line = said.err[:-1]
    assert line.isprintable()
    return line


@pytest.mark.parametrize("command", ["halt", "drain", "attach", "status", "resume", "report"])
@pytest.mark.parametrize("name", ["x" * 300, "a\x1b]0;title\x07", "b\nc", "../alpha", "x\0y"])
def test_names_that_no_run_can_have(
    run: RunDir, capsys: pytest.CaptureFixture[str], command: str, name: str
) -> None:
    assert cli.main([command, name]) == 2
    assert "no such run in runs" in said_in_one_line(capsys)


def test_a_page_is_written_whole(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "alpha", "--html", "page.html"]) == 0
    assert capsys.readouterr().out == "page.html: written\n"
    page = Path("page.html").read_text()
    assert page.startswith("<!doctype html>") and page.rstrip().endswith("</html>")
    assert "alpha" in page


def test_a_halt_that_cut_nothing_is_reported(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is zero does not stand in the journal."""
    journal = Journal(run)
    journal.emit(ev.Halt(source="command", by="alice", complete=True))
    journal.close()
    assert cli.main(["report", "alpha", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["halt"]["cancelled"] == 0
    assert report["warnings"] == [
        "halted by alice: 0 requests cancelled, 0 received, 0 severed; $0.0000 saved,"
        " $0.0000 uncertain"
    ]


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("folder", "Is a directory"),
        ("none/page.html", "No such file or directory"),
        ("file/page.html", "Not a directory"),
        ("x" * 300 + ".html", "File name too long"),
    ],
)
def test_a_page_that_cannot_be_written(
    run: RunDir, capsys: pytest.CaptureFixture[str], where: str, why: str
) -> None:
    Path("folder").mkdir()
    Path("file").write_text("kept")
    before = sorted(Path().rglob("*"))
    assert cli.main(["report", "alpha", "--html", where]) == 2
    assert f"cannot be written ({why}); name a file" in said_in_one_line(capsys)
    assert sorted(Path().rglob("*")) == before and Path("file").read_text() == "kept"


@pytest.mark.parametrize("where", ["", ".", "/"])
def test_a_page_without_a_name(run: RunDir, capsys: pytest.CaptureFixture[str], where: str) -> None:
    assert cli.main(["report", "alpha", "--html", where]) == 2
    assert "not a file's name; name a file" in said_in_one_line(capsys)


def test_a_refused_override_is_not_kept(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    before = run.config_toml.read_bytes()
    words = ["resume", "alpha", "--detach", "--set", "run.budget_usd=7", "--set", "dataset=[]"]
    assert cli.main(words) == 2
    assert "no [[dataset]] in the config" in said_in_one_line(capsys)
    assert run.config_toml.read_bytes() == before
