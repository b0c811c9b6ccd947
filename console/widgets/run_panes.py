"""Panes about generation: requests, providers, spend. Pure functions `(state, width, height) ->
lines`.
"""

from console import format as f
from console import status
from console.sanitize import cell
from console.state import ConsoleState
from console.widgets.line import Column, Line, between, fit, line, table
from console.widgets.spark import bar, spark
from core.events import ProviderRow, Stats

LABEL = 10
PAIR_MAX = 44  # a value farther from its label than this is hard to follow


def pair(label: str, value: str, width: int, style: str = "text") -> Line:
    """A label at the left, its value at the right edge (or nearer, in a wide pane)."""
    near = min(width, PAIR_MAX)
    return fit(between(line((label, "dim")), line((value, style)), near), width)


def two(left: Line, right: Line, width: int) -> Line:
    """Two columns of equal width, three cells between them."""
    half = (width - 3) // 2
    return (*fit(left, half), *line("   "), *fit(right, width - half - 3))


def live(state: ConsoleState) -> bool:
    """Whether requests are being made: rates of a finished stage say nothing."""
    stage = state.view.stages.get("generate")
    return stage is not None and stage.status == "running" and not state.finished


def waiting(text: str, width: int) -> list[Line]:
    return [fit(line((text, "dim")), width)]


def requests(state: ConsoleState, width: int, height: int) -> list[Line]:
    s = state.view.stats
    if s is None:
        return waiting("nothing sent yet", width)
    on = live(state)
    done = f"{f.count(s.done)} / {f.count(s.prompts)}"
    rows: list[Line] = [
        pair("in flight", f"{f.count(s.in_flight)} / {f.count(s.limit)}", width, "bold"),
        pair("done", done, width, "bold"),
    ]
    if height >= 6:
        rows.append(bar(s.done / s.prompts if s.prompts else None, min(width, PAIR_MAX)))
    trend = spark(state.series.done_per_min, min(width, PAIR_MAX) - 11)[0]
    if width < 34:
        rows.append(pair(f"ok {f.count(s.ok)}", f"lost {f.count(s.rejected + s.failed)}", width))
        rate = f"{f.short(s.done_per_min)}/min" if on else "done/min"
        rows.append(between(line((rate, "text" if on else "dim")), line((trend, "spark")), width))
        rows.append(pair("tokens/s", f.short(s.tokens_per_s) if on else f.NONE, width))
        return rows[:height]
    near = min(width, PAIR_MAX)
    half = (near - 3) // 2
    none = f.NONE
    grid = [
        ("ok", f.count(s.ok), "rejected", f.count(s.rejected)),
        ("failed", f.count(s.failed), "refused", f.count(s.refused)),
        ("retries", f.count(s.retries), "aborted", f.count(s.aborted)),
        (
            "sent/min",
            f.count(s.sent_per_min) if on else none,
            "done/min",
            f.count(s.done_per_min) if on else none,
        ),
        (
            "tokens/s",
            f.short(s.tokens_per_s) if on else none,
            "oldest",
            f.duration(s.oldest_in_flight_s) if on else none,
        ),
    ]
    for a, b, c, d in grid:
        left, right = pair(a, b, half), pair(c, d, near - half - 3, _bad(c, d))
        rows.append(fit(two(left, right, near), width))
    if height > len(rows):
        rows.append(fit(between(line(("done/min", "dim")), line((trend, "spark")), near), width))
    if height > len(rows):
        rows.append(pair("queued", f.count(s.queued), width))
    if height > len(rows):
        rows.append(pair("loop lag p99", f"{s.loop_lag_p99_ms:.1f} ms", width))
    return rows[:height]


def _bad(label: str, value: str) -> str:
    return "warn" if label in ("rejected", "refused") and value not in ("0", f.NONE) else "text"


PROVIDERS = (
    Column("provider", 14, "<", 0, grow=24),
    Column("in flight", 10, ">", 0),
    Column("done", 7, ">", 2),
    Column("err", 5, ">", 1),
    Column("429", 4, ">", 4),
    Column("p50", 6, ">", 2),
    Column("p99", 6, ">", 1),
    Column("ttft", 6, ">", 5),
    Column("tok/s", 6, ">", 3),
    Column("$/min", 8, ">", 2),
    Column("spent", 8, ">", 6),
    Column("state", 12, "<", 0, grow=10),
)


