"""The audit's part of the report page: exactness, tool semantics, decisions, findings."""

from collections.abc import Sequence
from typing import Any

from core.audit.charts import Whisker, text, whiskers
from core.audit.markup import fold, section, table

SHOWN_RULES = 24


def exactness(exact: dict[str, Any]) -> str:
    if not exact["samples"]:
        return ""
    rows = []
    for kind, count in exact["kinds"].items():
        share = count["exact"] / count["segments"] if count["segments"] else 0.0
        compared = f"{count['same_text']:,} of {count['compared']:,}" if count["compared"] else "–"
        rows.append(
            [
                kind,
                f"{count['segments']:,}",
                f"{count['canonical']:,}" if kind not in ("edges", "structure") else "–",
                compared,
                f"{share:.2%}",
                f"{count['low']:.2%} – {count['high']:.2%}",
                f"{count['exact_tokens']:,} of {count['tokens']:,}",
            ]
        )
    lede = (
        f"{exact['samples']:,} replies came with their ids. Rebuilt from their text alone,"
        f" {exact['exact']:,} have these ids (95 % interval {exact['low']:.2%} –"
        f" {exact['high']:.2%}). Of {exact['consistent']:,} that the rebuild calls consistent,"
        f" {exact['false']:,} do not. This is the best that text from any provider can reach."
    )
    titles = ["segment", "count", "canonical split", "text unchanged", "exact"]
    titles += ["95 % interval", "exact tokens"]
    return section("How exact text is", lede, table(titles, rows, 1))


def semantics(audit: dict[str, Any]) -> str:
    comparisons = audit["semantics"]["comparisons"]
    if not comparisons:
        return section(
            "Tool semantics", "Every sample comes from the local arm: nothing to compare.", ""
        )
    dots, rows = [], []
    for c in comparisons:
        mine, local, pair = c["twins"] or c["all"], c["reference"], c["agreement"]
        share = mine["trigger"]
        if share["total"]:
            reference = None
            if local and local["trigger"]["total"]:
                one = local["trigger"]
                reference = (one["hits"] / one["total"], one["low"], one["high"])
            value = share["hits"] / share["total"]
            dots.append(
                Whisker(
                    f"{c['dataset']} · {c['provider']}",
                    value,
                    share["low"],
                    share["high"],
                    reference,
                )
            )
        rows.append(_semantics_row(c, mine, local, pair))
    titles = ["dataset", "provider", "arm", "twins", "calls", "local", "p", "F1"]
    titles += ["names", "arguments", "schema"]
    body = (whiskers(dots, "tool trigger rate") if dots else "") + table(titles, rows, 3)
    titles = ["dataset", "provider", "arm", "undeclared", "native ids", "content before"]
    titles += ["calls per reply", "thinking tokens", "local", "same finish"]
    more = [_manner_row(c) for c in comparisons]
    body += fold("manner: ids, content before calls, length, finish", table(titles, more, 3))
    deviations = [
        f"<li><b>{text(c['dataset'])} · {text(c['provider'])}</b> {text(d['saw'])}"
        f" <small>{text(d['metric'])}, p {d['p']:.1g}</small></li>"
        for c in comparisons
        for d in c["deviations"]
    ]
    if deviations:
        body += f'<ul class="plain">{"".join(deviations)}</ul>'
    body += _likelihoods(comparisons)
    return section(
        "Tool semantics",
        "How often each provider calls a tool, against the local arm on the same questions. Bars"
        " are 95 % intervals; p is McNemar's exact test on the pairs.",
        body,
    )


