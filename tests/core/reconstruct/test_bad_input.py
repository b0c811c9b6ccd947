"""Replies that nobody should send: each gets its verdict, for work in proportion to its size.

Work is counted in characters handed to the encoder, not in seconds; `tests.bench.bad_input` tells
those, at a megabyte and more.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.reconstruct import StopOffsets, judge
from core.reconstruct.classes import ORDER
from core.render.base import Renderer
from core.render.kimi import KimiRenderer
from core.render.tokenizer import RUN_CHARS, Tokenizer
from core.schema import Sample
from tests.core.reconstruct.replies import (
    call,
    chat_body,
    delta,
    embedded,
    prompt_of,
    rollout_of,
    sse,
)
from tests.kimi_files import kimi_renderer, needs_kimi

MOST_PASSES = 20
"""Encodings of one reply, hypotheses included."""
SEARCHED_CHARS = 1_000_000
SECTION = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{{"a":"{}"}}<|tool_call_end|><|tool_calls_section_end|>'
)
BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


class Bad(NamedTuple):
    """`body` makes the reply at about n characters; `expected`: a part of the class, or the verdict
    without one, when no count is told, the same at every size that is long enough to show it. A bar
    between two: it depends on the vocabulary."""

    body: Callable[[int], dict[str, Any]]
    expected: str


def text(part: str) -> Callable[[int], dict[str, Any]]:
    return lambda n: chat_body(part * (n // len(part)) + " end of it", " r")


def words(n: int) -> str:
    return " ".join(f"word{i}" for i in range(n // 8))


def drawn(alphabet: str, n: int) -> str:
    return "".join(random.Random(n).choices(alphabet, k=n))


def called(**fields: Any) -> dict[str, Any]:
    return chat_body("", " r", [call(**fields)])


TABLE = {
    "prose": Bad(lambda n: chat_body(words(n), " r"), "unverifiable"),
    "letters": Bad(lambda n: chat_body(drawn(BASE64[26:52], n), " r"), "unverifiable"),
    "base64": Bad(lambda n: chat_body(drawn(BASE64, n), " r"), "unverifiable"),
    "spaces": Bad(text(" "), "unverifiable|degenerate_repetition"),
    "nul": Bad(lambda n: chat_body("\0" * n + words(3_000), " r"), "unverifiable"),
    "one digit": Bad(text("0"), "degenerate_repetition"),
    "one emoji": Bad(text("\U0001f600"), "degenerate_repetition"),
    "one combining mark": Bad(text("\u0301"), "degenerate_repetition"),
    "lone surrogate": Bad(text("\ud83c"), "lone_surrogate"),
    "half an emoji": Bad(lambda n: chat_body("x", words(n) + "\udc00"), "lone_surrogate"),
    "U+FFFD": Bad(text("\ufffd"), "replacement_char"),
    "angle brackets": Bad(text("<"), "degenerate_repetition"),
    "unknown markers": Bad(text("<|foo_bar|>"), "unknown_marker"),
    "markers, all different": Bad(
        lambda n: chat_body("".join(f"<|m{i}|>" for i in range(n // 8)), " r"), "unknown_marker"
    ),
    "fragments": Bad(lambda n: chat_body("<|tool_call" * (n // 11), " r"), "marker_fragment"),
    "fragment in reasoning": Bad(lambda n: chat_body("x", words(n) + "<|im_e"), "marker_fragment"),
    "marker in reasoning": Bad(
        lambda n: chat_body("x", words(n) + "<|tool_call_end|>"), "marker_in_reasoning"
    ),
    "control string": Bad(lambda n: chat_body(words(n) + "<|im_end|>", " r"), "control_string"),
    "closings": Bad(text("</think>"), "control_string"),
    "call markers": Bad(text("<|tool_call_begin|>"), "markers_unbalanced"),
    "empty sections": Bad(
        text("<|tool_calls_section_begin|><|tool_calls_section_end|>"), "markers_unbalanced"
    ),
    "raw section": Bad(lambda n: chat_body(SECTION.format(words(n)), " r"), "unverifiable"),
    "specials as text": Bad(text("[EOS] or so, "), "degenerate_repetition"),
    "deep arguments": Bad(
        lambda n: called(arguments='{"a":' * (n // 6) + "1" + "}" * (n // 6)), "tool_args_too_deep"
    ),
    "deep list": Bad(lambda n: called(arguments="[" * n + "]" * n), "tool_args_too_deep"),
    "a number's digits": Bad(
        lambda n: called(arguments=f'{{"a":{drawn("123456789", n)}}}'), "unverifiable"
    ),
    "blank arguments": Bad(
        lambda n: called(arguments='{"a":1' + " " * n + "}"), "unverifiable|degenerate_repetition"
    ),
    "broken arguments": Bad(lambda n: called(arguments='{"a":"' + words(n)), "invalid_json"),
    "long name": Bad(lambda n: called(name=words(n).replace(" ", "")), "unverifiable"),
    "name with dots": Bad(lambda n: called(name="mcp.fs.read", arguments="{}"), "unverifiable"),
    "name with hyphens": Bad(lambda n: called(name="cal_list-events"), "unverifiable"),
    "name in other scripts": Bad(lambda n: called(name="查询_été-ζ.Ω"), "unverifiable"),
    "name with a marker": Bad(lambda n: called(name="f<|im_end|>"), "control_string"),
    "name with a blank": Bad(lambda n: called(name="a b"), "tool_id_malformed"),
    "name with a surrogate": Bad(lambda n: called(name="f\ud800"), "lone_surrogate"),
    "many calls": Bad(
        lambda n: chat_body("", " r", [call(f"f{i}", "{}", i) for i in range(n // 50)]),
        "unverifiable",
    ),
    "calls with one id": Bad(
        lambda n: chat_body("", " r", [call() for _ in range(n // 50)]), "tool_id_duplicate"
    ),
}


class Counting(Tokenizer):
    """Counts the characters that are encoded."""

    encoded = 0

    def encode_ordinary(self, text: str) -> list[int]:
        self.encoded += len(text)
        return super().encode_ordinary(text)


def counting(renderer: Renderer) -> KimiRenderer:
    assert isinstance(renderer, KimiRenderer)
    counted = object.__new__(Counting)
    counted.__dict__.update(renderer.tokenizer.__dict__)
    return KimiRenderer(counted, renderer.rules)


def judged(body: Any, renderer: Renderer, billed: int | None = None) -> Sample:
    return judge(rollout_of(body, billed), prompt_of(), renderer, StopOffsets())


def check(name: str, renderer: Renderer, n: int) -> None:
    bad = TABLE[name]
    counted = counting(renderer)
    body = bad.body(n)
    sample = judged(body, counted)
    told = sample.error_class or sample.verdict
    assert any(part in told for part in bad.expected.split("|")), (told, sample.flags)
    assert len(sample.token_ids) > sample.prompt_len

    size = len(str(body))
    tokenizer = counted.tokenizer
    assert isinstance(tokenizer, Counting)
    for billed in (5, (sample.rebuilt_tokens or 0) - 1):
        tokenizer.encoded = 0
        again = judged(body, counted, billed)
        passes = MOST_PASSES if size < SEARCHED_CHARS else 3
        assert tokenizer.encoded <= passes * size + 1_000
        if again.verdict == "consistent":
            assert billed == (sample.rebuilt_tokens or 0) - 1
            assert sample.verdict == "unverifiable"


@pytest.mark.parametrize("name", TABLE)
def test_a_verdict_for_work_in_proportion(name: str) -> None:
    check(name, embedded(), 40_000)


@needs_kimi
@pytest.mark.parametrize("name", TABLE)
def test_the_same_under_kimi_s_vocabulary(name: str) -> None:
    check(name, kimi_renderer(), 40_000)


@pytest.mark.parametrize("name", ["prose", "spaces", "raw section"])
def test_ten_megabytes(name: str) -> None:
    check(name, embedded(), 10_000_000)


def test_twenty_thousand_calls() -> None:
    check("many calls", embedded(), 1_000_000)


def test_no_piece_of_one_class_is_longer_than_the_checkpoint_s_rule() -> None:
    """BPE of one piece may cost more than in proportion; the rule bounds the piece."""
    seen: list[int] = []

    class Watching(Tokenizer):
        def _encode_chunks(self, text: str, encode: Any) -> list[int]:
            def watched(piece: str) -> list[int]:
                seen.append(max(map(len, piece.split()), default=0))
                return list(encode(piece))

            return super()._encode_chunks(text, watched)

    watching = object.__new__(Watching)
    watching.__dict__.update(embedded().tokenizer.__dict__)
    ids = watching.encode_ordinary(drawn(BASE64, 1_000_000))
    assert len(seen) == 40 and max(seen) == RUN_CHARS
    assert watching.decode(ids) == drawn(BASE64, 1_000_000)


@pytest.mark.parametrize("depth", [10_000, 1_000_000])
def test_deep_bodies_and_events(depth: int) -> None:
    deep = '{"choices":[{"message":' + "[" * depth + "]" * depth + "}]}"
    for kind, raw in (("json", deep), ("sse", f"data: {deep}\n\n"), ("json", "[" * depth)):
        sample = judge(
            rollout_of({}, reply_kind=kind, reply_raw=raw), prompt_of(), embedded(), StopOffsets()
        )
        assert sample.verdict == "rejected"
        assert sample.error_class in ("body_too_deep", "body_truncated", "body_not_json")


HOSTILE = st.lists(
    st.one_of(
        st.sampled_from(
            ["<|im_end|>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "</think>"]
        ),
        st.sampled_from(["<|tool_call_end|>", "<|im_", "<|x|>", "\ufffd", "\0", "\udc00", "[EOS]"]),
        st.sampled_from(["<|tool_call_argument_begin|>", "functions.a-b.ç:0", '{"a":1}', "{", " "]),
        st.text(max_size=4),
        st.tuples(st.sampled_from("a \n-字😀<["), st.integers(0, 2_000)).map(lambda p: p[0] * p[1]),
    ),
    max_size=8,
).map("".join)


@settings(max_examples=150, deadline=None)
@given(HOSTILE, HOSTILE, HOSTILE, HOSTILE, st.integers(0, 5_000), st.sampled_from(["stop", None]))
def test_anything_gets_a_verdict(
    reasoning: str, content: str, name: str, arguments: str, billed: int, finish: str | None
) -> None:
    """Whole and as a stream of single characters alike."""
    calls = [call(name, arguments)] if name else None
    body = chat_body(content, reasoning, calls, finish)
    sample = judged(body, embedded(), billed)
    assert sample.error_class is None or sample.error_class in ORDER
    if sample.verdict in ("consistent", "unverifiable") and sample.completion_ids:
        spelled = embedded().tokenizer.decode(sample.completion_ids)
        assert all(part in spelled for part in (reasoning, content, name and arguments))
    events = [delta(reasoning=c) for c in reasoning] + [delta(content=c) for c in content]
    if calls:
        events.append(delta(tool_calls=calls))
    stream = sse(*events, delta(finish or ("tool_calls" if calls else "stop")))
    streamed = judged(stream, embedded(), billed)
    assert (streamed.verdict, streamed.error_class) == (sample.verdict, sample.error_class)
    assert streamed.token_ids == sample.token_ids


@pytest.mark.parametrize("where", ["content", "name", "tool"])
@pytest.mark.parametrize("part", ["a", " ", "\0", "\ufffd", "<|im_end|>", "\u0301", "字"])
def test_prompts_of_a_megabyte(where: str, part: str) -> None:
    huge = part * (1_000_000 // len(part))
    message = {"role": "user", "content": "x"}
    tools = None
    if where == "tool":
        tools = [{"type": "function", "function": {"name": "f", "description": huge}}]
    else:
        message[where] = huge
    prompt = embedded().render([message], tools, True)
    tokenizer = embedded().tokenizer
    assert huge in prompt.text
    special = [i for i in prompt.ids if tokenizer.is_special(i)]
    assert len(special) == 6 + 3 * bool(tools)
    assert tokenizer.decode(prompt.ids) == prompt.text
