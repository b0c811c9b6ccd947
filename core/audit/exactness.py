"""How exact is rebuilding from text? Measured where a server returns ids and text together.

Each such reply was rebuilt from its text alone, by the code that rebuilds an API's replies, and is
compared with the sampled ids segment by segment. `canonical` isolates what sampling does (a model
may sample another split of a word), `same_text` what the server's parser does (trimmed blanks,
rewritten ids). Says nothing about providers: it is the best that any of them can reach.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from core.audit.shares import interval, wilson
from core.render.tokenizer import TokenizerLike
from core.schema import Segment

MEASURED = 10_000
"""Replies that are measured at most; at that number a share of 95 % is known to half a point."""
TEXT_KINDS = ("reasoning", "content", "call_id", "arguments")
EDGES, STRUCTURE = "edges", "structure"


class Side(msgspec.Struct, frozen=True):
    """A completion; segments count from its first token."""

    ids: list[int]
    segments: list[Segment]

    def texts(self) -> Iterator[tuple[str, list[int]]]:
        for s in self.segments:
            if s.kind in TEXT_KINDS:
                yield s.kind, self.ids[s.start : s.end]

    def structure(self) -> list[int]:
        return [
            i for s in self.segments if s.kind not in TEXT_KINDS for i in self.ids[s.start : s.end]
        ]


class Pair(msgspec.Struct, frozen=True):
    """One reply: as sampled, and as its text tells it. `parsed`: the server split the text itself.
    `consistent`: the rebuild's verdict, with the true count as its evidence."""

    true: Side
    told: Side
    parsed: bool
    consistent: bool


class KindCount(msgspec.Struct, kw_only=True):
    """`canonical`: ids equal the encoding of their text. `same_text`: of `compared` segments that
    the server parsed, its text was the ids' text. `exact`: the rebuilt ids are the sampled ones.
    `tokens` / `exact_tokens` alike. Edges: first and last token of each text, `segments` of them;
    structure: all markers of one reply, in order."""

    segments: int = 0
    canonical: int = 0
    compared: int = 0
    same_text: int = 0
    exact: int = 0
    tokens: int = 0
    exact_tokens: int = 0
    low: float = 0.0
    high: float = 1.0


class Exactness(msgspec.Struct, kw_only=True):
    """`low`, `high`: 95 % interval of exact / samples. `false`: rebuilds called consistent whose
    ids are not the sampled ones; what would be trained on wrongly."""

    samples: int = 0
    exact: int = 0
    low: float = 0.0
    high: float = 1.0
    with_text: int = 0
    consistent: int = 0
    false: int = 0
    kinds: dict[str, KindCount] = msgspec.field(default_factory=lambda: defaultdict(KindCount))

    @property
    def rate(self) -> float | None:
        return self.exact / self.samples if self.samples else None

    def add(self, pair: Pair, tokenizer: TokenizerLike) -> None:
        same = pair.true.ids == pair.told.ids
        self.samples += 1
        self.exact += same
        self.with_text += pair.parsed
        self.consistent += pair.consistent
        self.false += pair.consistent and not same
        self._add_structure(pair)
        told = _Told(pair.told)
        for kind, ids in pair.true.texts():
            theirs = told.next(kind)
            self._add_text(kind, ids, theirs, tokenizer, pair.parsed)
            if ids:
                edges = self.kinds[EDGES]
                right = sum(a == b for a, b in zip(_ends(ids), _ends(theirs or []), strict=False))
                _count(edges, 2, right, 2, right)

    def _add_structure(self, pair: Pair) -> None:
        marks = pair.true.structure()
        same = marks == pair.told.structure()
        _count(self.kinds[STRUCTURE], 1, same, len(marks), len(marks) * same)

    def _add_text(
        self,
        kind: str,
        ids: list[int],
        theirs: list[int] | None,
        tokenizer: TokenizerLike,
        parsed: bool,
    ) -> None:
        count = self.kinds[kind]
        exact = ids == theirs
        text = None if exact else tokenizer.decode(ids)
        count.canonical += text is None or tokenizer.encode_ordinary(text) == ids
        if parsed:
            count.compared += 1
            count.same_text += text is None or (
                theirs is not None and tokenizer.decode(theirs) == text
            )
        _count(count, 1, exact, len(ids), len(ids) * exact)

    def settle(self) -> None:
        """Put in the 95 % intervals (Wilson), and the kinds in order."""
        self.low, self.high = wilson(self.exact, self.samples)
        self.kinds = dict(sorted(self.kinds.items()))
        for count in self.kinds.values():
            count.low, count.high = wilson(count.exact, count.segments)

    def summary(self) -> dict[str, Any]:
        """For the Audit event: counts first, ratios and their 95 % intervals last."""
        data: dict[str, Any] = {
            "samples": self.samples,
            "exact": self.exact,
            "with_text": self.with_text,
            "consistent": self.consistent,
            "false": self.false,
        }
        for kind, count in self.kinds.items():
            data[kind] = _shares(count.exact, count.segments)
        if self.samples:
            data |= {k: v for k, v in _shares(self.exact, self.samples).items() if k != "segments"}
        return data


class _Told:
    """The n-th text of a kind, as the rebuild has it."""

    def __init__(self, side: Side) -> None:
        self._queues: dict[str, list[list[int]]] = defaultdict(list)
        for kind, ids in side.texts():
            self._queues[kind].append(ids)

    def next(self, kind: str) -> list[int] | None:
        queue = self._queues[kind]
        return queue.pop(0) if queue else None


def _ends(ids: Sequence[int]) -> list[int]:
    return [ids[0], ids[-1]] if ids else []


def _count(count: KindCount, segments: int, exact: int, tokens: int, exact_tokens: int) -> None:
    count.segments += segments
    count.exact += exact
    count.tokens += tokens
    count.exact_tokens += exact_tokens


def _shares(exact: int, segments: int) -> dict[str, Any]:
    share = interval(exact, segments)
    return {
        "segments": segments,
        "exact": exact,
        "rate": share.value,
        "low": share.low,
        "high": share.high,
    }
