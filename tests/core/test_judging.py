"""Judging beside the loop: in threads for few requests, in a process for many, and on after that
process has died."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable

import psutil
import pytest
from msgspec.structs import replace

from core.config import parse
from core.conventions import LEARN_SAMPLES
from core.pipeline import judge_process
from core.pipeline.judge_process import Desk, Judged, JudgeProcess
from core.pipeline.judging import PROCESS_FROM, Judges
from core.reconstruct import StopOffsets, observe
from core.schema import Prompt, Rollout, Usage
from tests.core.generate.rig import renderer
from tests.faults.rig import wait_for

IDS = [1, 2, 3]


def answer(number: int) -> tuple[Rollout, Prompt]:
    text = f"It is {number}."
    tokens = len(renderer().tokenizer.encode_ordinary(text)) + 1  # the stop token
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


def many(warn: Callable[[str], None]) -> Judges:
    """Judges with a process."""
    config = parse({"generate": {"max_in_flight": PROCESS_FROM}}, "test")
    return Judges(config, renderer(), StopOffsets(), warn)


def pid_of(judges: Judges) -> int:
    assert judges._process is not None and judges._process.pid is not None
    return judges._process.pid


async def gone(pid: int) -> None:
    await asyncio.to_thread(wait_for, lambda: not psutil.pid_exists(pid), "the process to end")


DIED = "the judging process died; judging goes on inside the engine, slower"


async def test_a_process_that_cannot_start_is_done_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refused)
    warnings: list[str] = []
    judges = many(warnings.append)
    await judges.start()
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
    judges = many(warnings.append)
    await judges.start()
    assert len(await judged(judges, range(3))) == 3
    os.kill(pid_of(judges), signal.SIGKILL)
    await gone(pid_of(judges))
    assert len(await judged(judges, range(5))) == 5
    await judges.close()
    assert warnings == [DIED]


async def test_a_process_judges_as_threads_do_and_its_death_is_survived() -> None:
    warnings: list[str] = []
    few = parse({"generate": {"max_in_flight": 8}}, "test")
    threads = Judges(few, renderer(), StopOffsets(), warnings.append)
    await threads.start()
    process = many(warnings.append)
    await process.start()
    try:
        expected = await judged(threads, range(100))
        assert await judged(process, range(100)) == expected
        assert expected[7].sample.prompt_id == "p7" and expected[7].seen.provider == "alder"
        assert threads._process is None
        waiting = asyncio.create_task(judged(process, range(100, 140)))
        await asyncio.sleep(0)
        os.kill(pid_of(process), signal.SIGKILL)
        assert await waiting == await judged(threads, range(100, 140))
        assert warnings == [DIED]
    finally:
        await threads.close()
        await process.close()


async def test_what_cannot_be_packed_or_fails_there_is_judged_here(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Lone surrogates on the way there, and on the way back; the process stays."""
    warnings: list[str] = []
    judges = many(warnings.append)
    await judges.start()
    rollout, prompt = answer(1)
    assert rollout.reply_raw is not None
    raw = rollout.reply_raw
    there = replace(rollout, reply_raw=raw.replace("It", "\ud800t"))
    back = replace(rollout, reply_raw=raw.replace("It", r"\ud800t"))
    try:
        for odd in (there, back):
            sample = (await judges.judge(odd, prompt, IDS)).sample
            assert (sample.verdict, sample.error_class) == ("rejected", "lone_surrogate")
        broken = replace(rollout, usage=None)
        with pytest.raises(AttributeError, match="NoneType"):
            await judges.judge(broken, prompt, IDS)
        monkeypatch.setattr(Desk, "judge", None)  # nobody but the process
        assert (await judges.judge(rollout, prompt, IDS)).sample.verdict == "consistent"
    finally:
        await judges.close()
    assert capfd.readouterr().err == "judge: ValidationError; the engine judges this reply itself\n"
    assert warnings == []


async def test_who_waits_no_more_gets_nobody_elses_answer() -> None:
    judges = many(print)
    await judges.start()
    try:
        await judged(judges, range(1))
        tasks = [asyncio.create_task(judges.judge(*answer(n), IDS)) for n in range(40)]
        await asyncio.sleep(0)
        for task in tasks[1::2]:  # before they are sent
            task.cancel()
        await asyncio.sleep(0)
        for task in tasks[2::4]:  # on their way
            task.cancel()
        rest = [(n, task) for n, task in enumerate(tasks) if n % 4 == 0]
        for n, task in rest:
            assert (await task).sample.prompt_id == f"p{n}"
    finally:
        await judges.close()


