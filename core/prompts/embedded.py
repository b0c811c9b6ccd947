"""`embedded`: held-out prompts of the built-in corpus. No file."""

from collections.abc import Iterator

from core.config import Dataset
from core.embedded.corpus import examples
from core.prompts.conversation import Conversation


def conversations(dataset: Dataset, seed: int) -> Iterator[Conversation]:
    """As many as the dataset's limit (0: the whole split), in turn from each of its families."""
    for example in examples("heldout", seed, dataset.families, dataset.limit):
        yield Conversation(example.messages, example.tools, example.thinking)
