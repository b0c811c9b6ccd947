"""Two lists of token ids aligned row by row: the shortest edit script where that is quick, a split
at common stretches where it is not.

Pure. The library's one call holds the interpreter from its first to its last step, and with it the
thread that hears HALT, so no call is given more than a few milliseconds of work.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

MAX_CELLS = 4_000_000
"""Left times right length for one call of the library: 2,000 x 2,000 ids without a common one take
5 ms."""
WINDOW, KEPT = 768, 576
"""Ids a side of one window where there are no anchors, and how many of them are kept."""
GRAM = 8
"""Ids in a row, found once on each side, that make an anchor."""


class Row(NamedTuple):
    """`left`, `right`: indices into the two lists, -1 where one has nothing."""

    sign: str
    left: int
    right: int


SIGNS = "=≠−+"


class Rows(Sequence[Row]):
    """Rows in seventeen bytes each, made when they are looked at: a million objects would keep the
    garbage collector busy for half a second at a time.
    """

    def __init__(self) -> None:
        self._signs = bytearray()
        self._left, self._right = array("q"), array("q")

    def __len__(self) -> int:
        return len(self._signs)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]  # rows are never sliced
        return Row(SIGNS[self._signs[index]], self._left[index], self._right[index])

    def add(self, sign: str, left: Sequence[int], right: Sequence[int]) -> None:
        self._signs += bytes([SIGNS.index(sign)]) * len(left)
        self._left.extend(left)
        self._right.extend(right)

    def equal(self, left: range, right: range) -> None:
        self.add("=", left, right)

    def replaced(self, left: range, right: range) -> None:
        """Side by side as far as both go, then what one has more."""
        paired = min(len(left), len(right))
        self.add("≠", left[:paired], right[:paired])
        self.add("−", left[paired:], [-1] * (len(left) - paired))
        self.add("+", [-1] * (len(right) - paired), right[paired:])

    def hunks(self) -> list[int]:
        """Where runs of differences begin."""
        signs = self._signs
        return [i for i, s in enumerate(signs) if s and (i == 0 or not signs[i - 1])]

    def differing(self) -> list[int]:
        return [i for i, sign in enumerate(self._signs) if sign]


class Difference(NamedTuple):
    rows: Rows
    hunks: list[int]  # indices of rows at which a run of differences begins
    prefix: int
    suffix: int

    @property
    def identical(self) -> bool:
        return not self.hunks


def difference(left: Sequence[int], right: Sequence[int]) -> Difference:
    """Rows of both lists in order, common ends trimmed first."""
    shorter = min(len(left), len(right))
    prefix = next((i for i in range(shorter) if left[i] != right[i]), shorter)
    room = shorter - prefix
    suffix = next((i for i in range(room) if left[-1 - i] != right[-1 - i]), room)
    rows = Rows()
    rows.equal(range(prefix), range(prefix))
    _align(list(left), list(right), prefix, suffix, rows)
    rows.equal(range(len(left) - suffix, len(left)), range(len(right) - suffix, len(right)))
    return Difference(rows, rows.hunks(), prefix, suffix)


def _align(left: list[int], right: list[int], prefix: int, suffix: int, rows: Rows) -> None:
    """What lies between the common ends; long middles are cut at their anchors and aligned piece by
    piece.
    """
    end, other_end = len(left) - suffix, len(right) - suffix
    cuts = [(end, other_end)]
    if (end - prefix) * (other_end - prefix) > MAX_CELLS:
        found = _anchors(left[prefix:end], right[prefix:other_end])
        cuts = [(i + prefix, j + prefix) for i, j in found] + cuts
    a = b = prefix
    for at, to in cuts:
        if (at - a) * (to - b) <= MAX_CELLS:
            _edit(left[a:at], right[b:to], a, b, rows)
        else:
            _walk(left[a:at], right[b:to], a, b, rows)
        a, b = at, to


def _walk(left: list[int], right: list[int], a0: int, b0: int, rows: Rows) -> None:
    """Thousands of ids without an anchor, as in long repeats: window by window, each aligned whole
    and kept up to three quarters, because near its end it cannot know what follows.
    """
    from rapidfuzz.distance import Levenshtein

    a = b = 0
    while a < len(left) and b < len(right):
        one, other = left[a : a + WINDOW], right[b : b + WINDOW]
        if len(left) - a <= WINDOW and len(right) - b <= WINDOW:
            _edit(one, other, a + a0, b + b0, rows)
            return
        kept: list[tuple[int, int, int]] = []  # equal stretches: left, right, length
        for op in Levenshtein.opcodes(one, other):
            room = max(0, KEPT - max(op.src_start, op.dest_start))
            if op.tag == "equal" and (room or not kept):
                kept.append((op.src_start, op.dest_start, min(op.src_end - op.src_start, room)))
        done = other_done = 0
        for i, j, length in kept or [(len(one), len(other), 0)]:
            rows.replaced(range(a + a0 + done, a + a0 + i), range(b + b0 + other_done, b + b0 + j))
            done, other_done = i + length, j + length
            rows.equal(range(a + a0 + i, a + a0 + done), range(b + b0 + j, b + b0 + other_done))
        a, b = a + done, b + other_done
    rows.replaced(range(a + a0, len(left) + a0), range(b + b0, len(right) + b0))


def _edit(left: list[int], right: list[int], a0: int, b0: int, rows: Rows) -> None:
    """Shortest edit script (Levenshtein)."""
    from rapidfuzz.distance import Levenshtein

    for op in Levenshtein.opcodes(left, right):
        a = range(op.src_start + a0, op.src_end + a0)
        b = range(op.dest_start + b0, op.dest_end + b0)
        if op.tag == "equal":
            rows.equal(a, b)
        else:
            rows.replaced(a, b)


def _anchors(left: list[int], right: list[int]) -> list[tuple[int, int]]:
    """Starts of stretches that both lists hold exactly once, in the same order on both sides: the
    longest such chain (patience diff, Bram Cohen).
    """
    there = _once(right)
    pairs = [(i, there[gram]) for gram, i in _once(left).items() if gram in there]
    tails: list[int] = []  # the smallest end of a chain of each length
    ends: list[int] = []  # which pair that is
    before: list[int] = []
    for n, (_, j) in enumerate(pairs):
        at = bisect_left(tails, j)
        before.append(ends[at - 1] if at else -1)
        if at == len(tails):
            tails.append(j)
            ends.append(n)
        else:
            tails[at], ends[at] = j, n
    chain: list[tuple[int, int]] = []
    n = ends[-1] if ends else -1
    while n >= 0:
        chain.append(pairs[n])
        n = before[n]
    return _spread(chain[::-1])


def _spread(chain: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Anchors far enough apart to be worth a call each."""
    kept: list[tuple[int, int]] = []
    for i, j in chain:
        if not kept or min(i - kept[-1][0], j - kept[-1][1]) >= 4 * GRAM:
            kept.append((i, j))
    return kept


def _once(ids: list[int]) -> dict[tuple[int, ...], int]:
    """Grams that occur once, by where they start, in order."""
    found: dict[tuple[int, ...], int] = {}
    for i in range(len(ids) - GRAM + 1):
        gram = tuple(ids[i : i + GRAM])
        found[gram] = -1 if gram in found else i
    return {gram: i for gram, i in found.items() if i >= 0}
