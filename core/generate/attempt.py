"""One attempt, from its dispatch line to its stored end: sent, received or cut off, billed, judged,
recorded.

Promises: the dispatch line is written before the request leaves; the reply's line before its
outcome is announced; whatever happens, the attempt ends in exactly one `Landing`, and its slot is
given back on every way out. Knows one attempt; what becomes of the prompt afterwards is the
dispatcher's business."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from core.config import Config
from core.errors import DiskFull
from core.generate.books import Bill, Books
from core.generate.lanes import Lane
from core.generate.ports import Ports
from core.generate.queues import Item
from core.generate.request import sampling_of
from core.providers import base
from core.providers.stream import GATHER_S
from core.schema import UNJUDGED, Rollout, Sample, Timings

KEEP_AFTER_S = 0.2
"""Verdicts take milliseconds and bills come with their replies; what waits longer is stored as it
is."""
TIMEOUTS: dict[str, type[base.Failure]] = {
    "first_event_timeout": base.FirstEventTimeout,
    "stream_idle_timeout": base.StreamIdle,
    "total_timeout": base.TotalTimeout,
}


class Aloft:
    """A request in flight. `reason`: why it was cut off from here, if it was."""

    __slots__ = (
        "alone",
        "begun",
        "flight",
        "item",
        "key",
        "lane",
        "reason",
        "request",
        "started_at",
        "task",
        "written",
    )

    def __init__(
        self,
        item: Item,
        lane: Lane,
        request: base.CompletionRequest,
        now: float,
        written: Awaitable[None],
    ) -> None:
        """`written`: its dispatch line, before which nothing leaves."""
        self.item = item
        self.lane = lane
        self.request = request
        self.key = (item.prompt.prompt_id, item.attempt)
        self.flight = base.Flight(max_tokens=request.sampling.max_tokens)
        self.started_at = now
        self.reason = ""
        self.begun = False
        self.alone = False
        self.task: asyncio.Task[Any] | None = None
        self.written = written

    @property
    def sent_at(self) -> float:
        """When it was on the wire; of one that never was, when it was sent for."""
        return self.started_at if self.flight.left_at is None else self.flight.left_at

    def cut(self, reason: str) -> None:
        """Stop it at its next step, which for a request that has not left means that it never
        leaves."""
        if self.reason:
            return
        self.reason = reason
        if self.begun and self.task is not None:  # a task that has not begun would never clean up
            self.task.cancel()

    def overdue(self, now: float, config: Config) -> str:
        """Which clock has run out, if any. All start when the request has left; comments move none
        of them."""
        flight, generate = self.flight, config.generate
        if flight.left_at is None:
            return ""
        if now - flight.left_at > generate.total_timeout_s:
            return "total_timeout"
        if not self.lane.provider.streams or flight.kind == "json":
            return ""
        if flight.first_at is None:
            # A server of our own queues what it cannot run yet: it hangs when nobody hears of it.
            heard_at = self.lane.heard_at if self.lane.spec.price.free else 0.0
            since = max(flight.left_at, heard_at)
            late = now - since > generate.first_event_timeout_s
            return "first_event_timeout" if late else ""
        # What has arrived may lie unread for as long as events are gathered.
        idle = now - (flight.last_at or flight.first_at) > generate.idle_timeout_s + GATHER_S
        return "stream_idle_timeout" if idle else ""


class Landing(msgspec.Struct, kw_only=True):
    """How an attempt ended. `sample` only for a whole reply; `cut`: why it was cut off from here;
    `left`: whether it was on the wire."""

    rollout: Rollout
    bill: Bill
    failure: base.Failure | None = None
    sample: Sample | None = None
    cut: str = ""
    left: bool = True

    @property
    def whole(self) -> bool:
        return self.failure is None and not self.cut


class Waiting:
    """A reply that has arrived and is not stored yet. `kept`: stored all the same."""

    __slots__ = ("aloft", "cut", "kept", "landed_at", "landed_ts", "reply")

    def __init__(self, aloft: Aloft, reply: base.Reply, cut: str) -> None:
        self.aloft = aloft
        self.reply = reply
        self.cut = cut
        self.kept = False
        self.landed_at = asyncio.get_running_loop().time()
        self.landed_ts = time.time()


class Attempts:
    """Carries attempts out. One per generator."""

    def __init__(self, config: Config, ports: Ports, books: Books) -> None:
        self._config = config
        self._ports = ports
        self.books = books
        self.aloft: dict[tuple[str, int], Aloft] = {}
        self._waiting: dict[tuple[str, int], Waiting] = {}

    @property
    def waiting(self) -> int:
        """Replies that have arrived and are not stored yet."""
        return len(self._waiting)

    def launch(self, item: Item, lane: Lane, now: float) -> Aloft:
        """Register the next attempt of a prompt. The budget was reserved under the same key."""
        prompt = item.prepared.prompt
        request = base.CompletionRequest(
            request_id=f"{prompt.prompt_id[:24]}-{item.attempt}",
            prompt=prompt,
            prompt_ids=item.prepared.ids,
            sampling=sampling_of(self._config, prompt.twin_id),
            provider=lane.name,
            session=item.prepared.session,
        )
        aloft = Aloft(item, lane, request, now, self.books.dispatch(prompt, item.attempt, lane))
        if not lane.spec.price.free:
            aloft.flight.on_generation = lambda flight: self.books.known(
                prompt, item.attempt, lane, flight
            )
        self.aloft[aloft.key] = aloft
        return aloft

    def begun(self, key: tuple[str, int]) -> bool:
        """Whether something of an attempt's answer has arrived, or it is over."""
        aloft = self.aloft.get(key)
        return aloft is None or aloft.flight.first_at is not None

    def left_before(self, lane: Lane, moment: float) -> int:
        """How many of a lane's open requests were on the wire before `moment`."""
        left = (a.flight.left_at for a in self.aloft.values() if a.lane is lane)
        return sum(at is not None and at < moment for at in left)

    async def fly(
        self,
        aloft: Aloft,
        landed: Callable[[Aloft, base.Reply, str], None],
        settled: Callable[[Aloft, Bill, str], None],
    ) -> Landing:
        """Send, wait, settle, judge. `landed` is called once, as soon as the slot is free again;
        `settled` as soon as the bill is known (for a reply that says it, in the same tick)."""
        reply, cut = await self._exchange(aloft)
        landed(aloft, reply, cut)
        flight = aloft.flight
        # The reply holds it now; with thousands of streams a second copy is gigabytes.
        flight.received.clear()
        left = flight.left_at is not None
        self._waiting[aloft.key] = waiting = Waiting(aloft, reply, cut)
        try:
            bill = await self.books.settle(aloft.item.prompt, aloft.key[1], aloft.lane, left, reply)
            settled(aloft, bill, cut)
            rollout = _rollout(waiting, bill)
            sample: Sample | None = None
            if reply.failure is None and not cut:
                sample = await self.judge(aloft.item, rollout, bill)
        finally:
            del self._waiting[aloft.key]
        return Landing(
            rollout=rollout, bill=bill, failure=reply.failure, sample=sample, cut=cut, left=left
        )

    async def judge(self, item: Item, rollout: Rollout, bill: Bill) -> Sample:
        """Raises what a defect of ours raised, with the reply stored: it is paid for."""
        prepared = item.prepared
        try:
            return await self._ports.judge(rollout, prepared.prompt, prepared.ids)
        except Exception as error:
            words = f"{type(error).__name__}: {error}"[:300]
            unjudged = msgspec.structs.replace(
                rollout, outcome="aborted", error_class="not_judged", error=words, final=False
            )
            await self.store(Landing(rollout=unjudged, bill=bill))
            raise

    def keep_waiting(self, now: float) -> None:
        """Store what has arrived and waits, for its bill or for its verdict, longer than
        KEEP_AFTER_S: a kill must not lose it. Its own line follows when it waits no more."""
        for waiting in self._waiting.values():
            if now - waiting.landed_at < KEEP_AFTER_S:
                break
            if not waiting.kept and waiting.reply.raw is not None:
                waiting.kept = True
                failure = waiting.reply.failure
                kind = "cut_" + waiting.cut if waiting.cut else failure.kind if failure else ""
                self._ports.completions.post(
                    msgspec.structs.replace(
                        _rollout(waiting, Bill(kind="", usage=waiting.reply.usage)),
                        outcome="aborted",
                        error_class=kind or UNJUDGED,
                        final=False,
                    )
                )

    async def _exchange(self, aloft: Aloft) -> tuple[base.Reply, str]:
        """(reply, why it was cut off). A timeout is a failure of the other side, not a cut; a
        stream that had all but ended is neither: asked again, it would be paid twice."""
        provider = aloft.lane.provider
        aloft.begun = True
        try:
            await aloft.written
            if not aloft.reason:
                return await provider.complete(aloft.request, aloft.flight), ""
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not aloft.reason or task is None:
                raise
            task.uncancel()
        except DiskFull:
            aloft.reason = "disk_full"
        finally:
            del self.aloft[aloft.key]
            aloft.lane.limit.ended()
        if aloft.flight.whole:
            return provider.partial(aloft.request, aloft.flight), ""
        if timeout := TIMEOUTS.get(aloft.reason):
            aloft.flight.failure = timeout(f"{aloft.reason} after {aloft.flight.events} events")
            return provider.partial(aloft.request, aloft.flight), ""
        aloft.flight.failure = base.StreamIncomplete(f"cut off here: {aloft.reason}")
        return provider.partial(aloft.request, aloft.flight), aloft.reason

    async def store(self, landing: Landing, with_reply: bool = True) -> None:
        """Reply first, then the line that closes its dispatch. Raises DiskFull when space had to be
        begged for; both records are the appenders' by then and will be written."""
        try:
            if with_reply:
                await self._ports.completions.append(landing.rollout, durable=landing.rollout.final)
        finally:
            self.books.close(landing.bill)


