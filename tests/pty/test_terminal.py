"""What only a real terminal can show: HALT on a stalled link, hang-ups, signals, dumb terminals,
bytes on the wire.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from core.store import RunDir, write_samples
from tests.console.test_unfrozen import long_sample
from tests.pty.terminal import CTRL_C, CTRL_X, F12, ROOT, Terminal, wait_until

ENV = {"TERM": "xterm-256color", "COLORTERM": "", "LANG": "C.UTF-8", "TZ": "UTC"}
Open = Callable[..., Terminal]


class Engine:
    def __init__(self, runs: Path) -> None:
        self.run = RunDir(runs / "live")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.pty.engine", str(self.run.path), "--outcomes", "50"],
            cwd=ROOT,
            start_new_session=True,
        )
        wait_until((self.run.path / "ready").exists, "the engine")

    def commands(self, name: str) -> list[dict[str, object]]:
        path = self.run.path / "commands.jsonl"
        if not path.exists():
            return []
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [line for line in lines if line["name"] == name]

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.process.terminate()
    engine.process.wait(20)


@pytest.fixture
def open_console(tmp_path: Path) -> Iterator[Open]:
    opened: list[Terminal] = []

    def open_one(*arguments: str, **options: object) -> Terminal:
        env = ENV | {"EYAS_RUNS": str(tmp_path)} | options.pop("env", {})  # type: ignore[operator]
        terminal = Terminal(list(arguments), env, **options)  # type: ignore[arg-type]
        opened.append(terminal)
        return terminal

    yield open_one
    for terminal in opened:
        terminal.close()


def test_halt_lands_within_100_ms_and_the_screen_tells(engine: Engine, open_console: Open) -> None:
    console = open_console("live")
    console.wait_for("HALT armed")
    latencies = []
    for n, key in enumerate((F12, CTRL_X, F12), 1):
        pressed = console.send(key)
        wait_until(lambda n=n: len(engine.commands("halt")) == n, "the halt at the engine")  # type: ignore[misc]
        latencies.append((int(str(engine.commands("halt")[-1]["t_ns"])) - pressed) / 1e6)
        console.wait_for("■ HALTED")
        time.sleep(0.3)  # a key that is held down counts once in 250 ms
    assert {c["role"] for c in engine.commands("halt")} == {"halt"}
    assert min(latencies) < 100, latencies
    assert "37 cancelled, 11 received" in console.text
    assert (engine.run.path / "HALT").exists()


def test_halt_lands_while_the_terminal_has_stopped_reading(
    engine: Engine, open_console: Open
) -> None:
    console = open_console("live", size=(120, 36))
    console.wait_for("HALT armed")
    console.stall()
    console.send(F12)
    wait_until(lambda: len(engine.commands("halt")) == 1, "the halt at the engine")
    assert engine.commands("halt")[0]["role"] == "halt"
    console.resume()
    console.wait_for("■ HALTED")
    console.send(b"q")
    assert console.process.wait(20) == 0


def test_halt_lands_while_a_reply_of_2_mb_is_laid_out(engine: Engine, open_console: Open) -> None:
    """Case C84: while threads read, decode and lay out a million tokens."""
    engine.run.samples.mkdir()
    write_samples(engine.run, [long_sample(2_000_000)])
    console = open_console("live", size=(120, 36))
    console.wait_for("HALT armed")
    console.send(b"p")
    console.wait_for("enter open")
    console.send(b"\r")
    latencies = []
    for n in (1, 2, 3):
        time.sleep(0.4)  # one press after another while it is read, decoded and laid out
        pressed = console.send(F12)
        wait_until(lambda n=n: len(engine.commands("halt")) == n, "the halt at the engine")  # type: ignore[misc]
        latencies.append((int(str(engine.commands("halt")[-1]["t_ns"])) - pressed) / 1e6)
    assert max(latencies) < 1_000 and min(latencies) < 100, latencies
    console.wait_for("weather in")
    console.send(b"q")
    assert console.process.wait(20) == 0


def test_the_loop_lives_through_a_stalled_terminal(engine: Engine, open_console: Open) -> None:
    """Nothing is painted onto a terminal that does not read, so nothing blocks and nothing piles
    up.
    """
    console = open_console("live", size=(120, 36))
    console.wait_for("HALT armed")
    console.stall()
    time.sleep(4)  # unchecked, the 30 slots of the writer's queue are full by now
    console.send(b"d")
    wait_until(lambda: len(engine.commands("drain")) == 1, "the event loop to act on a key")
    console.process.send_signal(signal.SIGTERM)
    assert console.process.wait(20) == 143
    assert engine.alive


def test_a_hang_up_ends_the_console_and_nothing_else(engine: Engine, open_console: Open) -> None:
    console = open_console("live")
    console.wait_for("HALT armed")
    console.hang_up()
    assert console.process.wait(20) == -signal.SIGHUP
    assert engine.alive
    assert engine.commands("halt") == []
    again = open_console("live")
    again.wait_for("HALT armed")


def test_end_of_input_without_a_signal_ends_the_console(engine: Engine, open_console: Open) -> None:
    """Case C77: a console whose terminal is gone leaves, instead of spinning on it."""
    console = open_console("live", controlling=False)
    console.wait_for("HALT armed")
    console.hang_up()
    assert console.process.wait(20) == 0
    assert engine.alive


def test_plain_with_closed_stdin_costs_no_cpu(engine: Engine, tmp_path: Path) -> None:
    """Case C77 as written: stdin at its end from the start."""
    with (tmp_path / "out").open("wb") as out:
        console = subprocess.Popen(
            [sys.executable, "-m", "console", "live"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=ROOT,
            env={
                "PATH": "/usr/bin:/bin",
                "EYAS_RUNS": str(tmp_path),
                "XDG_RUNTIME_DIR": str(_runtime()),
            },
        )
        try:
            wait_until(lambda: b"RUNNING" in (tmp_path / "out").read_bytes(), "the first line")
            process = psutil.Process(console.pid)
            before = process.cpu_times()
            time.sleep(2)
            after = process.cpu_times()
            assert after.user + after.system - before.user - before.system < 0.05 * 2 + 0.05
        finally:
            console.terminate()
            console.wait(20)
    assert b"\x1b" not in (tmp_path / "out").read_bytes()
    assert engine.alive


def _runtime() -> Path:
    import os

    return Path(os.environ["XDG_RUNTIME_DIR"])


def test_ctrl_c_says_how_to_leave_and_q_leaves(engine: Engine, open_console: Open) -> None:
    console = open_console("live", size=(100, 30))
    console.wait_for("HALT armed")
    console.send(CTRL_C)
    console.wait_for("the run keeps going")
    assert console.process.poll() is None
    console.send(b"q")
    assert console.process.wait(20) == 0
    assert engine.alive
    assert engine.commands("halt") == []
    wait_until(lambda: b"\x1b[?1049l" in console.output, "the screen was given back")


def test_sigterm_gives_the_terminal_back(engine: Engine, open_console: Open) -> None:
    console = open_console("live")
    console.wait_for("HALT armed")
    console.process.send_signal(signal.SIGTERM)
    assert console.process.wait(20) == 143
    wait_until(lambda: b"\x1b[?1049l" in console.output, "the screen was given back")
    assert b"\x1b[?25h" in console.output


def test_a_dumb_terminal_gets_lines_without_escapes(engine: Engine, open_console: Open) -> None:
    console = open_console("live", env={"TERM": "dumb"}, size=(120, 36))
    wait_until(lambda: b"RUNNING" in console.output, "the first line")
    assert b"\x1b" not in console.output


def test_a_read_only_console_cannot_halt(engine: Engine, open_console: Open) -> None:
    console = open_console("live", "--read-only", size=(100, 30))
    console.wait_for("READ-ONLY")
    console.send(F12)
    console.wait_for("read-only")
    assert engine.commands("halt") == []
    assert not (engine.run.path / "HALT").exists()


def test_an_engine_that_is_killed_is_told(engine: Engine, open_console: Open) -> None:
    console = open_console("live")
    console.wait_for("HALT armed")
    engine.process.kill()
    engine.process.wait(20)
    console.wait_for("✗ CRASHED")
    console.send(b"q")
    assert console.process.wait(20) == 0


@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
def test_two_paints_a_second_stay_under_8_kb(
    engine: Engine, open_console: Open, size: tuple[int, int]
) -> None:
    """Every number moves at 2 Hz and 50 outcomes arrive a second."""
    console = open_console("live", size=size)
    console.wait_for("HALT armed")
    time.sleep(1.5)  # the first full pictures
    before, since = len(console.output), time.monotonic()
    time.sleep(4)
    rate = (len(console.output) - before) / (time.monotonic() - since)
    assert 100 < rate < 8_000
