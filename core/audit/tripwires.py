"""Wires that stop a run which has gone wrong. A pure state machine: observations in, trips out; no
clock, no socket.

Every observation costs O(1): counters and a ring of the last WINDOW bits per scope. A share trips
when the lower end of its Wilson interval lies above the limit, over the last WINDOW or over all, so
that chance does not stop a run and a provider that goes bad late is seen within a window. A trip
stops the provider or the dataset that caused it, and halts the run when nothing would be left or
when the same wire has stopped MAX_STOPS scopes already.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from core import config
from core.audit.shares import mcnemar, wilson
from core.conventions import LEARN_SAMPLES, is_mixed
from core.events import Tripwire

WINDOW = 256
CERTAIN = 3.0902323061678132
"""z of a one-sided 1 in 1,000."""
LIKELY = 1.6448536269514722
"""z of a one-sided 5 %: enough to say where the fault lies, and to fail a canary."""
MAX_STOPS = 2
DEAD_STEPS = 50
DEAD_SPREAD = 1e-6
FALLING = 3
FALLEN = 0.9


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One outcome, reduced. None: not applicable, and no wire counts it."""

    provider: str
    dataset: str
    twin_id: str = ""
    reference: bool = False
    failed: bool = False
    mismatch: bool | None = None
    stop_offset: int | None = None
    prompt_drift: bool | None = None
    leak: bool | None = None
    truncated: bool | None = None
    schema_invalid: bool | None = None
    triggered: bool | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    kept: bool = False
    cost_usd: float = 0.0


class Price(NamedTuple):
    """USD per token."""

    prompt: float
    completion: float


class Tally:
    """How many of how many, over all and over the last WINDOW."""

    __slots__ = ("bad", "recent", "recent_bad", "total")

    def __init__(self) -> None:
        self.total = self.bad = self.recent_bad = 0
        self.recent: deque[bool] = deque(maxlen=WINDOW)

    def add(self, bad: bool) -> None:
        if len(self.recent) == WINDOW:
            self.recent_bad -= self.recent[0]
        self.recent.append(bad)
        self.recent_bad += bad
        self.total += 1
        self.bad += bad

    def over(self, limit: float, least: int) -> bool:
        return exceeds(self.bad, self.total, limit, least) or exceeds(
            self.recent_bad, len(self.recent), limit, least
        )


def exceeds(bad: int, total: int, limit: float, least: int, z: float = CERTAIN) -> bool:
    """The share is above `limit` beyond chance, counted on at least `least`."""
    return total >= least and wilson(bad, total, z)[0] > limit


class ShareWire(NamedTuple):
    field: str
    limit: str
    saw: str
    advice: str


SHARES: dict[str, ShareWire] = {
    "mismatch": ShareWire(
        "mismatch", "mismatch_rate", "replies do not match their billed token count",
        "look at three of them in the probe; pin another provider",
    ),
    "prompt_drift": ShareWire(
        "prompt_drift", "prompt_drift_rate", "replies were billed for another prompt than ours",
        "the provider renders another template or adds text; leave it out (`ignore`)",
    ),
    "leak": ShareWire(
        "leak", "leak_rate", "replies hold structural markers as text",
        "the provider's parser is broken for this model; leave it out (`ignore`)",
    ),
    "truncation": ShareWire(
        "truncated", "truncation_rate", "replies were cut at the token limit",
        "raise generate.max_tokens, or drop the dataset",
    ),
    "schema_invalid": ShareWire(
        "schema_invalid", "schema_invalid_rate", "replies with calls break the declared schema",
        "compare with the local arm; the provider may not pass `tools` on",
    ),
    "error_storm": ShareWire(
        "failed", "error_rate", "attempts failed", "wait, or ignore the provider",
    ),
}  # fmt: skip


