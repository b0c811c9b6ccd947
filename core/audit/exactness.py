"""How exact is rebuilding from text? Measured on the local arm, where the server's own ids are
known.

A segment is rebuilt exactly when its ids are the canonical encoding of their text and, where the
server's reply carried parsed text as well, when that text is the ids' text to the byte. The first
isolates what sampling does (a model may sample another split of a word), the second what the
server's parser does (trimmed blanks, rewritten ids). Says nothing about providers: it is the best
that any of them can reach.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec

from core.audit.reading import Reading
from core.render.tokenizer import TokenizerLike
from core.schema import Sample

MEASURED = 20_000
"""Samples that are measured at most; at that number the 95 % interval of a share is below 0.7
points wide."""
TEXT_KINDS = ("reasoning", "content", "call_id", "arguments")

Digest = bytes


class ReplyText(msgspec.Struct, frozen=True):
    """Digests of the texts of one parsed reply, in order: reasoning, content, then id and arguments
    of each call."""

    texts: tuple[tuple[str, Digest], ...]


class KindCount(msgspec.Struct, kw_only=True):
    """`canonical`: ids equal the encoding of their text. `same_text`: of `compared` segments, the
    server's text was the ids' text. `exact`: both, or canonical where there was nothing to compare.
    `tokens` / `exact_tokens` alike."""

    segments: int = 0
    canonical: int = 0
    compared: int = 0
    same_text: int = 0
    exact: int = 0
    tokens: int = 0
    exact_tokens: int = 0


class Exactness(msgspec.Struct, kw_only=True):
    samples: int = 0
    exact: int = 0
    with_text: int = 0
    kinds: dict[str, KindCount] = msgspec.field(default_factory=lambda: defaultdict(KindCount))

    @property
    def rate(self) -> float | None:
        return self.exact / self.samples if self.samples else None

    def add(
        self, sample: Sample, reading: Reading, tokenizer: TokenizerLike, reply: ReplyText | None
    ) -> None:
        """Count one local sample with verdict `exact`."""
        spans = [s for s in reading.spans if s[0] in TEXT_KINDS]
        expected = _aligned(spans, reply)
        self.samples += 1
        self.with_text += reply is not None
        whole = True
        for (kind, start, end), theirs in zip(spans, expected, strict=True):
            ids = sample.token_ids[start:end]
            text = tokenizer.decode(ids)
            canonical = tokenizer.encode_ordinary(text) == ids
            same = theirs is None or theirs == digest(text)
            count = self.kinds[kind]
            count.segments += 1
            count.canonical += canonical
            count.compared += theirs is not None
            count.same_text += theirs is not None and same
            count.exact += canonical and same
            count.tokens += len(ids)
            count.exact_tokens += len(ids) * (canonical and same)
            whole = whole and canonical and same
        self.exact += whole

    def summary(self) -> dict[str, Any]:
        """For the Audit event: counts first, the rate last."""
        data: dict[str, Any] = {
            "samples": self.samples,
            "exact": self.exact,
            "with_text": self.with_text,
        }
        for kind, count in sorted(self.kinds.items()):
            data[kind] = {"segments": count.segments, "exact": count.exact}
        if self.rate is not None:
            data["rate"] = self.rate
        return data


def digest(text: str) -> Digest:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def reply_text(reply_raw: str) -> ReplyText | None:
    """Texts of a chat reply that carried ids beside them; None for any other body."""
    try:
        body = msgspec.json.decode(reply_raw)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
    try:
        message = body["choices"][0]["message"]
        return ReplyText(tuple(_texts(message)))
    except (KeyError, IndexError, TypeError, AttributeError):
        return None


def _texts(message: dict[str, Any]) -> Iterator[tuple[str, Digest]]:
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        yield "reasoning", digest(reasoning)
    if content := message.get("content"):
        yield "content", digest(content)
    for call in message.get("tool_calls") or ():
        yield "call_id", digest(call["id"])
        yield "arguments", digest(call["function"]["arguments"])


def _aligned(spans: list[tuple[str, int, int]], reply: ReplyText | None) -> list[Digest | None]:
    """For each text segment the n-th text of its kind; one that the reply lacks equals nothing."""
    if reply is None:
        return [None] * len(spans)
    queues: dict[str, list[Digest]] = defaultdict(list)
    for kind, value in reply.texts:
        queues[kind].append(value)
    return [
        b"" if end > start and not queues[kind] else queues[kind].pop(0) if queues[kind] else None
        for kind, start, end in spans
    ]
