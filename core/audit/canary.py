"""The canary: a few rollouts per provider and dataset must pass before the rest may leave. Pure.

Only the `size` first outcomes of a (provider, dataset) are judged here; after that the tripwires
watch. A share fails when its Wilson interval lies above the tripwire's limit at one-sided 95 %,
which is sooner than a wire trips: nothing much has been paid yet. It is a share of the `size`
rollouts that the config asks for: those that have not come, or that say nothing about a wire, are
taken as good. So one bad reply of one never fails a canary, and one that can no longer pass fails
before all of it has come in.
"""

from collections import defaultdict

from core import config
from core.audit.tripwires import LIKELY, SHARES, Observation, exceeds, plain
from core.events import Canary


class Canaries:
    """`observe` returns a verdict when it falls. `size` 0: no canary, no verdict."""

    def __init__(self, limits: config.Tripwires, size: int) -> None:
        self._limits = limits
        self._size = size
        self._seen: dict[tuple[str, str], int] = defaultdict(int)
        self._bad: dict[tuple[str, str], dict[str, list[int]]] = defaultdict(
            lambda: {name: [0, 0] for name in SHARES}
        )
        self.verdicts: dict[tuple[str, str], bool] = {}

    def observe(self, o: Observation) -> Canary | None:
        """One outcome; the verdict once, when it is known."""
        key = (o.provider, o.dataset)
        if self._size == 0 or key in self.verdicts:
            return None
        self._seen[key] += 1
        for name, wire in SHARES.items():
            if (bad := getattr(o, wire.field)) is not None:
                count = self._bad[key][name]
                count[0] += bad
                count[1] += 1
        if failing := self._failing(key):
            return self._settle(key, False, failing)
        if self._seen[key] >= self._size:
            return self._settle(key, True, f"{self._seen[key]} rollouts, nothing above its limit")
        return None

    def _failing(self, key: tuple[str, str]) -> str:
        """What fails even if all others of the canary are good; empty when nothing does."""
        for name, (bad, counted) in self._bad[key].items():
            limit: float = getattr(self._limits, SHARES[name].limit)
            if bad and exceeds(bad, self._size, limit, 1, LIKELY):
                wire = SHARES[name]
                return f"{bad} of {counted} {wire.saw} (limit {limit * 100:g}%): {wire.advice}"
        return ""

    def _settle(self, key: tuple[str, str], passed: bool, detail: str) -> Canary:
        self.verdicts[key] = passed
        del self._bad[key]
        return Canary(provider=plain(key[0]), dataset=key[1], passed=passed, detail=detail)
