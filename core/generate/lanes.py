"""One provider as generate sees it: its limit, its canaries, its numbers. Pure but for the counts
it keeps.

Promises: what a lane says about itself is counted in one place; a dataset gets full concurrency on
a lane only after its canary has passed there. Knows no sockets and no clock of its own."""

import math
from collections.abc import Callable, Sequence
from zlib import crc32

import msgspec

from core import events as ev
from core.limit import Limit, Refusals
from core.providers.base import LaneSpec, Provider

Key = tuple[str, int]
"""Of a request: prompt id and attempt."""
CANARY_BAD_RATE = 0.25
CANARY_ALPHA = 0.001
HOME_LOAD = 1.25
HOME_SLACK = 2
"""A prefix stays at its home while that holds at most 1.25 times the emptiest one's share of slots,
and two more."""
WARM_UP_S = 5.0
"""How long prompts wait for the first of their beginning, at most: what is cached is the prompt,
and reading even a long one takes a second or two, while a whole reply may take minutes. They wait
even when nothing else could leave: a run of one dataset with one system message begins so. Paid
once for each beginning on each lane."""
BEGINNINGS = 4_096
"""So many are remembered, the newest: prompts that begin alike follow each other."""


class Warmth:
    """Which beginnings of prompts a lane's cache holds, or is about to. `key` names a request that
    went ahead; `begun`: whether its answer has begun, or it has ended."""

    def __init__(self) -> None:
        self._ahead: dict[int, tuple[Key, float]] = {}

    def waits(self, beginning: int, key: Key, now: float, begun: Callable[[Key], bool]) -> bool:
        """Whether a request waits for one that begins alike. The first one does not: others wait
        for it."""
        if beginning not in self._ahead:
            if len(self._ahead) >= BEGINNINGS:
                del self._ahead[next(iter(self._ahead))]
            self._ahead[beginning] = (key, now + WARM_UP_S)
            return False
        return not self.over(beginning, now, begun)

    def over(self, beginning: int, now: float, begun: Callable[[Key], bool]) -> bool:
        """Whether nobody waits any more; the answer stays."""
        key, until = self._ahead.get(beginning, (("", 0), -math.inf))
        if now < until and not begun(key):
            return False
        if until > -math.inf:
            self._ahead[beginning] = (key, -math.inf)
        return True


class LogHistogram:
    """Quantiles of positive numbers within 8 %, in constant memory (log buckets from 0.1 ms up)."""

    __slots__ = ("_buckets", "total")
    RATIO = 1.08
    FLOOR = 1e-4

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self.total = 0

    def add(self, value: float) -> None:
        index = max(0, int(math.log(max(value, self.FLOOR) / self.FLOOR) / math.log(self.RATIO)))
        self._buckets[index] = self._buckets.get(index, 0) + 1
        self.total += 1

    def quantile(self, q: float) -> float | None:
        if not self.total:
            return None
        rank, seen = q * self.total, 0
        for index in sorted(self._buckets):
            seen += self._buckets[index]
            if seen >= rank:
                break
        return float(self.FLOOR * self.RATIO ** (index + 0.5))


class RollingHistogram:
    """The last half to whole minute, and the whole run while that is thin."""

    WINDOW_S = 30.0
    THIN = 10

    def __init__(self) -> None:
        self._all, self._now, self._before = LogHistogram(), LogHistogram(), LogHistogram()
        self._since: float | None = None

    def add(self, value: float, now: float) -> None:
        if self._since is None:
            self._since = now
        elif now - self._since >= self.WINDOW_S:
            self._before, self._now = self._now, LogHistogram()
            self._since = now
        self._all.add(value)
        self._now.add(value)

    def quantile(self, q: float) -> float | None:
        for histogram in (self._now, self._before):
            if histogram.total >= self.THIN:
                return histogram.quantile(q)
        return self._all.quantile(q)


class CanaryState(msgspec.Struct):
    """One dataset on one lane. `open` counts rollouts that have started here and not ended
    elsewhere."""

    need: int
    open: int = 0
    ended: int = 0
    bad: int = 0
    state: str = "running"  # running | passed | failed


def canary_fails(ended: int, bad: int, rate: float = CANARY_BAD_RATE) -> bool:
    """Exact one-sided binomial test: so many bad ones would come less than once in a thousand times
    if the provider had only `rate` of them."""
    tail = sum(
        math.comb(ended, k) * rate**k * (1 - rate) ** (ended - k) for k in range(bad, ended + 1)
    )
    return bad > 0 and tail < CANARY_ALPHA