def _rollout(waiting: Waiting, bill: Bill) -> Rollout:
    aloft, reply = waiting.aloft, waiting.reply
    prompt, flight = aloft.item.prompt, aloft.flight
    timings = None
    if flight.left_at is not None:
        timings = Timings(
            sent_at=waiting.landed_ts - (waiting.landed_at - flight.left_at),
            total_s=waiting.landed_at - flight.left_at,
            ttft_s=flight.first_at - flight.left_at if flight.first_at else None,
        )
    return Rollout(
        prompt_id=prompt.prompt_id,
        twin_id=prompt.twin_id,
        dataset=prompt.dataset,
        arm=prompt.arm,
        attempt=aloft.key[1],
        outcome="ok",
        backend=aloft.lane.backend,
        provider=_provider(aloft.lane, reply, bill),
        model=reply.model,
        generation_id=reply.generation_id,
        request=reply.request,
        status=reply.status,
        headers=reply.headers,
        reply_kind=reply.kind,
        reply_raw=None if isinstance(reply.raw, bytes) else reply.raw,
        reply_zlib=reply.raw if isinstance(reply.raw, bytes) else msgspec.UNSET,
        usage=bill.usage,
        bill=bill.kind,
        timings=timings,
    )


def _provider(lane: Lane, reply: base.Reply, bill: Bill) -> str:
    """The lane's name, unless the reply says that somebody else answered."""
    said = reply.provider or bill.provider
    known = (lane.name.lower(), lane.spec.display.lower(), "")
    return lane.name if (said or "").lower() in known else said or lane.name
