"""One sample opened: its verdict with the evidence first, then its tokens: as text, as a table, or
beside those of a twin.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input

from console import actions, probe
from console.sanitize import clean, wrap
from console.screens.base import BaseScreen
from console.session import Session
from console.widgets import tokens as tk
from console.widgets.align import Difference, difference
from console.widgets.evidence import evidence
from console.widgets.flow import Flow, Headed
from console.widgets.line import Line, fit, line
from console.widgets.lines import Lines
from console.widgets.table import TokenTable, joined
from core.errors import EyasError
from core.schema import Sample

LONG_TOKENS, LONG_CHARS = 4_000, 20_000
"""More than this is laid out in a thread: 4,000 tokens take 20 ms, a reply of 2 MB seconds."""
FIRST_PAGE = 1_000
"""Tokens or characters that are shown meanwhile."""
AROUND = 4  # rows kept in view before and after the one that was jumped to
ASKED = {"find": "find text, or an id", "jump": "token index"}


class SampleScreen(BaseScreen):
    """`mode`: flow, table or diff."""

    CSS_PATH = "probe.tcss"
    AUTO_FOCUS = "#tokens"
    heading = "sample"
    footer_names = ("halt", "help", "back", "detach")
    extra_keys, more_keys = actions.SAMPLE_KEYS, actions.SAMPLE_MORE
    help_keys = actions.SAMPLE_HELP
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "next(1)", show=False),
        Binding("p,N", "next(-1)", show=False),
        Binding("f", "option('only_diffs')", show=False),
        Binding("i", "option('ids')", show=False),
        Binding("w", "option('spaces')", show=False),
        Binding("b", "option('bytes')", show=False),
        Binding("t", "mode", show=False),
        Binding("d", "diff", show=False),
        Binding("x", "twin", show=False),
        Binding("slash", "ask('find')", show=False),
        Binding("number_sign", "ask('jump')", show=False),
        Binding("escape", "leave", show=False),
    ]

    def __init__(self, session: Session, row: probe.Row, against: str = "") -> None:
        super().__init__(session)
        self._row, self._against = row, against
        self.opened: probe.Opened | None = None
        self.options = {
            "flow": tk.Options(),
            "table": tk.Options(ids=True),
            "diff": tk.Options(ids=True),
        }
        self.mode = "flow"
        self.diff: Difference | None = None
        self.found: list[int] = []
        self._left: list[tk.Token] = []
        self._right: list[tk.Token] = []
        self._tokens: list[tk.Token] = []
        self._joined: dict[int, str] = {}
        self._view: Sequence[Line] = ()
        self._drawn: tuple[Any, ...] = ()
        self._mask: list[bool] = []
        self._laid: tuple[tuple[Any, ...], Sequence[Line]] = ((), [])
        self._stop_layout = threading.Event()
        self._asked = ""
        self._wanted = ""

    def body(self) -> ComposeResult:
        yield Lines("evidence", focusable=False)
        yield Input(id="ask")
        yield Lines("tokens", cursor=True)

    def on_mount(self) -> None:
        super().on_mount()
        self.load()

    # ── reading ──────────────────────────────────────────────────────────────────────────────

    @work(exclusive=True, group="probe-open")
    async def load(self) -> None:
        """Read, decode and align in a thread; the screen stays alive."""
        assert self.session is not None
        try:
            opened = await asyncio.to_thread(
                probe.open_sample, self.session.run, self._row, self._against
            )
            await asyncio.to_thread(self._prepare, opened)
        except (EyasError, OSError) as e:
            self.console.say(f"sample: {e}", "error")
            return
        self._show(opened)

    def _show(self, opened: probe.Opened) -> None:
        self.opened = opened
        if self.diff is not None and not self.diff.identical:
            self.mode = "diff"
        elif self.mode == "diff":
            self.mode = "flow"
        self.found, self._wanted, self._drawn = [], "", ()
        self.paint()
        if self.mode == "diff":
            self.call_after_refresh(self.action_next, 1)

    def _prepare(self, opened: probe.Opened) -> None:
        """In a thread: plain lists only, no widget is touched."""
        sample, twin = opened.sample, opened.twin
        self.diff = None
        if sample is None:
            return
        decoder = opened.tokenizer or tk.NoTokenizer()
        self._tokens = tk.tokens_of(decoder, sample.token_ids)
        self._joined = joined(self._tokens, sample.prompt_len)
        self._mask = sample.loss_mask
        if twin is None:
            return
        local, other = probe.sides(sample, twin)
        same_prompt = local.token_ids[: local.prompt_len] == other.token_ids[: other.prompt_len]
        a = local.completion_ids if same_prompt else local.token_ids
        b = other.completion_ids if same_prompt else other.token_ids
        self._left, self._right = tk.tokens_of(decoder, a), tk.tokens_of(decoder, b)
        self.diff = difference(a, b)

    @work(exclusive=True, group="probe-open")
    async def action_twin(self) -> None:
        """The next one that was asked the same; the difference is made anew."""
        opened = self.opened
        if opened is None or len(opened.twins) < 2:
            self.console.say("no other twin of this sample")
            return
        turned = opened._replace(twins=[*opened.twins[1:], opened.twins[0]])
        await asyncio.to_thread(self._prepare, turned)
        self._show(turned)

    @property
    def names(self) -> tuple[str, str]:
        """What stands at the left and at the right of the difference."""
        assert self.opened is not None
        sample, twin = self.opened.sample, self.opened.twin
        if sample is None or twin is None:
            return "local", "API"
        left, right = probe.sides(sample, twin)
        return probe.side_name(left), probe.side_name(right)

    # ── painting ─────────────────────────────────────────────────────────────────────────────

    def paint_body(self) -> None:
        head, body = self.query_one("#evidence", Lines), self.query_one("#tokens", Lines)
        width = self.size.width - 2
        opened = self.opened
        if opened is None:
            head.set_lines([fit(line(("reading …", "dim")), width)])
            return
        key = (self.options[self.mode], self.mode, body.room, self.size, id(opened))
        if key == self._drawn:
            return
        self._drawn = key
        lines = evidence(opened, width)
        if self.diff is not None:
            text, style = tk.headline(self.diff, self._left, self._right, self.names)
            lines += [line((part, style)) for part in wrap(text, width)]
        head.styles.height = len(lines)
        head.set_lines(lines)
        body.has_cursor = self.mode != "flow"
        self._view, header = self._made(opened, key, body.room[0])
        body.set_lines(self._view, header)
        self._locate()

    def _made(
        self, opened: probe.Opened, key: tuple[Any, ...], cells: int
    ) -> tuple[Sequence[Line], Line | None]:
        options = self.options[self.mode]
        if self.mode == "diff" and self.diff is not None:
            rows = tk.DiffTable(self.diff, self._left, self._right, cells, options)
            return rows, rows.header(self.names)
        if self.mode == "table" and opened.sample is not None:
            table = TokenTable(opened.sample, self._tokens, cells, options, self._joined)
            return table, table.header()
        if self._laid[0] == key:
            return self._laid[1], None
        if len(self._tokens) > LONG_TOKENS or len(opened.raw) > LONG_CHARS:
            self._lay_out(key, cells)
            first = self._text(opened, cells, FIRST_PAGE)
            return [*first, line(("laying out …", "dim"))], None
        return self._text(opened, cells), None

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
    ) -> Headed:
        at = sample.prompt_len
        made = f"completion · {len(self._tokens) - at:,} tokens"
        if sample.masked:
            made += f", {len(sample.masked):,} taken out of the loss by the audit"
        prompt = [line((f"prompt · {at:,} tokens, outside the loss", "dim"))]
        completion = [line(" "), line((made, "dim"))]
        flow = Flow(self._tokens[:most], at, cells, self.options["flow"], self._mask, stop)
        return Headed(flow, prompt, flow.prompt_rows, completion)

    # ── keys ─────────────────────────────────────────────────────────────────────────────────

    def action_option(self, name: str) -> None:
        now = self.options[self.mode]
        self.options[self.mode] = now._replace(**{name: not getattr(now, name)})
        self.paint()

    def action_mode(self) -> None:
        """Flow and table, and the difference where there is a twin."""
        modes = ["flow", "table", *(["diff"] if self.diff is not None else [])]
        if self.opened is not None and self.opened.sample is not None:
            self._turn(modes[(modes.index(self.mode) + 1) % len(modes)])

    def action_diff(self) -> None:
        if self.diff is None:
            self.console.say("no twin of this sample to compare with")
        else:
            self._turn("diff" if self.mode != "diff" else "flow")

    def _turn(self, mode: str) -> None:
        self.mode = mode
        body = self.query_one("#tokens", Lines)
        body.scroll_home(animate=False, immediate=True)
        self.paint()
        if mode == "table" and self.opened is not None and self.opened.sample is not None:
            self._go(self.opened.sample.prompt_len)

    def action_next(self, by: int) -> None:
        """The next match; without a search the next divergence, or the next part of the reply."""
        places = self.found if self._wanted else self._landmarks()
        if not places:
            return
        body = self.query_one("#tokens", Lines)
        here = body.cursor if body.has_cursor else int(body.scroll_offset.y)
        at_start = body.has_cursor and here == 0
        if by > 0:
            target = next((p for p in places if p > here or (p == here and at_start)), places[0])
        else:
            target = next((p for p in reversed(places) if p < here), places[-1])
        self._go(target)
        self.paint_edges()

    def _go(self, row: int) -> None:
        """With a few rows around it."""
        body = self.query_one("#tokens", Lines)
        if not body.has_cursor:
            body.scroll_to(y=row, animate=False, immediate=True)
            return
        body.go(row - AROUND)
        body.go(row + AROUND)
        body.go(row)

    def _landmarks(self) -> list[int]:
        """Rows of the view at which something begins."""
        if self.mode == "diff" and self.diff is not None:
            wanted = set(self.diff.hunks)
            visible = self._view.visible if isinstance(self._view, tk.DiffTable) else []
            return [at for at, row in enumerate(visible) if row in wanted]
        sample = self.opened.sample if self.opened else None
        if sample is None:
            return []
        starts = [0, sample.prompt_len, *(sample.prompt_len + s.start for s in sample.segments)]
        return sorted({self._row_of(start) for start in starts if start < len(self._tokens)})

    def _row_of(self, index: int) -> int:
        """The row of the view that shows a token."""
        return self._view.row_of(index) if isinstance(self._view, Headed) else index

    def action_ask(self, what: str) -> None:
        box = self.query_one("#ask", Input)
        self._asked, box.value, box.placeholder = what, "", ASKED[what]
        box.add_class("-open")
        box.focus()

    @on(Input.Submitted, "#ask")
    def _answered(self, message: Input.Submitted) -> None:
        self._close_box()
        if self._asked == "jump":
            self._jump(message.value)
            return
        self._wanted = message.value
        self._locate()
        if self._wanted and not self.found:
            self.console.say(f"{self._wanted}: not in this view", "warning")
            self._wanted = ""
        elif self._wanted:
            self.action_next(1)

    def _jump(self, text: str) -> None:
        digits = text.strip().replace(",", "")
        if not digits.isascii() or not digits.isdigit():
            self.console.say(f"{text}: write a token's index")
            return
        index = int(digits)
        if isinstance(self._view, tk.DiffTable):
            row = self._view.row_of(index)
        else:
            row = self._row_of(index) if index < len(self._tokens) else -1
        if row < 0:
            self.console.say(f"no token {digits} here", "warning")
        else:
            self._go(row)

    def _locate(self) -> None:
        """Rows of the current view that hold what is searched for."""
        if not self._wanted:
            self.found = []
        elif isinstance(self._view, tk.DiffTable):
            left = tk.find(self._left, self._wanted)
            right = tk.find(self._right, self._wanted)
            self.found = self._view.rows_with(set(left), set(right))
        else:
            self.found = sorted({self._row_of(i) for i in tk.find(self._tokens, self._wanted)})

    def _close_box(self) -> None:
        self.query_one("#ask", Input).remove_class("-open")
        self.query_one("#tokens", Lines).focus()

    async def action_leave(self) -> None:
        """Escape closes the question, then the search, then the screen."""
        if self.query_one("#ask", Input).has_class("-open"):
            self._close_box()
        elif self._wanted:
            self._wanted, self.found = "", []
            self.paint_edges()
        else:
            await self.console.action_back()

    def note(self, width: int) -> str:
        if self._wanted:
            return f"{len(self.found):,} × {clean(self._wanted[:16])}"
        return f"{self.mode} · {clean(self._row.sample_id[:10])}" if width >= 100 else self.mode
