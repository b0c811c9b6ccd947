"""What an earlier life of a run left in its books: read once at start, by id, never by position or
count.

Knows completions.jsonl and spend.jsonl, nothing about networks. Costs one pass over each file.
"""

import math
from collections.abc import Set

import msgspec

from core.budget import PICO
from core.generate.ports import Recovered, Unjudged
from core.generate.tally import Tally
from core.providers.price import money
from core.schema import CLOSING, UNJUDGED, Rollout, RolloutHead, SpendLine
from core.store import RunDir, read_at, read_jsonl, read_placed


def recover(run: RunDir) -> Recovered:
    """Finished prompts, open dispatches and the books of earlier lives. Torn or corrupt lines count
    as not written: a closing line needs no dispatch line, and a paid reply that spend.jsonl does
    not know is an open dispatch, so that a damaged file never makes the books cheaper than the
    other one shows."""
    found = Recovered()
    open_: dict[tuple[str, int], SpendLine] = {}
    closed: set[tuple[str, int]] = set()
    for line in read_jsonl(run.spend, SpendLine):
        if not _sound(line):
            continue
        tally = found.tallies.setdefault(line.backend, Tally())
        if line.kind in ("account", "adjusted"):
            tally.add(line)
            found.spent_usd += line.cost_usd
            found.cap_usd += line.cap_usd
            continue
        key = (line.prompt_id, line.attempt)
        found.attempts[line.prompt_id] = max(found.attempts.get(line.prompt_id, 0), line.attempt)
        if line.kind == "dispatch" and key not in closed:
            open_[key] = line
            tally.add(line)
        elif line.kind == "known":
            if key in open_:
                open_[key] = msgspec.structs.replace(
                    open_[key],
                    generation_id=line.generation_id,
                    provider=line.provider or open_[key].provider,
                )
        elif line.kind in CLOSING and key not in closed:
            closed.add(key)
            open_.pop(key, None)
            _close(found, line)
            tally.add(line)
    found.reply = lambda at: next(read_at(run.completions, [at], Rollout))
    for at, head in read_placed(run.completions, RolloutHead):
        found.unjudged.pop(head.prompt_id, None)
        if head.error_class == UNJUDGED:
            found.unjudged[head.prompt_id] = Unjudged(head.attempt, at)
        found.attempts[head.prompt_id] = max(found.attempts.get(head.prompt_id, 0), head.attempt)
        key, cost_usd = (head.prompt_id, head.attempt), money(head.usage.cost_usd) or 0.0
        if cost_usd and key not in closed and key not in open_:
            open_[key] = _unwritten(head, cost_usd)
        if key in open_ and (cost_usd or not head.usage.cost_usd):
            found.replied[key] = head
        if not head.final and head.outcome != "aborted" and cost_usd:
            paid_usd = found.retried_usd.get(head.prompt_id, 0.0)
            found.retried_usd[head.prompt_id] = paid_usd + cost_usd
        if head.final and head.outcome != "aborted" and head.prompt_id not in found.finished:
            found.finished.add(head.prompt_id)
            found.outcomes[head.outcome] = found.outcomes.get(head.outcome, 0) + 1
    found.open = list(open_.values())
    _bill_unjudged(run, found, open_.keys())
    found.uncertain_usd = sum(t.unproven for t in found.tallies.values()) / PICO
    return found


def _sound(line: SpendLine) -> bool:
    """Whether its amounts can be: only a correction is negative."""
    amounts = (line.cost_usd, line.cap_usd, line.reserve_usd)
    least = -math.inf if line.kind == "adjusted" else 0.0
    return all(math.isfinite(usd) and usd >= least for usd in amounts)


def _unwritten(head: RolloutHead, cost_usd: float) -> SpendLine:
    """The dispatch line that a paid reply must have had."""
    return SpendLine(
        ts=0.0,
        kind="dispatch",
        prompt_id=head.prompt_id,
        attempt=head.attempt,
        backend=head.backend,
        reserve_usd=cost_usd,
    )


def _bill_unjudged(run: RunDir, found: Recovered, open_: Set[tuple[str, int]]) -> None:
    """A reply whose dispatch a life closed that could not judge it, because its dataset was gone
    for a while; it does not count as an attempt before it is judged."""
    names = {(name, kept.attempt): name for name, kept in found.unjudged.items()}
    closed = names.keys() - open_
    for line in read_jsonl(run.spend, SpendLine) if closed else ():
        key = (line.prompt_id, line.attempt)
        if line.kind in CLOSING and key in closed and key not in found.billed:
            found.billed[key] = line
            if line.kind != "free":
                found.replies[line.prompt_id] -= 1
    for key in closed - found.billed.keys():  # its dispatch line is lost: nobody knows its price
        del found.unjudged[names[key]]


def _close(found: Recovered, line: SpendLine) -> None:
    found.spent_usd += line.cost_usd
    found.cap_usd += line.cap_usd
    if line.kind != "free":
        found.replies[line.prompt_id] = found.replies.get(line.prompt_id, 0) + 1
