"""A stage as a child process, seen from both ends.

The child prints one event a line on stdout and everything else on stderr; SIGTERM, or the end of
its stdin (the engine died), asks it to stop at the next step with a checkpoint. Exit codes as
everywhere: 0, 1, 2, 3. Knows how to start, relay and stop, not what a stage does."""

import argparse
import asyncio
import contextlib
import fcntl
import importlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from core import events as ev
from core.errors import EXIT_FAILED, EXIT_HALTED, EyasError, Halted
from core.halting import python_command
from core.pipeline.stages import Stage, stage_named
from core.store import RunDir

MAX_LINE_BYTES = 8 << 20
KILL_AFTER_S = 120.0  # a checkpoint of a large drafter on a slow disk


class StageFailedError(EyasError):
    """The stage said what was wrong; `exit_code` is the child's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class StageChild:
    """One running stage. `run` returns its summary; `stop` asks, `kill` does not."""

    def __init__(
        self,
        run: RunDir,
        stage: Stage,
        relay: Callable[[ev.Event], None],
        command: list[str] | None = None,
    ) -> None:
        self._stage = stage
        self._relay = relay
        self._command = command or python_command(
            "core", "stage", stage.name, "--child", "--run", str(run.path)
        )
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._summary: dict[str, Any] = {}
        self._error = ""

    async def run(self) -> dict[str, Any]:
        """Raises Halted (stopped in time, with a checkpoint where the stage has one) or
        StageFailedError."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
        )
        if self._stopping:
            self._terminate()
        assert self._process.stdout is not None
        try:
            async for line in self._process.stdout:
                self._take(line)
            code = await self._process.wait()
        finally:
            if self._process.returncode is None:
                self.kill()
                await self._process.wait()
        if code == 0:
            return self._summary
        if code == EXIT_HALTED or (self._stopping and code < 0):
            raise Halted(f"{self._stage.name}: stopped")
        message = (
            self._error or f"{self._stage.name}: process ended with code {code}; see output.log"
        )
        raise StageFailedError(message, code if code in (1, 2) else EXIT_FAILED)

    def stop(self) -> None:
        """SIGTERM now, SIGKILL if it has not ended after two minutes."""
        if not self._stopping:
            self._stopping = True
            self._terminate()
            asyncio.get_running_loop().call_later(KILL_AFTER_S, self.kill)

    def kill(self) -> None:
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def halt(self, source: str, by: str) -> None:
        self.stop()

    def drain(self) -> None:
        """The stage ends by itself; the one after it does not begin."""

    def sever(self) -> None:
        self.kill()

    def _terminate(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def _take(self, line: bytes) -> None:
        try:
            event = ev.decode(line)
        except (msgspec.MsgspecError, ValueError):
            text = line.decode("utf-8", "replace").rstrip()
            self._relay(ev.Log(message=text[:2_000], stage=self._stage.name))
            return
        if isinstance(event, ev.StageFinished):
            self._summary = event.summary
        elif isinstance(event, ev.StageFailed):
            self._error = event.error
        else:
            self._relay(event)


def main(argv: list[str]) -> int:
    """The child's end, `python -m core stage NAME --child --run DIR`: one stage in this process."""
    parser = argparse.ArgumentParser(prog="python -m core stage")
    parser.add_argument("name")
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--run", type=Path, required=True)
    asked = parser.parse_args(argv)
    return perform(stage_named(asked.name), RunDir(asked.run))


def perform(stage: Stage, run: RunDir) -> int:
    """Run the stage with its events on stdout; returns the exit code."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a ^C in the launcher's terminal is not for us
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    threading.Thread(target=_watch_parent, args=(stop,), daemon=True).start()
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a library prints is not an event
    started = time.monotonic()

    def emit(event: ev.Event) -> None:
        with contextlib.suppress(BrokenPipeError):  # the engine is gone; stop is set by then
            out.write(ev.encode(event) + b"\n")

    with (run.path / ".stage.lock").open("wb") as lock:
        fcntl.flock(
            lock, fcntl.LOCK_EX
        )  # a child of a killed engine may still write its checkpoint
        if stop.is_set():  # the engine died while this one waited: the next child is in the queue
            return EXIT_HALTED
        try:
            config = run.load_config()
            module = importlib.import_module(stage.module)
            summary = module.run(run, config, emit, stop.is_set)
        except Halted:
            return EXIT_HALTED
        except EyasError as e:
            emit(ev.StageFailed(stage=stage.name, error=str(e)))
            return e.exit_code
        except Exception as e:
            traceback.print_exc()
            emit(
                ev.StageFailed(
                    stage=stage.name, error=f"{stage.name}: {type(e).__name__}: {e}; see output.log"
                )
            )
            return EXIT_FAILED
    emit(ev.StageFinished(stage=stage.name, seconds=time.monotonic() - started, summary=summary))
    return EXIT_HALTED if stop.is_set() and summary.get("stopped") else 0


def _watch_parent(stop: threading.Event) -> None:
    while os.read(0, 4_096):
        pass
    stop.set()
