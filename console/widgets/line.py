"""A line of the console: spans of text with style names. Pure data; panes build it, `Lines` paints
it.

Spans hold one style each, so a line that keeps its styles costs little more than its text on a slow
link.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from console import sanitize


class Span(NamedTuple):
    text: str
    style: str = "text"


Line = tuple[Span, ...]
T = TypeVar("T")
Part = str | Span | tuple[str, str]


def line(*parts: Part) -> Line:
    """A line of parts; a bare string has style `text`. Empty parts vanish."""
    spans = (Span(p) if isinstance(p, str) else Span(*p) for p in parts)
    return tuple(s for s in spans if s.text)


def cells(spans: Iterable[Span]) -> int:
    return sum(sanitize.width(s.text) for s in spans)


def plain(spans: Iterable[Span]) -> str:
    return "".join(s.text for s in spans)


def fit(spans: Line, width: int, style: str = "text") -> Line:
    """Exactly `width` cells: cut with `…` or padded."""
    room, out = width, []
    total = cells(spans)
    if total <= width:
        return (*spans, Span(" " * (width - total), style)) if total < width else spans
    for span in spans:
        need = sanitize.width(span.text)
        if need < room:
            out.append(span)
            room -= need
            continue
        shown = (
            sanitize.cut(span.text, room) if need > room else sanitize.cut(span.text + "…", room)
        )
        out.append(Span(shown, span.style))
        room -= sanitize.width(shown)
        break
    if room > 0:
        out.append(Span(" " * room, style))
    return tuple(out)


def between(left: Line, right: Line, width: int) -> Line:
    """`left` and `right` at the two edges; the right one wins when both do not fit."""
    gap = width - cells(left) - cells(right)
    if gap >= 1:
        return (*left, Span(" " * gap), *right)
    room = width - cells(right) - 1
    if room < 4:
        return fit(left, width)
    return (*fit(left, room), Span(" "), *right)


class Column(NamedTuple):
    """`rank` 0 always stays; higher ranks go first when the table is narrow. `grow`: cells that it
    may gain from what is left; beyond that the table ends early, because a value far from its
    label is hard to read.
    """

    title: str
    width: int
    align: str = ">"
    rank: int = 0
    grow: int = 0


class Table:
    """A fixed-width table: columns are chosen once, rows are laid out one by one. Texts of cells
    are treated as hostile.
    """

    def __init__(self, columns: Sequence[Column], width: int, gap: int = 2) -> None:
        self.width, self._gap, self._columns = width, gap, columns
        keep = list(range(len(columns)))

        def used() -> int:
            return sum(columns[i].width for i in keep) + gap * (len(keep) - 1)

        while used() > width and any(columns[i].rank for i in keep):
            worst = max(columns[i].rank for i in keep)
            keep.remove(max(i for i in keep if columns[i].rank == worst))
        spare = max(0, width - used())
        growers = [i for i in keep if columns[i].grow]
        self._widths = {i: columns[i].width for i in keep}
        for n, i in enumerate(growers):
            share = spare // len(growers) + (1 if n < spare % len(growers) else 0)
            self._widths[i] += min(share, columns[i].grow)
        self.header = self._build([c.title for c in columns], "dim")

    def row(self, cells_of: Sequence[Part]) -> Line:
        return self._build(cells_of, "text")

    def _build(self, cells_of: Sequence[Part], default: str) -> Line:
        spans: list[Span] = []
        last = next(reversed(self._widths))
        for i, width in self._widths.items():
            part = cells_of[i]
            text, style = (part, default) if isinstance(part, str) else (part[0], part[1])
            text = sanitize.cell(text, width, self._columns[i].align)
            text = text if i == last else text + " " * self._gap
            if spans and spans[-1].style == style:
                spans[-1] = Span(spans[-1].text + text, style)
            else:
                spans.append(Span(text, style))
        return fit(tuple(spans), self.width)


def table(
    columns: Sequence[Column], rows: Iterable[Sequence[Part]], width: int
) -> tuple[Line, list[Line]]:
    """Header and lines of a table that is short enough to be built whole."""
    made = Table(columns, width)
    return made.header, [made.row(row) for row in rows]


class Lazy(Sequence[Line], Generic[T]):
    """Lines that are built when they are looked at: a list of 83,000 costs what is in view."""

    def __init__(self, items: Sequence[T], build: Callable[[T], Line]) -> None:
        self._items, self._build = items, build

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Line:  # type: ignore[override]  # never sliced
        return self._build(self._items[index])


def changed_cells(old: Line, new: Line) -> list[tuple[int, int]]:
    """Cell ranges [start, end) in which two lines differ, near ones merged (a cursor move costs
    about 6 bytes).
    """
    if old == new:
        return []
    a, b = _per_cell(old), _per_cell(new)
    if len(a) != len(b):
        return [(0, max(len(a), len(b)))]
    runs: list[tuple[int, int]] = []
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if x == y:
            continue
        start = i - 1 if i and (b[i][0] == "" or a[i][0] == "") else i
        if runs and start - runs[-1][1] <= 6:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((start, i + 1))
    widened = []
    for start, end in runs:  # the second half of a wide character follows its first
        while end < len(b) and (b[end][0] == "" or a[end][0] == ""):
            end += 1
        widened.append((start, end))
    return widened


def _per_cell(spans: Line) -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    for text, style in spans:
        if text.isascii():
            out.extend((char, style) for char in text)
            continue
        for char in text:
            match sanitize.width(char):
                case 0 if out:
                    out[-1] = (out[-1][0] + char, out[-1][1])
                case 2:
                    out.extend(((char, style), ("", style)))
                case _:
                    out.append((char, style))
    return out
