"""Work beside the event loop: threads whose results come back many per wake-up.

`run_in_executor` costs three futures, two locks and one write to the loop's own pipe for every
call: a quarter of the engine's time at 2,000 replies a second. Knows functions and futures, nothing
of what they mean."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Replies:
    """From threads to the futures of one loop. `deliver` may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._ready: list[tuple[asyncio.Future[Any], Any, BaseException | None]] = []

    def deliver(
        self, future: asyncio.Future[Any], result: Any, error: BaseException | None = None
    ) -> None:
        with self._lock:
            first = not self._ready
            self._ready.append((future, result, error))
        if first:
            with contextlib.suppress(RuntimeError):  # a closed loop: nobody waits any more
                self.loop.call_soon_threadsafe(self._resolve)

    def _resolve(self) -> None:
        with self._lock:
            ready, self._ready = self._ready, []
        for future, result, error in ready:
            if future.done():  # its waiter was cancelled
                continue
            if error is None:
                future.set_result(result)
            elif isinstance(error, StopIteration):  # no future takes it, and the others wait behind
                future.set_exception(RuntimeError(f"StopIteration: {error}"))
            else:
                future.set_exception(error)


class _Job(NamedTuple):
    work: Callable[[], Any]
    future: asyncio.Future[Any]


class Workers:
    """A few threads for one loop; made inside it. Jobs begin in the order of the calls."""

    def __init__(self, count: int, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._replies = Replies(self._loop)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}_{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns or raises. Cancelling the wait does not stop work that has begun."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put(_Job(lambda: work(*args, **kwargs), future))
        return await future

    def close(self) -> None:
        """Threads end after the job in hand; jobs that have not begun are dropped. To be called
        when nobody waits for one."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.future.cancelled():
                continue
            try:
                result = job.work()
            except BaseException as error:  # the waiter's to handle, like the executor's
                self._replies.deliver(job.future, None, error)
            else:
                self._replies.deliver(job.future, result)
            del job  # a reply of megabytes must not wait here for the next one
