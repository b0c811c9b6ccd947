"""Panes about the machine and its work: host or GPU, training, quality, log. Pure functions of the
state.
"""

from console import format as f
from console import status
from console.sanitize import cell, clean
from console.state import ConsoleState, LogLine
from console.widgets.line import Column, Line, between, fit, line, table
from console.widgets.run_panes import PAIR_MAX, pair, two, waiting
from console.widgets.spark import bar, heat, level, spark
from core.events import AuditRow, GpuRow, Host
from core.view import KEEP_OUTCOMES


def host(state: ConsoleState, width: int, height: int) -> list[Line]:
    h = state.view.host
    if h is None:
        return waiting("no sample of the machine yet", width)
    rows = _gpus(state, h, width) if h.gpus else []
    ram = h.ram_used_bytes / h.ram_total_bytes if h.ram_total_bytes else None
    near = min(width, PAIR_MAX)
    trend = near - 16 if width >= 30 else width - 14
    cpu = line(("cpu ", "dim"), (f.percent(h.cpu_pct / 100).rjust(5), "bold"))
    if h.cpus and width >= 30:
        cpu = (*cpu, *line((f" of {h.cpus}", "dim")))
    graph = spark(list(state.series.cpu), max(trend, 4), top=1.0)[0]
    rows.append(fit(between(cpu, line((graph, "spark")), near), width))
    ram_text = f"{f.size(h.ram_used_bytes)} of {f.size(h.ram_total_bytes)}"
    rows.append(pair("ram", ram_text if width >= 28 else f.size(h.ram_used_bytes), width))
    if height >= 6:
        rows.append(bar(ram, near, "ok" if (ram or 0) < 0.9 else "warn"))
    disk_low = h.disk_total_bytes and h.disk_free_bytes / h.disk_total_bytes < 0.05
    rows.append(pair("disk free", f.size(h.disk_free_bytes), width, "warn" if disk_low else "text"))
    net = f"↓{f.short(h.net_rx_bytes_s)} ↑{f.short(h.net_tx_bytes_s)}"
    rows.append(pair("net B/s", net, width))
    if not h.gpus:
        rows.append(fit(line(("no GPU on this host", "dim")), width))
    if height > len(rows):
        received = spark(list(state.series.net_rx), near - 11)[0]
        rows.append(fit(between(line(("received", "dim")), line((received, "spark")), near), width))
    return rows[:height]


def _gpus(state: ConsoleState, h: Host, width: int) -> list[Line]:
    rows: list[Line] = []
    for gpu in h.gpus:
        power = (
            f"{gpu.power_w:.0f}/{gpu.power_limit_w:.0f} W"
            if gpu.power_w is not None and gpu.power_limit_w
            else f.NONE
        )
        temp = "" if gpu.temp_c is None else f" {gpu.temp_c:.0f}°"
        style = "warn" if gpu.throttle else "bold"
        left = line((f"gpu{gpu.index} ", "dim"), (power, style), (temp, "dim"))
        strip = heat(list(state.series.gpu_util.get(gpu.index, ())), max(4, width - 26))
        rows.append(between(left, line((strip, "spark")), width))
        if len(h.gpus) <= 2:
            rows.append(_gpu_memory(gpu, width))
    return rows


def _gpu_memory(gpu: GpuRow, width: int) -> Line:
    util = "" if gpu.util_pct is None else f"util {gpu.util_pct:.0f}%"
    mem = f"{f.size(gpu.mem_used_bytes)} of {f.size(gpu.mem_total_bytes)}"
    note = f"  {clean(gpu.throttle)}" if gpu.throttle else ""
    return between(line((f"     {util}", "dim"), (note, "warn")), line((mem, "text")), width)


def training(state: ConsoleState, width: int, height: int) -> list[Line]:
    view = state.view
    t = view.train
    if t is None:
        stage = view.stages.get("train")
        note = "starts after extract"
        if view.stages and stage is None:
            note = "no training in this run"
        elif stage is not None and stage.status == "running":
            note = "the first steps are being made"
        return [*waiting(note, width), *_acceptance(state, width), *_material(state, width)][
            :height
        ]
    head = between(
        line(
            ("loss ", "dim"),
            (f"{t.loss:.3f}", "bold"),
            ("  step ", "dim"),
            f"{f.count(t.step)}/{f.count(t.total_steps)}",
        ),
        line((f"{f.short(t.tokens_per_s)} tok/s", "text")),
        width,
    )
    tail = [*_accuracy(state, width), *_acceptance(state, width)]
    more = between(
        line(("lr ", "dim"), f"{t.lr:.1e}", ("  grad ", "dim"), f"{t.grad_norm:.2f}"),
        line(("checkpoint ", "dim"), f.count(t.checkpoint_step) if t.checkpoint_step else f.NONE),
        width,
    )
    if height - 1 - len(tail) >= 4:
        tail.insert(0, more)
    room = max(1, height - 1 - len(tail))
    losses = [loss for _, loss in view.train_history]
    curve = spark(losses, width - 7, room, log=True, stretch=True) if losses else []
    return [head, *_labelled(curve, losses, width), *tail][:height]


