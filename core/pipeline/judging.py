"""Replies judged beside the event loop while they arrive: in threads, or with PROCESS_FROM in
flight and more in a process of their own.

Measured at 2,000 streams of 30 events/s: threads that judge hold the interpreter, so that one loop
step in a hundred is 96 ms late. Knows where a reply is judged, nothing of what follows from it."""

from collections.abc import Callable

from core.config import Config
from core.offload import Workers
from core.pipeline.judge_process import Desk, Job, Judged, JudgeProcess
from core.reconstruct import StopOffsets
from core.render.base import Renderer
from core.schema import Prompt, Rollout

PROCESS_FROM = 256
"""Below, a second interpreter costs more memory and start-up time than it saves."""
THREADS = 2


class Judges:
    """`judge` may be awaited thousands of times at once. Made inside the loop; `close` it there."""

    def __init__(
        self,
        config: Config,
        renderer: Renderer,
        offsets: StopOffsets,
        warn: Callable[[str], None],
    ) -> None:
        """`offsets`: as learned so far."""
        self._desk = Desk(renderer)
        self._offsets = offsets
        self._warn = warn
        self._threads = Workers(THREADS, "judge")
        self._process: JudgeProcess | None = None
        if config.generate.max_in_flight >= PROCESS_FROM:
            self._process = JudgeProcess(config, offsets, self._alone)

    async def start(self) -> None:
        if self._process is not None:
            try:
                await self._process.start()
            except OSError as error:  # no process or descriptor to be had
                self._process = None
                self._alone(f"no judging process ({error})")

    async def judge(self, rollout: Rollout, prompt: Prompt, ids: list[int]) -> Judged:
        """`ids`: the prompt's, as rendered. Raises what a defect of ours raised."""
        job = Job(rollout, prompt, ids)
        if self._process is not None:
            judged = await self._process.judge(job)
            if judged is not None:
                return judged
        return await self._threads.run(self._desk.judge, job, self._offsets)

    def _alone(self, why: str) -> None:
        self._warn(f"{why}; judging goes on inside the engine, slower")

    async def close(self) -> None:
        """When nobody waits any more."""
        self._threads.close()
        if self._process is not None:
            await self._process.close()
