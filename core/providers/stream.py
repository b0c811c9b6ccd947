"""A reply that arrives as a stream of events: bytes into a Flight, and of the events what the bill
and the class need.

Promises: every byte that arrived is kept, whichever way the stream ends, but for events that the
next one repeats; only the first event and the last few are decoded, the others are counted. What
arrives within GATHER_S is taken together: a stream of 30 events/s then wakes its reader five times
a second instead of thirty. Knows nothing of models."""

import asyncio
import contextlib
import re
import time
from collections import deque
from collections.abc import Sequence
from typing import Literal

import aiohttp

from core.providers import base
from core.providers.classify import UNREADABLE, error_in_body, has_error, parse_json
from core.providers.sse import DONE, SseParser

TAIL_EVENTS = 8
# Inside a JSON string each of these quotes has a backslash before it: only a key matches.
CHUNK_IDS = re.compile(rb'"token_ids":\s*\[([^\]]*)\]')
OUTPUT_IDS = re.compile(rb'"output_ids":\s*\[([^\]]*)\]')
COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d{1,9})(?![\d.eE])')  # below MOST_TOKENS
GATHER_S = 0.2
"""A wake-up costs about 20 microseconds however many events it brings; 60,000 of them a second
would be more than a core. Idle timeouts allow for it (`generate.attempt`), screens are no finer."""


async def collect_events(content: aiohttp.StreamReader, flight: base.Flight) -> None:
    """Read a stream to its end, which is [DONE] where the server leaves the connection open.

    Fills `flight.body` with the fields that the bill and the class need: id, provider, model,
    usage, finish_reason. Raises UpstreamError and its kin for an error event, StreamIncomplete when
    no event says that the answer ended, and what cut the stream off before that."""
    events, pause = _Events(flight), _Pause(content)
    try:
        while chunk := await _read(content):
            events.take(chunk)
            if flight.first_at is not None:
                await pause.wait()
            if events.done:
                break
    except asyncio.CancelledError:
        with contextlib.suppress(base.ReplyTooLarge):
            events.take_rest(content)
        events.note_end()
        raise
    except (aiohttp.ClientError, OSError) as error:
        events.take_rest(content)
        events.conclude(error)
    else:
        events.take_rest(content)
        events.conclude()


async def _read(content: aiohttp.StreamReader) -> bytes:
    """aiohttp closes the connection at a chunk that is none, and tells only who is reading then."""
    try:
        return await content.readany()
    except RuntimeError as error:
        raise aiohttp.ClientPayloadError(str(error)) from error


