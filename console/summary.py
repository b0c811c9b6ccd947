"""The last page of a run as lines: what was made, what it cost, how exact it is, what the drafter
gains.
"""

from typing import Any

from console import format as f
from console.sanitize import clean, wrap
from console.widgets.line import Line, line
from core.events import Evaluated, Summary


def summary_lines(event: Summary, evaluated: Evaluated | None, width: int) -> list[Line]:
    """Headline figures first, then the engine's own sentences."""
    out: list[Line] = []
    figures = headline(event.data, evaluated)
    if figures:
        out.append(
            line(
                *[
                    part
                    for name, value in figures
                    for part in ((f"{value} ", "bold"), (f"{name}   ", "dim"))
                ]
            )
        )
        out.append(line(" "))
    for text in event.lines:
        for n, part in enumerate(wrap(text, width - 2)):
            out.append(line(("• " if n == 0 else "  ", "ok"), part))
    return out


def headline(data: dict[str, Any], evaluated: Evaluated | None) -> list[tuple[str, str]]:
    """(name, value) of the figures that are there: never a guess."""

    def find(section: str, key: str) -> float | None:
        part = data.get(section)
        value = part.get(key) if isinstance(part, dict) else None
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    figures: list[tuple[str, str]] = []
    if (kept := find("made", "kept")) is not None:
        figures.append(("samples kept", f.count(kept)))
    if (spent := find("cost", "spent_usd")) is not None:
        figures.append(("spent", f.usd(spent)))
    if (rate := find("exactness", "rate")) is not None:
        figures.append(("exact", f.percent(rate, 2)))
    length = find("drafter", "acceptance_length")
    if length is None and evaluated is not None:
        length = evaluated.acceptance_length
    if length is not None:
        figures.append(("tokens per forward", f"{length:.2f}"))
    return [(clean(name), value) for name, value in figures]
