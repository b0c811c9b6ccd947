"""Samples against the truth file of the gateway, and completions to replay."""

import json
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from core.config import Config
from core.embedded.billing import PROVIDERS
from core.embedded.corpus import Example, examples
from core.pipeline import rebuild
from core.schema import TRAINABLE, Prompt, Rollout, Sample
from core.store import RunDir, encode_line, read_jsonl, read_samples
from tests.core.generate.rig import renderer

STOP_OFFSETS = {tag: p.stop_offset for p in PROVIDERS for tag in (p.name.lower(), p.tag)}


class Truth(NamedTuple):
    prompt: list[int]
    completion: list[int]


class Wrong(NamedTuple):
    """A sample that was admitted with ids that were not sampled."""

    sample: Sample
    truth: Truth

    @property
    def count_fits(self) -> bool:
        """Whether no count can tell: the true ids are as many, or the provider billed, by its own
        convention, the number of the wrong ones."""
        if len(self.sample.completion_ids) == len(self.truth.completion):
            return True
        billed, rebuilt = self.sample.billed_tokens, self.sample.rebuilt_tokens
        if billed is None or rebuilt is None:
            return False
        return billed - rebuilt == STOP_OFFSETS.get((self.sample.provider or "").lower(), 0)

    @property
    def non_canonical(self) -> bool:
        return not is_canonical(self.truth.completion)


class Score(msgspec.Struct, kw_only=True):
    """What became of one arm's replies. `right`: admitted with their true ids. `canonical`: replies
    whose sampled ids are the encoding of their text; of those, `canonical_equal` were rebuilt to
    their ids, admitted or not, and `canonical_refused` were not admitted, by class."""

    replies: int = 0
    verdicts: Counter[str] = msgspec.field(default_factory=Counter)
    right: int = 0
    wrong: list[Wrong] = []
    canonical: int = 0
    canonical_equal: int = 0
    canonical_right: int = 0
    canonical_refused: Counter[str] = msgspec.field(default_factory=Counter)

    def exactness(self) -> str:
        refused = dict(self.canonical_refused.most_common())
        other = self.replies - self.canonical
        return (
            f"{self.replies} replies; {self.canonical} canonical, of them {self.canonical_equal} "
            f"rebuilt to their ids, {self.canonical_right} admitted, refused {refused}; {other} in "
            f"another split of their text, of them {len(self.wrong)} admitted with the same count; "
            f"{dict(self.verdicts)}"
        )


def score(run: RunDir, config: Config, truth: Mapping[str, Truth], arm: str) -> Score:
    """The reconstruct stage over a run's replies, and its samples of one arm against the truth."""
    rebuild.run(run, config, lambda event: None, lambda: False)
    keys = {
        r.prompt_id: r.request.get("rid") or r.generation_id or ""
        for r in read_jsonl(run.completions, Rollout)
        if r.final and r.outcome in ("ok", "rejected")
    }
    result = Score()
    for sample in read_samples(run):
        if sample.arm == arm:
            _add(result, sample, truth[keys[sample.sample_id]])
    return result


def _add(result: Score, sample: Sample, true: Truth) -> None:
    admitted = sample.verdict in TRAINABLE
    right = sample.token_ids == true.prompt + true.completion
    right = right and sample.prompt_len == len(true.prompt)
    result.replies += 1
    result.verdicts[sample.verdict] += 1
    result.right += admitted and right
    if admitted and not right:
        result.wrong.append(Wrong(sample, true))
    if is_canonical(true.completion):
        result.canonical += 1
        result.canonical_equal += right
        result.canonical_right += admitted and right
        if not admitted:
            result.canonical_refused[sample.error_class or sample.verdict] += 1


class TruthFile:
    """The gateway's truth file, read on as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._known: dict[str, Truth] = {}

    def now(self) -> dict[str, Truth]:
        """By generation id."""
        with self._path.open("rb") as file:
            file.seek(self._read)
            for text in file:
                row = json.loads(text)
                self._known[row["generation_id"]] = Truth(row["prompt_ids"], row["completion_ids"])
            self._read = file.tell()
        return self._known


def is_canonical(ids: list[int]) -> bool:
    """Whether every run of text between special ids is the encoding of its text."""
    tokenizer = renderer().tokenizer
    run: list[int] = []
    for token in [*ids, -1]:
        if token >= 0 and not tokenizer.is_special(token):
            run.append(token)
            continue
        if run and tokenizer.encode_ordinary(tokenizer.decode(run)) != run:
            return False
        run = []
    return True


def without_local(run: RunDir) -> RunDir:
    """The same run as if nothing had been asked locally."""
    alone = RunDir(run.path.with_name(run.path.name + "-alone"))
    alone.path.mkdir()
    for source, to in ((run.prompts, alone.prompts), (run.completions, alone.completions)):
        rows = [r for r in read_jsonl(source, dict) if r["arm"] != "local"]
        to.write_bytes(b"".join(encode_line(r) for r in rows))
    return alone


def corpus_tape(path: Path, prompts: list[Prompt], config: Config, splits: float = 0.0) -> Path:
    """What a perfect model would answer to prompts of embedded datasets; `splits`: share of replies
    with one token sampled in two. Needs no weights."""
    dice = random.Random(1)
    known: dict[str, list[Example]] = {}
    for dataset in config.dataset:
        found = examples("heldout", config.run.seed, dataset.families, dataset.limit)
        known[dataset.name] = list(found)
    lines = []
    for prompt in prompts:
        ids = ids_of(known[prompt.dataset][prompt.source_row - 1])
        if dice.random() < splits:
            ids = other_split(ids, dice)
        asked = renderer().render(prompt.messages, prompt.tools, prompt.thinking)
        lines.append(json.dumps({"completion_ids": ids, "prompt_ids": asked.ids}) + "\n")
    path.write_text("".join(dict.fromkeys(lines)))
    return path


def ids_of(example: Example) -> list[int]:
    grammar, encode = renderer().grammar, renderer().tokenizer.encode_ordinary
    assert grammar is not None and grammar.think_close is not None
    ids = [*encode(example.reasoning), grammar.think_close] if example.thinking else []
    ids += encode(example.content)
    if example.tool_calls:
        ids.append(grammar.section_begin)
        for call in example.tool_calls:
            ids += [grammar.call_begin, *encode(call.id), grammar.arguments_begin]
            ids += [*encode(call.arguments), grammar.call_end]
        ids.append(grammar.section_end)
    return [*ids, grammar.end]


def other_split(ids: list[int], dice: random.Random) -> list[int]:
    """The same text with one token of it in two, as a model may sample it."""
    tokenizer = renderer().tokenizer
    spots = list(range(len(ids)))
    dice.shuffle(spots)
    for at in spots:
        if tokenizer.is_special(ids[at]):
            continue
        text = tokenizer.token_bytes(ids[at]).decode("utf-8", "replace")
        if len(text) > 1 and text.isascii():
            parts = [*tokenizer.encode_ordinary(text[:1]), *tokenizer.encode_ordinary(text[1:])]
            return [*ids[:at], *parts, *ids[at + 1 :]]
    return ids
