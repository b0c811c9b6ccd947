"""Where a console's knowledge of a run comes from: the control socket, the files alone, or a replay
of the journal.

`follow` prefers the socket, falls back to the files (finished run, other host, dead engine), and
returns to the socket when an engine appears. It calls a `Sink` in the event loop; files are read in
threads.
"""

import asyncio
import time
from typing import Protocol

import msgspec

from console.client import client_name
from core import events as ev
from core import view as vw
from core.control import Client, connect
from core.errors import ControlError
from core.halting import boot_id, engine_pid
from core.journal import load_view, read_journal
from core.store import RunDir, read_manifest

POLL_S = 0.5
RETRY_S = (0.2, 0.5, 1.0, 2.0)
HISTORY_EVENTS = 4_000
BATCH = 2_000  # events folded before the loop may breathe


class Sink(Protocol):
    """What a source tells: all calls come in the event loop."""

    def on_link(self, link: str, note: str = "", consoles: int = 0) -> None: ...
    def on_snapshot(self, view: vw.RunView) -> None: ...
    def on_event(self, event: ev.Event) -> None: ...
    def on_history(self, events: list[ev.Event]) -> None: ...
    def on_open(self, link: Client | None) -> None: ...
    def on_crashed(self, crashed: bool) -> None: ...


def same_host(run: RunDir) -> bool:
    """Whether the engine's pid means anything here."""
    manifest = read_manifest(run)
    return manifest is not None and manifest.boot_id == boot_id()


async def follow(run: RunDir, sink: Sink, read_only: bool) -> None:
    """Feed `sink` until cancelled."""
    sink.on_link("connecting")
    seq = 0
    attempt = 0
    while True:
        try:
            link = await connect(run, "viewer" if read_only else "operator", client_name())
        except ControlError as e:
            engine = await asyncio.to_thread(engine_pid, run.path)
            here = await asyncio.to_thread(same_host, run)
            if engine and attempt < len(RETRY_S):
                sink.on_link("lost" if seq else "connecting", str(e))
                await asyncio.sleep(RETRY_S[attempt])
                attempt += 1
                continue
            seq = await _from_files(run, sink, seq, engine, here)
            attempt = 0
            continue
        attempt = 0
        sink.on_open(link)
        try:
            seq = await _from_socket(run, sink, link, seq)
        except (
            msgspec.MsgspecError
        ):  # a newer engine says something that this console does not know
            engine = await asyncio.to_thread(engine_pid, run.path)
            seq = await _from_files(run, sink, seq, engine, here=True)
        finally:
            sink.on_open(None)
            await link.close()
        sink.on_link("lost", "the engine closed the connection")


async def _from_socket(run: RunDir, sink: Sink, link: Client, seq: int) -> int:
    sink.on_link("live", consoles=int(link.welcome.get("consoles", 0)))
    async for kind, body in link.messages():
        if kind == "event":
            seq = max(seq, body.seq)
            sink.on_event(body)
        elif kind == "snapshot":
            first, seq = not seq, body.seq
            sink.on_snapshot(body)
            if first:
                sink.on_history(await asyncio.to_thread(_history, run, seq))
        elif kind == "gap":
            sink.on_link("live", f"slow link: {body[1] - body[0] + 1} events skipped")
    return seq


def _history(run: RunDir, upto: int) -> list[ev.Event]:
    """The last events before a snapshot, for the sparklines."""
    moving = ev.Stats | ev.Host | ev.Train
    return [
        e
        for e in read_journal(run, max(0, upto - HISTORY_EVENTS))
        if e.seq <= upto
        and isinstance(e, moving | ev.StateChanged | ev.StageFinished | ev.StageFailed)
    ]


async def _from_files(run: RunDir, sink: Sink, seq: int, engine: int, here: bool) -> int:
    """Read what is there until another engine may be up. `engine`: pid of the one whose socket did
    not answer, 0 when there is none.
    """
    if not seq:
        view = await asyncio.to_thread(load_view, run)
        seq = view.seq
        sink.on_snapshot(view)
        sink.on_history(await asyncio.to_thread(_history, run, view.seq))
    started = time.monotonic()
    while True:
        fresh = await asyncio.to_thread(_read, run, seq)
        for n, event in enumerate(fresh):
            sink.on_event(event)
            seq = event.seq
            if n % BATCH == BATCH - 1:
                await asyncio.sleep(0)
        sink.on_link("files" if engine or not here else "ended")
        sink.on_crashed(here and not engine)
        await asyncio.sleep(POLL_S)
        now = await asyncio.to_thread(engine_pid, run.path)
        if now != engine or (now and time.monotonic() - started > 5):
            return seq
        if not here and time.monotonic() - started > 5:
            return seq


def _read(run: RunDir, after_seq: int) -> list[ev.Event]:
    return list(read_journal(run, after_seq))


async def replay(run: RunDir, sink: Sink, speed: float = 10.0) -> None:
    """Play the journal `speed` times as fast as it was written; pauses longer than two seconds are
    cut.
    """
    sink.on_link("replay")
    events = await asyncio.to_thread(_read, run, 0)
    before = events[0].ts if events else 0.0
    for event in events:
        wait = min(max(0.0, event.ts - before), 2.0) / max(speed, 0.01)
        before = event.ts
        if wait > 0.001:
            await asyncio.sleep(wait)
        sink.on_event(event)
