"""The run's event journal: numbered, rotated, snapshotted; one writer, any number of readers.

Promises: `emit` never waits for a disk; an event is fsynced at most one second after it was
accepted, and at once on `flush`; `load_view` does not depend on how long the run has been going on.
A full disk stops the writing, not the run: events wait in memory, oldest dropped first. Knows
events and the view they fold into, no stage."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from core import events as ev
from core import view as vw
from core.errors import StoreError
from core.store import LineFile, Reserve, RunDir, write_atomic

ROTATE_BYTES = 64 << 20
FSYNC_S = 1.0
SNAPSHOT_S = 30.0
SNAPSHOT_EVENTS = 50_000
KEEP_SNAPSHOTS = 2
MAX_HELD = 20_000

_SET_FIELD = msgspec.structs.force_setattr


class _Head(msgspec.Struct):
    seq: int = 0


_head = msgspec.json.Decoder(_Head).decode
Subscriber = Callable[[ev.Event, bytes], None]


class Journal:
    """`emit` stamps, folds, publishes and queues; the writer thread stores. Thread-safe.

    `view` is the fold of everything emitted, earlier lives included. A subscriber is called in the
    emitting thread with the event and its encoded line; it must not block."""

    def __init__(
        self,
        run: RunDir,
        reserve: Reserve | None = None,
        rotate_bytes: int = ROTATE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._rotate_bytes = rotate_bytes
        self._reserve = reserve
        self._clock = clock
        self.full = False
        self.dropped = 0
        run.journal.mkdir(exist_ok=True)
        run.state.mkdir(exist_ok=True)
        parts = _parts(run)
        self._file = LineFile(parts[-1] if parts else run.journal / "000001.jsonl", reserve)
        self.view = load_view(run)
        self._seq = self.view.seq
        self._subscribers: list[Subscriber] = []
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._flushed = threading.Condition(self._lock)
        self._queue: list[bytes] = []
        self._snapshot: tuple[int, bytes] | None = None
        self._snapshot_at = (clock(), self._seq)
        self._stored = self._accepted = 0
        self._flush_to = 0
        self._closing = False
        self._held: list[bytes] = []
        self._thread = threading.Thread(target=self._write_loop, name="journal", daemon=True)
        self._thread.start()

    @property
    def seq(self) -> int:
        return self._seq

    def subscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.append(subscriber)

    def emit(self, event: ev.Event) -> None:
        """Number, stamp, fold and queue one event. The event object itself is stamped: do not reuse
        it."""
        with self._lock:
            if self._closing:
                return
            self._seq += 1
            _SET_FIELD(event, "v", ev.API_VERSION)
            _SET_FIELD(event, "seq", self._seq)
            _SET_FIELD(event, "t_ns", time.monotonic_ns())
            _SET_FIELD(event, "ts", time.time())
            event, line = _encoded(event)
            vw.fold(self.view, event)
            self._queue.append(line)
            self._accepted += 1
            since, seq = self._snapshot_at
            if self._clock() - since >= SNAPSHOT_S or self._seq - seq >= SNAPSHOT_EVENTS:
                self._take_snapshot()
            self._wake.notify()
        for subscriber in self._subscribers:
            subscriber(event, line)

    def flush(self, timeout_s: float = 10.0) -> None:
        """Return when everything emitted so far is fsynced (or cannot be). Blocks: call it at
        halts, off the loop."""
        with self._lock:
            target = self._flush_to = self._accepted
            self._wake.notify()
            self._flushed.wait_for(lambda: self._stored >= target or self._closing, timeout_s)

    def close(self) -> None:
        """Write and fsync all, with a last snapshot. Later events are ignored."""
        with self._lock:
            if self._closing:
                return
            self._take_snapshot()
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._file.close()

    def _take_snapshot(self) -> None:
        self._snapshot = (self._seq, vw.encode(self.view))
        self._snapshot_at = (self._clock(), self._seq)

    def _write_loop(self) -> None:
        dirty, last_sync = 0, time.monotonic()
        while True:
            with self._lock:
                while not self._queue and not self._closing and self._flush_to <= self._stored:
                    if not self._wake.wait(FSYNC_S if dirty else None):
                        break
                lines, self._queue = self._queue, []
                snapshot, self._snapshot = self._snapshot, None
                closing, urgent = self._closing, self._flush_to > self._stored
            dirty += len(lines)
            if lines or closing:
                self._store(lines)
            synced = dirty and (urgent or closing or time.monotonic() - last_sync >= FSYNC_S)
            if synced:
                self._sync()
            if snapshot:
                self._write_snapshot(*snapshot)
            if synced:
                with self._lock:
                    self._stored += dirty
                    self._flushed.notify_all()
                dirty, last_sync = 0, time.monotonic()
            if closing and not lines:
                return

    def _store(self, lines: list[bytes]) -> None:
        pending = self._held + lines
        if self._file.size_bytes >= self._rotate_bytes and pending:
            self._rotate()
        written, fault = self._file.write(pending)
        self._held = pending[written:]
        self.full = self.full or fault is not None
        if (excess := len(self._held) - MAX_HELD) > 0:
            del self._held[:excess]
            self.dropped += excess

    def _sync(self) -> None:
        try:
            self._file.sync()
        except OSError:
            self.full = True

    def _rotate(self) -> None:
        number = int(self._file.path.stem) + 1
        self._sync()
        try:
            following = LineFile(self._run.journal / f"{number:06d}.jsonl", self._reserve)
        except StoreError:
            return  # the disk refuses a new file: keep growing this one
        self._file.close()
        self._file = following

    def _write_snapshot(self, seq: int, data: bytes) -> None:
        try:
            write_atomic(self._run.state / f"{seq}.json", data)
        except OSError:
            self.full = True  # a snapshot only saves time
            return
        for old in _snapshots(self._run)[KEEP_SNAPSHOTS:]:
            old.unlink(missing_ok=True)


def _encoded(event: ev.Event) -> tuple[ev.Event, bytes]:
    try:
        return event, ev.encode(event) + b"\n"
    except UnicodeEncodeError:
        clean = ev.encode(_without_surrogates(msgspec.to_builtins(event)))
        return ev.decode(clean), clean + b"\n"


def _without_surrogates(value: object) -> object:
    """Raw text of a hostile reply may hold lone surrogates, which UTF-8 cannot: they are shown as
    escapes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(v) for v in value]
    return value


