"""The sampler as a source of completions for an event loop: one wake-up of the loop per step, not
per token.

The only module of the gateway that leads to torch.
"""

import asyncio
from pathlib import Path

from core.embedded.jobs import Ask, LiveJob, Sampled
from core.embedded.model import Llama
from core.embedded.replies import Mode, Vocabulary
from core.embedded.sampler import Sampler


class LiveSource:
    """Samples from the model in `directory`. Made on the running event loop that its jobs belong
    to."""

    needs_prompt = True
    has_ids = True

    def __init__(
        self, directory: Path, tokenizer: Vocabulary, slots: int = 64, threads: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._loop = asyncio.get_running_loop()
        model = Llama.load(directory)
        self.context_length = model.config.max_positions
        self.vocab_size = model.config.vocab_size
        self._sampler = Sampler(model, self._notify, slots=slots, threads=threads)

    def open(self, ask: Ask, mode: Mode, stream: bool) -> LiveJob:
        sampled = Sampled(ask, listening=stream)
        job = LiveJob(sampled, self._tokenizer, mode)
        self._sampler.submit(sampled)
        return job

    def prompt_tokens(self, ask: Ask) -> int:
        return len(ask.ids)

    def load_now(self) -> tuple[int, int]:
        return self._sampler.load()

    def pause(self, paused: bool) -> None:
        self._sampler.pause(paused)

    def close(self) -> None:
        self._sampler.close()

    def _notify(self, moved: list[Sampled]) -> None:
        """In the sampler's thread. After the loop has closed there is nobody left to tell."""
        if moved and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_tell, moved)


def _tell(moved: list[Sampled]) -> None:
    for sampled in moved:
        if sampled.on_loop is not None:
            sampled.on_loop.notify()
