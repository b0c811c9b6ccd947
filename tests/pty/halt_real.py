"""HALT measured end to end: `python -m tests.pty.halt_real [--in-flight 500] [--tries 3] [--only
key,stalled]`.

A real engine with hundreds of requests in flight, a console in a pseudo-terminal, a gateway that
writes down when requests arrive. The key goes in, and the last arrival is compared with it; then
the run is resumed, and halted again. Prints one line a try; after each try the account, the books
and the replies are checked, and the run is finished where the last column says so. A violation is
an AssertionError."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from core import events as ev
from core.halting import engine_pid
from core.store import read_status
from tests.faults.rig import ROOT, wait_for
from tests.pty.halt_load import Arrivals, Load, LoadedRun
from tests.pty.terminal import ESC, F12, Terminal

PROMISE_S = 0.1
FILE_PROMISE_S = 0.3
"""A HALT file is seen within 200 ms; then the gate closes as for a key."""
SLOW_LINK_BYTES_S = 8_000
TERMINAL_ENV = {"TERM": "xterm-256color", "COLORTERM": "", "LANG": "C.UTF-8", "TZ": "UTC"}
MODES = ("key", "stalled", "slow", "drain", "sever", "cli", "file", "sigterm")


class Try(NamedTuple):
    """`took_s`: how long the command that halted ran, where it is one."""

    mode: str
    seen: Arrivals
    account: ev.Halt
    billed_usd: float
    stopped_s: float
    took_s: float | None = None


# ── one console ─────────────────────────────────────────────────────────────────────────────


@contextmanager
def console(loaded: LoadedRun) -> Iterator[Terminal]:
    terminal = Terminal([str(loaded.run.path)], TERMINAL_ENV | loaded.env, size=(120, 36))
    try:
        until_armed(terminal)
        yield terminal
    finally:
        terminal.close()


def until_armed(terminal: Terminal) -> None:
    terminal.wait_for("RUNNING", 60)
    terminal.wait_for("HALT armed", 60)


def press(loaded: LoadedRun, terminal: Terminal, key: bytes) -> float:
    """The key, and the wall-clock time just before it."""
    loaded.until_steady()
    now = time.time()
    terminal.send(key)
    return now


def resume_by_key(loaded: LoadedRun, terminal: Terminal) -> None:
    """`r`, then the confirmation's second button; the board must show the new engine."""
    loaded.forget()
    terminal.wait_for("r resume")
    terminal.send(b"r")
    terminal.wait_for("Resume the run?")
    terminal.confirm("Stay halted", "Resume")
    terminal.wait_until(lambda: bool(engine_pid(loaded.run.path)), "an engine after `r`", 60)
    until_armed(terminal)


def resume_by_command(loaded: LoadedRun) -> None:
    loaded.forget()
    loaded.eyas("resume", str(loaded.run.path), "--detach")


def measured(
    mode: str, loaded: LoadedRun, moment: float, took_s: float | None = None, source: str = ""
) -> Try:
    """Wait for the engine's end, then check everything that must hold."""
    loaded.until_stopped()
    stopped_s = time.time() - moment
    account = loaded.check_stopped()
    if source:
        assert account.source == source, account
    return Try(
        mode,
        loaded.arrivals_at(moment),
        account,
        loaded.gateway.bill()["total_usd"],
        stopped_s,
        took_s,
    )


def shows_account(terminal: Terminal, account: ev.Halt) -> None:
    """The board says HALTED, with the halt's own numbers."""
    terminal.wait_for("■ HALTED", 30)
    terminal.wait_for(f"{account.cancelled:,} cancelled, {account.received:,} received")
    terminal.wait_for("HALTED")


# ── one try of each way ─────────────────────────────────────────────────────────────────────


def by_key(loaded: LoadedRun, terminal: Terminal) -> Try:
    moment = press(loaded, terminal, F12)
    tried = measured("key", loaded, moment, source="command")
    shows_account(terminal, tried.account)
    return tried


