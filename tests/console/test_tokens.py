"""Tokens for eyes: chips, glyphs, broken characters, and the aligned difference."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from console.widgets import tokens as tk
from console.widgets.align import difference
from console.widgets.flow import Flow, groups
from console.widgets.line import cells, plain
from tests.console.test_sanitize import obeyed


class Bytes:
    """A tokenizer of single bytes, a few words and two special tokens."""

    words = (b" the", b"\n\n", b"city", b"\xe6\x97", b"\xa5", b"  ", b"\xcc\x81")
    specials = (b"<|im_end|>", b"</think>")
    vocab_size = 256 + len(words) + len(specials)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return (*self.words, *self.specials)[token_id - 256]

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256 + len(self.words)


D = Bytes()


def show(ids: Sequence[int], **options: bool) -> list[str]:
    return [tk.shown(t, tk.Options(**options)) for t in tk.tokens_of(D, ids)]


def test_what_cannot_be_seen_is_named() -> None:
    assert show([256, 257, 258]) == ["·the", "⏎⏎", "city"]
    assert show([259, 260]) == ["‹E6 97›", "‹A5›"]
    assert show([0x1B, 0x20, 261]) == ["‹ESC›", "·", "··"]
    assert show([262]) == ["◌\u0301"]
    assert show([263, 264, 999_999]) == ["im_end", "</think>", "‹?999999›"]
    assert show([256], bytes=True) == ["20 74 68 65"]


def test_flow_separates_prompt_from_completion_and_marks_chips() -> None:
    tokens = tk.tokens_of(D, [258, 263, 256, 257, 258, 264])
    lines = Flow(tokens, 2, 30)
    assert plain(lines[0]).strip() == "city im_end"
    assert plain(lines[1]).strip() == "the⏎⏎"
    assert [s.style for s in lines[0] if s.text.strip()] == ["even-dim", "chip-dim"]
    assert {s.style for s in lines[2] if s.text.strip()} == {"even", "chip"}


def test_flow_joins_a_character_that_is_split_among_tokens() -> None:
    tokens = tk.tokens_of(D, [258, 259, 260, 256, 0xE6, 0x97])
    assert list(groups(tokens, 0)) == [(0, 1), (1, 3), (3, 4), (4, 5), (5, 6)]
    assert plain(Flow(tokens, 0, 40)[0]).strip() == "city日 the‹E6›‹97›"
    assert "日 259+260" in plain(Flow(tokens, 0, 60, tk.Options(ids=True))[0])
    assert list(groups(tokens, 2)) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)]


def test_masked_tokens_are_dim() -> None:
    tokens = tk.tokens_of(D, [258, 256, 258])
    line = Flow(tokens, 1, 30, mask=[False, True, False])[1]
    assert [s.style for s in line if s.text.strip()] == ["odd", "even-dim"]


@given(st.lists(st.integers(-1, 300), max_size=60), st.integers(12, 60), st.booleans())
def test_flow_fits_and_is_harmless(ids: list[int], width: int, with_ids: bool) -> None:
    for line in Flow(tk.tokens_of(D, ids), len(ids) // 2, width, tk.Options(ids=with_ids)):
        assert cells(line) == width
        assert not obeyed(plain(line))


ids_lists = st.lists(st.integers(0, 6), max_size=40)


@given(ids_lists, ids_lists)
def test_a_difference_rebuilds_both_sides(a: list[int], b: list[int]) -> None:
    diff = difference(a, b)
    assert [r.left for r in diff.rows if r.left >= 0] == list(range(len(a)))
    assert [r.right for r in diff.rows if r.right >= 0] == list(range(len(b)))
    for row in diff.rows:
        match row.sign:
            case "=":
                assert a[row.left] == b[row.right]
            case "≠":
                assert a[row.left] != b[row.right]
            case "−":
                assert row.right == -1
            case "+":
                assert row.left == -1
    assert diff.identical == (a == b)
    assert len([r for r in diff.rows if r.sign != "="]) <= max(len(a), len(b))


def test_the_headline_names_the_first_divergence() -> None:
    a, b = [258, 257, 258, 263], [258, 10, 258, 263]
    left, right = tk.tokens_of(D, a), tk.tokens_of(D, b)
    diff = difference(a, b)
    text, style = tk.headline(diff, left, right, ("local", "API"))
    assert (
        text
        == 'FIRST DIVERGENCE @1: local 257 "⏎⏎" vs API 10 "⏎" · 1 hunk · common prefix 1 · suffix 2'
    )
    assert style == "error"
    assert tk.headline(difference(a, a), left, left, ("l", "r")) == (
        "IDENTICAL (4 tokens)",
        "ok",
    )


def test_only_differences_keep_three_rows_of_context() -> None:
    a = list(range(100))
    b = [*range(50), 200, *range(51, 100)]
    diff = difference(a, b)
    assert tk.visible_rows(diff, only_diffs=True) == [47, 48, 49, 50, 51, 52, 53]
    b[10] = 201
    assert tk.visible_rows(difference(a, b), only_diffs=True) == [
        7,
        8,
        9,
        10,
        11,
        12,
        13,
        -1,
        47,
        48,
        49,
        50,
        51,
        52,
        53,
    ]


def test_unpaired_tokens_are_plus_and_minus() -> None:
    diff = difference([1, 2, 3, 4], [1, 4])
    assert [r.sign for r in diff.rows] == ["=", "−", "−", "="]
    diff = difference([1, 4], [1, 2, 3, 4])
    assert [r.sign for r in diff.rows] == ["=", "+", "+", "="]


@given(ids_lists, ids_lists, st.integers(30, 120))
def test_every_row_of_the_table_fits(a: list[int], b: list[int], width: int) -> None:
    diff = difference(a, b)
    table = tk.DiffTable(diff, tk.tokens_of(D, a), tk.tokens_of(D, b), width, tk.Options(ids=True))
    assert len(table) == len(diff.rows)
    for i in range(len(table)):
        assert cells(table[i]) == width
    assert cells(table.header(("local", "API"))) == width


def test_a_long_difference_is_found() -> None:
    a = [i * 7919 % 5_000 for i in range(32_000)]
    b = [*a[:15_000], 9, 9, 9, *a[15_002:]]
    diff = difference(a, b)
    assert diff.prefix == 15_000
    assert len(diff.hunks) == 1
