"""A stage as a child process: events relayed, noise kept apart, stopped, killed, crashed,
orphaned."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from core import events as ev
from core.config import parse
from core.errors import Halted
from core.pipeline.child import StageChild, StageFailedError
from core.pipeline.stages import Stage
from core.store import RunDir, create_run
from tests.faults.rig import ROOT, wait_for

STAGE = Stage("fake", "fake_stage", (), (), ())
HEAD = """
import sys, time
from core import events as ev
from core.errors import Halted, TrainError
def run(run, config, emit, should_stop):
"""
BODIES = {
    "whole": """
    print("noise of a library")
    emit(ev.StageProgress(stage="fake", done=1, total=2))
    emit(ev.Log(message="half way", stage="fake"))
    return {"made": 3}
""",
    "refuses": """
    raise TrainError("loss is NaN at step 7; lower train.lr")
""",
    "breaks": """
    return {}["missing"]
""",
    "dies": """
    import os
    os.abort()
""",
    "waits": """
    emit(ev.Log(message="ready"))
    while not should_stop():
        time.sleep(0.01)
    emit(ev.Log(message="checkpoint written"))
    raise Halted("stopped at step 5")
""",
    "deaf": """
    emit(ev.Log(message="ready"))
    while True:
        time.sleep(0.01)
""",
}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return create_run(parse({"run": {"min_free_disk_bytes": 1}}, "test"), tmp_path, "alpha")


def command(run: RunDir, body: str) -> list[str]:
    folder = run.path.parent.parent / body
    folder.mkdir()
    (folder / "fake_stage.py").write_text(HEAD + BODIES[body])
    code = (
        f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]\n"
        "from pathlib import Path\n"
        "from core.pipeline.child import perform\n"
        "from core.pipeline.stages import Stage\n"
        "from core.store import RunDir\n"
        "stage = Stage('fake', 'fake_stage', (), (), ())\n"
        f"sys.exit(perform(stage, RunDir(Path({str(run.path)!r}))))\n"
    )
    return [sys.executable, "-c", code]


async def carried(run: RunDir, body: str) -> tuple[dict[str, Any], list[ev.Event]]:
    relayed: list[ev.Event] = []
    child = StageChild(run, STAGE, relayed.append, command(run, body))
    return await child.run(), relayed


async def until_ready(relayed: list[ev.Event]) -> None:
    await asyncio.to_thread(wait_for, lambda: bool(relayed), "the child to be ready")


async def test_events_and_summary_come_through_and_noise_does_not(
    run: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    summary, relayed = await carried(run, "whole")
    assert summary == {"made": 3}
    assert [type(e).__name__ for e in relayed] == ["StageProgress", "Log"]
    assert "noise of a library" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("body", "words", "code"),
    [
        ("refuses", "loss is NaN at step 7; lower train.lr", 1),
        ("breaks", "fake: KeyError: 'missing'; see output.log", 1),
        ("dies", "fake: process ended with code -6; see output.log", 1),
    ],
)
async def test_failures_say_what(run: RunDir, body: str, words: str, code: int) -> None:
    with pytest.raises(StageFailedError) as caught:
        await carried(run, body)
    assert str(caught.value) == words and caught.value.exit_code == code


async def test_stop_is_answered_with_a_checkpoint(run: RunDir) -> None:
    relayed: list[ev.Event] = []
    child = StageChild(run, STAGE, relayed.append, command(run, "waits"))
    running = asyncio.create_task(child.run())
    await until_ready(relayed)
    child.stop()
    child.stop()
    with pytest.raises(Halted):
        await running
    assert [e.message for e in relayed if isinstance(e, ev.Log)] == ["ready", "checkpoint written"]


async def test_kill_does_not_ask(run: RunDir) -> None:
    relayed: list[ev.Event] = []
    child = StageChild(run, STAGE, relayed.append, command(run, "deaf"))
    running = asyncio.create_task(child.run())
    await until_ready(relayed)
    child.stop()
    child.kill()
    with pytest.raises(Halted):
        await running


async def test_lines_that_are_no_events_become_log_lines(run: RunDir) -> None:
    relayed: list[ev.Event] = []
    code = "import os; os.write(1, b'not json \\xff\\n'); os.write(1, b'{\"type\":\"unheard\"}\\n')"
    child = StageChild(run, STAGE, relayed.append, [sys.executable, "-c", code])
    assert await child.run() == {}
    assert [e.message for e in relayed if isinstance(e, ev.Log)] == [
        "not json \ufffd",
        '{"type":"unheard"}',
    ]


def test_an_orphan_stops_by_itself(run: RunDir) -> None:
    """Its stdin ends when the engine does, however the engine died."""
    process = subprocess.Popen(
        command(run, "waits"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdin is not None and process.stdout is not None
    assert b"ready" in process.stdout.readline()
    process.stdin.close()
    assert b"checkpoint written" in process.stdout.readline()
    assert process.wait(timeout=60) == 3
    process.stdout.close()


def test_two_children_of_a_run_do_not_overlap(run: RunDir) -> None:
    """The child of a killed engine may still be writing its checkpoint when the next one starts."""
    first = subprocess.Popen(command(run, "deaf"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdin is not None and first.stdout is not None
    assert b"ready" in first.stdout.readline()
    second = subprocess.Popen(command(run, "whole"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert second.stdin is not None and second.stdout is not None
    wait_for(lambda: waits_for_lock(second.pid), "the second child to wait")
    first.kill()
    first.wait()
    assert second.stdout.read().count(b"\n") == 3 and second.wait(timeout=60) == 0
    for process in (first, second):
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def test_an_orphan_that_still_waits_for_its_turn_does_not_begin(run: RunDir) -> None:
    first = subprocess.Popen(command(run, "deaf"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdin is not None and first.stdout is not None
    assert b"ready" in first.stdout.readline()
    second = subprocess.Popen(command(run, "whole"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert second.stdin is not None and second.stdout is not None
    wait_for(lambda: waits_for_lock(second.pid), "the second child to wait")
    before = psutil.Process(second.pid).num_threads()
    second.stdin.close()
    wait_for(lambda: psutil.Process(second.pid).num_threads() < before, "it to notice")
    first.kill()
    first.wait()
    assert second.stdout.read() == b"" and second.wait(timeout=60) == 3
    for pipe in (first.stdin, first.stdout, second.stdout):
        pipe.close()


def waits_for_lock(pid: int) -> bool:
    """A waiting flock shows in /proc/locks behind an arrow."""
    lines = Path("/proc/locks").read_text().splitlines()
    return (
        any("->" in line and f" {pid} " in line for line in lines)
        or not Path(f"/proc/{pid}").exists()
    )
