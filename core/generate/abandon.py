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
from core.generate.account import READ_GAPS_S, Accounts, bill_clients
from core.generate.board import Board
from core.generate.books import LOOKUP_DELAYS_S, Books
from core.generate.landing import outcome_event
from core.generate.ports import GenerateResult, Ports
from core.generate.request import refused
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

    def say(level: Any, message: str) -> None:
        ports.emit(ev.Log(level=level, message=message, stage="generate"))

    books = Books(budget, ports.spend, lookup_delays_s, recovered.tallies, say)
    accounts = Accounts(config, books, say, account_gaps_s)
    providers = bill_clients(config, recovered.open, say)
    try:
        settling = books.left_open(recovered.open, recovered.replied, providers)
        await asyncio.gather(*(bill for _, bill in settling))
        await accounts.reconcile(providers, lambda: False)
    finally:
        await asyncio.gather(*(p.close() for p in providers.values()))
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
