"""The lines at the edges of a screen: top bar, stage strip, halt banner, footer. Pure functions of
the state.
"""

from collections.abc import Sequence
from typing import NamedTuple

from console import format as f
from console import status
from console.sanitize import clean, cut, wrap
from console.state import SILENT_S, STALE_S, ConsoleState
from console.widgets.line import Line, Span, cells, fit, line
from console.widgets.spark import bar
from core.view import StageView

Item = tuple[int, Line]  # rank (0 stays longest), spans


def _pack(left: list[Item], right: list[Item], width: int, style: str) -> Line:
    """Both groups at their edges, two cells between items; the highest ranks go until the rest
    fits.
    """
    items = [("l", *item) for item in left] + [("r", *item) for item in right]
    while items:
        need = sum(cells(spans) for _, _, spans in items) + 2 * (len(items) - 1) + 2
        if need <= width or len(items) == 1:
            break
        worst = max(range(len(items)), key=lambda i: items[i][1])
        del items[worst]

    def join(side: str) -> Line:
        out: list[Span] = []
        for where, _, spans in items:
            if where == side:
                out.extend([Span("  ", style)] if out else [])
                out.extend(spans)
        return tuple(out)

    start, end = (Span(" ", style), *join("l")), (*join("r"), Span(" ", style))
    gap = width - cells(start) - cells(end)
    return fit((*start, Span(" " * max(gap, 0), style), *end), width, style)


def top_bar(state: ConsoleState, width: int, now: float, wall: float) -> Line:
    """State, run, stage, time, money, age of the data, halt link: one line, most important first to
    stay.
    """
    mark = status.mark(status.RUN, state.state)
    known = mark.style if mark.style in ("ok", "warn", "error") else "dim"
    left: list[Item] = [(0, line((f"{mark.glyph} {mark.word}", f"bar-{known}")))]
    if state.frozen:
        left.append((1, line(("FROZEN", "bar-warn"))))
    left.append((4, line((clean(state.run_id), "bar-bold"))))
    if state.stage and not state.finished:
        left.append((6, line((state.stage.name, "bar"))))
    left.append((3, line((f.duration(state.elapsed_s(wall)), "bar"))))
    if (eta := state.eta_s()) is not None:
        left.append((5, line(("ETA ", "bar-dim"), (f.duration(eta), "bar"))))
    money = f.usd(state.spent_usd)
    right: list[Item] = [(2, line((money, "bar-bold"), (f"/{f.usd(state.budget_usd)}", "bar-dim")))]
    if (most := state.most_usd) is not None:
        style = "bar-warn" if most > state.budget_usd else "bar-dim"
        right.append((6, line((f"at most {f.usd(most)}", style))))
    if state.link == "live" and state.link_note:
        right.append((4, line((clean(state.link_note), "bar-warn"))))
    right.append((2, _age(state, now)))
    if state.read_only:
        right.append((1, line(("READ-ONLY", "bar-warn"))))
    elif state.halt_armed is not None and not state.finished:
        armed = ("HALT armed", "bar-ok") if state.halt_armed else ("HALT LINK LOST", "bar-error")
        right.append((1, line(armed)))
    return _pack(left, right, width, "bar")


def _age(state: ConsoleState, now: float) -> Line:
    if state.finished:
        return line((f"ended {f.clock(state.view.ts)}", "bar-dim"))
    if state.link in ("connecting", "lost"):
        style = "bar-error" if state.link == "lost" else "bar-dim"
        return line((status.LINK[state.link].word, style))
    if state.link == "replay":
        return line((f"replay {f.clock(state.view.ts)}", "bar-dim"))
    age = state.age_s(now)
    if age is None:
        return line(("no data yet", "bar-dim"))
    if age >= SILENT_S:
        return line((f"NO HEARTBEAT {f.age(age)}", "bar-error"))
    if age >= STALE_S:
        return line((f"STALE {f.age(age)}", "bar-warn"))
    return line((f"{f.age(age)} ago", "bar-dim"))


class _Current(NamedTuple):
    """The stage that works (or stood still when the run was stopped)."""

    name: str
    share: float | None
    stopped: bool

    def spans(self, bar_width: int) -> Line:
        style = "warn" if self.stopped else "ok"
        glyph = "■" if self.stopped else status.STAGE["running"].glyph
        lead = Span(f"{glyph} {self.name} ", "warn" if self.stopped else "bold")
        word = "(stopped)" if self.stopped else "(now)"
        tail = Span((word if self.share is None else f.percent(self.share)).rjust(4))
        return (lead, *bar(self.share, bar_width - 1, style), *line(" " if bar_width else ""), tail)


# Gap between stages, between glyph and name, before the names of waiting stages: widest first.
_SPACINGS = (("   ", " ", "○ "), ("  ", " ", "○ "), (" ", " ", ""), (" ", "", ""))


