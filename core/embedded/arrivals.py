"""When each paid request arrived, how it ended and what was written to it: what a halt's latency is
measured from, and a client's bytes against."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from aiohttp import web

from core.embedded.books import Lines


class Arrival(msgspec.Struct, kw_only=True):
    """Unix seconds. `left`: when the client was seen to have gone before the end. `body_bytes`: of
    the answer, counted as it was written."""

    n: int
    t: float
    path: str
    provider: str | None = None
    generation_id: str | None = None
    stream: bool = False
    status: int | None = None
    body_bytes: int = 0
    ended: float | None = None
    left: float | None = None


class Counted(web.StreamResponse):
    """An answer that counts the bytes of its body."""

    body_bytes = 0

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        self.body_bytes += len(data)
        await super().write(data)

    async def write_eof(self, data: bytes = b"") -> None:
        self.body_bytes += len(data)
        await super().write_eof(data)


class Arrivals:
    """Appended in order of arrival, kept for the life of the process."""

    def __init__(self, now: Callable[[], float], log: Lines) -> None:
        self.all: list[Arrival] = []
        self.in_flight = 0
        self._now = now
        self._log = log

    @contextmanager
    def note(self, path: str) -> Iterator[Arrival]:
        arrival = Arrival(n=len(self.all), t=self._now(), path=path)
        self.all.append(arrival)
        self.in_flight += 1
        try:
            yield arrival
        finally:
            self.in_flight -= 1
            arrival.ended = self._now()
            self._log.write(arrival)

    def close(self) -> None:
        self._log.close()
