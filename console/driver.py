"""The terminal driver: HALT in the input thread, leaving when the terminal is gone, never blocking
on a stalled one.

Built on Textual 8.2.8 (pinned exactly): `process_message` and `run_input_thread` are looked up by
name, and the tests under tests/pty hold them to it.
"""

import contextlib
import os
import selectors
import signal
import sys
import termios
import threading
from codecs import getincrementaldecoder
from collections.abc import Callable
from types import FrameType
from typing import Any

from textual import events
from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message

HALT_KEYS = frozenset({"f12", "ctrl+x"})
LEAVE_S = 2.0  # time for a clean exit when the terminal is gone, before the process ends itself


class ConsoleDriver(LinuxDriver):
    """`on_halt` is called in the input thread, before the event loop hears of the key."""

    on_halt: Callable[[str], Any] | None = None

    def __init__(self, app: Any, **options: Any) -> None:
        super().__init__(app, **options)
        # An inherited "ignore" (nohup, some sudo) leaves a console that spins on a dead terminal.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, self._on_term)

    @property
    def backlog(self) -> int:
        """Writes that wait for the terminal. The queue holds 30 and then blocks the event loop."""
        return self._writer_thread._queue.qsize() if self._writer_thread is not None else 0

    def process_message(self, message: Message) -> None:
        if isinstance(message, events.Key) and message.key in HALT_KEYS:
            hook = type(self).on_halt
            if hook is not None:
                hook("key")
        super().process_message(message)

    def run_input_thread(self) -> None:
        """Read keys until told to stop; end of input (the terminal is gone) ends the console."""
        parser = XTermParser(self._debug)
        decode = getincrementaldecoder("utf-8")(errors="replace").decode
        with selectors.SelectSelector() as selector:
            selector.register(self.fileno, selectors.EVENT_READ)
            while not self.exit_event.is_set():
                ready = selector.select(0.1)
                if ready:
                    try:
                        data = os.read(self.fileno, 4096)
                    except OSError:
                        data = b""
                    if not data:
                        self._leave(0)
                        return
                    for event in parser.feed(decode(data)):
                        self.process_message(event)
                for event in parser.tick():
                    self.process_message(event)

    def _on_term(self, signum: int, frame: FrameType | None) -> None:
        self._leave(143)

    def _leave(self, code: int) -> None:
        """Exit cleanly if the event loop can, else restore the terminal and end the process."""

        def end() -> None:
            if self.attrs_before is not None:
                with contextlib.suppress(termios.error):
                    termios.tcsetattr(self.fileno, termios.TCSANOW, self.attrs_before)
            os._exit(code)

        timer = threading.Timer(LEAVE_S, end)
        timer.daemon = True
        timer.start()
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(lambda: self._app.exit(return_code=code))


def utf8_stdio() -> None:
    """Glyphs are UTF-8 whatever the locale says."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
