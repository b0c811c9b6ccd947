"""A stand-in engine: real journal and control server, recorded numbers, no work. Run as a process
by the pty tests.

`python -m tests.pty.engine RUN [--hz N] [--outcomes N]` writes `ready` when the socket is bound,
and one line `{"t_ns": monotonic, "name", "role", "client"}` per command into RUN/commands.jsonl.
"""

import argparse
import asyncio
import json
import random
import signal
import time
from pathlib import Path

import msgspec

from core import events as ev
from core.config import Config
from core.control import CommandRequest, ControlServer, Peer
from core.journal import Journal
from core.store import RunDir, make_manifest, write_manifest
from tests.console import recording


class Engine:
    """Answers commands the way an engine does, and keeps the numbers moving."""

    def __init__(self, run: RunDir, hz: float, outcomes_per_s: float) -> None:
        self.run, self.hz, self.outcomes_per_s = run, hz, outcomes_per_s
        write_manifest(run, make_manifest(run, Config(), ["eyas", "demo"]))
        self.journal = Journal(run)
        self.server = ControlServer(run, self.handle, lambda: self.journal.view)
        self.halted = False

    def handle(self, request: CommandRequest, peer: Peer) -> str:
        line = {
            "t_ns": time.monotonic_ns(),
            "name": request.name,
            "role": peer.role,
            "client": peer.client,
        }
        with (self.run.path / "commands.jsonl").open("a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")
        by = peer.client.split("/")[0]
        self.journal.emit(ev.Command(name=request.name, by=by, uid=peer.uid, reason=request.reason))
        if request.name == "halt" and not self.halted:
            self.halted = True
            self.journal.emit(ev.StateChanged(state="halting", reason=f"halt by {by}"))
            self.journal.emit(
                ev.Halt(source="key", by=by, cancelled=37, received=11, complete=True)
            )
            self.journal.emit(ev.StateChanged(state="halted", reason=f"halt by {by}"))
        elif request.name == "resume":
            self.halted = False
            self.journal.emit(ev.StateChanged(state="running"))
        return self.journal.view.state

    async def serve(self) -> None:
        await self.server.start()
        self.journal.subscribe(self.server.publish)
        for event in recording.events("generate"):
            self.journal.emit(msgspec.structs.replace(event, seq=0))
        (self.run.path / "ready").touch()
        rng = random.Random(1)
        tick, owed = 100, 0.0
        while True:
            await asyncio.sleep(1 / self.hz)
            if self.halted:
                continue
            tick += 1
            done = 119 + tick % 80
            self.journal.emit(recording.stats(tick, done, rng))
            if tick % 2 == 0:
                self.journal.emit(recording.host(tick, rng))
            owed += self.outcomes_per_s / self.hz
            while owed >= 1:
                owed -= 1
                self.journal.emit(recording.outcome(tick))


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--hz", type=float, default=2.0)
    parser.add_argument("--outcomes", type=float, default=0.0)
    options = parser.parse_args()
    run = RunDir(options.run)
    run.path.mkdir(parents=True, exist_ok=True)
    engine = Engine(run, options.hz, options.outcomes)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        await engine.serve()
    except asyncio.CancelledError:
        await engine.server.close()
        engine.journal.close()


if __name__ == "__main__":
    asyncio.run(main())
