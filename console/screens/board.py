"""The board: everything about one run at a glance. Panes are pure functions; this file places and
paints them.
"""

from collections.abc import Callable

from textual.app import ComposeResult
from textual.containers import Container

from console import actions
from console.screens.base import BaseScreen
from console.state import ConsoleState
from console.widgets import bars, run_panes, work_panes
from console.widgets.line import Line
from console.widgets.lines import Lines

PaneFunction = Callable[[ConsoleState, int, int], list[Line]]

# In the order of their keys and of the grid.
PANES: tuple[tuple[str, str, PaneFunction], ...] = (
    ("requests", "1 Requests", run_panes.requests),
    ("providers", "2 Providers", run_panes.providers),
    ("spend", "3 Spend", run_panes.spend),
    ("host", "4 Host", work_panes.host),
    ("training", "5 Training", work_panes.training),
    ("quality", "6 Quality", work_panes.quality),
    ("log", "7 Log", work_panes.log),
)
GRID = ("requests", "spend", "host", "providers", "training", "quality", "log")
# Layouts of board.tcss: below 80x24 a short form, then 80x24, 120x36 and 200x60.
WIDTHS = [(0, "-tiny-x"), (80, "-narrow"), (112, "-normal"), (180, "-wide")]
HEIGHTS = [(0, "-tiny-y"), (24, "-short"), (32, "-tall"), (50, "-huge")]


def footer_of(state: str) -> tuple[str, ...]:
    """What can be done now comes first."""
    if state == "halting":
        return actions.HALTING_FOOTER
    if state == "done":
        return actions.DONE_FOOTER
    return (
        actions.STOPPED_FOOTER
        if state in ("halted", "tripped", "failed", "crashed")
        else actions.RUNNING_FOOTER
    )


class BoardScreen(BaseScreen):
    CSS_PATH = "board.tcss"
    HORIZONTAL_BREAKPOINTS = WIDTHS
    VERTICAL_BREAKPOINTS = HEIGHTS
    AUTO_FOCUS = ""

    def body(self) -> ComposeResult:
        yield Lines("strip", focusable=False)
        yield Lines("banner", focusable=False)
        yield Lines("compact", focusable=False)
        with Container(id="panes"):
            titles = {name: title for name, title, _ in PANES}
            for name in GRID:
                pane = Lines(name).add_class("pane")
                pane.border_title = titles[name]
                yield pane

    def paint_edges(self) -> None:
        assert self.session is not None
        self.footer_names = footer_of(self.session.state.state)
        super().paint_edges()
        state, width = self.session.state, self.size.width
        self.query_one("#strip", Lines).set_lines([bars.stage_strip(state, width)])
        lines = bars.halt_banner(state, width)
        banner = self.query_one("#banner", Lines)
        if banner.styles.height is None or banner.styles.height.value != len(lines):
            banner.styles.height = len(lines)
            banner.display = bool(lines)
        banner.set_lines(lines)
        self.set_class(state.training_phase, "-training")
        self.set_class(bool(lines), "-halted")

    def paint_body(self) -> None:
        assert self.session is not None
        state = self.session.state
        compact = self.query_one("#compact", Lines)
        if compact.display and compact.size.height:
            compact.set_lines(run_panes.compact(state, *compact.room))
        for name, title, build in PANES:
            pane = self.query_one(f"#{name}", Lines)
            if not pane.display or not pane.size.height:
                continue
            pane.set_lines(build(state, *pane.room))
            shown = f"▸ {title}" if pane.has_focus else title
            if pane.border_title != shown:
                pane.border_title = shown

    def note(self, width: int) -> str:
        state = self.session.state if self.session else None
        if state is None:
            return ""
        parts = [f"{state.refresh_hz:g} Hz"] if width >= 100 else []
        if state.consoles > 1 and width >= 100:
            parts.insert(0, f"{state.consoles} consoles")
        return " · ".join(parts)

    # ── actions ──────────────────────────────────────────────────────────────────────────────

    def show_pane(self, number: int) -> None:
        """Focus a pane; one that is hidden now, or focused already, fills the screen."""
        pane = self.query_one(f"#{PANES[number - 1][0]}", Lines)
        if self.has_class("-zoom"):
            self.unzoom()
            self.call_after_refresh(self._show, pane)
        else:
            self._show(pane, again=pane.has_focus)

    def _show(self, pane: Lines, again: bool = False) -> None:
        if again or not pane.display:
            self.zoom(pane)
        pane.focus()
        self.call_after_refresh(self.paint)

    def zoom(self, pane: Lines | None = None) -> None:
        """The focused pane fills the middle; edges and banner stay. Again: back to the grid."""
        if self.has_class("-zoom"):
            self.unzoom()
            return
        target = pane or (self.focused if isinstance(self.focused, Lines) else None)
        if target is None:
            self.notify("focus a pane first: tab or 1 to 7", markup=False)
            return
        target.add_class("-zoomed")
        self.add_class("-zoom")
        self.call_after_refresh(self.paint)

    def unzoom(self) -> None:
        self.remove_class("-zoom")
        self.query(".-zoomed").remove_class("-zoomed")
        self.call_after_refresh(self.paint)

    def on_lines_chosen(self, message: Lines.Chosen) -> None:
        """Enter on a pane goes to the screen behind it."""
        behind = {"quality": "errors", "log": "log", "training": "chart", "requests": "probe"}
        if (name := behind.get(message.lines.id or "")) is not None:
            self.console.open_screen(name)
        else:
            self.zoom(message.lines)
