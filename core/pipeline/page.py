"""`eyas report --html`: the last page as one HTML file, its plots inline SVG, nothing to load.

Reads the view and the summary. Every text is escaped: classes and provider names come from outside.
"""

import html
from collections.abc import Sequence
from pathlib import Path

from core.errors import StoreError
from core.events import Summary
from core.journal import load_view
from core.store import RunDir, write_atomic
from core.view import RunView

WIDTH, HEIGHT, MARGIN = 640, 200, 36
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{padding:.15rem .8rem;text-align:right}"
    "td:first-child,th:first-child{text-align:left}pre{white-space:pre-wrap}"
    "svg text{font:11px system-ui}"
)


def write_page(path: Path, run: RunDir, summary: Summary) -> None:
    """Raises StoreError when the file cannot be written."""
    view = load_view(run)
    parts = [
        f"<h1>{html.escape(run.run_id)}</h1>",
        f"<pre>{html.escape(chr(10).join(summary.lines))}</pre>",
        _table("Verdicts", summary.data["verdicts"]),
        _table("Rejected classes", summary.data["classes"]),
        *_plots(view),
        _table("Seconds by stage", summary.data["seconds"]),
    ]
    title = html.escape(f"eyas {run.run_id}")
    page = (
        f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"
        + "\n".join(p for p in parts if p)
        + "\n"
    )
    try:
        write_atomic(path, page.encode())
    except OSError as e:
        raise StoreError(f"{path}: cannot be written ({e.strerror}); name another file") from e


def _table(title: str, counts: dict[str, float]) -> str:
    if not counts:
        return ""
    rows = "".join(f"<tr><td>{html.escape(str(k))}<td>{v:,}" for k, v in counts.items())
    return f"<h2>{html.escape(title)}</h2><table>{rows}</table>"


def _plots(view: RunView) -> list[str]:
    plots = []
    if len(view.train_history) > 1:
        plots.append("<h2>Training loss</h2>" + line_plot(view.train_history, "step", "loss"))
    if view.evaluated and view.evaluated.accepted_by_position:
        shares = list(enumerate(view.evaluated.accepted_by_position, 1))
        title = "<h2>Share of steps that accept up to this draft token</h2>"
        plots.append(title + line_plot(shares, "draft token", "share", from_zero=True))
    return plots


def line_plot(
    points: Sequence[tuple[float, float]], x_name: str, y_name: str, from_zero: bool = False
) -> str:
    """One line as SVG, axes labelled at their ends."""
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    low_x, high_x = min(xs), max(xs)
    low_y, high_y = (0.0 if from_zero else min(ys)), max(ys)
    scale_x = (WIDTH - 2 * MARGIN) / ((high_x - low_x) or 1)
    scale_y = (HEIGHT - 2 * MARGIN) / ((high_y - low_y) or 1)
    bottom = HEIGHT - MARGIN
    path = " ".join(
        f"{MARGIN + (x - low_x) * scale_x:.1f},{bottom - (y - low_y) * scale_y:.1f}"
        for x, y in points
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">'
        f'<path d="M{MARGIN},{MARGIN}V{bottom}H{WIDTH - MARGIN}" fill="none" stroke="#999"/>'
        f'<polyline points="{path}" fill="none" stroke="#0a6" stroke-width="1.5"/>'
        f'<text x="{MARGIN}" y="{HEIGHT - 18}">{low_x:g}</text>'
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 18}" text-anchor="end">{high_x:g} {x_name}</text>'
        f'<text x="{MARGIN}" y="{MARGIN - 8}">{high_y:.3g} {y_name}</text>'
        f'<text x="4" y="{bottom}">{low_y:.3g}</text></svg>'
    )
