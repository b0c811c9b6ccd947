"""The books against the account: what nobody could say of single requests, the account's total can
prove.

A request that is killed before its first response header has no generation id, so no look-up finds
its bill. But the account knows what all of them cost together: its total now, less its total before
the run, less everything that is proven. Promises: a correction is booked only where that rest lies
between nothing and the worst case of the unproven ones; else (a key that others use as well, a
total that lags) the worst case stays. Knows totals and the spend file, nothing about requests.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from core.budget import PICO, to_pico
from core.config import Config
from core.errors import ConfigError, ProviderError
from core.generate.books import Books, Say
from core.generate.tally import Tally
from core.providers import make_provider
from core.providers.base import Provider
from core.schema import SpendLine

READ_GAPS_S = (1.0, 1.0, 2.0, 4.0)
"""Between readings of the account: two in a row must agree, and the total may lag the bills."""
TOLERANCE_USD = 1e-6
"""Totals are sums of floats on the other side."""


def proven_rest(start_usd: float, now_usd: float, tally: Tally) -> int | None:
    """What the uncertain requests really cost together, in picodollars; None: the account does not
    fit."""
    rest = to_pico(now_usd) - to_pico(start_usd) - tally.certain
    slack = to_pico(TOLERANCE_USD)
    if not -slack <= rest <= tally.worst + slack:
        return None
    return min(max(rest, 0), tally.worst)


def bill_clients(config: Config, lines: Iterable[SpendLine], say: Say) -> dict[str, Provider]:
    """Clients that ask for the bills of open dispatches alone: no pre-flight, nothing is refused;
    what cannot be asked is told and left out."""
    clients: dict[str, Provider] = {}
    for backend in dict.fromkeys(x.backend for x in lines if x.reserve_usd and x.generation_id):
        if backend == "openrouter" and not config.generate.openrouter.base_url:
            continue  # the run's own gateway, whose books ended with it
        try:
            clients[backend] = make_provider(backend, config)
        except ConfigError as error:  # no key or address any more
            say("warn", f"{error}; open bills of {backend} are booked at their worst case")
    return clients


class Accounts:
    """The accounts of one run's backends."""

    def __init__(
        self, config: Config, books: Books, say: Say, read_gaps_s: Sequence[float] = READ_GAPS_S
    ) -> None:
        self._config = config
        self._books = books
        self._say = say
        self._gaps_s = read_gaps_s

    async def open(self, providers: Mapping[str, Provider]) -> None:
        """Record what each account stands at, once in a run, before its first paid request leaves.
        Raises DiskFull."""
        for backend, provider in providers.items():
            tally = self._books.tallies.setdefault(backend, Tally())
            if tally.start_usd is not None or tally.sent:
                continue  # known; or too late to know
            if all(spec.price.free for spec in provider.lanes):
                continue
            if (usd := await _read(provider)) is not None:
                await self._books.record(_line("account", backend, account_usd=usd))

    async def reconcile(
        self, providers: Mapping[str, Provider], given_up: Callable[[], bool]
    ) -> None:
        """Once nothing is in flight and every look-up has ended. Bounded tries; `given_up` ends
        them early. Raises DiskFull."""
        for backend, tally in self._books.tallies.items():
            if not tally.worst or tally.start_usd is None or backend in self._books.refused:
                continue
            rest = None
            async with self._provider(backend, providers) as provider:
                if provider is not None:
                    rest = await self._rest(provider, tally, tally.start_usd, given_up)
            if rest is not None:
                await self._book(backend, tally, rest)
            elif tally.unproven:
                why = (
                    "the account was not waited for; a resume asks it again"
                    if given_up()
                    else "the account's total does not fit the books (the key is used elsewhere, "
                    "or the total lags)"
                )
                stay = f"${tally.unproven / PICO:.6f} of unknown bills stay at their worst case"
                self._say("warn", f"{backend}: {why}; {stay}")

    @asynccontextmanager
    async def _provider(
        self, backend: str, providers: Mapping[str, Provider]
    ) -> AsyncIterator[Provider | None]:
        """The one in use; else one for the question alone (nothing is left to send). None: it
        cannot be asked."""
        if backend in providers:
            yield providers[backend]
            return
        try:
            provider = make_provider(backend, self._config)
        except ConfigError:  # no key any more
            yield None
            return
        try:
            yield provider
        finally:
            await provider.close()

    async def _rest(
        self,
        provider: Provider,
        tally: Tally,
        start_usd: float,
        given_up: Callable[[], bool],
    ) -> int | None:
        before = await _read(provider)
        for gap_s in self._gaps_s:
            if before is None or given_up():
                return None
            await asyncio.sleep(gap_s)
            now = await _read(provider)
            if now is not None and now == before:
                rest = proven_rest(start_usd, now, tally)
                if rest is not None or not tally.unproven:
                    return rest
            before = now
        return None

    async def _book(self, backend: str, tally: Tally, rest: int) -> None:
        """One line that makes the books' total the account's."""
        correction = tally.correction(rest)
        if not correction and not tally.unproven:
            return
        usd = correction / PICO
        cap_usd = 0.0 if tally.others_pay else usd  # bills elsewhere are in no account of ours
        line = _line("adjusted", backend, cost_usd=usd, cap_usd=cap_usd)
        self._books.budget.correct(usd, cap_usd, tally.unproven / PICO)
        await self._books.record(line)
        self._say(
            "info",
            f"{backend}: the account shows that requests without a known bill cost "
            f"${rest / PICO:.6f}; the books are corrected by ${usd:+.6f}",
        )


async def _read(provider: Provider) -> float | None:
    try:
        return await provider.account_usd()
    except ProviderError:
        return None  # nothing answered: nothing is proven


def _line(kind: Any, backend: str, **amounts: float) -> SpendLine:
    fields: dict[str, Any] = dict(amounts)
    return SpendLine(ts=time.time(), kind=kind, prompt_id="", attempt=0, backend=backend, **fields)
