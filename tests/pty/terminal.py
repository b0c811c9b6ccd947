"""A real pseudo-terminal with a process in it: keys go in, a screen comes out; it can stall, count
bytes and hang up.
"""

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyte

ROOT = Path(__file__).resolve().parents[2]
F12, CTRL_C, CTRL_X, ESC = b"\x1b[24~", b"\x03", b"\x18", b"\x1b"
RIGHT, ENTER = b"\x1b[C", b"\r"


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Poll until true; the time limit only turns a hang into a failure."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.02)


class Terminal:
    """`controlling` False: the process gets no SIGHUP when the terminal goes, as with some
    containers.
    """

    def __init__(
        self,
        arguments: list[str],
        env: dict[str, str],
        size: tuple[int, int] = (80, 24),
        controlling: bool = True,
    ) -> None:
        self.columns, self.rows = size
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", self.rows, self.columns, 0, 0))
        self.screen = pyte.Screen(self.columns, self.rows)
        self._stream = pyte.ByteStream(self.screen)
        self.output = bytearray()
        self._reading = threading.Event()
        self._reading.set()
        self._bytes_per_s = 0
        self._closed = False

        def adopt() -> None:
            if controlling:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        # preexec_fn: the controlling terminal can only be taken between fork and exec.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "console", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env=os.environ | env,
            start_new_session=True,
            preexec_fn=adopt,
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while not self._closed:
            if not self._reading.wait(0.1):
                continue
            try:
                data = os.read(self._master, self._bytes_per_s // 20 or 65_536)
            except OSError:
                return
            if not data:
                return
            self.output += data
            # pyte would draw the letters of private sequences that have a prefix.
            self._stream.feed(_plain(data))
            if self._bytes_per_s:
                time.sleep(len(data) / self._bytes_per_s)

    @property
    def text(self) -> str:
        return "\n".join(self.screen.display)

    def send(self, keys: bytes) -> int:
        """Type; returns the monotonic time in ns just before."""
        now = time.monotonic_ns()
        os.write(self._master, keys)
        return now

    def wait_for(self, text: str, timeout_s: float = 20.0) -> None:
        self.wait_until(lambda: text in self.text, f"{text!r} on the screen", timeout_s)

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
        """As the function, and a failure shows the screen."""
        try:
            wait_until(condition, what, timeout_s)
        except AssertionError as e:
            raise AssertionError(f"{e}; it shows:\n{self.text}") from None

    def confirm(self, keep: str, verb: str) -> None:
        """In a dialog with these two buttons: move from the one to the other, then press it."""

        def looks(word: str) -> tuple[object, ...]:
            for y, row in enumerate(self.screen.display):
                if keep in row and word in row:
                    cell = self.screen.buffer[y][row.rindex(word)]
                    return (cell.fg, cell.bg, cell.bold, cell.reverse, cell.underscore)
            return ()

        self.wait_until(lambda: looks(keep) != looks(verb), f"the focus on {keep!r}")
        focused = looks(keep)
        self.send(RIGHT)
        self.wait_until(lambda: looks(verb) == focused, f"the focus on {verb!r}")
        self.send(ENTER)

    def stall(self) -> None:
        """Stop reading and wait until the terminal's buffer no longer fills: writers block."""
        self._reading.clear()
        time.sleep(0.1)  # the reader may be inside one read
        last, same = -1, 0
        while same < 5:
            pending = struct.unpack("i", fcntl.ioctl(self._master, termios.FIONREAD, b"\0\0\0\0"))[
                0
            ]
            same = same + 1 if pending == last else 0
            last = pending
            time.sleep(0.3)

    def resume(self) -> None:
        self._reading.set()

    def throttle(self, bytes_per_s: int) -> None:
        """From now on a slow link; 0: as fast as it comes."""
        self._bytes_per_s = bytes_per_s

    def hang_up(self) -> None:
        self._closed = True
        self._reading.set()
        with contextlib.suppress(OSError):
            os.close(self._master)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        if not self._closed:
            self.hang_up()


def _plain(data: bytes) -> bytes:
    out = bytearray()
    i = 0
    while i < len(data):
        if data[i : i + 2] == b"\x1b[" and data[i + 2 : i + 3] in (b"<", b">", b"="):
            end = i + 3
            while end < len(data) and not 0x40 <= data[end] <= 0x7E:
                end += 1
            i = end + 1
            continue
        out.append(data[i])
        i += 1
    return bytes(out)
