"""Replies judged beside the event loop while they arrive: in threads, or with PROCESS_FROM in
flight and more in a process of their own.

Measured at 2,000 streams of 30 events/s: threads that judge hold the interpreter, so that one loop
step in a hundred is 96 ms late; with a process it is 19 ms. Knows the audit's look at a
sample, nothing of what follows from it."""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import msgspec

from core.audit.live import Inspector
from core.audit.tripwires import Observation
from core.config import Config
from core.offload import Workers
from core.reconstruct import StopOffsets, judge
from core.render.base import Renderer
from core.render.source import renderer_of
from core.schema import Prompt, Rollout, Sample

PROCESS_FROM = 256
"""Below, a second interpreter costs more memory and start-up time than it saves."""
THREADS = 2
LARGEST_BATCH = 32
MOST_S = 60.0
"""For one batch, start of the process included: 32 replies of 10 MB each take a third of it. A
process that is stopped or starved would otherwise keep every reply from the disk, and a halt from
its end."""
CLOSE_S = 5.0
SHARE_AT_ONCE = 16
"""One reply at a time while few wait, because the answers of a batch come at once and the loop pays
for them at once (32 together: 66 ms late, one: 19 ms); a part of what waits when many do."""


class Job(NamedTuple):
    rollout: Rollout
    prompt: Prompt
    ids: list[int]


class Judged(NamedTuple):
    sample: Sample
    seen: Observation


class Desk:
    """Judges one reply, then looks at the sample as the audit will. Pure but for its caches."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._inspector = Inspector(renderer)

    def judge(self, job: Job, offsets: StopOffsets) -> Judged:
        sample = judge(job.rollout, job.prompt, self._renderer, offsets, job.ids)
        return Judged(sample, self._inspector.inspect(sample, job.prompt)[0])


class _Worker:
    desk: Desk


def _start_worker(config: Config) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Worker.desk = Desk(renderer_of(config))


def _end_with_parent() -> None:
    """A killed engine cannot tell its worker, which would wait for work for ever."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _judge_batch(jobs: list[Job], offsets: bytes) -> list[Judged]:
    learned = msgspec.msgpack.decode(offsets, type=StopOffsets)
    return [_Worker.desk.judge(job, learned) for job in jobs]


def _started(config: Config, offsets: bytes) -> ProcessPoolExecutor:
    """A pool whose process starts now. Raises OSError, and RuntimeError without a thread."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, context, _start_worker, (config,))
    pool.submit(_judge_batch, [], offsets)
    return pool


def _kill(pool: ProcessPoolExecutor) -> None:
    """Whatever state its process is in. The executor itself offers that from Python 3.14 on."""
    for process in list((pool._processes or {}).values()):
        process.kill()


class Judges:
    """`judge` may be awaited thousands of times at once. Made inside the loop; `close` it there."""

    def __init__(
        self,
        config: Config,
        renderer: Renderer,
        offsets: StopOffsets,
        warn: Callable[[str], None],
    ) -> None:
        """`offsets`: as learned so far; every batch is judged by what they are when it begins."""
        self._desk = Desk(renderer)
        self._offsets = offsets
        self._warn = warn
        self._threads = Workers(THREADS, "judge")
        self._waiting: list[tuple[Job, asyncio.Future[Judged]]] = []
        self._work: asyncio.Task[None] | None = None
        self._config = config
        self._pool: ProcessPoolExecutor | None = None

    def start(self) -> None:
        """Before the first request, so that the process is there when replies come."""
        if self._config.generate.max_in_flight >= PROCESS_FROM:
            try:
                self._pool = _started(self._config, msgspec.msgpack.encode(self._offsets))
            except (OSError, RuntimeError) as error:  # no process, thread or descriptor to be had
                self._forsake(f"no judging process ({error})")

    async def judge(self, rollout: Rollout, prompt: Prompt, ids: list[int]) -> Judged:
        """`ids`: the prompt's, as rendered."""
        job = Job(rollout, prompt, ids)
        if self._pool is None:
            return await self._threads.run(self._desk.judge, job, self._offsets)
        future: asyncio.Future[Judged] = asyncio.get_running_loop().create_future()
        self._waiting.append((job, future))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._work_off())
        return await future

    async def _work_off(self) -> None:
        while self._waiting:
            count = min(LARGEST_BATCH, 1 + len(self._waiting) // SHARE_AT_ONCE)
            batch, self._waiting = self._waiting[:count], self._waiting[count:]
            try:
                results = await self._judged([job for job, _ in batch])
            except Exception as error:  # a defect of ours: every waiter raises it
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():  # its waiter was cancelled
                    future.set_result(result)

    async def _judged(self, jobs: list[Job]) -> list[Judged]:
        if self._pool is not None:
            offsets = msgspec.msgpack.encode(self._offsets)
            loop = asyncio.get_running_loop()
            try:
                work = loop.run_in_executor(self._pool, _judge_batch, jobs, offsets)
                return await asyncio.wait_for(work, MOST_S)
            except BrokenProcessPool:
                self._forsake("the judging process died")
            except TimeoutError:
                _kill(self._pool)
                self._forsake(f"the judging process gave no answer for {MOST_S:.0f} s")
        return [await self._threads.run(self._desk.judge, job, self._offsets) for job in jobs]

    def _forsake(self, why: str) -> None:
        self._pool = None
        self._warn(f"{why}; judging goes on inside the engine, slower")

    async def close(self) -> None:
        """When nobody waits any more."""
        self._threads.close()
        if self._pool is not None:
            shutdown = asyncio.to_thread(self._pool.shutdown, cancel_futures=True)
            _, late = await asyncio.wait([ended := asyncio.create_task(shutdown)], timeout=CLOSE_S)
            if late:
                _kill(self._pool)
            await ended