MATERIAL = (
    Column("dataset", 10, "<", 0, grow=16),
    Column("arm", 8, "<", 0),
    Column("kept", 5, ">", 0),
    Column("open", 5, ">", 0),
    Column("lost", 5, ">", 0),
    Column("calls", 5, ">", 1),
    Column("tokens", 6, ">", 0),
)


def _material(state: ConsoleState, width: int) -> list[Line]:
    """Before training: what it will be fed with, from the outcomes that are known here. Replies
    that nobody could verify yet are open: the rebuild may still keep them, and has the last word.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for o in state.view.outcomes:
        if o.outcome == "aborted":  # pending, not lost
            continue
        row = groups.setdefault((o.dataset, o.arm), [0, 0, 0, 0, 0])
        kept = o.verdict in ("exact", "consistent")
        row[0 if kept else 1 if o.verdict == "unverifiable" else 2] += 1
        row[3] += o.calls if kept else 0
        row[4] += (o.completion_tokens or 0) if kept else 0
    if not groups:
        return []
    rows = [
        (dataset, arm, *map(f.short, counts)) for (dataset, arm), counts in sorted(groups.items())
    ]
    header, lines = table(MATERIAL, rows, width)
    rebuilt = state.view.stages.get("reconstruct")
    if rebuilt is not None and rebuilt.status == "done":
        good, judged = state.admitted()
        said = f"as first judged; the rebuild kept {f.count(good)} of {f.count(judged)}"
    else:
        count = len(state.view.outcomes)
        which = "of the last" if count >= KEEP_OUTCOMES else "so far, from"
        said = f"material {which} {count:,} outcomes"
    return [fit(line((said, "dim")), width), header, *lines]


def _labelled(curve: list[str], losses: list[float], width: int) -> list[Line]:
    """The loss curve with its highest and lowest value at the left edge."""
    rows = []
    for i, text in enumerate(curve):
        edge = (
            f"{max(losses):.2f}" if i == 0 else f"{min(losses):.2f}" if i == len(curve) - 1 else ""
        )
        rows.append(fit(line((edge.rjust(6) + " ", "dim"), (text, "spark")), width))
    return rows


def _accuracy(state: ConsoleState, width: int) -> list[Line]:
    t = state.view.train
    if t is None or not t.accuracy_K:
        return []
    parts: list[tuple[str, str]] = [("accuracy ", "dim")]
    for k, value in enumerate(t.accuracy_K, 1):
        parts += [(f"{k}", "dim"), (level(value), "spark"), (f"{value * 100:.0f}% ", "text")]
    return [fit(line(*parts), width)]


def _acceptance(state: ConsoleState, width: int) -> list[Line]:
    e = state.view.evaluated
    if e is None:
        return []
    note = f" untrained {e.untrained:.2f}" if e.untrained is not None else ""
    if e.decoded is not None and width >= 50:
        note += f" · decoded {e.decoded:.2f}"
    unit = " tokens/forward" if width >= 74 else ""
    left = line(("acceptance ", "dim"), (f"{e.acceptance_length:.2f}", "bold"), (unit, "dim"))
    return [between(left, line((note.strip(), "dim")), width)]


AUDIT = (
    Column("dataset", 10, "<", 0, grow=16),
    Column("provider", 10, "<", 1),
    Column("arm", 8, "<", 3),
    Column("n", 5, ">", 0),
    Column("calls", 5, ">", 0),
    Column("ref", 5, ">", 0),
    Column("p", 7, ">", 2),
    Column("schema", 6, ">", 4),
    Column("args", 6, ">", 4),
    Column("decision", 10, "<", 0),
)


def quality(state: ConsoleState, width: int, height: int) -> list[Line]:
    """Verdicts first, then what the audit says, then why replies were lost."""
    s, view = state.view.stats, state.view
    if s is None:
        return waiting("nothing judged yet", width)
    good, judged = state.admitted()
    rows = [
        between(
            line(("admitted ", "dim"), (f"{f.count(good)} of {f.count(judged)}", "bold")),
            line((f.percent(good / judged, 1) if judged else f.NONE, "bold")),
            width,
        ),
        *_verdicts(state.verdicts, width, height),
    ]
    if view.tripwires:
        wire = view.tripwires[-1]
        rows.append(fit(line((f"▲ {clean(wire.name)}: {clean(wire.saw)}", "error")), width))
    if height - len(rows) >= 2:
        rows.append(_audit_line(state, width))
    rows += _errors(state, width, height - len(rows))
    if view.audit is not None and view.audit.rows and height - len(rows) >= 4:
        header, lines = table(AUDIT, [audit_row(row) for row in view.audit.rows], width)
        rows += [line(" "), header, *lines]
    return rows[:height]


def _verdicts(verdicts: dict[str, int], width: int, height: int) -> list[Line]:
    if height < 6 and width < 54:
        other = sum(verdicts.values()) - verdicts.get("exact", 0) - verdicts.get("consistent", 0)
        counts = (
            ("exact", verdicts.get("exact", 0)),
            ("consistent", verdicts.get("consistent", 0)),
            ("other", other),
        )
        parts = [
            part
            for word, n in counts
            for part in ((f"{word} ", "dim"), (f"{f.count(n)}  ", "text"))
        ]
        return [fit(line(*parts), width)]

    def item(name: str, room: int) -> Line:
        mark = status.VERDICT[name]
        value = verdicts.get(name, 0)
        style = mark.style if value else "dim"
        return between(
            line((mark.glyph, style), (f" {mark.word}", "dim")),
            line((f.count(value), "text" if value else "dim")),
            room,
        )

    names = list(status.VERDICT)
    half = (width - 3) // 2
    if width >= 54:
        third = (width - 6) // 3
        rooms = (third, third, width - 6 - 2 * third)
        return [
            tuple(
                span
                for i, (name, room) in enumerate(zip(group, rooms, strict=True))
                for span in (*line("   " if i else ""), *item(name, room))
            )
            for group in (names[:3], names[3:])
        ]
    return [
        two(item(a, half), item(b, width - half - 3), width)
        for a, b in zip(names[::2], names[1::2], strict=True)
    ]


def _audit_line(state: ConsoleState, width: int) -> Line:
    audit = state.view.audit
    if audit is None:
        return fit(line(("audit ", "dim"), ("no comparison yet", "dim")), width)
    decisions: dict[str, int] = {}
    for row in audit.rows:
        decisions[row.decision or "open"] = decisions.get(row.decision or "open", 0) + 1
    text = ", ".join(f"{n} {word}" for word, n in sorted(decisions.items(), key=lambda d: -d[1]))
    exact = audit.exactness.get("rate")
    right = f"exact {f.percent(exact, 2)}" if isinstance(exact, int | float) else ""
    bad = any(word not in ("keep", "open", "none") for word in decisions)
    left = line(("audit ", "dim"), (clean(text) or "no rows", "warn" if bad else "text"))
    return between(left, line((right, "text")), width) if right else fit(left, width)


def _errors(state: ConsoleState, width: int, room: int) -> list[Line]:
    s = state.view.stats
    if room <= 0 or s is None:
        return []
    if not s.errors:
        return [fit(line(("no errors", "dim")), width)]
    rows = sorted(s.errors, key=lambda e: -e.count)
    shown = rows if len(rows) <= room else rows[: max(1, room - 1)]
    more = len(rows) - len(shown)
    out = []
    for row in shown:
        left = line(
            (f"{f.short(row.count):>5} ", "warn"),
            (clean(row.error_class), "text"),
            (f" {clean(row.provider)}", "dim"),
        )
        right = (
            f"+{more} more" if more and room == 1 else f.clock(row.last_ts) if width >= 48 else ""
        )
        out.append(between(left, line((right, "dim")), width) if right else fit(left, width))
    if more and room > 1:
        out.append(fit(line((f"  +{more} more kinds · enter", "dim")), width))
    return out


def log_line(entry: LogLine, width: int) -> Line:
    mark = status.mark(status.LOG, entry.level)
    text_style = "text" if entry.level == "info" else mark.style
    source = "" if width < 60 else cell(entry.source, 11) + " "
    return fit(
        line(
            (f.clock(entry.ts)[: 8 if width >= 44 else 5] + " ", "dim"),
            (f"{mark.glyph} ", mark.style),
            (source, "dim"),
            (clean(entry.text), text_style),
        ),
        width,
    )


def log(state: ConsoleState, width: int, height: int) -> list[Line]:
    lines = state.log_lines()[-height:]
    return [log_line(entry, width) for entry in lines] or waiting("nothing logged yet", width)


def audit_row(row: AuditRow) -> tuple[str | tuple[str, str], ...]:
    bad = row.decision not in ("", "keep")
    p = (
        f.NONE
        if row.p_value is None
        else f"{row.p_value:.1e}"
        if row.p_value < 0.001
        else f"{row.p_value:.3f}"
    )
    return (
        row.dataset,
        row.provider,
        row.arm,
        f.count(row.samples),
        f.percent(row.trigger_rate),
        f.percent(row.reference_rate),
        p,
        f.percent(row.schema_valid_rate),
        f.percent(row.args_match_rate),
        (row.decision or f.NONE, "warn" if bad else "ok"),
    )
