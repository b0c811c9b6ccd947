"""`eyas report`: what a run made, spent, rejected and why, how its tools behave, what its drafter
gains.

Reads the run directory, writes nothing. Counts first, ratios last; a part whose stage has not run
is left out, never guessed. Every string of the dictionary may have come from outside: whoever draws
it escapes it.
"""

from collections import Counter, defaultdict
from typing import Any

import msgspec

from core.audit.record import AuditReport, load_audit
from core.audit.traits import provider_of
from core.errors import StoreError
from core.journal import load_view
from core.schema import SERVED_SHARE, AcceptanceCounts, SpendLine
from core.store import RunDir, read_eval, read_jsonl, read_manifest, read_samples

POINTS = 240
"""Points of a curve at most."""
PAID = ("billed", "looked_up", "uncertain")
"""Kinds of lines that close a request and may have cost something."""


def report(run: RunDir) -> dict[str, Any]:
    """The whole account. Raises StoreError when the directory holds no run."""
    manifest = read_manifest(run)
    if manifest is None:
        raise StoreError(f"{run.path}: no run.json; give the directory of a run")
    config = run.load_config()
    view = load_view(run)
    data: dict[str, Any] = {
        "v": 1,
        "run": {
            "run_id": run.run_id,
            "state": view.state,
            "reason": view.reason,
            "created_at": manifest.created_at,
            "host": manifest.host,
            "git_sha": manifest.git_sha,
            "config_hash": manifest.config_hash,
            "versions": manifest.versions,
            "target": config.target.path or config.target.kind,
            "variant": config.target.variant,
            "budget_usd": config.run.budget_usd,
        },
        "stages": [
            {"name": s.name, "status": s.status, "seconds": s.seconds} for s in view.stages.values()
        ],
        "made": _made(run),
        "spent": _spent(run),
        "tripwires": [msgspec.structs.asdict(t) for t in view.tripwires],
        "halt": msgspec.structs.asdict(view.halt) if view.halt else None,  # zeros included
    }
    if view.state != "done" and view.stats is not None and view.stats.forecast_usd is not None:
        data["spent"]["forecast_usd"] = view.stats.forecast_usd
        data["spent"]["forecast_error_usd"] = view.stats.forecast_error_usd
    if run.audit.exists():
        audit = load_audit(run)
        data["audit"] = _audit(audit)
        kept = audit.trainable_tokens
        if kept:
            data["spent"]["usd_per_million_kept"] = 1e6 * data["spent"]["total_usd"] / kept
    if (drafter := _drafter(run)) is not None:
        data["drafter"] = drafter
    if view.train_history:
        data["training"] = {"loss": thin([[float(s), loss] for s, loss in view.train_history])}
    data["warnings"] = _warnings(data)
    return data


class _Head(msgspec.Struct, kw_only=True):
    prompt_id: str
    dataset: str = ""
    arm: str = ""
    outcome: str = ""
    final: bool = True
    backend: str = ""
    provider: str | None = None
    error_class: str | None = None
    error: str | None = None


class _PromptHead(msgspec.Struct, kw_only=True):
    dataset: str
    arm: str = ""


def _made(run: RunDir) -> dict[str, Any]:
    """Prompts and their outcomes by dataset and arm, samples and tokens, what was lost and why."""
    prompts: Counter[tuple[str, str]] = Counter()
    for prompt in read_jsonl(run.prompts, _PromptHead):
        prompts[prompt.dataset, prompt.arm] += 1
    outcomes: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    lost: dict[str, Counter[str]] = defaultdict(Counter)
    example: dict[str, str] = {}
    finished: set[str] = set()
    for head in read_jsonl(run.completions, _Head):
        if not head.final or head.outcome == "aborted" or head.prompt_id in finished:
            continue
        finished.add(head.prompt_id)
        outcomes[head.dataset, head.arm][head.outcome] += 1
        if head.outcome in ("failed", "refused"):
            name = head.error_class or "unnamed"
            lost[name][head.provider or head.backend] += 1
            example.setdefault(name, (head.error or "")[:200])
    kept: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    verdicts: dict[str, Counter[str]] = defaultdict(Counter)
    columns = ["dataset", "arm", "backend", "provider", "token_ids", "verdict", "error_class"]
    for sample in read_samples(run, columns):
        completion = max(0, len(sample.token_ids) - sample.prompt_len)
        row = kept[sample.dataset, sample.arm]
        row[0] += 1
        row[1] += sample.trainable
        row[2] += completion
        row[3] += completion if sample.trainable else 0
        provider = provider_of(sample)
        verdicts[provider][sample.verdict] += 1
        if sample.verdict == "rejected":
            lost[sample.error_class or "unnamed"][provider] += 1
    table = [
        {
            "dataset": dataset,
            "arm": arm,
            "prompts": prompts[dataset, arm],
            "outcomes": dict(sorted(outcomes[dataset, arm].items())),
            "samples": kept[dataset, arm][0],
            "trainable": kept[dataset, arm][1],
            "tokens": kept[dataset, arm][2],
            "trainable_tokens": kept[dataset, arm][3],
        }
        for dataset, arm in sorted(prompts)
    ]
    return {
        "prompts": prompts.total(),
        "finished": len(finished),
        "samples": sum(r["samples"] for r in table),
        "trainable": sum(r["trainable"] for r in table),
        "tokens": sum(r["tokens"] for r in table),
        "trainable_tokens": sum(r["trainable_tokens"] for r in table),
        "table": table,
        "verdicts": {p: dict(sorted(c.items())) for p, c in sorted(verdicts.items())},
        "lost": _ranked(lost, example),
    }


