"""What a client of the gateway costs: requests per second over the whole run and over its steady
part, CPU of the process and of its children, peak memory, lag of the event loop.

Standard library alone: the peers' interpreter imports it as well."""

import argparse
import asyncio
import contextlib
import json
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

TICK_S = 0.01
MAX_TOKENS = 4_096


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """How the driver calls a client."""
    parser = argparse.ArgumentParser()
    parser.add_argument("client")
    parser.add_argument("--url", required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--in-flight", type=int, required=True)
    parser.add_argument("--stream", action="store_true")
    return parser.parse_args(argv)


def body_of(number: int, stream: bool) -> dict[str, Any]:
    """The request that all clients send."""
    return {
        "model": "eyas/embedded",
        "messages": [{"role": "user", "content": f"What is 2 + {number}?"}],
        "max_tokens": MAX_TOKENS,
        "stream": stream,
        "provider": {"only": ["alder"], "allow_fallbacks": False},
    }


def cpu_s() -> float:
    """User and system seconds of this process, all its threads and the children that it has waited
    for."""
    spent = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in spent)


def peak_mb() -> float:
    """VmHWM: ru_maxrss would begin with what the parent of this process had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


class Meter:
    """`done` at every answer. The steady part, where the lag is taken as well, leaves out the first
    and the last `in_flight` answers (at most a quarter of all at each end): windows that fill and
    run dry. `own` lag leaves out what other processes took: at most the CPU that this one used in
    it."""

    def __init__(self, requests: int, in_flight: int) -> None:
        self.requests = requests
        self._edge = min(in_flight, requests // 4)
        self._times: list[float] = []
        self._cpu: list[float] = []
        self._lags: list[float] = []
        self._own: list[float] = []
        self._start = self._start_cpu = 0.0

    def start(self) -> None:
        self._start, self._start_cpu = time.monotonic(), cpu_s()

    def done(self) -> None:
        self._times.append(time.monotonic())
        if len(self._times) in (self._edge, self.requests - self._edge):
            self._cpu.append(cpu_s())

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """From the first request to the last answer, with the loop's lag."""

        async def tick() -> None:
            while True:
                before, cpu = time.monotonic(), time.process_time()
                await asyncio.sleep(TICK_S)
                lag = max(0.0, time.monotonic() - before - TICK_S)
                if self._edge <= len(self._times) <= self.requests - self._edge:
                    self._lags.append(lag)
                    self._own.append(min(lag, time.process_time() - cpu))

        ticking = asyncio.create_task(tick())
        self.start()
        yield
        ticking.cancel()

    async def many(self, in_flight: int, one: Callable[[int], Awaitable[None]]) -> None:
        """Requests 0.. at a constant width."""
        gate = asyncio.Semaphore(in_flight)

        async def gated(number: int) -> None:
            async with gate:
                await one(number)
            self.done()

        async with self.running():
            await asyncio.gather(*(gated(i) for i in range(self.requests)))

    def result(self, **more: float) -> dict[str, float]:
        seconds, cpu = time.monotonic() - self._start, cpu_s() - self._start_cpu
        row = {
            "per_s": self.requests / seconds,
            "cpu_ms": cpu / self.requests * 1_000,
            "cpu_share": cpu / seconds,
            "seconds": seconds,
            "peak_mb": peak_mb(),
            **more,
        }
        if self._lags:
            for name, share in (("50", 0.5), ("95", 0.95), ("99", 0.99), ("max", 1.0)):
                row[f"lag{name}_ms"] = percentile(self._lags, share) * 1e3
                row[f"own{name}_ms"] = percentile(self._own, share) * 1e3
        if len(self._times) == self.requests > 2 * self._edge:
            inner = self._times[self._edge - 1 : self.requests - self._edge]
            row["steady_per_s"] = (len(inner) - 1) / (inner[-1] - inner[0])
            row["steady_cpu_ms"] = (self._cpu[1] - self._cpu[0]) / (len(inner) - 1) * 1_000
        return row


def report(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)
