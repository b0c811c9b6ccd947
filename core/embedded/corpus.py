"""The templated corpus: what the embedded target is trained on, and the prompts of the demo.

Promises: deterministic by seed, no file, no network, no torch; the values of `heldout` never occur
in `train`.
Knows nothing about tokens: `core.render` turns an example into ids.
"""

import json
from collections.abc import Iterator, Sequence

from core.embedded import corpus_data as data
from core.embedded.corpus_calls import CALL_FAMILIES, spelling_of
from core.embedded.corpus_draw import (
    Draw,
    Example,
    Expect,
    ExpectedCall,
    Split,
    Turn,
    arguments_json,
)
from core.embedded.corpus_talk import TALK_FAMILIES
from core.errors import PromptError
from core.schema import Message, Tool, ToolCall

__all__ = ["FAMILIES", "SPLIT_SIZE", "Example", "Expect", "ExpectedCall", "examples", "is_right"]

_FAMILIES = {**CALL_FAMILIES, **TALK_FAMILIES}
FAMILIES: tuple[str, ...] = tuple(_FAMILIES)
SPLIT_SIZE: dict[str, int] = {"train": 100_000, "heldout": 4_000}
"""Number of examples of a split; `limit` 0 means all of them."""
SYSTEM = ("You are a helpful assistant.", "Be brief.")
# A family whose pools are exhausted (past this many repeats) sits out a round.
TRIES = 30


def examples(
    split: Split, seed: int, families: Sequence[str] = (), limit: int = 0
) -> Iterator[Example]:
    """Examples in turn from each family (all of them by default), no request twice.

    The same arguments give the same sequence; another `limit` only cuts it elsewhere. Raises
    PromptError for an unknown family.
    """
    names = tuple(families) or FAMILIES
    for name in names:
        if name not in _FAMILIES:
            raise PromptError(f"corpus family {name!r}: unknown; choose from {', '.join(FAMILIES)}")
    wanted = limit or SPLIT_SIZE[split]
    seen: set[str] = set()
    made = round_ = 0
    while made < wanted:
        before = made
        for name in names:
            example = _unseen(split, seed, name, round_, seen)
            if example is not None and made < wanted:
                made += 1
                yield example
        if made == before:
            return
        round_ += 1


def is_right(expect: Expect, content: str, calls: Sequence[ToolCall]) -> bool:
    """Does a reply hold exactly these calls with equal arguments, in order, and these strings?"""
    if len(calls) != len(expect.calls):
        return False
    for call, wanted in zip(calls, expect.calls, strict=True):
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            return False
        if call.name != wanted.name or arguments != wanted.arguments:
            return False
    return all(text in content for text in expect.contains)


def _unseen(split: Split, seed: int, name: str, round_: int, seen: set[str]) -> Example | None:
    for attempt in range(TRIES):
        draw = Draw(split, f"eyas/{split}/{seed}/{name}/{round_}/{attempt}")
        example = _build(name, _FAMILIES[name](draw), draw)
        request = json.dumps([example.messages, example.tools, example.thinking], sort_keys=True)
        if request not in seen:
            seen.add(request)
            return example
    return None


def _build(family: str, turn: Turn, d: Draw) -> Example:
    """Put tools, a system message and habits of white space round a family's turn."""
    tools = _declared(turn, d)
    messages: list[Message] = list(turn.messages)
    if messages[0]["role"] != "system" and d.chance(0.15):
        messages.insert(0, {"role": "system", "content": d.choice(SYSTEM)})
    thinking = not d.chance(turn.instant_share)
    reasoning, content = turn.reasoning if thinking else "", turn.content
    if thinking:
        # Habits that make trimming of white space a fault: a space after `<think>`, and in some
        # families a newline before `</think>` or blank lines before the answer.
        place = FAMILIES.index(family)
        reasoning = (" " if d.chance(0.5) else "") + reasoning + ("\n" if place % 4 == 1 else "")
        if content and place % 3 == 2:
            content = "\n\n" + content
    calls = [
        ToolCall(
            id=f"functions.{call.name}:{turn.first_index + i}",
            name=call.name,
            arguments=arguments_json(call.arguments),
        )
        for i, call in enumerate(turn.calls)
    ]
    return Example(
        family=family,
        messages=messages,
        tools=tools,
        thinking=thinking,
        reasoning=reasoning,
        content=content,
        tool_calls=calls,
        expect=Expect(calls=turn.calls, contains=turn.contains),
        values=d.values,
    )


def _declared(turn: Turn, d: Draw) -> list[Tool] | None:
    """The needed tools among up to two others, in any order; else one to three others, or none."""
    if not turn.needed and not d.chance(turn.tool_share):
        return None
    taken = {job for job, _ in turn.needed}
    spare = [job for job in data.JOBS if job not in taken and job not in turn.barred]
    count = d.choice((0, 0, 1, 1, 2)) if turn.needed else d.choice((1, 2, 2, 3))
    others = [(job, spelling_of(d, job)) for job in d.shuffled(spare)[:count]]
    chosen = d.shuffled([*turn.needed, *others])
    return [data.tool_schema(job, spelling) for job, spelling in chosen]