def stage_strip(state: ConsoleState, width: int) -> Line:
    """All stages in order; the one that works has a progress bar."""
    stages = list(state.view.stages.values())
    if not stages:
        return fit(line((" waiting for the first stage", "dim")), width)
    current = None
    if state.stage is not None and state.stage.status == "running":
        done, total = state.progress(state.stage)
        current = _Current(state.stage.name, done / total if total else None, state.finished)
    for spacing in _SPACINGS:
        spare = width - cells(_strip(stages, current, 0, spacing)) - 1
        if spare >= (8 if current else 0):
            return fit(_strip(stages, current, min(spare, 24), spacing), width)
    return fit(_strip(stages, current, 0, _SPACINGS[-1]), width)


def _strip(
    stages: Sequence[StageView],
    current: _Current | None,
    bar_width: int,
    spacing: tuple[str, str, str],
) -> Line:
    gap, room, waiting = spacing
    out: list[Span] = [Span(" ")]
    for stage in stages:
        mark = status.mark(status.STAGE, stage.status)
        if len(out) > 1:
            out.append(Span(gap))
        if current is not None and stage.name == current.name:
            out.extend(current.spans(bar_width))
        elif stage.status == "waiting":
            out.append(Span(f"{waiting}{stage.name}", "dim"))
        else:
            failed = stage.status == "failed"
            out.append(Span(f"{mark.glyph}{room}", mark.style if failed else "ok"))
            out.append(Span(stage.name, "error" if failed else "text"))
    return tuple(s for s in out if s.text)


def halt_banner(state: ConsoleState, width: int) -> list[Line]:
    """The halt's own account, or why the run failed, across the full width; nothing else stops
    a run."""
    if not state.halt_shown:
        return []
    view, name = state.view, state.state
    mark = status.mark(status.RUN, name)
    style = "banner-error" if name in ("tripped", "failed", "crashed") else "banner-warn"
    if name == "failed":
        text = f"{mark.glyph} {mark.word} {f.clock(view.ts)} · {clean(view.reason)}"
    elif name not in ("halting", "halted", "tripped", "crashed"):
        text = f"■ HALT SENT {f.clock(state.halt_pressed_at)} · waiting for the engine's account"
    else:
        text = f"{mark.glyph} {mark.word}"
        text += f" {f.clock(view.halt.ts if view.halt else view.ts)}"
        text += f" {_account(state)}"
    keys = _banner_keys(state)
    lines = wrap(text, width - 2)
    if len(lines) > 3:
        lines = [*lines[:2], cut(f"{lines[2]} {lines[3]}", width - 2)]
    out = [fit(line((f" {text}", style)), width, style) for text in lines]
    if keys and cells(line(lines[-1])) + len(keys) + 4 <= width:
        pad = width - cells(line(lines[-1])) - len(keys) - 2
        out[-1] = line((f" {lines[-1]}{' ' * pad}{keys} ", style))
    return out


def _account(state: ConsoleState) -> str:
    view = state.view
    parts: list[str] = []
    if state.crashed:
        return "· the engine is gone without a word; nothing that arrived is lost"
    if view.halt is not None:
        halt = view.halt
        parts.append(f"by {f.halted_by(halt)}")
        counts, money = f.halt_account(halt)
        parts += [counts if halt.complete else f"so far {counts}", money]
        if halt.checkpoint_step is not None:
            parts.append(f"checkpoint step {f.count(halt.checkpoint_step)}")
    if view.tripwires and view.state == "tripped":
        wire = view.tripwires[-1]
        parts.insert(0, f"{clean(wire.name)}: {clean(wire.saw)}")
        if wire.advice:
            parts.append(clean(wire.advice))
    elif view.reason and not parts:
        parts.append(clean(view.reason))
    return "· ".join(["", *(p + " " for p in parts)]).strip().removeprefix("· ") if parts else ""


def _banner_keys(state: ConsoleState) -> str:
    if state.read_only:
        return ""
    if state.state == "halting" and state.view.stats and state.view.stats.in_flight:
        return f"X sever {f.count(state.view.stats.in_flight)}"
    return "r resume" if state.finished else ""


def footer(keys: Sequence[tuple[str, str]], width: int, note: str = "") -> Line:
    """Keys and what they do; as many as fit, in order of importance."""
    out: list[Span] = []
    room = width - 1 - (len(note) + 2 if note else 0)
    for key, label in keys:
        need = len(key) + len(label) + 3
        if need > room:
            break
        out += [Span(f" {key}", "key"), Span(f" {label} ", "bar-dim")]
        room -= need
    if note:
        out.append(Span(" " * (width - cells(out) - len(note) - 1), "bar"))
        out.append(Span(note + " ", "bar-dim"))
    return fit(tuple(out), width, "bar")
