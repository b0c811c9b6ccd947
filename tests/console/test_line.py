"""Lines: exact widths, tables that give up columns in order, and the cells that changed."""

from hypothesis import given
from hypothesis import strategies as st

from console.widgets.line import (
    Column,
    Span,
    between,
    cells,
    changed_cells,
    fit,
    line,
    plain,
    table,
)
from console.widgets.spark import bar, heat, spark

texts = st.text(alphabet="ab日é─ ", max_size=12)
spans = st.lists(st.builds(Span, texts, st.sampled_from(["text", "dim"])), max_size=4).map(tuple)


@given(spans, st.integers(0, 30))
def test_fit_is_exact(made: tuple[Span, ...], width: int) -> None:
    assert cells(fit(made, width)) == width


@given(spans, spans, st.integers(1, 40))
def test_between_is_exact(left: tuple[Span, ...], right: tuple[Span, ...], width: int) -> None:
    assert cells(between(left, right, width)) == width


def test_between_keeps_the_value_and_cuts_the_label() -> None:
    assert plain(between(line("a long label"), line("42"), 10)) == "a long… 42"


COLUMNS = (
    Column("name", 6, "<", grow=4),
    Column("n", 4),
    Column("rare", 5, rank=2),
    Column("x", 3, rank=1),
)


def test_a_narrow_table_drops_the_highest_rank_first() -> None:
    rows = [["kestrel", "12", "r", "y"]]
    assert plain(table(COLUMNS, rows, 40)[0]).split() == ["name", "n", "rare", "x"]
    assert plain(table(COLUMNS, rows, 20)[0]).split() == ["name", "n", "x"]
    assert plain(table(COLUMNS, rows, 12)[0]).split() == ["name", "n"]
    assert all(cells(row) == 12 for row in table(COLUMNS, rows, 12)[1])


def test_growing_stops_before_values_leave_their_labels() -> None:
    header, _ = table(COLUMNS, [], 100)
    assert plain(header).index("n", 1) < 20


def test_changed_cells_are_the_changed_ones() -> None:
    old, new = line("in flight  48 / 64"), line("in flight  49 / 64")
    assert changed_cells(old, new) == [(12, 13)]
    assert changed_cells(old, old) == []
    assert changed_cells(line("a"), line(("a", "dim"))) == [(0, 1)]
    assert changed_cells(line("a" + "x" * 30 + "b"), line("c" + "x" * 30 + "d")) == [
        (0, 1),
        (31, 32),
    ]


def test_changed_cells_never_cut_a_wide_character() -> None:
    assert changed_cells(
        line("日本"),
        line("日x "),
    ) == [(2, 4)]
    assert changed_cells(line("a本"), line("日b")) == [(0, 3)]


@given(spans, spans)
def test_replacing_the_changed_cells_gives_the_new_line(
    a: tuple[Span, ...], b: tuple[Span, ...]
) -> None:
    width = max(cells(a), cells(b))
    old, new = fit(a, width), fit(b, width)
    covered = set()
    for start, end in changed_cells(old, new):
        covered.update(range(start, end))
    before, after = _cells(old), _cells(new)
    for i, (x, y) in enumerate(zip(before, after, strict=True)):
        assert x == y or i in covered


def _cells(spans_: tuple[Span, ...]) -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    for text, style in spans_:
        for char in text:
            out.append((char, style))
            if char == "日":
                out.append((char, style + "'"))
    return out


def test_sparklines() -> None:
    assert spark([0, 1, 2, 4], 4) == ["▁▃▅█"]
    assert spark([], 4, 2) == ["    ", "    "]
    assert spark([1.0], 3) == ["  █"]
    assert spark([0.5, 0.5], 2, top=1.0) == ["▅▅"]
    assert spark([1, 10], 4, stretch=True, log=True) == ["▁▁██"]
    tall = spark([1, 16], 2, 2)
    assert tall == [" █", "▂█"]
    assert spark([10, 1, 0.1], 3, log=True) == ["█▅▁"]


def test_heat_strip_reads_without_colour() -> None:
    assert heat([None, 0.0, 0.3, 0.6, 1.0], 6) == "  ░▒▓█"


@given(st.one_of(st.none(), st.floats(-1, 2)), st.integers(0, 40))
def test_bars_are_exact(share: float | None, width: int) -> None:
    assert cells(bar(share, width)) == width
