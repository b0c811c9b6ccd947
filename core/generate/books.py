"""The money of the attempts: reserved, written before it can be spent, settled exactly once, looked
up when unsaid.

Promises: a dispatch line is in spend.jsonl before its request leaves; every dispatch is closed by
exactly one of billed, looked_up, uncertain, free; what nobody can tell is booked at its worst case
and stays marked. Knows the budget, the spend file and the look-up of providers."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Container, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from core.budget import Budget, Key
from core.errors import ProviderError
from core.generate.lanes import Lane
from core.generate.ports import Append, Recovered
from core.generate.tally import Tally
from core.providers.base import Flight, KeyRefused, LookedUp, Provider, Reply
from core.schema import CLOSING, Prompt, RolloutHead, SpendLine, Usage

LOOKUP_DELAYS_S = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
LOOKUPS_AT_ONCE = 32
"""Requests for bills on their way; who waits for the next try holds no place."""
FEW_TRIES = 3
"""After the first, where no bill is likely (insured replies) or nobody wants to wait (a sever)."""
SEVERED_S = 10.0
"""From a sever to the last look-up: 2,000 bills at 32 at once and 0.15 s each. An API that hangs
must not hold the end; what is not found is booked at its worst case."""


Say = Callable[[Any, str], None]
"""(level, message) for the log."""


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """How one attempt was closed. `usage` is the reply's, completed by the look-up where that knew
    more."""

    kind: str
    cost_usd: float = 0.0
    usage: Usage = Usage()
    provider: str | None = None
    line: SpendLine | None = None
    over_usd: float = 0.0
    """How much more than the worst case was billed: a price list that does not hold."""

    @property
    def paid(self) -> bool:
        return self.kind != "free" and (self.cost_usd > 0 or self.kind == "uncertain")


class Books:
    """One run's money, in memory and on disk."""

    def __init__(
        self,
        budget: Budget,
        spend: Append,
        lookup_delays_s: Sequence[float] = LOOKUP_DELAYS_S,
        tallies: dict[str, Tally] | None = None,
        say: Say = lambda level, message: None,
    ) -> None:
        """`tallies`: the books of earlier lives by backend; added to here."""
        self.budget = budget
        self._spend = spend
        self._delays_s = lookup_delays_s
        self.tallies = {} if tallies is None else tallies
        self._permits = asyncio.Semaphore(LOOKUPS_AT_ONCE)
        self._hurried = asyncio.Event()
        self._clocks: set[asyncio.Timeout] = set()
        self._end_by: float | None = None
        self._say = say
        self.refused: set[str] = set()
        """Backends that do not take the key, so that no bill can be asked for."""

    @property
    def fault(self) -> BaseException | None:
        """What went wrong with a line that nobody waited for; a full disk has its own alarm."""
        return self._spend.fault

    def dispatch(self, prompt: Prompt, attempt: int, lane: Lane) -> Awaitable[None]:
        """Handed over now, done when written, not yet fsynced: a killed process keeps it, and a
        request must not wait for a disk."""
        key = (prompt.prompt_id, attempt)
        return self._spend.append(
            SpendLine(
                ts=time.time(),
                kind="dispatch",
                prompt_id=prompt.prompt_id,
                attempt=attempt,
                backend=lane.backend,
                provider=lane.name,
                reserve_usd=self.budget.worst_of(key),
            )
        )

    async def record(self, line: SpendLine) -> None:
        """A line about the account, fsynced."""
        await self._spend.append(line, durable=True)
        self.tallies.setdefault(line.backend, Tally()).add(line)

    def known(self, prompt: Prompt, attempt: int, lane: Lane, flight: Flight) -> None:
        """The generation id, as soon as it is known. Not awaited: the reply must not wait for
        it."""
        self._spend.post(
            SpendLine(
                ts=time.time(),
                kind="known",
                prompt_id=prompt.prompt_id,
                attempt=attempt,
                backend=lane.backend,
                provider=lane.name,
                generation_id=flight.generation_id,
            )
        )

    async def settle(
        self, prompt: Prompt, attempt: int, lane: Lane, left: bool, reply: Reply
    ) -> Bill:
        """Find the bill of an attempt and settle the budget. `left`: the request was on the wire.

        The spend line that closes the dispatch (`close`) comes after the reply's own line, so that
        a kill in between leaves a reply whose line says what it cost, never a paid reply that is
        gone."""
        bill = await self._bill(lane, left, reply)
        line = SpendLine(
            ts=time.time(),
            kind="free",
            prompt_id=prompt.prompt_id,
            attempt=attempt,
            backend=lane.backend,
            provider=lane.name,
            generation_id=reply.generation_id,
        )
        return self._settled(bill, line)

    def close(self, bill: Bill) -> None:
        """Hand over the line that closes a dispatch. Nobody waits for it: the reply's own line says
        the same."""
        if bill.line is not None:
            self._spend.post(bill.line)

    def left_open(
        self,
        recovered: Recovered,
        providers: Mapping[str, Provider],
        unjudged: Container[Key],
    ) -> list[tuple[Key, Coroutine[Any, Any, Bill]]]:
        """The dispatches that an earlier life left open, each to be settled: reserved here, before
        anything is sent. `providers` by backend; without one nothing is looked up. `unjudged`:
        whoever judges those replies hands over the lines that close their dispatches."""
        settling: list[tuple[Key, Coroutine[Any, Any, Bill]]] = []
        for line in recovered.open:
            key = (line.prompt_id, line.attempt)
            self.budget.adopt(key, line.reserve_usd)
            provider, reply = providers.get(line.backend), recovered.replied.get(key)
            settling.append((key, self._settle_open(line, provider, reply, key in unjudged)))
        return settling

    async def _settle_open(
        self,
        line: SpendLine,
        provider: Provider | None,
        reply: RolloutHead | None,
        unjudged: bool,
    ) -> Bill:
        """A dispatch that an earlier life left open: closed by its reply's line, looked up, or at
        its worst case."""
        usage = reply.usage if reply is not None else Usage()
        if reply is not None and reply.bill in CLOSING:
            bill = Bill(kind=reply.bill, cost_usd=usage.cost_usd or 0.0, usage=usage)
        elif line.reserve_usd == 0:
            bill = Bill(kind="free", usage=usage)
        elif usage.cost_usd is not None:
            bill = Bill(kind="billed", cost_usd=usage.cost_usd, usage=usage)
        else:
            found: LookedUp | None = None
            if provider is not None and line.generation_id:
                found = await self.look_up(provider, line.generation_id)
            uncertain = Bill(kind="uncertain", usage=usage)
            bill = _looked_up(found, usage) if found else uncertain
        line = msgspec.structs.replace(line, ts=time.time(), reserve_usd=0.0)
        bill = self._settled(bill, line)
        if not unjudged:
            self.close(bill)
        return bill

    async def look_up(
        self, provider: Provider, generation_id: str, tries: int = 99
    ) -> LookedUp | None:
        """The bill by generation id. It may lag the reply by seconds: a 404 is asked again."""
        if not provider.tells_bills:
            return None
        found = await self._ask(provider, generation_id)
        for number, delay_s in enumerate(self._delays_s[:tries]):
            if found is not None or self._enough(number) or provider.name in self.refused:
                break
            await self._pause(delay_s)
            found = await self._ask(provider, generation_id)
        return found

    def hurry(self) -> None:
        """Somebody wants the end now: waits for the next try end, few tries are left, and none
        after SEVERED_S."""
        if self._end_by is None:
            self._end_by = asyncio.get_running_loop().time() + SEVERED_S
            self._hurried.set()
            for clock in self._clocks:
                clock.reschedule(self._end_by)

    def _enough(self, tries: int) -> bool:
        """Whether nobody wants to wait for more than these."""
        if self._end_by is None:
            return False
        return tries >= FEW_TRIES or asyncio.get_running_loop().time() >= self._end_by

    async def _pause(self, delay_s: float) -> None:
        if self._end_by is not None:
            left_s = self._end_by - asyncio.get_running_loop().time()
            await asyncio.sleep(min(delay_s, max(left_s, 0.0)))
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._hurried.wait()

    async def _ask(self, provider: Provider, generation_id: str) -> LookedUp | None:
        async with self._permits:
            if provider.name in self.refused:
                return None
            try:
                async with asyncio.timeout_at(self._end_by) as clock:
                    self._clocks.add(clock)
                    try:
                        return await provider.lookup(generation_id)
                    finally:
                        self._clocks.discard(clock)
            except KeyRefused as error:
                self._refuse(provider.name, error)
            except (ProviderError, TimeoutError):
                pass  # nothing answered; the next try may
        return None

    def _refuse(self, backend: str, error: KeyRefused) -> None:
        if backend not in self.refused:
            self.refused.add(backend)
            unknown = "bills that were not told are booked at their worst case"
            self._say("warn", f"{error}; {unknown}")

    async def _bill(self, lane: Lane, left: bool, reply: Reply) -> Bill:
        usage = reply.usage
        if lane.spec.price.free or not left:
            return Bill(kind="free", usage=usage)
        if usage.cost_usd is not None:
            return Bill(kind="billed", cost_usd=usage.cost_usd, usage=usage)
        paid = reply.failure.paid if reply.failure is not None else "maybe"
        if paid == "no" and reply.kind != "sse":
            return Bill(kind="free", usage=usage)
        insured = paid != "maybe"  # so is a limit that is hit when a stream has begun
        if reply.generation_id:
            tries = FEW_TRIES if insured else len(self._delays_s)
            found = await self.look_up(lane.provider, reply.generation_id, tries)
            if found is not None:
                return _looked_up(found, usage)
        return Bill(kind="free" if insured else "uncertain", usage=usage)

    def _settled(self, bill: Bill, line: SpendLine) -> Bill:
        """The budget in the same tick as the decision; the closing line ready to be written."""
        key, usage, cost = (line.prompt_id, line.attempt), bill.usage, bill.cost_usd
        cap = usage.cap_usd if usage.cap_usd is not None else cost
        over_usd = max(0.0, cap - self.budget.worst_of(key))
        if bill.kind == "free":
            self.budget.settle_free(key)
            cost = cap = 0.0
        elif bill.kind == "uncertain":
            cost = cap = self.budget.settle_uncertain(key)
        else:
            self.budget.settle(key, cost, cap)
        line = msgspec.structs.replace(line, kind=bill.kind, cost_usd=cost, cap_usd=cap)
        self.tallies.setdefault(line.backend, Tally()).add(line)
        return msgspec.structs.replace(
            bill,
            cost_usd=cost,
            over_usd=over_usd if over_usd > 0.01 * cap else 0.0,
            usage=msgspec.structs.replace(usage, cost_usd=cost, cap_usd=cap),
            line=line,
        )


def _looked_up(found: LookedUp, usage: Usage) -> Bill:
    """Native counts of the look-up stand in for a usage that was not sent (case C36)."""
    if usage.completion_tokens is None:
        usage = msgspec.structs.replace(
            usage,
            prompt_tokens=found.prompt_tokens,
            completion_tokens=found.completion_tokens,
        )
    usage = msgspec.structs.replace(usage, cap_usd=found.cap_usd)
    return Bill(kind="looked_up", cost_usd=found.cost_usd, usage=usage, provider=found.provider)
