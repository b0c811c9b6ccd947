"""Recorded completions with a chosen timing: thousands of streams without a model.

A line of the file is `{"completion_ids": [...]}` or `{"text": "...", "completion_tokens": n}` (text
with markers, without the stop token), with optional `finish` (stop), `prompt_ids`, `prompt_tokens`.
A truth file is one. A request whose rendered prompt was recorded gets that completion; any other
one by the hash of its content and seed.
"""

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec

from core.embedded.jobs import Ask
from core.embedded.replies import Delta, Mode, Splitter, TextStream, Vocabulary, text_of
from core.errors import UsageError

EVENT_COST_S = 50e-6
"""Wake-ups of one stream are spaced by this times the open streams: tokens due meanwhile leave in
one write."""


class Record(msgspec.Struct, kw_only=True):
    """A recorded completion."""

    completion_ids: list[int] | None = None
    text: str | None = None
    completion_tokens: int | None = None
    finish: str = "stop"
    prompt_ids: list[int] | None = None
    prompt_tokens: int | None = None


class Tape:
    """A record made ready: one text piece per token, and their deltas for each way of reading,
    made once."""

    def __init__(self, record: Record, tokenizer: Vocabulary | None, where: str) -> None:
        self.ids = record.completion_ids
        self.finish = record.finish
        self.prompt_ids = record.prompt_ids
        self.prompt_tokens = record.prompt_tokens
        if self.prompt_tokens is None and record.prompt_ids is not None:
            self.prompt_tokens = len(record.prompt_ids)
        if record.completion_ids is not None and tokenizer is not None:
            stream = TextStream(tokenizer)
            self.pieces = [stream.feed([i]) for i in record.completion_ids]
            # A character left unfinished by the last token belongs to it.
            rest = text_of(tokenizer, record.completion_ids)[len("".join(self.pieces)) :]
            if self.pieces:
                self.pieces[-1] += rest
        elif record.text is not None and record.completion_tokens is not None:
            self.pieces = _cut(record.text, record.completion_tokens)
        else:
            raise UsageError(f"{where}: give completion_ids and a tokenizer, or text and its count")
        self._deltas: dict[tuple[Mode, int], list[list[Delta]]] = {}

    def deltas(self, mode: Mode, tokens: int) -> list[list[Delta]]:
        """Deltas by token, for a reply of `tokens` tokens."""
        made = self._deltas.get((mode, tokens))
        if made is None:
            splitter = Splitter(mode)
            made = [splitter.feed(piece) for piece in self.pieces[:tokens]]
            if made:
                made[-1] += splitter.end()
            self._deltas[mode, tokens] = made
        return made


