"""`eyas report --html`: the account as one page that needs nothing beside itself.

Draws what `account.report` says and computes nothing new. No script, no link, no outside resource;
a content policy in the page forbids them. All text is escaped by `charts.text`.
"""

import time
from collections.abc import Sequence
from typing import Any

from core.audit.charts import bars, columns, curve, stacked, text
from core.audit.markup import fold, section, span, table
from core.audit.page_audit import decisions, exactness, findings, semantics
from core.audit.style import CSS

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
VERDICTS = ("exact", "consistent", "hypothesis", "mismatch", "unverifiable", "rejected")


def render(data: dict[str, Any]) -> str:
    """The page of one account, as a string in UTF-8 without a byte that came unescaped from
    outside."""
    sections = [
        _head(data),
        _tiles(data),
        _notes(data["warnings"]),
        _made(data["made"]),
        _spent(data["spent"], data["run"]["budget_usd"]),
        _lost(data["made"]["lost"]),
    ]
    if audit := data.get("audit"):
        sections += [
            exactness(audit["exactness"]),
            semantics(audit),
            decisions(audit),
            findings(audit),
        ]
    if drafter := data.get("drafter"):
        sections.append(_drafter(drafter))
    if training := data.get("training"):
        sections.append(_training(training))
    sections.append(_provenance(data))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>eyas · {text(data['run']['run_id'])}</title><style>{CSS}</style></head>"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _head(data: dict[str, Any]) -> str:
    run = data["run"]
    made = time.strftime("%Y-%m-%d %H:%M", time.gmtime(run["created_at"]))
    seconds = sum(s["seconds"] for s in data["stages"])
    facts = [f"target {run['target']}", str(run["variant"]), f"{made} UTC", f"on {run['host']}"]
    if seconds:
        facts.append(f"{span(seconds)} of work")
    state = text(run["state"])
    return (
        f'<header><p class="eyebrow">eyas run report</p><h1>{text(run["run_id"])}'
        f' <span class="pill s-{state}">{state}</span></h1>'
        f'<p class="facts">{" · ".join(text(f) for f in facts)}</p></header>'
    )


def _tiles(data: dict[str, Any]) -> str:
    made, spent = data["made"], data["spent"]
    tiles = [
        (
            "samples kept",
            f"{made['trainable']:,}",
            f"of {made['samples']:,}, {made['trainable_tokens']:,} tokens",
        ),
        ("spent", f"${spent['total_usd']:,.2f}", f"of ${data['run']['budget_usd']:,.2f}"),
    ]
    exact = data.get("audit", {}).get("exactness", {})
    if exact.get("rate") is not None:
        tiles.append(
            ("rebuilt exactly", f"{exact['rate']:.1%}", f"of {exact['samples']:,} local samples")
        )
    if drafter := data.get("drafter"):
        best = drafter["walk"]["acceptance_length"]
        before = drafter.get("untrained")
        note = (
            f"untrained {before['acceptance_length']:.2f}"
            if before
            else f"{drafter['draft_tokens']} drafts"
        )
        tiles.append(("tokens per forward", f"{best:.2f}", note))
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><p>{text(name)}</p><b>{text(value)}</b>'
            f"<small>{text(note)}</small></div>"
            for name, value, note in tiles
        )
        + "</div>"
    )


def _notes(warnings: Sequence[str]) -> str:
    if not warnings:
        return ""
    return (
        '<div class="notes"><h3>Look at this first</h3><ul>'
        + "".join(f"<li>{text(w)}</li>" for w in warnings)
        + "</ul></div>"
    )


def _made(made: dict[str, Any]) -> str:
    rows = []
    for row in made["table"]:
        outcomes = ", ".join(f"{n:,} {name}" for name, n in row["outcomes"].items())
        share = f"{row['trainable'] / row['samples']:.1%}" if row["samples"] else "–"
        rows.append(
            [
                row["dataset"],
                row["arm"],
                f"{row['prompts']:,}",
                outcomes or "–",
                f"{row['samples']:,}",
                f"{row['trainable']:,}",
                share,
                f"{row['trainable_tokens']:,}",
            ]
        )
    titles = ["dataset", "arm", "prompts", "outcomes", "samples", "kept", "kept %", "kept tokens"]
    verdicts = stacked(list(made["verdicts"].items()), VERDICTS) if made["verdicts"] else ""
    lede = f"{made['finished']:,} of {made['prompts']:,} prompts have an outcome."
    return section("What was made", lede, table(titles, rows, 2) + verdicts)


