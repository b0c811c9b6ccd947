"""Small pictures in text: block sparklines, heat strips, progress bars. One style each, so they are
cheap to send.
"""

import math
from collections.abc import Sequence

from console.widgets.line import Line, Span

BLOCKS = " ▁▂▃▄▅▆▇█"
HEAT = " ░▒▓█"


def resample(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values: means of equal buckets."""
    if len(values) <= width:
        return list(values)
    out = []
    for i in range(width):
        low, high = i * len(values) // width, (i + 1) * len(values) // width
        out.append(sum(values[low:high]) / (high - low))
    return out


def spark(
    values: Sequence[float],
    width: int,
    height: int = 1,
    log: bool = False,
    top: float | None = None,
    stretch: bool = False,
) -> list[str]:
    """`height` strings of `width` cells, newest value at the right, from zero (`log`: from the
    lowest) to `top` or the highest. `stretch`: few values fill the width.
    """
    finite = [v for v in values if math.isfinite(v)]
    if not finite or width <= 0:
        return [" " * max(width, 0)] * height
    if log:
        finite = [math.log10(max(v, 1e-12)) for v in finite]
    shown = resample(finite, width)
    if stretch and len(shown) < width:
        shown = [shown[i * len(shown) // width] for i in range(width)]
    low = min(shown) if log else 0.0
    span = max((max(shown) if top is None else top) - low, 1e-12)
    steps = 8 * height
    levels = [max(1, min(steps, round((v - low) / span * (steps - 1)) + 1)) for v in shown]
    rows = []
    for row in range(height - 1, -1, -1):
        text = "".join(BLOCKS[max(0, min(8, level - 8 * row))] for level in levels)
        rows.append(text.rjust(width))
    return rows


def heat(shares: Sequence[float | None], width: int) -> str:
    """A strip of five shades, newest at the right; unknown is blank."""
    shown = list(shares)[-width:]
    text = "".join(
        " " if s is None else HEAT[max(1, min(4, 1 + int(s * 4)))] if s > 0.005 else HEAT[1]
        for s in shown
    )
    return text.rjust(width)


def level(share: float | None) -> str:
    """One block that shows a share between 0 and 1."""
    return " " if share is None else BLOCKS[max(1, min(8, 1 + int(share * 8)))]


def bar(share: float | None, width: int, style: str = "ok") -> Line:
    """A thin progress bar of exactly `width` cells."""
    if width <= 0:
        return ()
    part = min(1.0, max(0.0, share or 0.0)) * width
    full = int(part)
    half = "╸" if full < width and part - full >= 0.5 else ""
    rest = width - full - len(half)
    spans = (Span("━" * full + half, style), Span("─" * rest, "faint"))
    return tuple(s for s in spans if s.text)
