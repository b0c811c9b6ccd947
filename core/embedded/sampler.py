"""Continuous batching: sequences join and leave at any step, one thread, one forward per token of
the whole batch.

A request's draws come from its own counter-based generator, so its sample does not depend on what
else is in the batch, as far as float32 matrix products of other shapes agree. Knows nothing about
text or HTTP.

    B sequences  V vocabulary
"""

import threading
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.embedded.jobs import Ask, Sampled
from core.embedded.model import Llama

PREFILL_TOKENS = 2_048
"""Padded prompt tokens of one prefill: bounds how long running sequences wait for newcomers."""
NOISE_SCALE = 0.7
"""Standard deviation of the fixed logit noise that stands for another model's weights."""
_TOP_K = 64
"""Candidates that nearly always hold the nucleus; a full sort is the fallback."""


def uniforms(
    keys_B: npt.NDArray[np.uint64], steps_B: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Draw number `step` of each key, in [0, 1). SplitMix64 (Steele, Lea, Flood 2014) as a
    counter-based generator."""
    with np.errstate(over="ignore"):
        z = keys_B + (steps_B + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return np.asarray((z >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def nucleus(probs_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """Zero what lies outside the smallest set of tokens whose mass reaches top_p. The best token
    always stays."""
    k = min(_TOP_K, probs_BV.shape[1])
    best = probs_BV.topk(k, -1).values
    if k < probs_BV.shape[1] and bool((best.sum(-1) < top_p_B).any()):
        best = probs_BV.sort(-1, descending=True).values
    before = best.cumsum(-1) - best
    kept = (before < top_p_B[:, None]).sum(-1).clamp_(min=1)
    floor_B1 = best.gather(-1, (kept - 1)[:, None])
    return torch.where(probs_BV >= floor_B1, probs_BV, 0.0)


def draw(logits_BV: Tensor, temperature_B: Tensor, top_p_B: Tensor, uniform_B: Tensor) -> Tensor:
    """Inverse-CDF sampling in vocabulary order; temperature 0 is argmax."""
    greedy_B = logits_BV.argmax(-1)
    if not bool((temperature_B > 0).any()):
        return greedy_B
    probs = torch.softmax(logits_BV / temperature_B.clamp(min=1e-6)[:, None], -1)
    if bool((top_p_B < 1).any()):
        probs = nucleus(probs, top_p_B)
    cdf = probs.double().cumsum(-1)
    # 1 - 1e-12: rounding must not carry the draw past the last token that has any mass.
    point = (uniform_B * (1 - 1e-12)).unsqueeze(-1) * cdf[:, -1:]
    drawn_B = torch.searchsorted(cdf, point, right=True).squeeze(-1)
    return torch.where(temperature_B > 0, drawn_B, greedy_B)


class Batch:
    """The synchronous core: `add`, then `step` until nothing is left. `step` returns the sequences
    that moved."""

    def __init__(self, model: Llama, slots: int = 64) -> None:
        self.model = model
        self.cache = model.new_cache(slots)
        self.waiting: deque[Sampled] = deque()
        self.running: list[Sampled] = []
        self._lengths = torch.zeros(slots, dtype=torch.int64)
        self._tokens = torch.zeros(slots, dtype=torch.int64)
        self._temperature = torch.zeros(slots)
        self._top_p = torch.ones(slots)
        self._noisy = torch.zeros(slots)
        self._keys = np.zeros(slots, dtype=np.uint64)
        self._steps = np.zeros(slots, dtype=np.uint64)
        seeded = torch.Generator().manual_seed(0)
        self._noise = torch.randn(model.config.vocab_size, generator=seeded) * NOISE_SCALE

    def add(self, sampled: Sampled) -> None:
        """A prompt that leaves no room for a token ends at once as `length`."""
        self.waiting.append(sampled)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running)

    @torch.inference_mode()
    def step(self) -> list[Sampled]:
        moved = self._leave()
        if self.running:
            n = len(self.running)
            logits = self.model.decode(self.cache, self._tokens[:n], self._lengths[:n])
            self._lengths[:n] += 1
            self._append(0, logits)
            moved += self.running
        for group, first in self._join(moved):
            logits = self.model.prefill(self.cache, first, [s.ask.ids for s in group])
            self._append(first, logits)
            moved += group
        self._evict()
        return moved

    def _leave(self) -> list[Sampled]:
        """Drop cancelled sequences, waiting or running."""
        gone = [s for s in self.waiting if s.cancelled]
        if gone:
            self.waiting = deque(s for s in self.waiting if not s.cancelled)
        for sampled in self.running:
            if sampled.cancelled:
                sampled.finish = "abort"
                gone.append(sampled)
        for sampled in gone:
            sampled.finish = "abort"
        self._evict()
        return gone

    def _join(self, moved: list[Sampled]) -> list[tuple[list[Sampled], int]]:
        """Take waiting sequences into free slots, in groups of similar length within the prefill
        allowance."""
        taken: list[Sampled] = []
        tokens = 0
        while self.waiting and len(self.running) + len(taken) < self.cache.slots:
            prompt = len(self.waiting[0].ask.ids)
            if taken and tokens + prompt > PREFILL_TOKENS:
                break
            sampled = self.waiting.popleft()
            if not 0 < prompt < self.cache.max_length or sampled.ask.max_tokens < 1:
                sampled.finish = "length"
                moved.append(sampled)
                continue
            tokens += prompt
            taken.append(sampled)
        groups: list[list[Sampled]] = []
        for sampled in sorted(taken, key=lambda s: len(s.ask.ids)):
            if groups and len(sampled.ask.ids) <= 1.5 * len(groups[-1][0].ask.ids):
                groups[-1].append(sampled)
            else:
                groups.append([sampled])
        placed = []
        for group in groups:
            placed.append((group, len(self.running)))
            for sampled in group:
                self._seat(sampled)
        return placed

    def _seat(self, sampled: Sampled) -> None:
        slot, ask = len(self.running), sampled.ask
        self.running.append(sampled)
        self._lengths[slot] = len(ask.ids)
        self._temperature[slot] = ask.temperature
        self._top_p[slot] = ask.top_p
        self._noisy[slot] = float(ask.noisy)
        self._keys[slot] = ask.key
        self._steps[slot] = 0

    def _append(self, first: int, logits_BV: Tensor) -> None:
        """Sample one token for each of slots first.. and mark what has ended."""
        rows = slice(first, first + len(logits_BV))
        if bool(self._noisy[rows].any()):
            logits_BV = logits_BV + self._noisy[rows, None] * self._noise
        uniform = torch.from_numpy(uniforms(self._keys[rows], self._steps[rows]))
        tokens_B = draw(logits_BV, self._temperature[rows], self._top_p[rows], uniform)
        chosen = logits_BV.gather(-1, tokens_B[:, None]).squeeze(-1)
        logprobs = (chosen - torch.logsumexp(logits_BV, -1)).tolist()
        self._tokens[rows] = tokens_B
        self._steps[rows] += np.uint64(1)
        limit = self.cache.max_length
        for sampled, token, logprob in zip(
            self.running[rows], tokens_B.tolist(), logprobs, strict=True
        ):
            ask = sampled.ask
            sampled.out.append(token)
            sampled.logprobs.append(logprob)
            if token in ask.stop_ids:
                sampled.finish = "stop"
            elif len(sampled.out) >= ask.max_tokens or len(ask.ids) + len(sampled.out) >= limit:
                sampled.finish = "length"

    def _evict(self) -> None:
        """Free the slots of finished sequences; the last sequence moves into the gap."""
        for slot in range(len(self.running) - 1, -1, -1):
            if self.running[slot].finish is None:
                continue
            last = len(self.running) - 1
            moving = self.running.pop()
            if slot == last:
                continue
            self.running[slot] = moving
            self.cache.move(last, slot, int(self._lengths[last]))
            for state in (self._lengths, self._tokens, self._temperature, self._top_p, self._noisy):
                state[slot] = state[last].clone()
            self._keys[slot], self._steps[slot] = self._keys[last], self._steps[last]


def complete(model: Llama, asks: list[Ask], slots: int = 64) -> list[Sampled]:
    """Sample all `asks` to their end in this thread; results in the order given."""
    batch = Batch(model, slots)
    sequences = [Sampled(ask, listening=False) for ask in asks]
    for sampled in sequences:
        batch.add(sampled)
    while not batch.idle:
        batch.step()
    return sequences


class Sampler:
    """A Batch on its own thread. `notify` is called there, once a step, with the sequences that
    moved."""

    def __init__(
        self,
        model: Llama,
        notify: Callable[[list[Sampled]], None],
        *,
        slots: int = 64,
        threads: int = 0,
    ) -> None:
        self._batch = Batch(model, slots)
        self._notify = notify
        self._threads = threads
        self._inbox: deque[Sampled] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._paused = False
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def submit(self, sampled: Sampled) -> None:
        """Raises RuntimeError after `close`, or after the thread has failed."""
        with self._wake:
            if self._closing:
                raise RuntimeError("the sampler has ended")
            self._inbox.append(sampled)
            self._wake.notify()

    def pause(self, paused: bool) -> None:
        with self._wake:
            self._paused = paused
            self._wake.notify()

    def load(self) -> tuple[int, int]:
        """(running, waiting)"""
        return len(self._batch.running), len(self._batch.waiting) + len(self._inbox)

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _ready(self) -> bool:
        return self._closing or (not self._paused and bool(self._inbox or not self._batch.idle))

    def _run(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        try:
            while self._turn():
                pass
        except BaseException:
            # Nobody would hear of these again: end them, then let the thread's hook report.
            with self._wake:
                self._closing = True
            lost = [*self._batch.running, *self._batch.waiting, *self._inbox]
            for sampled in lost:
                sampled.finish = "abort"
            self._notify(lost)
            raise

    def _turn(self) -> bool:
        """Wait for work and do one step of it; False when closing."""
        with self._wake:
            self._wake.wait_for(self._ready)
            if self._closing:
                return False
            while self._inbox:
                self._batch.add(self._inbox.popleft())
        moved = self._batch.step()
        self._notify([s for s in moved if s.listening or s.finish is not None])
        return True
