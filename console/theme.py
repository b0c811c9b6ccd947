"""Colours: three themes and, for the line widgets, what each style name looks like in them.

Okabe-Ito hues, which stay apart for every common colour blindness; no green/red pair. Colour
repeats what a glyph or a word already says, so everything can be read with NO_COLOR, in 16 colours
and on the terminal's own palette.
"""

import dataclasses
import os
from collections.abc import Mapping

from rich.style import Style
from textual.theme import BUILTIN_THEMES, Theme

DARK, LIGHT, ANSI = "eyas-dark", "eyas-light", "eyas-ansi"

THEMES: tuple[Theme, ...] = (
    Theme(
        name=DARK,
        primary="#56B4E9",
        secondary="#CC79A7",
        accent="#F0E442",
        success="#56B4E9",
        warning="#E69F00",
        error="#E8743B",
        foreground="#D5DBE1",
        background="#0E1216",
        surface="#0E1216",
        panel="#1B222A",
        dark=True,
        variables={
            "line": "#333D48",
            "faint": "#7C8894",
            "scrollbar": "#333D48",
            "scrollbar-background": "#0E1216",
            "block-cursor-background": "#263340",
            "block-cursor-foreground": "#F2F5F8",
            "input-selection-background": "#56B4E9 35%",
        },
    ),
    Theme(
        name=LIGHT,
        primary="#00639C",
        secondary="#9C3F78",
        accent="#7A6000",
        success="#00639C",
        warning="#9A5B00",
        error="#B23F00",
        foreground="#1C2329",
        background="#FAFAF7",
        surface="#FAFAF7",
        panel="#ECECE6",
        dark=False,
        variables={
            "line": "#C3C8CC",
            "faint": "#5F6B76",
            "scrollbar": "#C3C8CC",
            "scrollbar-background": "#FAFAF7",
            "block-cursor-background": "#D6E6F1",
            "block-cursor-foreground": "#0B1116",
            "input-selection-background": "#00639C 30%",
        },
    ),
    dataclasses.replace(
        BUILTIN_THEMES["ansi-dark"],
        name=ANSI,
        variables=BUILTIN_THEMES["ansi-dark"].variables
        | {"line": "ansi_bright_black", "faint": "ansi_bright_black"},
    ),
)


def _rgb_palette(t: Mapping[str, str]) -> dict[str, Style]:
    back, panel, strong = t["background"], t["panel"], t["strong"]
    return {
        "text": Style(color=t["foreground"]),
        "dim": Style(color=t["faint"]),
        "faint": Style(color=t["line"]),
        "bold": Style(color=strong, bold=True),
        "ok": Style(color=t["primary"]),
        "warn": Style(color=t["warning"]),
        "error": Style(color=t["error"], bold=True),
        "accent": Style(color=t["accent"]),
        "extra": Style(color=t["secondary"]),
        "spark": Style(color=t["spark"]),
        "bar": Style(color=t["foreground"], bgcolor=panel),
        "bar-dim": Style(color=t["faint"], bgcolor=panel),
        "bar-bold": Style(color=strong, bgcolor=panel, bold=True),
        "bar-ok": Style(color=t["primary"], bgcolor=panel, bold=True),
        "bar-warn": Style(color=t["warning"], bgcolor=panel, bold=True),
        "bar-error": Style(color=t["error"], bgcolor=panel, bold=True),
        "key": Style(color=t["primary"], bgcolor=panel, bold=True),
        "banner-warn": Style(color=back, bgcolor=t["warning"], bold=True),
        "banner-error": Style(color=back, bgcolor=t["error"], bold=True),
        "banner-ok": Style(color=back, bgcolor=t["primary"], bold=True),
        "chip": Style(color=back, bgcolor=t["primary"], bold=True),
        "chip-dim": Style(color=back, bgcolor=t["faint"], bold=True),
        "chip-bad": Style(color=back, bgcolor=t["error"], bold=True),
        "even": Style(color=t["foreground"], bgcolor=t["even"]),
        "odd": Style(color=t["foreground"], bgcolor=t["odd"]),
        "even-dim": Style(color=t["faint"], bgcolor=t["even"]),
        "odd-dim": Style(color=t["faint"], bgcolor=back),
        "invisible": Style(color=t["accent"], bgcolor=t["odd"]),
        "cursor": Style(color=t["cursor"], bgcolor=t["cursor-back"], bold=True),
    }


def _ansi_palette() -> dict[str, Style]:
    bar = Style(reverse=True)
    return {
        "text": Style(),
        "dim": Style(dim=True),
        "faint": Style(dim=True),
        "bold": Style(bold=True),
        "ok": Style(color="cyan"),
        "warn": Style(color="yellow"),
        "error": Style(color="red", bold=True),
        "accent": Style(color="yellow"),
        "extra": Style(color="magenta"),
        "spark": Style(color="cyan"),
        "bar": bar,
        "bar-dim": bar,
        "bar-bold": bar + Style(bold=True),
        "bar-ok": bar + Style(bold=True),
        "bar-warn": bar + Style(bold=True),
        "bar-error": bar + Style(bold=True),
        "key": bar + Style(bold=True),
        "banner-warn": Style(color="black", bgcolor="yellow", bold=True),
        "banner-error": Style(color="white", bgcolor="red", bold=True),
        "banner-ok": Style(color="black", bgcolor="cyan", bold=True),
        "chip": Style(color="black", bgcolor="cyan", bold=True),
        "chip-dim": Style(reverse=True, dim=True),
        "chip-bad": Style(color="white", bgcolor="red", bold=True),
        "even": Style(),
        "odd": Style(underline=True),
        "even-dim": Style(dim=True),
        "odd-dim": Style(dim=True, underline=True),
        "invisible": Style(color="yellow"),
        "cursor": Style(reverse=True, bold=True),
    }


_SHADES = {
    DARK: {"strong": "#F2F5F8", "spark": "#3F7FA6", "even": "#1D252D", "odd": "#2A343E"},
    LIGHT: {"strong": "#0B1116", "spark": "#5C93B8", "even": "#EFEFE9", "odd": "#E0E4E4"},
}


def palette(name: str, dark: bool = True) -> dict[str, Style]:
    """Styles of the line widgets for a theme; a foreign theme gets the dark or the light set."""
    if name.startswith("ansi") or name == ANSI:
        return _ansi_palette()
    if name not in _SHADES:
        name = DARK if dark else LIGHT
    theme = next(t for t in THEMES if t.name == name)
    colours = {f.name: getattr(theme, f.name) for f in dataclasses.fields(theme)}
    return _rgb_palette(
        {k: v for k, v in colours.items() if isinstance(v, str)}
        | theme.variables
        | _SHADES[name]
        | {
            "cursor": theme.variables["block-cursor-foreground"],
            "cursor-back": theme.variables["block-cursor-background"],
        }
    )


def choose(configured: str, low_bandwidth: bool = False) -> str:
    """Environment first, then what the terminal can show, then the config."""
    if wanted := os.environ.get("TEXTUAL_THEME", ""):
        return wanted.split(",")[0]
    term = os.environ.get("TERM", "")
    rich_colours = "256" in term or "direct" in term or bool(os.environ.get("COLORTERM"))
    if low_bandwidth or not rich_colours:
        return ANSI
    return configured or DARK
