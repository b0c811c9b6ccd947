"""What a provider does the same way in every reply, learned from clean replies and then held fixed.

Stop token: some providers count it, some do not, so billed - rebuilt is 0 or -1 (case C49's gate).
Thinking: `reasoning_tokens` may or may not count `</think>`, or be somebody's estimate. Habits of
the model that never come through (see `habits`). Pure and JSON-able; judging reads, `observe`
writes.
"""

import msgspec

from core.conventions import (
    FEW_SAMPLES,
    LEARN_SAMPLES,
    MIXED_SHARE,
    is_mixed,
    is_suspect,
    lost_habits,
    stop_offset,
)
from core.schema import Sample

REFERENCE = "\u0000exact"
"""Key of the samples with server ids, which show the model itself."""
_UNUSABLE_FIT = 0.25
"""A provider whose reasoning counts fit less often than this does not count the model's tokens."""


class StopOffsets(msgspec.Struct, kw_only=True):
    """`seen`: per provider, clean replies by billed - rebuilt. `frozen`: the offset held. `mixed`:
    providers whose counts prove nothing: they do both, or something else, or are seldom clean."""

    seen: dict[str, dict[int, int]] = {}
    suspect: dict[str, int] = {}
    """Per provider: replies that may fit a count by accident, from which no offset is learned."""
    frozen: dict[str, int] = {}
    mixed: set[str] = set()
    thoughts: dict[str, list[int]] = {}
    """Per provider: replies whose reasoning count is that of the text, one more, neither."""
    habits: dict[str, dict[str, dict[str, list[int]]]] = {}
    """Per provider, dataset and habit: replies that show it, and that could."""
    lost: dict[str, set[str]] = {}

    def allowed(self, provider: str) -> tuple[int, ...]:
        """Values of billed - rebuilt that count as equal."""
        if provider in self.mixed:
            return ()
        if provider in self.frozen:
            return (self.frozen[provider],)
        return (0, -1)

    def thinking(self, provider: str) -> tuple[int, ...] | None:
        """Values of reported - rebuilt reasoning tokens that count as equal; None: it reports
        something else, which proves nothing."""
        plain, closed, other = self.thoughts.get(provider, (0, 0, 0))
        fit = plain + closed
        if fit + other < FEW_SAMPLES:
            return (0, 1)
        if fit < _UNUSABLE_FIT * (fit + other):
            return None
        if min(plain, closed) > MIXED_SHARE * fit:
            return (0, 1)
        return (0,) if plain >= closed else (1,)

    def settle(self) -> None:
        """There will be no more: hold what was seen, however little, and compare habits once more.
        A provider that was never seen clean stays open."""
        for provider, seen in self.seen.items():
            if provider not in self.frozen:
                self._freeze(provider, seen)
        for provider in self.habits:
            self._compare(provider)

    def _freeze(self, provider: str, seen: dict[int, int]) -> None:
        counted, left_out = seen.get(0, 0), seen.get(-1, 0)
        foreign = max(seen.values()) > max(counted, left_out)
        suspect = self.suspect.get(provider, 0) > counted + left_out
        if is_mixed(counted, left_out) or foreign or suspect:
            self.mixed.add(provider)
        else:
            self.frozen[provider] = 0 if counted >= left_out else -1

    def _compare(self, provider: str) -> None:
        if provider != REFERENCE and (model := self.habits.get(REFERENCE)):
            self.lost[provider] = set(lost_habits(model, self.habits[provider]))


def provider_key(sample: Sample) -> str:
    return sample.provider or sample.backend


def observe(offsets: StopOffsets, sample: Sample) -> None:
    """Learn from one judged sample."""
    key = REFERENCE if sample.verdict == "exact" else provider_key(sample)
    if sample.habits and sample.verdict != "rejected":
        seen = offsets.habits.setdefault(key, {}).setdefault(sample.dataset, {})
        for name, shown in sample.habits.items():
            count = seen.setdefault(name, [0, 0])
            count[0] += shown
            count[1] += 1
        offsets._compare(key)
    consistent = sample.verdict == "consistent"
    if sample.reasoning_off is not None and (consistent or "reasoning_count" in sample.flags):
        off = sample.reasoning_off
        offsets.thoughts.setdefault(key, [0, 0, 0])[off if off in (0, 1) else 2] += 1
    off_by = stop_offset(sample)
    if off_by is None or key in offsets.frozen or key in offsets.mixed:
        return
    if is_suspect(sample):
        offsets.suspect[key] = offsets.suspect.get(key, 0) + 1
        return
    stop = offsets.seen.setdefault(key, {})
    stop[off_by] = stop.get(off_by, 0) + 1
    if sum(stop.values()) >= LEARN_SAMPLES:
        offsets._freeze(key, stop)
