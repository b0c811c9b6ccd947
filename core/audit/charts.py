"""Five small plots as inline SVG: no script, no font, no file. Colours come from the page's style
sheet.

Every label is escaped here and nowhere else, so a hostile name is only ever text.
"""

import html
import math
import unicodedata
from collections.abc import Callable, Sequence
from typing import NamedTuple

WIDTH = 720
LABEL = 170
ROW = 26
VALUE = 96


class Whisker(NamedTuple):
    """A share with its interval, and the reference's where there is one."""

    label: str
    value: float
    low: float
    high: float
    reference: tuple[float, float, float] | None


def text(value: object, limit: int = 400) -> str:
    """Escaped, with control and direction characters shown as a middle dot, cut at `limit`
    characters."""
    raw = str(value)
    shown = "".join(
        "·"
        if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") and c != "\u200d"
        else c
        for c in raw[:limit]
    )
    return html.escape(shown + ("…" if len(raw) > limit else ""))


def stacked(rows: Sequence[tuple[str, dict[str, int]]], keys: Sequence[str]) -> str:
    """One full-width bar a row, split by key; the share of the first two keys and the total at the
    right."""
    parts = []
    span = WIDTH - LABEL - VALUE
    for index, (label, counts) in enumerate(rows):
        total = sum(counts.values())
        y, x = index * ROW, float(LABEL)
        parts.append(_label(label, y))
        for key in keys:
            width = span * counts.get(key, 0) / total if total else 0.0
            if width:
                title = f"{key}: {counts[key]:,} of {total:,}"
                parts.append(_rect(x, y + 5, width, ROW - 10, f"v-{key}", title))
                x += width
        parts.append(_value(f"{total:,}", y))
    return _svg(len(rows) * ROW, parts, "verdicts by provider") + _legend(
        [(k, f"v-{k}") for k in keys]
    )


def bars(rows: Sequence[tuple[str, float, str]], name: str, style: str = "c-a") -> str:
    """Horizontal bars from zero, longest first as given, the value written at the end."""
    top = max((value for _, value, _ in rows), default=0.0)
    room = WIDTH - LABEL - 16 - 7 * max((len(shown) for _, _, shown in rows), default=0)
    parts = []
    for index, (label, value, shown) in enumerate(rows):
        y = index * ROW
        width = room * value / top if top else 0.0
        parts += [_label(label, y), _rect(LABEL, y + 5, max(width, 1.0), ROW - 10, style, shown)]
        parts.append(_text(LABEL + max(width, 1.0) + 8, y + 17, shown, "num"))
    return _svg(len(rows) * ROW, parts, name)


def curve(
    points: Sequence[Sequence[float]],
    name: str,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    from_zero: bool = True,
) -> str:
    """One line over x, filled below when it starts from zero. Points that are not finite are left
    out."""
    drawn = [(p[0], p[1]) for p in points if math.isfinite(p[0]) and math.isfinite(p[1])]
    if len(drawn) < 2:
        return ""
    height, left, bottom = 220, 64, 28
    xs, ys = [p[0] for p in drawn], [p[1] for p in drawn]
    low = 0.0 if from_zero else min(ys)
    ticks = nice_ticks(low, max(ys))
    low, high = min(low, ticks[0]), max(ticks[-1], max(ys))
    x_ticks = nice_ticks(min(xs), max(xs))

    def px(x: float) -> float:
        return left + (WIDTH - left - 16) * (x - xs[0]) / ((xs[-1] - xs[0]) or 1.0)

    def py(y: float) -> float:
        return 10 + (height - bottom - 10) * (1 - (y - low) / ((high - low) or 1.0))

    parts = []
    for tick in ticks:
        parts.append(_rule(left, WIDTH - 16, py(tick), py(tick)))
        parts.append(_text(left - 8, py(tick) + 4, y_text(tick), "tick end"))
    for tick in x_ticks:
        if xs[0] <= tick <= xs[-1]:
            parts.append(_text(px(tick), height - 8, x_text(tick), "tick mid"))
    line = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in drawn)
    if from_zero:
        base = f"{px(xs[-1]):.1f},{py(low):.1f} {px(xs[0]):.1f},{py(low):.1f}"
        parts.append(f'<polygon points="{line} {base}" class="area"/>')
    parts.append(f'<polyline points="{line}" class="line"/>')
    parts.append(f'<circle cx="{px(xs[-1]):.1f}" cy="{py(ys[-1]):.1f}" r="3.5" class="c-a"/>')
    return _svg(height, parts, name)


