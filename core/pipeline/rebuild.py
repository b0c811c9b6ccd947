"""The reconstruct stage: every reply of completions.jsonl judged again, under conventions and
habits of its provider that are final.

Promises: a function of prompts.jsonl and completions.jsonl alone: same files, same samples, same
bytes; rows in the order of the prompts. While generate runs, a verdict may rest on an offset that
is not known yet; here only where no clean reply ever showed one. Knows which rollout of a prompt
counts, not how a reply is judged."""

import gc
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from core import events as ev
from core.audit.apply import marked, marks
from core.config import Config
from core.errors import Halted, StoreError, boundary
from core.pipeline.setting import read_prompts
from core.reconstruct import StopOffsets, judge, observe
from core.render.base import Renderer
from core.render.source import renderer_of
from core.schema import Prompt, Rollout, RolloutHead, Sample
from core.store import CorruptLine, RunDir, read_at, read_placed, write_samples

CHUNK = 256
PARALLEL_FROM = 2_000
"""Fewer replies than this are judged faster than a second process starts."""


class Replies(NamedTuple):
    """What is needed to judge any reply of a run: shared with worker processes by fork, never
    copied."""

    completions: Path
    prompts: dict[str, Prompt]
    renderer: Renderer
    offsets: StopOffsets
    whole: bool = True
    """False: samples without their ids, texts and segments, which learning does not look at and
    which cost as much to hand over as a quarter of judging."""


class _Worker:
    replies: Replies


def run(
    run: RunDir,
    config: Config,
    emit: Callable[[ev.Event], None],
    should_stop: Callable[[], bool],
) -> dict[str, Any]:
    """Write samples/*.parquet. The summary counts verdicts, rejected classes and prompts without a
    reply."""
    prompts = {p.prompt_id: p for p in read_prompts(run)}
    replies = Replies(run.completions, prompts, renderer_of(config), StopOffsets(), whole=False)

    def corrupt(bad: CorruptLine) -> None:
        emit(
            ev.Log(level="warn", stage="reconstruct", message=f"corrupt_line at byte {bad.offset}")
        )

    def watched(samples: Iterable[Sample], first: int) -> Iterator[Sample]:
        for done, sample in enumerate(samples, first + 1):
            if done % CHUNK == 0 or done == 2 * len(places):
                emit(ev.StageProgress(stage="reconstruct", done=done, total=2 * len(places)))
                if should_stop():
                    raise Halted("reconstruct: stopped; resume begins it again")
            yield sample

    places, others = final_replies(run.completions, prompts, corrupt)
    learned = StopOffsets()  # judging with what is being learned would depend on the order
    for sample in watched(judge_all(replies, places), 0):
        observe(learned, sample)
    learned.settle()
    replies = replies._replace(offsets=learned, whole=True)
    verdicts: Counter[str] = Counter()
    classes: Counter[str] = Counter()

    def counted(samples: Iterable[Sample]) -> Iterator[Sample]:
        for sample in samples:
            verdicts[sample.verdict] += 1
            if sample.error_class:
                classes[sample.error_class] += 1
            yield sample

    final = watched(judge_all(replies, places), len(places))
    with boundary(StoreError, str(run.samples)):
        count = write_samples(run, counted(marked(final, marks(run))))
    return {
        "samples": count,
        "verdicts": dict(sorted(verdicts.items())),
        "classes": dict(classes.most_common()),
        "without_reply": dict(sorted(others.items())),
    }


def final_replies(
    completions: Path,
    prompts: dict[str, Prompt],
    on_corrupt: Callable[[CorruptLine], None] | None = None,
) -> tuple[list[int], Counter[str]]:
    """Where the one final reply of each prompt is (byte offsets, in the order of the prompts), and
    how many prompts ended without a reply, by outcome."""
    placed: dict[str, int] = {}
    others: dict[str, str] = {}
    for offset, head in read_placed(completions, RolloutHead, on_corrupt):
        known = head.prompt_id in placed or head.prompt_id in others
        if known or not head.final or head.outcome == "aborted" or head.prompt_id not in prompts:
            continue
        if head.outcome in ("ok", "rejected"):
            placed[head.prompt_id] = offset
        else:
            others[head.prompt_id] = head.outcome
    return [placed[p] for p in prompts if p in placed], Counter(others.values())


def judge_all(replies: Replies, places: list[int]) -> Iterator[Sample]:
    """Samples in the order of `places`, on all cores when there are many. Holds a few chunks at a
    time."""
    cores = _cores()
    if len(places) < PARALLEL_FROM or cores < 2:
        yield from _judge(replies, places)
        return
    chunks = iter([places[i : i + CHUNK] for i in range(0, len(places), CHUNK)])
    with ProcessPoolExecutor(
        cores,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_start_worker,
        initargs=(replies,),
    ) as pool:
        waiting = [pool.submit(_judge_chunk, chunk) for chunk in islice(chunks, 2 * cores)]
        while waiting:
            yield from waiting.pop(0).result()
            waiting.extend(pool.submit(_judge_chunk, chunk) for chunk in islice(chunks, 1))


def _cores() -> int:
    """That this process may use; a container's share where the system tells it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start_worker(replies: Replies) -> None:
    gc.freeze()  # what came by fork is not looked through again, and its pages stay shared
    _Worker.replies = replies


def _judge_chunk(places: list[int]) -> list[Sample]:
    return list(_judge(_Worker.replies, places))


def _judge(replies: Replies, places: list[int]) -> Iterator[Sample]:
    for rollout in read_at(replies.completions, places, Rollout):
        prompt = replies.prompts[rollout.prompt_id]
        sample = judge(rollout, prompt, replies.renderer, replies.offsets)
        if not replies.whole:
            sample = msgspec.structs.replace(sample, token_ids=[], segments=[], calls=[])
        yield sample