def read_journal(run: RunDir, after_seq: int = 0) -> Iterator[ev.Event]:
    """Events with a higher number than `after_seq`, in order, as far as they are stored. A torn
    last line ends the reading; unreadable lines before it are passed over. Does not write: safe on
    a live run."""
    parts = _parts(run)
    first = 0
    for index, part in enumerate(parts):
        if index and (head := _first_seq(part)) and head > after_seq + 1:
            break
        first = index
    for index, part in enumerate(parts[first:]):
        with part.open("rb") as file:
            if index == 0 and after_seq:
                _seek_seq(file, after_seq)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                event = _decode(line)
                if event is not None and event.seq > after_seq:
                    yield event


def load_view(run: RunDir) -> vw.RunView:
    """The newest readable snapshot plus the tail."""
    view = vw.RunView()
    for path in _snapshots(run):
        try:
            view = vw.decode(path.read_bytes())
            break
        except (OSError, msgspec.MsgspecError):
            continue
    for event in read_journal(run, view.seq):
        vw.fold(view, event)
    return view


def _decode(line: bytes) -> ev.Event | None:
    try:
        return ev.decode(line)
    except (msgspec.MsgspecError, ValueError):
        return None


def _parts(run: RunDir) -> list[Path]:
    return sorted(p for p in run.journal.glob("*.jsonl") if p.stem.isdigit())


def _snapshots(run: RunDir) -> list[Path]:
    found = [p for p in run.state.glob("*.json") if p.stem.isdigit()]
    return sorted(found, key=lambda p: int(p.stem), reverse=True)


def _seq_of(line: bytes) -> int:
    try:
        return _head(line).seq
    except (msgspec.MsgspecError, ValueError):
        return 0


def _first_seq(part: Path) -> int:
    with part.open("rb") as file:
        return _seq_of(file.readline())


def _seek_seq(file: BinaryIO, after_seq: int) -> None:
    """Binary search over bytes: leave the file at a line start at or before the first event after
    `after_seq`."""
    low, high = 0, file.seek(0, os.SEEK_END)
    while high - low > 1 << 16:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()
        start = file.tell()
        seq = _seq_of(file.readline())
        if 0 < seq <= after_seq and start < high:
            low = start
        else:
            high = middle
    file.seek(low)
