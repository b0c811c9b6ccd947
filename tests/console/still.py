"""The console on a recording, with frozen clocks and no engine: what the pilot tests and the
screenshots look at.
"""

from pathlib import Path
from typing import Any

from console.app import ConsoleApp
from console.screens.board import BoardScreen
from console.session import Session
from console.state import ConsoleState
from core import events as ev
from core.config import Console as ConsoleConfig
from core.store import RunDir
from tests.console import recording

NOW = 100.4
WALL = recording.BASE_TS + 51


class StillSession(Session):
    """Fed by hand; notes what the operator asks for instead of sending it."""

    def __init__(self, run: RunDir, events: list[ev.Event], read_only: bool = False) -> None:
        super().__init__(run, read_only, clock=lambda: NOW, wall=lambda: WALL)
        self.asked: list[str] = []
        for event in events:
            self.state.apply(event, 100.0)
        self.state.link, self.state.attached_seq = "live", self.state.view.seq

    def start(self) -> None:
        """Nothing to follow."""

    def tick(self) -> str:
        self.state.halt_armed = None if self.state.finished else True
        return ""

    def halt(self, source: str) -> str:
        if self.state.read_only:
            return super().halt(source)
        self.asked.append("halt")
        self.state.halt_pressed_at = self.wall()
        return ""

    async def command(self, name: str, reason: str = "") -> str:
        self.asked.append(name)
        return name

    async def resume(self) -> str:
        self.asked.append("resume")
        return "resumed"

    async def abandon(self) -> str:
        self.asked.append("abandon")
        return "an engine was started on this run"

    async def kill(self) -> str:
        self.asked.append("kill")
        return "engine 1 ended on SIGTERM"


class StillApp(ConsoleApp):
    """`phase` of the recording; toasts are kept in `said`."""

    def __init__(
        self,
        phase: str = "generate",
        run: RunDir | None = None,
        read_only: bool = False,
        config: ConsoleConfig | None = None,
        **options: Any,
    ) -> None:
        at = run or RunDir(Path("nowhere") / recording.RUN_ID)  # nothing is read from it
        super().__init__(
            at,
            read_only,
            config,
            clock=lambda: NOW,
            wall=lambda: WALL,
            **options,
        )
        self.still = StillSession(at, recording.events(phase), read_only)
        self.said: list[str] = []

    @property
    def state(self) -> ConsoleState:
        return self.still.state

    def open_run(self, run: RunDir) -> None:
        self.session = self.still
        self.still.state.refresh_hz = self.refresh_hz
        self.push_screen(BoardScreen(self.still))

    def say(self, message: str, severity: str = "information") -> None:
        self.said.append(message)
        super().say(message, severity)

    def shown(self) -> str:
        """The text of the screen, line by line."""
        strips = self.screen._compositor.render_strips()
        return "\n".join(strip.text for strip in strips)
