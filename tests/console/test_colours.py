"""Meaning does not live in colour, and the terminal's abilities are respected (case C78)."""

import json

import pytest

from console import status, theme
from tests.conftest import SHARED
from tests.console.still import StillApp
from tests.console.test_app import opened


def test_no_two_states_share_a_glyph_and_word() -> None:
    for table in (
        status.RUN,
        status.STAGE,
        status.VERDICT,
        status.LINK,
        status.LOG,
    ):
        assert len({mark.word for mark in table.values()}) == len(table)
        assert all(mark.glyph.strip() and mark.word.strip() for mark in table.values())
    assert status.mark(status.RUN, "new_state").text == "? new_state"


@pytest.mark.parametrize(
    ("term", "colorterm", "expected"),
    [
        ("xterm-256color", "", theme.DARK),
        ("tmux-256color", "", theme.DARK),
        ("screen", "", theme.ANSI),
        ("linux", "", theme.ANSI),
        ("xterm", "", theme.ANSI),
        ("xterm", "truecolor", theme.DARK),
        ("", "", theme.ANSI),
    ],
)
def test_poor_terminals_get_their_own_palette(
    monkeypatch: pytest.MonkeyPatch, term: str, colorterm: str, expected: str
) -> None:
    monkeypatch.delenv("TEXTUAL_THEME", raising=False)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLORTERM", colorterm)
    assert theme.choose(theme.DARK) == expected
    assert theme.choose(theme.DARK, low_bandwidth=True) == theme.ANSI
    monkeypatch.setenv("TEXTUAL_THEME", "nord")
    assert theme.choose(theme.DARK) == "nord"


@pytest.mark.parametrize("name", [theme.DARK, theme.LIGHT, theme.ANSI, "nord"])
def test_palettes_have_the_same_names(name: str) -> None:
    assert set(theme.palette(name)) == set(theme.palette(theme.DARK))


def test_text_stands_out_from_its_background() -> None:
    """WCAG contrast of at least 4.5 for text and of 3 for what is dim."""
    for name in (theme.DARK, theme.LIGHT):
        styles = theme.palette(name)
        back = next(t.background for t in theme.THEMES if t.name == name)
        assert back is not None
        for style, least in (
            ("text", 7),
            ("bold", 7),
            ("ok", 4.5),
            ("warn", 4.5),
            ("error", 4.5),
            ("dim", 4.5),
        ):
            colour = styles[style].color
            assert colour is not None
            assert contrast(colour.name, back) >= least, (name, style)


def contrast(a: str, b: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


async def test_without_colour_the_words_are_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    texts = {}
    for phase in ("generate", "halted"):
        app = StillApp(phase)
        async with opened(app):
            texts[phase] = app.shown()
            for strip in app.screen._compositor.render_strips():
                for segment in strip:
                    triplet = (
                        segment.style.color.triplet
                        if segment.style and segment.style.color
                        else None
                    )
                    assert triplet is None or len(set(triplet)) == 1
    assert "● RUNNING" in texts["generate"]
    assert "■ HALTED" in texts["halted"]
    assert "▲ paused" in texts["generate"]


def test_case_c78_is_the_matrix_above() -> None:
    path = SHARED / "cases" / "C78.json"
    if not path.exists():
        pytest.skip("shared/cases is not beside this checkout")
    case = json.loads(path.read_text(encoding="utf-8"))
    assert {row["TERM"] for row in case["matrix"]} == {
        "xterm-256color",
        "tmux-256color",
        "screen",
        "linux",
        "dumb",
    }