def whiskers(rows: Sequence[Whisker], name: str) -> str:
    """Shares from 0 to 100 % with their intervals: a dot for the provider, a diamond for the local
    arm."""
    span = WIDTH - LABEL - VALUE
    height = len(rows) * 32 + 26
    parts = []
    for percent in (0, 25, 50, 75, 100):
        x = LABEL + span * percent / 100
        parts.append(_rule(x, x, 0, height - 22))
        parts.append(_text(x, height - 6, f"{percent} %", "tick mid"))
    for index, row in enumerate(rows):
        y = index * 32
        parts.append(_label(row.label, y + 2))
        if row.reference is not None:
            value, low, high = row.reference
            parts.append(_interval(low, high, y + 22, "c-b"))
            x = LABEL + span * value
            path = f"M{x - 5:.1f} {y + 22} l5 -5 l5 5 l-5 5 z"
            title = f"<title>local {value:.1%}</title>"
            parts.append(f'<path d="{path}" class="c-b">{title}</path>')
        parts.append(_interval(row.low, row.high, y + 10, "c-a"))
        x = LABEL + span * row.value
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y + 10}" r="5" class="c-a">'
            f"<title>{row.value:.1%}</title></circle>"
        )
        parts.append(_value(f"{row.value:.1%}", y + 2))
    return _svg(height, parts, name) + _legend([("provider", "c-a"), ("local arm", "c-b")])


def columns(series: Sequence[tuple[str, str, Sequence[float | None]]], name: str) -> str:
    """Shares by position, one column a series: (label, style, shares)."""
    count = max((len(shares) for _, _, shares in series), default=0)
    if not count:
        return ""
    height, bottom = 180, 24
    group = (WIDTH - 64) / count
    wide = min(44.0, 0.8 * group / len(series))
    parts = []
    for percent in (0, 50, 100):
        y = 12 + (height - bottom - 12) * (1 - percent / 100)
        parts.append(_rule(48, WIDTH - 16, y, y))
        parts.append(_text(42, y + 4, f"{percent} %", "tick end"))
    for position in range(count):
        middle = 48 + group * (position + 0.5)
        parts.append(_text(middle, height - 6, f"draft {position + 1}", "tick mid"))
        for index, (label, style, shares) in enumerate(series):
            share = shares[position] if position < len(shares) else None
            if share is None:
                continue
            tall = (height - bottom - 12) * share
            x = middle + (index - len(series) / 2) * wide
            y = height - bottom - tall
            parts.append(_rect(x + 2, y, wide - 4, max(tall, 0.5), style, f"{label}: {share:.1%}"))
            parts.append(_text(x + wide / 2, y - 4, f"{share:.0%}", "tick mid"))
    return _svg(height, parts, name) + _legend([(label, style) for label, style, _ in series])


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that cover most of a range: steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low, low + 1.0]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _interval(low: float, high: float, y: float, style: str) -> str:
    span = WIDTH - LABEL - VALUE
    a, b = LABEL + span * low, LABEL + span * high
    return f'<line x1="{a:.1f}" x2="{b:.1f}" y1="{y}" y2="{y}" class="whisker {style}"/>'


def _text(x: float, y: float, shown: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}">{text(shown)}</text>'


def _rule(x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" class="grid"/>'


def _label(label: str, y: float) -> str:
    return _text(LABEL - 10, y + 17, label if len(label) <= 26 else label[:25] + "…", "label end")


def _value(shown: str, y: float) -> str:
    return _text(WIDTH - VALUE + 10, y + 17, shown, "num")


def _rect(x: float, y: float, width: float, height: float, style: str, title: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2"'
        f' class="{style}"><title>{text(title)}</title></rect>'
    )


def _svg(height: float, parts: Sequence[str], name: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {max(height, 1):.0f}" role="img" aria-label="{text(name)}">'
        + "".join(parts)
        + "</svg>"
    )


def _legend(items: Sequence[tuple[str, str]]) -> str:
    spans = "".join(f'<span><i class="{style}"></i>{text(name)}</span>' for name, style in items)
    return f'<p class="legend">{spans}</p>'
