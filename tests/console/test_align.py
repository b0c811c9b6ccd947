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


def edit_distance(left: list[int], right: list[int]) -> int:
    """The textbook's table, row by row (Wagner and Fischer)."""
    above = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        row = [i]
        for j, b in enumerate(right, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (a != b)))
        above = row
    return above[-1]


@given(IDS, IDS)
def test_short_lists_take_the_shortest_script(left: list[int], right: list[int]) -> None:
    diff = difference(left, right)
    check(diff, left, right)
    assert sum(r.sign != "=" for r in diff.rows) == edit_distance(left, right)


@given(IDS, IDS)
def test_lists_walked_in_windows_are_still_whole(left: list[int], right: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(align, "GRAM", 99)  # no anchor: everything is walked
        patch.setattr(align, "MAX_CELLS", 0)
        patch.setattr(align, "WINDOW", 6)
        patch.setattr(align, "KEPT", 4)
        rows = difference(left, right).rows
    assert [r.left for r in rows if r.left >= 0] == list(range(len(left)))
    assert [r.right for r in rows if r.right >= 0] == list(range(len(right)))
    assert all(left[r.left] == right[r.right] for r in rows if r.sign == "=")


def test_long_repeats_have_no_anchor_and_are_aligned_all_the_same() -> None:
    """A period of 40 over 8,000 ids, 60 of them changed: nothing else differs."""
    left = [n % 40 for n in range(8_000)]
    dice = random.Random(2)
    changed = set(dice.sample(range(8_000), 60))
    right = [99 if n in changed else i for n, i in enumerate(left)]
    diff = difference(left, right)
    check(diff, left, right)
    assert sum(r.sign != "=" for r in diff.rows) == 60
    shorter = difference([1, *[7] * 6_000, 2], [3, *[7] * 5_900, 4])
    assert sum(r.sign == "=" for r in shorter.rows) == 5_900


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
