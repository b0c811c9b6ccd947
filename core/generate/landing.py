"""What the end of an attempt means: for its provider's limit, for its prompt, for the books and the
board.

Promises: exactly one outcome per prompt; one owner of retries, deciding on types, with separate
budgets for attempts that cost nothing and for those that were or may have been paid; nothing is
sent again behind a closed gate."""

import asyncio
import random
from collections.abc import Callable
from functools import partial

import msgspec

from core import events as ev
from core.config import Config
from core.errors import DiskFull
from core.generate.attempt import Aloft, Attempts, Landing
from core.generate.board import Board
from core.generate.books import Bill
from core.generate.lanes import Lane
from core.generate.outcome import error_of, outcome_event
from core.generate.ports import Ports
from core.generate.queues import Item, Queues
from core.generate.request import refused
from core.limit import Limit, Patience, backoff_s, waited_s
from core.providers import base
from core.providers.base import RETRYABLE, RETRYABLE_REPLIES
from core.schema import Rollout

UNCOUNTED = (base.Throttled, base.PaymentRequired, base.LocalEmfile, base.KeyRefused)
"""Waits and faults of our own: unpaid, they use up no attempt of a prompt (case C46)."""


class Gate(msgspec.Struct):
    """Whether anything may leave. `source` and `by`: who closed it."""

    state: str = "open"  # open | draining | halted | severed
    source: str = ""
    by: str = ""
    cancelled: int = 0
    received: int = 0
    severed: int = 0
    saved_usd: float = 0.0

    @property
    def is_open(self) -> bool:
        return self.state == "open"