class Lane:
    """A provider of a backend, with everything that is counted for it."""

    def __init__(self, provider: Provider, spec: LaneSpec, limit: Limit, canary: int) -> None:
        self.provider = provider
        self.spec = spec
        self.limit = limit
        self.name = spec.name
        self.backend = provider.name
        self.stopped = ""
        self.barren_since: float | None = None
        self.heard_at = 0.0
        """When one of its streams last brought something."""
        self.refusals = Refusals()
        self.done = self.errors = self.sent = self.tokens = 0
        self.spent_usd = 0.0
        self.latency, self.ttft = RollingHistogram(), RollingHistogram()
        self.warmth = Warmth()
        self._canary = canary
        self._pairs: dict[str, CanaryState] = {}

    def pair(self, dataset: str) -> CanaryState:
        if dataset not in self._pairs:
            state = "running" if self._canary else "passed"
            self._pairs[dataset] = CanaryState(need=self._canary, state=state)
        return self._pairs[dataset]

    @property
    def share(self) -> float:
        """Of its slots, how many are taken."""
        return self.limit.in_flight / self.limit.width

    def open_to(self, dataset: str) -> bool:
        """Whether the dataset may ever be asked here again."""
        return not self.stopped and self.pair(dataset).state != "failed"

    def takes(self, dataset: str, now: float) -> bool:
        """Whether one more request of the dataset may leave now."""
        if not self.open_to(dataset) or not self.limit.may_send(now):
            return False
        if self.refusals.holds(self.limit.in_flight):
            return False
        pair = self.pair(dataset)
        return pair.state == "passed" or pair.open + pair.ended < pair.need

    def left(self, dataset: str, now: float) -> None:
        self.limit.sent(now)
        self.sent += 1
        self.pair(dataset).open += 1

    def back(self, dataset: str) -> None:
        """The rollout goes elsewhere or again: it says nothing for the canary."""
        self.pair(dataset).open -= 1

    def verdict(self, dataset: str, passed: bool) -> None:
        """The canary's verdict from outside; the first one counts."""
        pair = self.pair(dataset)
        if pair.state == "running":
            pair.state = "passed" if passed else "failed"

    def ended(self, dataset: str, bad: bool) -> ev.Canary | None:
        """A rollout reached its outcome here. Returns the canary's verdict when this one decides
        it."""
        pair = self.pair(dataset)
        pair.open -= 1
        if pair.state != "running":
            return None
        pair.ended += 1
        pair.bad += bad
        if pair.ended < pair.need:
            return None
        pair.state = "failed" if canary_fails(pair.ended, pair.bad) else "passed"
        return ev.Canary(
            provider=self.name,
            dataset=dataset,
            passed=pair.state == "passed",
            detail=f"{pair.bad} of {pair.ended} replies not usable for training",
        )

    def row(self, now: float, rates: tuple[float, float, float]) -> ev.ProviderRow:
        per_min, tokens_per_s, usd_per_min = rates
        return ev.ProviderRow(
            name=self.name,
            backend=self.backend,
            in_flight=self.limit.in_flight,
            limit=self.limit.width,
            done=self.done,
            errors=self.errors,
            status_429=self.limit.throttles,
            backoff_s=max(0.0, self.limit.hold_until - now),
            breaker=self.limit.breaker.state,
            requests_per_min=per_min,
            tokens_per_s=tokens_per_s,
            p50_s=self.latency.quantile(0.5),
            p99_s=self.latency.quantile(0.99),
            ttft_p50_s=self.ttft.quantile(0.5),
            usd_per_min=usd_per_min,
            spent_usd=self.spent_usd,
            price_prompt=self.spec.price.prompt * 1e6,
            price_completion=self.spec.price.completion * 1e6,
            stopped=self.stopped,
        )


def by_preference(lanes: Sequence[Lane], prefix: str, avoid: str) -> list[Lane]:
    """Best first: not the one that failed the prompt last, then the configured rank, then the one
    whose prompt cache holds the prompt's beginning, unless it is much busier, then the emptiest.

    A prefix finds its home by rendezvous hashing (Thaler and Ravishankar 1998), so that a lane that
    stops or fills moves its own prefixes alone; loads are bounded as by Mirrokni et al. (2018)."""
    if len(lanes) < 2:
        return list(lanes)
    least: dict[float, float] = {}
    for lane in lanes:
        rank = lane.spec.rank
        least[rank] = min(least.get(rank, math.inf), lane.share)

    def key(lane: Lane) -> tuple[bool, float, bool, float]:
        rank = lane.spec.rank
        busy = lane.share > HOME_LOAD * least[rank] + HOME_SLACK / lane.limit.width
        order = lane.share if busy else -crc32(f"{prefix}/{lane.name}".encode())
        return (lane.name == avoid, rank, busy, order)

    return sorted(lanes, key=key)
