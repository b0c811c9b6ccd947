"""The probe without a screen: the list of samples, one sample, and what a live probe saw."""

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from console import format as f
from console import probe, status
from console.plain import STYLE, fitted, make_console, print_lines
from console.sanitize import clean, wrap
from console.widgets import tokens as tk
from console.widgets.align import difference
from console.widgets.evidence import evidence
from console.widgets.line import Part
from console.widgets.table import TokenTable
from core.errors import EXIT_DONE, StoreError
from core.journal import load_view
from core.schema import Sample
from core.store import RunDir, count_samples

LISTED = 40
EXCERPT = 12
"""Rows of a difference that a live probe shows round the first divergence."""


def show_probe(run: RunDir, name: str = "", against: str = "") -> int:
    """`eyas probe RUN [SAMPLE] [--against SAMPLE]`: the list, headed by what a live probe saw, or
    one sample: its verdict, its difference to the twin, its tokens.
    """
    out = make_console()
    if name:
        row = probe.find_row(run, name, load_view(run).outcomes)
        opened = probe.open_sample(run, row, against)
        print_lines(out, evidence(opened, out.width))
        print_tokens(out, opened)
        return EXIT_DONE
    if run.probe.exists():
        show_live(out, run)
        return EXIT_DONE
    rows = probe.rows_of(run, load_view(run).outcomes, LISTED)
    marks = [status.mark(status.VERDICT, r.verdict) for r in rows[:LISTED]]
    listed: list[list[Part]] = [
        [
            (mark.text, mark.style),
            r.sample_id,
            r.dataset,
            r.arm,
            r.provider,
            r.error_class,
            f.count(r.tokens),
            f.count(r.billed),
        ]
        for mark, r in zip(marks, rows, strict=False)
    ]
    columns = [
        ("verdict", "<", 0),
        ("sample", "<", 0),
        ("dataset", "<", 3),
        ("arm", "<", 1),
        ("provider", "<", 4),
        ("why", "<", 2),
        ("tokens", ">", 5),
        ("billed", ">", 6),
    ]
    out.print(fitted(out, columns, listed))
    more = max(count_samples(run), len(rows)) - len(listed)
    if more > 0:
        out.print(Text(f"{more:,} more; the console (eyas attach) lists them all"))
    return EXIT_DONE


def print_tokens(out: Console, opened: probe.Opened) -> None:
    """The difference to the twin where there is one, then every token."""
    sample = opened.sample
    if sample is None:
        for part in wrap(opened.raw or "no reply was kept for this prompt", out.width):
            out.print(Text(part))
        return
    decoder = opened.tokenizer or tk.NoTokenizer()
    if opened.twin is not None:
        out.print()
        print_difference(out, decoder, sample, opened.twin)
    out.print()
    table = TokenTable(sample, tk.tokens_of(decoder, sample.token_ids), out.width)
    print_lines(out, [table.header(), *table])


def print_difference(
    out: Console, decoder: tk.Decoder, sample: Sample, twin: Sample, most: int | None = None
) -> None:
    """Completions side by side, the local one at the left; only what differs, `most` rows of it."""
    local, other = probe.sides(sample, twin)
    left = tk.tokens_of(decoder, local.completion_ids)
    right = tk.tokens_of(decoder, other.completion_ids)
    diff = difference(local.completion_ids, other.completion_ids)
    names = (probe.side_name(local), probe.side_name(other))
    said, style = tk.headline(diff, left, right, names)
    out.print(Text(said, style=STYLE.get(style, "")))
    if not diff.identical:
        rows = tk.DiffTable(diff, left, right, out.width, tk.Options(ids=True, only_diffs=True))
        shown = [rows[i] for i in range(min(len(rows), most or len(rows)))]
        print_lines(out, [rows.header(names), *shown])
        if len(shown) < len(rows):
            out.print(Text(f"    {len(rows) - len(shown):,} more rows", style="dim"))


# ── live ────────────────────────────────────────────────────────────────────────────────────