class _Pause:
    """GATHER_S, or less: the end of the stream ends it (a cut does not)."""

    __slots__ = ("_ended", "_loop", "_waiter")

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        content.on_eof(self._end)

    async def wait(self) -> None:
        if self._ended:
            return
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(GATHER_S, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()

    def _end(self) -> None:
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Events:
    """The stream so far."""

    def __init__(self, flight: base.Flight) -> None:
        self._flight = flight
        self._parser = SseParser()
        self._last: deque[bytes] = deque(maxlen=TAIL_EVENTS)
        self.done = False
        self._form: Literal["text", "ids", "generate"] = "text"
        self._repeats: bool | None = None
        self._clock = asyncio.get_running_loop().time

    def take(self, chunk: bytes) -> None:
        """Raises ReplyTooLarge."""
        flight = self._flight
        flight.take(chunk)
        payloads = self._parser.feed(chunk)
        flight.comments = self._parser.comments
        if not payloads:
            return
        flight.last_at = self._clock()
        if flight.first_at is None:
            flight.first_at = flight.last_at
            _open_stream(payloads[0], flight)
            self._form = _form_of(payloads[0])
        flight.events += len(payloads)
        self._last.extend(payloads)
        self.done = self.done or DONE in payloads[-TAIL_EVENTS:]
        for payload in payloads:
            if b'"error"' in payload:
                _note_error(payload, flight)
        if self._form == "generate":
            self._take_generated(payloads)
        else:
            ids = self._form == "ids"
            flight.tokens += sum(map(_new_ids, payloads)) if ids else len(payloads)

    def _take_generated(self, payloads: Sequence[bytes]) -> None:
        """SGLang's `/generate` says how many tokens there are, and repeats all of them in each
        event, unless the server runs with --incremental-streaming-output: no field of a request
        chooses. What is repeated is not kept, or a reply of n tokens would fill n x n bytes."""
        flight, last = self._flight, -1
        for at, payload in enumerate(payloads):
            ids = OUTPUT_IDS.search(payload) if self._repeats is None else None
            said = COMPLETION_TOKENS.search(payload, max(0, payload.rfind(b'"completion_tokens"')))
            if said is None or b'"output_ids"' not in payload:
                continue
            tokens, last = int(said[1]), at
            if ids is not None and flight.tokens:
                self._repeats = _length(ids[1]) >= tokens
            flight.tokens = max(flight.tokens, tokens)
        if self._repeats and last >= 0:
            kept = payloads[last:]
            lines = (b"data: " + p.replace(b"\n", b"\ndata: ") + b"\n\n" for p in kept)
            flight.received[:] = b"".join(lines) + self._parser.tail
            self._last.clear()
            self._last.extend(kept)

    def take_rest(self, content: aiohttp.StreamReader) -> None:
        """What has arrived and was not read: aiohttp's public readers forget it after an error. Of
        an empty body its reader has no such method's state."""
        while not content.at_eof() and (chunk := content._read_nowait(-1)):
            self.take(chunk)

    def note_end(self) -> None:
        """What the last events say: a bill that arrived counts even when the stream was cut."""
        for payload in self._last:
            goes_on = b'"finish_reason":null' in payload and b'"usage"' not in payload
            if self._form == "generate" or not goes_on:
                _note(payload, self._flight)

    def conclude(self, cut: Exception | None = None) -> None:
        """`cut`: what ended the stream, if it did not end itself. After the whole answer and its
        bill that changes nothing."""
        self.note_end()
        flight = self._flight
        if failed := flight.body.get("error"):
            raise error_in_body(failed, flight.headers, time.time(), flight.events > 1) or (
                base.UpstreamError("error event")
            )
        if self.done or (cut is not None and flight.whole):
            return
        if cut is not None:
            raise cut
        if "finish_reason" not in flight.body:
            raise base.StreamIncomplete(f"{flight.events} events, no finish reason, no end")


def _form_of(payload: bytes) -> Literal["text", "ids", "generate"]:
    """By a stream's first event; one that brings token ids begins with those of the prompt."""
    if b'"output_ids"' in payload:
        return "generate"
    return "ids" if b'token_ids"' in payload else "text"


def brings_ids(raw: bytes | bytearray) -> bool:
    """Whether a chat's events hold ids of the completion."""
    return any(found[1].strip() for found in CHUNK_IDS.finditer(raw))


def _length(numbers: bytes) -> int:
    return numbers.count(b",") + 1 if numbers.strip() else 0


def _new_ids(payload: bytes) -> int:
    found = CHUNK_IDS.search(payload)
    return _length(found[1]) if found else 0


def _open_stream(payload: bytes, flight: base.Flight) -> None:
    with contextlib.suppress(*UNREADABLE):
        event = parse_json(flight.secrets.hide_raw(payload))
        if isinstance(event, dict):
            for key in ("id", "provider", "model"):
                if name := base.name_in(event.get(key)):
                    flight.body[key] = name
            flight.provider = flight.body.get("provider", flight.provider)
            flight.known(flight.body.get("id"))


def _note(payload: bytes, flight: base.Flight) -> None:
    """Keep what an event of the stream's end says. An event that is not JSON is judged with the
    content."""
    if payload == DONE:
        return
    with contextlib.suppress(*UNREADABLE):
        event = parse_json(flight.secrets.hide_raw(payload))
        if not isinstance(event, dict):
            return
        if isinstance(event.get("usage"), dict):
            flight.body["usage"] = event["usage"]
        if isinstance(meta := event.get("meta_info"), dict):
            flight.body["meta_info"] = flight.body["usage"] = meta
            flight.body["output_ids"] = event.get("output_ids")
            if meta.get("finish_reason"):
                flight.body["finish_reason"] = meta["finish_reason"]
        if has_error(event):
            flight.body.setdefault("error", event)
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and choice.get("finish_reason"):
                flight.body["finish_reason"] = choice["finish_reason"]


def _note_error(payload: bytes, flight: base.Flight) -> None:
    with contextlib.suppress(*UNREADABLE):
        event = parse_json(flight.secrets.hide_raw(payload))
        if isinstance(event, dict) and has_error(event):
            flight.body["error"] = event
