"""What a server shows of a completion, whole and in pieces."""

from hypothesis import given
from hypothesis import strategies as st

from core.embedded.replies import (
    MARKERS,
    Mode,
    Splitter,
    TextStream,
    collect,
    parse,
    reasoning_length,
    stop_ids,
    text_of,
)
from tests.core.embedded.serving import PLAIN, TWO_CALLS, ids_of, tokenizer

PIECES = st.sampled_from(
    [*MARKERS, "a", " b\n", "<", "</thi", "functions.f:0", '{"k": 1}', "|>", "é", "😀"]
)


def test_reasoning_and_content_keep_their_white_space() -> None:
    reply = parse(PLAIN, Mode())
    assert (reply.reasoning, reply.content) == (" Two and two.\n", "\n\nFour. ")


def test_calls_are_parsed_only_when_tools_are_declared() -> None:
    reply = parse(TWO_CALLS, Mode(calls=True))
    assert reply.content == "\n\nChecking."
    assert [(c.id, c.name, c.arguments) for c in reply.calls] == [
        ("functions.get_weather:0", "get_weather", '{"city":"Oslo"}'),
        ("functions.get_weather:1", "get_weather", '{"city":"Bergen"}'),
    ]
    raw = parse(TWO_CALLS, Mode(calls=False))
    assert raw.calls == []
    assert raw.content == TWO_CALLS.partition("</think>")[2]


def test_a_section_ends_reasoning_without_a_closing_tag() -> None:
    text = TWO_CALLS.replace("</think>", "")
    assert parse(text, Mode(calls=True)).reasoning == " Look both up.\n\n\nChecking."
    raw = parse(text, Mode(calls=False))
    assert raw.content.startswith("<|tool_calls_section_begin|>")


def test_what_sglang_drops_is_dropped() -> None:
    unknown = TWO_CALLS.replace("functions.get_weather:0", "call_123") + "after"
    assert [c.id for c in parse(unknown, Mode(calls=True)).calls] == ["functions.get_weather:1"]
    unfinished = TWO_CALLS[: TWO_CALLS.index("Bergen")]
    assert len(parse(unfinished, Mode(calls=True)).calls) == 1
    noise = TWO_CALLS.replace("section_begin|>", "section_begin|> so:")
    assert len(parse(noise, Mode(calls=True)).calls) == 2


def test_instant_mode_has_no_reasoning() -> None:
    reply = parse("Four.</think>", Mode(thinking=False))
    assert (reply.reasoning, reply.content) == ("", "Four.</think>")


def test_an_opening_tag_is_the_prompts() -> None:
    assert parse("<think> Hm.</think>Yes", Mode()).reasoning == " Hm."


@given(st.lists(PIECES, max_size=14), st.booleans(), st.booleans(), st.data())
def test_pieces_add_up_to_the_whole(
    parts: list[str], thinking: bool, calls: bool, data: st.DataObject
) -> None:
    text = "".join(parts)
    mode = Mode(thinking=thinking, calls=calls)
    splitter = Splitter(mode)
    deltas = []
    rest = text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        deltas += splitter.feed(rest[:size])
        rest = rest[size:]
    assert collect([*deltas, *splitter.end()]) == parse(text, mode)


def test_text_of_ids_token_by_token() -> None:
    text = "né 😀 漢字</think>" + TWO_CALLS
    ids = ids_of(text)
    tok = tokenizer()
    assert text_of(tok, ids) == text
    stream = TextStream(tok)
    assert "".join(stream.feed([i]) for i in ids) == text


def test_a_cut_character_becomes_a_replacement() -> None:
    tok = tokenizer()
    cut = [tok.encode_ordinary("😀")[0]]
    assert text_of(tok, cut) == "\ufffd"


def test_counts_of_reasoning() -> None:
    tok = tokenizer()
    end = tok.specials["</think>"]
    section = tok.specials["<|tool_calls_section_begin|>"]
    ids = ids_of(PLAIN)
    assert reasoning_length(ids, end, section) == len(tok.encode_ordinary(" Two and two.\n"))
    assert reasoning_length([1, 2, 3], end, section) == 3
    assert stop_ids(tok) == {tok.specials["<|im_end|>"], tok.specials["[EOS]"]}
