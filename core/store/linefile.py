"""A file that only ever grows by whole lines: a torn tail is set aside, a full disk leaves no
partial line.

Knows bytes, not records.
"""

import contextlib
import errno
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.errors import DiskFull, StoreError

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextlib.contextmanager
def full_disk_named() -> Iterator[None]:
    """What a full disk refuses of small files becomes DiskFull; every other error stays itself."""
    try:
        yield
    except OSError as e:
        if e.errno not in FULL_ERRNOS:
            raise
        where = os.fsdecode(e.filename) if e.filename else "the run's disk"
        raise DiskFull(f"{where}: no space left; free some, then `eyas resume`") from e


def mend_tail(path: Path) -> Path | None:
    """Set a torn tail aside as `<name>.<n>.torn`, so that the file ends with one newline. For the
    writer alone.

    Trailing lines that are not JSON are the tail, blank lines after them included (case C71). A
    last record that is whole but lacks its newline is kept. Returns the side file, if one was
    needed."""
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return None
    with file:
        size = end = file.seek(0, os.SEEK_END)
        whole_without_newline = False
        while end > 0:
            start = _line_start(file, end)
            file.seek(start)
            line = file.read(end - start)
            if not line.isspace() and _is_object(line):
                whole_without_newline = not line.endswith(b"\n")
                break
            end = start
        file.seek(end)
        tail = file.read(size - end)
        side = None
        if tail.strip():
            side = next(
                p
                for n in range(1, 1_000_000)
                if not (p := path.with_name(f"{path.name}.{n}.torn")).exists()
            )
            side.write_bytes(tail)
        file.truncate(end)
        if whole_without_newline:
            file.seek(end)
            file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())
        return side


def _line_start(file: Any, end: int, block_bytes: int = 1 << 16) -> int:
    """Offset of the first byte of the line whose last byte (newline or not) is at `end - 1`."""
    position = end - 1
    while position > 0:
        begin = max(0, position - block_bytes)
        file.seek(begin)
        at = file.read(position - begin).rfind(b"\n")
        if at >= 0:
            return begin + int(at) + 1
        position = begin
    return 0


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


class Reserve:
    """Disk space set aside at the start, given back once, so that answers already paid for can
    still be stored."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.released = False
        try:
            with path.open("wb") as file:
                if size_bytes:
                    os.posix_fallocate(file.fileno(), 0, size_bytes)
        except OSError as e:
            with contextlib.suppress(OSError):
                path.unlink()
            raise StoreError(
                f"{path}: {size_bytes} bytes cannot be set aside ({e.strerror}); "
                "free space or use another disk"
            ) from e

    def release(self) -> bool:
        """True for the one caller that got the space."""
        with self._lock:
            if self.released:
                return False
            self.released = True
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            return True


class LineFile:
    """A file that only ever grows by whole lines. One thread at a time."""

    def __init__(self, path: Path, reserve: Reserve | None = None) -> None:
        self.path = path
        self._reserve = reserve
        try:
            mend_tail(path)
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as e:
            raise StoreError(f"{path}: cannot be opened for writing ({e.strerror})") from e
        self.size_bytes = os.fstat(self._fd).st_size

    def write(self, lines: list[bytes]) -> tuple[int, OSError | None]:
        """Write lines in order, one `os.write` when the disk takes them. Returns how many are now
        in the file and what stopped the rest; a full disk is reported only after the reserve has
        been used up as well."""
        done = 0
        while done < len(lines):
            data = b"".join(lines[done:])
            written, fault = self._write_some(data)
            kept = 0
            while done < len(lines) and kept + len(lines[done]) <= written:
                kept += len(lines[done])
                done += 1
            self.size_bytes += kept
            if written > kept:
                os.ftruncate(self._fd, self.size_bytes)  # back to the last newline
            if fault is None:
                continue
            if fault.errno not in FULL_ERRNOS or not self._reserve or not self._reserve.release():
                return done, fault
        return done, None

    def _write_some(self, data: bytes) -> tuple[int, OSError | None]:
        view, written = memoryview(data), 0
        while written < len(data):
            try:
                written += os.write(self._fd, view[written:])
            except OSError as e:
                return written, e
        return written, None

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
