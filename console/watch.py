"""`eyas watch RUN --plain`: a run as lines, one every ten seconds and one at once for whatever
changes it.

What CI, pipes and screen readers get; the exit code is the run's.
"""

import asyncio
import sys
import time

from rich.console import Console
from rich.text import Text

from console import format as f
from console import status
from console.plain import STYLE, make_console, print_summary, status_line
from console.sanitize import clean
from console.source import follow
from console.state import ConsoleState
from core import events as ev
from core import view as vw
from core.control import Client
from core.errors import EXIT_DONE, EXIT_FAILED, EXIT_HALTED, EXIT_TRIPWIRE
from core.store import RunDir

EXIT_OF = {
    "done": EXIT_DONE,
    "failed": EXIT_FAILED,
    "halted": EXIT_HALTED,
    "tripped": EXIT_TRIPWIRE,
    "crashed": EXIT_FAILED,
}
WATCH_S = 10.0


class Watcher:
    """Prints a line every ten seconds, and at once whatever changes the run. A `Sink` of
    console.source.
    """

    def __init__(self, run: RunDir, out: Console, every_s: float = WATCH_S) -> None:
        self.state = ConsoleState(run.run_id, read_only=True)
        self.out, self.every_s = out, every_s
        self.ended = asyncio.Event()

    def say(self, message: str, style: str = "") -> None:
        self.out.print(Text(message, style=style), end="\n")

    def on_link(self, link: str, note: str = "", consoles: int = 0) -> None:
        if link != self.state.link and link in ("lost", "ended"):
            self.say(
                f"{f.clock(time.time())} link: {status.LINK[link].word} {clean(note)}".rstrip()
            )
        self.state.link = link

    def on_snapshot(self, view: vw.RunView) -> None:
        self.state.load(view, time.monotonic())
        if view.state in EXIT_OF and self.state.link != "live":
            self._end()
        else:
            self.say(f"{f.clock(view.ts)} {status_line(self.state, time.time())}")

    def on_event(self, event: ev.Event) -> None:
        self.state.apply(event, time.monotonic())
        ends = isinstance(event, ev.StateChanged) and event.state in EXIT_OF
        said = ends or isinstance(event, ev.StageFailed)  # by the last line and the error
        for entry in [] if said else self.state.log_lines()[-3:]:
            if entry.seq == event.seq:
                style = STYLE.get(status.mark(status.LOG, entry.level).style, "")
                self.say(f"{f.clock(entry.ts)} {entry.level}: {clean(entry.text)}", style)
        if ends:
            self._end()

    def on_history(self, events: list[ev.Event]) -> None:
        self.state.recall(events)

    def on_open(self, link: Client | None) -> None:
        """Nothing to do: a watcher sends no commands."""

    def on_crashed(self, crashed: bool) -> None:
        if crashed and self.state.view.state not in EXIT_OF:
            self.state.crashed = True
            what = f"CRASHED: the engine is gone without a word; eyas resume {self.state.run_id}"
            self.say(f"{f.clock(time.time())} {what}", STYLE["error"])
            self.ended.set()

    def _end(self) -> None:
        if not self.ended.is_set():
            self.ended.set()
            view = self.state.view
            failed = view.state == "failed"
            line = status_line(self.state, time.time(), with_reason=not failed)
            self.say(f"{f.clock(view.ts)} {line}")
            if failed and view.reason:
                sys.stderr.write(f"eyas: {clean(view.reason)}\n")
            print_summary(self.out, self.state)


async def watch(run: RunDir, out: Console | None = None, every_s: float = WATCH_S) -> int:
    """Follow until the run ends; the exit code is the run's."""
    watcher = Watcher(run, out or make_console(), every_s)
    task = asyncio.create_task(follow(run, watcher, read_only=True))
    try:
        while not watcher.ended.is_set():
            try:
                await asyncio.wait_for(watcher.ended.wait(), watcher.every_s)
            except TimeoutError:
                watcher.say(f"{f.clock(time.time())} {status_line(watcher.state, time.time())}")
            if task.done():
                task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return EXIT_OF.get(watcher.state.state, EXIT_DONE)
