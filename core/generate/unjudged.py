"""Whole replies that an earlier life stored without their verdict: they are paid for, so this life
judges them and does not ask again, whether its gate is open or not.

Promises: the line that closes such a dispatch comes after the reply's own, so that a kill in
between leaves both as they were. Knows replies and bills, nothing of what follows from a
verdict."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping

import msgspec

from core import events as ev
from core.budget import Key
from core.generate.attempt import Attempts, Landing
from core.generate.books import Bill
from core.generate.ports import Ports
from core.generate.queues import Item, item_of
from core.generate.request import Prepared, prepare
from core.schema import Prompt, Rollout

AT_ONCE = 64
"""Replies in memory: a stream of 2,000 tokens is 730 kB."""

Conclude = Callable[[Item, Landing | None], Awaitable[None]]
"""None: the reply cannot be read, or its prompt cannot be rendered, any more."""


class TakeUp:
    """Those of one run. `prompts` and `keys`: whose replies wait; what of them is no longer asked
    for is told and stays where it is."""

    def __init__(self, ports: Ports, attempts: Attempts, prompts: Iterable[Prompt]) -> None:
        self._ports = ports
        self._attempts = attempts
        self._permits = asyncio.Semaphore(AT_ONCE)
        waiting = ports.recovered.unjudged
        self.prompts = {p.prompt_id: p for p in prompts if p.prompt_id in waiting}
        self.keys = {(name, waiting[name].attempt) for name in self.prompts}
        if gone := len(waiting) - len(self.prompts):
            words = "of prompts that the config no longer has stay in completions.jsonl, unjudged"
            message = f"{gone} paid replies {words}"
            ports.emit(ev.Log(level="warn", stage="generate", message=message))

    async def judge(
        self, prompt: Prompt, bills: Mapping[Key, Awaitable[Bill]], conclude: Conclude
    ) -> None:
        """One of them. `bills`: of the dispatches that were open, as they come."""
        recovered, books = self._ports.recovered, self._attempts.books
        attempt, at = recovered.unjudged[prompt.prompt_id]
        key = (prompt.prompt_id, attempt)
        if key in bills:
            bill = await bills[key]
        else:
            line = recovered.billed[key]
            bill = Bill(kind=line.kind, cost_usd=line.cost_usd)
        async with self._permits:
            item = item_of(prompt, recovered)
            item.prepared, rollout = await asyncio.to_thread(_opened, self._ports, prompt, at)
            if rollout is None or item.prepared.refusal:
                books.close(bill)
                await conclude(item, None)
                return
            if key not in bills:
                paid = {"cost_usd": bill.cost_usd, "cap_usd": recovered.billed[key].cap_usd}
                usage = msgspec.structs.replace(rollout.usage, **paid)
                bill = msgspec.structs.replace(bill, usage=usage)
            rollout = msgspec.structs.replace(
                rollout, outcome="ok", error_class=None, usage=bill.usage, bill=bill.kind
            )
            sample = await self._attempts.judge(item, rollout, bill)
            await conclude(item, Landing(rollout=rollout, bill=bill, sample=sample))


def _opened(ports: Ports, prompt: Prompt, at: int) -> tuple[Prepared, Rollout | None]:
    prepared = prepare(prompt, ports.renderer, sends_messages=False)
    try:
        return prepared, ports.recovered.reply(at)
    except (OSError, ValueError, msgspec.MsgspecError):
        return prepared, None