def by_key_stalled(loaded: LoadedRun, terminal: Terminal) -> Try:
    """The terminal does not read: what the console writes is stuck in it."""
    terminal.stall()
    moment = press(loaded, terminal, F12)
    tried = measured("stalled", loaded, moment, source="command")
    terminal.resume()
    shows_account(terminal, tried.account)
    return tried


def by_key_slow(loaded: LoadedRun, terminal: Terminal) -> Try:
    """8 KB/s, and a link that is full: screens change faster than it carries them."""
    terminal.throttle(SLOW_LINK_BYTES_S)
    loaded.until_steady()
    for _ in range(6):
        terminal.send(b"l")
        time.sleep(0.15)
        terminal.send(ESC)
        time.sleep(0.15)
    moment = press(loaded, terminal, F12)
    tried = measured("slow", loaded, moment, source="command")
    terminal.throttle(0)
    shows_account(terminal, tried.account)
    return tried


def by_drain(loaded: LoadedRun, terminal: Terminal) -> Try:
    """`d`: nothing new, everything in flight is received."""
    moment = press(loaded, terminal, b"d")
    terminal.wait_for("DRAINING")
    tried = measured("drain", loaded, moment)
    account = tried.account
    assert account.cancelled == 0 and account.received >= 0.5 * loaded.load.in_flight, account
    terminal.wait_for("■ HALTED", 30)
    return tried


def by_sever(loaded: LoadedRun, terminal: Terminal) -> Try:
    """HALT, then `X` while paid replies still arrive: they are cut, their cost is looked up."""
    moment = press(loaded, terminal, F12)
    terminal.wait_for("X sever")
    terminal.send(b"X")
    terminal.wait_for("Sever everything?")
    terminal.confirm("Let them arrive", "Sever")
    tried = measured("sever", loaded, moment, source="command")
    assert tried.account.severed > 0, tried.account
    shows_account(terminal, tried.account)
    return tried


def eyas_command() -> list[str]:
    """The installed command, else the module."""
    script = Path(sys.executable).with_name("eyas")
    return [str(script)] if script.exists() else [sys.executable, "-P", "-m", "core"]


def by_cli(loaded: LoadedRun) -> Try:
    command = [*eyas_command(), "halt", str(loaded.run.path)]
    loaded.until_steady()
    moment = time.time()
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | loaded.env, check=True
    )
    took_s = time.time() - moment
    assert done.stdout == f"{loaded.run.run_id}: halting\n", done
    return measured("cli", loaded, moment, took_s)


def by_file(loaded: LoadedRun) -> Try:
    loaded.until_steady()
    moment = time.time()
    loaded.run.halt_file.touch()
    return measured("file", loaded, moment, source="file")


def by_signal(loaded: LoadedRun) -> Try:
    loaded.until_steady()
    moment = time.time()
    os.kill(engine_pid(loaded.run.path), signal.SIGTERM)
    return measured("sigterm", loaded, moment, source="signal")


WITH_CONSOLE: dict[str, Callable[[LoadedRun, Terminal], Try]] = {
    "key": by_key,
    "stalled": by_key_stalled,
    "slow": by_key_slow,
    "drain": by_drain,
    "sever": by_sever,
}
WITHOUT: dict[str, Callable[[LoadedRun], Try]] = {
    "cli": by_cli,
    "file": by_file,
    "sigterm": by_signal,
}


# ── runs of tries ───────────────────────────────────────────────────────────────────────────


def finish(loaded: LoadedRun) -> None:
    """Let the resumed run end by itself; every prompt has one outcome, none was asked again."""
    wait_for(lambda: not engine_pid(loaded.run.path), "the run to be done", 600)
    loaded.check_done()


def console_tries(mode: str, loaded: LoadedRun, tries: int) -> Iterator[Try]:
    with console(loaded) as terminal:
        for _ in range(tries):
            yield WITH_CONSOLE[mode](loaded, terminal)
            resume_by_key(loaded, terminal)
        finish(loaded)
        terminal.wait_for("DONE", 30)
        terminal.wait_for("What this run made")
        terminal.send(ESC)
        wait_for(lambda: "What this run made" not in terminal.text, "the last page to close")
        terminal.send(b"q")
        wait_for(lambda: terminal.process.poll() is not None, "the console's end")
        assert terminal.process.returncode == 0


