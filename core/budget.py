"""The books of a run in flight. Pure: no clock, no file.

Promises: `spent + reserved <= budget` at every moment, with every request in flight reserved at its
worst case, so the bill cannot pass the budget as long as providers bill what their prices say.
Money is kept in whole picodollars: sums are exact. Knows amounts and keys, nothing about
providers.

Two columns: `cost` is what the provider of the account bills (the books), `cap` is what counts
against the budget (a BYOK request bills 0 here and its upstream cost elsewhere, case C40)."""

import math

Key = tuple[str, int]
PICO = 1_000_000_000_000


def to_pico(usd: float) -> int:
    return round(usd * PICO)


def to_pico_up(usd: float) -> int:
    """Reservations round up: the books may never be below the bill."""
    return math.ceil(usd * PICO)


class Budget:
    """One run's money. Keys are (prompt_id, attempt)."""

    def __init__(self, budget_usd: float) -> None:
        self._budget = to_pico(budget_usd)
        self._spent = 0
        self._cost = 0
        self._uncertain = 0
        self._reserved = 0
        self._worst_extra = 0
        self._open: dict[Key, tuple[int, int]] = {}

    @property
    def budget_usd(self) -> float:
        return self._budget / PICO

    @property
    def spent_usd(self) -> float:
        """What counts against the budget so far (cap column)."""
        return self._spent / PICO

    @property
    def cost_usd(self) -> float:
        """What was billed to the account (cost column), uncertain bookings included."""
        return self._cost / PICO

    @property
    def reserved_usd(self) -> float:
        return self._reserved / PICO

    @property
    def uncertain_usd(self) -> float:
        return self._uncertain / PICO

    @property
    def exposure_usd(self) -> float:
        """The most that can be spent when every open request costs its worst case. Equal to spent +
        reserved when reservations are worst cases; the bound of a faster mode otherwise."""
        return (self._spent + self._reserved + self._worst_extra) / PICO

    def earlier(self, cost_usd: float, cap_usd: float, uncertain_usd: float = 0.0) -> None:
        """Book what earlier lives of the run spent."""
        self._cost += to_pico(cost_usd)
        self._spent += to_pico(cap_usd)
        self._uncertain += to_pico(uncertain_usd)

    def fits(self, usd: float) -> bool:
        amount = to_pico_up(usd)
        return amount == 0 or self._spent + self._reserved + amount <= self._budget

    def could_ever_fit(self, usd: float) -> bool:
        """Whether it would fit if everything open were free."""
        amount = to_pico_up(usd)
        return amount == 0 or self._spent + amount <= self._budget

    def reserve(self, key: Key, usd: float, worst_usd: float | None = None) -> bool:
        """Set money aside before a request leaves. False: it does not fit, nothing changed.
        `worst_usd`: the true worst case when `usd` is only a likely one."""
        if key in self._open:
            raise ValueError(f"{key} is already reserved")
        if not self.fits(usd):
            return False
        amount = to_pico_up(usd)
        extra = max(0, to_pico_up(worst_usd) - amount) if worst_usd is not None else 0
        self._open[key] = (amount, extra)
        self._reserved += amount
        self._worst_extra += extra
        return True

    def adopt(self, key: Key, usd: float) -> None:
        """A dispatch of an earlier life: reserved whatever the budget says, because it may have
        been billed."""
        self._open[key] = (to_pico_up(usd), 0)
        self._reserved += to_pico_up(usd)

    def settle(self, key: Key, cost_usd: float, cap_usd: float | None = None) -> None:
        """The bill is known: the reservation is replaced by it."""
        self._release(key)
        self._cost += to_pico(cost_usd)
        self._spent += to_pico(cost_usd if cap_usd is None else cap_usd)

    def settle_free(self, key: Key) -> None:
        self._release(key)

    def settle_uncertain(self, key: Key) -> float:
        """Never found out: the worst case is booked and stays marked. Returns it (USD)."""
        amount = sum(self._release(key))
        self._cost += amount
        self._spent += amount
        self._uncertain += amount
        return amount / PICO

    def correct(self, cost_usd: float, cap_usd: float, proven_usd: float) -> None:
        """The account has proven what uncertain bookings really cost: both columns by the
        difference, and `proven_usd` is uncertain no more."""
        self._cost += to_pico(cost_usd)
        self._spent += to_pico(cap_usd)
        self._uncertain -= to_pico(proven_usd)

    def worst_of(self, key: Key) -> float:
        """USD that `settle_uncertain` would book."""
        return sum(self._open[key]) / PICO

    def _release(self, key: Key) -> tuple[int, int]:
        amount, extra = self._open.pop(key)
        self._reserved -= amount
        self._worst_extra -= extra
        return amount, extra


class Forecast:
    """Final cost and time from what has finished, stratified by dataset because their costs differ.

    Cost of the rest = sum over datasets of remaining x mean, error = sqrt(sum of remaining x
    variance + remaining^2 x variance / seen): the spread of the rest plus that of the mean. One
    standard error each."""

    def __init__(self) -> None:
        self._rows: dict[str, list[float]] = {}

    def observe(self, dataset: str, usd: float) -> None:
        row = self._rows.setdefault(dataset, [0.0, 0.0, 0.0])
        row[0] += 1
        delta = usd - row[1]
        row[1] += delta / row[0]
        row[2] += delta * (usd - row[1])

    def mean_usd(self, dataset: str) -> float | None:
        row = self._rows.get(dataset)
        return row[1] if row else None

    def cost(self, spent_usd: float, remaining: dict[str, int]) -> tuple[float, float] | None:
        """(forecast, standard error) in USD; None before anything has finished."""
        if not self._rows:
            return None
        total = sum(row[0] for row in self._rows.values())
        overall = sum(row[0] * row[1] for row in self._rows.values()) / total
        rest = variance = 0.0
        for dataset, left in remaining.items():
            seen, mean, squares = self._rows.get(dataset, (0.0, overall, 0.0))
            rest += left * mean
            spread = squares / (seen - 1) if seen > 1 else mean * mean
            variance += left * spread + left * left * spread / max(seen, 1.0)
        return spent_usd + rest, math.sqrt(variance)

    @staticmethod
    def time(done: int, seconds: float, remaining: int) -> tuple[float, float] | None:
        """(seconds left, standard error) from the rate of the last window; arrivals taken as
        Poisson."""
        if done <= 0 or seconds <= 0:
            return None
        left_s = remaining * seconds / done
        return left_s, left_s / math.sqrt(done)
