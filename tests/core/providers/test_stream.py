"""Streams are read in gathered pieces: nothing that arrived is lost, and their end is not waited
for."""

import asyncio
import json
from typing import Any
from unittest import mock

import aiohttp
import pytest

from core.providers import base, stream
from core.providers.stream import collect_events

BILL = {"usage": {"prompt_tokens": 3, "completion_tokens": 4, "cost": 0.001}}


def event(text: str, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    body = {"id": "gen-1", "provider": "Alder", "choices": [choice], **more}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


class Seen(base.Flight):
    """`taken`: sizes of what was handed over, piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []
        self.changed = asyncio.Event()

    def take(self, chunk: bytes) -> None:
        self.taken.append(len(chunk))
        self.changed.set()
        super().take(chunk)


class Wire:
    """A stream as the connection fills it, and its reader."""

    def __init__(self, most_bytes: int = 1 << 20) -> None:
        self.content = aiohttp.StreamReader(mock.Mock(connected=True), 1 << 16)
        self.flight = Seen()
        self.flight.kind = "sse"
        self.flight.most_bytes = most_bytes
        self.sent = b""
        self.reading = asyncio.create_task(collect_events(self.content, self.flight))

    def feed(self, *chunks: bytes) -> None:
        for chunk in chunks:
            self.sent += chunk
            self.content.feed_data(chunk)

    async def begin(self) -> None:
        """The first event is read at once; from then on the reader pauses."""
        self.feed(event("a"))
        await self.took()

    async def took(self) -> None:
        await self.flight.changed.wait()
        self.flight.changed.clear()


@pytest.fixture
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """So long that only the end of the stream, or a test's timeout, ends one."""
    monkeypatch.setattr(stream, "GATHER_S", 3_600.0)


async def test_events_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "GATHER_S", 0.1)
    wire = Wire()
    await wire.begin()
    for _ in range(20):
        wire.feed(event("b"))
        for _ in range(3):  # steps in which a reader that does not pause would wake
            await asyncio.sleep(0)
    await wire.took()
    assert wire.flight.taken == [len(event("a")), 20 * len(event("b"))]
    assert wire.flight.events == 21
    wire.feed(event("", "stop"))
    wire.content.feed_eof()
    await wire.reading
    assert bytes(wire.flight.received) == wire.sent


@pytest.mark.usefixtures("long_pauses")
async def test_the_end_is_not_waited_for() -> None:
    wire = Wire()
    await wire.begin()
    wire.feed(event("b"), event("", "stop"), b"data: [DONE]\n\n")
    wire.content.feed_eof()
    await asyncio.wait_for(wire.reading, 10)
    assert bytes(wire.flight.received) == wire.sent
    assert wire.flight.events == 4 and wire.flight.body["finish_reason"] == "stop"


@pytest.mark.usefixtures("long_pauses")
@pytest.mark.parametrize("error_comes", ["before the end of a pause", "at once"])
async def test_what_arrived_before_a_cut_is_kept(
    error_comes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if error_comes == "before the end of a pause":
        monkeypatch.setattr(stream, "GATHER_S", 0.02)
    wire = Wire()
    if error_comes != "at once":
        await wire.begin()
    wire.feed(event("b"), event("c")[:20])
    wire.content.set_exception(aiohttp.ClientPayloadError("cut"))
    with pytest.raises(aiohttp.ClientPayloadError):
        await asyncio.wait_for(wire.reading, 10)
    assert bytes(wire.flight.received) == wire.sent
    assert wire.flight.events == (1 if error_comes == "at once" else 2)


@pytest.mark.usefixtures("long_pauses")
@pytest.mark.parametrize("most_bytes", [1 << 20, 200])
async def test_what_arrived_before_a_halt_is_kept(most_bytes: int) -> None:
    wire = Wire(most_bytes)
    await wire.begin()
    wire.feed(event("b"), event("c"))
    wire.reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wire.reading
    assert bytes(wire.flight.received) == wire.sent


@pytest.mark.usefixtures("long_pauses")
@pytest.mark.parametrize(
    ("rest", "kind"),
    [
        ([event("b"), event("", "stop", **BILL)], None),
        (
            [event("b", "stop"), b'data: {"choices":[],' + json.dumps(BILL).encode()[1:] + b"\n\n"],
            None,
        ),
        ([event("b"), event("", "stop"), b"data: [DONE]\n\n"], None),
        ([event("b"), event("", "stop")], aiohttp.ClientPayloadError),
        ([event("b", **BILL)], aiohttp.ClientPayloadError),
        ([event("b"), b'data: {"error":{"code":502,"message":"no"}}\n\n'], base.UpstreamError),
        ([event("b"), event("", "abort", **BILL)], base.UpstreamError),
        ([event("b"), b'data: {"choices":5,"usage":[]}\n\n'], aiohttp.ClientPayloadError),
    ],
)
async def test_a_cut_after_the_whole_answer_and_its_bill_is_none(
    rest: list[bytes], kind: type[Exception] | None
) -> None:
    """And an error that was told before it is what went wrong."""
    wire = Wire()
    wire.feed(event("a"), *rest)
    wire.content.set_exception(aiohttp.ClientPayloadError("cut"))
    if kind is None:
        await wire.reading
    else:
        with pytest.raises(kind):
            await wire.reading
    assert bytes(wire.flight.received) == wire.sent
    billed = any(b'"cost"' in piece for piece in rest)
    assert ("usage" in wire.flight.body) == billed


async def test_an_answer_that_said_done_needs_no_end_of_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "GATHER_S", 0.01)
    wire = Wire()
    wire.feed(event("a"), event("", "stop"), b"data: [DONE]\n\n")
    await asyncio.wait_for(wire.reading, 10)
    assert wire.flight.body["finish_reason"] == "stop"


async def test_a_connection_that_closed_without_a_word_is_a_cut() -> None:
    """aiohttp raises RuntimeError there, which no part of a run expects."""
    wire = Wire()
    wire.content._protocol.connected = False  # type: ignore[misc]
    with pytest.raises(aiohttp.ClientPayloadError, match="Connection closed"):
        await wire.reading
