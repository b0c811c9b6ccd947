"""The SSE parser: the same payloads whatever the chunking."""

from hypothesis import given
from hypothesis import strategies as st

from core.providers.sse import SseParser

LINE_END = st.sampled_from([b"\n", b"\r\n", b"\r"])
TEXT = st.binary(max_size=20).map(lambda b: b.replace(b"\n", b" ").replace(b"\r", b" "))


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[bytes], int]:
    """(bytes, payloads, comments). One kind of line end a stream, as servers do it."""
    end = draw(LINE_END)
    out, payloads, comments = b"", [], 0
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["data", "lines", "comment", "mixed", "other", "blank"]))
        text = draw(TEXT)
        if kind == "data":
            out += b"data: " + text + end + end
            payloads.append(text)
        elif kind == "lines":
            more = draw(TEXT)
            out += b"data: " + text + end + b"data:x" + more + end + end
            payloads.append(text + b"\nx" + more)
        elif kind == "comment":
            out += b": " + text + end + end
            comments += 1
        elif kind == "mixed":
            out += b": ping" + end + b"event: message" + end + b"data: " + text + end + end
            payloads.append(text)
            comments += 1
        elif kind == "other":
            out += b"event: ping" + end + b"id: 7" + end + end
        else:
            out += end
    return out, payloads, comments


@given(streams(), st.lists(st.integers(0, 400), max_size=12))
def test_any_chunking_gives_the_same_payloads(
    stream: tuple[bytes, list[bytes], int], cuts: list[int]
) -> None:
    data, payloads, comments = stream
    parser = SseParser()
    got: list[bytes] = []
    marks = sorted({min(c, len(data)) for c in cuts} | {0, len(data)})
    for begin, end in zip(marks, [*marks[1:], len(data)], strict=True):
        got += parser.feed(data[begin:end])
    got += parser.feed(b"\n")  # releases a CR that waits for its LF
    assert got == payloads
    assert parser.comments == comments


def test_an_event_without_its_end_is_no_event() -> None:
    parser = SseParser()
    assert parser.feed(b'data: {"a":1}\n\ndata: {"b"') == [b'{"a":1}']
    assert parser.tail == b'data: {"b"'
    assert parser.feed(b":2}\n") == []
    assert parser.feed(b"\n") == [b'{"b":2}']


def test_comments_are_not_progress() -> None:
    parser = SseParser()
    assert parser.feed(b": OPENROUTER PROCESSING\n\n" * 3) == []
    assert parser.comments == 3


def test_an_event_without_end_is_gathered_in_one_piece_only_once() -> None:
    """16,000 chunks of one event: joined with each, they would be 130 GB of copies."""
    parser = SseParser()
    for _ in range(16_000):
        assert parser.feed(b"x" * 1_024) == []
    assert len(parser.tail) == 16_000 * 1_024
    assert parser.feed(b"\n") == []
    assert parser.feed(b"\ndata: 1\n\nda") == [b"1"]
    assert parser.tail == b"da"
