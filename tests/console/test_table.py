"""The token table: what stands in its columns, characters split among tokens, search over token
borders.
"""

from hypothesis import given
from hypothesis import strategies as st

from console.widgets import tokens as tk
from console.widgets.align import difference
from console.widgets.line import cells, plain
from console.widgets.table import TokenTable, joined
from core.schema import Sample, Segment

TEXTS = (b"Let", b" me ", b"\xf0\x9f", b"\x98", b"\x80", b"\xc3", b"x", b"<|im_end|>")


class Eight:
    vocab_size = len(TEXTS)

    def token_bytes(self, token_id: int) -> bytes:
        return TEXTS[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id == 7


IDS = [0, 1, 7, 0, 2, 3, 4, 5, 6, 7, 9]
TOKENS = tk.tokens_of(Eight(), IDS)
SAMPLE = Sample(
    sample_id="s",
    prompt_id="s",
    twin_id="",
    dataset="d",
    arm="declared",
    backend="b",
    provider=None,
    token_ids=IDS,
    prompt_len=3,
    verdict="mismatch",
    segments=[
        Segment(kind="reasoning", start=0, end=4),
        Segment(kind="call_id", start=5, end=6),
        Segment(kind="end", start=6, end=7),
    ],
    masked=[4],
)


def test_each_column_says_what_it_should() -> None:
    table = TokenTable(SAMPLE, TOKENS, 100)
    rows = [plain(row) for row in table]
    assert [table.segment(i) for i in range(len(IDS))] == [
        *["prompt"] * 3,
        *["reasoning"] * 4,
        "",
        "call id",
        "end",
        "",
    ]
    assert "".join(table.mask(i) for i in range(len(IDS))) == "···●○●●●●●●"
    assert rows[1].split() == ["1", "1", "·", "prompt", "·me·", "20", "6D", "65", "20"]
    assert rows[4].split()[:7] == ["4", "2", "○", "reasoning", "‹F0", "9F›", "┐"]
    assert "‹98› │" in rows[5] and "‹80› ┘ 😀" in rows[6] and "‹C3›" in rows[7]
    assert "‹?9›" in rows[10] and " im_end " in rows[2]
    assert plain(table.header()).split() == ["index", "id", "loss", "segment", "token", "bytes"]


@given(st.integers(20, 200))
def test_every_row_has_the_width_of_its_table(width: int) -> None:
    for row in (TokenTable(SAMPLE, TOKENS, width).header(), *TokenTable(SAMPLE, TOKENS, width)):
        assert cells(row) == width


def test_only_whole_characters_are_joined() -> None:
    assert joined(TOKENS, 3) == {4: "┐", 5: "│", 6: "┘ 😀"}
    assert joined(TOKENS, 5) == {}  # split by the end of the prompt: never joined over it


def test_text_is_found_over_the_borders_of_tokens_and_ids_by_number() -> None:
    assert tk.find(TOKENS, "t m") == [0]
    assert tk.find(TOKENS, "let") == [0, 3]
    assert tk.find(TOKENS, "LET") == []
    assert tk.find(TOKENS, "😀") == [4]
    assert tk.find(TOKENS, "<|im_end|>") == [2, 9]
    assert tk.find(TOKENS, "7") == [2, 9]
    assert tk.find(TOKENS, "9") == [10]
    assert tk.find(TOKENS, "") == []


WORDS = st.lists(st.integers(0, 6), max_size=30)


@given(WORDS, st.text("Let me x", min_size=1, max_size=4))
def test_search_finds_what_a_plain_search_finds(ids: list[int], wanted: str) -> None:
    tokens = tk.tokens_of(Eight(), ids)
    raw = b"".join(TEXTS[i] for i in ids)
    whole = raw.lower() if wanted == wanted.lower() else raw
    starts = [n for n in range(len(whole)) if whole.startswith(wanted.encode(), n)]
    borders = [sum(len(TEXTS[i]) for i in ids[: n + 1]) for n in range(len(ids))]
    assert tk.find(tokens, wanted) == sorted(
        {next(n for n, end in enumerate(borders) if start < end) for start in starts}
    )


@given(WORDS, WORDS)
def test_a_row_of_a_difference_is_found_by_either_index(left: list[int], right: list[int]) -> None:
    a, b = tk.tokens_of(Eight(), left), tk.tokens_of(Eight(), right)
    diff = difference(left, right)
    table = tk.DiffTable(diff, a, b, 80, tk.Options())
    for index in range(len(left)):
        assert diff.rows[table.row_of(index)].left == index
    for index in range(len(left), len(right)):
        assert diff.rows[table.row_of(index)].right == index
    assert table.row_of(99) == -1
    hits = {i for i, token in enumerate(left) if token == 1}
    assert [diff.rows[r].left for r in table.rows_with(hits, set())] == sorted(hits)
