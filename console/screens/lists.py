"""Screens that are one list: the runs, the log, the errors. `/` filters, enter opens a row."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from textual import on, work
from textual.app import ComposeResult
from textual.widgets import Input

from console import format as f
from console import status
from console.screens.base import BaseScreen
from console.screens.modal import TextScreen
from console.widgets import work_panes
from console.widgets.line import Column, Lazy, Line, Part, Table, fit, line
from console.widgets.lines import Lines
from core.events import ErrorRow
from core.store import RunDir, Status, list_runs, observed_status


class ListScreen(BaseScreen):
    """A header, rows with a cursor, a filter line that appears on `/`."""

    CSS_PATH = "lists.tcss"
    AUTO_FOCUS = "#rows"
    cursor = True
    follow = False
    empty = "nothing here"

    def body(self) -> ComposeResult:
        yield Input(placeholder="filter (regular expression)", id="filter")
        yield Lines("rows", cursor=self.cursor, follow=self.follow)

    @property
    def rows(self) -> Lines:
        return self.query_one("#rows", Lines)

    def start_filter(self) -> None:
        box = self.query_one("#filter", Input)
        box.add_class("-open")
        box.focus()

    def close_filter(self) -> bool:
        """Escape: first clears and closes the filter. Returns whether there was one."""
        box = self.query_one("#filter", Input)
        if not box.has_class("-open"):
            return False
        box.value = ""
        box.remove_class("-open")
        self.rows.focus()
        self.paint()
        return True

    @on(Input.Changed, "#filter")
    def _filtered(self) -> None:
        self.paint()

    @on(Input.Submitted, "#filter")
    def _submitted(self) -> None:
        self.rows.focus()

    def matches(self, text: str) -> bool:
        pattern = self.query_one("#filter", Input).value
        if not pattern:
            return True
        try:
            return re.search(pattern, text, re.IGNORECASE) is not None
        except re.error:
            return pattern.lower() in text.lower()

    @property
    def filtering(self) -> bool:
        return bool(self.query_one("#filter", Input).value)

    def show(self, header: Line | None, lines: Sequence[Line], width: int) -> None:
        self.rows.set_lines(lines or [fit(line((self.empty, "dim")), width)], header)


RUNS = (
    Column("run", 24, "<", 0, grow=30),
    Column("state", 12, "<", 0),
    Column("stage", 12, "<", 1),
    Column("done", 15, ">", 0),
    Column("spent", 9, ">", 0),
    Column("accept", 6, ">", 2),
    Column("last seen", 10, ">", 3),
)


class RunsScreen(ListScreen):
    """All runs of the folder, newest first."""

    heading = "runs"
    footer_names = ("detach", "help", "filter")
    extra_keys = (("enter", "open"),)
    empty = "no runs here yet: eyas demo makes one"

    def __init__(self) -> None:
        super().__init__(None)
        self.found: list[tuple[RunDir, Status]] = []
        self.shown: list[RunDir] = []

    def on_mount(self) -> None:
        super().on_mount()
        self.scan()
        self.set_interval(2.0, self.scan)

    @work(exclusive=True, group="runs")
    async def scan(self) -> None:
        """Look again, off the loop."""
        folder = self.console.runs_folder
        self.found = await asyncio.to_thread(
            lambda: [(r, observed_status(r)) for r in list_runs(folder)]
        )
        self.paint()

    def paint_body(self) -> None:
        width, _ = self.rows.room
        kept = [
            (run, s) for run, s in self.found if self.matches(f"{run.run_id} {s.state} {s.stage}")
        ]
        self.shown = [run for run, _ in kept]
        made, now = Table(RUNS, width), self.console.wall()
        self.show(made.header, Lazy(kept, lambda item: made.row(self._row(item[1], now))), width)

    def _row(self, s: Status, now: float) -> list[Part]:
        mark = status.mark(status.RUN, s.state)
        seen = f.age(now - s.ts) if s.ts else f.NONE
        done = f"{f.count(s.done)} / {f.count(s.prompts)}" if s.prompts else f.NONE
        accept = f.NONE if s.acceptance_length is None else f"{s.acceptance_length:.2f}"
        return [
            (s.run_id, "bold"),
            (mark.text, mark.style),
            (s.stage or f.NONE, "text"),
            done,
            f.usd(s.spent_usd),
            accept,
            (seen, "dim"),
        ]

    def on_lines_chosen(self, message: Lines.Chosen) -> None:
        if 0 <= message.index < len(self.shown):
            self.console.open_run(self.shown[message.index])


class LogScreen(ListScreen):
    """Everything that was said, in the order of the journal. Follows the end until the cursor
    leaves it.
    """

    heading = "log"
    footer_names = ("halt", "back", "filter", "freeze", "help", "detach")
    extra_keys = (("enter", "whole line"),)
    follow = True
    empty = "nothing logged yet"

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self.texts: list[str] = []

    def paint_body(self) -> None:
        assert self.session is not None
        width, _ = self.rows.room
        entries = [
            e
            for e in self.session.state.log_lines()
            if self.matches(f"{e.level} {e.source} {e.text}")
        ]
        at_end = self.rows.cursor >= len(self.texts) - 1
        self.texts = [e.text for e in entries]
        self.show(None, Lazy(entries, lambda e: work_panes.log_line(e, width)), width)
        if at_end and entries:
            self.rows.go(len(entries) - 1)

    def on_lines_chosen(self, message: Lines.Chosen) -> None:
        if 0 <= message.index < len(self.texts):
            self.app.push_screen(TextScreen("log line", self.texts[message.index].split("\n")))


ERRORS = (
    Column("count", 7, ">", 0),
    Column("class", 22, "<", 0, grow=12),
    Column("provider", 14, "<", 0, grow=10),
    Column("last seen", 9, ">", 1),
    Column("example", 24, "<", 2, grow=120),
)


class ErrorsScreen(ListScreen):
    """Errors grouped by provider and class, most frequent first; enter shows one example as it
    came, cleaned.
    """

    heading = "errors"
    footer_names = ("halt", "back", "filter", "probe", "help", "detach")
    extra_keys = (("enter", "example"),)
    empty = "no errors"

    def paint_body(self) -> None:
        assert self.session is not None
        width, _ = self.rows.room
        stats = self.session.state.view.stats
        found = sorted(
            stats.errors if stats else [], key=lambda e: (-e.count, e.provider, e.error_class)
        )
        self.found = [e for e in found if self.matches(f"{e.error_class} {e.provider} {e.example}")]
        made = Table(ERRORS, width)
        self.show(made.header, Lazy(self.found, lambda e: made.row(self._row(e))), width)

    def _row(self, e: ErrorRow) -> list[Part]:
        return [
            (f.count(e.count), "warn"),
            (e.error_class, "bold"),
            e.provider,
            (f.clock(e.last_ts), "dim"),
            (e.example[:200], "dim"),
        ]

    def on_lines_chosen(self, message: Lines.Chosen) -> None:
        if 0 <= message.index < len(self.found):
            e = self.found[message.index]
            intro = (
                f"{f.count(e.count)} times, last at {f.clock(e.last_ts)}. One of them, as received:"
            )
            title = f"{e.error_class} · {e.provider}"
            self.app.push_screen(
                TextScreen(title, [intro, "", *(e.example or "(no body kept)").split("\n")])
            )
