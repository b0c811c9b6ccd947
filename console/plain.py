"""The console without a screen: tables and lines for pipes, CI, screen readers and dumb terminals.

One line says one thing, the important one first; no cursor movement, no colour unless a terminal
asks for it. Prints for people; machine-readable output is core's.
"""

import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from console import exactness, status
from console import format as f
from console.sanitize import clean, cut
from console.state import ConsoleState
from console.summary import headline
from console.widgets.line import Line, Part, plain
from console.widgets.run_panes import providers
from console.widgets.spark import spark
from console.widgets.work_panes import AUDIT, audit_row
from core import events as ev
from core.errors import EXIT_DONE
from core.journal import load_view
from core.store import RunDir, list_runs, observed_status

STYLE = {
    "ok": "cyan",
    "warn": "yellow",
    "error": "bold red",
    "dim": "dim",
    "bold": "bold",
    "accent": "yellow",
    "extra": "magenta",
}
_PANE_ROWS = 1_000
MAX_COLUMNS = 10_000


def make_console() -> Console:
    """Never reads markup, never colours a dumb terminal or a pipe, never wraps lines of a pipe."""
    dumb = os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()
    return Console(
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=not sys.stdout.isatty(),
        color_system=None if dumb else "auto",
        width=None if sys.stdout.isatty() else _columns(),
    )


def _columns() -> int:
    """What the environment asks a pipe's lines to fit; 120 when it names no sensible width."""
    asked = os.environ.get("COLUMNS", "")
    return min(int(asked), MAX_COLUMNS) if asked.isdecimal() and int(asked) else 120


def text(part: Part) -> Text:
    """A part of a line as rich text: cleaned, never markup."""
    if isinstance(part, str):
        return Text(clean(part))
    return Text(clean(part[0]), style=STYLE.get(part[1], ""))


