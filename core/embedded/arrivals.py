"""When each paid request arrived and how it ended: what a halt's latency is measured from."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from core.embedded.books import Lines


class Arrival(msgspec.Struct, kw_only=True):
    """Unix seconds. `left`: when the client was seen to have gone before the end."""

    n: int
    t: float
    path: str
    provider: str | None = None
    generation_id: str | None = None
    stream: bool = False
    status: int | None = None
    ended: float | None = None
    left: float | None = None


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