def providers(state: ConsoleState, width: int, height: int) -> list[Line]:
    s = state.view.stats
    if s is None or not s.providers:
        return waiting("no provider has been asked yet", width)
    rows = s.providers  # in the engine's order: rows that jump cannot be read
    if len(rows) >= height:
        rows = sorted(rows, key=lambda p: (-p.in_flight, -p.done, p.name))
    shown = rows if len(rows) < height else rows[: max(0, height - 2)]
    header, lines = table(PROVIDERS, [_provider(p) for p in shown], width)
    out = [header, *lines]
    if len(shown) < len(rows):
        out.append(fit(line((f"+{len(rows) - len(shown)} more · z maximises", "dim")), width))
    return out[:height]


def _provider(p: ProviderRow) -> tuple[str | tuple[str, str], ...]:
    tried = p.done + p.errors
    share = p.errors / tried if tried else 0.0
    return (
        (p.name, "bold"),
        f"{f.count(p.in_flight)}/{f.count(p.limit)}" if p.limit else f.count(p.in_flight),
        f.count(p.done),
        (f.percent(share), "warn" if share > 0.1 else "text"),
        f.short(p.status_429),
        f.latency(p.p50_s),
        f.latency(p.p99_s),
        f.latency(p.ttft_p50_s),
        f.short(p.tokens_per_s),
        f.usd(p.usd_per_min),
        f.usd(p.spent_usd),
        _provider_state(p),
    )


def _provider_state(p: ProviderRow) -> tuple[str, str]:
    if p.stopped:
        return (f"■ {p.stopped}", "error")
    mark = status.mark(status.BREAKER, p.breaker)
    if p.breaker != "closed":
        return (mark.text, mark.style)
    if p.backoff_s > 0:
        return (f"◐ wait {p.backoff_s:.0f} s", "warn")
    return ("● ok", "ok")


def spend(state: ConsoleState, width: int, height: int) -> list[Line]:
    s = state.view.stats
    budget = state.budget_usd
    if s is None:
        return waiting(f"budget {f.usd(budget)}", width)
    share = s.spent_usd / budget if budget else None
    style = "ok" if (share or 0) < 0.8 else "warn" if (share or 0) < 0.95 else "error"
    rows = [
        pair("spent", f.usd(s.spent_usd), width, "bold"),
        pair("of budget", f"{f.usd(budget)}  {f.percent(share)}", width),
        bar(share, min(width, PAIR_MAX), style),
        pair("reserved", f.usd(s.reserved_usd), width),
        *_most(state, width),
        pair("burn", f"{f.usd(s.usd_per_min)}/min" if live(state) else f.NONE, width),
        pair("forecast", _forecast(s, width), width, _forecast_style(s, budget)),
        pair("uncertain", f.usd(s.uncertain_usd), width, "warn" if s.uncertain_usd else "text"),
    ]
    if width < 34:
        return rows[:height]
    rows[0] = pair("spent", f"{f.usd(s.spent_usd)} of {f.usd(budget)}", width, "bold")
    near = min(width, PAIR_MAX)
    meter = (*bar(share, near - 6, style), *line((f.percent(share).rjust(6), "text")))
    rows[1:3] = [fit(meter, width)]
    rows.append(
        pair("budget lasts", f.duration(state.budget_left_s()) if live(state) else f.NONE, width)
    )
    kept = s.spent_usd / s.completion_tokens * 1e6 if s.completion_tokens else None
    rows.append(pair("per 1M output tokens", f.usd(kept), width))
    if height > len(rows):
        trend = spark(state.series.usd_per_min, near - 11)[0]
        rows.append(fit(between(line(("$/min", "dim")), line((trend, "spark")), near), width))
    return rows[:height]


def _most(state: ConsoleState, width: int) -> list[Line]:
    """Only where the bill may pass the budget."""
    if (most := state.most_usd) is None:
        return []
    return [pair("at most", f.usd(most), width, "warn" if most > state.budget_usd else "text")]


def _forecast(s: Stats, width: int) -> str:
    whole = f.usd_within(s.forecast_usd, s.forecast_error_usd)
    return whole if len(whole) + len("forecast ") <= width else f.usd(s.forecast_usd)


def _forecast_style(s: Stats, budget: float) -> str:
    return "warn" if s.forecast_usd is not None and budget and s.forecast_usd > budget else "text"


def compact(state: ConsoleState, width: int, height: int) -> list[Line]:
    """For terminals too small for panes: the same facts, one a line."""
    rows = [
        fit(line((cell("terminal below 80x24: short form", width), "dim")), width),
        *requests(state, width, 5),
        *spend(state, width, 5),
    ]
    return rows[:height]
