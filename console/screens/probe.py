"""The probe's list of samples."""

import asyncio
from typing import Any, ClassVar

from textual import work
from textual.binding import Binding, BindingType
from textual.widgets import Input

from console import format as f
from console import probe, status
from console.screens.lists import ListScreen
from console.screens.sample import SampleScreen
from console.session import Session
from console.widgets.line import Column, Lazy, Part, Table
from console.widgets.lines import Lines
from core.errors import EyasError

COLUMNS = (
    Column("verdict", 14, "<", 0),
    Column("sample", 10, "<", 0, grow=14),
    Column("dataset", 10, "<", 2, grow=14),
    Column("arm", 8, "<", 0),
    Column("provider", 10, "<", 0, grow=14),
    Column("why", 15, "<", 1, grow=16),
    Column("tokens", 7, ">", 0),
    Column("billed", 7, ">", 3),
    Column("cost", 8, ">", 4),
)
RELOAD_S = 5.0


class ProbeScreen(ListScreen):
    """Samples of the run, worst verdicts first on `o`."""

    heading = "probe"
    footer_names = ("halt", "back", "filter", "help", "detach")
    extra_keys = (("enter", "open"), ("o", "order"))
    empty = "no samples yet"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("o", "order", show=False)]

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.found: list[probe.Row] = []
        self._samples: list[probe.Row] = []
        self._read: tuple[Any, ...] | None = None
        self.shown: list[probe.Row] = []
        self.worst_first = False
        self._chosen_by: tuple[Any, ...] = ()

    def on_mount(self) -> None:
        super().on_mount()
        self.load()
        self.set_interval(RELOAD_S, self.load)

    @work(exclusive=True, group="probe-list")
    async def load(self) -> None:
        """Read the list in a thread; samples only when their files have changed."""
        assert self.session is not None
        run, outcomes = self.session.run, list(self.session.state.view.outcomes)
        try:
            now = await asyncio.to_thread(probe.signature, run)
            if now != self._read:
                self._samples = await asyncio.to_thread(probe.rows_of, run, [])
                self._read = now
            fresh = probe.outcome_rows(self._samples, outcomes)
        except (EyasError, OSError) as e:
            self.console.say(f"samples: {e}", "error")
        else:
            if len(fresh) + len(self._samples) != len(self.found) or not self.found:
                self.found = [*self._samples, *fresh]
        self.paint()

    def action_order(self) -> None:
        self.worst_first = not self.worst_first
        self.paint()

    def paint_body(self) -> None:
        width, _ = self.rows.room
        key = (id(self.found), self.query_one("#filter", Input).value, self.worst_first)
        if key != self._chosen_by:
            self._chosen_by, self.shown = key, self._choose()
        made = Table(COLUMNS, width)
        self.show(made.header, Lazy(self.shown, lambda r: made.row(self._row(r))), width)

    def _choose(self) -> list[probe.Row]:
        """The rows to list; only looked for again when something changed."""
        kept = self.found
        if self.filtering:
            kept = [r for r in kept if self.matches(" ".join(map(str, r[:8])))]
        if self.worst_first:
            order = {name: n for n, name in enumerate(reversed(list(status.VERDICT)))}
            kept = sorted(kept, key=lambda r: order.get(r.verdict, 0))
        return kept

    def _row(self, r: probe.Row) -> list[Part]:
        mark = status.mark(status.VERDICT, r.verdict)
        return [
            (mark.text, mark.style),
            (r.sample_id, "bold"),
            r.dataset,
            r.arm,
            r.provider,
            (r.error_class, "dim"),
            f.count(r.tokens),
            f.count(r.billed),
            f.usd(r.cost_usd),
        ]

    def on_lines_chosen(self, message: Lines.Chosen) -> None:
        if 0 <= message.index < len(self.shown):
            assert self.session is not None
            self.app.push_screen(SampleScreen(self.session, self.shown[message.index]))