def _semantics_row(
    c: dict[str, Any],
    mine: dict[str, Any],
    local: dict[str, Any] | None,
    pair: dict[str, Any] | None,
) -> list[str]:
    return [
        c["dataset"],
        c["provider"],
        c["arm"],
        f"{pair['pairs']:,}" if pair else "0",
        _rate(mine["trigger"]),
        _rate(local["trigger"] if local else None),
        f"{pair['trigger_p']:.2g}" if pair and mine["trigger"]["total"] else "–",
        f"{pair['f1']:.3f}" if pair and pair["f1"] is not None else "–",
        _rate(pair["name_match"] if pair else None),
        _rate(pair["args_match"] if pair else None),
        _rate(mine["schema_valid"]),
    ]


def _manner_row(c: dict[str, Any]) -> list[str]:
    mine, local, pair = c["twins"] or c["all"], c["reference"], c["agreement"]
    calls = mine["calls_per_reply"]
    return [
        c["dataset"],
        c["provider"],
        c["arm"],
        _rate(mine["undeclared"]),
        _rate(mine["native_id"]),
        _rate(mine["content_before"]),
        f"{calls:.2f}" if calls is not None else "–",
        f"{mine['reasoning_tokens']:.0f}",
        f"{local['reasoning_tokens']:.0f}" if local else "–",
        _rate(pair["same_finish"] if pair else None),
    ]


def _rate(share: dict[str, Any] | None) -> str:
    return f"{share['hits'] / share['total']:.1%}" if share and share["total"] else "–"


def _likelihoods(comparisons: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            c["dataset"],
            c["provider"],
            t["segment"],
            f"{t['samples']:,}",
            f"{t['shift_nats']:+.3f}",
            f"{t['distance']:.3f}",
            f"{t['p']:.2g}",
        ]
        for c in comparisons
        for t in c["likelihood"]
    ]
    if not rows:
        return ""
    titles = ["dataset", "provider", "segment", "samples", "shift (nats)", "KS distance", "p"]
    return fold("the target's own likelihood, API against local", table(titles, rows, 3))


def decisions(audit: dict[str, Any]) -> str:
    cards = []
    for d in audit["decisions"]:
        rows = [
            [
                name,
                f"{cost['samples']:,}",
                f"{cost['tokens']:,}",
                f"${cost['paid_usd']:,.4f}",
                f"${cost['again_usd']:,.4f}" if cost["again_usd"] else "–",
            ]
            for name, cost in d["costs"].items()
        ]
        shown = table(
            ["choice", "samples", "tokens lost", "paid", "again"],
            rows,
            1,
            d["decision"],
        )
        name = text(d["decision"])
        pill = f'<span class="pill d-{name}">{name}</span>'
        kept = f"{d['trainable']:,} trainable samples, {d['trainable_tokens']:,} tokens"
        cards.append(
            f"<article><h3>{text(d['dataset'])} {pill}</h3><p>{text(d['reason'])}</p>"
            f"<small>{text(kept)}</small>{shown}</article>"
        )
    applied = "".join(
        f"<li>{text(a['decision'])} on {text(', '.join(a['datasets']))}: {a['samples']:,} samples,"
        f" {a['tokens']:,} tokens, ${a['paid_usd']:,.4f}</li>"
        for a in audit["applied"]
    )
    body = f'<div class="cards">{"".join(cards)}</div>'
    if applied:
        body += f'<h3>Applied</h3><ul class="plain">{applied}</ul>'
    return section(
        "What to do with each dataset",
        "What each choice costs: tokens lost, what was paid for them, and asking again.",
        body,
    )


def findings(audit: dict[str, Any]) -> str:
    rows = [
        [
            f["severity"],
            f["rule"],
            f"{f['samples']:,}",
            ", ".join(f"{p} {n:,}" for p, n in f["by_provider"].items()),
        ]
        for f in audit["findings"][:SHOWN_RULES]
    ]
    if not rows:
        return section("Findings", "No rule had anything to say.", "")
    more = len(audit["findings"]) - len(rows)
    lede = "Samples by rule." + (f" {more} more rules are in audit.json." if more else "")
    return section("Findings", lede, table(["severity", "rule", "samples", "providers"], rows, 2))
