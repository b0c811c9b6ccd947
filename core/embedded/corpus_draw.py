"""One example of the corpus, and the seeded hand that draws its values.

Promises: the same seed string gives the same values on every Python; a value drawn for one split is
never drawn for the other. Only `random.Random.random` is used, whose sequence Python guarantees.
"""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from msgspec import field

from core.embedded import corpus_data as data
from core.schema import Message, Record, Tool, ToolCall

Split = Literal["train", "heldout"]
HELDOUT_SHARE = 0.2
T = TypeVar("T")


class ExpectedCall(Record, frozen=True, kw_only=True):
    name: str
    arguments: dict[str, Any]


class Expect(Record, frozen=True, kw_only=True):
    """A right reply holds exactly these calls in order, and `contains` in its content."""

    calls: list[ExpectedCall] = field(default_factory=list)
    contains: list[str] = field(default_factory=list)


class Example(Record, frozen=True, kw_only=True):
    """One request with its model reply. `tools` is None where the request declares none.

    `values`: `kind:value` of every open value, the unit in which the splits are disjoint.
    With `thinking` False the reasoning is empty and the completion starts with the content.
    """

    family: str
    messages: list[Message]
    tools: list[Tool] | None
    thinking: bool
    reasoning: str
    content: str
    tool_calls: list[ToolCall]
    expect: Expect
    values: list[str]


def is_heldout_value(kind: str, value: str) -> bool:
    """A fixed fifth of all values, by hash; no seed moves a value to the other split."""
    digest = hashlib.sha256(f"{kind}:{value}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELDOUT_SHARE * 2**32


class Draw:
    """Draws for one example. `values`: what was drawn from the open pools, each at most once."""

    def __init__(self, split: Split, seed: str) -> None:
        self.split = split
        self.values: list[str] = []
        self._random = random.Random(seed)

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def choice(self, pool: Sequence[T]) -> T:
        """From a closed pool: words that both splits use."""
        return pool[int(self._random.random() * len(pool))]

    def number(self, low: int, high: int) -> int:
        """low..high inclusive, an open value."""
        span = high - low + 1
        return int(self._open("number", lambda: str(low + int(self._random.random() * span))))

    def town(self) -> str:
        return self._open("town", lambda: self._joined(*data.TOWNS))

    def person(self) -> str:
        return self._open("person", lambda: self._joined(*data.PERSONS))

    def item(self) -> str:
        return self._open("item", lambda: f"{self.choice(data.COLOURS)} {self.choice(data.THINGS)}")

    def time(self) -> str:
        hour, minute = range(8, 20), range(60)
        return self._open("time", lambda: f"{self.choice(hour):02}:{self.choice(minute):02}")

    def han_town(self) -> str:
        return self._open("han_town", lambda: self._joined(*data.HAN_TOWNS))

    def han_person(self) -> str:
        return self._open("han_person", lambda: self._joined(*data.HAN_PERSONS))

    def shuffled(self, pool: Sequence[T]) -> list[T]:
        keyed = [(self._random.random(), i) for i in range(len(pool))]
        return [pool[i] for _, i in sorted(keyed)]

    def _joined(self, head: Sequence[str], middle: Sequence[str], tail: Sequence[str]) -> str:
        """Head and tail, mostly with a middle."""
        parts = (self.choice(head), self.choice(middle), self.choice(tail))
        return parts[0] + (parts[1] if self.chance(0.7) else "") + parts[2]

    def _open(self, kind: str, make: Callable[[], str]) -> str:
        while True:
            value = make()
            key = f"{kind}:{value}"
            held_out = is_heldout_value(kind, value)
            if held_out == (self.split == "heldout") and key not in self.values:
                self.values.append(key)
                return value


class Turn(Record, frozen=True, kw_only=True):
    """What a family makes: conversation and reply, before tool lists and white space come round it.

    `needed` tools (job, spelling) are declared; `barred` jobs never are. Without needed tools, some
    are declared with probability `tool_share`. `first_index`: calls that the conversation holds.
    """

    messages: list[Message]
    reasoning: str
    content: str = ""
    calls: list[ExpectedCall] = field(default_factory=list)
    contains: list[str] = field(default_factory=list)
    needed: list[tuple[str, int]] = field(default_factory=list)
    barred: list[str] = field(default_factory=list)
    tool_share: float = 0.0
    first_index: int = 0
    instant_share: float = 0.12


def arguments_json(arguments: dict[str, Any]) -> str:
    """The spelling that the target writes: spaces after colon and comma, non-ASCII kept."""
    return json.dumps(arguments, ensure_ascii=False)