class Tripwires:
    """Feed `observe` with every outcome; `check` hands out the trips that have not been handed out
    yet.

    `prices`: list prices by provider, for the cost wire. `datasets`: all of the run, so that the
    last one is known.
    """

    def __init__(
        self,
        limits: config.Tripwires,
        prices: Mapping[str, Price] | None = None,
        datasets: Sequence[str] = (),
    ) -> None:
        self._limits = limits
        self._prices = dict(prices or {})
        self._datasets = set(datasets)
        self._providers: dict[str, bool] = {}
        self.stopped_providers: set[str] = set()
        self.stopped_datasets: set[str] = set()
        self.halted = False
        self._stops: dict[str, int] = defaultdict(int)
        self._tallies: dict[tuple[str, str, str], Tally] = defaultdict(Tally)
        self._offsets: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self._spent: dict[tuple[str, str], float] = defaultdict(float)
        self._worth: dict[str, float] = defaultdict(float)
        self._replies: dict[str, int] = defaultdict(int)
        self._local: dict[tuple[str, str], bool] = {}
        self._waiting: dict[tuple[str, str], list[tuple[str, bool]]] = defaultdict(list)
        self._pairs: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
        self._deviant: set[tuple[str, str]] = set()
        self._losses: deque[float] = deque(maxlen=DEAD_STEPS)
        self._acceptance: list[float] = []
        self._pending: list[Tripwire] = []

    def set_price(self, provider: str, price: Price) -> None:
        self._prices[provider] = price

    def check(self) -> list[Tripwire]:
        """Trips since the last call, oldest first."""
        pending, self._pending = self._pending, []
        return pending

    def observe(self, o: Observation) -> None:
        """One outcome. Those of a stopped scope still cost money, and trip nothing any more."""
        self._providers[o.provider] = o.reference
        self._datasets.add(o.dataset)
        for scope in (("provider", o.provider), ("dataset", o.dataset), ("run", "")):
            self._spent[scope] += o.cost_usd
        if not self._limits.enabled or self._is_stopped(o):
            return
        for name, wire in SHARES.items():
            if (bad := getattr(o, wire.field)) is not None:
                self._share(name, o, bad)
        self._offset(o)
        self._cost(o)
        self._trigger(o)

    def disk(
        self, free_bytes: int, written_bytes: int, done: int, total: int, keep_bytes: int
    ) -> None:
        """Forecast from what `done` of `total` items have written. Trips when less than
        `keep_bytes` would remain."""
        if not self._limits.enabled or done < self._limits.min_samples or done >= total:
            return
        need = int(written_bytes / done * (total - done))
        if free_bytes - need < keep_bytes:
            saw = f"{_gb(need)} to be written, {_gb(free_bytes)} free, {_gb(keep_bytes)} to be kept"
            self._trip("disk", "run", saw, "free space or move run.dir, then `eyas resume`", "halt")

    def loss(self, step: int, loss: float, grad_norm: float | None = None) -> None:
        """One training step. NaN and infinity trip at once, a loss or gradient that stands still
        after DEAD_STEPS."""
        if not self._limits.enabled:
            return
        if not math.isfinite(loss) or (grad_norm is not None and not math.isfinite(grad_norm)):
            self._trip(
                "loss",
                "train",
                f"loss {loss} at step {step}",
                "lower train.lr; look at the last batch",
                "halt",
            )
            return
        self._losses.append(loss)
        still = (
            len(self._losses) == DEAD_STEPS and max(self._losses) - min(self._losses) < DEAD_SPREAD
        )
        if still:
            saw = f"loss {loss:.6f} has not moved for {DEAD_STEPS} steps (step {step})"
            self._trip("loss", "train", saw, "check loss masks and draft vocabulary", "halt")

    def acceptance(self, length: float) -> None:
        """One evaluation of the drafter. Trips after FALLING falls in a row to below FALLEN of the
        best."""
        if not self._limits.enabled:
            return
        self._acceptance.append(length)
        last = self._acceptance[-FALLING - 1 :]
        falls = len(last) == FALLING + 1 and all(b < a for a, b in pairwise(last))
        if falls and length < FALLEN * max(self._acceptance):
            best = max(self._acceptance)
            saw = f"acceptance length fell {FALLING} times in a row, {best:.2f} to {length:.2f}"
            self._trip("acceptance", "train", saw, "stop and keep the best checkpoint", "halt")

    def _share(self, name: str, o: Observation, bad: bool) -> None:
        scopes = ((name, o.provider, ""), (name, "", o.dataset), (name, o.provider, o.dataset))
        for scope in scopes:
            self._tallies[scope].add(bad)
        if not bad:
            return
        limit: float = getattr(self._limits, SHARES[name].limit)
        tally = next(
            (t for s in scopes if (t := self._tallies[s]).over(limit, self._limits.min_samples)),
            None,
        )
        if tally is None:
            return
        wire = SHARES[name]
        bad_now, total = tally.bad, tally.total
        if not exceeds(bad_now, total, limit, self._limits.min_samples):
            bad_now, total = tally.recent_bad, len(tally.recent)
        action = self._blame(name, o, limit)
        if not action:
            return
        where = o.dataset if action == "stop_dataset" else o.provider
        saw = f"{bad_now} of {total} {wire.saw} ({bad_now / total:.1%}, limit {limit * 100:g}%)"
        self._trip(name, where, saw, wire.advice, action)

    def _blame(self, name: str, o: Observation, limit: float) -> str:
        """The dataset, if others are bad on it as well, or if the provider is fine elsewhere and
        nobody is on it; nobody, if this pair is fine and only shares a scope with the culprit."""

        def count(cells: Iterable[tuple[str, str]]) -> tuple[int, int]:
            found = [t for c in cells if (t := self._tallies.get((name, *c)))]
            return sum(t.recent_bad for t in found), sum(len(t.recent) for t in found)

        least = max(4, self._limits.min_samples // 4)
        bad, total = count([(o.provider, o.dataset)])
        others = count((p, o.dataset) for p in self._providers if p != o.provider)
        elsewhere = count((o.provider, d) for d in self._datasets if d != o.dataset)
        if bad <= limit * total:
            return ""
        if exceeds(*others, limit, least, LIKELY):
            return "stop_dataset" if exceeds(bad, total, limit, 1, LIKELY) else ""
        alone = others[1] < least <= elsewhere[1]
        fine_elsewhere = alone and not exceeds(*elsewhere, limit, least, LIKELY)
        return "stop_dataset" if fine_elsewhere else "stop_provider"

    def _offset(self, o: Observation) -> None:
        if o.stop_offset not in (0, -1):
            return
        counts = self._offsets[o.provider]
        counts[-o.stop_offset] += 1
        if sum(counts) >= max(LEARN_SAMPLES, self._limits.min_samples) and is_mixed(*counts):
            saw = f"{counts[0]} replies count the stop token and {counts[1]} do not"
            advice = (
                "two servers answer under one name, or replies lose a token; ignore the provider"
            )
            self._trip("mixed_stop_offset", o.provider, saw, advice, "stop_provider")

    def _cost(self, o: Observation) -> None:
        price = self._prices.get(o.provider)
        if price is None or o.failed:
            return
        self._replies[o.provider] += 1
        if o.kept:
            self._worth[o.provider] += (
                o.prompt_tokens * price.prompt + o.completion_tokens * price.completion
            )
        spent, worth = self._spent["provider", o.provider], self._worth[o.provider]
        factor = self._limits.cost_per_kept_token_factor
        if self._replies[o.provider] >= self._limits.min_samples and spent > factor * worth:
            times = f"{spent / worth:.1f} times" if worth else "nothing kept against"
            saw = f"${spent:.4f} spent, {times} the list price of what was kept (limit {factor:g})"
            advice = "it bills more than its list, or its replies are unusable; ignore the provider"
            self._trip("cost_per_kept_token", o.provider, saw, advice, "stop_provider")

    def _trigger(self, o: Observation) -> None:
        """Pairs of twins, as soon as both have answered; McNemar at min_samples pairs and at every
        doubling.

        Looking at each pair would make 1 in 1,000 come true many times over in a long run.
        """
        if o.triggered is None or not o.twin_id:
            return
        key = (o.dataset, o.twin_id)
        if not o.reference:
            if key in self._local:
                self._pair(o.provider, o.dataset, self._local[key], o.triggered)
            else:
                self._waiting[key].append((o.provider, o.triggered))
        elif key not in self._local:
            self._local[key] = o.triggered
            for provider, triggered in self._waiting.pop(key, ()):
                self._pair(provider, o.dataset, o.triggered, triggered)

    def _pair(self, provider: str, dataset: str, local: bool, api: bool) -> None:
        counts = self._pairs[provider, dataset]
        counts[0] += 1
        counts[1] += local and not api
        counts[2] += api and not local
        pairs, fewer, more = counts
        checks, rest = divmod(pairs, self._limits.min_samples)
        if rest or not checks or checks & (checks - 1):
            return
        p = mcnemar(fewer, more)
        if p >= self._limits.trigger_alpha or provider in self.stopped_providers:
            return
        also = any(d == dataset and q != provider for q, d in self._deviant)
        self._deviant.add((provider, dataset))
        action = "stop_dataset" if also else "stop_provider"
        saw = f"of {pairs} twins {fewer} call a tool only locally and {more} only here (p {p:.1g})"
        advice = "the provider may drop or rewrite `tools`; compare one pair in the probe"
        self._trip("tool_trigger", dataset if also else provider, saw, advice, action)

    def _is_stopped(self, o: Observation) -> bool:
        return o.provider in self.stopped_providers or o.dataset in self.stopped_datasets

    def _trip(self, name: str, scope: str, saw: str, advice: str, action: str) -> None:
        """Book a stop, or turn it into a halt when it is not enough."""
        if self.halted:
            return
        if action == "stop_provider":
            if scope in self.stopped_providers:
                return
            self.stopped_providers.add(scope)
            peers = {
                p for p, reference in self._providers.items() if reference == self._providers[scope]
            }
            last = peers <= self.stopped_providers
        elif action == "stop_dataset":
            if scope in self.stopped_datasets:
                return
            self.stopped_datasets.add(scope)
            last = self._datasets <= self.stopped_datasets
        else:
            last = False
        kind = {"stop_provider": "provider", "stop_dataset": "dataset"}.get(action, "run")
        if kind != "run" and (last or self._stops[name] >= MAX_STOPS):
            why = f"no other {kind} is left" if last else f"{MAX_STOPS} stops were not enough"
            advice, action = f"{advice}; {why}", "halt"
        self._stops[name] += 1
        self.halted = action == "halt"
        cost = self._spent[kind, scope if kind != "run" else ""]
        shown = plain(scope)
        self._pending.append(
            Tripwire(name=name, scope=shown, saw=saw, cost_usd=cost, advice=advice, action=action)
        )


def plain(name: str, limit: int = 60) -> str:
    """A name from outside, safe in a line: no control characters, no line breaks, not long."""
    return "".join(c if c.isprintable() else "?" for c in name)[:limit]


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