def plain_tries(mode: str, loaded: LoadedRun, tries: int) -> Iterator[Try]:
    for _ in range(tries):
        yield WITHOUT[mode](loaded)
        resume_by_command(loaded)
    if mode == "cli":
        names = foreign_modules(loaded)
        say(f"{'':<8} third-party modules loaded by halt: {', '.join(names) or 'none'}")
        resume_by_command(loaded)
    finish(loaded)


def foreign_modules(loaded: LoadedRun) -> list[str]:
    """What `eyas halt` loads beside the standard library and our own files, while it halts. What an
    interpreter of this environment loads by itself (.pth files) does not count.
    """
    loaded.until_steady()
    code = (
        "import sys; before = set(sys.modules)\n"
        "from core.cli import main\n"
        f"main(['halt', {str(loaded.run.path)!r}])\n"
        "names = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "print(*sorted(names - set(sys.stdlib_module_names) - {'core'}), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | loaded.env,
        check=True,
    )
    loaded.until_stopped()
    loaded.check_stopped()
    return done.stderr.split()


HEADER = (
    f"{'way':<8} {'in flight':>9} {'arrivals/s':>10} {'last ms':>8} {'late':>4} {'ended s':>7} "
    f"{'cancelled':>9} {'received':>8} {'severed':>7} {'spent $':>9} {'bill $':>9} "
    f"{'uncertain':>9} {'saved $':>9} {'command ms':>10}"
)


def row(tried: Try) -> str:
    seen, account = tried.seen, tried.account
    took = "" if tried.took_s is None else f"{tried.took_s * 1e3:.0f}"
    return (
        f"{tried.mode:<8} {seen.in_flight:>9} {seen.per_s:>10.1f} {seen.last_s * 1e3:>8.1f} "
        f"{seen.late:>4} {tried.stopped_s:>7.1f} {account.cancelled:>9} {account.received:>8} "
        f"{account.severed:>7} {account.spent_usd:>9.6f} {tried.billed_usd:>9.6f} "
        f"{account.uncertain_usd:>9.6f} {account.saved_usd:>9.6f} {took:>10}"
    )


def promised_s(tried: Try) -> float:
    """A command's moment is its start: it promises for the time after its end."""
    return (FILE_PROMISE_S if tried.mode == "file" else PROMISE_S) + (tried.took_s or 0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-flight", type=int, default=500)
    parser.add_argument("--tokens-per-s", type=float, default=5.0, help="of each reply")
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--only", default=",".join(MODES))
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # engines and gateways are ended too
    load = Load(asked.in_flight, asked.tokens_per_s, int(asked.in_flight * (2.5 * asked.tries + 2)))
    say(HEADER)
    broken = 0
    for mode in asked.only.split(","):
        with tempfile.TemporaryDirectory(prefix="eyas-halt-") as folder:
            broken += one_mode(mode, Path(folder), load, asked.tries)
    say(f"{broken} of all tries later than promised" if broken else "every try within its promise")
    return 1 if broken else 0


def one_mode(mode: str, folder: Path, load: Load, tries: int) -> int:
    """Returns the number of tries whose last request came too late."""
    runtime = folder / "run"
    runtime.mkdir(mode=0o700)
    os.environ["XDG_RUNTIME_DIR"] = str(runtime)
    loaded = LoadedRun(folder, load)
    try:
        go = console_tries if mode in WITH_CONSOLE else plain_tries
        late = 0
        for tried in go(mode, loaded, tries):
            say(row(tried))
            late += tried.seen.last_s > promised_s(tried)
        status = read_status(loaded.run)
        assert status is not None
        say(f"{'':<8} resumed {tries} times, {status.state}: {status.ok} ok of {status.prompts}")
        return late
    finally:
        loaded.close()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
