"""Bills that are looked up: how many at once, how often, and when it ends. On a clock of its own,
which jumps to the next timer: the seconds are exact and cost none."""

import asyncio
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from core.budget import Budget
from core.errors import ProviderError
from core.generate import books as b
from core.generate.books import LOOKUP_DELAYS_S, LOOKUPS_AT_ONCE, SEVERED_S, Books
from core.providers.base import KeyRefused, LookedUp
from tests.core.generate.rig import MemoryFile

GET_S = 0.1
FOUND = LookedUp(cost_usd=0.5, cap_usd=0.5)


class Timers(selectors.DefaultSelector):
    """No file is ever ready: where the loop would sleep, its clock moves."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everybody waits and nothing will happen"
        self.now_s += timeout
        ready: list[Any] = super().select(0)
        return ready


def in_no_time(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    def loop_factory() -> asyncio.AbstractEventLoop:
        timers = Timers()
        loop = asyncio.SelectorEventLoop(timers)
        loop.time = lambda: timers.now_s  # type: ignore[method-assign]
        return loop

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(work())


class Api:
    """Answers in `get_s`; the bill is found from the `found_at`-th question about it on."""

    name = "openrouter"
    tells_bills = True

    def __init__(self, get_s: float = GET_S, found_at: int | None = None) -> None:
        self.get_s = get_s
        self.found_at = found_at
        self.asked: Counter[str] = Counter()
        self.open = self.peak = 0

    async def lookup(self, generation_id: str) -> LookedUp | None:
        self.asked[generation_id] += 1
        self.open += 1
        self.peak = max(self.peak, self.open)
        try:
            await asyncio.sleep(self.get_s)
        finally:
            self.open -= 1
        found = self.found_at is not None and self.asked[generation_id] >= self.found_at
        return FOUND if found else None


class Look:
    """`count` look-ups at once, all begun at 0 s."""

    def __init__(self, api: Any, count: int) -> None:
        self.books = Books(Budget(1.0), MemoryFile())
        self.tasks = [
            asyncio.create_task(self.books.look_up(api, f"gen-{i}")) for i in range(count)
        ]

    async def ends(self) -> tuple[float, int]:
        """(at which second, how many bills were found)"""
        found = await asyncio.gather(*self.tasks)
        return asyncio.get_running_loop().time(), sum(one is not None for one in found)


def test_who_waits_for_the_next_try_holds_no_place() -> None:
    """2,000 bills that nobody knows take their own waits and the questions, not those of all others
    before them (18 minutes)."""

    async def work() -> None:
        rows = []
        for count in (1, 200, 2_000):
            api, begun = Api(), asyncio.get_running_loop().time()
            ended, found = await Look(api, count).ends()
            rows.append((count, round(ended - begun, 1), api.peak))
            assert found == 0
            assert set(api.asked.values()) == {1 + len(LOOKUP_DELAYS_S)}
        print("\nlook-ups  seconds  at once", *rows, sep="\n")
        waits_s = sum(LOOKUP_DELAYS_S) + 7 * GET_S
        rounds_s = 7 * 2_000 / LOOKUPS_AT_ONCE * GET_S
        assert [row[2] for row in rows] == [1, LOOKUPS_AT_ONCE, LOOKUPS_AT_ONCE]
        assert rows[0][1] == pytest.approx(waits_s, abs=0.06)
        assert rows[2][1] < waits_s + rounds_s
        assert rows[2][1] < 50

    in_no_time(work)


def test_a_bill_that_is_late_is_found() -> None:
    async def work() -> None:
        api = Api(found_at=4)
        assert (await Look(api, 500).ends())[1] == 500
        assert set(api.asked.values()) == {4} and api.peak == LOOKUPS_AT_ONCE

    in_no_time(work)


@pytest.mark.parametrize("count", [1, 200, 2_000])
@pytest.mark.parametrize("severed_at", [0.0, 3.0, 12.0])
def test_a_sever_ends_the_waits_and_leaves_few_tries(count: int, severed_at: float) -> None:
    async def work() -> None:
        api = Api()
        look = Look(api, count)
        await asyncio.sleep(severed_at)
        before = api.asked.copy()
        look.books.hurry()
        ended, found = await look.ends()
        assert found == 0 and len(api.asked) == count
        assert max((api.asked - before).values()) <= 1 + b.FEW_TRIES
        few_s = sum(LOOKUP_DELAYS_S[: b.FEW_TRIES]) + (1 + b.FEW_TRIES) * GET_S
        questions_s = (1 + b.FEW_TRIES) * count / LOOKUPS_AT_ONCE * GET_S
        assert ended - severed_at <= min(few_s + questions_s, SEVERED_S + GET_S) + 0.01
        print(
            f"\n{count} look-ups, severed at {severed_at} s: ended {ended - severed_at:.1f} s later"
        )

    in_no_time(work)


def test_what_a_sever_cuts_off_is_asked_as_well() -> None:
    """Streams that a sever ends have their bills a moment later."""

    async def work() -> None:
        api = Api(found_at=3)
        books = Books(Budget(1.0), MemoryFile())
        books.hurry()
        found = await asyncio.gather(*(books.look_up(api, f"gen-{i}") for i in range(200)))  # type: ignore[arg-type]
        assert found == [FOUND] * 200

    in_no_time(work)


@pytest.mark.parametrize("severed_at", [0.0, 1.0])
def test_an_api_that_hangs_does_not_hold_the_end(severed_at: float) -> None:
    """Its questions time out after 20 s each: 2,000 of them would be 21 minutes."""

    async def work() -> None:
        api = Api(get_s=20.0)
        look = Look(api, 2_000)
        await asyncio.sleep(severed_at)
        look.books.hurry()
        ended, found = await look.ends()
        assert found == 0 and api.open == 0
        assert ended <= severed_at + SEVERED_S + 0.01

    in_no_time(work)


def test_a_refused_key_is_asked_with_once_and_told_once() -> None:
    class Revoked(Api):
        async def lookup(self, generation_id: str) -> LookedUp | None:
            await super().lookup(generation_id)
            raise KeyRefused("openrouter: refused")

    async def work() -> None:
        api, said = Revoked(), []
        books = Books(Budget(1.0), MemoryFile(), say=lambda *words: said.append(words))
        looks = [books.look_up(api, f"gen-{i}") for i in range(2_000)]  # type: ignore[arg-type]
        assert await asyncio.gather(*looks) == [None] * 2_000
        assert api.asked.total() == LOOKUPS_AT_ONCE  # those on their way when the first came back
        assert asyncio.get_running_loop().time() == pytest.approx(GET_S)  # nobody waits for a try
        ((level, words),) = said
        assert level == "warn" and words.startswith("openrouter: refused; bills")

    in_no_time(work)


def test_an_api_that_is_gone_is_asked_again() -> None:
    class Gone(Api):
        async def lookup(self, generation_id: str) -> LookedUp | None:
            await super().lookup(generation_id)
            if self.asked[generation_id] < 3:
                raise ProviderError("no answer")
            return FOUND

    async def work() -> None:
        assert (await Look(Gone(), 3).ends())[1] == 3

    in_no_time(work)