def show_live(out: Console, run: RunDir) -> None:
    """`eyas probe live`, from the run's probe.json: a line an arm, then where it leaves the local
    one. Raises StoreError.
    """
    try:
        report: dict[str, Any] = msgspec.json.decode(run.probe.read_bytes())
        answers: list[dict[str, Any]] = report["answers"]
        questions = dict.fromkeys(a["question"] for a in answers)
        for question in questions:
            mine = [a for a in answers if a["question"] == question]
            out.print(fitted(out, LIVE_COLUMNS, [_live_row(a) for a in mine]))
            for a in mine:
                _print_outcome(out, run, a)
            out.print()
        spent = f"{f.usd(report['spent_usd'])} of {f.usd(report['budget_usd'])} spent"
        if report["uncertain_usd"]:
            spent += f", {f.usd(report['uncertain_usd'])} of it uncertain"
        if report["corrected_usd"]:
            spent += f", after {_signed(report['corrected_usd'])} by the account's own total"
        state = "" if report["state"] == "done" else f"{report['reason'] or report['state']}; "
        out.print(Text(clean(f"{state}{spent}; {report['path']}")))
    except (OSError, KeyError, TypeError, msgspec.MsgspecError) as e:
        raise StoreError(f"{run.probe}: cannot be read ({e}); ask again: eyas probe live") from e


def _signed(usd: float) -> str:
    return f"-{f.usd(-usd)}" if usd < 0 else f"+{f.usd(usd)}"


ENDED = {
    "failed": status.Mark("✗", "failed", "error"),
    "refused": status.Mark("✗", "refused", "error"),
    "aborted": status.Mark("■", "stopped", "warn"),
}
LIVE_COLUMNS = [
    ("arm", "<", 0),
    ("calls", "<", 0),
    ("provider", "<", 1),
    ("finish", "<", 3),
    ("verdict", "<", 0),
    ("tokens", ">", 5),
    ("cost", ">", 1),
    ("bill", "<", 4),
    ("latency", ">", 2),
]


def _live_row(a: dict[str, Any]) -> Sequence[Part]:
    mark = status.mark(status.VERDICT | ENDED, a["verdict"] or a["outcome"])
    form, count = a["call_form"], len(a["calls"])
    called: Part = (form, "dim") if form == "none" else f"{count} {form}"
    if "raw" in form and a["arm"] == "declared":  # `text` declares nothing: its calls come raw
        called = (f"{count} {form}", "error")
    return [
        (a["arm"], "bold"),
        called,
        a["provider"] or a["backend"],
        a["finish_reason"] or f.NONE,
        (mark.text, mark.style),
        f.count(a["completion_tokens"]),
        f.usd(a["cost_usd"]),
        (a["bill"].replace("_", " ") or "not sent", "warn" if a["bill"] == "uncertain" else "dim"),
        f.latency(a["latency_s"]),
    ]


def _print_outcome(out: Console, run: RunDir, a: dict[str, Any]) -> None:
    """Why an arm gave nothing, or where it leaves the local arm, token by token."""
    told = ": ".join(str(x) for x in (a["error_class"], a["error"]) if x)
    if told:
        out.print(Text(clean(f"{a['arm']}: {told}"), style=STYLE["warn"]))
    if a["hypothesis"]:
        out.print(Text(clean(f"{a['arm']}: matches if {a['hypothesis']}")))
    if a["flags"] and a["verdict"] != "exact":
        out.print(Text(clean(f"{a['arm']}: flags {', '.join(a['flags'])}"), style="dim"))
    if a["same_as_local"] is None:
        return
    if a["same_as_local"]:
        out.print(Text(f"{a['arm']}: the same tokens as local", style=STYLE["ok"]))
        return
    with contextlib.suppress(StoreError):  # a probe that was stopped early has no samples
        opened = probe.open_sample(run, probe.find_row(run, a["sample_id"]))
        if opened.sample is not None and opened.twin is not None:
            print_difference(
                out,
                opened.tokenizer or tk.NoTokenizer(),
                opened.sample,
                opened.twin,
                EXCERPT,
            )
            return
    d = a["divergence"]
    sides = [
        f'{t["id"]} "{t["text"]}"' if t is not None else "nothing" for t in (d["local"], d["here"])
    ]
    out.print(Text(clean(f"{a['arm']}: first divergence @{d['at']}: local {' vs '.join(sides)}")))
