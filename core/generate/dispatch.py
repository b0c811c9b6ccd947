"""The generator: what may leave, when, to whom; and the one gate that closes it all.

Promises: never more in flight than the window, the limits, the canaries and the budget allow; after
`halt()` returns, nothing new leaves and what is in flight is cut off where that stops the bill,
received where it is paid for anyway. Knows providers by their lanes and prompts by their queues.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec

from core import events as ev
from core.budget import Budget
from core.config import Config
from core.errors import DiskFull, ProviderError
from core.generate.account import READ_GAPS_S, Accounts, bill_clients
from core.generate.attempt import Aloft, Attempts
from core.generate.board import Board
from core.generate.books import LOOKUP_DELAYS_S, Books
from core.generate.landing import Lander
from core.generate.lanes import Lane
from core.generate.ports import GenerateResult, Ports
from core.generate.pulse import tick, watch_load
from core.generate.pump import Pump
from core.generate.queues import Queues
from core.generate.request import sampling_of
from core.generate.unjudged import TakeUp
from core.limit import Limit
from core.memory import rare_collections
from core.offload import Workers
from core.providers import make_provider
from core.providers.base import Advice, Provider
from core.providers.http import raise_fd_limit
from core.schema import Prompt


class Generator:
    """One life of the generate stage. `run` once; everything else may be called at any time, on the
    loop's thread."""

    def __init__(
        self,
        config: Config,
        prompts: list[Prompt],
        ports: Ports,
        lookup_delays_s: tuple[float, ...] = LOOKUP_DELAYS_S,
        account_gaps_s: tuple[float, ...] = READ_GAPS_S,
    ) -> None:
        recovered = ports.recovered
        todo = {p.prompt_id: p for p in prompts if p.prompt_id not in recovered.finished}
        self._config = config
        self._ports = ports
        self._queues = Queues(todo.values())
        self._board = Board(len({p.prompt_id for p in prompts}), recovered.outcomes)
        self._budget = Budget(config.run.budget_usd)
        self._budget.earlier(recovered.spent_usd, recovered.cap_usd, recovered.uncertain_usd)
        self._books = Books(
            self._budget, ports.spend, lookup_delays_s, recovered.tallies, self._log
        )
        self._accounts = Accounts(config, self._books, self._log, account_gaps_s)
        self._renders = Workers(1, "render")
        self._attempts = Attempts(config, ports, self._books)
        self._take_up = TakeUp(ports, self._attempts, todo.values())
        self._lanes: list[Lane] = []
        self._providers: dict[str, Provider] = {}
        self._settlers: dict[str, Provider] = {}
        self._lander = Lander(config, ports, self._attempts, self._queues, self._board, self._lanes)
        self._lander.wake = self._wake_up
        self._lander.send = self._refill
        self._lander.halt = self.halt
        self._gate = self._lander.gate
        self._wake = asyncio.Event()
        self._pump = Pump(config, ports, self._attempts, self._lander, self._spawn, self._renders)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._crash: BaseException | None = None
        self._started_at = 0.0
        self._over = False

    # ---- life

    async def run(self) -> GenerateResult:
        """All prompts to an outcome, or until the gate closes. Raises ConfigError or ProviderError
        before the first paid request, and whatever a defect of ours raised, after everything in
        flight has been settled."""
        loop = asyncio.get_running_loop()
        self._started_at = loop.time()
        background: list[asyncio.Task[Any]] = []
        try:
            await self._prepare()
            background = [
                asyncio.create_task(
                    tick(self._config, self._attempts, self._lander, self._cut, self._publish)
                ),
                asyncio.create_task(self._pump.render_ahead(self._providers)),
                asyncio.create_task(watch_load(self._lanes)),
            ]
            for task in background:
                task.add_done_callback(self._supervised)
            with rare_collections():
                await self._drive()
            if self._crash is None:
                clients = self._settlers | self._providers
                await self._guarded(self._accounts.reconcile(clients, self._given_up))
        finally:
            self._over = True
            rest = [*background, *self._tasks]  # tasks are left only when this was cancelled itself
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            clients = self._settlers | self._providers
            await asyncio.gather(*(client.close() for client in clients.values()))
            self._renders.close()
        self._ports.emit(self.stats())
        if not self._gate.is_open:
            self._ports.emit(self._halt_event(complete=True))
        if (fault := self._crash or self._books.fault) is not None:
            raise fault
        return self._result(loop.time() - self._started_at)

    async def _prepare(self) -> None:
        """Clients, pre-flight, lanes; then the dispatches that an earlier life left open."""
        self._cap_window()
        await self._renders.run(self._queues.group)
        self._queues.set_aside(self._take_up.prompts)
        sampling = sampling_of(self._config, "")
        recovered = self._ports.recovered
        for backend in dict.fromkeys(q.backend for q in self._queues.queues):
            self._providers[backend] = make_provider(backend, self._config)
        others = [line for line in recovered.open if line.backend not in self._providers]
        self._settlers = bill_clients(self._config, others, self._log)
        tokenizer = self._ports.renderer.tokenizer
        tools = await self._renders.run(self._queues.with_tools)
        providers = self._providers.items()
        checks = [p.preflight(sampling, tokenizer, name in tools) for name, p in providers]
        for lines in await asyncio.gather(*checks):
            for line in lines:
                self._log("warn" if isinstance(line, Advice) else "info", str(line))
        generate = self._config.generate
        for client in self._providers.values():
            for spec in client.lanes:
                limit = Limit(self._pump.window, generate.breaker_error_rate)
                self._lanes.append(Lane(client, spec, limit, generate.canary))
        await self._pump.check_budget(self._providers)
        await self._guarded(self._accounts.open(self._providers))
        clients = self._settlers | self._providers
        left_open = self._books.left_open(recovered, clients, self._take_up.keys)
        bills = {key: self._spawn(settling) for key, settling in left_open}
        for prompt in self._take_up.prompts.values():
            self._spawn(self._take_up.judge(prompt, bills, self._lander.take_up))

    async def _guarded(self, writing: Coroutine[Any, Any, None]) -> None:
        try:
            await writing
        except DiskFull:
            self.halt("disk_full", "")

    def _given_up(self) -> bool:
        """Whether waiting for an account is no longer wanted."""
        return self._gate.state == "severed" or self._gate.source == "disk_full"

    def _cap_window(self) -> None:
        most = raise_fd_limit()
        if most < self._pump.window:
            self._log(
                "warn",
                f"concurrency_capped_by_nofile: {self._pump.window} in flight wanted, "
                f"{most} possible; raise `ulimit -n`",
            )
            self._pump.window = most

    def _result(self, seconds: float) -> GenerateResult:
        counts = {k: v for k, v in self._board.outcomes.items() if v}
        pending = sum(q.pending + q.postponed for q in self._queues.queues)
        reason, detail = "", ""
        if not self._gate.is_open:
            reason = "drained" if self._gate.state == "draining" else self._gate.state
            reason = "disk_full" if self._gate.source == "disk_full" else reason
            detail = f"{self._gate.source} {self._gate.by}".strip()
        elif stopped := [q for q in self._queues.queues if q.stopped]:
            reason = "stopped"
            detail = "; ".join(dict.fromkeys(f"{q.dataset}: {q.stopped}" for q in stopped))
        elif self._pump.stranded:
            reason, detail = "stopped", self._pump.stranded
        elif any(error_class == "budget" for _, error_class in self._board.errors):
            reason, detail = "budget", f"${self._budget.budget_usd:.4f} spent or reserved"
        return GenerateResult(
            reason=reason,
            detail=detail,
            outcomes=counts,
            pending=pending,
            spent_usd=self._budget.cost_usd,
            uncertain_usd=self._budget.uncertain_usd,
            seconds=seconds,
        )

    # ---- gate

    def halt(self, source: str, by: str) -> None:
        """Close the gate now. In flight: cut off where that stops the bill or nothing has left yet,
        received else."""
        if self._gate.state in ("halted", "severed"):
            return
        self._close("halted", source, by)
        for aloft in list(self._attempts.aloft.values()):
            if aloft.flight.left_at is None or aloft.lane.spec.cancel_stops_bill:
                self._cut(aloft, "halt")
        self._ports.emit(self._halt_event(complete=False))

    def drain(self) -> None:
        """Nothing new; everything in flight is received."""
        if self._gate.is_open:
            self._close("draining", "drain", "")

    def sever(self) -> None:
        """Cut everything off, paid for or not. What it cost is looked up and booked."""
        if self._gate.state == "severed":
            return
        self._close("severed", self._gate.source or "sever", self._gate.by)
        self._books.hurry()
        for aloft in list(self._attempts.aloft.values()):
            self._cut(aloft, "sever")
        self._ports.emit(self._halt_event(complete=False))

    def stop_scope(self, kind: str, name: str, reason: str = "stopped") -> None:
        """Stop one `provider` or one `dataset`; the rest goes on."""
        if kind == "dataset":
            for queue in self._queues.queues:
                if queue.dataset == name and not queue.stopped:
                    queue.stopped = reason
        else:
            for lane in self._lanes:
                if name in (lane.name, lane.spec.display):
                    self._lander.stop_lane(lane, reason)
        for aloft in list(self._attempts.aloft.values()):
            of_scope = (
                aloft.item.prompt.dataset == name if kind == "dataset" else aloft.lane.stopped
            )
            if of_scope and (aloft.flight.left_at is None or aloft.lane.spec.cancel_stops_bill):
                self._cut(aloft, "scope")
        self._wake_up()

    def prices(self) -> dict[str, tuple[float, float]]:
        """USD per prompt token and per completion token, of every provider that bills."""
        listed = {lane.name: lane.spec.price for lane in self._lanes}
        return {name: (p.prompt, p.completion) for name, p in listed.items() if not p.free}

    def canary(self, provider: str, dataset: str, passed: bool) -> None:
        """A canary's verdict from outside, where an audit judges it; without one a plain rule
        decides (`lanes.canary_fails`)."""
        for lane in self._lanes:
            if provider in (lane.name, lane.spec.display):
                lane.verdict(dataset, passed)
        self._wake_up()

    def _close(self, state: str, source: str, by: str) -> None:
        self._gate.state, self._gate.source, self._gate.by = state, source, by
        self._queues.drop_retries()
        self._wake_up()

    def _cut(self, aloft: Aloft, reason: str) -> None:
        if aloft.reason:
            return
        left = aloft.flight.left_at is not None
        aloft.cut(reason)
        if left and aloft.lane.spec.price.free:
            self._spawn(self._abort(aloft))

    async def _abort(self, aloft: Aloft) -> None:
        """A local server is told as well; when it cannot be reached there is nothing to abort."""
        try:
            await aloft.lane.provider.abort(aloft.request)
        except ProviderError as error:
            self._log("warn", f"{aloft.lane.name}: abort not delivered ({error})")

    def _halt_event(self, complete: bool) -> ev.Halt:
        gate = self._gate
        return ev.Halt(
            source=gate.source,
            by=gate.by,
            cancelled=gate.cancelled,
            received=gate.received,
            severed=gate.severed,
            spent_usd=self._budget.cost_usd,
            saved_usd=gate.saved_usd,
            uncertain_usd=self._budget.uncertain_usd,
            complete=complete,
        )

    # ---- work

    async def _drive(self) -> None:
        """Send whatever may leave; sleep until a reply or a timer changes that."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            now = loop.time()
            wait_s: float | None = None
            self._send()
            if self._gate.is_open:
                wait_s = self._pump.next_wait(now)
            if self._idle():
                return
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _refill(self) -> None:
        """As soon as a reply has landed and is paid for, in the same step: a step is 20 ms at 2,000
        in flight. What goes wrong here is not that reply's fault, which is still to be stored."""
        try:
            self._send()
        except Exception as error:
            self._fail(error)

    def _send(self) -> None:
        if self._gate.is_open and not self._over:
            now = asyncio.get_running_loop().time()
            self._queues.due(now)
            self._pump.pump(now)

    def _idle(self) -> bool:
        if self._tasks or self._pump.rendering:
            return False
        if not self._gate.is_open or self._crash is not None:
            return True
        if self._queues.retrying:
            return False
        return not any(q.left and not q.stopped for q in self._queues.queues)

    def _publish(self, now: float) -> None:
        self._board.snapshot(now, self._lanes, self._budget.cost_usd)
        self._ports.emit(self.stats())

    def stats(self) -> ev.Stats:
        """The numbers now. Cheap: counts only."""
        now = asyncio.get_running_loop().time()
        aloft = self._attempts.aloft
        oldest = min((a.started_at for a in aloft.values()), default=now)
        stats = self._board.stats(now, self._lanes, self._budget, self._queues.remaining())
        limits = sum(lane.limit.width for lane in self._lanes if not lane.stopped)
        return msgspec.structs.replace(
            stats,
            in_flight=len(aloft),
            limit=min(self._pump.window, limits),
            queued=self._queues.queued,
            oldest_in_flight_s=now - oldest,
            exposure_usd=self._budget.exposure_usd if self._pump.overshoots else None,
        )

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._supervised(task)
        self._wake_up()

    def _supervised(self, task: asyncio.Task[Any]) -> None:
        """A defect of ours, or a disk fault: stop sending, settle what is out, raise it at the
        end."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._crash is None:
            self._crash = error
        self.halt("error", type(error).__name__)

    def _wake_up(self) -> None:
        self._wake.set()

    def _log(self, level: Any, message: str) -> None:
        self._ports.emit(ev.Log(level=level, message=message, stage="generate"))
