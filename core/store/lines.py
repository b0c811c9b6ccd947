"""Append-only JSONL: whole lines or none, group commit, a full disk survived, a torn tail set
aside.

Promises: after any kill, every line is whole except perhaps the last; a full disk never leaves a
partial line and never loses a record that was handed over. Knows bytes and records, nothing about
what they mean."""

import asyncio
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from core.errors import DiskFull, StoreError
from core.halting import HaltError, private_runtime_dir, runtime_dir
from core.offload import Replies
from core.store.linefile import FULL_ERRNOS, LineFile, Reserve

T = TypeVar("T")
log = logging.getLogger(__name__)

FSYNC_S = 0.2
READ_BYTES = 1 << 18
"""Lines are 25 kB: with Python's own buffer of 8 kB finding their ends takes as long as decoding
their heads."""


class CorruptLine(NamedTuple):
    """A line in the middle of a file that cannot be read. It does not stop a resume; its prompt is
    pending again."""

    path: Path
    offset: int
    error: str


def encode_line(record: Any) -> bytes:
    """One JSON line. Text with lone surrogates, which UTF-8 cannot hold, is written with ASCII
    escapes."""
    try:
        return msgspec.json.encode(record) + b"\n"
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(record), separators=(",", ":")).encode() + b"\n"


def _decode(line: bytes, decoder: msgspec.json.Decoder[T], type_: type[T]) -> T:
    try:
        return decoder.decode(line)
    except msgspec.DecodeError:
        return msgspec.convert(json.loads(line), type_)  # lone surrogates: msgspec refuses them


def read_jsonl(
    path: Path, type: type[T], on_corrupt: Callable[[CorruptLine], None] | None = None
) -> Iterator[T]:
    """Records in file order. A missing file has none. Unreadable lines at the end are a torn tail
    and are left out (the writer sets them aside when it opens the file); one in the middle goes to
    `on_corrupt`, or to the log."""
    return (record for _, record in read_placed(path, type, on_corrupt))


def read_placed(
    path: Path, type: type[T], on_corrupt: Callable[[CorruptLine], None] | None = None
) -> Iterator[tuple[int, T]]:
    """`read_jsonl` with the byte offset of each line, for `read_at`."""
    report = on_corrupt or (lambda bad: log.warning("corrupt_line %s at byte %d: %s", *bad))
    decoder = msgspec.json.Decoder(type)
    torn: list[CorruptLine] = []
    offset = 0
    try:
        file = path.open("rb", buffering=READ_BYTES)
    except FileNotFoundError:
        return
    with file:
        for line in file:
            here, offset = offset, offset + len(line)
            if line.isspace():
                continue
            try:
                record = _decode(line, decoder, type)
            except (ValueError, msgspec.MsgspecError) as e:
                torn.append(CorruptLine(path, here, str(e)))
                continue
            for bad in torn:
                report(bad)
            torn.clear()
            yield here, record


def read_at(path: Path, offsets: Iterable[int], type: type[T]) -> Iterator[T]:
    """The records whose lines begin at `offsets`, in that order."""
    decoder = msgspec.json.Decoder(type)
    with path.open("rb") as file:
        for offset in offsets:
            file.seek(offset)
            yield _decode(file.readline(), decoder, type)


class _Item(NamedTuple):
    record: Any
    durable: bool
    settle: Callable[[StoreError | None], None]


