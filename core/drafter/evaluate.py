"""Measure a drafter on held-out prompts: the exact walk, real decoding, and an untrained drafter
for comparison.

The headline walk runs on the target's own greedy replies to held-out prompts, the same prompts that
are then really decoded, so both count the same thing. Held-out samples as recorded are walked too,
by dataset and by length. Knows features and the target; trains nothing."""

# T positions, X = 3H aux states, C = 4 captured states

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from core import events as ev
from core.config import Config
from core.drafter import checkpoint
from core.drafter.data import is_heldout, masked_now, usable_samples
from core.drafter.model import Drafter
from core.drafter.vocab import count_tokens, coverage, from_used
from core.drafter.walk import Speculator, Steps, chain_right, count, unique_ngram_ratio, walk
from core.errors import Halted, TrainError
from core.features import FeatureReader
from core.schema import SERVED_SHARE, AcceptanceCounts, EvalReport
from core.store import RunDir, write_atomic
from core.target import Target, eos_ids, settle_threads, target_dir

LENGTH_EDGES = (128, 256, 512, 1_024, 4_096, 16_384)


@dataclass(frozen=True)
class Reply:
    """A held-out prompt with the target's greedy reply."""

    dataset: str
    prompt: list[int]
    ids: list[int]


def served_warning(walked: float, served: float) -> str | None:
    """One line when an engine accepts much less than the walk says it must; None when it does
    not."""
    if served >= SERVED_SHARE * walked:
        return None
    return (
        f"served acceptance length {served:.2f} is below {SERVED_SHARE:.0%} of the walk's "
        f"{walked:.2f}; "
        "check mask alignment, d2t offsets, aux layer ids, and the chat template"
    )


def walk_rows(
    drafter: Drafter, rows: Iterable[tuple[str, torch.Tensor, torch.Tensor, int]], draft_tokens: int
) -> list[tuple[str, Steps]]:
    """Steps of (dataset, ids [T], aux [T, 3H], prompt_len) rows."""
    out = []
    for dataset, ids_T, aux_TX, prompt_len in rows:
        right_T = chain_right(drafter, ids_T, aux_TX, prompt_len, draft_tokens)
        out.append((dataset, walk(right_T.tolist(), prompt_len, ids_T.numel())))
    return out


def by_dataset(
    steps: Sequence[tuple[str, Steps]], draft_tokens: int
) -> dict[str, AcceptanceCounts]:
    names = sorted({name for name, _ in steps})
    return {n: count((s for name, s in steps if name == n), draft_tokens) for n in names}


def by_length(steps: Sequence[tuple[str, Steps]], draft_tokens: int) -> dict[str, AcceptanceCounts]:
    """Counts by context length at the step: keys like "<=256"; the last is open."""
    parts: dict[str, list[Steps]] = {}
    for _, reply in steps:
        for s, n in zip(reply.start, reply.right, strict=True):
            edge = next((e for e in LENGTH_EDGES if s + 1 <= e), None)
            key = f"<={edge}" if edge else f">{LENGTH_EDGES[-1]}"
            parts.setdefault(key, []).append(Steps([s], [n], reply.last))
    return {key: count(part, draft_tokens) for key, part in parts.items()}


