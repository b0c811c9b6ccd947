"""How many requests one provider may hold, and when the next may leave. Pure: the caller brings the
clock and the dice.

Promises: no request before a `Retry-After` has passed, for any worker; one cut per round however
many replies of that round were refused; a provider that keeps failing is left alone and then probed
with one request. Knows no socket.

Growth: a ramp in time while nothing has resisted (so that 2,000 in flight are reached in `ramp_s`,
not in rounds of a minute each), then additive increase and multiplicative decrease (Chiu and Jain
1989), as TCP does it."""

from collections.abc import Callable
from typing import Literal

BACKOFF_FLOOR_S = 1.0
BACKOFF_CAP_S = 60.0
CUT_THROTTLED = 0.7
CUT_PAYMENT = 0.5
CUT_SLOW = 0.9
SLOW_FACTOR = 4.0
SLOW_SLACK_S = 1.0
PACE_TOKENS = 100
BREAKER_WINDOW = 100
BREAKER_MIN = 10
BREAKER_CAP_S = 120.0

State = Literal["closed", "open", "half_open"]


def backoff_s(failures: int, dice: float) -> float:
    """Full jitter over an exponential window (AWS architecture blog, 2015), never under the floor.

    `failures` so far (0 for the first), `dice` uniform in [0, 1). Window 2, 4, 8 ... seconds, at
    most 60."""
    window_s = min(BACKOFF_CAP_S, 2.0 * 2.0 ** min(failures, 16))
    return BACKOFF_FLOOR_S + dice * (window_s - BACKOFF_FLOOR_S)


class Breaker:
    """Circuit breaker over the last 100 attempts. Throttling is not failure and never reaches it.
    What left before it opened says nothing new when it ends: neither for the probe nor
    afterwards."""

    def __init__(self, error_rate: float) -> None:
        self.error_rate = error_rate
        self.state: State = "closed"
        self.opened = 0
        self._until = 0.0
        self._opened_at = float("-inf")
        self._ring: list[bool] = []
        self._at = 0
        self._probing = False

    def may_send(self, now: float) -> bool:
        if self.state == "closed":
            return True
        if self.state == "open":
            return now >= self._until
        return not self._probing

    def wait_s(self, now: float) -> float:
        return max(0.0, self._until - now) if self.state == "open" else 0.0

    def sent(self, now: float) -> None:
        if self.state == "open" and now >= self._until:
            self.state = "half_open"
        if self.state == "half_open":
            self._probing = True

    def record(self, ok: bool, now: float, sent_at: float, dice: float) -> None:
        """One attempt's end. In the half-open state the probe alone decides."""
        if sent_at < self._opened_at:
            return
        if self.state == "half_open":
            if ok:
                self._close()
            else:
                self._open(now, dice)
            return
        if self.state == "open":
            return
        if len(self._ring) < BREAKER_WINDOW:
            self._ring.append(ok)
        else:
            self._ring[self._at] = ok
            self._at = (self._at + 1) % BREAKER_WINDOW
        failed = self._ring.count(False)
        if len(self._ring) >= BREAKER_MIN and failed > self.error_rate * len(self._ring):
            self._open(now, dice)

    def forget_probe(self, sent_at: float) -> None:
        """An attempt ended without telling anything (cancelled, throttled): if it was the probe,
        another may be sent."""
        if sent_at >= self._opened_at:
            self._probing = False

    def _open(self, now: float, dice: float) -> None:
        wait_s = min(BREAKER_CAP_S, 5.0 * 2.0 ** min(self.opened, 8))
        self.opened += 1
        self.state, self._probing, self._opened_at = "open", False, now
        self._until = now + wait_s * (0.5 + dice / 2)

    def _close(self) -> None:
        self.state, self._probing, self.opened = "closed", False, 0
        self._ring, self._at = [], 0


