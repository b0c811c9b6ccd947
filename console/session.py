"""One attached run: its state, the task that feeds it, the command connection and the HALT channel.

Lives in the event loop of the app. Knows nothing of widgets: the app polls `state` when it paints.
"""

import asyncio
import time
from collections.abc import Callable

from console.client import HaltChannel, kill_engine, send, start_engine
from console.source import follow, replay
from console.state import ConsoleState
from core import events as ev
from core import view as vw
from core.control import Client
from core.errors import ControlError, EyasError
from core.halting import engine_pid
from core.store import RunDir

Clock = Callable[[], float]
LET_GO_S = 15.0
NOTE_S = 30.0
"""How long the top bar says that events were skipped."""


class Session:
    """`start` begins to follow the run; everything it learns is in `state`."""

    def __init__(
        self,
        run: RunDir,
        read_only: bool = False,
        replay_speed: float = 0.0,
        clock: Clock = time.monotonic,
        wall: Clock = time.time,
    ) -> None:
        self.run = run
        self.state = ConsoleState(run.run_id, read_only)
        self.clock, self.wall = clock, wall
        self.halt_channel: HaltChannel | None = None
        self._replay_speed = replay_speed
        self._link: Client | None = None
        self._noted_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._replay_speed:
            self._task = asyncio.create_task(replay(self.run, self, self._replay_speed))
            return
        self._task = asyncio.create_task(follow(self.run, self, self.state.read_only))
        if not self.state.read_only and engine_pid(self.run.path):
            self._arm()

    def _arm(self) -> None:
        if self.halt_channel is None and not self.state.read_only:
            self.halt_channel = HaltChannel(self.run)
            self.halt_channel.start()

    async def stop(self) -> None:
        """Let go of the run; the run does not notice."""
        if self.halt_channel is not None:
            self.halt_channel.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def tick(self) -> str:
        """Before each paint: copy the HALT link's condition, forget an old note. Returns the error
        of a feed that died, else "".
        """
        state, channel = self.state, self.halt_channel
        state.halt_armed = None if channel is None or state.finished else channel.armed
        if state.link_note and self.clock() - self._noted_at > NOTE_S:
            state.link_note = ""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            error = self._task.exception()
            if error is not None:
                self._task = None
                state.link = "lost"
                return f"{type(error).__name__}: {error}"
        return ""

    # ── what the source tells ────────────────────────────────────────────────────────────────

    def on_link(self, link: str, note: str = "", consoles: int = 0) -> None:
        self.state.link, self.state.link_note = link, note
        self._noted_at = self.clock()
        self.state.consoles = consoles or self.state.consoles
        if link == "live":
            self._arm()

    def on_snapshot(self, view: vw.RunView) -> None:
        self.state.load(view, self.clock())

    def on_event(self, event: ev.Event) -> None:
        self.state.apply(event, self.clock())

    def on_history(self, events: list[ev.Event]) -> None:
        self.state.recall(events)

    def on_open(self, link: Client | None) -> None:
        self._link = link

    def on_crashed(self, crashed: bool) -> None:
        self.state.crashed = crashed and self.state.view.state not in ev.ENDED

    # ── what the operator does ───────────────────────────────────────────────────────────────

    def halt(self, source: str) -> str:
        """Fire at once; returns what to tell the operator."""
        if self.state.read_only:
            return "this console is read-only: eyas halt " + self.run.run_id
        if self.state.finished or self.halt_channel is None:
            return f"nothing to halt: the run is {self.state.state}"
        landed = self.halt_channel.fire(source)
        self.state.halt_pressed_at = self.state.halt_pressed_at or self.wall()
        return "" if landed else "HALT left as a file: the engine's socket does not answer"

    async def command(self, name: str, reason: str = "") -> str:
        """Send a command; returns the run's state. Raises ControlError."""
        if self._link is None:
            raise ControlError(f"{name}: no connection to the engine")
        return await send(self._link, name, reason)

    async def resume(self) -> str:
        return await self._start("resume")

    async def abandon(self) -> str:
        return await self._start("abandon", "--yes")

    async def _start(self, *words: str) -> str:
        """Start the next engine on the same run directory, as soon as the stopped one has let go of
        it. Raises EyasError.
        """
        self.state.halt_pressed_at = 0.0
        deadline = time.monotonic() + LET_GO_S
        while pid := await asyncio.to_thread(engine_pid, self.run.path):
            if time.monotonic() > deadline:
                raise EyasError(f"{words[0]}: engine {pid} has not ended yet; again when it has")
            await asyncio.sleep(0.1)
        problem = await asyncio.to_thread(start_engine, self.run, *words)
        if problem:
            raise EyasError(problem)
        return "an engine was started on this run"

    async def kill(self) -> str:
        return await asyncio.to_thread(kill_engine, self.run)
