"""The judging process hangs, the engine is killed: what had arrived is judged by the next life."""

import contextlib
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest

from core.schema import UNJUDGED, Rollout, SpendLine
from core.store import RunDir, read_jsonl
from tests.faults.rig import Engine, Gateway, check, new_run, run_config, wait_for

PROMPTS = 24


def judging(engine: Engine) -> psutil.Process | None:
    for child in psutil.Process(engine.process.pid).children():
        with contextlib.suppress(psutil.Error):  # others come and go
            if child.cmdline()[-2:] == ["core", "judge"]:
                return child
    return None


def unjudged(run: RunDir) -> set[str]:
    lines = read_jsonl(run.completions, Rollout) if run.completions.exists() else ()
    return {line.prompt_id for line in lines if line.error_class == UNJUDGED}


def killed(gateway: Gateway, folder: Path) -> tuple[RunDir, set[str]]:
    """A run whose engine died while its judging process hung, and whose replies had waited."""
    config = run_config(gateway, PROMPTS, generate={"max_in_flight": 256})
    run = new_run(config, folder, "killed")
    engine = Engine(run)
    wait_for(lambda: judging(engine) is not None, "the judging process")
    judge = judging(engine)
    assert judge is not None
    judge.suspend()
    wait_for(lambda: len(unjudged(run)) == PROMPTS + PROMPTS // 3, "replies without verdict")
    engine.kill()
    judge.send_signal(signal.SIGKILL)
    return run, unjudged(run)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_replies_that_waited_for_a_verdict_at_a_kill_are_not_asked_again(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, "--seed", "2", "--latency-scale", "1")
    try:
        run, waited = killed(gateway, tmp_path)
        engine = Engine(run)
        assert engine.wait() == 0
        books = check(run, gateway.bill())
    finally:
        gateway.close()
    assert books.outcomes.total() == len(waited) == PROMPTS + PROMPTS // 3
    sent = Counter(x.prompt_id for x in read_jsonl(run.spend, SpendLine) if x.kind == "dispatch")
    finals = [r for r in read_jsonl(run.completions, Rollout) if r.final]
    again = {r.prompt_id for r in finals if r.attempt > 1}
    assert {p for p, n in sent.items() if n > 1} == again
    assert len(again) <= PROMPTS // 8, "a reply may have to be asked again for its own sake"
    assert books.uncertain == books.unseen == 0


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_giving_up_after_the_kill_keeps_them(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, "--seed", "2", "--latency-scale", "1")
    try:
        run, waited = killed(gateway, tmp_path)
        sent = len(gateway.bill()["generations"])
        assert Engine(run, "--only", "generate", "--abandon").wait() == 0
        bill = gateway.bill()
        books = check(run, bill)
    finally:
        gateway.close()
    assert len(bill["generations"]) == sent
    assert books.outcomes["refused"] == 0 and books.outcomes.total() == len(waited)
    assert books.outcomes["ok"] >= len(waited) - PROMPTS // 8
    assert books.uncertain == books.unseen == 0