class Patience:
    """When a backend is given up that has not answered once since the start: a wrong address, a
    broken deployment. Answers may take minutes, so nobody is given up while a request is open;
    throttling is an answer of a kind and starts the clock again."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._since: float | None = None
        self._answered = False
        self.failures = 0

    def answered(self) -> None:
        self._answered = True

    def throttled(self) -> None:
        self._since = None

    def failed(self, now: float, in_flight: int) -> float | None:
        """Seconds without one answer, when it is time to give up; None: go on."""
        self.failures += 1
        if self._since is None:
            self._since = now
        if self._answered or in_flight or now - self._since < self._start_s:
            return None
        return now - self._since


class Refusals:
    """When a provider is given up that refuses whatever it is asked: the model is gone, the key may
    not use it.

    A refusal comes at once and an answer in its own time, so with hundreds in flight some refusals
    in a row show little: after three, of more than one prompt, the provider is in doubt, nothing
    more leaves while somebody is open there who may still be answered, and one answer among those
    clears it. Whoever left before the row began says nothing: a stream goes on after its model was
    withdrawn. A prompt that nobody would serve uses up its own attempts instead."""

    IN_A_ROW = 3
    TOGETHER_S = 1.0
    """Requests that left so long before the first refused one left at the same time."""

    def __init__(self) -> None:
        self._count = 0
        self._prompts: set[str] = set()
        self._since = 0.0
        self._older = 0

    @property
    def in_doubt(self) -> bool:
        return self._count >= self.IN_A_ROW and len(self._prompts) > 1

    def holds(self, in_flight: int) -> bool:
        """Whether the next request must wait for one of those in flight."""
        return self.in_doubt and in_flight > self._older

    def answered(self, left_at: float) -> bool:
        """Somebody was, or begins to be. Returns whether that ends a doubt."""
        if not self._count or left_at < self._since:
            return False
        in_doubt = self.in_doubt
        self._count = self._older = 0
        self._prompts.clear()
        return in_doubt

    def ended(self, left_at: float) -> None:
        """A request is in flight no more, whatever came of it."""
        self._older -= self._count > 0 and left_at < self._since

    def refused(
        self, prompt_id: str, left_at: float, in_flight: int, older: Callable[[float], int]
    ) -> bool:
        """Whether to give up. `in_flight`: requests that are still open at the provider; `older`:
        how many of them left before a moment."""
        if not self._count:
            self._since = left_at - self.TOGETHER_S
            self._older = older(self._since)
        self._count += 1
        self._prompts.add(prompt_id)
        return self.in_doubt and in_flight <= self._older


def waited_s(total_s: float, ttft_s: float | None, tokens: int | None) -> float | None:
    """What a queue at the provider shows in: the time to the first token; of a reply that came
    whole, the time of its 100 tokens, so that long answers are not slow ones. None: nothing said
    how long the answer is."""
    if ttft_s is not None or tokens is None:
        return ttft_s
    return total_s * PACE_TOKENS / (tokens + PACE_TOKENS)


class Limit:
    """Slots of one provider.

    `ceiling` is the configured most, `ramp_s` the time from `start` to the ceiling while nothing
    resists."""

    def __init__(
        self, ceiling: int, error_rate: float = 0.5, start: int = 64, ramp_s: float = 3.0
    ) -> None:
        self.ceiling = max(1, ceiling)
        self.in_flight = 0
        self.throttles = 0
        self.breaker = Breaker(error_rate)
        self.hold_until = 0.0
        self._width = float(min(self.ceiling, max(1, start)))
        self._ramp_per_s = (self.ceiling - self._width) / ramp_s if ramp_s > 0 else 0.0
        self._ramp_at: float | None = None
        self._resisted = False
        self._cut_at = self._starved_at = float("-inf")
        self._streak = 0
        self._wait_fast: float | None = None
        self._wait_base: float | None = None

    @property
    def width(self) -> int:
        return max(1, int(self._width))

    def may_send(self, now: float) -> bool:
        self._ramp(now)
        return self.in_flight < self.width and now >= self.hold_until and self.breaker.may_send(now)

    def wait_s(self, now: float) -> float | None:
        """Seconds until time alone may open the gate; None when a reply must come first."""
        wait_s = max(self.hold_until - now, self.breaker.wait_s(now))
        if wait_s > 0:
            return wait_s
        if self.in_flight >= self.width and not self._resisted and self._width < self.ceiling:
            return max(0.01, 1.0 / max(self._ramp_per_s, 1e-3)) if self._ramp_per_s else None
        return None

    def sent(self, now: float) -> None:
        self.in_flight += 1
        self.breaker.sent(now)

    def ended(self) -> None:
        self.in_flight -= 1

    def succeeded(
        self, now: float, sent_at: float, dice: float, wait_s: float | None = None
    ) -> None:
        """`wait_s`: how long its sender waited (`waited_s`)."""
        self._streak = 0
        self.breaker.record(True, now, sent_at, dice)
        if wait_s is not None and self._slow(wait_s):
            self._cut(now, CUT_SLOW, sent_at)
        elif self._resisted and self.in_flight >= self._width * 0.5:
            step = max(1.0, self.ceiling * 0.02)  # per round of `width` replies
            self._width = min(float(self.ceiling), self._width + step / self._width)

    def throttled(
        self, now: float, sent_at: float, retry_after_s: float | None, dice: float
    ) -> None:
        """429 or 503. Everyone waits: as long as the reply says (and up to a tenth more, so that
        not all come back in one instant), else back-off; a wait of nothing, or until a moment that
        has passed, says nothing. Only the first of a round cuts the width and lengthens the
        back-off."""
        self.throttles += 1
        if retry_after_s:
            wait_s = retry_after_s * (1.0 + 0.1 * dice)
        else:
            wait_s = backoff_s(self._streak, dice)
        self.hold_until = max(self.hold_until, now + wait_s)
        if self._cut(now, CUT_THROTTLED, sent_at):
            self._streak += 1

    def payment_required(
        self, now: float, sent_at: float, retry_after_s: float | None, dice: float
    ) -> None:
        """402: the balance does not cover what is open. Halve the window; money comes back as
        replies end, and not before the reply says."""
        wait_s = max(retry_after_s or 0.0, backoff_s(self._streak, dice))
        self.hold_until = max(self.hold_until, now + wait_s)
        if self._cut(now, CUT_PAYMENT, sent_at):
            self._streak += 1

    def failed(self, now: float, sent_at: float, dice: float) -> None:
        self.breaker.record(False, now, sent_at, dice)

    def unknown(self, sent_at: float) -> None:
        """An attempt ended without saying anything about the provider (cancelled, our own
        descriptor limit)."""
        self.breaker.forget_probe(sent_at)

    def queue_seen(self, now: float, waiting: int) -> None:
        """The server's own queue: more than a quarter of the width waiting there means that we send
        too much."""
        if waiting > max(4, self._width / 4):
            self._cut(now, CUT_SLOW, now)

    def halve_ceiling(self, now: float, sent_at: float) -> None:
        """Our own descriptors ran out (EMFILE): the configured ceiling was too high for this
        process. Once a round, and never again at once, because others may hold what is missing."""
        self.hold_until = max(self.hold_until, now + BACKOFF_FLOOR_S)
        if sent_at <= self._starved_at:
            return
        self._starved_at = now
        self.ceiling = max(1, min(self.ceiling, max(1, self.in_flight)) // 2)
        self._width = min(self._width, float(self.ceiling))

    def _ramp(self, now: float) -> None:
        if self._ramp_at is None:
            self._ramp_at = now
        if not self._resisted and self._width < self.ceiling:
            grown = self._width + self._ramp_per_s * (now - self._ramp_at)
            self._width = min(float(self.ceiling), grown)
        self._ramp_at = now

    def _cut(self, now: float, factor: float, sent_at: float) -> bool:
        self._resisted = True
        if sent_at <= self._cut_at:
            return False
        self._cut_at = now
        self._width = max(1.0, min(self._width, float(max(1, self.in_flight))) * factor)
        return True

    def _slow(self, wait_s: float) -> bool:
        """Waits far above the best the provider has shown: requests queue behind our own."""
        fast = self._wait_fast
        self._wait_fast = wait_s if fast is None else fast + 0.1 * (wait_s - fast)
        base = self._wait_base
        # The base falls at once and rises by 0.1 % a reply, so that one lucky reply does not rule
        # for ever.
        self._wait_base = wait_s if base is None else min(base * 1.001, self._wait_fast)
        return self._wait_fast > SLOW_FACTOR * self._wait_base + SLOW_SLACK_S