def _cut(text: str, tokens: int) -> list[str]:
    """`tokens` pieces of about equal length."""
    bounds = [len(text) * i // max(1, tokens) for i in range(tokens + 1)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


class ReplaySource:
    """Speaks the recorded completions at `tokens_per_s` (0: at once) after `ttft_s`."""

    def __init__(
        self,
        tapes: Sequence[Tape],
        tokens_per_s: float = 0.0,
        ttft_s: float = 0.0,
    ) -> None:
        self._tapes = list(tapes)
        self._by_prompt: dict[tuple[int, ...], list[Tape]] = {}
        for tape in tapes:
            if tape.prompt_ids is not None:
                self._by_prompt.setdefault(tuple(tape.prompt_ids), []).append(tape)
        self.tokens_per_s = tokens_per_s
        self.ttft_s = ttft_s
        self.active = 0

    @classmethod
    def load(
        cls,
        path: Path,
        tokenizer: Vocabulary | None,
        tokens_per_s: float = 0.0,
        ttft_s: float = 0.0,
    ) -> "ReplaySource":
        """Raises UsageError with file and line."""
        decoder = msgspec.json.Decoder(Record)
        tapes = []
        try:
            lines = path.read_bytes().splitlines()
        except OSError as e:
            raise UsageError(f"{path}: cannot be read ({e.strerror}); give --replay a file") from e
        for number, line in enumerate(lines, 1):
            where = f"{path}:{number}"
            try:
                tapes.append(Tape(decoder.decode(line), tokenizer, where))
            except (msgspec.DecodeError, UnicodeDecodeError) as e:
                raise UsageError(f"{where}: not a recorded completion: {e}") from e
        if not tapes:
            raise UsageError(f"{path}: no recorded completion; give --replay a file with some")
        return cls(tapes, tokens_per_s, ttft_s)

    @property
    def needs_prompt(self) -> bool:
        """Must prompts be rendered? Not when every record says its own count and none its
        prompt."""
        return bool(self._by_prompt) or any(t.prompt_tokens is None for t in self._tapes)

    @property
    def has_ids(self) -> bool:
        return all(t.ids is not None for t in self._tapes)

    def pick(self, ask: Ask) -> Tape:
        known = self._by_prompt.get(tuple(ask.ids)) if self._by_prompt else None
        tapes = known or self._tapes
        return tapes[ask.replay_key % len(tapes)]

    def prompt_tokens(self, ask: Ask) -> int:
        """The count of a prompt that was not rendered."""
        return self.pick(ask).prompt_tokens or 0

    def open(self, ask: Ask, mode: Mode, stream: bool) -> "ReplayJob":
        return ReplayJob(self, self.pick(ask), ask, mode)

    def load_now(self) -> tuple[int, int]:
        return self.active, 0

    def pause(self, paused: bool) -> None:
        """Recorded timing goes on."""

    def close(self) -> None:
        """Nothing to stop: jobs are timers of the event loop."""


class ReplayJob:
    """A tape being played. What is due follows from the clock alone; nothing ticks between two
    looks at it."""

    def __init__(self, source: ReplaySource, tape: Tape, ask: Ask, mode: Mode) -> None:
        self._source = source
        self._tape = tape
        self._mode = mode
        self.finish: str | None = None
        self._total = min(len(tape.pieces), ask.max_tokens)
        self._end = tape.finish if self._total == len(tape.pieces) else "length"
        self._taken = 0
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time() + source.ttft_s
        self._done = asyncio.Event()
        self._frozen: int | None = None
        source.active += 1
        rate = source.tokens_per_s
        length_s = self._total / rate if rate else 0.0
        self._timer = self._loop.call_at(self._start + length_s, self._finish, self._end)

    def _finish(self, finish: str) -> None:
        if self.finish is None:
            self._frozen = self.generated if finish == "abort" else self._total
            self.finish = finish
            self._source.active -= 1
            self._timer.cancel()
            self._done.set()

    @property
    def generated(self) -> int:
        if self._frozen is not None:
            return self._frozen
        elapsed = self._loop.time() - self._start
        if elapsed < 0 or not self._source.tokens_per_s:
            return 0
        return min(self._total, int(elapsed * self._source.tokens_per_s))

    @property
    def out(self) -> list[int]:
        return (self._tape.ids or [])[: self.generated]

    @property
    def logprobs(self) -> list[float]:
        return []

    def text(self) -> str:
        return "".join(self._tape.pieces[: self.generated])

    def take(self) -> list[Delta]:
        now = self.generated
        due = self._tape.deltas(self._mode, self._total)[self._taken : now]
        self._taken = max(now, self._taken)
        return [delta for deltas in due for delta in deltas]

    async def advance(self) -> None:
        rate = self._source.tokens_per_s
        if not rate or self.finish is not None:
            await self._done.wait()
            return
        following = self._start + (self._taken + 1) / rate
        spaced = self._loop.time() + self._source.active * EVENT_COST_S
        # 0.1 ms late rather than early: a token must be due when the timer has fired.
        await asyncio.sleep(max(following - self._loop.time(), spaced - self._loop.time()) + 1e-4)

    async def done(self) -> None:
        await self._done.wait()

    def cancel(self) -> None:
        self._finish("abort")
