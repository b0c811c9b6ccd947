"""Two lists of token ids aligned row by row: the shortest edit script where that is quick, a split
at common stretches where it is not.

Pure. The library's one call holds the interpreter from its first to its last step, and with it the
thread that hears HALT, so no call is given more than a few milliseconds of work.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MAX_CELLS = 4_000_000
"""Left times right length for one call of the library: 2,000 x 2,000 ids without a common one take
5 ms."""
GRAM = 8
"""Ids in a row, found once on each side, that make an anchor."""


class Row(NamedTuple):
    """`left`, `right`: indices into the two lists, -1 where one has nothing."""

    sign: str
    left: int
    right: int


class Difference(NamedTuple):
    rows: list[Row]
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
    rows = [Row("=", i, i) for i in range(prefix)]
    middle_left = list(left[prefix : len(left) - suffix])
    middle_right = list(right[prefix : len(right) - suffix])
    for row in _aligned(middle_left, middle_right):
        a, b = row.left, row.right
        rows.append(Row(row.sign, a + prefix if a >= 0 else -1, b + prefix if b >= 0 else -1))
    rows += [Row("=", len(left) - suffix + k, len(right) - suffix + k) for k in range(suffix)]
    hunks = [i for i, r in enumerate(rows) if r.sign != "=" and (i == 0 or rows[i - 1].sign == "=")]
    return Difference(rows, hunks, prefix, suffix)


def _aligned(left: list[int], right: list[int]) -> Iterator[Row]:
    """Rows of two lists; long ones are cut at their anchors and aligned piece by piece."""
    if len(left) * len(right) <= MAX_CELLS:
        yield from _edited(left, right, 0, 0)
        return
    a = b = 0
    for at, to in [*_anchors(left, right), (len(left), len(right))]:
        piece, other = left[a:at], right[b:to]
        if len(piece) * len(other) <= MAX_CELLS:
            yield from _edited(piece, other, a, b)
        else:  # nothing in common for thousands of ids: side by side says as much as any alignment
            yield from _replaced(range(a, at), range(b, to))
        a, b = at, to


def _edited(left: list[int], right: list[int], a0: int, b0: int) -> Iterator[Row]:
    """Shortest edit script (Levenshtein)."""
    from rapidfuzz.distance import Levenshtein

    for op in Levenshtein.opcodes(left, right):
        a = range(op.src_start + a0, op.src_end + a0)
        b = range(op.dest_start + b0, op.dest_end + b0)
        if op.tag == "equal":
            yield from (Row("=", i, j) for i, j in zip(a, b, strict=True))
        else:
            yield from _replaced(a, b)


def _replaced(a: range, b: range) -> Iterator[Row]:
    paired = min(len(a), len(b))
    yield from (Row("≠", a[k], b[k]) for k in range(paired))
    yield from (Row("−", i, -1) for i in a[paired:])
    yield from (Row("+", -1, j) for j in b[paired:])


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
