"""Hostile text becomes harmless text, and text becomes cells of an exact width.

Whatever a model or an API wrote passes through `clean` before it reaches a terminal: control
characters, escape sequences, bidirectional overrides, zero-width and other invisible characters
come out as named glyphs (`‹ESC›`, `‹RLO›`, `‹U+00AD›`), line breaks and tabs as `⏎` and `⇥`.
Nothing here knows markup; nothing is ever parsed as it.
"""

import unicodedata
from functools import lru_cache

from rich.cells import cell_len, get_character_cell_size

MAX_MARKS = (
    2  # combining marks kept on one base character; a stack of more is an attack on the line above
)

# Code point and name: what a terminal would obey, or what would be seen as nothing.
_NAMED = """
    0 NUL 7 BEL 8 BS 1b ESC 7f DEL 85 NEL 9b CSI 9d OSC a0 NBSP ad SHY 61c ALM 200b ZWSP 200c ZWNJ
    200d ZWJ 200e LRM 200f RLM 2028 LS 2029 PS 202a LRE 202b RLE 202c PDF 202d LRO 202e RLO 2060 WJ
    2066 LRI 2067 RLI 2068 FSI 2069 PDI fe0e VS15 fe0f VS16 feff BOM 3000 U+3000 fffd U+FFFD
"""
_PAIRS = _NAMED.split()
_NAMES = {"\n": "⏎", "\t": "⇥", "\r": "␍"} | {
    chr(int(code, 16)): f"‹{name}›" for code, name in zip(_PAIRS[::2], _PAIRS[1::2], strict=True)
}

# Terminals disagree on the width of clusters that these build, so each is named instead of drawn.
_CLUSTER_BUILDERS = ((0x1F1E6, 0x1F1FF), (0x1F3FB, 0x1F3FF), (0x20D0, 0x20FF), (0xFE00, 0xFE0F))

_ASCII = str.maketrans(
    "●○◐◇◆■▲✓✗▸▶⏸…·•–—−≠±≈≥≤×→↓↑⏎⇥␍‹›’²°¢◌⋮│┃║─━╸╺█▉▊▋▌▍▎▏░▒▓▁▂▃▄▅▆▇┐┘",
    "*o%++#^vx>>=~.*---!~~><x>v^$><<>'2 co:|||-=--####===-.:%__..-=#.'",
)


@lru_cache(maxsize=8192)
def glyph(char: str) -> str:
    """What stands for one character; the character itself if it is safe to draw and its width is
    certain.
    """
    if named := _NAMES.get(char):
        return named
    code = ord(char)
    if not char.isprintable() or any(low <= code <= high for low, high in _CLUSTER_BUILDERS):
        return f"‹U+{code:04X}›"
    if unicodedata.category(char) in ("Mn", "Me"):
        return char if get_character_cell_size(char) == 0 else f"‹U+{code:04X}›"
    if get_character_cell_size(char) == 0:
        return f"‹U+{code:04X}›"
    return char


def clean(text: str) -> str:
    """One line of printable text. Idempotent."""
    if text.isascii() and text.isprintable():
        return text
    out: list[str] = []
    marks = MAX_MARKS  # a mark with no base before it is named
    for char in text:
        shown = glyph(char)
        if shown == char and get_character_cell_size(char) == 0:
            marks += 1
            shown = char if marks <= MAX_MARKS else f"‹U+{ord(char):04X}›"
        else:
            marks = 0
        out.append(shown)
    return "".join(out)


def clean_lines(text: str) -> list[str]:
    """Clean text that keeps its line structure; only `\\n` ends a line."""
    return [clean(line) for line in text.split("\n")]


def width(text: str) -> int:
    """Terminal cells of clean text."""
    return len(text) if text.isascii() else cell_len(text)


def cut(text: str, cells: int) -> str:
    """At most `cells` cells, never half a character; `…` shows that something was cut."""
    if cells <= 0:
        return ""
    if width(text) <= cells:
        return text
    room = cells - 1
    out: list[str] = []
    for char in text:
        room -= get_character_cell_size(char)
        if room < 0:
            break
        out.append(char)
    return "".join(out) + "…"


def cell(text: str, cells: int, align: str = "<") -> str:
    """Hostile text as exactly `cells` cells: cleaned, cut, padded (`<` left, `>` right, `^`
    centre). Looks at no more of it than can be seen: a base character and its marks are three.
    """
    shown = cut(clean(text[: 3 * (cells + 2)]), cells)
    gap = cells - width(shown)
    if align == ">":
        return " " * gap + shown
    if align == "^":
        return " " * (gap // 2) + shown + " " * (gap - gap // 2)
    return shown + " " * gap


def to_ascii(text: str) -> str:
    """The same width in ASCII, for terminals that cannot show the glyphs."""
    if text.isascii():
        return text
    text = text.translate(_ASCII)
    return "".join(char if char.isascii() else "?" * get_character_cell_size(char) for char in text)


def wrap(text: str, cells: int) -> list[str]:
    """Clean text in lines of at most `cells` cells, broken after spaces where there is one. Takes
    time in proportion to the text: a reply of megabytes without a line break comes here too.
    """
    cells = max(cells, 2)
    lines: list[str] = []
    for line in clean_lines(text):
        narrow = line.isascii()
        start = 0
        while True:
            end = min(len(line), start + cells) if narrow else _reach(line, start, cells)
            if end == len(line):
                break
            space = line.rfind(" ", start, end)
            end = space + 1 if space - start > cells // 2 else end
            lines.append(line[start:end])
            start = end
        lines.append(line[start:])
    return lines


def _reach(line: str, start: int, cells: int) -> int:
    """Where a piece of at most `cells` cells that begins at `start` ends."""
    for at in range(start, len(line)):
        cells -= get_character_cell_size(line[at])
        if cells < 0:
            return at
    return len(line)