class Appender:
    """One JSONL file and its writer thread.

    A record whose append raised DiskFull stays the appender's: it is written as soon as there is
    space, at the latest by `close()`, which falls back to a spool file that the next Appender of
    this path takes in. So never append it again. `on_full` is called once, from the writer thread,
    when the reserve had to be touched. `fault`: what went wrong with a record that nobody waited
    for, a full disk aside."""

    def __init__(
        self,
        path: Path,
        reserve: Reserve | None = None,
        on_full: Callable[[], None] | None = None,
    ) -> None:
        self.path = path
        self.full = False
        self.fault: StoreError | None = None
        self._file = LineFile(path, reserve)
        self._reserve = reserve
        self._on_full = on_full
        self._condition = threading.Condition()
        self._queue: list[_Item] = []
        self._replies: Replies | None = None
        self._held: list[bytes] = []
        self._unsynced: list[_Item] = []
        self._dirty = False
        self._last_sync = 0.0
        self._closing = False
        self._take_in_spool()
        self._thread = threading.Thread(target=self._run, name=f"append-{path.name}", daemon=True)
        self._thread.start()

    def append(self, record: Any, durable: bool = False) -> asyncio.Future[None]:
        """Hand over now; done when the record's line is in the file (`durable`: and fsynced, at
        most FSYNC_S later), with DiskFull (the record is kept, see above) or StoreError otherwise.
        Cancelling the wait does not undo it."""
        loop = asyncio.get_running_loop()
        if self._replies is None or self._replies.loop is not loop:
            self._replies = Replies(loop)
        future: asyncio.Future[None] = loop.create_future()
        self._put(_Item(record, durable, partial(self._replies.deliver, future, None)))
        return future

    def post(self, record: Any) -> None:
        """The same from any thread, without waiting. Order of calls is order of lines."""
        self._put(_Item(record, False, self._posted))

    def _posted(self, error: StoreError | None) -> None:
        if error is not None and not isinstance(error, DiskFull):
            self.fault = error

    def _put(self, item: _Item) -> None:
        with self._condition:
            if self._closing:
                raise StoreError(f"{self.path}: append after close")
            self._queue.append(item)
            if len(self._queue) == 1:  # else the writer has been woken already
                self._condition.notify()

    def close(self) -> None:
        """Write, fsync and close. Raises DiskFull when records could neither be written nor
        spooled."""
        with self._condition:
            if self._closing:
                return
            self._closing = True
            self._condition.notify()
        self._thread.join()
        try:
            if self._held:
                del self._held[: self._file.write(self._held)[0]]
            if self._held:
                self._spool()
        finally:
            self._file.close()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._queue and not self._closing:
                    if not self._condition.wait(self._sync_wait_s()):
                        break
                batch, self._queue = self._queue, []
                closing = self._closing
            if batch:
                self._write(batch)
            if self._dirty and (closing or self._sync_wait_s() == 0.0):
                self._sync()
            if closing and not batch:
                return

    def _sync_wait_s(self) -> float | None:
        if not self._dirty:
            return None
        return max(0.0, self._last_sync + FSYNC_S - time.monotonic())

    def _write(self, batch: list[_Item]) -> None:
        lines, items = self._held, []
        held = len(lines)
        for item in batch:
            try:
                lines.append(encode_line(item.record))
                items.append(item)
            except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as e:
                item.settle(StoreError(f"{self.path}: record cannot be encoded: {e}"))
        written, fault = self._file.write(lines)
        self._held = lines[written:]
        self._dirty = self._dirty or written > 0
        if (fault or (self._reserve and self._reserve.released)) and not self.full:
            self.full = True
            if self._on_full:
                self._on_full()
        for index, item in enumerate(items):
            if held + index >= written:
                item.settle(self._refusal(fault))
            elif item.durable:
                self._unsynced.append(item)
            else:
                item.settle(None)

    def _refusal(self, fault: OSError | None) -> StoreError:
        if fault is None or fault.errno in FULL_ERRNOS:
            return DiskFull(f"{self.path}: no space left; free some, then `eyas resume`")
        return StoreError(
            f"{self.path}: cannot be written ({fault.strerror}); mend it, then `eyas resume`"
        )

    def _sync(self) -> None:
        error = None
        try:
            self._file.sync()
        except OSError as e:
            error = StoreError(f"{self.path}: fsync failed ({e.strerror})")
        self._dirty, self._last_sync = False, time.monotonic()
        waiting, self._unsynced = self._unsynced, []
        for item in waiting:
            item.settle(error)

    def _spool_path(self, folder: Path) -> Path:
        digest = hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:16]
        return folder / f"{digest}.spool"

    def _spool(self) -> None:
        """Last resort: another file system, under the user's private runtime folder."""
        try:
            spool = self._spool_path(private_runtime_dir())
            with spool.open("ab") as file:
                file.write(b"".join(self._held))
                file.flush()
                os.fsync(file.fileno())
        except (OSError, HaltError) as e:
            raise DiskFull(
                f"{self.path}: {len(self._held)} records lost, no space here nor for a spool ({e})"
            ) from e

    def _take_in_spool(self) -> None:
        spool = self._spool_path(runtime_dir())
        if not spool.exists():
            return
        try:
            private = spool.parent == private_runtime_dir()
        except HaltError as e:
            raise StoreError(str(e)) from e
        if not private or spool.lstat().st_uid != os.getuid():
            raise StoreError(f"{spool}: not this user's; remove it")
        written, _ = self._file.write(lines := spool.read_bytes().splitlines(keepends=True))
        if written < len(lines):
            raise DiskFull(
                f"{self.path}: no space left to take in {spool}; free some, then `eyas resume`"
            )
        self._file.sync()
        spool.unlink()
