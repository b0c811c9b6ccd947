"""One sample against its prompt: pure functions, each yields remarks. Sample + prompt ->
list[Finding].

`error` means that the sample should not be trained on as it is, `warn` that a person should know,
`info` that it is a fact about the sample which changes nothing by itself. Knows one sample at a
time: habits of a provider and differences between arms are `semantics`. No files, no clock.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np

from core.audit.reading import (
    Asked,
    Reading,
    ends_in_fragment,
    markers_in,
    parse_arguments,
)
from core.schema import Finding, Sample

Severity = Literal["info", "warn", "error"]
NATIVE_ID = re.compile(r"functions\.([^\s<|]+):([0-9]+)")
PROMPT_SLACK = 3
"""Billed prompt tokens may exceed ours by this many (Kimi-Vendor-Verifier's tolerance)."""
LOOP_TOKENS = 128
"""A tail of at least this many tokens that repeats one period is a loop, not a list."""
LOOP_PERIOD = 64
LOOP_REPEATS = 4
NGRAM_TOKENS = 256
NGRAM_SHARE = 0.15
"""Below this share of distinct 4-grams, in a completion of at least NGRAM_TOKENS, most of it is
said again."""


class Remark(msgspec.Struct, frozen=True):
    rule: str
    severity: Severity
    detail: str
    spans: list[tuple[int, int]] = []


class Case(msgspec.Struct, frozen=True):
    """A sample with everything that the rules look at."""

    sample: Sample
    asked: Asked
    reading: Reading


Rule = Callable[[Case], Iterator[Remark]]


def findings(case: Case, rules: Sequence[Rule] | None = None) -> list[Finding]:
    """Remarks as findings, of all RULES unless told otherwise. What the target itself does (`OWN`,
    with the server's ids) is no error: a drafter has to follow the target, mistakes included."""
    sample = case.sample
    own = OWN if sample.verdict == "exact" else frozenset()
    return [
        Finding(
            sample_id=sample.sample_id,
            rule=remark.rule,
            detail=remark.detail,
            severity="warn" if remark.rule in own else remark.severity,
            dataset=sample.dataset,
            provider=sample.provider,
            spans=remark.spans,
        )
        for rule in (RULES if rules is None else rules)
        for remark in rule(case)
    ]


def verdict_and_class(case: Case) -> Iterator[Remark]:
    sample = case.sample
    if sample.verdict == "rejected":
        yield Remark(
            f"rejected:{sample.error_class or 'unknown'}", "error", "the rollout was rejected"
        )
    elif sample.verdict == "mismatch":
        yield Remark(
            "mismatch",
            "error",
            f"{sample.error_class or 'count_mismatch'}: rebuilt {sample.rebuilt_tokens} tokens,"
            f" billed {sample.billed_tokens}",
        )
    elif sample.verdict == "hypothesis":
        yield Remark("hypothesis", "warn", f"matches only if: {sample.hypothesis or 'unnamed'}")
    elif sample.verdict == "unverifiable":
        yield Remark("unverifiable", "warn", "no usable token count")


def flags(case: Case) -> Iterator[Remark]:
    """What rebuilding noticed and the other rules do not find by themselves."""
    for flag in case.sample.flags:
        if flag not in _FOUND_BY_RULES:
            yield Remark(f"flag:{flag}", FLAG_SEVERITY.get(flag, "info"), "noted while rebuilding")


def prompt_count(case: Case) -> Iterator[Remark]:
    billed, ours = case.sample.prompt_tokens_billed, case.sample.prompt_len
    if billed is not None and ours and not ours <= billed <= ours + PROMPT_SLACK:
        yield Remark(
            "prompt_drift",
            "error",
            f"billed {billed} prompt tokens, ours {ours}: another template, or text was added",
        )


def finish(case: Case) -> Iterator[Remark]:
    sample, reading = case.sample, case.reading
    if not reading.ids:
        return
    if sample.finish_reason == "length" or not reading.ended:
        yield Remark("truncated", "warn", f"no end token (finish_reason {sample.finish_reason})")
    if sample.finish_reason == "tool_calls" and not sample.calls:
        yield Remark("call_lost", "error", "finish_reason tool_calls without a call")


def thinking(case: Case) -> Iterator[Remark]:
    reading = case.reading
    if not reading.ids or reading.closes is None:
        return
    if not case.asked.thinking:
        if reading.closes or (reading.reasoning or "").strip():
            yield Remark("thinks_in_instant_mode", "error", "thinking was off in the request")
        return
    if reading.closes > 1:
        yield Remark("think_closed_twice", "error", f"{reading.closes} </think> tokens")
    if reading.closes == 0 and reading.ended:
        yield Remark("no_think_close", "info", "no </think> before the tool section or the end")
    if reading.closes and not (reading.reasoning or "").strip():
        yield Remark("no_reasoning", "warn", "thinking was on and nothing was thought")


def answer(case: Case) -> Iterator[Remark]:
    reading = case.reading
    if reading.ids and reading.ended and not reading.answered and not case.sample.calls:
        yield Remark("empty_answer", "error", "neither content nor a tool call")


def leaks(case: Case) -> Iterator[Remark]:
    """Structural strings as ordinary text, and structural ids inside text."""
    reading = case.reading
    texts = [("reasoning", reading.reasoning or ""), ("content", reading.content)]
    texts += [("arguments", call.arguments) for call in case.sample.calls]
    for place, text in texts:
        if found := markers_in(text):
            fresh = [m for m in found if m not in case.asked.quoted]
            severity: Severity = "error" if fresh else "info"
            rule = "marker_leak" if fresh else "marker_quoted"
            yield Remark(rule, severity, f"{(fresh or found)[0]} in {place}")
        if place != "arguments" and (fragment := ends_in_fragment(text)):
            yield Remark("marker_fragment", "error", f"{place} ends in {fragment}")
        if "\ufffd" in text:
            yield Remark("replacement_char", "warn", f"U+FFFD in {place}")
    if reading.strays:
        yield Remark(
            "special_in_text",
            "error",
            f"{len(reading.strays)} special ids inside text",
            [(i, i + 1) for i in reading.strays],
        )


def spacing(case: Case) -> Iterator[Remark]:
    """Blanks that servers put round special tokens (vLLM issue 33457), and blanks at the end of the
    answer."""
    reading, sample = case.reading, case.sample
    spaced = sum(call.id != call.id.strip() for call in sample.calls)
    spaced += sum(call.arguments != call.arguments.strip() for call in sample.calls)
    thought = reading.reasoning or ""
    if reading.closes and thought.endswith(" ") and reading.content.startswith(" "):
        spaced += 1
    if spaced:
        yield Remark("spaced_markers", "warn", f"blanks round special tokens in {spaced} places")
    if reading.ended and not sample.calls and reading.content != reading.content.rstrip():
        yield Remark("trailing_blank", "info", "the answer ends in whitespace")


def tool_names(case: Case) -> Iterator[Remark]:
    tools = case.asked.tools
    for call in case.sample.calls:
        if tools is None:
            yield Remark("undeclared_tool", "error", f"{call.name!r} called, no tool was declared")
        elif call.name not in tools:
            yield Remark(
                "undeclared_tool", "error", f"{call.name!r} is not among {len(tools)} tools"
            )


def tool_arguments(case: Case) -> Iterator[Remark]:
    tools = case.asked.tools
    for call in case.sample.calls:
        try:
            value = parse_arguments(call.arguments)
        except (ValueError, RecursionError) as e:
            yield Remark("arguments_not_json", "error", f"{call.name!r}: {str(e)[:120]}")
            continue
        if not isinstance(value, dict):
            yield Remark("arguments_not_object", "error", f"{call.name!r}: {type(value).__name__}")
        elif tools is not None and call.name in tools:
            if problem := tools.error(call.name, value):
                yield Remark("arguments_schema", "error", f"{call.name!r}: {problem}")
            elif call.name in tools.broken:
                note = f"{call.name!r}: {tools.broken[call.name]}"
                yield Remark("schema_unusable", "info", note)


def tool_ids(case: Case) -> Iterator[Remark]:
    calls = case.sample.calls
    if not calls:
        return
    spans = [(a, b) for kind, a, b in case.reading.spans if kind == "call_id"]
    where = spans if len(spans) == len(calls) and all(a < b for a, b in spans) else []
    matches = [NATIVE_ID.fullmatch(call.id) for call in calls]
    foreign = [i for i, m in enumerate(matches) if m is None]
    if foreign:
        yield Remark(
            "id_not_native",
            "error",
            f"{calls[foreign[0]].id!r} is not functions.NAME:INDEX",
            [where[i] for i in foreign] if where else [],
        )
    other = [i for i, m in enumerate(matches) if m and m[1] != calls[i].name]
    if other:
        yield Remark(
            "id_names_another", "error", f"{calls[other[0]].id!r} calls {calls[other[0]].name!r}"
        )
    if len({call.id for call in calls}) < len(calls):
        yield Remark("id_duplicate", "error", "two calls of one reply share an id")
    numbers = [int(m[2]) for m in matches if m]
    # Servers differ in whether the counter restarts in a later turn (case C24): both pass.
    runs = [[first + i for i in range(len(numbers))] for first in (case.asked.calls_before, 0)]
    if not foreign and numbers not in runs:
        yield Remark("id_renumbered", "warn", f"indices {numbers[:8]}, expected {runs[0][:8]}")


def repetition(case: Case) -> Iterator[Remark]:
    ids = case.reading.ids
    if len(ids) < LOOP_TOKENS:
        return
    body = ids[:-1] if case.reading.ended else ids
    period, length = looping_tail(body)
    if length:
        end = case.sample.prompt_len + len(body)
        span = (end - length + period, end)
        yield Remark(
            "loop", "error", f"the last {length} tokens repeat a period of {period}", [span]
        )
    elif len(body) >= NGRAM_TOKENS and (share := distinct_ngrams(body)) < NGRAM_SHARE:
        yield Remark("repetitive", "warn", f"{share:.0%} of its 4-grams are distinct")


def looping_tail(ids: list[int]) -> tuple[int, int]:
    """(period, tokens) of the longest repeating tail of period <= LOOP_PERIOD, (0, 0) when it is
    too short.

    The last LOOP_PERIOD * LOOP_REPEATS tokens, read backwards, have a smallest period by the
    failure function of Knuth, Morris and Pratt; the tail is then followed as far as it goes.
    """
    window = ids[-1 : -LOOP_PERIOD * LOOP_REPEATS - 1 : -1]
    need = min(LOOP_TOKENS, len(window))
    fail = [0] * need
    k = 0
    for i in range(1, need):
        while k and window[i] != window[k]:
            k = fail[k - 1]
        k += window[i] == window[k]
        fail[i] = k
    period = need - fail[-1] if need else 0
    if not period or period > LOOP_PERIOD:
        return 0, 0
    i = len(ids) - 1
    while i - period >= 0 and ids[i] == ids[i - period]:
        i -= 1
    length = len(ids) - 1 - i + period
    enough = length >= LOOP_TOKENS and length >= period * LOOP_REPEATS
    return (period, length) if enough else (0, 0)


def distinct_ngrams(ids: list[int], n: int = 4) -> float:
    """Distinct n-grams / n-grams. Ids are mixed into one 64-bit number each, collisions are
    negligible here."""
    data = np.asarray(ids, dtype=np.uint64)
    count = len(data) - n + 1
    if count <= 0:
        return 1.0
    mixed = np.zeros(count, dtype=np.uint64)
    for i in range(n):
        mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + data[i : i + count]
    return len(np.unique(mixed)) / count


RULES: tuple[Rule, ...] = (
    verdict_and_class,
    prompt_count,
    finish,
    thinking,
    answer,
    leaks,
    spacing,
    tool_names,
    tool_arguments,
    tool_ids,
    repetition,
    flags,
)
WATCHED: tuple[Rule, ...] = (prompt_count, finish, leaks, tool_names, tool_arguments, flags)
"""What the tripwires count. The rest costs as much again and can wait for the audit."""
OWN = frozenset(
    {
        "undeclared_tool",
        "arguments_not_json",
        "arguments_not_object",
        "arguments_schema",
        "id_not_native",
        "id_names_another",
        "id_duplicate",
        "empty_answer",
        "marker_leak",
        "marker_fragment",
        "loop",
    }
)
"""Rules that a model breaks by itself, whoever serves it."""
FLAG_SEVERITY: dict[str, Severity] = {
    "spaced_markers": "warn",
    "provider_trims_whitespace": "warn",
    "provider_rewrites_arguments": "warn",
    "reasoning_count": "warn",
    "tool_id_out_of_sequence": "warn",
    "mixed_stop_offset": "warn",
    "tool_calls_duplicated": "warn",
    "stop_at_limit": "warn",
}
"""Flags of rebuilding that deserve more than `info`."""
_FOUND_BY_RULES = frozenset(
    {"no_think_close", "prompt_count_drift", "tool_id_foreign", "tool_undeclared"}
)
