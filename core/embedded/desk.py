"""One generation from its prompt to its entry in the books, the same for every API shape.

A generation runs in its own task: a client that leaves changes the bill only where the provider
stops for it. The truth line is on disk before the reply ends. Knows no HTTP.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from core.embedded.billing import PROVIDERS, Charge, Ledger, Provider
from core.embedded.books import Lines, read_books
from core.embedded.distort import distort
from core.embedded.faults import Hits, Plan
from core.embedded.jobs import Ask, Job, Source, sample_key
from core.embedded.replies import (
    SECTION,
    THINK_END,
    Mode,
    Parsed,
    reasoning_length,
    stop_ids,
)
from core.render.base import Renderer

OLD_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."
"""Default system message of an old template (spec kimi 1.4)."""


CLOSE_S = 2.0
"""A paused or stuck sampler does not keep the process alive longer than this."""


class Order(msgspec.Struct, kw_only=True):
    """A request, already understood."""

    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None
    thinking: bool = True
    preserve_thinking: bool = False
    ids: list[int] | None = None
    """Prompt ids given by the client: nothing is rendered."""
    content: bytes = b""
    """What makes two requests the same question."""
    seed: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None
    ignore_eos: bool = False
    stop_ids: list[int] = []
    stream: bool = False
    shape: str = "openrouter"


class Generation:
    """One accepted request. `settled` is set when the truth is written and the bill is made."""

    def __init__(self, gen_id: str, order: Order, hits: Hits, mode: Mode) -> None:
        self.id = gen_id
        self.order = order
        self.hits = hits
        self.mode = mode
        self.seed = 0
        self.prompt_ids: list[int] = []
        self.prompt_tokens = 0
        self.job: Job
        self.charge: Charge | None = None
        self.completion_ids: list[int] = []
        self.generated = 0
        self.reasoning_tokens = 0
        self.finish: str | None = None
        """`stop`, `length` or `abort`."""
        self.settled = asyncio.Event()
        self._reply: Parsed | None = None

    def reply(self) -> Parsed:
        """The reply as this server shows it, text faults applied. After the end only."""
        if self._reply is None:
            self._reply = distort(self.job.text(), self.mode, self.finish, self.hits)
        return self._reply

    @property
    def finish_reason(self) -> str | None:
        """As the API names it; None for an aborted one."""
        return None if self.finish == "abort" else self.reply().finish_reason


class Desk:
    """Starts generations and settles them."""

    def __init__(
        self,
        *,
        renderer: Renderer | None,
        source: Source,
        context_length: int,
        credit_usd: float = 1_000.0,
        seed: int = 0,
        truth: Path | None = None,
        books: Path | None = None,
    ) -> None:
        self.renderer = renderer
        self.source = source
        self.context_length = context_length
        self.ledger = Ledger(credit_usd)
        self.plan = Plan(seed=seed)
        self.providers = PROVIDERS
        self.seed = seed
        self.now: Callable[[], float] = time.time
        self.counts = {"requests": 0, "aborted": 0, "prompt_tokens": 0, "generation_tokens": 0}
        self._serial = 0
        self._life = secrets.token_hex(3)
        """Keeps ids of two processes apart."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._generations: set[Generation] = set()
        self._truth, self._books = Lines(truth), Lines(books)
        for charge in read_books(books):
            self.ledger.recall(charge)
        self._stops: frozenset[int] = frozenset()
        self.vocab_size = renderer.tokenizer.vocab_size if renderer else 1 << 31
        self._think_end = self._section = -1
        if renderer is not None:
            specials = renderer.tokenizer.specials
            self._stops = stop_ids(renderer.tokenizer)
            self._think_end, self._section = specials[THINK_END], specials[SECTION]

    def new_id(self, prefix: str) -> str:
        self._serial += 1
        return f"{prefix}{int(self.now())}-{self._life}{self._serial:06x}"

    def prepare(self, order: Order, hits: Hits, gen_id: str) -> Generation:
        """Render and count the prompt. Raises RenderError for messages that the template
        refuses."""
        tools = None if "tools_ignored" in hits else order.tools
        thinking = order.thinking or "reasoning_ignored" in hits
        gen = Generation(gen_id, order, hits, Mode(thinking=thinking, calls=bool(tools)))
        self._serial += 1
        gen.seed = self.seed * 1_000_003 + self._serial if order.seed is None else order.seed
        if order.ids is not None:
            gen.prompt_ids = order.ids
        elif self.renderer is not None and self.source.needs_prompt:
            messages = order.messages
            if "old_template" in hits and messages and messages[0].get("role") != "system":
                messages = [{"role": "system", "content": OLD_SYSTEM}, *messages]
            gen.prompt_ids = self.renderer.render(
                messages, tools, thinking, order.preserve_thinking
            ).ids
        gen.prompt_tokens = len(gen.prompt_ids) or self.source.prompt_tokens(self._ask(gen, 1))
        return gen

    def room(self, gen: Generation) -> int:
        """Tokens that the context leaves after the prompt."""
        return self.context_length - gen.prompt_tokens

    def start(self, gen: Generation, charge: Charge | None, provider: Provider | None) -> None:
        """Accept: from here on the generation runs to its end, whatever becomes of the client."""
        wanted = gen.order.max_tokens
        room = self.room(gen)
        ask = self._ask(gen, room if wanted is None else min(wanted, room))
        self.counts["requests"] += 1
        self.counts["prompt_tokens"] += gen.prompt_tokens
        if charge is not None:
            gen.charge = charge
            self.ledger.hold(charge)
            self._books.write(charge)
        gen.job = self.source.open(ask, gen.mode, gen.order.stream)
        task = asyncio.get_running_loop().create_task(self._finish(gen, provider))
        self._tasks.add(task)
        self._generations.add(gen)
        task.add_done_callback(self._tasks.discard)

    def leave(self, gen: Generation, provider: Provider | None) -> None:
        """The client has gone: a local server stops, a provider only where cancelling a stream
        stops the bill."""
        if provider is None or (gen.order.stream and provider.supports_cancel):
            gen.job.cancel()

    async def close(self) -> None:
        """Stop what is running, at the price of what it made so far, and close the files."""
        for gen in self._generations:
            gen.job.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        self.source.close()
        for lines in (self._truth, self._books):
            lines.close()

    def _ask(self, gen: Generation, max_tokens: int) -> Ask:
        order = gen.order
        noisy = "other_model" in gen.hits
        ask = Ask(
            gen.prompt_ids,
            seed=gen.seed,
            temperature=order.temperature + (0.4 if noisy else 0.0),
            top_p=order.top_p,
            max_tokens=max_tokens,
            stop_ids=frozenset(order.stop_ids) | (frozenset() if order.ignore_eos else self._stops),
            noisy=noisy,
        )
        if not gen.prompt_ids:
            # Nothing was rendered: the content stands for the prompt.
            ask.replay_key = sample_key(gen.seed, order.content)
        return ask

    async def _finish(self, gen: Generation, provider: Provider | None) -> None:
        try:
            await gen.job.done()
            self._generations.discard(gen)
            self._count(gen)
            self._write_truth(gen, provider)
            if gen.charge is not None and provider is not None:
                self._settle(gen, gen.charge, provider)
        finally:
            gen.settled.set()

    def _count(self, gen: Generation) -> None:
        """Take over what the job made, as the model would have written it under the faults."""
        gen.finish = gen.job.finish
        ids = list(gen.job.out)
        if "early_tools" in gen.hits and self._section in ids:
            head = ids[: ids.index(self._section)]
            if self._think_end in head:
                ids.remove(self._think_end)
        gen.completion_ids = ids
        gen.generated = len(ids) if ids else gen.job.generated
        if gen.mode.thinking and ids:
            gen.reasoning_tokens = reasoning_length(ids, self._think_end, self._section)
        self.counts["generation_tokens"] += gen.generated
        self.counts["aborted"] += gen.finish == "abort"

    def _settle(self, gen: Generation, charge: Charge, provider: Provider) -> None:
        hits = gen.hits
        charge.cancelled = gen.finish == "abort"
        completion = provider.counted(gen.generated, gen.finish)
        if "wrong_usage" in hits:
            completion = max(0, completion + int(hits.number("wrong_usage", 1)))
        if "wrong_prompt_usage" in hits:
            charge.prompt_tokens += int(hits.number("wrong_prompt_usage", 20))
        if "empty_choices" in hits:
            completion = 0
        charge.completion_tokens = completion
        charge.reasoning_tokens = min(gen.reasoning_tokens, completion)
        cost = provider.cost_pico(charge.prompt_tokens, completion)
        if "overcharge" in hits:
            cost = int(cost * hits.number("overcharge", 2))
        # Zero-completion insurance: nothing generated and no finish reason, or an error, is not
        # billed.
        if "error_mid_stream" in hits or (charge.cancelled and gen.generated == 0):
            cost = 0
        if "byok" in hits:
            charge.byok, charge.upstream_pico, cost = True, cost, 0
        charge.hidden = "lookup_lost" in hits
        charge.finish_reason = charge.native_finish_reason = gen.finish_reason
        self.ledger.settle(charge, cost, self.now())
        self._books.write(charge)

    def _write_truth(self, gen: Generation, provider: Provider | None) -> None:
        line = {
            "generation_id": gen.id,
            "shape": gen.order.shape,
            "provider": provider.name if provider else None,
            "arm": "local" if provider is None else "declared" if gen.order.tools else "text",
            "seed": gen.seed,
            "prompt_ids": gen.prompt_ids,
            "completion_ids": gen.completion_ids,
            "finish": gen.finish,
            "faults": gen.hits.names,
        }
        self._truth.write(line)