def grid(title: str, columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[Part]]) -> Table:
    """A table without decoration: (name, `<` or `>`) a column."""
    made = Table(
        title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for name, align in columns:
        made.add_column(
            name, justify="right" if align == ">" else "left", no_wrap=True, header_style="dim"
        )
    for row in rows:
        made.add_row(*[text(part) for part in row])
    return made


def fitted(
    out: Console, columns: Sequence[tuple[str, str, int]], rows: Iterable[Sequence[Part]]
) -> Table:
    """A table that fits by leaving columns out, the highest rank first, so that what is left is
    whole; rank 0 always stays, and is folded where even that is too wide. (name, align, rank) a
    column.
    """
    cells = [[text(part) for part in row] for row in rows]
    widths = [
        max([len(name), *(row[i].cell_len for row in cells)]) + 2
        for i, (name, _, _) in enumerate(columns)
    ]
    kept = list(range(len(columns)))
    while sum(widths[i] for i in kept) > out.width and any(columns[i][2] for i in kept):
        kept.remove(max(kept, key=lambda i: (columns[i][2], i)))
    made = grid("", [columns[i][:2] for i in kept], [])
    for column, i in zip(made.columns, kept, strict=True):
        column.no_wrap, column.overflow = columns[i][2] > 0, "fold"
    for row in cells:
        made.add_row(*[row[i] for i in kept])
    return made


# ── pages ───────────────────────────────────────────────────────────────────────────────────


def show_list(folder: Path | None) -> int:
    """`eyas list`."""
    out = make_console()
    rows: list[list[Part]] = []
    now = time.time()
    for run in list_runs(folder):
        s = observed_status(run)
        mark = status.mark(status.RUN, s.state)
        done = f"{f.count(s.done)}/{f.count(s.prompts)}" if s.prompts else f.NONE
        accept = f.NONE if s.acceptance_length is None else f"{s.acceptance_length:.2f}"
        rows.append(
            [
                s.run_id,
                (mark.text, mark.style),
                s.stage or f.NONE,
                done,
                f.usd(s.spent_usd),
                accept,
                f.age(now - s.ts) if s.ts else f.NONE,
            ]
        )
    if not rows:
        out.print(Text("no runs here yet: eyas demo makes one"))
        return EXIT_DONE
    columns = [
        ("run", "<", 0),
        ("state", "<", 0),
        ("stage", "<", 2),
        ("done", ">", 1),
        ("spent", ">", 1),
        ("accept", ">", 3),
        ("last seen", ">", 4),
    ]
    out.print(fitted(out, columns, rows))
    return EXIT_DONE


def loaded(run: RunDir) -> ConsoleState:
    """A run's state from its files."""
    state = ConsoleState(run.run_id)
    state.load(load_view(run), 0.0)
    state.crashed = observed_status(run).state == "crashed"
    return state


def status_line(state: ConsoleState, wall: float, with_reason: bool = True) -> str:
    """One line with the important thing first."""
    view, s = state.view, state.view.stats
    parts = [state.state.upper()]
    stage = state.stage
    if stage is not None and not state.finished:
        share = f" {f.percent(stage.done / stage.total)}" if stage.total else ""
        parts.append(
            f"{stage.name} {f.count(stage.done)}/{f.count(stage.total)}{share}"
            if stage.total
            else stage.name
        )
    if (
        view.train is not None
        and stage is not None
        and stage.name == "train"
        and not state.finished
    ):
        parts.append(f"loss {view.train.loss:.3f}")
    elif s is not None:
        counts = {"ok": s.ok, "rejected": s.rejected, "failed": s.failed}
        if s.refused:
            counts["refused"] = s.refused
        if state.finished and s.prompts > s.done:
            counts["pending"] = s.prompts - s.done
        parts.append(" ".join(f"{name} {f.count(n)}" for name, n in counts.items()))
        if not state.finished and stage is not None and stage.name == "generate":
            parts.append(f"in flight {f.count(s.in_flight)}, {f.count(s.done_per_min)}/min")
            if s.forecast_usd is not None:
                parts.append(f"forecast {f.usd_within(s.forecast_usd, s.forecast_error_usd)}")
    most = "" if state.most_usd is None else f" (at most {f.usd(state.most_usd)})"
    parts.append(f"{f.usd(state.spent_usd)} of {f.usd(state.budget_usd)}{most}")
    if (eta := state.eta_s()) is not None:
        parts.append(f"ETA {f.duration_within(eta, state.eta_error_s())}")
    parts.append(f"elapsed {f.duration(state.elapsed_s(wall))}")
    if view.reason and state.finished and with_reason:
        parts.append(clean(view.reason))
    return " · ".join(parts)


def show_status(run: RunDir) -> int:
    """`eyas status RUN`."""
    out = make_console()
    state = loaded(run)
    out.print(Text(f"{clean(run.run_id)}  {status_line(state, time.time())}"))
    print_halt(out, state)
    print_lines(out, providers(state, 110, _PANE_ROWS))
    print_verdicts(out, state)
    print_errors(out, state, 5)
    for wire in state.view.tripwires[-3:]:
        what = f"tripwire {clean(wire.name)} [{clean(wire.scope)}] {clean(wire.saw)}"
        out.print(Text(f"{what}; {clean(wire.advice)}", style=STYLE["error"]))
    return EXIT_DONE


def print_halt(out: Console, state: ConsoleState) -> None:
    """The last halt's own account."""
    if (halt := state.view.halt) is not None:
        words = "; ".join(f.halt_account(halt))
        said = halt.source == state.view.reason  # by the line above: a budget's words are long
        out.print(Text(f"halt: {words}" if said else f"halt by {f.halted_by(halt)}: {words}"))


def print_lines(out: Console, lines: Iterable[Line]) -> None:
    """A pipe gets them straight: 20,000 tokens through rich take twelve seconds."""
    for spans in lines:
        if out.color_system is None:
            out.file.write(plain(spans).rstrip() + "\n")
            continue
        made = Text.assemble(*[(span.text, STYLE.get(span.style, "")) for span in spans])
        made.rstrip()
        out.print(made)


def print_verdicts(out: Console, state: ConsoleState) -> None:
    verdicts = state.verdicts
    good, judged = state.admitted()
    if judged:
        words = ", ".join(f"{name} {f.count(n)}" for name, n in verdicts.items() if n)
        share = f.percent(good / judged, 1)
        out.print(Text(f"admitted {f.count(good)} of {f.count(judged)} ({share}): {words}"))


def print_errors(out: Console, state: ConsoleState, most: int) -> None:
    errors = sorted(state.view.stats.errors, key=lambda e: -e.count) if state.view.stats else []
    if errors:
        shown = errors[:most]
        names_width = max(len(e.error_class) for e in shown) + max(len(e.provider) for e in shown)
        room = max(40, out.width - names_width - 24)  # 24: count, clock and the gaps
        rows: list[list[Part]] = [
            [
                f.count(e.count),
                e.error_class,
                e.provider,
                f.clock(e.last_ts),
                cut(clean(e.example), room),
            ]
            for e in shown
        ]
        names = ("class", "provider", "last", "example")
        out.print(grid("errors", [("count", ">"), *((name, "<") for name in names)], rows))


def print_summary(out: Console, state: ConsoleState) -> None:
    """The last page of a run."""
    event = state.view.summary
    if event is None:
        return
    out.print()
    out.print(Text("what this run made", style="bold"))
    for name, value in headline(event.data, state.view.evaluated):
        out.print(Text(f"  {value} {name}"))
    for part in event.lines:
        out.print(Text(f"  {clean(part)}"))


# ── audit, report ────────────────────────────────────────────────────────────────────


def show_audit(run: RunDir) -> int:
    """`eyas audit RUN`: what was decided per dataset and provider, and why."""
    out = make_console()
    audit = load_view(run).audit
    if audit is None:
        out.print(Text("no audit yet: it runs after the samples are rebuilt"))
        return EXIT_DONE
    columns = [(column.title, column.align) for column in AUDIT]
    out.print(grid("", columns, [audit_row(row) for row in audit.rows]))
    for row in audit.rows:
        if row.reason:
            out.print(Text(f"{clean(row.dataset)} / {clean(row.provider)}: {clean(row.reason)}"))
    if audit.findings:
        out.print(
            Text(
                "findings: "
                + ", ".join(f"{clean(k)} {v}" for k, v in sorted(audit.findings.items()))
            )
        )
    if rows := exactness.rows(audit.exactness):
        out.print(grid("", exactness.COLUMNS, rows))
        out.print(Text(exactness.note(audit.exactness)))
    return EXIT_DONE


def show_report(run: RunDir) -> int:
    """`eyas report RUN`: made, spent, rejected and why, drafts' quality."""
    out = make_console()
    state = loaded(run)
    view = state.view
    out.print(Text(f"{clean(run.run_id)}  {status_line(state, time.time())}", style="bold"))
    stages: list[list[Part]] = []
    for s in view.stages.values():
        stopped = s.status == "running" and state.finished
        mark = status.mark(status.STAGE, "stopped" if stopped else s.status)
        took = f"{s.seconds:.1f} s" if s.seconds else f.NONE
        stages.append([s.name, (mark.text, mark.style), took, s.error or f.figures(s.summary, 90)])
    columns = [("stage", "<", 0), ("state", "<", 0), ("time", ">", 0), ("result", "<", 0)]
    out.print(Text("stages", style="italic"))
    out.print(fitted(out, columns, stages))
    print_halt(out, state)
    print_verdicts(out, state)
    if view.stats is not None and view.stats.providers:
        header = plain(providers(state, 116, 2)[0]).strip()
        out.print(Text(header, style="dim"))
        print_lines(out, providers(state, 116, _PANE_ROWS)[1:])
    print_errors(out, state, 20)
    if view.train_history:
        losses = [loss for _, loss in view.train_history]
        steps = view.train_history[-1][0]
        out.print(Text(f"loss {max(losses):.3f} to {min(losses):.3f} over {steps:,} steps (log)"))
        for row in spark(losses, 72, 6, log=True):
            out.print(Text(row.rstrip(), style=STYLE["ok"]))
    if view.evaluated is not None:
        print_evaluation(out, view.evaluated)
    print_summary(out, state)
    return EXIT_DONE


def print_evaluation(out: Console, e: ev.Evaluated) -> None:
    note = f", untrained {e.untrained:.2f}" if e.untrained is not None else ""
    decoded = f", really decoded {e.decoded:.2f}" if e.decoded is not None else ""
    length = f"acceptance length {e.acceptance_length:.2f}"
    out.print(Text(f"{length} with {e.draft_tokens} draft tokens{note}{decoded}"))
    if e.accepted_by_position:
        out.print(
            Text(
                "accepted by position: "
                + "  ".join(f"{i} {f.percent(x)}" for i, x in enumerate(e.accepted_by_position, 1))
            )
        )
    if e.by_dataset:
        out.print(
            Text("by dataset: " + "  ".join(f"{clean(k)} {v:.2f}" for k, v in e.by_dataset.items()))
        )
    if e.lossless:
        out.print(Text(f"greedy output identical to the target's: {clean(e.lossless)}"))
