"""What is wrong with a walked completion, by class: its text, its calls, its emptiness.

Pure and linear in the text. Positions that only token ids could prove are not judged here.
"""

import itertools
import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from core.reconstruct.completion import TOOL_MARKERS, Item, Walked, name_of
from core.render.tokenizer import TokenizerLike
from core.schema import ToolCall

_MARKER_LIKE = re.compile(r"<\|[A-Za-z_][A-Za-z0-9_]*\|>|</?think>")
_BRACKETED = re.compile(r"\[[A-Z]{3}\]")
# An id that another API made up: letters, digits, `-` and `_`.
_FOREIGN_ID = re.compile(r"[A-Za-z0-9_-]+")
_REPEAT_TOKENS, _REPEAT_PERIOD, _REPEAT_END = 1_024, 64, 8
_MAX_SPELLED = 6


def text_problems(
    items: Sequence[Item], kinds: Sequence[str], specials: Collection[str]
) -> list[str]:
    """Problems of text that came as text. Text decoded from a server's ids needs none of this."""
    problems: list[str] = []
    last_text = max((i for i, item in enumerate(items) if not item.marker), default=-1)
    for i, (item, kind) in enumerate(zip(items, kinds, strict=True)):
        if item.marker or item.ids is not None:
            continue
        text = item.text
        if not text.isascii():
            if _has_surrogate(text):
                problems.append("lone_surrogate")
            if "\ufffd" in text:
                problems.append("replacement_char")
        if "<" in text:
            problems += (_marker_class(m, kind, specials) for m in set(_MARKER_LIKE.findall(text)))
            if (kind == "reasoning" or i == last_text) and _ends_in_fragment(text, specials):
                problems.append("marker_fragment")
    return problems


def spells_a_special(items: Sequence[Item], specials: Collection[str]) -> bool:
    """Whether text holds a special in brackets, such as `[EOS]`: kept as text, which the count can
    prove most of the time (see `lengths_with_specials`), and worth a flag."""
    return any(_spelled(item, specials) for item in items)


def lengths_with_specials(items: Sequence[Item], tokenizer: TokenizerLike) -> set[int] | None:
    """How long the completion would be if one or more of its spelled specials had been sampled as
    such: `[EOS]"` is three tokens as text, and two as a special. None: too many to try."""
    texts = [item.text for item in items if _spelled(item, tokenizer.specials)]
    pieces = [_cut_at_specials(text, tokenizer.specials) for text in texts]
    spelled = sum(len(cut) // 2 for cut in pieces)
    if spelled > _MAX_SPELLED:
        return None
    whole = sum(
        1 if item.marker else len(tokenizer.encode_ordinary(item.text))
        for item in items
        if item.marker or item.text not in texts
    )
    readings = itertools.product((False, True), repeat=spelled)
    return {whole + _length(pieces, iter(taken), tokenizer) for taken in readings if any(taken)}


def _spelled(item: Item, specials: Collection[str]) -> bool:
    if item.marker or "[" not in item.text:
        return False
    return any(mark in specials for mark in _BRACKETED.findall(item.text))


def _cut_at_specials(text: str, specials: Collection[str]) -> list[str]:
    """Text, special, text, special, ..., text."""
    parts, start = [], 0
    for found in _BRACKETED.finditer(text):
        if found[0] in specials:
            parts += [text[start : found.start()], found[0]]
            start = found.end()
    return [*parts, text[start:]]


def _length(texts: Sequence[Sequence[str]], taken: Iterator[bool], tokenizer: TokenizerLike) -> int:
    """Tokens of cut texts, where `taken` says of each special whether it is one."""
    total = 0
    for cut in texts:
        run = cut[0]
        for mark, after in zip(cut[1::2], cut[2::2], strict=True):
            if next(taken):
                total += len(tokenizer.encode_ordinary(run)) + 1
                run = after
            else:
                run += mark + after
        total += len(tokenizer.encode_ordinary(run))
    return total


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _marker_class(marker: str, kind: str, specials: Collection[str]) -> str:
    if marker not in specials:
        return "unknown_marker"
    if kind == "reasoning" and marker in TOOL_MARKERS:
        return "marker_in_reasoning"
    return "control_string_in_output"


def _ends_in_fragment(text: str, specials: Collection[str]) -> bool:
    """A tail such as `<|tool_calls_sec` (case C22): at least three characters after `<|`."""
    at = text.rfind("<", max(0, len(text) - 40))
    if at < 0:
        return False
    tail = text[at:]
    if len(tail) < 5 or not tail.startswith(("<|", "</thi")):
        return False
    return any(name.startswith(tail) and name != tail for name in specials)


def call_problems(calls: Sequence[ToolCall], structured: bool) -> list[str]:
    """`structured`: the calls came as fields, so that ids may have been made up on the way; those
    are left to the hypothesis that they were renumbered."""
    problems: list[str] = []
    seen: set[str] = set()
    for call in calls:
        if not is_native(call.id):
            if not (structured and is_foreign(call)):
                problems.append("tool_id_malformed")
        elif name_of(call.id) != call.name:
            problems.append("tool_id_name_mismatch")
        if call.id in seen:
            problems.append("tool_id_duplicate")
        seen.add(call.id)
        if problem := _arguments_problem(call.arguments):
            problems.append(problem)
    return problems


def is_native(call_id: str) -> bool:
    """`functions.NAME:INDEX`; a name may hold dots and hyphens, no space and no marker."""
    prefix, _, index = call_id.rpartition(":")
    name = prefix.removeprefix("functions.")
    named = bool(name) and name != prefix and not any(c.isspace() or c in "<|" for c in name)
    return named and index.isdecimal() and index.isascii()


def is_foreign(call: ToolCall) -> bool:
    """Whether a structured call's id was made up by a provider, rather than damaged."""
    damaged = call.id.startswith("functions") or call.id == call.name
    return not is_native(call.id) and not damaged and bool(_FOREIGN_ID.fullmatch(call.id))


def _arguments_problem(arguments: str) -> str | None:
    try:
        # Numbers stay text: thousands of digits are legal JSON and an error for int().
        value: Any = json.loads(
            arguments, parse_int=str, parse_float=str, parse_constant=_refuse_constant
        )
    except RecursionError:
        return "tool_args_too_deep"
    except ValueError:
        return "tool_args_invalid_json"
    return None if isinstance(value, dict) else "tool_args_not_object"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def ending_problems(walked: Walked, finish: str | None) -> list[str]:
    """Where the walk stopped, against how the reply says that it finished."""
    if finish == "length":
        return ["truncated_length"]
    if walked.state in ("section", "call_id", "arguments"):
        return ["tool_section_unterminated"]
    return []


def emptiness_problems(walked: Walked, items: Sequence[Item]) -> list[str]:
    if walked.calls:
        return []
    spoken = {k for item, k in zip(items, walked.kinds, strict=True) if not item.marker}
    if "content" in spoken:
        return []
    return ["empty_answer"] if "reasoning" in spoken else ["empty_completion"]


def is_degenerate(ids: Sequence[int]) -> bool:
    """1,024 tokens, but for the last eight the last ones, repeat with a period of at most 64."""
    if len(ids) < _REPEAT_TOKENS + _REPEAT_END or len(set(ids[-256:-_REPEAT_END])) > _REPEAT_PERIOD:
        return False
    tail = ids[-_REPEAT_TOKENS - _REPEAT_END : -_REPEAT_END]
    return any(tail[p:] == tail[:-p] for p in range(1, _REPEAT_PERIOD + 1))
