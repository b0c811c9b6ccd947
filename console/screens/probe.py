"""The probe: the list of samples, and one sample opened: its verdict with the evidence first, then
its tokens.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input

from console import actions, probe, status
from console import format as f
from console.sanitize import clean, wrap
from console.screens.base import BaseScreen
from console.screens.lists import ListScreen
from console.session import Session
from console.widgets import tokens as tk
from console.widgets.align import Difference, difference
from console.widgets.evidence import evidence
from console.widgets.flow import Flow, Headed
from console.widgets.line import Column, Lazy, Line, Part, Table, fit, line
from console.widgets.lines import Lines
from core.errors import EyasError
from core.schema import Sample

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
LONG_TOKENS, LONG_CHARS = 4_000, 20_000
"""More than this is laid out in a thread: 4,000 tokens take 20 ms, a reply of 2 MB seconds."""
FIRST_PAGE = 1_000
"""Tokens or characters that are shown meanwhile."""


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
        self.shown: list[probe.Row] = []
        self.worst_first = False
        self._chosen_by: tuple[Any, ...] = ()

    def on_mount(self) -> None:
        super().on_mount()
        self.load()
        self.set_interval(RELOAD_S, self.load)

    @work(exclusive=True, group="probe-list")
    async def load(self) -> None:
        """Read the list in a thread."""
        assert self.session is not None
        outcomes = list(self.session.state.view.outcomes)
        try:
            self.found = await asyncio.to_thread(probe.rows_of, self.session.run, outcomes)
        except (EyasError, OSError) as e:
            self.console.say(f"samples: {e}", "error")
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
            self.app.push_screen(SampleScreen(self.session, self.shown[message.index], self.found))


class SampleScreen(BaseScreen):
    CSS_PATH = "probe.tcss"
    AUTO_FOCUS = "#tokens"
    heading = "sample"
    footer_names = ("halt", "back", "help", "detach")
    extra_keys = actions.SAMPLE_KEYS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "hunk(1)", show=False),
        Binding("p", "hunk(-1)", show=False),
        Binding("f", "option('only_diffs')", show=False),
        Binding("i", "option('ids')", show=False),
        Binding("w", "option('spaces')", show=False),
        Binding("b", "option('bytes')", show=False),
        Binding("t,d", "mode", show=False),
    ]

    def __init__(
        self, session: Session, row: probe.Row, rows: list[probe.Row], against: str = ""
    ) -> None:
        super().__init__(session)
        self._row, self._rows, self._against = row, rows, against
        self.opened: probe.Opened | None = None
        self.options = {True: tk.Options(ids=True), False: tk.Options()}  # by show_diff
        self.diff: Difference | None = None
        self.show_diff = False
        self._left: list[tk.Token] = []
        self._right: list[tk.Token] = []
        self._tokens: list[tk.Token] = []
        self._table: tk.DiffTable | None = None
        self._drawn: tuple[Any, ...] = ()
        self._mask: list[bool] = []
        self._laid: tuple[tuple[Any, ...], Sequence[Line]] = ((), [])
        self._stop_layout = threading.Event()

    def body(self) -> ComposeResult:
        yield Lines("evidence", focusable=False)
        yield Lines("tokens", cursor=True)

    def on_mount(self) -> None:
        super().on_mount()
        self.load()

    @work(exclusive=True, group="probe-open")
    async def load(self) -> None:
        """Read, decode and align in a thread; the screen stays alive."""
        assert self.session is not None
        try:
            opened = await asyncio.to_thread(
                probe.open_sample, self.session.run, self._row, self._rows, self._against
            )
            await asyncio.to_thread(self._prepare, opened)
        except (EyasError, OSError) as e:
            self.console.say(f"sample: {e}", "error")
            return
        self.opened = opened
        self.show_diff = self.diff is not None and not self.diff.identical
        self._drawn = ()
        self.paint()
        if self.show_diff and self.diff is not None:
            self.call_after_refresh(self.action_hunk, 1)

    def _prepare(self, opened: probe.Opened) -> None:
        """In a thread: plain lists only, no widget is touched."""
        sample, twin = opened.sample, opened.twin
        if sample is None:
            return
        decoder = opened.tokenizer or _NoTokenizer()
        self._tokens = tk.tokens_of(decoder, sample.token_ids)
        self._mask = sample.loss_mask
        if twin is None:
            return
        local, other = (sample, twin) if sample.arm == "local" else (twin, sample)
        same_prompt = local.token_ids[: local.prompt_len] == other.token_ids[: other.prompt_len]
        a = local.completion_ids if same_prompt else local.token_ids
        b = other.completion_ids if same_prompt else other.token_ids
        self._left, self._right = tk.tokens_of(decoder, a), tk.tokens_of(decoder, b)
        self.diff = difference(a, b)

    @property
    def names(self) -> tuple[str, str]:
        """What stands at the left and at the right of the difference."""
        assert self.opened is not None
        sample, twin = self.opened.sample, self.opened.twin
        other = twin if sample is None or sample.arm == "local" else sample
        return "local", (other.provider or other.backend) if other else "API"

    def paint_body(self) -> None:
        head, body = self.query_one("#evidence", Lines), self.query_one("#tokens", Lines)
        width = self.size.width - 2
        opened = self.opened
        if opened is None:
            head.set_lines([fit(line(("reading …", "dim")), width)])
            return
        options = self.options[self.show_diff]
        key = (options, self.show_diff, body.room, self.size)
        if key == self._drawn:
            return
        self._drawn = key
        lines = evidence(opened, width)
        if self.diff is not None:
            text, style = tk.headline(self.diff, self._left, self._right, self.names)
            lines += [line((part, style)) for part in wrap(text, width)]
        head.styles.height = len(lines)
        head.set_lines(lines)
        body.has_cursor = self.show_diff
        cells = body.room[0]
        if self.show_diff and self.diff is not None:
            self._table = tk.DiffTable(self.diff, self._left, self._right, cells, options)
            body.set_lines(self._table, self._table.header(self.names))
        elif self._laid[0] == key:
            body.set_lines(self._laid[1])
        elif len(self._tokens) > LONG_TOKENS or len(opened.raw) > LONG_CHARS:
            body.set_lines([*self._text(opened, cells, FIRST_PAGE), line(("laying out …", "dim"))])
            self._lay_out(key, cells)
        else:
            body.set_lines(self._text(opened, cells))

    @work(exclusive=True, group="probe-layout")
    async def _lay_out(self, key: tuple[Any, ...], cells: int) -> None:
        """In a thread that gives up when its lines are no longer wanted: leaving the console waits
        for its threads. No large argument: Textual writes the repr of each into a worker's
        description.
        """
        opened = self.opened
        assert opened is not None
        self._stop_layout.set()
        stop = self._stop_layout = threading.Event()
        lines = await asyncio.to_thread(self._text, opened, cells, None, stop.is_set)
        self._laid = (key, lines)
        self._drawn = ()
        self.paint()

    def on_unmount(self) -> None:
        self._stop_layout.set()

    def _text(
        self,
        opened: probe.Opened,
        cells: int,
        most: int | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Sequence[Line]:
        """The sample as it reads, or the reply as it came while there are no ids; `most` tokens or
        characters of it.
        """
        if opened.sample is not None:
            return self._flow(opened.sample, cells, most, stop)
        raw = opened.raw or "no reply was kept for this prompt"
        return [line(part) for part in wrap(raw[:most], cells)]

    def _flow(
        self, sample: Sample, cells: int, most: int | None, stop: Callable[[], bool]
    ) -> Sequence[Line]:
        at = sample.prompt_len
        made = f"completion · {len(self._tokens) - at:,} tokens"
        if sample.masked:
            made += f", {len(sample.masked):,} taken out of the loss by the audit"
        prompt = [line((f"prompt · {at:,} tokens, outside the loss", "dim"))]
        completion = [line(" "), line((made, "dim"))]
        flow = Flow(self._tokens[:most], at, cells, self.options[False], self._mask, stop)
        return Headed(flow, prompt, flow.prompt_rows, completion)

    def action_option(self, name: str) -> None:
        now = self.options[self.show_diff]
        self.options[self.show_diff] = now._replace(**{name: not getattr(now, name)})
        self.paint()

    def action_mode(self) -> None:
        if self.diff is None:
            self.console.say("no local twin of this sample to compare with")
            return
        self.show_diff = not self.show_diff
        self.paint()

    def action_hunk(self, by: int) -> None:
        body = self.query_one("#tokens", Lines)
        if not self.show_diff or self.diff is None or self._table is None:
            return
        wanted = set(self.diff.hunks)
        places = [at for at, row in enumerate(self._table.visible) if row in wanted]
        if not places:
            return
        here = body.cursor
        if by > 0:
            target = next((p for p in places if p > here or (p == here == 0)), places[0])
        else:
            target = next((p for p in reversed(places) if p < here), places[-1])
        body.go(target)

    def note(self, width: int) -> str:
        if width < 100:
            return ""
        return f"sample {clean(self._row.sample_id)}"


class _NoTokenizer:
    """Stands in when the run's tokenizer cannot be read: every token is its number."""

    vocab_size = 0

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def is_special(self, token_id: int) -> bool:
        return False
