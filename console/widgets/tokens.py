"""Token ids for eyes: chips for special tokens, glyphs for what cannot be seen, an aligned
difference of two lists.

Pure functions over ids and a decoder. In a difference every token stands alone, so the bytes of a
split character appear as `‹E2 9C›`; the flow joins them again. The sign column carries the meaning
of a difference (`=` `≠` `−` `+`); colour repeats it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from console.sanitize import cell, cut, glyph, width
from console.widgets.align import Difference
from console.widgets.line import Line, Span, fit, line

MAX_BYTES = 1_024  # of a token that are shown: a hostile vocabulary may hold megabytes in one
CONTEXT = 3  # equal rows kept around a difference when only differences are shown


class Decoder(Protocol):
    """The part of core.render.tokenizer.Tokenizer that is needed here."""

    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...
    @property
    def vocab_size(self) -> int: ...


class NoTokenizer:
    """Stands in when the run's tokenizer cannot be read: every token is its number."""

    vocab_size = 0

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def is_special(self, token_id: int) -> bool:
        return False


class Token(NamedTuple):
    id: int
    kind: str  # text | special | unknown
    raw: bytes


class Options(NamedTuple):
    ids: bool = False
    spaces: bool = False  # every space as a glyph, not only those at the edges of a token
    bytes: bool = False
    only_diffs: bool = False


PLAIN = Options()


def tokens_of(decoder: Decoder, ids: Sequence[int]) -> list[Token]:
    """Never raises: an id that the tokenizer does not know is `unknown`."""
    out = []
    cache: dict[int, Token] = {}
    for token_id in ids:
        token = cache.get(token_id)
        if token is None:
            if not 0 <= token_id < decoder.vocab_size:
                token = Token(token_id, "unknown", b"")
            elif decoder.is_special(token_id):
                token = Token(token_id, "special", decoder.token_bytes(token_id))
            else:
                token = Token(token_id, "text", decoder.token_bytes(token_id))
            cache[token_id] = token
        out.append(token)
    return out


def shown(token: Token, options: Options = PLAIN) -> str:
    """What stands for a token; never empty."""
    if token.kind == "unknown":
        return f"‹?{token.id}›"
    raw, more = token.raw[:MAX_BYTES], "…" if len(token.raw) > MAX_BYTES else ""
    if token.kind == "special":
        return _special(raw) + more
    if options.bytes:
        return raw.hex(" ").upper() + more
    parts = _parts(raw)
    text = "".join(
        part if isinstance(part, str) else "‹" + part.hex(" ").upper() + "›" for part in parts
    )
    text += more
    return text if text.strip() and not options.spaces else text.replace(" ", "·")


def body(token: Token, text: str, strong: bool, style: str = "text") -> Span:
    """A token's text in its dress: chips for what is no text."""
    if token.kind == "special":
        return Span(f" {text} ", "chip" if strong else "chip-dim")
    if token.kind == "unknown":
        return Span(f" {text} ", "chip-bad")
    return Span(text, style)


def _special(raw: bytes) -> str:
    """`<|im_end|>` as `im_end`: the chip says that it is special."""
    text = "".join(glyph(c) for c in raw.decode("utf-8", "replace"))
    if text.startswith("<|") and text.endswith("|>"):
        return text[2:-2]
    return text


def _parts(raw: bytes) -> list[str | bytes]:
    """Whole characters as cleaned text, broken ones as bytes; spaces at the edges and runs of them
    as `·`.
    """
    out: list[str | bytes] = []
    text = ""
    rest = raw
    while rest:
        try:
            text += rest.decode("utf-8")
            break
        except UnicodeDecodeError as e:
            text += rest[: e.start].decode("utf-8")
            if text:
                out.append(_spaces(text))
                text = ""
            out.append(rest[e.start : e.end])
            rest = rest[e.end :]
    if text:
        out.append(_spaces(text))
    return out


def _spaces(text: str) -> str:
    body = text.strip(" ")
    head = len(text) - len(text.lstrip(" "))
    tail = len(text) - len(text.rstrip(" ")) if body else 0
    inner = body.replace("  ", "··")
    marks = "".join(_glyph(c) for c in inner)
    return "·" * head + marks + "·" * tail


def _glyph(char: str) -> str:
    """A combining mark is drawn on a carrier: alone in a token it would land on its neighbour."""
    named = glyph(char)
    return named if width(named) else "◌" + named