class Evaluation:
    """One checkpoint against one target. Every part can be stopped between prompts."""

    def __init__(
        self, run: RunDir, config: Config, path: Path, should_stop: Callable[[], bool]
    ) -> None:
        directory = target_dir(config)
        self.config, self._run, self._should_stop = config, run, should_stop
        self.target = Target.load(
            directory, config.extract.aux_layers, config.target.dtype, config.target.device
        )
        head = self.target.head().to(config.target.device, torch.float32)
        self.drafter, self.state = checkpoint.load_drafter(path, head)
        if self.state.draft.aux_layers != self.target.aux_layers:
            raise TrainError(
                f"{path}: trained on the outputs of layers {self.state.draft.aux_layers}, "
                f"the config captures {self.target.aux_layers}; undo the change of "
                "extract.aux_layers",
                kind="aux_layers",
            )
        self.fresh = Drafter.fresh(
            self.state.draft, head, self.drafter.d2t, self.drafter.t2d, config.run.seed
        ).to(config.target.device)
        self.eos = eos_ids(directory)

    def recorded(self) -> list[tuple[str, Steps]]:
        """Steps over held-out samples as generated (teacher-forced on their own text), as far as
        the audit stands by them."""
        reader, share = FeatureReader(self._run.features), self.config.eval.holdout
        kept = masked_now(self._run)
        rows = []
        for ref in reader.refs:
            if ref.sample_id in kept and is_heldout(ref.twin_id, share):
                self._stop_check()
                row = reader.load(ref)
                aux_TX = row.states_TCH[:, :3].flatten(1).float().to(self.target.device)
                rows += walk_rows(
                    self.drafter,
                    [(row.dataset, row.ids_T, aux_TX, row.prompt_len)],
                    self.config.eval.draft_tokens,
                )
        return rows

    def replies(self, emit: Callable[[ev.Event], None]) -> list[Reply]:
        """The target's greedy replies to up to `decode_prompts` held-out prompts, datasets taken in
        turn."""
        chosen = _heldout_prompts(self._run, self.config)
        out = []
        for done, (dataset, prompt) in enumerate(chosen):
            self._stop_check()
            ids = self.target.greedy(prompt, self.config.eval.max_new_tokens, self.eos)
            out.append(Reply(dataset, prompt, ids))
            emit(_progress(done + 1, 2 * len(chosen), "greedy replies"))
        return out

    def walked(self, drafter: Drafter, replies: Sequence[Reply]) -> list[tuple[str, Steps]]:
        """Steps over greedy replies, states captured by one forward in the target's own
        precision."""
        out = []
        for reply in replies:
            self._stop_check()
            ids_T = torch.tensor(reply.prompt + reply.ids)
            aux_TX = self.target.capture(ids_T[None])[0, :, :3].flatten(1).float()
            row = (reply.dataset, ids_T, aux_TX, len(reply.prompt))
            out += walk_rows(drafter, [row], self.config.eval.draft_tokens)
        return out

    def decoded(
        self, replies: Sequence[Reply], emit: Callable[[ev.Event], None]
    ) -> tuple[list[Steps], int]:
        """(steps of really decoding the same prompts, replies identical to plain greedy
        decoding)."""
        speculator = Speculator(self.target, self.drafter, self.config.eval.draft_tokens)
        steps, same = [], 0
        for done, reply in enumerate(replies):
            self._stop_check()
            ids, taken = speculator.decode(reply.prompt, self.config.eval.max_new_tokens, self.eos)
            steps.append(taken)
            same += ids == reply.ids
            emit(_progress(len(replies) + done + 1, 2 * len(replies), "decoding with the drafter"))
        return steps, same

    def _stop_check(self) -> None:
        if self._should_stop():
            raise Halted("evaluation stopped; nothing was kept, eyas stage evaluate runs it again")


