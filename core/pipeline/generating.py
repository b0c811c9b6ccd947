"""The generate stage inside the engine: requests in flight, each reply judged and audited as it
arrives.

Connects generator, judge, live audit and books, and acts on what trips. Has no socket of its own
and does not know what the engine does with the result."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from core import events as ev
from core.audit.live import LiveAudit
from core.audit.tripwires import Observation
from core.config import Config
from core.errors import EyasError, Halted, ProviderError, Tripped
from core.generate import GenerateResult, Generator, Ports, recover
from core.pipeline.gateway import Gateway, needs_gateway
from core.reconstruct import StopOffsets, judge, observe
from core.render.base import Renderer
from core.schema import Prompt, Rollout, Sample
from core.store import Appender, Reserve, RunDir


class Halt(msgspec.Struct, frozen=True):
    """What this stage asks of the engine: stop everything, for this reason."""

    source: str
    by: str
    reason: str
    error: EyasError | None = None


class GenerateStage:
    """`perform` once; `halt`, `drain` and `sever` at any time, on the loop."""

    def __init__(
        self,
        run: RunDir,
        config: Config,
        prompts: list[Prompt],
        renderer: Renderer,
        emit: Callable[[ev.Event], None],
        reserve: Reserve,
        ask_halt: Callable[[Halt], None],
    ) -> None:
        self._run = run
        self._config = config
        self._prompts = prompts
        self._renderer = renderer
        self._emit = emit
        self._reserve = reserve
        self._ask_halt = ask_halt
        self._live = LiveAudit(config, renderer)
        self._offsets = StopOffsets()
        self._seen: dict[str, Observation] = {}
        self._trips: list[str] = []
        self._generator: Generator | None = None
        self._task: asyncio.Task[GenerateResult] | None = None
        self._loop = asyncio.get_running_loop()

    async def perform(self) -> dict[str, Any]:
        """The stage's summary. Raises Halted, Tripped or ProviderError with the reason."""
        gateway = Gateway(self._run) if needs_gateway(self._config) else None
        self._task = asyncio.create_task(self._work(gateway))
        try:
            result = await self._task
        except asyncio.CancelledError as e:
            raise Halted("halted before the first request") from e
        finally:
            if gateway is not None:
                await gateway.stop()
        return self._summary(result)

    async def _work(self, gateway: Gateway | None) -> GenerateResult:
        config = await gateway.start(self._config) if gateway else self._config
        recovered = await asyncio.to_thread(recover, self._run)
        completions = Appender(self._run.completions, reserve=self._reserve, on_full=self._full)
        spend = Appender(self._run.spend, reserve=self._reserve, on_full=self._full)
        ports = Ports(
            emit=self._emitted,
            judge=self._judge,
            renderer=self._renderer,
            completions=completions,
            spend=spend,
            recovered=recovered,
            on_sample=self._sampled,
        )
        try:
            self._generator = Generator(config, self._prompts, ports)
            return await self._generator.run()
        finally:
            await asyncio.to_thread(completions.close)
            await asyncio.to_thread(spend.close)

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

    def _judge(self, rollout: Rollout, prompt: Prompt) -> Sample:
        """In a worker thread: judge, then look at the sample as the audit will."""
        sample = judge(rollout, prompt, self._renderer, self._offsets)
        self._seen[sample.sample_id], _ = self._live.inspect(sample, prompt)
        return sample

    def _sampled(self, sample: Sample, rollout: Rollout, prompt: Prompt) -> None:
        observe(self._offsets, sample)
        seen = self._seen.pop(sample.sample_id, None)
        if seen is not None:
            self._act(self._live.observe(seen))

    def _emitted(self, event: ev.Event) -> None:
        self._emit(event)
        if isinstance(event, ev.Outcome) and event.outcome == "failed":
            self._act(
                self._live.fail(
                    event.provider or event.backend, event.dataset, event.cost_usd or 0.0
                )
            )

    def _act(self, events: list[ev.Tripwire | ev.Canary]) -> None:
        for event in events:
            self._emit(event)
            if isinstance(event, ev.Canary):
                if self._generator is not None:
                    self._generator.canary(event.provider, event.dataset, event.passed)
                if not event.passed:
                    self._trips.append(f"canary of {event.provider} on {event.dataset} failed")
                continue
            self._trips.append(f"tripwire {event.name} ({event.scope})")
            if event.action == "halt":
                words = f"{event.name} ({event.scope}): {event.saw}; {event.advice}"
                self._ask_halt(Halt("tripwire", event.name, event.saw, Tripped(words)))
            elif self._generator is not None:
                kind = event.action.removeprefix("stop_")
                self._generator.stop_scope(kind, event.scope, f"tripwire {event.name}")

    def _full(self) -> None:
        """From a writer thread: the reserve had to be touched."""
        halt = Halt("disk", "", "disk_full: no space left; free some, then resume")
        self._loop.call_soon_threadsafe(self._ask_halt, halt)

    def _summary(self, result: GenerateResult) -> dict[str, Any]:
        """A dataset that a wire stopped does not stop the others: the line goes on with what was
        kept, and resume asks the rest."""
        pending = f"{result.pending} prompts pending, resume asks them"
        if result.reason == "stopped":
            if not self._trips:
                raise ProviderError(f"no provider left: {result.detail}; {pending}")
            if not result.outcomes.get("ok"):
                raise Tripped(f"{'; '.join(self._trips)}; nothing was kept, {pending}")
            self._emit(ev.Log(level="warn", message=f"{result.detail}; {pending}"))
        elif result.reason:
            what = f"{result.reason}: {result.detail}" if result.detail else result.reason
            raise Halted(f"{what}; {pending}")
        return {
            "outcomes": result.outcomes,
            "pending": result.pending,
            "spent_usd": result.spent_usd,
            "uncertain_usd": result.uncertain_usd,
        }
