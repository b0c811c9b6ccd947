"""The moving numbers of generate: counted where things happen, read twice a second. Pure but for
its own counts."""

import time
from collections import Counter, deque

from core import events as ev
from core.budget import Budget, Forecast
from core.generate.lanes import Lane, LogHistogram, RollingHistogram

RATE_WINDOW_S = 60.0
ERROR_ROWS = 40
EXAMPLE_CHARS = 200

Snapshot = tuple[float, int, int, int, float, dict[str, tuple[int, int, float]]]


class Board:
    """Counts of one life of a run, earlier lives' outcomes included in `outcomes`."""

    def __init__(self, prompts: int, outcomes: dict[str, int]) -> None:
        self.prompts = prompts
        self.outcomes: Counter[str] = Counter(outcomes)
        self.verdicts: Counter[str] = Counter()
        self.errors: dict[tuple[str, str], tuple[int, float, str]] = {}
        self.sent = self.retries = self.done_here = 0
        self.tokens = self.prompt_tokens = self.completion_tokens = 0
        self.forecast = Forecast()
        self.lag = RollingHistogram()
        self.answer_tokens: dict[str, LogHistogram] = {}
        self._snapshots: deque[Snapshot] = deque()

    def error(self, provider: str, error_class: str, example: str) -> None:
        count = self.errors.get((provider, error_class), (0, 0.0, ""))[0]
        self.errors[provider, error_class] = (count + 1, time.time(), example[:EXAMPLE_CHARS])

    def answered(self, dataset: str, prompt_tokens: int | None, completion_tokens: int) -> None:
        self.prompt_tokens += prompt_tokens or 0
        self.completion_tokens += completion_tokens
        self.answer_tokens.setdefault(dataset, LogHistogram()).add(float(max(completion_tokens, 1)))

    def p99_tokens(self, dataset: str) -> int | None:
        """Running p99 of answer lengths; None before a hundred answers."""
        seen = self.answer_tokens.get(dataset)
        if seen is None or seen.total < 100:
            return None
        return int((seen.quantile(0.99) or 0) * LogHistogram.RATIO) + 1

    def snapshot(self, now: float, lanes: list[Lane], cost_usd: float) -> None:
        rows = {
            lane.backend + lane.name: (lane.done, lane.tokens, lane.spent_usd) for lane in lanes
        }
        self._snapshots.append((now, self.sent, self.done_here, self.tokens, cost_usd, rows))
        while len(self._snapshots) > 2 and now - self._snapshots[0][0] > RATE_WINDOW_S:
            self._snapshots.popleft()

    def rows(self, now: float, lanes: list[Lane]) -> list[ev.ProviderRow]:
        if not self._snapshots:
            return [lane.row(now, (0.0, 0.0, 0.0)) for lane in lanes]
        then = self._snapshots[0]
        span_s = max(now - then[0], 1e-9)
        rows = []
        for lane in lanes:
            done, tokens, usd = then[5].get(lane.backend + lane.name, (0, 0, 0.0))
            rates = (
                (lane.done - done) / span_s * 60,
                (lane.tokens - tokens) / span_s,
                (lane.spent_usd - usd) / span_s * 60,
            )
            rows.append(lane.row(now, rates if span_s > 0.05 else (0.0, 0.0, 0.0)))
        return rows

    def error_rows(self) -> list[ev.ErrorRow]:
        most = sorted(self.errors.items(), key=lambda kv: -kv[1][0])[:ERROR_ROWS]
        return [
            ev.ErrorRow(provider=p, error_class=c, count=n, last_ts=ts, example=example)
            for (p, c), (n, ts, example) in most
        ]

    def stats(
        self, now: float, lanes: list[Lane], budget: Budget, remaining: dict[str, int]
    ) -> ev.Stats:
        """Everything but the gauges that only the dispatcher knows (in flight, queued)."""
        then = self._snapshots[0] if self._snapshots else (now, 0, 0, 0, 0.0, {})
        span_s = now - then[0]
        per_s = 1 / span_s if span_s > 0.05 else 0.0
        cost = self.forecast.cost(budget.cost_usd, remaining)
        left = sum(remaining.values())
        eta = Forecast.time(self.done_here - then[2], span_s, left)
        counts = self.outcomes
        return ev.Stats(
            prompts=self.prompts,
            done=sum(counts[k] for k in ("ok", "rejected", "failed", "refused")),
            ok=counts["ok"],
            rejected=counts["rejected"],
            failed=counts["failed"],
            refused=counts["refused"],
            aborted=counts["aborted"],
            retries=self.retries,
            sent=self.sent,
            sent_per_min=(self.sent - then[1]) * per_s * 60,
            done_per_min=(self.done_here - then[2]) * per_s * 60,
            tokens_per_s=(self.tokens - then[3]) * per_s,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            live_tokens=self.tokens,
            spent_usd=budget.cost_usd,
            reserved_usd=budget.reserved_usd,
            uncertain_usd=budget.uncertain_usd,
            budget_usd=budget.budget_usd,
            usd_per_min=(budget.cost_usd - then[4]) * per_s * 60,
            forecast_usd=cost[0] if cost else None,
            forecast_error_usd=cost[1] if cost else None,
            eta_s=eta[0] if eta else None,
            eta_error_s=eta[1] if eta else None,
            loop_lag_p99_ms=(self.lag.quantile(0.99) or 0.0) * 1000,
            providers=self.rows(now, lanes),
            errors=self.error_rows(),
            verdicts=dict(self.verdicts),
        )
