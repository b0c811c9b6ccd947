"""Hostile text: nothing that a terminal obeys comes out, and widths are exact (cases C82 and the
OSC/C1/bidi family).
"""

import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from console.sanitize import cell, clean, cut, glyph, to_ascii, width, wrap
from tests.conftest import SHARED
from tests.console.recording import HOSTILE

NASTY = "\x00\x07\x1b\x7f\x85\x9b\x9d\u202e\u200b\u2028\ufeff\u0301\u20e3\ufe0f\u200d🏽🇩日👍 \t\n\r"
hostile = st.text(
    alphabet=st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(NASTY)),
    max_size=60,
)


def obeyed(text: str) -> list[str]:
    """Characters that a terminal might act on instead of drawing them."""
    bad = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    return [c for c in text if unicodedata.category(c) in bad]


@given(hostile)
def test_nothing_is_left_that_a_terminal_obeys(text: str) -> None:
    assert obeyed(clean(text)) == []
    assert "\n" not in clean(text)


@given(hostile)
def test_cleaning_twice_changes_nothing_more(text: str) -> None:
    assert clean(clean(text)) == clean(text)


@given(hostile, st.integers(0, 30), st.sampled_from("<>^"))
def test_a_cell_is_exactly_as_wide_as_asked(text: str, cells: int, align: str) -> None:
    shown = cell(text, cells, align)
    assert cell_len(shown) == cells
    assert obeyed(shown) == []


@given(hostile, st.integers(2, 30))
def test_wrapped_lines_fit_and_lose_nothing(text: str, cells: int) -> None:
    lines = wrap(text, cells)
    assert all(width(line) <= max(cells, 2) for line in lines)
    assert "".join(lines) == "".join(clean(part) for part in text.split("\n"))


@given(hostile)
def test_ascii_keeps_the_width(text: str) -> None:
    shown = to_ascii(clean(text))
    assert shown.isascii()
    assert len(shown) == width(clean(text))


@given(st.text(alphabet=st.characters(codec="ascii", categories=["L", "N", "P", "S"]), max_size=40))
def test_plain_text_is_left_alone(text: str) -> None:
    assert clean(text) == text


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31m", "‹ESC›[31m"),
        ("\x9b31m", "‹CSI›31m"),
        ("\x1b]0;t\x07", "‹ESC›]0;t‹BEL›"),
        ("a\u202eb", "a‹RLO›b"),
        ("a\u200bb\u00ad", "a‹ZWSP›b‹SHY›"),
        ("one\ntwo\tthree\r", "one⏎two⇥three␍"),
        ("👍🏽", "👍‹U+1F3FD›"),
        ("\U000e0041", "‹U+E0041›"),
        ("\ud800", "‹U+D800›"),
        ("[red]x[/red]", "[red]x[/red]"),
        ("e\u0301", "e\u0301"),
        ("e\u0301\u0301\u0301\u0301", "e\u0301\u0301‹U+0301›‹U+0301›"),
        ("\u0301", "‹U+0301›"),
    ],
)
def test_named_glyphs(raw: str, shown: str) -> None:
    assert clean(raw) == shown


def test_wide_characters_are_never_halved() -> None:
    assert cut("日本語", 4) == "日…"
    assert cell("日本語", 4) == "日… "
    assert cell("日本語", 6) == "日本語"


def test_every_character_has_a_certain_width() -> None:
    """Over all of Unicode: what is drawn as it is has the width that the painter counts with."""
    for code in range(0x20, 0x30000):
        char = chr(code)
        if glyph(char) == char:
            assert char.isprintable()
            assert cell_len(char) in (0, 1, 2)


def test_case_c82_columns_stay_straight() -> None:
    path = SHARED / "cases" / "C82.json"
    if not path.exists():
        pytest.skip("shared/cases is not beside this checkout")
    case = json.loads(Path(path).read_text(encoding="utf-8"))
    for text in case["cells"]:
        shown = cell(text, case["column_width"])
        assert cell_len(shown) == case["expect"]["display_width_each"]
        assert obeyed(shown) == []
    assert "⇥" in cell("tab\tnew\nline", 20)
    assert "⏎" in cell("tab\tnew\nline", 20)


def test_the_recording_is_hostile_and_comes_out_harmless() -> None:
    assert obeyed(HOSTILE)
    assert not obeyed(clean(HOSTILE))
