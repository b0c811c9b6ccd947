"""Work beside the loop: results, errors, cancelled waits, and many results a wake-up."""

import asyncio
import threading

import pytest

from core.offload import Replies, Workers


async def test_results_and_errors_reach_their_waiters() -> None:
    workers = Workers(2, "test")

    def divide(a: int, b: int) -> float:
        return a / b

    try:
        assert await workers.run(divide, 6, b=3) == 2.0
        with pytest.raises(ZeroDivisionError):
            await workers.run(divide, 1, 0)
        assert sorted(
            await asyncio.gather(*(workers.run(divide, i, 1) for i in range(500)))
        ) == list(range(500))
    finally:
        workers.close()


async def test_a_result_that_no_future_takes_keeps_back_no_other() -> None:
    loop = asyncio.get_running_loop()
    replies = Replies(loop)
    first, second = loop.create_future(), loop.create_future()
    replies.deliver(first, None, StopIteration("lost"))
    replies.deliver(second, 2)
    assert await asyncio.wait_for(second, 5) == 2
    with pytest.raises(RuntimeError, match="StopIteration: lost"):
        await first


async def test_a_cancelled_wait_drops_a_job_that_has_not_begun() -> None:
    workers = Workers(1, "test")
    go, began = threading.Event(), []

    def hold() -> None:
        go.wait()

    first = asyncio.create_task(workers.run(hold))
    second = asyncio.create_task(workers.run(lambda: began.append(2)))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    go.set()
    await first
    await workers.run(lambda: began.append(3))
    workers.close()
    assert began == [3]


class Woken(Replies):
    """Counts wake-ups."""

    times = 0

    def _resolve(self) -> None:
        self.times += 1
        super()._resolve()


async def test_results_that_come_together_wake_the_loop_once() -> None:
    loop = asyncio.get_running_loop()
    replies = Woken(loop)
    futures: list[asyncio.Future[int]] = [loop.create_future() for _ in range(100)]
    for i, future in enumerate(futures):
        replies.deliver(future, i)
    assert await asyncio.gather(*futures) == list(range(100))
    assert replies.times == 1


def test_a_closed_loop_is_nobody_to_tell() -> None:
    loop = asyncio.new_event_loop()
    replies = Replies(loop)
    future = loop.create_future()
    loop.close()
    replies.deliver(future, 1)
    assert not future.done()
