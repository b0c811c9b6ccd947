"""The last page of a run as lines: what was made, what it cost, how exact it is, what the drafter
gains.
"""

from typing import Any

from console import format as f
from console.sanitize import cell, wrap
from console.widgets.line import Line, Part, cells, line
from core.events import Evaluated, Summary

LABEL = 10


def summary_lines(event: Summary, evaluated: Evaluated | None, width: int) -> list[Line]:
    """Headline figures first, then the engine's own sentences."""
    out: list[Line] = []
    row: list[Part] = []
    for name, value in headline(event.data, evaluated):
        figure: list[Part] = [(f"{value} ", "bold"), (f"{name}   ", "dim")]
        if row and cells(line(*row, *figure)) > width:
            out.append(line(*row))
            row = []
        row += figure
    if row:
        out += [line(*row), line(" ")]
    for text in event.lines:
        label, said = labelled(text)
        for n, part in enumerate(wrap(said, width - LABEL)):
            out.append(line((cell(label if n == 0 else "", LABEL), "dim"), part))
    return out


def labelled(text: str) -> tuple[str, str]:
    """`made      195 of 204` as its word and the rest; a sentence has no word."""
    word, gap, rest = text.partition("  ")
    return (word, rest.strip()) if gap and len(word) < LABEL else ("", text)


def headline(data: dict[str, Any], evaluated: Evaluated | None) -> list[tuple[str, str]]:
    """(name, value) of the figures that are there, under the keys of core.pipeline.summary."""
    figures: list[tuple[str, str]] = []
    kept, samples = _number(data.get("kept_samples")), _number(data.get("samples"))
    if kept is not None and samples is not None:
        figures.append(("samples kept", f"{f.count(kept)} of {f.count(samples)}"))
    if (spent := _number(data.get("spent_usd"))) is not None:
        figures.append(("spent", f.usd(spent)))
    verdicts = data.get("verdicts")
    if isinstance(verdicts, dict) and samples:
        exact = _number(verdicts.get("exact")) or 0
        figures.append(("with the server's ids", f.percent(exact / samples, 1)))
    drafter = data.get("drafter")
    length = _number(drafter.get("acceptance_length")) if isinstance(drafter, dict) else None
    if length is None and evaluated is not None:
        length = evaluated.acceptance_length
    if length is not None:
        figures.append(("tokens per forward", f"{length:.2f}"))
    return figures


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
