"""A sample's verdict and the evidence for it, as a few lines: what was decided first, then why."""

from console import format as f
from console import probe, status
from console.sanitize import clean as whole
from console.widgets.line import Line, fit, line

MOST = 400  # characters of one name, flag or note that are looked at


def clean(text: str) -> str:
    """What can be seen of a text that may be megabytes long."""
    return whole(text[:MOST]) + ("…" if len(text) > MOST else "")


def evidence(opened: probe.Opened, width: int) -> list[Line]:
    """Three lines: verdict and reason; where it came from; size and use."""
    row, sample = opened.row, opened.sample
    mark = status.mark(status.VERDICT, row.verdict)
    parts: list[tuple[str, str]] = [
        (mark.text, mark.style),
        ("  ", "text"),
        (reason(opened), "text"),
    ]
    lines = [fit(line(*parts), width)]
    where = [row.sample_id[:12], row.dataset, f"arm {row.arm}", row.provider]
    if sample is not None and sample.finish_reason:
        where.append(f"finish {sample.finish_reason}")
    where.append(f.usd(row.cost_usd))
    lines.append(fit(line((" · ".join(clean(w) for w in where), "dim")), width))
    if sample is None:
        lines.append(fit(line((clean(opened.note), "warn")), width))
        return lines
    calls = ", ".join(clean(c.name) for c in sample.calls)
    completion = len(sample.token_ids) - sample.prompt_len
    size = f"{sample.prompt_len:,} prompt + {completion:,} completion tokens"
    use = ("trained on", "ok") if sample.trainable else ("not trained on", "warn")
    more = f" · calls {calls}" if calls else ""
    if opened.twin is None and row.arm != "local":
        more += " · no local twin"
    lines.append(fit(line(use, (f" · {size}{more}", "dim")), width))
    lines += [fit(part, width) for part in tried(opened)]
    if opened.note:
        lines.append(fit(line((clean(opened.note), "warn")), width))
    return lines


def tried(opened: probe.Opened) -> list[Line]:
    """What each named hypothesis would count, and which of them the bill fits."""
    sample = opened.sample
    if sample is None or not opened.trials or sample.billed_tokens is None:
        return []
    parts: list[tuple[str, str]] = [("tried", "dim")]
    for trial in opened.trials:
        fits = trial.name == sample.hypothesis
        said = f"{clean(trial.name)} {trial.tokens:,}"
        said += "" if trial.sound else " (no whole reply)"
        parts += [("  ", "dim"), (f"{'✓' if fits else '·'} ", "dim")]
        parts += [(said, "bold" if fits else "dim")]
    none = sample.hypothesis is None
    parts += [("  · none of them explains the bill", "warn")] if none else []
    return [line(*parts)]


def reason(opened: probe.Opened) -> str:
    """Why the verdict is what it is, in the numbers that decided it."""
    row, sample = opened.row, opened.sample
    if sample is None:
        return clean(row.error_class)
    parts: list[str] = []
    if sample.dropped:
        parts.append(f"dropped by the audit: {clean(sample.dropped)}")
    if sample.error_class:
        parts.append(clean(sample.error_class))
    if sample.hypothesis:
        parts.append(f"matches if {clean(sample.hypothesis)}")
    if sample.rebuilt_tokens is not None and sample.billed_tokens is not None:
        gap = sample.billed_tokens - sample.rebuilt_tokens
        same = (
            "the counts agree"
            if gap == 0
            else f"{abs(gap):,} {'more' if gap > 0 else 'fewer'} billed"
        )
        parts.append(f"rebuilt {sample.rebuilt_tokens:,}, billed {sample.billed_tokens:,}: {same}")
    elif sample.rebuilt_tokens is not None:
        parts.append(f"rebuilt {sample.rebuilt_tokens:,}, nothing billed to compare with")
    if sample.flags:
        parts.append("flags " + ", ".join(clean(flag) for flag in sample.flags))
    return " · ".join(parts) or "ids came from the server"
