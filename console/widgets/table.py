"""A sample token by token: where it stands, what it is, whether it is trained on, which part of the
reply it belongs to, and its bytes.

Lines are built when they are looked at, so that 32,000 open at once.
"""

from bisect import bisect_right
from collections.abc import Sequence

from console.sanitize import cut, width
from console.widgets.flow import groups
from console.widgets.line import Line, Span, fit, line
from console.widgets.tokens import PLAIN, Options, Token, body, shown
from core.schema import Sample

SEGMENT = {"call_id": "call id", "arguments": "args"}
IN_LOSS, OUT_OF_LOSS, MASKED = "●", "·", "○"
LOSS_STYLE = {IN_LOSS: "ok", OUT_OF_LOSS: "dim", MASKED: "warn"}
TOKEN_CELLS = 44  # of the widest token column: farther away its bytes are hard to read
BYTES_FROM = 72  # cells from which on the bytes have room beside the text
MAX_BYTES = 8


class TokenTable(Sequence[Line]):
    """`joined` text of characters that are split among tokens stands at the last of them."""

    def __init__(
        self,
        sample: Sample,
        tokens: Sequence[Token],
        cells: int,
        options: Options = PLAIN,
        joins: dict[int, str] | None = None,
    ) -> None:
        self._tokens, self._cells, self._options = tokens, cells, options
        self._prompt_len = sample.prompt_len
        self._masked = set(sample.masked)
        self._starts = [sample.prompt_len + s.start for s in sample.segments]
        self._segments = sample.segments
        self._joined = joined(tokens, sample.prompt_len) if joins is None else joins
        self._bytes = (MAX_BYTES * 3 + 1) if cells >= BYTES_FROM else 0

    def __len__(self) -> int:
        return len(self._tokens)

    def segment(self, index: int) -> str:
        """The part of the reply that a token belongs to; `prompt` before it."""
        if index < self._prompt_len:
            return "prompt"
        at = bisect_right(self._starts, index) - 1
        if at < 0 or index >= self._prompt_len + self._segments[at].end:
            return ""
        kind = self._segments[at].kind
        return SEGMENT.get(kind, kind)

    def mask(self, index: int) -> str:
        if index < self._prompt_len:
            return OUT_OF_LOSS
        return MASKED if index in self._masked else IN_LOSS

    def header(self) -> Line:
        head = f"{'index':>6} {'id':>7} {'loss':^4} {'segment':<10} "
        tail = "bytes" if self._bytes else ""
        return fit(line((f"{head}{'token':<{self._room(len(head))}}{tail}", "dim")), self._cells)

    def _room(self, used: int) -> int:
        """Cells of the token column."""
        return max(1, min(TOKEN_CELLS, self._cells - used - self._bytes))

    def __getitem__(self, index: int) -> Line:  # type: ignore[override]  # rows are never sliced
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        token, mark, segment = self._tokens[index], self.mask(index), self.segment(index)
        trained = mark == IN_LOSS
        lead = Span(f"{index:>6} {token.id:>7} ", "dim")
        loss = Span(f"{mark:^4} ", LOSS_STYLE[mark])
        part = Span(f"{segment:<10} ", "text" if trained else "dim")
        room = self._room(len(lead.text) + len(loss.text) + len(part.text))
        text = body(token, cut(shown(token, self._options), max(1, room - 4)), trained)
        row: tuple[Span, ...] = (text,)
        if note := self._joined.get(index):
            row = (text, Span(f" {note}", "accent"))
        raw = token.raw[:MAX_BYTES].hex(" ").upper() + (" …" if len(token.raw) > MAX_BYTES else "")
        tail = (Span(f"{raw:<{self._bytes}}", "dim"),) if self._bytes else ()
        return fit((lead, loss, part, *fit(row, room), *tail), self._cells)


def joined(tokens: Sequence[Token], prompt_len: int) -> dict[int, str]:
    """For each token of a split character: `┐` where it begins, `│` between, `┘` and the character
    where it ends.
    """
    out: dict[int, str] = {}
    for start, end in groups(tokens, prompt_len):
        if end == start + 1:
            continue
        raw = b"".join(t.raw for t in tokens[start:end])
        text = shown(Token(0, "text", raw))
        out[start] = "┐"
        for at in range(start + 1, end - 1):
            out[at] = "│"
        out[end - 1] = f"┘ {text}" if width(text) else "┘"
    return out
