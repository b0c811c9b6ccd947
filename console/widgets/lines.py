"""The one widget that paints lines: panes, tables with a cursor, logs that follow. Sends only the
cells that changed.

`set_lines` compares what is on the screen with what should be there and marks just the differing
cells dirty. Every span is checked once more for characters that a terminal would obey, whatever its
builder did.
"""

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from console import sanitize, theme
from console.widgets.line import Line, Span, cells, changed_cells, fit

GUTTER = 2  # cells left of a row that has a cursor: `▸ `
CURSOR = "@"  # a style name that ends like this stands on the cursor's background


class Lines(ScrollView, can_focus=True):
    """`cursor`: rows can be chosen. `follow`: stays at the end while the end is in view."""

    DEFAULT_CSS = """
    Lines {
        overflow-x: hidden; overflow-y: hidden;
        scrollbar-size-vertical: 1;
        background: $background;
    }
    Lines.-scroll { overflow-y: auto; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "edge(False)", show=False),
        Binding("end,G", "edge(True)", show=False),
        Binding("enter", "choose", show=False),
    ]

    class Chosen(Message):
        """Enter (or a click on the row under the cursor)."""

        def __init__(self, lines: "Lines", index: int) -> None:
            super().__init__()
            self.lines, self.index = lines, index

        @property
        def control(self) -> "Lines":
            return self.lines

    class Moved(Chosen):
        """The cursor stands on another row."""

    def __init__(
        self, id: str, cursor: bool = False, follow: bool = False, focusable: bool = True
    ) -> None:
        super().__init__(id=id)
        self.has_cursor, self.follow = cursor, follow
        self.can_focus = focusable
        self.cursor = 0
        self._rows: Sequence[Line] = ()
        self._header: Line | None = None
        self._shown: list[Line] = []
        self._palette: dict[str, Style] = {}
        self._strips: dict[Line, Strip] = {}
        self.set_class(cursor or follow, "-scroll")

    @property
    def room(self) -> tuple[int, int]:
        """Cells and rows for the builder of the lines (the cursor's gutter is taken off)."""
        size = self.scrollable_content_region.size
        gutter = GUTTER if self.has_cursor else 0
        return max(0, size.width - gutter), size.height

    @property
    def rows(self) -> Sequence[Line]:
        return self._rows

    def set_lines(self, rows: Sequence[Line], header: Line | None = None) -> None:
        """Replace all rows. Cheap when little changed; never touches rows that are out of view."""
        at_end = self.scroll_offset.y >= self.max_scroll_y
        moved = len(rows) != len(self._rows) or (header is None) != (self._header is None)
        self._rows, self._header = rows, header
        if moved:
            self.virtual_size = Size(self.room[0], len(rows) + (header is not None))
            if self.has_cursor:
                self.cursor = max(0, min(self.cursor, len(rows) - 1))
            elif self.follow and at_end:
                self.scroll_end(animate=False, force=True, immediate=True)
        self._repaint()

    def refresh_theme(self) -> None:
        self._palette.clear()
        self._strips.clear()
        self._shown.clear()
        self.refresh()

    # ── painting ─────────────────────────────────────────────────────────────────────────────

    def _visible(self) -> list[Line]:
        size = self.scrollable_content_region.size
        out = []
        for y in range(size.height):
            out.append(self._line_at(y, size.width))
        return out

    def _line_at(self, y: int, width: int) -> Line:
        if self._header is not None:
            if y == 0:
                pad = (Span(" " * GUTTER, "dim"),) if self.has_cursor else ()
                return fit((*pad, *self._header), width)
            y -= 1
        index = y + self.scroll_offset.y
        row = self._rows[index] if index < len(self._rows) else ()
        if self.has_cursor and row:
            if index == self.cursor:
                marked = [Span(text, style + CURSOR) for text, style in row]
                return fit((Span("▸ ", "bold" + CURSOR), *marked), width, "text" + CURSOR)
            row = (Span(" " * GUTTER), *row)
        return fit(row, width)

    def _repaint(self) -> None:
        new, old = self._visible(), self._shown
        if len(old) != len(new):
            self.refresh()
            return
        regions = [
            Region(start, y, end - start, 1)
            for y, (a, b) in enumerate(zip(old, new, strict=True))
            for start, end in changed_cells(a, b)
        ]
        self._shown = new
        if regions:
            self.refresh(*regions)

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        if y == 0 or y >= len(self._shown):
            self._shown = self._visible()
        spans = self._shown[y] if y < len(self._shown) else ()
        strip = self._strips.get(spans)
        if strip is None:
            if len(self._strips) > 2_000:
                self._strips.clear()
            strip = self._strips[spans] = self._strip(spans)
        return strip.adjust_cell_length(width, self.rich_style)

    def _strip(self, spans: Line) -> Strip:
        if not self._palette:
            current = self.app.current_theme
            self._palette = theme.palette(current.name, current.dark)
        base = self.rich_style
        ascii_only = bool(getattr(self.app, "ascii_only", False))
        segments = []
        for text, style in spans:
            text = text if text.isprintable() else sanitize.clean(text)
            text = sanitize.to_ascii(text) if ascii_only else text
            segments.append(Segment(text, base + self._style(style)))
        return Strip(segments, cells(spans))

    def _style(self, name: str) -> Style:
        found = self._palette.get(name.removesuffix(CURSOR), self._palette["text"])
        if not name.endswith(CURSOR):
            return found
        if found.bgcolor is not None:  # chips keep their own background
            return found
        return self._palette["cursor"] + Style(color=found.color, reverse=found.reverse)

    def on_resize(self, event: events.Resize) -> None:
        self._shown = []
        self.virtual_size = Size(self.room[0], len(self._rows) + (self._header is not None))

    def on_focus(self) -> None:
        self._repaint()

    def on_blur(self) -> None:
        self._repaint()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        self._shown = []
        super().watch_scroll_y(old_value, new_value)

    # ── moving ───────────────────────────────────────────────────────────────────────────────

    def action_move(self, by: int) -> None:
        if self.has_cursor:
            self.go(self.cursor + by)
        else:
            self.scroll_relative(y=by, animate=False)

    def action_page(self, by: int) -> None:
        page = max(1, self.room[1] - 1)
        if self.has_cursor:
            self.go(self.cursor + by * page)
        else:
            self.scroll_relative(y=by * page, animate=False)

    def action_edge(self, end: bool) -> None:
        if self.has_cursor:
            self.go(len(self._rows) - 1 if end else 0)
        elif end:
            self.scroll_end(animate=False)
        else:
            self.scroll_home(animate=False)

    def action_choose(self) -> None:
        if self.has_cursor and self._rows:
            self.post_message(self.Chosen(self, self.cursor))
        elif not self.has_cursor:
            self.post_message(self.Chosen(self, -1))

    def go(self, index: int) -> None:
        """Put the cursor on a row and bring it into view."""
        index = max(0, min(index, len(self._rows) - 1))
        if index != self.cursor:
            self.cursor = index
            self.post_message(self.Moved(self, index))
        visible = max(1, self.room[1] - (self._header is not None))
        top = self.scroll_offset.y
        if index < top:
            self.scroll_to(y=index, animate=False, force=True, immediate=True)
        elif index >= top + visible:
            self.scroll_to(y=index - visible + 1, animate=False, force=True, immediate=True)
        self._repaint()

    def on_click(self, event: events.Click) -> None:
        if not self.has_cursor:
            return
        index = event.y + self.scroll_offset.y - (self._header is not None)
        if 0 <= index < len(self._rows):
            if index == self.cursor:
                self.post_message(self.Chosen(self, index))
            self.go(index)
