"""Datasets -> prompts: one small module per format, one normal form, ids by content.

Promises: the same question has the same `twin_id` whatever dataset or arm it comes through, the
same prompt is asked once, and a bad line is refused as `file:line: what; what to do`. Knows no
backend and no tokenizer: texts that spell control tokens are refused by generate, which knows where
they would go (case C53)."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from core.config import Config, Dataset
from core.errors import PromptError
from core.prompts import (
    embedded,
    files,
    glaive,
    magicoder,
    messages,
    mot,
    nemotron,
    opencode,
    swesmith,
    toolace,
    xlam,
)
from core.prompts.conversation import Conversation, normalise
from core.schema import Arm, Prompt

__all__ = ["load_prompts"]

FORMATS: dict[str, Callable[[dict[str, Any]], Conversation]] = {
    "messages": messages.convert,
    "glaive": glaive.convert,
    "opencode": opencode.convert,
    "magicoder": magicoder.convert,
    "mot": mot.convert,
    "nemotron": nemotron.convert,
    "swesmith": swesmith.convert,
    "xlam": xlam.convert,
    "toolace": toolace.convert,
}
LOCAL_BACKEND = "sglang"
log = logging.getLogger(__name__)


def load_prompts(config: Config) -> list[Prompt]:
    """All datasets in the order of the config, twins right after the prompts of their dataset.
    Raises PromptError."""
    if not config.dataset:
        raise PromptError("no [[dataset]] in the config; add one")
    prompts: dict[str, Prompt] = {}
    for dataset in config.dataset:
        mine: dict[str, Prompt] = {}
        for prompt in _dataset(config, dataset):
            if prompt.prompt_id not in prompts:
                mine.setdefault(prompt.prompt_id, prompt)
            if dataset.limit and len(mine) >= dataset.limit:
                break
        if not mine:
            raise PromptError(
                f"dataset {dataset.name!r}: no prompt of its own; check path and limit"
            )
        prompts.update(mine)
        for twin in _twins(config, dataset, list(mine.values())):
            prompts.setdefault(twin.prompt_id, twin)
    return list(prompts.values())


def _dataset(config: Config, dataset: Dataset) -> Iterator[Prompt]:
    """Prompts of one dataset. Our own format is strict; in the named ones rows without a question
    are passed over and counted, because the published sets have some."""
    skipped = 0
    first = ""
    for number, where, conversation in _conversations(config, dataset):
        try:
            if isinstance(conversation, ValueError):
                raise conversation
            normal = normalise(conversation)
        except ValueError as fault:
            if dataset.kind in ("messages", "embedded"):
                raise PromptError(f"{where}: {fault}") from fault
            skipped += 1
            first = first or f"{where}: {fault}"
            continue
        thinking = dataset.thinking if conversation.thinking is None else conversation.thinking
        keep = dataset.preserve_thinking
        question = [normal.messages, normal.tools, thinking]
        twin_id = _hash([*question, "preserve_thinking"] if keep else question)
        prompt = Prompt(
            prompt_id="",
            twin_id=twin_id,
            dataset=dataset.name,
            messages=normal.messages,
            tools=normal.tools,
            arm=dataset.arm,
            backend=dataset.backend,
            thinking=thinking,
            preserve_thinking=keep,
            source_row=number,
            renamed=normal.renamed,
        )
        yield _identified(prompt, config)
    if skipped:
        log.warning("dataset %s: %d rows passed over, first %s", dataset.name, skipped, first)


def _conversations(
    config: Config, dataset: Dataset
) -> Iterator[tuple[int, str, Conversation | ValueError]]:
    if dataset.kind == "embedded":
        for number, conversation in enumerate(embedded.conversations(dataset, config.run.seed), 1):
            yield number, f"{dataset.name}:{number}", conversation
        return
    path = Path(dataset.path)
    convert = FORMATS[dataset.kind]
    for number, row in files.rows(path):
        try:
            yield number, f"{path}:{number}", convert(row)
        except ValueError as fault:
            yield number, f"{path}:{number}", fault


def _twins(config: Config, dataset: Dataset, prompts: list[Prompt]) -> Iterator[Prompt]:
    """Evenly spread over the dataset, so that every family and length has its reference."""
    wanted = min(dataset.twins, len(prompts))
    if dataset.arm == "local":
        return
    for i in range(wanted):
        prompt = prompts[i * len(prompts) // wanted]
        arm: Arm = "local"
        yield _identified(
            msgspec.structs.replace(prompt, arm=arm, backend=LOCAL_BACKEND, prompt_id=""), config
        )


def _identified(prompt: Prompt, config: Config) -> Prompt:
    """`prompt_id` holds everything that changes the meaning of the answer (case C73)."""
    generate = config.generate
    model = {
        "openrouter": generate.openrouter.model,
        "sglang": config.target.path or config.target.kind,
    }.get(prompt.backend, generate.openai.model)
    prompt_id = _hash(
        [
            prompt.twin_id,
            prompt.arm,
            prompt.backend,
            model,
            generate.temperature,
            generate.top_p,
            generate.max_tokens,
            config.target.variant,
        ]
    )
    return msgspec.structs.replace(prompt, prompt_id=prompt_id)


def _hash(value: Any) -> str:
    """Stable over key order and machines; ASCII escapes, because UTF-8 cannot hold a lone
    surrogate."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:24]
