"""What a provider does the same way in every reply, learned from clean replies and then held fixed.

Stop token: some providers count it, some do not, so billed - rebuilt is 0 or -1 (case C49's gate).
Leading space: Kimi's thinking nearly always starts with one; a provider that never shows one trims
it (case C49). Pure and JSON-able; judging reads, `observe` writes.
"""

import msgspec

from core.schema import Sample

LEARN_SAMPLES = 50
MIXED_SHARE = 0.1
REFERENCE = "\u0000exact"
"""Key of the samples with server ids, which show the model itself."""
_TRIM_SAMPLES, _TRIM_REFERENCE_SHARE = 20, 0.9


class StopOffsets(msgspec.Struct, kw_only=True):
    """`seen`: per provider, clean replies that counted the stop token and that did not. `frozen`:
    the offset held. `mixed`: providers that do both, so that their counts prove nothing."""

    seen: dict[str, list[int]] = {}
    frozen: dict[str, int] = {}
    mixed: set[str] = set()
    leading: dict[str, list[int]] = {}
    """Per provider: replies whose thinking starts with a space, and all with thinking."""

    def allowed(self, provider: str) -> tuple[int, ...]:
        """Values of billed - rebuilt that count as equal."""
        if provider in self.mixed:
            return ()
        if provider in self.frozen:
            return (self.frozen[provider],)
        return (0, -1)

    def settle(self, minimum: int = 8) -> None:
        """Freeze what has been seen at least `minimum` times: there will be no more."""
        for provider, seen in self.seen.items():
            if provider not in self.frozen and sum(seen) >= minimum:
                self._freeze(provider, seen)

    def trims(self, provider: str) -> bool:
        """True once the provider has never shown the space that the reference nearly always has."""
        led, total = self.leading.get(REFERENCE, (0, 0))
        if total < _TRIM_SAMPLES or led < _TRIM_REFERENCE_SHARE * total:
            return False
        led, total = self.leading.get(provider, (0, 0))
        return total >= _TRIM_SAMPLES and led == 0

    def _freeze(self, provider: str, seen: list[int]) -> None:
        if min(seen) > MIXED_SHARE * sum(seen):
            self.mixed.add(provider)
        else:
            self.frozen[provider] = 0 if seen[0] >= seen[1] else -1


def provider_key(sample: Sample) -> str:
    return sample.provider or sample.backend


def observe(offsets: StopOffsets, sample: Sample) -> None:
    """Learn from one judged sample."""
    key = REFERENCE if sample.verdict == "exact" else provider_key(sample)
    if sample.leading_space is not None and sample.verdict != "rejected":
        led = offsets.leading.setdefault(key, [0, 0])
        led[0] += sample.leading_space
        led[1] += 1
    if sample.verdict != "consistent" or key in offsets.frozen or key in offsets.mixed:
        return
    if sample.billed_tokens is None or sample.rebuilt_tokens is None:
        return
    seen = offsets.seen.setdefault(key, [0, 0])
    seen[sample.rebuilt_tokens - sample.billed_tokens] += 1
    if sum(seen) >= LEARN_SAMPLES:
        offsets._freeze(key, seen)
