"""What happens by the clock while requests are in flight: timeouts, live tokens, loop lag,
statistics, and the local servers' own queues. Decides nothing about prompts."""

import asyncio
from collections.abc import Callable

from core.config import Config
from core.errors import ProviderError
from core.generate.attempt import Aloft, Attempts
from core.generate.landing import Lander
from core.generate.lanes import Lane

STATS_S = 0.5
LOAD_S = 5.0


async def tick(
    config: Config,
    attempts: Attempts,
    lander: Lander,
    cut: Callable[[Aloft, str], None],
    publish: Callable[[float], None],
) -> None:
    """For ever. `cut` ends what is overdue, `publish` is called twice a second."""
    loop = asyncio.get_running_loop()
    generate = config.generate
    shortest = min(
        generate.first_event_timeout_s, generate.idle_timeout_s, generate.total_timeout_s
    )
    step_s = max(0.01, min(STATS_S / 2, shortest / 8))
    next_stats = loop.time()
    while True:
        before = loop.time()
        await asyncio.sleep(step_s)
        now = loop.time()
        lander.board.lag.add(max(0.0, now - before - step_s), now)
        for aloft in list(attempts.aloft.values()):
            lander.heard(aloft)
            if overdue := aloft.overdue(now, config):
                cut(aloft, overdue)
        attempts.keep_waiting(now)
        if now >= next_stats:
            next_stats = now + STATS_S
            publish(now)


async def watch_load(lanes: list[Lane]) -> None:
    """For ever. A local server's own queue is a reason to send less."""
    while True:
        await asyncio.sleep(LOAD_S)
        local = [lane for lane in lanes if lane.spec.price.free and not lane.stopped]
        await asyncio.gather(*map(_read_load, local))


async def _read_load(lane: Lane) -> None:
    try:
        load = await lane.provider.load(lane.name)
    except ProviderError:
        return  # the requests themselves will tell
    if load is not None:
        lane.limit.queue_seen(asyncio.get_running_loop().time(), load.waiting)
