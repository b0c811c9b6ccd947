"""The corpus: deterministic, split by value, and its completions read back by the grammar."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.embedded import TARGET_DIR
from core.embedded.corpus import FAMILIES, SPLIT_SIZE, Example, Expect, examples, is_right
from core.embedded.corpus_draw import ExpectedCall, is_heldout_value
from core.embedded.grammar import completion_ids, prompt_ids, read_completion
from core.errors import PromptError
from core.render.base import Renderer, load_renderer
from core.render.tokenizer import NAMED_OFFSETS
from core.schema import ToolCall

CALLING = {
    "discount",
    "convert",
    "weather",
    "weather_two",
    "remind",
    "distance",
    "stock",
    "han_weather",
    "second_call",
}


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return load_renderer(TARGET_DIR, "kimi-k2.5")


def made(split: str, limit: int, families: tuple[str, ...] = (), seed: int = 0) -> list[Example]:
    return list(examples(split, seed, families, limit))


def calls_before(example: Example) -> int:
    return sum(len(message.get("tool_calls", ())) for message in example.messages)


def names_of(example: Example) -> list[str]:
    return [tool["function"]["name"] for tool in example.tools or []]


def test_there_are_many_families_and_each_takes_its_turn() -> None:
    assert len(FAMILIES) == len(set(FAMILIES)) == 21
    assert [e.family for e in made("heldout", 42)] == [*FAMILIES, *FAMILIES]
    assert [e.family for e in made("train", 3, ("emoji", "code"))] == ["emoji", "code", "emoji"]


def test_the_same_seed_gives_the_same_examples_and_a_limit_only_cuts() -> None:
    first = made("train", 60, seed=3)
    assert made("train", 60, seed=3) == first
    assert made("train", 90, seed=3)[:60] == first
    assert made("train", 60, seed=4) != first


def test_no_limit_means_the_whole_split_without_a_request_twice() -> None:
    everything = made("heldout", 0)
    requests = {str((e.messages, e.tools, e.thinking)) for e in everything}
    assert len(everything) == len(requests) == SPLIT_SIZE["heldout"]


def test_values_of_one_split_never_occur_in_the_other() -> None:
    train = {value for e in made("train", 20_000) for value in e.values}
    heldout = {value for e in made("heldout", 4_000) for value in e.values}
    assert not train & heldout
    kinds = {"town", "person", "item", "number", "time", "han_town", "han_person"}
    for values in (train, heldout):
        assert {value.split(":")[0] for value in values} == kinds
    assert all(is_heldout_value(*value.split(":", 1)) for value in heldout)
    assert not any(is_heldout_value(*value.split(":", 1)) for value in train)


def test_every_argument_of_a_call_is_an_open_value_or_a_unit() -> None:
    units = {"km", "miles", "kg", "pounds", "liters", "gallons", "meters", "feet"}
    units |= {"euros", "dollars"}
    for example in made("heldout", 2_000):
        drawn = {value.split(":", 1)[1] for value in example.values}
        for call in example.expect.calls:
            assert {str(v) for v in call.arguments.values()} <= drawn | units, example


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_example_renders_and_reads_back(split: str, renderer: Renderer) -> None:
    for example in made(split, 800):
        ids = completion_ids(example, renderer.tokenizer)
        reply = read_completion(ids, example.thinking, calls_before(example), renderer.tokenizer)
        assert reply is not None, example
        assert reply.reasoning == example.reasoning
        assert reply.content == example.content
        assert reply.tool_calls == example.tool_calls
        assert is_right(example.expect, reply.content, reply.tool_calls)
        for as_text in (False, True):
            prompt = prompt_ids(example, renderer, as_text)
            assert len(prompt) + len(ids) <= 400


def test_call_families_declare_what_they_call_and_refusals_do_not() -> None:
    for example in made("train", 4_000):
        called = [call.name for call in example.expect.calls]
        assert set(called) <= set(names_of(example))
        assert bool(called) == (example.family in CALLING)
        if example.family == "refusal":
            assert example.tools and "no tool" in example.expect.contains
        assert len(names_of(example)) == len(set(names_of(example))) <= 4
    counts = {len(names_of(e)) for e in made("train", 4_000)}
    assert counts == {0, 1, 2, 3, 4}


def test_two_cities_are_two_calls_and_a_second_call_counts_on() -> None:
    for example in made("heldout", 50, ("weather_two",)):
        assert [c.id.split(":")[1] for c in example.tool_calls] == ["0", "1"]
        assert len({c.arguments for c in example.tool_calls}) == 2
    indices = set()
    for example in made("heldout", 50, ("second_call",)):
        indices.add(example.tool_calls[0].id.split(":")[1])
        assert example.tool_calls[0].id.endswith(f":{calls_before(example)}")
    assert indices == {"0", "1"}


def test_replies_never_hold_a_marker_that_the_user_quotes() -> None:
    quoted = made("heldout", 100, ("quoted_markers",))
    for example in quoted:
        assert any(name in example.messages[-1]["content"] for name in NAMED_OFFSETS)
    for example in [*quoted, *made("train", 2_000)]:
        text = example.reasoning + example.content
        assert not any(name in text for name in NAMED_OFFSETS)


def test_white_space_habits_occur_where_a_trim_would_be_a_fault() -> None:
    some = [e for e in made("train", 2_000) if e.thinking]
    assert any(e.reasoning.startswith(" ") for e in some)
    assert any(not e.reasoning.startswith(" ") for e in some)
    assert any(e.reasoning.endswith("\n") for e in some)
    assert any(e.content.startswith("\n\n") for e in some)
    instant = [e for e in made("train", 2_000) if not e.thinking]
    assert instant and all(e.reasoning == "" for e in instant)


def test_an_unknown_family_is_named_with_the_known_ones() -> None:
    with pytest.raises(PromptError, match=r"corpus family 'nope': unknown; choose from discount"):
        list(examples("train", 0, ("nope",)))


def _call(name: str, arguments: str) -> ToolCall:
    return ToolCall(id=f"functions.{name}:0", name=name, arguments=arguments)


@pytest.mark.parametrize(
    ("content", "calls", "right"),
    [
        ("It is 12.", [_call("f", '{"b":2, "a":1}')], True),
        ("It is 12.", [_call("f", '{"a": 1, "b": 3}')], False),
        ("It is 12.", [_call("g", '{"a": 1, "b": 2}')], False),
        ("It is 12.", [_call("f", '{"a": 1, "b": 2')], False),
        ("It is 12.", [], False),
        ("It is 13.", [_call("f", '{"a": 1, "b": 2}')], False),
        ("It is 12.", [_call("f", '{"a": 1, "b": 2}')] * 2, False),
    ],
)
def test_is_right(content: str, calls: list[ToolCall], right: bool) -> None:
    wanted = ExpectedCall(name="f", arguments={"a": 1, "b": 2})
    assert is_right(Expect(calls=[wanted], contains=["12"]), content, calls) is right


def test_a_completion_without_any_one_of_its_markers_is_malformed(renderer: Renderer) -> None:
    tokenizer = renderer.tokenizer
    example = next(e for e in made("train", 60, ("weather_two",)) if e.thinking)
    ids = completion_ids(example, tokenizer)
    markers = [i for i, token_id in enumerate(ids) if tokenizer.is_special(token_id)]
    assert len(markers) == 10
    assert read_completion(ids, True, 0, tokenizer) is not None
    for at in markers:
        assert read_completion(ids[:at] + ids[at + 1 :], True, 0, tokenizer) is None
    assert read_completion([*ids, ids[0]], True, 0, tokenizer) is None
    assert read_completion(ids, False, 0, tokenizer) is None
    assert read_completion(ids, True, 1, tokenizer) is None
    half_character = tokenizer.encode_ordinary("é")[:1]
    end = tokenizer.specials["<|im_end|>"]
    assert read_completion([*half_character, end], False, 0, tokenizer) is None
    assert read_completion([*tokenizer.encode_ordinary("é"), end], False, 0, tokenizer) is not None


@given(ids=st.lists(st.integers(0, 1_279), max_size=40), thinking=st.booleans())
def test_reading_never_raises(renderer: Renderer, ids: list[int], thinking: bool) -> None:
    tokenizer = renderer.tokenizer
    reply = read_completion(ids, thinking, 0, tokenizer)
    assert reply is None or ids[-1] == tokenizer.specials["<|im_end|>"]


def test_the_corpus_loads_no_torch() -> None:
    code = "import sys, core.embedded.corpus, core.embedded.grammar; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"