def _spent(spent: dict[str, Any], budget: float) -> str:
    lede = f"${spent['total_usd']:,.4f} of a budget of ${budget:,.2f}"
    if spent.get("usd_per_million_kept") is not None:
        lede += f", ${spent['usd_per_million_kept']:,.3f} per million kept tokens"
    if spent["uncertain_usd"]:
        lede += f"; ${spent['uncertain_usd']:,.4f} of it uncertain"
    if "forecast_usd" in spent:
        lede += (
            f"; forecast for all prompts ${spent['forecast_usd']:,.4f}"
            f" ± ${spent['forecast_error_usd']:,.4f} (one standard error)"
        )
    rows = [
        (p["provider"], p["usd"], f"${p['usd']:,.4f} · {p['replies']:,} replies")
        for p in spent["by_provider"]
    ]
    body = bars(rows, "spend by provider") if rows else ""
    body += curve(spent["curve"], "spend over time", span, lambda y: f"${y:,.4g}")
    return section("What it cost", lede + ".", body)


def _lost(lost: Sequence[dict[str, Any]]) -> str:
    if not lost:
        return section("What was lost", "Nothing was rejected and nothing failed.", "")
    total = sum(row["count"] for row in lost)
    rows = [(row["class"], float(row["count"]), f"{row['count']:,}") for row in lost[:12]]
    details = [
        [
            row["class"],
            f"{row['count']:,}",
            ", ".join(f"{p} {n:,}" for p, n in row["by_provider"].items()),
            row["example"],
        ]
        for row in lost
    ]
    body = bars(rows, "lost replies by class", "v-rejected") + fold(
        "by provider, with an example",
        table(["class", "count", "providers", "example"], details, 1),
    )
    return section(
        "What was lost, and why", f"{total:,} prompts ended without a usable sample.", body
    )


def _drafter(drafter: dict[str, Any]) -> str:
    named = [
        (n, drafter[k])
        for n, k in (("untrained", "untrained"), ("walk", "walk"), ("decoded", "decoded"))
        if k in drafter
    ]
    rows = [(n, c["acceptance_length"], f"{c['acceptance_length']:.3f}") for n, c in named]
    body = bars(rows, "acceptance length", "c-a")
    styles = {"untrained": "c-c", "walk": "c-a", "decoded": "c-b"}
    body += columns(
        [(n, styles[n], c["rate_by_position"]) for n, c in named], "acceptance by position"
    )
    if drafter["by_dataset"]:
        details = [
            [
                d,
                f"{c['steps']:,}",
                f"{c['tokens']:,}",
                f"{c['acceptance_length']:.3f}",
                f"{drafter['coverage_by_dataset'][d]:.1%}"
                if d in drafter["coverage_by_dataset"]
                else "–",
            ]
            for d, c in drafter["by_dataset"].items()
        ]
        titles = ["dataset", "steps", "tokens", "acceptance length", "draft vocabulary covers"]
        body += table(titles, details, 1)
    lede = (
        f"Tokens per target forward, bonus token included, with {drafter['draft_tokens']} draft"
        f" tokens on {drafter['prompts']:,} held-out prompts."
    )
    if drafter["lossless_prompts"] is not None:
        lede += f" {drafter['lossless_prompts']:,} outputs equal plain greedy decoding."
    return section("The drafter", lede, body)


def _training(training: dict[str, Any]) -> str:
    loss = curve(
        training["loss"],
        "training loss",
        lambda x: f"{x:,.0f}",
        lambda y: f"{y:.3g}",
        from_zero=False,
    )
    return (
        section("Training", f"Loss over {training['loss'][-1][0]:,.0f} steps.", loss)
        if loss
        else ""
    )


def _provenance(data: dict[str, Any]) -> str:
    run = data["run"]
    rows = [["config", run["config_hash"]], ["git", run["git_sha"] or "–"]]
    rows += [[name, version] for name, version in run["versions"].items()]
    stages = [[s["name"], s["status"], span(s["seconds"])] for s in data["stages"]]
    body = table(["what", "value"], rows, 2)
    if stages:
        body = table(["stage", "status", "time"], stages, 2) + body
    return section("Provenance", "What is needed to repeat this run.", body)