def _ranked(lost: dict[str, Counter[str]], example: dict[str, str]) -> list[dict[str, Any]]:
    """Classes of lost replies, the most frequent first."""
    return [
        {
            "class": name,
            "count": counts.total(),
            "by_provider": dict(counts.most_common()),
            "example": example.get(name, ""),
        }
        for name, counts in sorted(lost.items(), key=lambda item: (-item[1].total(), item[0]))
    ]


def _spent(run: RunDir) -> dict[str, Any]:
    """The books: totals by provider and the curve of what was spent over time. A correction by the
    account belongs to all uncertain ones before it, each by its size."""
    total = uncertain = cap = 0.0
    providers: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    unsure: dict[str, float] = defaultdict(float)
    open_: dict[tuple[str, int], SpendLine] = {}
    curve: list[list[float]] = []
    start: float | None = None
    for line in read_jsonl(run.spend, SpendLine):
        start = line.ts if start is None else start
        key = (line.prompt_id, line.attempt)
        if line.kind == "adjusted":
            total += line.cost_usd
            cap += line.cap_usd
            uncertain = 0.0
            for name, usd in unsure.items():
                providers[name][0] += line.cost_usd * usd / sum(unsure.values())
            curve.append([line.ts - start, total])
            continue
        if line.kind in ("dispatch", "known"):
            if line.kind == "dispatch":
                open_[key] = line
            continue
        sent = open_.pop(key, None)
        if line.kind not in PAID:
            continue
        total += line.cost_usd
        cap += line.cap_usd
        name = line.provider or (sent.provider if sent else None) or line.backend
        if line.kind == "uncertain":
            uncertain += line.cost_usd
            unsure[name] += line.cost_usd
        providers[name][0] += line.cost_usd
        providers[name][1] += 1
        curve.append([line.ts - start, total])
    return {
        "total_usd": total,
        "cap_usd": cap,
        "uncertain_usd": uncertain,
        "open": len(open_),
        "by_provider": [
            {"provider": name, "usd": usd, "replies": int(count)}
            for name, (usd, count) in sorted(providers.items(), key=lambda p: -p[1][0])
        ],
        "curve": thin(curve),
    }


def thin(points: list[list[float]], keep: int = POINTS) -> list[list[float]]:
    """At most `keep` points, evenly by number, the first and the last among them."""
    if len(points) <= keep:
        return points
    step = (len(points) - 1) / (keep - 1)
    return [points[round(i * step)] for i in range(keep)]


def _audit(audit: AuditReport) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(audit)
    data["exactness"]["rate"] = audit.exactness.rate
    return data


def _drafter(run: RunDir) -> dict[str, Any] | None:
    evaluated = read_eval(run)
    if evaluated is None:
        return None
    data: dict[str, Any] = {
        "checkpoint": evaluated.checkpoint,
        "draft_tokens": evaluated.draft_tokens,
        "prompts": evaluated.prompts,
        "lossless_prompts": evaluated.lossless_prompts,
        "walk": _acceptance(evaluated.walk),
        "by_dataset": {d: _acceptance(c) for d, c in sorted(evaluated.by_dataset.items())},
        "coverage_by_dataset": evaluated.coverage_by_dataset,
    }
    for name, counts in (("decoded", evaluated.decoded), ("untrained", evaluated.untrained)):
        if counts is not None:
            data[name] = _acceptance(counts)
    return data


def _acceptance(counts: AcceptanceCounts) -> dict[str, Any]:
    offered = counts.offered_by_position
    return {
        "steps": counts.steps,
        "tokens": counts.tokens,
        "acceptance_length": counts.acceptance_length,
        "accepted_by_position": counts.accepted_by_position,
        "offered_by_position": offered,
        "rate_by_position": [
            a / o if o else None for a, o in zip(counts.accepted_by_position, offered, strict=False)
        ],
    }


def _warnings(data: dict[str, Any]) -> list[str]:
    """What a person should not overlook, in one line each."""
    found = []
    open_, uncertain = data["spent"]["open"], data["spent"]["uncertain_usd"]
    if open_:
        found.append(f"{open_} requests are not settled in the books; eyas resume does it")
    if uncertain > 0:
        found.append(f"${uncertain:.4f} is booked at the worst case, as uncertain")
    if halt := data["halt"]:
        found.append(
            f"halted by {halt['by'] or halt['source']}: {halt['cancelled']} requests cancelled, "
            f"{halt['received']} received, {halt['severed']} severed; "
            f"${halt['saved_usd']:.4f} saved, ${halt['uncertain_usd']:.4f} uncertain"
        )
    drafter = data.get("drafter", {})
    walk = drafter.get("walk", {}).get("acceptance_length")
    decoded = drafter.get("decoded", {}).get("acceptance_length")
    if walk and decoded and decoded < SERVED_SHARE * walk:
        found.append(
            f"acceptance length {decoded:.2f} when really decoding, {walk:.2f} in the walk:"
            " look at mask shift, d2t, aux layers and template (cases C60, C64, C66)"
        )
    for decision in data.get("audit", {}).get("decisions", []):
        if decision["decision"] != "keep":
            found.append(f"{decision['dataset']}: {decision['decision']} ({decision['reason']})")
    for wire in data["tripwires"]:
        found.append(f"tripwire {wire['name']} on {wire['scope']}: {wire['saw']}")
    return found
