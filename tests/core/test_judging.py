"""Judging beside the loop: in threads for few requests, in a process for many, and on after that
process has died."""

import asyncio
import os
import signal

import psutil
import pytest

from core.config import parse
from core.pipeline import judging
from core.pipeline.judging import PROCESS_FROM, Judged, Judges
from core.reconstruct import StopOffsets
from core.schema import Prompt, Rollout, Usage
from tests.core.generate.rig import renderer
from tests.faults.rig import wait_for

IDS = [1, 2, 3]


def answer(number: int) -> tuple[Rollout, Prompt]:
    text = f"It is {number}."
    tokens = len(renderer().tokenizer.encode_ordinary(text)) + 2
    prompt = Prompt(
        prompt_id=f"p{number}",
        twin_id=f"t{number}",
        dataset="d",
        messages=[{"role": "user", "content": "What is it?"}],
        thinking=False,
    )
    body = (
        '{"choices": [{"index": 0, "finish_reason": "stop", '
        f'"message": {{"role": "assistant", "content": "{text}"}}}}]}}'
    )
    rollout = Rollout(
        prompt_id=prompt.prompt_id,
        twin_id=prompt.twin_id,
        dataset="d",
        arm="declared",
        attempt=1,
        outcome="ok",
        backend="openrouter",
        provider="alder",
        status=200,
        reply_kind="json",
        reply_raw=body,
        usage=Usage(prompt_tokens=3, completion_tokens=tokens),
    )
    return rollout, prompt


async def judged(judges: Judges, numbers: range) -> list[Judged]:
    return await asyncio.gather(*(judges.judge(*answer(n), IDS) for n in numbers))


async def test_a_process_that_cannot_start_is_done_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("multiprocessing.util.spawnv_passfds", refused)
    warnings: list[str] = []
    many = parse({"generate": {"max_in_flight": PROCESS_FROM}}, "test")
    judges = Judges(many, renderer(), StopOffsets(), warnings.append)
    judges.start()
    try:
        assert len(await judged(judges, range(5))) == 5
    finally:
        await judges.close()
    assert warnings == [
        "no judging process ([Errno 11] Resource temporarily unavailable); "
        "judging goes on inside the engine, slower"
    ]


async def test_a_process_that_died_while_nobody_asked_is_done_without() -> None:
    warnings: list[str] = []
    many = parse({"generate": {"max_in_flight": PROCESS_FROM}}, "test")
    judges = Judges(many, renderer(), StopOffsets(), warnings.append)
    judges.start()
    assert len(await judged(judges, range(3))) == 3
    pool = judges._pool
    assert pool is not None
    (process,) = pool._processes.values()
    process.kill()
    await asyncio.to_thread(wait_for, lambda: bool(pool._broken), "the pool to notice")
    assert len(await judged(judges, range(5))) == 5
    await judges.close()
    assert warnings == ["the judging process died; judging goes on inside the engine, slower"]


async def test_a_process_judges_as_threads_do_and_its_death_is_survived() -> None:
    warnings: list[str] = []
    few = parse({"generate": {"max_in_flight": 8}}, "test")
    many = parse({"generate": {"max_in_flight": PROCESS_FROM}}, "test")
    threads = Judges(few, renderer(), StopOffsets(), warnings.append)
    threads.start()
    process = Judges(many, renderer(), StopOffsets(), warnings.append)
    process.start()
    try:
        expected = await judged(threads, range(100))
        assert await judged(process, range(100)) == expected
        assert expected[7].sample.prompt_id == "p7" and expected[7].seen.provider == "alder"
        assert process._pool is not None and threads._pool is None
        os.kill(next(iter(process._pool._processes)), signal.SIGKILL)
        assert await judged(process, range(100, 140)) == await judged(threads, range(100, 140))
        assert warnings == ["the judging process died; judging goes on inside the engine, slower"]
    finally:
        await threads.close()
        await process.close()


@pytest.mark.parametrize("limit", ["MOST_S", "CLOSE_S"])
async def test_a_process_that_answers_nothing_is_killed(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    many = parse({"generate": {"max_in_flight": PROCESS_FROM}}, "test")
    judges = Judges(many, renderer(), StopOffsets(), warnings.append)
    judges.start()
    assert len(await judged(judges, range(3))) == 3
    assert judges._pool is not None
    (process,) = judges._pool._processes.values()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(judging, limit, 0.2)
    if limit == "MOST_S":
        assert len(await judged(judges, range(5))) == 5
    await judges.close()
    pid = process.pid
    await asyncio.to_thread(wait_for, lambda: not psutil.pid_exists(pid), "the process to end")
    assert [w.split(";")[0] for w in warnings] == (
        ["the judging process gave no answer for 0 s"] if limit == "MOST_S" else []
    )
