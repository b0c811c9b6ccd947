"""Giving up what is pending: no request is sent, every prompt gets its one outcome, the books are
settled.

Promises: afterwards no resume asks these prompts again, and the stages that follow go on with what
there is; a reply that was paid for and had only waited for its verdict is judged and kept.
Providers are asked for bills alone; one that cannot be reached leaves worst cases."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from core import events as ev
from core.budget import Budget
from core.config import Config
from core.generate.account import READ_GAPS_S, Accounts, bill_clients
from core.generate.attempt import Attempts, Landing
from core.generate.board import Board
from core.generate.books import LOOKUP_DELAYS_S, Books
from core.generate.outcome import error_of, outcome_event
from core.generate.ports import GenerateResult, Ports
from core.generate.queues import Item
from core.generate.request import refused
from core.generate.unjudged import TakeUp
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
    board = Board(len(known), recovered.outcomes)
    pending = {key: p for key, p in known.items() if key not in recovered.finished}
    attempts = Attempts(config, ports, books)
    take_up = TakeUp(ports, attempts, pending.values())

    async def keep(item: Item, landing: Landing | None) -> None:
        if landing is not None:
            await attempts.store(_ended(landing))
            _tell(ports, board, landing, item)
            del pending[item.prompt.prompt_id]

    providers = bill_clients(config, recovered.open, say)
    try:
        left_open = books.left_open(recovered, providers, take_up.keys)
        bills = {key: asyncio.ensure_future(settling) for key, settling in left_open}
        judging = [take_up.judge(p, bills, keep) for p in take_up.prompts.values()]
        for done in await asyncio.gather(*bills.values(), *judging, return_exceptions=True):
            if isinstance(done, BaseException):
                raise done
        await accounts.reconcile(providers, lambda: False)
    finally:
        await asyncio.gather(*(p.close() for p in providers.values()))
    left = pending.values()
    rollouts = [
        refused(p, recovered.attempts.get(p.prompt_id, 0), ABANDONED, WHY, final=True) for p in left
    ]
    for rollout in rollouts[:-1]:
        ports.completions.post(rollout)
    for rollout in rollouts[-1:]:
        await ports.completions.append(rollout, durable=True)  # and with it all before it
    if (fault := books.fault or ports.completions.fault) is not None:
        raise fault
    for number, rollout in enumerate(rollouts):
        if number % TOLD_AT_ONCE == 0:
            await asyncio.sleep(0)
        board.outcomes[rollout.outcome] += 1
        board.error(rollout.backend, ABANDONED, WHY)
        ports.emit(outcome_event(rollout))
    ports.emit(board.stats(asyncio.get_running_loop().time(), [], budget, {}))
    kept = len(take_up.prompts.keys() - pending.keys())
    judged = f"; {kept} replies that had only waited for their verdict are kept" if kept else ""
    say("warn", f"abandoned: {len(left)} prompts will not be asked{judged}")
    return GenerateResult(
        outcomes={k: v for k, v in board.outcomes.items() if v},
        spent_usd=budget.cost_usd,
        uncertain_usd=budget.uncertain_usd,
    )


def _ended(landing: Landing) -> Landing:
    """A reply that had only waited for its verdict is the outcome of its prompt, whatever it is
    worth."""
    error_class = error_of(landing)[0]
    outcome = "rejected" if error_class else "ok"
    landing.rollout = msgspec.structs.replace(
        landing.rollout, outcome=outcome, error_class=error_class, final=True
    )
    return landing


def _tell(ports: Ports, board: Board, landing: Landing, item: Item) -> None:
    rollout, sample = landing.rollout, landing.sample
    board.outcomes[rollout.outcome] += 1
    if sample is not None:
        board.verdicts[sample.verdict] += 1
        if ports.on_sample is not None:
            ports.on_sample(sample, rollout, item.prepared.prompt)
    ports.emit(outcome_event(rollout, sample, landing.bill.cost_usd))
