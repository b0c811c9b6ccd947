"""Numbers for people: fixed width, no reflow, no locale. None is `–`, because not known is not
zero.
"""

import math
import time
from typing import Any

from console.sanitize import clean
from core.events import Halt

NONE = "–"


def count(value: float | None) -> str:
    """12,345 up to a million, then 1.23M."""
    if value is None or not math.isfinite(value):
        return NONE
    if abs(value) < 999_999.5:
        return f"{value:,.0f}"
    return short(value)


def short(value: float | None) -> str:
    """At most five characters: 987, 12.3k, 1.23M."""
    if value is None or not math.isfinite(value):
        return NONE
    sign, value = ("-" if value < 0 else ""), abs(value)
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            scaled = value / size
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{sign}{scaled:.{digits}f}{unit}"
    return f"{sign}{value:.0f}" if value >= 10 or value == int(value) else f"{sign}{value:.1f}"


def usd(value: float | None) -> str:
    """Dollars: $0.0042 below one, $12.34, $12,345. Nothing above zero is rounded down to it."""
    if value is None or not math.isfinite(value):
        return NONE
    if 0 < value < 0.00005:
        return "<$0.0001"
    if value and abs(value) < 0.99995:
        return f"${value:.4f}"
    return f"${value:,.2f}" if abs(value) < 10_000 else f"${value:,.0f}"


def usd_within(value: float | None, error: float | None) -> str:
    """A forecast and its standard error: $86.10 ± $2.31."""
    return usd(value) if value is None or error is None else f"{usd(value)} ± {usd(error)}"


def percent(share: float | None, digits: int = 0) -> str:
    """0.997 -> 99.7%. Never rounds a share below one up to 100% nor one above zero down to 0%."""
    if share is None or not math.isfinite(share):
        return NONE
    text = f"{share * 100:.{digits}f}%"
    if share < 1 and text == f"{100:.{digits}f}%":
        return f">{100 - 10**-digits:.{digits}f}%"
    if share > 0 and text == f"{0:.{digits}f}%":
        return f"<{10**-digits:.{digits}f}%"
    return text


def duration(seconds: float | None) -> str:
    """0:41, 12:03, 1:02:03, 3d 04h."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, 3600)
    if hours >= 72:
        return f"{hours // 24}d {hours % 24:02d}h"
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def duration_within(seconds: float | None, error_s: float | None) -> str:
    """12:03 ± 0:41."""
    known = seconds is not None and error_s is not None
    return f"{duration(seconds)} ± {duration(error_s)}" if known else duration(seconds)


def latency(seconds: float | None) -> str:
    """At most five characters: 84ms, 1.24s, 41.2s, 312s."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 9.995:
        return f"{seconds:.2f}s"
    return f"{seconds:.1f}s" if seconds < 99.95 else f"{seconds:.0f}s"


def size(value: float | None) -> str:
    """Bytes in decimal units: 412 MB, 41.2 GB."""
    if value is None or not math.isfinite(value):
        return NONE
    for unit_bytes, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= unit_bytes:
            scaled = value / unit_bytes
            return f"{scaled:.1f} {unit}" if scaled < 99.95 else f"{scaled:.0f} {unit}"
    return f"{value:.0f} B"


def age(seconds: float | None) -> str:
    """How old the newest data is."""
    if seconds is None:
        return NONE
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 7_200:
        return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    hours = seconds / 3_600
    return f"{hours:.0f} h" if hours < 48 else f"{hours / 24:,.0f} d"


def figures(summary: dict[str, Any], width: int) -> str:
    """What a stage says of its result, for people: units from the names, nothing for what is empty,
    as many as fit, without paths."""
    parts = [part for name, value in summary.items() if (part := _figure(name, value))]
    while len(parts) > 1 and len(", ".join(parts)) > width:
        parts.pop()
    return ", ".join(parts)[:width]


def _figure(name: str, value: Any) -> str:
    if value in (None, "", [], {}) or str(value).startswith("/"):
        return ""
    if isinstance(value, dict):
        return ", ".join(part for k, v in value.items() if (part := _figure(str(k), v)))
    if isinstance(value, list):
        return f"{name} {' '.join(map(str, value))}".replace("_", " ")
    for ending, shown in (("_usd", usd), ("bytes", size), ("seconds", duration), ("_s", duration)):
        if name.endswith(ending) and isinstance(value, int | float):
            words = name.removesuffix(ending).replace("_", " ").strip()
            return f"{words} {shown(value)}".strip()
    if isinstance(value, float):
        said = f"{value:.4g}"
    else:
        said = count(value) if type(value) is int else str(value)
    return f"{name.replace('_', ' ')} {said}"


def halted_by(halt: Halt) -> str:
    """Who or what, and how where that is not a command."""
    how = f" ({clean(halt.source)})" if halt.by and halt.source != "command" else ""
    return f"{clean(halt.by or halt.source)}{how}"


def halt_account(halt: Halt) -> tuple[str, str]:
    """What became of the requests in flight, and of the money."""
    counts = f"{count(halt.cancelled)} cancelled, {count(halt.received)} received"
    if halt.severed:
        counts += f", {count(halt.severed)} severed"
    money = f"spent {usd(halt.spent_usd)}, saved {usd(halt.saved_usd)}"
    if halt.uncertain_usd:
        money += f", uncertain {usd(halt.uncertain_usd)}"
    return counts, money


def clock(ts: float) -> str:
    """Local wall-clock time of a unix time."""
    return time.strftime("%H:%M:%S", time.localtime(ts)) if ts else "--:--:--"