async def test_few_are_on_their_way_and_the_rest_waits_unpacked() -> None:
    judges = many(print)
    await judges.start()
    try:
        await judged(judges, range(1))
        process = judges._process
        assert process is not None
        os.kill(pid_of(judges), signal.SIGSTOP)
        waiting = asyncio.create_task(judged(judges, range(3 * judge_process.MOST_ON_WAY)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        on_way, unsent = len(process._on_way), len(process._unsent)
        os.kill(pid_of(judges), signal.SIGCONT)
        results = await waiting
    finally:
        await judges.close()
    assert (on_way, unsent) == (judge_process.MOST_ON_WAY, 2 * judge_process.MOST_ON_WAY)
    assert [r.sample.prompt_id for r in results] == [f"p{n}" for n in range(len(results))]


async def test_more_than_both_pipes_hold_goes_through() -> None:
    """2,000 replies at once, some of a megabyte: neither side waits for the other to read."""
    judges = many(print)
    await judges.start()
    rollout, prompt = answer(1)
    long = replace(rollout, reply_raw=(rollout.reply_raw or "") + " " * (1 << 20))
    try:
        results = await asyncio.gather(
            *(judges.judge(long if n % 100 == 0 else rollout, prompt, IDS) for n in range(2_000))
        )
    finally:
        await judges.close()
    assert {r.sample.verdict for r in results} == {"consistent"}


@pytest.mark.parametrize("said", ["nonsense", "half", "too many"])
async def test_a_process_that_answers_nonsense_is_done_without(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = judge_process._frame
    words = {
        "nonsense": frame({"no": "answers"}),
        "half": frame([None] * 9)[:11],
        "too many": frame([None] * 99),
    }
    program = f"import sys; sys.stdin.buffer.read(9000); sys.stdout.buffer.write({words[said]!r})"
    monkeypatch.setattr(judge_process, "python_command", lambda *_: [sys.executable, "-c", program])
    warnings: list[str] = []
    judges = many(warnings.append)
    await judges.start()
    assert len(await asyncio.wait_for(judged(judges, range(40)), 30)) == 40
    await judges.close()
    told = "died" if said == "half" else "answered what cannot be read"
    assert len(warnings) == 1 and told in warnings[0]


async def test_what_was_learned_meanwhile_counts_for_the_next_reply() -> None:
    offsets = StopOffsets()
    config = parse({"generate": {"max_in_flight": PROCESS_FROM}}, "test")
    judges = Judges(config, renderer(), offsets, print)
    await judges.start()
    rollout, prompt = answer(1)
    count = rollout.usage.completion_tokens
    assert count is not None
    short = replace(rollout, usage=Usage(prompt_tokens=3, completion_tokens=count - 1))
    try:
        before = (await judges.judge(short, prompt, IDS)).sample
        for number in range(LEARN_SAMPLES):
            one = (await judges.judge(*answer(number), IDS)).sample
            observe(offsets, one)
        after = (await judges.judge(short, prompt, IDS)).sample
    finally:
        await judges.close()
    assert (before.verdict, after.verdict) == ("consistent", "mismatch")


@pytest.mark.parametrize("limit", ["MOST_S", "CLOSE_S"])
async def test_a_process_that_answers_nothing_is_killed(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    judges = many(warnings.append)
    await judges.start()
    assert len(await judged(judges, range(3))) == 3
    pid = pid_of(judges)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(judge_process, limit, 0.2)
    if limit == "MOST_S":
        assert len(await judged(judges, range(5))) == 5
    await judges.close()
    await gone(pid)
    assert [w.split(";")[0] for w in warnings] == (
        ["the judging process gave no answer for 0 s"] if limit == "MOST_S" else []
    )


async def test_the_clock_starts_again_with_every_answer_and_stands_while_nobody_waits() -> None:
    loop, lost = asyncio.get_running_loop(), list[str]()
    process = JudgeProcess(parse({}, "test"), StopOffsets(), lost.append)
    waiting = [loop.create_future() for _ in range(2)]
    process._on_way.extend(waiting)
    process._wait_on()
    first = process._deadline
    process._take([None])
    second = process._deadline
    assert first is not None and first.cancelled()
    assert second is not None and not second.cancelled() and second.when() >= first.when()
    process._take([None])
    assert second.cancelled() and process._deadline is None
    assert all(answer.result() is None for answer in waiting) and not lost


async def test_a_killed_engine_leaves_no_process_behind() -> None:
    """Its stdin ends, whatever signals the group was sent."""
    program = (
        "import asyncio, os, signal\n"
        "from tests.core.test_judging import judged, many, pid_of\n"
        "async def main():\n"
        "    judges = many(print)\n"
        "    await judges.start()\n"
        "    await judged(judges, range(1))\n"  # it is up and hears no signal
        "    print(pid_of(judges), flush=True)\n"
        "    await asyncio.sleep(3600)\n"
        "asyncio.run(main())\n"
    )
    engine = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert engine.stdout is not None
    pid = int(await engine.stdout.readline())
    os.killpg(engine.pid, signal.SIGTERM)
    engine.kill()
    await engine.wait()
    await gone(pid)
