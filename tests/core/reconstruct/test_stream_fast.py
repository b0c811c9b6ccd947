"""Events that only go on are read the short way: always to what the long way would have read."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.reconstruct import stream

TEXT = st.text(max_size=4)
ODD = st.sampled_from([None, 0, 1, "", "x", [], [1], {}, {"message": "no"}, False])
CALL = st.fixed_dictionaries(
    {},
    optional={
        "index": st.sampled_from([0, 1, None, "0"]),
        "id": st.sampled_from(["a", "b", None]),
        "function": st.fixed_dictionaries({}, optional={"name": TEXT, "arguments": TEXT | ODD}),
    },
)
DELTA = st.fixed_dictionaries(
    {},
    optional={
        "role": st.just("assistant"),
        "content": TEXT | ODD,
        "reasoning": TEXT | ODD,
        "reasoning_content": TEXT,
        "reasoning_details": st.lists(st.fixed_dictionaries({"text": TEXT}), max_size=2) | ODD,
        "tool_calls": st.lists(CALL | ODD, max_size=2) | ODD,
        "other": ODD,
    },
)
CHOICE = st.fixed_dictionaries(
    {},
    optional={
        "delta": DELTA | ODD,
        "message": DELTA,
        "index": st.sampled_from([0, 1, None]),
        "finish_reason": st.sampled_from([None, "stop", "error"]),
        "native_finish_reason": st.sampled_from([None, "eos"]),
        "token_ids": st.lists(st.integers(0, 9), max_size=2) | st.none(),
        "response_token_ids": st.lists(st.integers(0, 9), max_size=2),
        "prompt_token_ids": st.lists(st.integers(0, 9), max_size=2),
        "error": ODD,
    },
)
EVENT = st.fixed_dictionaries(
    {"choices": st.lists(CHOICE, max_size=2) | ODD},
    optional={
        "id": TEXT,
        "usage": st.just({"prompt_tokens": 1}) | ODD,
        "prompt_token_ids": st.lists(st.integers(0, 9), max_size=2),
        "error": ODD,
        "output_ids": st.lists(st.integers(0, 9), max_size=3) | ODD,
        "created": st.integers(),
    },
)


def long_way(payload: bytes) -> Any:
    raise msgspec.DecodeError(payload)


@settings(max_examples=400)
@given(st.lists(EVENT, max_size=5))
def test_the_short_way_reads_what_the_long_way_reads(events: list[Any]) -> None:
    raw = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    merged = stream.merge_stream(raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "_plain", long_way)
        assert stream.merge_stream(raw) == merged


def test_a_plain_event_goes_the_short_way_and_an_error_does_not() -> None:
    plain = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}
    assert stream._plain(json.dumps(plain).encode()).choices[0].delta.content == "a"
    odds: list[dict[str, Any]] = [{"error": {}}, {"usage": {}}, {"output_ids": None}]
    for odd in odds:
        with pytest.raises(msgspec.DecodeError):
            stream._plain(json.dumps(plain | odd).encode())


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=8),
    TEXT.filter(len),
    st.sets(st.integers(1, 7)),
    st.booleans(),
)
def test_generate_says_the_same_repeating_or_not(
    ids: list[int], text: str, cuts: set[int], repeats: bool
) -> None:
    """Whatever the ids: those of a repeated token look the same both ways, their count does not."""
    ends = [*sorted(c for c in cuts if c < len(ids)), len(ids)]
    whole = {"text": text, "output_ids": ids, "meta_info": {"completion_tokens": len(ids)}}
    events, before = [], 0
    for end in ends:
        start, stop = 0 if repeats else before, None if end == len(ids) else end
        meta = {"completion_tokens": end}
        events.append({"text": text[start:stop], "output_ids": ids[start:end], "meta_info": meta})
        before = end
    merged = stream.merge_stream("".join(f"data: {json.dumps(e)}\n\n" for e in events))
    assert merged == stream.Merged(body=whole)


def test_generate_without_counts_is_not_guessed() -> None:
    events = [{"output_ids": [5], "meta_info": {}}, {"output_ids": [5, 5], "meta_info": {}}]
    merged = stream.merge_stream("".join(f"data: {json.dumps(e)}\n\n" for e in events))
    assert merged.problems == ["reply_malformed"]