def run(
    run: RunDir, config: Config, emit: Callable[[ev.Event], None], should_stop: Callable[[], bool]
) -> dict[str, Any]:
    """Evaluate the newest checkpoint and write eval.json. The summary holds the headline
    numbers."""
    path = checkpoint.latest(run.checkpoints)
    if path is None:
        raise TrainError(
            f"{run.checkpoints}: no checkpoint; run the train stage first", kind="no_checkpoint"
        )
    evaluation, drafts = Evaluation(run, config, path, should_stop), config.eval.draft_tokens
    hidden = evaluation.target.hidden_size
    settle_threads(config.train.threads, config.target.device, hidden)
    recorded = evaluation.recorded()
    replies = evaluation.replies(emit)
    greedy = evaluation.walked(evaluation.drafter, replies)
    main = greedy or recorded
    if not main:
        raise TrainError(
            "no held-out sample to evaluate on; raise eval.holdout or take more prompts",
            kind="no_heldout",
        )
    untrained = evaluation.walked(evaluation.fresh, replies)
    decoded, lossless = evaluation.decoded(replies, emit)
    report = EvalReport(
        checkpoint=path.name,
        draft_tokens=drafts,
        prompts=len(replies) or len(recorded),
        walk=count((s for _, s in main), drafts),
        walk_text="greedy" if greedy else "recorded",
        recorded=count((s for _, s in recorded), drafts) if recorded else None,
        recorded_by_dataset=by_dataset(recorded, drafts),
        by_length=by_length(main, drafts),
        decoded=count(decoded, drafts) if replies else None,
        untrained=count((s for _, s in untrained), drafts) if replies else None,
        lossless_prompts=lossless if replies else None,
        by_dataset=by_dataset(main, drafts),
        coverage_by_dataset=_heldout_coverage(run, config, evaluation.drafter),
        unique_4gram_ratio=unique_ngram_ratio(r.ids for r in replies),
    )
    write_atomic(run.eval, msgspec.json.format(msgspec.json.encode(report)))
    emit(to_event(report))
    if report.decoded:
        served = report.decoded.acceptance_length
        if warning := served_warning(report.walk.acceptance_length, served):
            emit(ev.Log(level="warn", stage="evaluate", message=warning))
    return headline(report)


def to_event(report: EvalReport) -> ev.Evaluated:
    walked, decoded, untrained = report.walk, report.decoded, report.untrained
    return ev.Evaluated(
        checkpoint=report.checkpoint,
        draft_tokens=report.draft_tokens,
        acceptance_length=walked.acceptance_length,
        untrained=untrained.acceptance_length if untrained else None,
        decoded=decoded.acceptance_length if decoded else None,
        by_dataset={name: c.acceptance_length for name, c in report.by_dataset.items()},
        accepted_by_position=[
            a / o if o else 0.0
            for a, o in zip(walked.accepted_by_position, walked.offered_by_position, strict=True)
        ],
        lossless=f"{report.lossless_prompts}/{report.prompts}" if decoded else "",
    )


def headline(report: EvalReport) -> dict[str, Any]:
    """The numbers of the last page: JSON scalars, and the counts that they come from."""
    event = to_event(report)
    return {
        "checkpoint": report.checkpoint,
        "prompts": report.prompts,
        "draft_tokens": report.draft_tokens,
        "acceptance_length": event.acceptance_length,
        "decoded": event.decoded,
        "untrained": event.untrained,
        "recorded": report.recorded.acceptance_length if report.recorded else None,
        "lossless": event.lossless,
        "steps": report.walk.steps,
        "decoded_steps": report.decoded.steps if report.decoded else None,
        "walk_text": report.walk_text,
        "unique_4gram_ratio": report.unique_4gram_ratio,
    }


def _heldout_prompts(run: RunDir, config: Config) -> list[tuple[str, list[int]]]:
    """Up to decode_prompts distinct held-out prompts, datasets in turn, in a fixed order."""
    queues: dict[str, dict[str, list[int]]] = {}
    for sample in usable_samples(run):
        if is_heldout(sample.twin_id, config.eval.holdout):
            queue = queues.setdefault(sample.dataset, {})
            queue.setdefault(sample.twin_id, sample.token_ids[: sample.prompt_len])
    lines = [[(name, ids) for _, ids in sorted(q.items())] for name, q in sorted(queues.items())]
    chosen: list[tuple[str, list[int]]] = []
    for turn in range(max((len(line) for line in lines), default=0)):
        chosen += [line[turn] for line in lines if turn < len(line)]
    return chosen[: config.eval.decode_prompts]


def _heldout_coverage(run: RunDir, config: Config, drafter: Drafter) -> dict[str, float]:
    vocab = from_used(torch.nonzero(drafter.t2d.cpu()).squeeze(-1).tolist(), drafter.c.vocab_size)
    _, heldout = count_tokens(
        usable_samples(run), config.eval.holdout, config.extract.max_length, drafter.c.vocab_size
    )
    return coverage(vocab, heldout)


def _progress(done: int, total: int, detail: str) -> ev.StageProgress:
    return ev.StageProgress(stage="evaluate", done=done, total=total, detail=detail)
