"""The engine process: started, watched, halted from every side, resumed, refused; and what it
leaves behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core import events as ev
from core.control import connect
from core.halting import engine_pid, halt_now
from core.journal import load_view, read_journal
from core.pipeline import launch as lc
from core.schema import Rollout, SpendLine
from core.store import (
    RunDir,
    find_run,
    read_jsonl,
    read_manifest,
    read_samples,
    read_status,
    write_manifest,
)
from tests.faults.rig import ROOT, Engine, Gateway, check, new_run, run_config, wait_for

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Slow enough that a halt falls among requests in flight."""
    gateway = Gateway(tmp_path_factory.mktemp("gateway"), "--seed", "1", "--latency-scale", "5")
    yield gateway
    gateway.close()


def billed_before(gateway: Gateway) -> frozenset[str]:
    return frozenset(g["id"] for g in gateway.bill()["generations"])


def last_words(run: RunDir) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(run.output_log.read_text().strip().split("\n")[-1])
    return record


def eyas(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "core", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
    )


def test_a_run_from_launch_to_done_and_again(gateway: Gateway, tmp_path: Path) -> None:
    before = billed_before(gateway)
    run = new_run(run_config(gateway, limit=6), tmp_path, "whole")
    record = lc.launch(lc.Start(run, ["eyas", "run"]))
    assert record["run_id"] == "whole" and record["prompts"] == 8
    assert record["stages"] == ["generate", "reconstruct"]
    assert Path(record["socket"]).is_socket() and engine_pid(run.path) == record["pid"]
    assert os.getsid(record["pid"]) != os.getsid(0)  # a session of its own
    wait_for(lambda: not engine_pid(run.path), "the run to end")
    status, manifest = read_status(run), read_manifest(run)
    assert status is not None and manifest is not None
    assert (status.state, status.exit_code, status.prompts, status.done) == ("done", 0, 8, 8)
    assert (manifest.lives, manifest.argv) == (1, ["eyas", "run"])
    assert last_words(run).items() >= {"event": "done", "run_id": "whole", "exit_code": 0}.items()
    assert not Path(record["socket"]).exists() and not run.reserve.exists()
    books = check(run, gateway.bill(), before)
    assert books.uncertain == 0 and books.spent_usd == pytest.approx(books.billed_usd, abs=1e-9)
    assert books.spent_usd > 0
    assert len(list(read_samples(run))) == 8
    view = load_view(run)
    assert {n: s.status for n, s in view.stages.items()} == {
        "generate": "done",
        "reconstruct": "done",
    }
    assert view.summary is not None and view.summary.data["samples"] == 8
    assert view.stats is not None
    assert view.stats.spent_usd == pytest.approx(books.spent_usd, abs=1e-9)

    assert len(manifest.tokenizer_sha256) == 64

    first = run.samples.joinpath("000000.parquet").read_bytes()
    requests = len(gateway.get("/gateway/requests")["requests"])
    assert Engine(run).wait() == 0  # resume of a finished run: skipped by content
    assert len(gateway.get("/gateway/requests")["requests"]) == requests
    summaries = [s.summary for s in load_view(run).stages.values()]
    assert all(s["skipped"] for s in summaries)

    next(run.samples.glob("*.parquet")).write_bytes(b"damaged")
    assert Engine(run).wait() == 0  # a stage whose output changed is made again, to the same bytes
    assert run.samples.joinpath("000000.parquet").read_bytes() == first


def test_another_tokenizer_is_refused_on_resume(gateway: Gateway, tmp_path: Path) -> None:
    run = new_run(run_config(gateway, limit=6), tmp_path, "mixed")
    manifest = read_manifest(run)
    assert manifest is not None
    write_manifest(run, msgspec.structs.replace(manifest, tokenizer_sha256="0" * 64))
    with pytest.raises(
        lc.LaunchError, match="not the tokenizer that this run began with"
    ) as caught:
        lc.launch(lc.Start(run, []))
    assert caught.value.exit_code == 2
    status = read_status(run)
    assert status is not None and not run.completions.exists()
    assert (status.state, status.exit_code) == ("failed", 2)
    assert "not the tokenizer that this run began with" in status.reason


def halt_by_file(engine: Engine) -> str:
    engine.run.halt_file.write_text("smells\n")
    return "file, HALT, smells"


def halt_by_signal(engine: Engine) -> str:
    engine.process.send_signal(signal.SIGTERM)
    return "signal, SIGTERM"


