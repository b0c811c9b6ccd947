"""What waits: prompts by backend and dataset, in fair shares, prompts with a common beginning side
by side.

Pure. Fairness: the dataset that has got the smallest part of its prompts is next, so that all end
together and the audit sees every dataset while the run is young."""

import heapq
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator

from core.generate.ports import Recovered
from core.generate.request import Prepared, prefix_key
from core.providers.chat import declares_tools
from core.schema import Prompt

AHEAD = 64
"""How far before its group the first of a group goes, so that its answer has begun when the group's
turn comes."""
HELD = 512
"""Prompts of one dataset that may wait for a cache while more are rendered, in case those need not
wait."""


class Item:
    """One prompt on its way to its outcome. `attempt` is the number of the last one sent, over all
    lives of the run.

    `unpaid` and `replies` are the used parts of its two attempt budgets; `avoid` the lane that
    failed it last. `cost_usd`: what its attempts have cost, but for those that were cut off
    here."""

    __slots__ = ("attempt", "avoid", "cost_usd", "prepared", "prompt", "replies", "unpaid")

    def __init__(
        self, prompt: Prompt, attempt: int = 0, replies: int = 0, cost_usd: float = 0.0
    ) -> None:
        self.prompt = prompt
        self.prepared = Prepared(prompt=prompt)
        self.attempt = attempt
        self.unpaid = 0
        self.replies = replies
        self.cost_usd = cost_usd
        self.avoid = ""


def item_of(prompt: Prompt, recovered: Recovered) -> Item:
    """With what earlier lives have used of its attempts."""
    name = prompt.prompt_id
    attempts, replies = recovered.attempts.get(name, 0), recovered.replies.get(name, 0)
    return Item(prompt, attempts, replies, recovered.retried_usd.get(name, 0.0))


class Queue:
    """One dataset on one backend."""

    def __init__(self, backend: str, dataset: str, prompts: Iterable[Prompt]) -> None:
        self.backend = backend
        self.dataset = dataset
        self.waiting = deque(prompts)
        self.ready: deque[Item] = deque()
        self.cold: dict[tuple[str, int], list[Item]] = {}
        """Rendered, waiting for the first of their beginning on a lane, by both."""
        self.total = len(self.waiting)
        self.taken = 0
        self.ended = 0
        self.postponed = 0  # of those ended: for want of money or room; the next life asks them
        self.stopped = ""

    @property
    def progress(self) -> float:
        return self.taken / self.total if self.total else 1.0

    @property
    def left(self) -> bool:
        """Whether any prompt of it has still to leave."""
        return bool(self.ready or self.waiting or self.cold)

    @property
    def held(self) -> int:
        return sum(map(len, self.cold.values()))

    @property
    def pending(self) -> int:
        return self.total - self.ended


def grouped(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """Same order, but prompts that share tools and system message follow each other, each group's
    first one AHEAD of the others."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prefix_key(prompt), []).append(prompt)
    others: deque[Prompt] = deque()
    for first, *rest in groups.values():
        while len(others) > AHEAD:
            yield others.popleft()
        yield first
        others.extend(rest)
    yield from others


class Queues:
    """All of them, and the retries that wait for their time."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        rows: dict[tuple[str, str], list[Prompt]] = {}
        for prompt in prompts:
            rows.setdefault((prompt.backend, prompt.dataset), []).append(prompt)
        self.queues = [Queue(backend, dataset, row) for (backend, dataset), row in rows.items()]
        self._by_key = {(q.backend, q.dataset): q for q in self.queues}
        self._retries: list[tuple[float, int, Item]] = []
        self._serial = 0

    def group(self) -> None:
        """Once, before anything is taken. Hashes every prompt's tools: 1.7 s for 83,000, so call it
        in a thread."""
        for queue in self.queues:
            queue.waiting = deque(grouped(queue.waiting))

    def with_tools(self) -> set[str]:
        """Backends some of whose prompts declare tools. Looks at them all: call it in a thread."""
        return {q.backend for q in self.queues if any(map(declares_tools, q.waiting))}

    def set_aside(self, names: Container[str]) -> None:
        """Prompts whose outcome comes without asking: taken, not ended."""
        for queue in self.queues:
            rest = [p for p in queue.waiting if p.prompt_id not in names]
            queue.taken += len(queue.waiting) - len(rest)
            queue.waiting = deque(rest)

    def of(self, prompt: Prompt) -> Queue:
        return self._by_key[prompt.backend, prompt.dataset]

    def by_need(self) -> list[Queue]:
        """Queues with something ready, the most behind first."""
        return sorted((q for q in self.queues if q.ready and not q.stopped), key=_progress)

    def hungry(self, low: int) -> Queue | None:
        """The queue that needs rendering most."""
        able = [q for q in self.queues if q.waiting and len(q.ready) < low and not q.stopped]
        able = [q for q in able if not q.cold or q.held < HELD]
        return min(able, key=lambda q: (len(q.ready), q.progress), default=None)

    def retry_at(self, when: float, item: Item) -> None:
        self._serial += 1
        heapq.heappush(self._retries, (when, self._serial, item))

    def back(self, item: Item) -> None:
        """To the front of its queue: it has waited once already."""
        queue = self.of(item.prompt)
        queue.taken -= 1
        queue.ready.appendleft(item)

    def hold(self, item: Item, lane: str) -> None:
        """Aside, until the first of its beginning has warmed the lane's cache."""
        cold = self.of(item.prompt).cold
        cold.setdefault((lane, item.prepared.beginning), []).append(item)

    def free(self, over: Callable[[str, int], bool]) -> None:
        """To the front of their queues, in their order: those whose (lane, beginning) is waited for
        no more."""
        for queue in self.queues:
            for place in [p for p in queue.cold if over(*p)]:
                queue.ready.extendleft(reversed(queue.cold.pop(place)))

    @property
    def holding(self) -> bool:
        return any(q.cold for q in self.queues)

    def due(self, now: float) -> None:
        """Retries whose time has come."""
        while self._retries and self._retries[0][0] <= now:
            self.back(heapq.heappop(self._retries)[2])

    def next_due(self) -> float | None:
        return self._retries[0][0] if self._retries else None

    def drop_retries(self) -> int:
        """HALT: nothing waits for a timer any more; the prompts stay pending."""
        dropped = len(self._retries)
        self._retries.clear()
        return dropped

    @property
    def retrying(self) -> int:
        return len(self._retries)

    @property
    def queued(self) -> int:
        rows = sum(len(q.waiting) + len(q.ready) + q.held for q in self.queues)
        return rows + len(self._retries)

    def remaining(self) -> dict[str, int]:
        """Prompts without an outcome, by dataset (both backends together)."""
        left: dict[str, int] = {}
        for queue in self.queues:
            if queue.pending:
                left[queue.dataset] = left.get(queue.dataset, 0) + queue.pending
        return left


def _progress(queue: Queue) -> float:
    return queue.progress
