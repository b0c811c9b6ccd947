"""Giving up what is pending: no request is sent, every prompt gets its one outcome, the books are
settled.

Promises: afterwards no resume asks these prompts again, and the stages that follow go on with what
there is. Providers are asked for bills alone; one that cannot be reached leaves worst cases."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from core import events as ev
from core.budget import Budget
from core.config import Config
from core.errors import ConfigError
from core.generate.account import READ_GAPS_S, Accounts
from core.generate.board import Board
from core.generate.books import LOOKUP_DELAYS_S, Books
from core.generate.landing import outcome_event
from core.generate.ports import GenerateResult, Ports
from core.generate.request import refused
from core.providers import make_provider
from core.providers.base import Provider
from core.schema import Prompt

ABANDONED = "abandoned"
"""The class of a prompt that was given up; its outcome is `refused`."""
WHY = "given up by the operator"
TOLD_AT_ONCE = 500
"""Outcomes in one step of the loop, some 10 ms."""


async def abandon(
    config: Config,
    prompts: Iterable[Prompt],
    ports: Ports,
    lookup_delays_s: Sequence[float] = LOOKUP_DELAYS_S,
    account_gaps_s: Sequence[float] = READ_GAPS_S,
) -> GenerateResult:
    """Raises StoreError (DiskFull) when a line could not be stored; then some are pending still."""
    recovered = ports.recovered
    known = {p.prompt_id: p for p in prompts}
    budget = Budget(config.run.budget_usd)
    budget.earlier(recovered.spent_usd, recovered.cap_usd, recovered.uncertain_usd)
    books = Books(budget, ports.spend, lookup_delays_s, recovered.tallies)

    def say(level: Any, message: str) -> None:
        ports.emit(ev.Log(level=level, message=message, stage="generate"))

    await _settle(config, ports, books, Accounts(config, books, say, account_gaps_s))
    left = [p for key, p in known.items() if key not in recovered.finished]
    rollouts = [
        refused(p, recovered.attempts.get(p.prompt_id, 0), ABANDONED, WHY, final=True) for p in left
    ]
    for rollout in rollouts[:-1]:
        ports.completions.post(rollout)
    for rollout in rollouts[-1:]:
        await ports.completions.append(rollout, durable=True)  # and with it all before it
    if (fault := books.fault or ports.completions.fault) is not None:
        raise fault
    board = Board(len(known), recovered.outcomes)
    for number, rollout in enumerate(rollouts):
        if number % TOLD_AT_ONCE == 0:
            await asyncio.sleep(0)
        board.outcomes[rollout.outcome] += 1
        board.error(rollout.backend, ABANDONED, "")
        ports.emit(outcome_event(rollout))
    ports.emit(board.stats(asyncio.get_running_loop().time(), [], budget, {}))
    say("warn", f"abandoned: {len(left)} prompts will not be asked")
    return GenerateResult(
        outcomes={k: v for k, v in board.outcomes.items() if v},
        spent_usd=budget.cost_usd,
        uncertain_usd=budget.uncertain_usd,
    )


async def _settle(config: Config, ports: Ports, books: Books, accounts: Accounts) -> None:
    """Every dispatch that was left open is closed: by its reply's line, looked up, or at its worst
    case."""
    recovered = ports.recovered
    providers: dict[str, Provider] = {}
    for backend in {line.backend for line in recovered.open}:
        if backend == "openrouter" and not config.generate.openrouter.base_url:
            continue  # the run's own gateway, whose books ended with it
        try:
            providers[backend] = make_provider(backend, config)
        except ConfigError as error:  # no key or address any more
            ports.emit(ev.Log(level="warn", message=str(error), stage="generate"))
    try:
        for line in recovered.open:
            books.budget.adopt((line.prompt_id, line.attempt), line.reserve_usd)
        closing = []
        for line in recovered.open:
            reply = recovered.replied.get((line.prompt_id, line.attempt))
            closing.append(books.settle_open(line, providers.get(line.backend), reply))
        await asyncio.gather(*closing)
        await accounts.reconcile(providers, lambda: False)
    finally:
        await asyncio.gather(*(p.close() for p in providers.values()))