def halt_by_command_line(engine: Engine) -> str:
    done = eyas("halt", str(engine.run.path), "--reason", "smells", cwd=engine.run.path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{engine.run.run_id}: halting\n"
    return "smells"


@pytest.mark.parametrize("halt", [halt_by_file, halt_by_signal, halt_by_command_line])
def test_halt_from_every_side_then_resume(gateway: Gateway, tmp_path: Path, halt: Any) -> None:
    before = billed_before(gateway)
    arrived = len(gateway.get("/gateway/requests")["requests"])
    run = new_run(run_config(gateway, limit=24), tmp_path, "halted")
    engine = Engine(run)
    engine.until_replies(3)
    words = halt(engine)
    assert engine.wait() == 3
    status = read_status(run)
    assert status is not None and (status.state, status.exit_code) == ("halted", 3)
    assert words in status.reason and last_words(run)["exit_code"] == 3
    view = load_view(run)
    assert view.halt is not None and view.halt.complete
    changes = {e.state: e.ts for e in read_journal(run) if isinstance(e, ev.StateChanged)}
    assert list(changes) == ["starting", "running", "halting", "halted"]
    sent = [line for line in read_jsonl(run.spend, SpendLine) if line.kind == "dispatch"]
    assert max(line.ts for line in sent) <= changes["halting"]  # none is sent from then on
    requests = gateway.get("/gateway/requests")["requests"][arrived:]
    assert 3 <= len(requests) <= len(sent)
    assert all(r["t"] <= view.halt.ts for r in requests)
    finished = {
        e.prompt_id for e in read_journal(run) if isinstance(e, ev.Outcome) and e.outcome == "ok"
    }
    assert 0 < len(finished) < 32

    assert Engine(run).wait() == 0
    again = [e for e in read_journal(run, view.seq) if isinstance(e, ev.Outcome)]
    assert not {e.prompt_id for e in again} & finished  # nothing finished is asked again
    books = check(run, gateway.bill(), before)
    assert books.outcomes.total() == 32 and books.uncertain == 0


def test_a_run_whose_directory_goes_away_stops_asking(gateway: Gateway, tmp_path: Path) -> None:
    arrived = len(gateway.get("/gateway/requests")["requests"])
    run = new_run(run_config(gateway, limit=24), tmp_path, "moved")
    engine = Engine(run)
    engine.until_replies(3)
    moved = RunDir(run.path.rename(tmp_path / "elsewhere"))
    assert engine.wait() == 1
    assert last_words(moved)["exit_code"] == 1
    view = load_view(moved)
    assert (view.state, view.reason) == ("failed", f"{run.path}: is gone; no reply could be kept")
    assert not run.path.exists()
    assert len(gateway.get("/gateway/requests")["requests"]) - arrived < 32


def test_what_a_killed_run_left_is_given_up_and_the_rest_goes_on(
    gateway: Gateway, tmp_path: Path
) -> None:
    before = billed_before(gateway)
    run = new_run(run_config(gateway, limit=24), tmp_path, "given-up")
    engine = Engine(run)
    engine.until_replies(3)
    engine.kill()
    kept = {r.prompt_id for r in read_jsonl(run.completions, Rollout) if r.final}
    name = str(run.path)
    asked = eyas("abandon", name, cwd=tmp_path)
    assert asked.returncode == 2 and asked.stdout == ""
    assert f"{32 - len(kept)} of 32 prompts would never be asked" in asked.stderr
    assert "add --yes to give them up" in asked.stderr and asked.stderr.count("\n") == 1
    arrived = len(gateway.get("/gateway/requests")["requests"])
    done = eyas("abandon", name, "--yes", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("given-up: eyas resume " + name + " goes on with what is there\n")
    assert "what was pending is given up" in done.stdout and "samples kept" not in done.stdout
    assert eyas("resume", name, "--plain", cwd=tmp_path).returncode == 0
    books = check(run, gateway.bill(), before)
    assert books.outcomes.total() == 32 and books.outcomes["refused"] == 32 - len(kept)
    assert len(gateway.get("/gateway/requests")["requests"]) == arrived
    assert {s.prompt_id for s in read_samples(run)} == kept


async def test_consoles_come_and_go_and_drain_ends_the_run(
    gateway: Gateway, tmp_path: Path
) -> None:
    run = new_run(run_config(gateway, limit=600), tmp_path, "drained")  # a minute's work at least
    engine = await asyncio.to_thread(Engine, run)
    await asyncio.to_thread(engine.until_replies, 2)
    viewer = await connect(run, "viewer", "tests")
    kinds: list[str] = []
    seen: list[Any] = []

    async def listen() -> None:
        async for kind, payload in viewer.messages():
            kinds.append(kind)
            seen.append(payload)

    listening = asyncio.create_task(listen())
    refused = await viewer.command("halt")
    assert not refused["ok"] and "not for role viewer" in refused["error"]
    assert engine.alive
    done = await asyncio.to_thread(eyas, "drain", str(run.path), "--reason", "enough", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "drained: draining\n")
    assert await asyncio.to_thread(engine.wait) == 3
    await listening
    await viewer.close()
    assert kinds[0] == "snapshot" and set(kinds) <= {"snapshot", "event", "gap"}
    commands = [e for e in seen if isinstance(e, ev.Command)]
    assert [(c.name, c.uid, c.reason) for c in commands] == [("drain", os.getuid(), "enough")]
    view = load_view(run)
    assert view.state == "halted" and view.reason.startswith("drained; ")
    states = [e.state for e in read_journal(run) if isinstance(e, ev.StateChanged)]
    assert states == ["starting", "running", "draining", "halted"]
    ended = {e.prompt_id for e in read_journal(run) if isinstance(e, ev.Outcome)}
    sent = {s.prompt_id for s in read_jsonl(run.spend, SpendLine) if s.kind == "dispatch"}
    assert ended == sent and 2 <= len(sent) < 800  # what was sent is received, the rest pending
    aborted = [e for e in read_journal(run) if isinstance(e, ev.Outcome) and e.outcome == "aborted"]
    assert aborted == []  # a drain cuts nothing off


def test_a_second_engine_of_a_run_is_refused(gateway: Gateway, tmp_path: Path) -> None:
    run = new_run(run_config(gateway, limit=24), tmp_path, "twice")
    engine = Engine(run)
    engine.until_replies(1)
    with pytest.raises(lc.LaunchError, match="is alive") as caught:
        lc.launch(lc.Start(run, []))
    assert "\n" not in str(caught.value) and engine.alive
    done = eyas("resume", str(run.path), "--detach", cwd=tmp_path)
    assert done.returncode == 2 and "its engine is alive" in done.stderr
    halt_now(run.path, sever=True)
    assert engine.wait() == 3


def test_a_start_that_fails_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}]}\nnot json\n'
    )
    toml = tmp_path / "bad.toml"
    toml.write_text('[[dataset]]\nname = "d"\npath = "bad.jsonl"\n[run]\nmin_free_disk_bytes = 1\n')
    done = eyas("run", str(toml), "--detach", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("eyas: ") and done.stderr.count("\n") == 1
    assert "bad.jsonl:2" in done.stderr and "Traceback" not in done.stderr
    assert list((tmp_path / "runs").iterdir()) == []


def test_an_engine_outlives_its_launcher_and_a_hang_up(gateway: Gateway, tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    from core.config import dump

    toml.write_text(dump(run_config(gateway, limit=12)))
    done = eyas("run", str(toml), "--detach", "--set", "run.name=alone", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    os.kill(record["pid"], signal.SIGHUP)
    run = find_run(record["path"])
    assert run.load_config().run.name == "alone"
    wait_for(lambda: not engine_pid(run.path), "the run to end")
    status = read_status(run)
    assert status is not None and status.state == "done"
    for command in (["status", record["path"], "--json"], ["list", "--json"]):
        shown = eyas(*command, cwd=tmp_path)
        assert json.loads(shown.stdout)["state"] == "done"
    assert str(ROOT) not in record["path"]


def test_few_descriptors_cap_what_is_in_flight(gateway: Gateway, tmp_path: Path) -> None:
    """Case C41: the limit is raised as far as it goes, the cap is shown, the run goes on."""
    run = new_run(
        run_config(gateway, limit=6, generate={"max_in_flight": 5_000}), tmp_path, "narrow"
    )
    engine = [sys.executable, "-P", "-m", "core", "engine", "--run", str(run.path)]
    limited = ["sh", "-c", 'ulimit -Sn 128; ulimit -Hn 256; exec "$@"', "sh", *engine]
    assert subprocess.run(limited, stdout=subprocess.DEVNULL, timeout=120).returncode == 0
    logs = [e for e in read_journal(run) if isinstance(e, ev.Log)]
    (cap,) = [e.message for e in logs if e.message.startswith("concurrency_capped_by_nofile")]
    assert "5000 in flight wanted, 192 possible" in cap
    assert sum(isinstance(e, ev.Outcome) for e in read_journal(run)) == 8


def test_a_tripwire_stops_what_went_wrong_and_says_so(gateway: Gateway, tmp_path: Path) -> None:
    """Every provider rewrites arguments, there is one dataset: nothing would be left to go on
    with."""
    gateway.post("/gateway/faults", "reserialised_args=compact")
    try:
        config = run_config(gateway, limit=48, tripwires={"enabled": True, "min_samples": 8})
        api = msgspec.structs.replace(config, dataset=config.dataset[:1])
        run = new_run(api, tmp_path, "tripped")
        assert Engine(run).wait() == 4
    finally:
        gateway.post("/gateway/faults", "")
    view, status = load_view(run), read_status(run)
    assert status is not None
    assert (view.state, status.state, status.exit_code) == ("tripped", "tripped", 4)
    assert {t.name for t in view.tripwires} == {"mismatch"}
    assert view.tripwires[-1].action == "halt"
    assert all(t.saw and t.advice and t.cost_usd > 0 for t in view.tripwires)
    assert view.tripwires[-1].saw in status.reason
    assert 0 < status.done < 48
