"""The last page of a run: what was made, what it cost, how exact it was, what the drafter gains.

Reads finished files, writes none. Every ratio is one division of two counts that `data` holds as
well."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from core import events as ev
from core.config import Config
from core.generate import recover
from core.pipeline.stages import Marker
from core.schema import AcceptanceCounts, EvalReport
from core.store import RunDir, read_eval, read_samples


def summarise(run: RunDir, config: Config, markers: Mapping[str, Marker]) -> ev.Summary:
    """The Summary event, from the run directory alone. Parts whose stage did not run are left
    out."""
    data: dict[str, Any] = {"run_id": run.run_id, **_samples(run), **_books(run, config)}
    if (report := read_eval(run)) is not None:
        data["drafter"] = _drafter(report)
    if run.export.is_dir():
        data["exports"] = sorted(str(p) for p in run.export.iterdir() if p.is_dir())
    data["seconds"] = {name: round(m.seconds, 2) for name, m in markers.items()}
    return ev.Summary(lines=summary_lines(data), data=data)


def _samples(run: RunDir) -> dict[str, Any]:
    if not any(run.samples.glob("*.parquet")):  # nothing is rebuilt yet
        return {}
    verdicts: Counter[str] = Counter()
    classes: Counter[str] = Counter()
    samples = kept = kept_tokens = tokens = 0
    for sample in read_samples(run, ["token_ids", "verdict", "error_class"]):
        completion = len(sample.token_ids) - sample.prompt_len if sample.token_ids else 0
        verdicts[sample.verdict] += 1
        samples += 1
        tokens += completion
        if sample.error_class:
            classes[sample.error_class] += 1
        if sample.trainable:
            kept += 1
            kept_tokens += completion
    return {
        "samples": samples,
        "kept_samples": kept,
        "completion_tokens": tokens,
        "kept_tokens": kept_tokens,
        "verdicts": dict(sorted(verdicts.items())),
        "classes": dict(classes.most_common()),
    }


def _books(run: RunDir, config: Config) -> dict[str, Any]:
    books = recover(run)
    return {
        "outcomes": dict(sorted(books.outcomes.items())),
        "finished_prompts": len(books.finished),
        "spent_usd": books.spent_usd,
        "uncertain_usd": books.uncertain_usd,
        "budget_usd": config.run.budget_usd,
    }


def _drafter(report: EvalReport) -> dict[str, Any]:
    def length(counts: AcceptanceCounts | None) -> float | None:
        return None if counts is None else counts.acceptance_length

    return {
        "checkpoint": report.checkpoint,
        "draft_tokens": report.draft_tokens,
        "acceptance_length": length(report.walk),
        "decoded": length(report.decoded),
        "untrained": length(report.untrained),
        "prompts": report.prompts,
        "lossless_prompts": report.lossless_prompts,
    }


def summary_lines(data: dict[str, Any]) -> list[str]:
    """The same for a person."""
    outcomes = " · ".join(f"{n} {name}" for name, n in data["outcomes"].items()) or "none"
    if "samples" not in data:
        lines = [f"asked     prompts: {outcomes}; no samples yet", _cost_line(data)]
    else:
        lines = [
            f"made      {data['kept_samples']} of {data['samples']} samples kept, "
            f"{data['kept_tokens']:,} of {data['completion_tokens']:,} completion tokens; "
            f"prompts: {outcomes}",
            _cost_line(data),
            "exact     "
            + (" · ".join(f"{n} {name}" for name, n in data["verdicts"].items()) or "none"),
        ]
    if data.get("classes"):
        worst = [f"{n} {name}" for name, n in list(data["classes"].items())[:5]]
        lines.append("not kept  " + " · ".join(worst))
    if drafter := data.get("drafter"):
        lines.append(_drafter_line(drafter))
    if exports := data.get("exports"):
        lines.append("exported  " + " · ".join(exports))
    return lines


def _cost_line(data: dict[str, Any]) -> str:
    budget_usd = data["budget_usd"]
    budget = f"{budget_usd:.2f}" if budget_usd >= 1 else f"{budget_usd:.4f}"
    line = f"cost      ${data['spent_usd']:.4f} of ${budget}"
    if data.get("kept_tokens"):
        line += f", ${1e6 * data['spent_usd'] / data['kept_tokens']:.3f} per million kept tokens"
    if data["uncertain_usd"]:
        line += f"; ${data['uncertain_usd']:.4f} of it uncertain"
    return line


def _drafter_line(drafter: dict[str, Any]) -> str:
    line = (
        f"drafter   {drafter['acceptance_length']:.2f} tokens per target forward "
        f"with {drafter['draft_tokens']} draft tokens"
    )
    if drafter["untrained"] is not None:
        line += f" (untrained {drafter['untrained']:.2f})"
    if drafter["decoded"] is not None:
        line += f"; really decoding {drafter['decoded']:.2f}"
    if drafter["lossless_prompts"] is not None:
        line += (
            f", {drafter['lossless_prompts']} of {drafter['prompts']} outputs equal plain greedy"
        )
    return line
