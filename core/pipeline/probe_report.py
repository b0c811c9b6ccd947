"""What a live probe saw: an answer an arm, and where it leaves the local one.

Reads the finished run's files; a run that was stopped early is judged here, because its samples
were never written."""

from collections.abc import Iterable

import msgspec

from core.pipeline.setting import read_prompts
from core.reconstruct import StopOffsets, judge, read_reply
from core.render.base import Renderer
from core.render.source import renderer_of
from core.render.tokenizer import TokenizerLike
from core.schema import CLOSING, Prompt, Rollout, Sample, SpendLine, reply_text
from core.store import RunDir, Status, read_jsonl, read_samples

FORMS = ("none", "structured", "raw markers", "structured and raw markers", "by ids")
MARKERS = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")


class Token(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    text: str


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first completion token that differs; None where one side has ended."""

    at: int
    local: Token | None
    here: Token | None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One arm's answer to one question. `call_form`: one of FORMS. `same_as_local` None: one of
    the two has no ids. `bill`: billed, looked_up, uncertain or free; empty: nothing was sent."""

    question: str
    arm: str
    backend: str
    provider: str | None
    outcome: str
    error_class: str | None
    error: str | None
    call_form: str
    calls: list[str]
    finish_reason: str | None
    verdict: str | None
    hypothesis: str | None
    flags: list[str]
    completion_tokens: int | None
    billed_tokens: int | None
    cost_usd: float | None
    bill: str
    latency_s: float | None
    ttft_s: float | None
    sample_id: str
    same_as_local: bool | None
    divergence: Divergence | None


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The stable `--json` of `eyas probe live`. `question` of an answer: its twin_id."""

    v: int = 1
    run_id: str
    path: str
    state: str
    reason: str
    spent_usd: float
    uncertain_usd: float
    corrected_usd: float
    """What the account proved of uncertain bills, in sum: mostly negative."""
    budget_usd: float
    answers: list[Answer]

    @property
    def complete(self) -> bool:
        """Whether every arm gave a reply that could be read, whatever it is worth."""
        return all(a.outcome in ("ok", "rejected") for a in self.answers)


def report_of(run: RunDir, status: Status) -> ProbeReport:
    config = run.load_config()
    renderer = renderer_of(config)
    prompts = read_prompts(run)
    rollouts = {r.prompt_id: r for r in read_jsonl(run.completions, Rollout)}
    samples = _samples(run, prompts, rollouts, renderer)
    bills: dict[str, SpendLine] = {}
    corrected = 0.0
    for line in read_jsonl(run.spend, SpendLine):
        corrected += line.cost_usd if line.kind == "adjusted" else 0.0
        if line.kind in CLOSING:
            before = bills[line.prompt_id].cost_usd if line.prompt_id in bills else 0.0
            bills[line.prompt_id] = msgspec.structs.replace(line, cost_usd=before + line.cost_usd)
    local = {p.twin_id: samples.get(p.prompt_id) for p in prompts if p.arm == "local"}
    answers = [
        _answer(
            rollouts.get(p.prompt_id) or _unasked(p),
            samples.get(p.prompt_id),
            local.get(p.twin_id) if p.arm != "local" else None,
            bills.get(p.prompt_id),
            renderer.tokenizer,
        )
        for p in sorted(prompts, key=lambda p: p.source_row)
    ]
    return ProbeReport(
        run_id=run.run_id,
        path=str(run.path.resolve()),
        state=status.state,
        reason=status.reason,
        spent_usd=status.spent_usd,
        uncertain_usd=status.uncertain_usd,
        corrected_usd=corrected,
        budget_usd=config.run.budget_usd,
        answers=answers,
    )


def _samples(
    run: RunDir, prompts: Iterable[Prompt], rollouts: dict[str, Rollout], renderer: Renderer
) -> dict[str, Sample]:
    samples = {s.prompt_id: s for s in read_samples(run)}
    offsets = StopOffsets()
    for prompt in prompts:
        rollout = rollouts.get(prompt.prompt_id)
        if rollout is None or rollout.outcome not in ("ok", "rejected"):
            continue
        if prompt.prompt_id not in samples:
            samples[prompt.prompt_id] = judge(rollout, prompt, renderer, offsets)
    return samples


def _answer(
    seen: Rollout,
    sample: Sample | None,
    local: Sample | None,
    bill: SpendLine | None,
    tokenizer: TokenizerLike,
) -> Answer:
    completion = sample.completion_ids if sample else []
    reference = local.completion_ids if local else []
    both = bool(completion and reference)
    differs = first_divergence(reference, completion, tokenizer) if both else None
    return Answer(
        question=seen.twin_id,
        arm=seen.arm,
        backend=seen.backend,
        provider=seen.provider,
        outcome=seen.outcome,
        error_class=seen.error_class or (sample.error_class if sample else None),
        error=seen.error,
        call_form=call_form(seen, sample),
        calls=[c.name for c in sample.calls] if sample else [],
        finish_reason=sample.finish_reason if sample else None,
        verdict=sample.verdict if sample else None,
        hypothesis=sample.hypothesis if sample else None,
        flags=sample.flags if sample else [],
        completion_tokens=len(completion) or None,
        billed_tokens=seen.usage.completion_tokens,
        cost_usd=bill.cost_usd if bill else None,
        bill=bill.kind if bill else "",
        latency_s=seen.timings.total_s if seen.timings else None,
        ttft_s=seen.timings.ttft_s if seen.timings else None,
        sample_id=seen.prompt_id,
        same_as_local=differs is None if both else None,
        divergence=differs,
    )


def _unasked(prompt: Prompt) -> Rollout:
    return Rollout(
        prompt_id=prompt.prompt_id,
        twin_id=prompt.twin_id,
        dataset=prompt.dataset,
        arm=prompt.arm,
        attempt=0,
        outcome="aborted",
        backend=prompt.backend,
    )


def call_form(rollout: Rollout, sample: Sample | None) -> str:
    """How the reply brought its calls: as structured `tool_calls`, as raw markers in its text, by
    the server's ids alone (`/generate`), or not at all."""
    reply = read_reply(rollout.reply_kind, reply_text(rollout), rollout.status, rollout.headers)
    raw = any(marker in reply.content + reply.reasoning for marker in MARKERS)
    if reply.calls:
        return "structured and raw markers" if raw else "structured"
    if raw:
        return "raw markers"
    return "by ids" if reply.ids is not None and sample is not None and sample.calls else "none"


def first_divergence(
    local: list[int], here: list[int], tokenizer: TokenizerLike
) -> Divergence | None:
    """Pure; None when the two are the same."""
    shorter = min(len(local), len(here))
    at = next((i for i in range(shorter) if local[i] != here[i]), shorter)
    if at == len(local) == len(here):
        return None

    def token(ids: list[int]) -> Token | None:
        if at >= len(ids):
            return None
        known = 0 <= ids[at] < tokenizer.vocab_size
        raw = tokenizer.token_bytes(ids[at]) if known else b""
        return Token(id=ids[at], text=raw.decode("utf-8", "backslashreplace"))

    return Divergence(at=at, local=token(local), here=token(here))