class Lander:
    """Decides. Stops a lane, or calls `halt`, where one attempt shows that no other can do
    better."""

    def __init__(
        self,
        config: Config,
        ports: Ports,
        attempts: Attempts,
        queues: Queues,
        board: Board,
        lanes: list[Lane],
    ) -> None:
        self._config = config
        self._ports = ports
        self._attempts = attempts
        self.queues = queues
        self.board = board
        self.lanes = lanes
        self._dice = random.Random(config.run.seed)
        self._at_start: dict[str, Patience] = {}
        self.gate = Gate()
        self.wake: Callable[[], None] = lambda: None
        """Whoever sends looks again, in a later step."""
        self.send: Callable[[], None] = lambda: None
        """Send what may leave now, in this step."""
        self.halt: Callable[[str, str], None] = lambda source, by: None

    async def carry(self, aloft: Aloft) -> None:
        """One attempt to its end and what follows from it."""
        landing = await self._attempts.fly(aloft, self._landed, self._settled)
        await self._conclude(landing, aloft.item, aloft.lane)

    async def take_up(self, item: Item, landing: Landing | None) -> None:
        """What an earlier life's reply turned out to be, now that it is judged. None: it cannot be,
        so that the prompt is asked."""
        prepared = item.prepared
        if landing is None and prepared.refusal:
            await self.refuse(item, prepared.refusal, prepared.detail)
        elif landing is None:
            self.queues.back(item)
            self.wake()
        else:
            lane = self._lane_of(landing.rollout)
            lane.pair(item.prompt.dataset).open += 1
            await self._conclude(landing, item, lane)

    def _lane_of(self, rollout: Rollout) -> Lane:
        """Whoever answered; when that is no lane of this life, one that nobody else counts on."""
        lanes = [lane for lane in self.lanes if lane.backend == rollout.backend]
        for lane in lanes:
            if lane.name == rollout.provider:
                return lane
        spec = base.LaneSpec(name=rollout.provider or rollout.backend)
        return Lane(lanes[0].provider, spec, Limit(1), canary=0)

    async def _conclude(self, landing: Landing, item: Item, lane: Lane) -> None:
        outcome, again = self._decide(landing, item, lane)
        if not landing.left and landing.cut:
            await self._store(landing, with_reply=False)
            self._put_back(landing, item, lane)
            return
        error_class, error = error_of(landing)
        landing.rollout = msgspec.structs.replace(
            landing.rollout,
            outcome=outcome,
            error_class=error_class,
            error=error,
            final=not again and outcome != "aborted",
        )
        if error_class:
            said = error or f"prompt {item.prompt.prompt_id}"  # `eyas probe` opens it
            self.board.error(lane.name, error_class, said)
        await self._store(landing)
        if again:
            self._again(landing, item, lane)
        elif outcome == "aborted" and landing.cut == "scope" and self.gate.is_open:
            self._put_back(landing, item, lane)
        else:
            self._finish(landing, item, lane)
        self.wake()

    async def refuse(self, item: Item, error_class: str, detail: str, final: bool = True) -> None:
        """A prompt that must not be sent (policy: final) or cannot be afforded (pending for a
        larger budget)."""
        prompt = item.prompt
        rollout = refused(prompt, item.attempt, error_class, detail, final)
        self.board.error(prompt.backend, error_class, detail)
        try:
            await self._ports.completions.append(rollout)
        except DiskFull:
            self.halt("disk_full", "")
        if final:  # else it has no outcome yet
            self._announce(rollout, None)
        queue = self.queues.of(prompt)
        queue.ended += 1
        queue.postponed += not final
        self.wake()

    def _landed(self, aloft: Aloft, reply: base.Reply, cut: str) -> None:
        """In the tick in which the slot is free: tell the limit, so that the next request knows."""
        lane, flight = aloft.lane, aloft.flight
        now = asyncio.get_running_loop().time()
        left_at = flight.left_at if flight.left_at is not None else now
        lane.refusals.ended(left_at)
        lane.heard_at = max(lane.heard_at, flight.last_at or 0.0)
        self._count_tokens(lane, aloft.item.prompt.dataset, flight, reply)
        if cut == "disk_full":
            self.halt("disk_full", "")
        if cut:
            lane.limit.unknown(aloft.sent_at)
        elif reply.failure is None or isinstance(reply.failure, base.Refused):
            # A refusal comes at once: by its time every answer would be a slow one.
            begun_at = flight.first_at if reply.failure is None else None
            ttft_s = begun_at - left_at if begun_at is not None else None
            wait_s = waited_s(now - left_at, ttft_s, reply.usage.completion_tokens)
            lane.limit.succeeded(now, aloft.sent_at, self._dice.random(), wait_s)
            lane.barren_since = None
            lane.refusals.answered(left_at)
            self._patience(lane).answered()
            lane.latency.add(now - left_at, now)
            if ttft_s is not None:
                lane.ttft.add(ttft_s, now)
        else:
            self._failed(aloft, reply.failure, now, left_at)
        self.wake()

    def _settled(self, aloft: Aloft, bill: Bill, cut: str) -> None:
        """Money of the lane, and the halt's own account: before the next request leaves, because
        what one reply shows about the prices holds for all."""
        lane, gate = aloft.lane, self.gate
        lane.spent_usd += bill.cost_usd
        if bill.over_usd:
            self.stop_lane(
                lane,
                f"billed ${bill.over_usd:.6f} more than its prices allow; "
                "the budget cannot hold on it",
            )
        self.send()
        if gate.is_open or aloft.flight.left_at is None:
            return
        if cut == "sever":
            gate.severed += 1
        elif cut:
            gate.cancelled += 1
        else:
            gate.received += 1
        if cut and not lane.spec.price.free:
            mean = self.board.forecast.mean_usd(aloft.item.prompt.dataset)
            if mean is not None:
                gate.saved_usd += max(0.0, mean - bill.cost_usd)

    def heard(self, aloft: Aloft) -> None:
        """What its stream has brought since the last look."""
        flight, lane = aloft.flight, aloft.lane
        more = flight.tokens - flight.counted
        if more <= 0:
            return
        begins = not flight.counted and "error" not in flight.body and flight.left_at is not None
        if begins and lane.refusals.answered(flight.left_at or 0.0):
            self.wake()
        lane.heard_at = max(lane.heard_at, flight.last_at or 0.0)
        flight.counted += more
        self.board.tokens += more
        lane.tokens += more

    def _count_tokens(
        self, lane: Lane, dataset: str, flight: base.Flight, reply: base.Reply
    ) -> None:
        """Replace what streaming had counted by what the reply says."""
        tokens = reply.usage.completion_tokens
        more = max(0, (flight.tokens if tokens is None else tokens) - flight.counted)
        flight.counted += more
        self.board.tokens += more
        lane.tokens += more
        if tokens is not None and reply.failure is None:
            self.board.answered(dataset, reply.usage.prompt_tokens, tokens)

    def _failed(self, aloft: Aloft, failure: base.Failure, now: float, left_at: float) -> None:
        lane = aloft.lane
        siblings = [one for one in self.lanes if one.backend == lane.backend]
        lane.errors += 1
        if isinstance(failure, UNCOUNTED):
            lane.limit.unknown(aloft.sent_at)
        match failure:
            case base.Throttled():
                for one in siblings if failure.platform else [lane]:
                    one.limit.throttled(now, left_at, failure.retry_after_s, self._dice.random())
                self._patience(lane).throttled()
                self._lose_patience(lane, failure, now)
            case base.PaymentRequired():
                alone = aloft.alone and not any(one.limit.in_flight for one in siblings)
                for one in siblings:
                    wait_s, dice = failure.retry_after_s, self._dice.random()
                    one.limit.payment_required(now, left_at, wait_s, dice)
                    if alone:
                        self.stop_lane(one, f"credits do not cover one request: {failure}")
            case base.LocalEmfile():
                for one in self.lanes:
                    one.limit.halve_ceiling(now, aloft.started_at)
            case base.KeyRefused():
                for one in siblings:
                    self.stop_lane(one, f"key refused: {failure}")
            case base.Fatal():
                lane.limit.unknown(aloft.sent_at)
                open_, prompt_id = lane.limit.in_flight, aloft.item.prompt.prompt_id
                older = partial(self._attempts.left_before, lane)
                if lane.refusals.refused(prompt_id, left_at, open_, older):
                    self.stop_lane(lane, f"{failure.kind}: {failure}")
            case _:
                lane.limit.failed(now, aloft.sent_at, self._dice.random())
                self._lose_patience(lane, failure, now)
                open_here = sum(one.limit.in_flight for one in siblings)
                patience = self._patience(lane)
                if (silent_s := patience.failed(now, open_here)) is not None:
                    what = f"not one answer in {silent_s:.0f} s, {patience.failures} failures"
                    for one in siblings:
                        self.stop_lane(one, f"{what}: {failure}")

    def _patience(self, lane: Lane) -> Patience:
        start_s = self._config.generate.patience_at_start_s
        return self._at_start.setdefault(lane.backend, Patience(start_s))

    def _lose_patience(self, lane: Lane, failure: base.Failure, now: float) -> None:
        """Probes of an open breaker are minutes apart: without an end a run would wait for days."""
        if lane.barren_since is None:
            lane.barren_since = now
        elif now - lane.barren_since > self._config.generate.patience_s:
            self.stop_lane(lane, f"no answer for {now - lane.barren_since:.0f} s: {failure}")

    def stop_lane(self, lane: Lane, reason: str) -> None:
        if not lane.stopped:
            lane.stopped = reason
            self._ports.emit(
                ev.Log(level="error", stage="generate", message=f"{lane.name} stopped: {reason}")
            )

    def _decide(self, landing: Landing, item: Item, lane: Lane) -> tuple[str, bool]:
        """(outcome of this attempt, whether the prompt is sent again)."""
        generate = self._config.generate
        if landing.cut:
            return "aborted", False
        item.cost_usd += landing.bill.cost_usd
        paid = landing.bill.paid or landing.whole
        if paid:
            item.replies += 1
        elif not isinstance(landing.failure, UNCOUNTED):
            item.unpaid += 1
        paid_left = item.replies < generate.attempts_paid
        may_again = self.gate.is_open and paid_left and item.unpaid < generate.attempts_unpaid
        if landing.failure is not None:
            waits = isinstance(landing.failure, UNCOUNTED)
            if not isinstance(landing.failure, RETRYABLE) and not waits:
                return "failed", False
            if not self.gate.is_open:
                return "aborted", False
            return "failed", may_again or (waits and not paid)
        sample = landing.sample
        if sample is None or sample.verdict != "rejected":
            return "ok", False
        return "rejected", may_again and sample.error_class in RETRYABLE_REPLIES

    async def _store(self, landing: Landing, with_reply: bool = True) -> None:
        try:
            await self._attempts.store(landing, with_reply)
        except DiskFull:
            self.halt("disk_full", "")

    def _put_back(self, landing: Landing, item: Item, lane: Lane) -> None:
        """It never left, or its provider was stopped under it: pending, and nothing is counted."""
        lane.back(item.prompt.dataset)
        item.avoid = lane.name
        self.queues.back(item)
        self.wake()

    def _again(self, landing: Landing, item: Item, lane: Lane) -> None:
        self.board.retries += 1
        if not self.gate.is_open:  # it closed while the reply was being stored
            self._put_back(landing, item, lane)
            return
        lane.back(item.prompt.dataset)
        item.avoid = lane.name
        tries = item.unpaid + item.replies
        if isinstance(landing.failure, UNCOUNTED) or tries <= 1:
            self.queues.back(item)  # the lane's own hold is the wait; a first accident is none
            return
        now = asyncio.get_running_loop().time()
        self.queues.retry_at(now + backoff_s(tries - 2, self._dice.random()), item)

    def _finish(self, landing: Landing, item: Item, lane: Lane) -> None:
        rollout, sample = landing.rollout, landing.sample
        dataset = rollout.dataset
        aborted = rollout.outcome == "aborted"
        if aborted:
            lane.back(dataset)
        else:
            self.queues.of(item.prompt).ended += 1
            lane.done += 1
            self.board.done_here += 1
            self.board.forecast.observe(dataset, item.cost_usd)
        self._announce(rollout, landing)
        if sample is not None and self._ports.on_sample is not None:
            self._ports.on_sample(sample, rollout, item.prepared.prompt)
        if not aborted:
            truncated = sample is not None and sample.error_class == "truncated_length"
            usable = sample is not None and (sample.trainable or truncated)
            self._canary(lane, dataset, bad=not usable)

    def _canary(self, lane: Lane, dataset: str, bad: bool) -> None:
        verdict = lane.ended(dataset, bad)
        if verdict is not None:
            self._ports.emit(verdict)

    def _announce(self, rollout: Rollout, landing: Landing | None) -> None:
        """The one event of an outcome, after its line is safe."""
        self.board.outcomes[rollout.outcome] += 1
        sample = landing.sample if landing else None
        if sample is not None:
            self.board.verdicts[sample.verdict] += 1
        self._ports.emit(outcome_event(rollout, sample, landing.bill.cost_usd if landing else None))
