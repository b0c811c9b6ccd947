"""`eyas probe live` as people start it: a command, a run, and a gateway that misbehaves."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.config import Config, dump
from core.render.source import renderer_of
from core.schema import SpendLine
from core.store import read_jsonl
from tests.faults.rig import Gateway, run_config, wait_for

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SAID = (
    " hm</think>Let me look.<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
)


class Desk:
    """A gateway that always says the same, and a folder to ask it from."""

    def __init__(self, gateway: Gateway, folder: Path) -> None:
        self.gateway, self.folder = gateway, folder
        (folder / "p.jsonl").write_text(
            json.dumps({"messages": [{"role": "user", "content": "Look."}], "tools": [TOOL]}) + "\n"
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        (self.folder / "c.toml").write_text(dump(run_config(self.gateway)))
        command = [sys.executable, "-m", "core", "probe", "live", "--config", "c.toml"]
        return subprocess.Popen(
            [*command, "--prompt", "p.jsonl", *words],
            cwd=self.folder,
            env={**os.environ, "OPENROUTER_API_KEY": "k", "PYTHONPATH": str(Path.cwd())},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ask(self, *words: str) -> tuple[int, str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    @property
    def runs(self) -> list[Path]:
        return sorted((self.folder / "runs").glob("probe-*"))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    tokenizer = renderer_of(Config()).tokenizer
    tape = folder / "tape.jsonl"
    tape.write_text(json.dumps({"completion_ids": tokenizer.encode_special(SAID + "<|im_end|>")}))
    made = Gateway(folder, "--replay", str(tape), "--tokens-per-s", "0")
    yield made
    made.close()


@pytest.fixture
def desk(gateway: Gateway, tmp_path: Path) -> Iterator[Desk]:
    yield Desk(gateway, tmp_path)
    gateway.post("/gateway/faults", "")


def test_arms_are_compared_and_billed(desk: Desk) -> None:
    desk.gateway.post("/gateway/faults", "raw_calls:1")
    before = desk.gateway.bill()["total_usd"]
    code, out, err = desk.ask("--arms", "local,declared", "--json", "--one-by-one")
    assert code == 0, err
    report = json.loads(out)
    local, declared = report["answers"]
    assert (local["call_form"], declared["call_form"]) == ("by ids", "raw markers")
    assert local["calls"] == declared["calls"] == ["look"]
    assert (local["verdict"], declared["verdict"]) == ("exact", "consistent")
    assert declared["same_as_local"] is True and declared["bill"] == "billed"
    paid = desk.gateway.bill()["total_usd"] - before
    assert report["spent_usd"] == pytest.approx(paid, abs=1e-9) and paid > 0
    shown = subprocess.run(
        [sys.executable, "-m", "core", "probe", report["path"]],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "1 raw markers" in shown and "declared: the same tokens as local" in shown


def test_nothing_is_sent_that_the_budget_does_not_hold_at_once(desk: Desk) -> None:
    before = desk.gateway.bill()
    code, out, err = desk.ask("--arms", "declared,text", "--budget-usd", "0.0008")
    assert code == 2 and out == ""
    assert "--budget-usd 0.0008 is below the worst case of all 2 requests" in err
    assert desk.gateway.bill() == before and desk.runs == []


def test_a_provider_that_is_always_busy_is_not_waited_for(desk: Desk) -> None:
    desk.gateway.post("/gateway/faults", "rate_limited=600:1")
    code, out, err = desk.ask("--arms", "declared,local", "--timeout-s", "1", "--json")
    assert out, err
    report = json.loads(out)
    assert code == 3 and report["state"] == "halted"
    assert "kept waiting for more than 1 s" in report["reason"]
    declared, local = report["answers"]
    assert (declared["outcome"], declared["error_class"]) == ("failed", "rate_limited")
    assert local["verdict"] == "exact" and report["spent_usd"] == 0.0


def test_ctrl_c_twice_cuts_off_and_books(desk: Desk) -> None:
    desk.gateway.post("/gateway/faults", "hang=600:1")
    process = desk.start("--arms", "declared", "--json")
    wait_for(lambda: bool(desk.runs) and _dispatched(desk.runs[0]), "the request")
    process.send_signal(signal.SIGINT)
    wait_for(lambda: (desk.runs[0] / "HALT").exists(), "the halt")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out, err
    report = json.loads(out)
    assert process.returncode == 3 and report["state"] == "halted"
    assert "ctrl-c again cuts it off" in err
    (answer,) = report["answers"]
    assert answer["outcome"] == "aborted" and answer["bill"] == "uncertain"
    kinds = [line.kind for line in read_jsonl(desk.runs[0] / "spend.jsonl", SpendLine)]
    assert kinds.count("dispatch") == 1 and kinds.count("uncertain") == 1


def _dispatched(run: Path) -> bool:
    return any(line.kind == "dispatch" for line in read_jsonl(run / "spend.jsonl", SpendLine))
