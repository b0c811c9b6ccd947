"""What leaves next: one pass over queues and lanes, and the rendering that runs ahead of it.

Promises: never more in flight than the window, each lane's limit, its canaries and the budget
allow; the dataset most behind goes first. Knows the gate only as a question."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from core import events as ev
from core.budget import Budget
from core.config import Config
from core.errors import ConfigError
from core.generate.attempt import Attempts
from core.generate.board import Board
from core.generate.landing import Lander
from core.generate.lanes import Lane, by_preference
from core.generate.ports import Ports
from core.generate.queues import Item, Queue, Queues, item_of
from core.generate.request import Prepared, prepare
from core.offload import Workers
from core.providers.base import Provider
from core.schema import Prompt

READY_LOW = 64
MOST_WAITING = 256
"""Replies (or as many as the window, where that is more) that may wait for bill and verdict while
more are asked for: when judging cannot keep up, memory must not grow for ever."""
RENDER_CHUNK = 16
LOOK_S = 0.05
"""How often it is looked whether an answer has begun that others wait for."""
SLACK_TOKENS = 8
"""Prompt tokens that a server may add to our rendering."""


class Pump:
    """Moves prompts from the queues into the air. `spawn` runs a coroutine under the generator's
    supervision."""

    def __init__(
        self,
        config: Config,
        ports: Ports,
        attempts: Attempts,
        lander: Lander,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[Any]],
        renders: Workers,
    ) -> None:
        self._config = config
        self._ports = ports
        self._attempts = attempts
        self._lander = lander
        self._spawn = spawn
        self._renders = renders
        self._queues: Queues = lander.queues
        self._board: Board = lander.board
        self._lanes: list[Lane] = lander.lanes
        self._budget: Budget = attempts.books.budget
        self.window = config.generate.max_in_flight
        self.rendering = 0
        self._look_at = 0.0
        self.stranded = ""
        """Why some prompts were postponed that no open lane holds."""
        self._told: set[tuple[str, str]] = set()
        self._feed = asyncio.Event()

    @property
    def overshoots(self) -> bool:
        """Whether what is reserved may be less than the worst case."""
        return self._config.generate.reserve == "p99"

    async def check_budget(self, providers: dict[str, Provider]) -> None:
        """One worst case must fit, or nothing can be asked at all; under `reserve = "all"`, those
        of all prompts together. Raises ConfigError."""
        budget = self._budget.budget_usd
        remedy = "raise it or lower generate.max_tokens"
        for backend in providers:
            prices = [lane.spec.price for lane in self._lanes if lane.backend == backend]
            max_tokens = self._config.generate.max_tokens
            worst = min((p.worst_usd(1, max_tokens) for p in prices), default=0.0)
            if not self._budget.could_ever_fit(worst) and not self._ports.recovered.attempts:
                raise ConfigError(
                    f"run.budget_usd {budget:g} is below one worst-case request "
                    f"on {backend} (${worst:.4f}); {remedy}"
                )
        if self._config.generate.reserve == "all":
            worst_usd, count = await self._worst_of_all(providers)
            if not self._budget.could_ever_fit(worst_usd):
                raise ConfigError(
                    f"run.budget_usd {budget:g} is below the worst case of all {count} requests "
                    f"(${worst_usd:.4f}); {remedy}"
                )

    async def _worst_of_all(self, providers: dict[str, Provider]) -> tuple[float, int]:
        """USD of every prompt that would be asked on its dearest lane, and how many those are.
        Renders them all, in a thread; a halt ends it."""
        total, count = 0.0, 0
        for queue in self._queues.queues:
            lanes = [lane for lane in self._lanes if lane.backend == queue.backend]
            waiting = list(queue.waiting)
            for at in range(0, len(waiting), RENDER_CHUNK):
                if not self._lander.gate.is_open:
                    return total, count
                batch = waiting[at : at + RENDER_CHUNK]
                for prepared in await self._prepared(batch, providers[queue.backend]):
                    if not prepared.refusal:
                        able = self._holding(lanes, prepared)
                        total += max((self._worst(prepared, lane) for lane in able), default=0.0)
                        count += 1
        return total, count

    async def _prepared(self, batch: list[Prompt], provider: Provider) -> list[Prepared]:
        renderer, sends_messages = self._ports.renderer, provider.sends_messages
        room = self._room(provider.name)
        return await self._renders.run(_prepare_all, batch, renderer, sends_messages, room)

    def _room(self, backend: str) -> int | None:
        """Most tokens of a prompt that one of the backend's lanes holds; None: not known."""
        contexts = [x.spec.context_tokens for x in self._lanes if x.backend == backend]
        known = [tokens for tokens in contexts if tokens is not None]
        if not known or len(known) < len(contexts):
            return None
        return max(known) - self._config.generate.max_tokens

    def _holding(self, lanes: list[Lane], prepared: Prepared) -> list[Lane]:
        tokens = len(prepared.ids) + self._config.generate.max_tokens
        return [lane for lane in lanes if lane.spec.holds(tokens)]

    def pump(self, now: float) -> None:
        if self._attempts.waiting >= max(self.window, MOST_WAITING):
            return
        if self._queues.holding and now >= self._look_at:
            self._look_at = now + LOOK_S
            self._free(now)
        while len(self._attempts.aloft) < self.window:
            choice = self._choose(now)
            if choice is None:
                return
            item, lane, usd = choice
            if item.prepared.beginning and self._waits(item, lane, now):
                self._queues.hold(item, lane.name)
                self._feed.set()
                continue
            self._start(item, lane, usd, now)

    def _free(self, now: float) -> None:
        lanes = {lane.name: lane for lane in self._lanes}
        begun = self._attempts.begun
        self._queues.free(lambda name, start: lanes[name].warmth.over(start, now, begun))

    def _waits(self, item: Item, lane: Lane, now: float) -> bool:
        key = (item.prompt.prompt_id, item.attempt + 1)
        return lane.warmth.waits(item.prepared.beginning, key, now, self._attempts.begun)

    def _choose(self, now: float) -> tuple[Item, Lane, float] | None:
        """The next (prompt, lane, reservation): the dataset most behind that has somewhere to
        go."""
        for queue in self._queues.by_need():
            open_lanes = [
                lane
                for lane in self._lanes
                if lane.backend == queue.backend and lane.open_to(queue.dataset)
            ]
            if not open_lanes:
                queue.stopped = self._why_closed(queue)
                continue
            able = [lane for lane in open_lanes if lane.takes(queue.dataset, now)]
            item, fitting = self._next_of(queue, able)
            for lane in by_preference(fitting, item.prepared.session, item.avoid):
                usd = self._reservation(item, lane)
                if self._budget.fits(usd):
                    queue.ready.remove(item)
                    return item, lane, usd
            holding = self._holding(open_lanes, item.prepared)
            could_ever_fit = self._budget.could_ever_fit
            if not holding:
                closed = self._why_closed(queue)
                self.stranded = f"{queue.dataset}: only those hold its longest prompts: {closed}"
                self._postpone(queue, item, "no_lane", closed)
            elif not any(could_ever_fit(self._reservation(item, one)) for one in holding):
                budget = self._budget
                left = f"${budget.budget_usd - budget.spent_usd:.4f} left"
                why = f"{left} of run.budget_usd {budget.budget_usd:g}"
                self._postpone(queue, item, "budget", why)
        return None

    def _next_of(self, queue: Queue, able: list[Lane]) -> tuple[Item, list[Lane]]:
        """The first that some of the lanes hold, with those: while a long prompt waits for its
        provider, others leave. Else the first, with none."""
        for item in queue.ready if able else ():
            if fitting := self._holding(able, item.prepared):
                return item, fitting
        return queue.ready[0], []

    def _postpone(self, queue: Queue, item: Item, error_class: str, why: str) -> None:
        queue.ready.remove(item)
        self._feed.set()
        if (queue.dataset, error_class) not in self._told:
            self._told.add((queue.dataset, error_class))
            told = f"{queue.dataset}: prompts stay pending ({error_class}: {why})"
            self._ports.emit(ev.Log(level="warn", message=told, stage="generate"))
        self._spawn(self._lander.refuse(item, error_class, why, final=False))

    def _why_closed(self, queue: Queue) -> str:
        lanes = [lane for lane in self._lanes if lane.backend == queue.backend]
        reasons = [
            f"{lane.name} {lane.stopped or 'canary failed'}"
            for lane in lanes
            if not lane.open_to(queue.dataset)
        ]
        return "; ".join(reasons) or f"no lane of {queue.backend}"

    def _worst(self, prepared: Prepared, lane: Lane) -> float:
        max_tokens = self._config.generate.max_tokens
        return lane.spec.price.worst_usd(len(prepared.ids) + SLACK_TOKENS, max_tokens)

    def _reservation(self, item: Item, lane: Lane) -> float:
        """Worst case, or the likely one in the faster mode."""
        if self.overshoots:
            p99 = self._board.p99_tokens(item.prompt.dataset)
            if p99 is not None:
                tokens = min(p99, self._config.generate.max_tokens)
                return lane.spec.price.worst_usd(len(item.prepared.ids) + SLACK_TOKENS, tokens)
        return self._worst(item.prepared, lane)

    def _start(self, item: Item, lane: Lane, usd: float, now: float) -> None:
        item.attempt += 1
        queue = self._queues.of(item.prompt)
        queue.taken += 1
        worst_usd = self._worst(item.prepared, lane)
        self._budget.reserve((item.prompt.prompt_id, item.attempt), usd, worst_usd)
        lane.left(item.prompt.dataset, now)
        self._board.sent += 1
        aloft = self._attempts.launch(item, lane, now)
        open_here = sum(x.limit.in_flight for x in self._lanes if x.backend == lane.backend)
        aloft.alone = open_here == 1
        aloft.task = self._spawn(self._lander.carry(aloft))
        if len(queue.ready) < READY_LOW:
            self._feed.set()

    def next_wait(self, now: float) -> float | None:
        waits = [LOOK_S] if self._queues.holding else []
        if (due := self._queues.next_due()) is not None:
            waits.append(due - now)
        if any(q.ready and not q.stopped for q in self._queues.queues):
            for lane in self._lanes:
                if not lane.stopped and (wait := lane.limit.wait_s(now)) is not None:
                    waits.append(wait)
        return max(0.001, min(waits)) if waits else None

    async def render_ahead(self, providers: dict[str, Provider]) -> None:
        """Keep every dataset's next prompts rendered, in a thread, fairest first."""
        while True:
            queue = self._queues.hungry(READY_LOW) if self._lander.gate.is_open else None
            if queue is None:
                self._feed.clear()
                self._lander.wake()
                await self._feed.wait()
                continue
            batch = [queue.waiting.popleft() for _ in range(min(RENDER_CHUNK, len(queue.waiting)))]
            self.rendering += 1
            try:
                done = await self._prepared(batch, providers[queue.backend])
                for prompt, prepared in zip(batch, done, strict=True):
                    item = item_of(prompt, self._ports.recovered)
                    item.prepared = prepared
                    if prepared.refusal:
                        queue.taken += 1
                        await self._lander.refuse(item, prepared.refusal, prepared.detail)
                    else:
                        queue.ready.append(item)
            finally:
                self.rendering -= 1
            self._lander.wake()


def _prepare_all(
    prompts: list[Prompt], renderer: Any, sends_messages: bool, room: int | None
) -> list[Prepared]:
    return [prepare(prompt, renderer, sends_messages, room) for prompt in prompts]
