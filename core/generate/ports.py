"""What generate needs from outside and what it gives back. Holds no behaviour."""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from core import events as ev
from core.generate.tally import Tally
from core.render.base import Renderer
from core.schema import Prompt, Rollout, RolloutHead, Sample, SpendLine


class Append(Protocol):
    """The part of store.Appender that generate uses."""

    @property
    def fault(self) -> Exception | None: ...

    def append(self, record: Any, durable: bool = False) -> Awaitable[None]: ...

    def post(self, record: Any) -> None: ...


class Unjudged(NamedTuple):
    """Where a whole reply without verdict stands: `at` is the byte at which its line begins."""

    attempt: int
    at: int


def _no_reply(at: int) -> Rollout:
    raise OSError("there is no file of an earlier life")


class Recovered(msgspec.Struct, kw_only=True):
    """What earlier lives of this run left behind (`resume.recover`). Empty for a new run.

    `finished`: prompts with a final outcome. `open`: dispatches that no line closes; `replied`:
    those of them whose reply was stored. `attempts`: the highest attempt number used, so that
    (prompt_id, attempt) stays a key. `replies`: attempts that were or may have been paid;
    `retried_usd`: what those cost that were followed by another attempt of themselves, not because
    of a halt.
    `tallies`: the books by backend. `unjudged`: prompts whose last line is a whole reply that waits
    for its verdict; `reply` reads it, and where its dispatch was closed already, `billed` has the
    line."""

    finished: set[str] = set()
    open: list[SpendLine] = []
    replied: dict[tuple[str, int], RolloutHead] = {}
    attempts: dict[str, int] = {}
    replies: dict[str, int] = {}
    retried_usd: dict[str, float] = {}
    spent_usd: float = 0.0
    cap_usd: float = 0.0
    uncertain_usd: float = 0.0
    outcomes: dict[str, int] = {}
    tallies: dict[str, Tally] = {}
    unjudged: dict[str, Unjudged] = {}
    billed: dict[tuple[str, int], SpendLine] = {}
    reply: Callable[[int], Rollout] = _no_reply


class Ports(msgspec.Struct, kw_only=True):
    """`judge` is given the prompt's ids, must not hold the loop and must not raise for a bad
    reply. `emit` must not block."""

    emit: Callable[[ev.Event], None]
    judge: Callable[[Rollout, Prompt, list[int]], Awaitable[Sample]]
    renderer: Renderer
    completions: Append
    spend: Append
    recovered: Recovered = msgspec.field(default_factory=Recovered)
    on_sample: Callable[[Sample, Rollout, Prompt], None] | None = None
    """Called on the loop for every judged reply that ended its prompt (live audit, tripwires)."""


class GenerateResult(msgspec.Struct, frozen=True, kw_only=True):
    """`reason` is empty when every prompt has a final outcome; else halted | drained | severed |
    disk_full | stopped (no provider left) | budget. `pending` prompts have no final outcome and are
    asked again on resume."""

    reason: str = ""
    detail: str = ""
    outcomes: dict[str, int] = {}
    pending: int = 0
    spent_usd: float = 0.0
    uncertain_usd: float = 0.0
    seconds: float = 0.0
