"""The limit of a provider: tables over a clock that the test holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.limit import (
    BACKOFF_CAP_S,
    BACKOFF_FLOOR_S,
    Breaker,
    Limit,
    Patience,
    Refusals,
    backoff_s,
    waited_s,
)


def full(limit: Limit, now: float) -> int:
    """Send as many as the limit lets."""
    sent = 0
    while limit.may_send(now):
        limit.sent(now)
        sent += 1
    return sent


def test_ramp_reaches_the_ceiling_in_time_while_nothing_resists() -> None:
    limit = Limit(2_000, start=16, ramp_s=10.0)
    assert full(limit, 0.0) == 16
    assert full(limit, 5.0) == pytest.approx(992, abs=1)
    assert full(limit, 10.0) + 1_008 == pytest.approx(2_000, abs=1)
    assert limit.width == 2_000


@pytest.mark.parametrize(("retry_after_s", "earliest"), [(7.0, 7.0), (12.0, 12.0), (None, 1.0)])
@pytest.mark.parametrize("dice", [0.0, 0.5, 0.999])
def test_nobody_sends_before_retry_after(
    retry_after_s: float | None, earliest: float, dice: float
) -> None:
    """Case C46: the wait is shared, and without a header it is at least a second."""
    limit = Limit(100, start=100)
    assert full(limit, 0.0) == 100
    for _ in range(100):
        limit.ended()
        limit.throttled(0.1, 0.0, retry_after_s, dice)
    moment = 0.1
    while not limit.may_send(moment):
        moment += 0.01
    assert moment >= 0.1 + earliest - 1e-9
    assert limit.wait_s(0.1) == pytest.approx(moment - 0.1, abs=0.02)


def test_one_round_of_refusals_is_one_cut() -> None:
    limit = Limit(100, start=100)
    full(limit, 0.0)
    for _ in range(100):
        limit.throttled(1.0, 0.0, 0.0, 0.0)
    assert limit.width == 70
    limit.throttled(2.0, 1.5, 0.0, 0.0)
    assert limit.width == 49


def test_backoff_grows_with_rounds_and_falls_back_after_a_success() -> None:
    limit = Limit(8, start=8)
    waits = []
    now = 0.0
    for _ in range(8):
        limit.throttled(now + 0.01, now, None, 0.999)
        waits.append(round(limit.hold_until - now - 0.01, 6))
        now = limit.hold_until + 0.01
    assert waits == sorted(waits)
    assert waits[0] < 2.0 and waits[-1] == pytest.approx(BACKOFF_CAP_S, rel=0.01)
    limit.succeeded(now, now, 0.5)
    limit.throttled(now + 2, now + 1, None, 0.999)
    assert limit.hold_until - now - 2 < 2.0


def test_additive_increase_needs_use_of_the_width() -> None:
    limit = Limit(100, start=50)
    limit.throttled(0.0, -1.0, 0.0, 0.0)
    width = limit.width
    for _ in range(50):
        limit.succeeded(1.0, 0.5, 0.5)
    assert limit.width == width  # nothing in flight: the width was not what held us back
    full(limit, 1.0)
    before = limit._width
    for _ in range(limit.width):
        limit.succeeded(2.0, 1.5, 0.5)
    assert before + 1.5 < limit._width <= before + 2.0 + 1e-6


def test_slow_first_tokens_shrink_the_width() -> None:
    limit = Limit(100, start=100)
    full(limit, 0.0)
    for i in range(50):
        limit.succeeded(1.0 + i, 0.8 + i, 0.5, 0.2)
    assert limit.width == 100
    for i in range(50):
        limit.succeeded(100.0 + i, 92.0 + i, 0.5, 8.0)
    assert limit.width < 95


def test_one_round_of_slow_replies_is_one_cut() -> None:
    """They arrive over seconds, and all left before the first of them showed anything."""
    limit = Limit(1_000, start=1_000)
    full(limit, 0.0)
    for _ in range(100):
        limit.succeeded(1.0, 0.8, 0.5, 0.2)
    for i in range(900):
        limit.succeeded(20.0 + i / 100, 10.0, 0.5, 9.0)
    assert limit.width == 900


@pytest.mark.parametrize(
    ("total_s", "ttft_s", "tokens", "waited"),
    [
        (40.0, 0.5, 2_000, 0.5),
        (1.0, None, 0, 1.0),
        (2.0, None, 100, 1.0),
        (42.0, None, 2_000, 2.0),
        (5.0, None, None, None),
    ],
)
def test_what_a_queue_shows_in(
    total_s: float, ttft_s: float | None, tokens: int | None, waited: float | None
) -> None:
    assert waited_s(total_s, ttft_s, tokens) == waited


def test_whole_replies_that_take_ever_longer_shrink_the_width() -> None:
    limit = Limit(100, start=100)
    full(limit, 0.0)
    for i in range(50):  # 10 to 500 tokens at 20 ms each
        tokens = 10 + 10 * i
        limit.succeeded(50.0 + i, 40.0, 0.5, waited_s(0.3 + 0.02 * tokens, None, tokens))
    assert limit.width == 100
    for i in range(50):
        limit.succeeded(200.0 + i, 170.0 + i, 0.5, waited_s(30.0, None, 100 + 8 * i))
    assert limit.width < 95


def test_server_queue_shrinks_the_width() -> None:
    limit = Limit(64, start=64)
    full(limit, 0.0)
    limit.queue_seen(1.0, 10)
    assert limit.width == 64
    limit.queue_seen(2.0, 40)
    assert limit.width == 57


def test_payment_required_halves() -> None:
    limit = Limit(64, start=64)
    full(limit, 0.0)
    limit.payment_required(1.0, 0.0, None, 0.0)
    limit.payment_required(1.0, 0.0, None, 0.0)
    assert limit.width == 32
    assert not limit.may_send(1.5)
    limit.in_flight = 0
    assert limit.may_send(2.0)
    limit.payment_required(2.0, 0.0, 30.0, 0.0)  # longer than the back-off
    assert not limit.may_send(31.9) and limit.may_send(32.0)
    limit.payment_required(40.0, 0.0, 0.1, 0.0)  # shorter than its floor
    assert not limit.may_send(40.9) and limit.may_send(41.0)


def test_descriptors_running_out_halves_the_ceiling() -> None:
    limit = Limit(1_000, start=1_000)
    full(limit, 0.0)
    for _ in range(40):  # all that failed for want of one were sent in the same round
        limit.halve_ceiling(1.0, 0.0)
    assert (limit.ceiling, limit.width) == (500, 500)
    limit.halve_ceiling(1.4, 1.2)
    assert limit.ceiling == 250
    while limit.in_flight:
        limit.ended()
    assert not limit.may_send(2.3) and limit.may_send(2.4)  # not at once: that would be a spin


@pytest.mark.parametrize("said", [0.0, None])
def test_a_wait_of_nothing_is_no_wait_that_was_said(said: float | None) -> None:
    """`Retry-After: 0`, or a date that has passed: everyone would come back in the same instant,
    for as long as the provider says so."""
    limit = Limit(64, start=64)
    full(limit, 0.0)
    limit.throttled(1.0, 0.0, said, 0.0)
    assert limit.wait_s(1.0) == 1.0 and not limit.may_send(1.9)


def test_breaker_opens_probes_once_and_closes() -> None:
    breaker = Breaker(0.5)
    for _ in range(9):
        breaker.record(False, 0.0, 0.0, 0.0)
    assert breaker.state == "closed"  # fewer than ten say nothing
    breaker.record(False, 0.0, 0.0, 0.999)
    assert breaker.state == "open"
    assert not breaker.may_send(4.9)
    assert breaker.may_send(5.0)
    breaker.sent(5.0)
    assert breaker.state == "half_open" and not breaker.may_send(5.0)
    breaker.record(False, 6.0, 5.0, 0.0)
    assert (
        breaker.state == "open" and breaker.wait_s(6.0) == 5.0
    )  # twice as long, half of it jitter
    breaker.sent(11.0)
    breaker.record(True, 12.0, 11.0, 0.0)
    assert breaker.state == "closed" and breaker.opened == 0


@pytest.mark.parametrize(
    ("story", "given_up_at"),
    [
        # f: failed with nothing else open; o: failed with others open; t: throttled; a: answered
        ([(0, "f"), (100, "f"), (179, "f"), (180, "f")], 180),
        ([(0, "f"), (200, "o"), (500, "o"), (501, "f")], 501),
        ([(0, "f"), (170, "t"), (180, "f"), (359, "f"), (360, "f")], 360),
        ([(0, "f"), (10, "a"), (900, "f"), (9_000, "f")], None),
        ([(0, "a"), (1, "f"), (9_000, "f")], None),
        ([(5, "f")], None),
    ],
)
def test_a_backend_without_one_answer_is_given_up(
    story: list[tuple[float, str]], given_up_at: float | None
) -> None:
    patience, given_up = Patience(180.0), []
    for now, what in story:
        match what:
            case "a":
                patience.answered()
            case "t":
                patience.throttled()
            case _:
                silent_s = patience.failed(now, in_flight=3 if what == "o" else 0)
                given_up += [now] if silent_s is not None else []
    assert given_up == ([] if given_up_at is None else [given_up_at])


@pytest.mark.parametrize(
    ("story", "holds", "given_up"),
    [
        # a, b, c: that prompt was refused with nothing else open; capitals: with two others open
        # that left at the same time; !: one of those was answered
        ("abc", False, True),
        ("ab", False, False),
        ("aab", False, True),
        ("aaaaa", False, False),
        ("ABC", True, False),
        ("ABCABC", True, False),
        ("ABCd", False, True),
        ("AB!c", False, False),
        ("ABC!", False, False),
        ("ABC!ab", False, False),
        ("!abc", False, True),
    ],
)
def test_a_provider_that_refuses_everything_is_given_up(
    story: str, holds: bool, given_up: bool
) -> None:
    refusals, verdicts, open_ = Refusals(), [False], 0
    for what in story:
        open_ = 2 if what.isupper() or what == "!" else 0
        if what == "!":
            refusals.answered(10.0)
        else:
            verdicts.append(refusals.refused(what.lower(), 10.0, open_, lambda moment: 0))
    assert refusals.holds(open_) == holds
    assert verdicts[-1] == given_up and not any(verdicts[:-1])


def test_whoever_left_before_the_row_of_refusals_neither_clears_nor_counts() -> None:
    refusals = Refusals()
    older = {8.0, 8.5, 9.5}  # open; the last one left together with the first refused one

    def left_before(moment: float) -> int:
        return sum(at < moment for at in older)

    assert not refusals.refused("a", 10.0, 3, left_before)
    assert not refusals.refused("b", 10.1, 3, left_before)
    assert not refusals.refused("c", 10.1, 3, left_before) and refusals.holds(3)
    refusals.ended(8.0)
    assert not refusals.answered(8.0) and refusals.holds(2)
    refusals.ended(9.5)
    assert refusals.refused("d", 9.5, 1, left_before) and not refusals.holds(1)
    refusals.ended(10.2)
    assert refusals.answered(10.2) and not refusals.holds(9)


def test_the_probe_alone_decides_and_old_ones_say_nothing_afterwards() -> None:
    breaker = Breaker(0.5)
    for _ in range(10):
        breaker.record(False, 10.0, 9.0, 0.0)
    breaker.sent(15.0)
    breaker.record(True, 15.5, 8.0, 0.0)
    breaker.record(False, 15.5, 8.0, 0.0)
    breaker.forget_probe(8.0)
    assert breaker.state == "half_open" and not breaker.may_send(15.5)
    breaker.record(True, 16.0, 15.0, 0.0)
    assert breaker.state == "closed"
    for _ in range(200):
        breaker.record(False, 17.0, 9.5, 0.0)
    assert breaker.state == "closed" and breaker.opened == 0


def test_a_limit_of_the_platform_frees_no_siblings_probe() -> None:
    limit = Limit(8, start=8)
    for _ in range(10):
        limit.failed(0.0, 0.0, 0.0)
    limit.sent(5.0)
    limit.throttled(5.1, 5.05, 0.1, 0.0)
    limit.payment_required(5.1, 5.05, None, 0.0)
    limit.halve_ceiling(5.1, 5.05)
    limit.ended()  # room within the width
    assert not limit.may_send(60.0)
    limit.unknown(5.0)
    assert limit.may_send(60.0)


def test_a_probe_that_says_nothing_is_replaced() -> None:
    breaker = Breaker(0.5)
    for _ in range(10):
        breaker.record(False, 0.0, 0.0, 0.0)
    breaker.sent(5.0)
    assert not breaker.may_send(5.0)
    breaker.forget_probe(5.0)
    assert breaker.may_send(5.0)


@given(st.integers(0, 40), st.floats(0, 0.999999))
def test_backoff_stays_between_floor_and_cap(failures: int, dice: float) -> None:
    assert BACKOFF_FLOOR_S <= backoff_s(failures, dice) <= BACKOFF_CAP_S


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["sent", "ok", "429", "503", "fail", "402", "queue", "emfile"]),
            st.floats(0, 3),
            st.floats(0, 0.999),
        ),
        max_size=200,
    ),
    st.integers(1, 300),
)
def test_the_width_stays_in_bounds_and_holds_are_kept(
    steps: list[tuple[str, float, float]], ceiling: int
) -> None:
    limit = Limit(ceiling)
    now, sent_at, hold = 0.0, 0.0, 0.0
    for what, passed, dice in steps:
        now += passed
        if limit.may_send(now):
            assert now >= hold
            assert limit.in_flight < limit.width
        if what == "sent" and limit.may_send(now):
            limit.sent(now)
            sent_at = now
        elif what == "ok" and limit.in_flight:
            limit.ended()
            limit.succeeded(now, sent_at, dice, passed)
        elif what in ("429", "503") and limit.in_flight:
            limit.ended()
            retry_after = passed if what == "429" else None
            limit.throttled(now, sent_at, retry_after, dice)
            hold = max(hold, now + (passed if what == "429" else BACKOFF_FLOOR_S))
        elif what == "fail" and limit.in_flight:
            limit.ended()
            limit.failed(now, sent_at, dice)
        elif what == "402":
            limit.payment_required(now, sent_at, passed, dice)
            hold = max(hold, now + max(passed, BACKOFF_FLOOR_S))
        elif what == "queue":
            limit.queue_seen(now, 50)
        elif what == "emfile":
            limit.halve_ceiling(now, sent_at)
        assert 1 <= limit.width <= max(1, ceiling)
        assert limit.in_flight >= 0