def find(tokens: Sequence[Token], wanted: str) -> list[int]:
    """Indices of tokens with that id, or at which that text begins. Text in lower case is found in
    any case; text may run over several tokens.
    """
    found = set()
    if wanted.isascii() and wanted.isdigit():
        number = int(wanted)
        found = {i for i, token in enumerate(tokens) if token.id == number}
    needle = wanted.encode("utf-8", "replace")
    whole = b"".join(token.raw for token in tokens)
    if wanted == wanted.lower():
        whole = whole.lower()
    ends = list(accumulate(len(token.raw) for token in tokens))
    at = whole.find(needle) if needle else -1
    while at >= 0:
        found.add(bisect_right(ends, at))
        at = whole.find(needle, at + 1)
    return sorted(found)


# ── difference ──────────────────────────────────────────────────────────────────────────────


def headline(
    diff: Difference, left: Sequence[Token], right: Sequence[Token], names: tuple[str, str]
) -> tuple[str, str]:
    """One line that says it all, and its style."""
    if diff.identical:
        return f"IDENTICAL ({len(left):,} tokens)", "ok"
    row = diff.rows[diff.hunks[0]]
    a = f'{left[row.left].id} "{shown(left[row.left])}"' if row.left >= 0 else "nothing"
    b = f'{right[row.right].id} "{shown(right[row.right])}"' if row.right >= 0 else "nothing"
    where = row.left if row.left >= 0 else row.right
    hunks = f"{len(diff.hunks)} hunk" + ("s" if len(diff.hunks) != 1 else "")
    return (
        f"FIRST DIVERGENCE @{where}: {names[0]} {a} vs {names[1]} {b} · {hunks} · "
        f"common prefix {diff.prefix} · suffix {diff.suffix}",
        "error",
    )


_SIGN_STYLE = {"=": "dim", "≠": "error", "−": "warn", "+": "accent"}


def visible_rows(diff: Difference, only_diffs: bool) -> list[int]:
    """Indices of rows to show; -1 stands for a gap."""
    if not only_diffs:
        return list(range(len(diff.rows)))
    keep: set[int] = set()
    for i in diff.rows.differing():
        keep.update(range(max(0, i - CONTEXT), min(len(diff.rows), i + CONTEXT + 1)))
    out: list[int] = []
    for i in sorted(keep):
        if out and i != out[-1] + 1:
            out.append(-1)
        out.append(i)
    return out


class DiffTable(Sequence[Line]):
    """The rows of a difference as lines, built when they are looked at: 32,000 open at once."""

    def __init__(
        self,
        diff: Difference,
        left: Sequence[Token],
        right: Sequence[Token],
        cells: int,
        options: Options,
    ) -> None:
        self._diff, self._left, self._right = diff, left, right
        self._cells, self._options = cells, options
        self.visible = visible_rows(diff, options.only_diffs)

    def __len__(self) -> int:
        return len(self.visible)

    def __getitem__(self, index: int) -> Line:  # type: ignore[override]  # rows are never sliced
        at = self.visible[index]
        if at < 0:
            return fit(line(("    ⋮", "dim")), self._cells)
        row = self._diff.rows[at]
        half = (self._cells - 6) // 2
        style = _SIGN_STYLE[row.sign]
        return fit(
            (
                Span(f" {row.sign} ", style),
                *self._side(self._left, row.left, half, row.sign),
                Span(" │ ", "faint"),
                *self._side(self._right, row.right, half, row.sign),
            ),
            self._cells,
        )

    def header(self, names: tuple[str, str]) -> Line:
        half = (self._cells - 6) // 2
        return fit(
            line((f" ± {cell(names[0], half)} │ {cell(names[1], half)}", "dim")), self._cells
        )

    def row_of(self, index: int) -> int:
        """The visible row of a completion token, by its place at the left, else at the right; -1:
        not shown.
        """
        places = range(len(self.visible))
        rows = self._diff.rows
        for side in ("left", "right"):
            for at in places:
                shown_at = self.visible[at]
                if shown_at >= 0 and getattr(rows[shown_at], side) == index:
                    return at
        return -1

    def rows_with(self, left: set[int], right: set[int]) -> list[int]:
        """Visible rows that hold one of these tokens."""
        found = []
        for at, shown_at in enumerate(self.visible):
            if shown_at >= 0:
                row = self._diff.rows[shown_at]
                if row.left in left or row.right in right:
                    found.append(at)
        return found

    def _side(self, tokens: Sequence[Token], index: int, cells: int, sign: str) -> Line:
        if index < 0:
            return (Span(" " * cells),)
        token = tokens[index]
        lead = f"{index:>5} {token.id:>6} " if self._options.ids else f"{index:>5} "
        text = cut(shown(token, self._options), max(1, cells - len(lead) - 2))
        style = "text" if sign == "=" else _SIGN_STYLE[sign]
        return fit((Span(lead, "dim"), body(token, text, sign != "=", style)), cells)
