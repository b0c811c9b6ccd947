"""Tokens as wrapped text: one shade a token, chips for special ones, characters joined that a
split among tokens had broken.

Where the lines break is found once, in two integers a line; a line itself is built when it is
looked at. A million spans would keep the garbage collector busy for half a second at a time, and
with it every thread, the one that hears HALT included.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from console.sanitize import cut, width
from console.widgets.line import Line, Span
from console.widgets.tokens import PLAIN, Options, Token, shown

LOOK_EVERY = 4_096  # tokens between two looks at whether anybody still waits


class Piece(NamedTuple):
    """`breaks`: the line ends after it."""

    text: str
    cells: int
    chip: bool
    breaks: bool


class Flow(Sequence[Line]):
    """Lines with alternating backgrounds. What is not trained on is dim: the prompt, or what `mask`
    leaves out. A token that holds a line break ends its line; the completion begins a new one.
    `stop`: asked now and then while the lines are found; True leaves the rest out.
    """

    def __init__(
        self,
        tokens: Sequence[Token],
        prompt_len: int,
        cells: int,
        options: Options = PLAIN,
        mask: Sequence[bool] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._tokens, self._prompt_len, self._cells = tokens, prompt_len, cells
        self._options, self._mask = options, mask
        self._known: dict[int | tuple[int, ...], Piece] = {}
        self._starts = array("q")
        self._shades = array("b")
        self._find(stop)
        self.prompt_rows = sum(start < prompt_len for start in self._starts)

    def _find(self, stop: Callable[[], bool]) -> None:
        """Where lines begin, and the shade that they begin with."""
        fresh, used, after_chip = True, 0, False
        for shade, (start, end) in enumerate(groups(self._tokens, self._prompt_len)):
            if not shade % LOOK_EVERY and stop():
                return
            _, size, chip, breaks = self._piece(start, end)
            beside = chip and after_chip and not fresh
            if start == self._prompt_len or used + beside + size > self._cells:
                fresh, beside = True, False
            if fresh:
                self._starts.append(start)
                self._shades.append(shade % 2)
                used, fresh = 0, False
            used += beside + size
            after_chip = chip
            fresh = breaks

    def row_of(self, index: int) -> int:
        """The line that holds a token."""
        return max(0, bisect_right(self._starts, index) - 1)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Line:  # type: ignore[override]  # lines are never sliced
        start = self._starts[index]
        index = index % len(self._starts)
        last = index + 1 == len(self._starts)
        end = len(self._tokens) if last else self._starts[index + 1]
        row: list[Span] = []
        used = 0
        part = self._tokens[start:end]
        for n, (a, b) in enumerate(groups(part, self._prompt_len - start), self._shades[index]):
            at = start + a
            text, size, chip, _ = self._piece(at, start + b)
            token = self._tokens[at]
            if chip and row and row[-1].style.startswith("chip"):
                row.append(Span(" "))  # two chips side by side stay two
                used += 1
            trained = at >= self._prompt_len if self._mask is None else self._mask[at]
            row.append(Span(text, _style(token, n, trained)))
            used += size
        pad = (Span(" " * (self._cells - used)),) if used < self._cells else ()
        return (*row, *pad)

    def _piece(self, start: int, end: int) -> Piece:
        """What stands for a group of tokens; made once for each group that occurs."""
        first = self._tokens[start]
        if end == start + 1:
            return self._known.get(first.id) or self._made(first.id, (first,))
        group = tuple(self._tokens[start:end])
        key = tuple(t.id for t in group)
        return self._known.get(key) or self._made(key, group)

    def _made(self, key: int | tuple[int, ...], group: tuple[Token, ...]) -> Piece:
        chip = group[0].kind != "text"
        raw = b"".join(t.raw for t in group)
        text = shown(group[0]._replace(raw=raw), self._options)
        if raw[:1] == b" " != raw[1:2] and len(raw) > 1 and not self._options.spaces:
            text = " " + text[1:]  # one space before a word reads better than its glyph
        ids = f"{'+'.join(str(t.id) for t in group)} " if self._options.ids else ""
        if chip:
            text = f" {text} {ids}"
        elif ids:
            text = f"{text} {ids}"
        text = cut(text, self._cells)
        piece = self._known[key] = Piece(text, width(text), chip, not chip and b"\n" in raw)
        return piece


class Headed(Sequence[Line]):
    """Lines in two parts, each under a heading of its own."""

    def __init__(self, lines: Flow, first: list[Line], at: int, second: list[Line]) -> None:
        self._lines, self._first, self._at, self._second = lines, first, at, second

    def row_of(self, index: int) -> int:
        row = self._lines.row_of(index)
        return len(self._first) + row + (len(self._second) if row >= self._at else 0)

    def __len__(self) -> int:
        return len(self._first) + len(self._second) + len(self._lines)

    def __getitem__(self, index: int) -> Line:  # type: ignore[override]  # lines are never sliced
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index = index % len(self)
        if index < len(self._first):
            return self._first[index]
        index -= len(self._first)
        if index < self._at:
            return self._lines[index]
        index -= self._at
        if index < len(self._second):
            return self._second[index]
        return self._lines[self._at + index - len(self._second)]


def groups(tokens: Sequence[Token], prompt_len: int) -> Iterator[tuple[int, int]]:
    """Ranges of tokens that make whole characters: one token mostly, several where a character is
    split among them. A range never crosses from prompt to completion.
    """
    start = 0
    while start < len(tokens):
        end = start + 1
        raw = tokens[start].raw
        while (
            tokens[start].kind == "text"
            and _unfinished(raw)
            and end < min(len(tokens), start + 4)
            and end != prompt_len
            and tokens[end].kind == "text"
        ):
            raw += tokens[end].raw
            end += 1
        if end > start + 1 and not _whole(raw):
            end = start + 1  # what follows does not complete it: broken bytes stay what they are
        yield start, end
        start = end


def _whole(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _unfinished(raw: bytes) -> bool:
    """Ends inside a character that more bytes could complete."""
    if raw.isascii():
        return False
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as e:
        return e.end == len(raw) and e.reason == "unexpected end of data"
    return False


def _style(token: Token, shade: int, trained: bool) -> str:
    if token.kind == "unknown":
        return "chip-bad"
    if token.kind == "special":
        return "chip" if trained else "chip-dim"
    name = "even" if shade % 2 == 0 else "odd"
    return name if trained else f"{name}-dim"
