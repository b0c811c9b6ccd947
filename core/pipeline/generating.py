"""The generate stage inside the engine: requests in flight, each reply judged and looked at as it
arrives.

Connects generator, judge, watch and books. Has no socket of its own and does not know what the
engine does with the result."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from core import events as ev
from core.audit.tripwires import Observation
from core.config import Config
from core.errors import EyasError, Halted, ProviderError, Tripped
from core.generate import GenerateResult, Generator, Ports, abandon, recover
from core.pipeline.gateway import Gateway, needs_gateway
from core.pipeline.judging import Judges
from core.pipeline.watch import Halt, Watch
from core.reconstruct import StopOffsets, observe
from core.render.base import Renderer
from core.schema import Prompt, Rollout, Sample
from core.store import Appender, Reserve, RunDir

MAX_LEFT_OUT = 0.1
"""Share of prompts that a stopped provider or dataset may leave unasked before the run itself is
stopped: what comes next costs GPU time, and a drafter of the rest is not the one asked for."""


class GenerateStage:
    """`perform` once; `halt`, `drain` and `sever` at any time, on the loop."""

    def __init__(
        self,
        run: RunDir,
        config: Config,
        prompts: list[Prompt],
        renderer: Renderer,
        watch: Watch,
        emit: Callable[[ev.Event], None],
        reserve: Reserve,
        ask_halt: Callable[[Halt], None],
    ) -> None:
        self._run = run
        self._config = config
        self._prompts = prompts
        self._renderer = renderer
        self._watch = watch
        self._emit = emit
        self._reserve = reserve
        self._ask_halt = ask_halt
        self._offsets = StopOffsets()
        self._seen: dict[str, Observation] = {}
        self._generator: Generator | None = None
        self._task: asyncio.Task[GenerateResult] | None = None
        self._loop = asyncio.get_running_loop()

    async def perform(self, give_up: bool = False) -> dict[str, Any]:
        """The stage's summary. Raises Halted, Tripped or ProviderError with the reason. `give_up`:
        nothing is sent, what is pending is abandoned."""
        wanted = needs_gateway(self._config) and not give_up
        gateway = Gateway(self._run) if wanted else None
        self._task = asyncio.create_task(self._work(gateway, give_up))
        try:
            result = await self._task
        except asyncio.CancelledError as e:
            raise Halted("halted before the first request") from e
        finally:
            self._watch.scopes = None
            if gateway is not None:
                await gateway.stop()
        return self._summary(result)

    async def _work(self, gateway: Gateway | None, give_up: bool) -> GenerateResult:
        config = await gateway.start(self._config) if gateway else self._config
        # Opened before they are read: what an earlier life left in a spool is taken in first.
        completions = Appender(self._run.completions, reserve=self._reserve, on_full=self._full)
        spend = Appender(self._run.spend, reserve=self._reserve, on_full=self._full)
        watchman = asyncio.create_task(self._miss(gateway)) if gateway else None
        judges = Judges(config, self._renderer, self._offsets, self._warn)
        try:
            ports = Ports(
                emit=self._emit,
                judge=self._looks(judges),
                renderer=self._renderer,
                completions=completions,
                spend=spend,
                recovered=await asyncio.to_thread(recover, self._run),
                on_sample=self._sampled,
            )
            if not give_up or ports.recovered.unjudged:
                await judges.start()
            if give_up:
                return await abandon(config, self._prompts, ports)
            self._generator = self._watch.scopes = Generator(config, self._prompts, ports)
            return await self._generator.run()
        finally:
            if watchman is not None:
                watchman.cancel()
            try:
                await judges.close()
            finally:
                await asyncio.to_thread(completions.close)
                await asyncio.to_thread(spend.close)

    async def _miss(self, gateway: Gateway) -> None:
        """Without its gateway a run could only wait for timeouts and count its prompts as
        failed."""
        code = await gateway.ended()
        what = f"embedded gateway: ended with code {code} while it was needed"
        error = ProviderError(f"{what}; `eyas resume {self._run.run_id}` starts another")
        self._ask_halt(Halt("error", "embedded gateway", f"ended with code {code}", error))

    def halt(self, source: str, by: str) -> None:
        if self._generator is not None:
            self._generator.halt(source, by)
        elif self._task is not None:
            self._task.cancel()

    def drain(self) -> None:
        if self._generator is not None:
            self._generator.drain()
        elif self._task is not None:
            self._task.cancel()

    def sever(self) -> None:
        if self._generator is not None:
            self._generator.sever()

    def _looks(self, judges: Judges) -> Callable[[Rollout, Prompt, list[int]], Awaitable[Sample]]:
        async def judged(rollout: Rollout, prompt: Prompt, ids: list[int]) -> Sample:
            sample, seen = await judges.judge(rollout, prompt, ids)
            self._seen[sample.sample_id] = seen
            return sample

        return judged

    def _warn(self, message: str) -> None:
        self._emit(ev.Log(level="warn", stage="generate", message=message))

    def _sampled(self, sample: Sample, rollout: Rollout, prompt: Prompt) -> None:
        observe(self._offsets, sample)
        seen = self._seen.pop(sample.sample_id)
        if self._generator is not None:  # whoever gives up has nothing left to stop
            self._watch.sampled(seen)

    def _full(self) -> None:
        """From a writer thread: the reserve had to be touched."""
        halt = Halt("disk_full", "", "no space left; free some, then resume")
        self._loop.call_soon_threadsafe(self._ask_halt, halt)

    def _summary(self, result: GenerateResult) -> dict[str, Any]:
        if error := reason_to_end(result, len(self._prompts), self._watch.trips):
            raise error
        if result.pending:
            left_out = f"{result.detail}; {result.pending} prompts pending, resume asks them"
            self._emit(ev.Log(level="warn", message=left_out))
        return {
            "outcomes": result.outcomes,
            "pending": result.pending,
            "spent_usd": result.spent_usd,
            "uncertain_usd": result.uncertain_usd,
        }


def reason_to_end(result: GenerateResult, prompts: int, trips: list[str]) -> EyasError | None:
    """Whether the run ends here. What stopped scopes leave unasked ends it when it is more than
    MAX_LEFT_OUT of the prompts; below that the line goes on with what was kept."""
    pending = f"{result.pending} prompts pending, resume asks them"
    if not result.reason:
        return None
    if result.reason == "budget":
        raised = "eyas resume RUN --set run.budget_usd=USD with a larger one asks them"
        return Halted(f"budget: {result.detail}; {result.pending} prompts pending, {raised}")
    if result.reason != "stopped":
        told = result.detail and result.reason != "drained"  # whose detail is "drain"
        what = f"{result.reason}: {result.detail}" if told else result.reason
        return Halted(f"{what}; {pending}")
    if not trips:
        return ProviderError(f"no provider left: {result.detail}; {pending}")
    if result.pending > MAX_LEFT_OUT * prompts:
        wires = "; ".join(dict.fromkeys(trips))
        return Tripped(f"{wires}; {result.outcomes.get('ok', 0)} replies kept, {pending}")
    return None
