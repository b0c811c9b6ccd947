"""Alignment of id lists: always both lists whole and in order; short ones by the shortest script,
long ones at their anchors, and never one long call of the library."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from console.widgets import align
from console.widgets.align import Difference, difference

IDS = st.lists(st.integers(0, 5), max_size=40)


def check(diff: Difference, left: list[int], right: list[int]) -> None:
    assert [r.left for r in diff.rows if r.left >= 0] == list(range(len(left)))
    assert [r.right for r in diff.rows if r.right >= 0] == list(range(len(right)))
    for row in diff.rows:
        both = row.left >= 0 and row.right >= 0
        assert (row.sign == "=") == (both and left[row.left] == right[row.right])
        assert both == (row.sign in "=≠")
    starts = [diff.rows[h] for h in diff.hunks]
    assert all(r.sign != "=" for r in starts)
    assert bool(starts) == (left != right)


@given(IDS, IDS)
def test_short_lists_take_the_shortest_script(left: list[int], right: list[int]) -> None:
    diff = difference(left, right)
    check(diff, left, right)
    edits = sum(r.sign != "=" for r in diff.rows)
    assert edits == Levenshtein.distance(left, right)


@given(IDS, IDS)
def test_lists_cut_at_anchors_are_still_whole(left: list[int], right: list[int]) -> None:
    """Two-id anchors and no room for a call: every way through the splitting."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(align, "GRAM", 2)
        patch.setattr(align, "MAX_CELLS", 12)
        rows = difference(left, right).rows
    assert [r.left for r in rows if r.left >= 0] == list(range(len(left)))
    assert [r.right for r in rows if r.right >= 0] == list(range(len(right)))
    assert all(left[r.left] == right[r.right] for r in rows if r.sign == "=")


def test_long_lists_are_aligned_in_small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 ids with a changed one every 100, a lost stretch and a new one: found exactly."""
    dice = random.Random(1)
    left = [dice.randrange(30_000) for _ in range(20_000)]
    right = [i + 30_000 if n % 100 == 50 else i for n, i in enumerate(left)]
    right = right[:5_000] + right[5_300:12_000] + [70_000 + n for n in range(250)] + right[12_000:]
    calls: list[int] = []
    real = Levenshtein.opcodes

    def counted(a: list[int], b: list[int]) -> object:
        calls.append(len(a) * len(b))
        return real(a, b)

    monkeypatch.setattr(Levenshtein, "opcodes", counted)
    diff = difference(left, right)
    check(diff, left, right)
    assert sum(r.sign == "=" for r in diff.rows) == 20_000 - 300 - 197
    assert max(calls) <= align.MAX_CELLS


def test_long_lists_without_anything_in_common_stand_side_by_side() -> None:
    left, right = list(range(3_000)), list(range(10_000, 12_000))
    diff = difference(left, right)
    check(diff, left, right)
    assert [r.sign for r in diff.rows] == ["≠"] * 2_000 + ["−"] * 1_000
    assert diff.hunks == [0]
