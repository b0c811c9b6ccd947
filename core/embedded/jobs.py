"""One completion on its way, and what produces it. No torch, no HTTP: the seam between API shapes
and sources.

A source (live sampler or replay) lets a Job grow until `finish` is set. The event loop takes from
it, waits on it and cancels it; nothing else is shared.
"""

import asyncio
import hashlib
import struct
from collections.abc import Sequence
from typing import Protocol

from core.embedded.replies import Delta, Mode, Splitter, TextStream, Vocabulary, text_of


def sample_key(seed: int, ids: Sequence[int]) -> int:
    """64 bits that fix every random draw of a request: same seed and prompt ids, same sample on
    any API shape."""
    if isinstance(ids, bytes):  # without a list of numbers: a tenth of a replayed answer's cost
        wide = bytearray(4 * len(ids))
        wide[::4] = ids
    else:
        wide = bytearray(struct.pack(f"<{len(ids)}I", *ids))
    packed = struct.pack("<q", seed & (1 << 63) - 1) + wide
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


class Ask:
    """What to sample. `noisy` asks for another model's distribution; `replay_key` picks a recorded
    completion."""

    def __init__(
        self,
        ids: list[int],
        *,
        seed: int = 0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_tokens: int = 512,
        stop_ids: frozenset[int] = frozenset(),
        noisy: bool = False,
    ) -> None:
        self.ids = ids
        self.key = sample_key(seed, ids)
        self.temperature = temperature
        self.top_p = top_p
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.noisy = noisy
        self.replay_key = self.key


class Sampled:
    """A sequence that the sampler thread owns. `out` only grows; `cancelled` is the loop's only
    word to the thread."""

    __slots__ = ("ask", "cancelled", "finish", "listening", "logprobs", "on_loop", "out")

    def __init__(self, ask: Ask, listening: bool = True) -> None:
        self.ask = ask
        self.out: list[int] = []
        self.logprobs: list[float] = []
        self.finish: str | None = None
        self.cancelled = False
        self.listening = listening
        """False: only the end is reported."""
        self.on_loop: LiveJob | None = None


class Job(Protocol):
    """`finish` is None while it grows, then `stop`, `length` or `abort`."""

    @property
    def finish(self) -> str | None: ...
    @property
    def out(self) -> list[int]:
        """Ids sampled so far; empty when a recorded completion holds text alone."""
        ...

    @property
    def logprobs(self) -> list[float]: ...
    @property
    def generated(self) -> int:
        """Tokens so far, stop token included."""
        ...

    def text(self) -> str:
        """Text so far, markers included, stop token not."""
        ...

    def take(self) -> list[Delta]:
        """Pieces since the last call; after the end the rest."""
        ...

    async def advance(self) -> None:
        """Return when there may be something to take, or the job has finished."""
        ...

    async def done(self) -> None: ...

    def cancel(self) -> None:
        """Stop as soon as the source sees it; what was generated stays. Idempotent."""
        ...


class Source(Protocol):
    """Where completions come from."""

    def open(self, ask: Ask, mode: Mode, stream: bool) -> Job: ...
    def load_now(self) -> tuple[int, int]:
        """(running, queued) sequences."""
        ...

    @property
    def needs_prompt(self) -> bool:
        """Must `ask.ids` hold the rendered prompt?"""
        ...

    @property
    def has_ids(self) -> bool:
        """Does a job know token ids?"""
        ...

    def prompt_tokens(self, ask: Ask) -> int: ...
    def pause(self, paused: bool) -> None: ...
    def close(self) -> None: ...


class LiveJob:
    """A sampled sequence seen from the event loop."""

    def __init__(self, sampled: Sampled, tokenizer: Vocabulary, mode: Mode) -> None:
        self._sampled = sampled
        sampled.on_loop = self
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer)
        self._splitter = Splitter(mode)
        self._taken = 0
        self._ended = False
        self._changed = asyncio.Event()
        self._done = asyncio.Event()

    @property
    def finish(self) -> str | None:
        return self._sampled.finish

    @property
    def out(self) -> list[int]:
        return self._sampled.out

    @property
    def logprobs(self) -> list[float]:
        return self._sampled.logprobs

    @property
    def generated(self) -> int:
        return len(self._sampled.out)

    def text(self) -> str:
        return text_of(self._tokenizer, self._sampled.out)

    def take(self) -> list[Delta]:
        finished = self._sampled.finish is not None
        fresh = self._sampled.out[self._taken :]
        self._taken += len(fresh)
        deltas = self._splitter.feed(self._stream.feed(fresh, final=finished))
        if finished and not self._ended:
            self._ended = True
            deltas += self._splitter.end()
        return deltas

    async def advance(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    async def done(self) -> None:
        await self._done.wait()

    def cancel(self) -> None:
        self._sampled.cancelled = True

    def notify(self) -> None:
        """Called on the event loop after the sampler moved."""
        self._changed.set()
        if self._sampled.finish is not None:
            self._done.set()
