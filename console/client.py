"""What the console can do to an engine: commands over its attached connection, HALT over one of its
own, kill, resume.

`HaltChannel` is blocking and lives in a thread: it is opened at the start, pinged each second and
can be fired from any thread in microseconds, whatever the event loop or the terminal do. Wire
format: see core.control.
"""

import asyncio
import contextlib
import os
import pwd
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from core import events as ev
from core.control import Client
from core.errors import ControlError
from core.halting import engine_pid, python_command, recorded_socket_path, write_halt_file
from core.store import RunDir

ACK_TIMEOUT_S = 10.0
PING_S = 1.0
REPEAT_S = 0.25  # a held key repeats; one command in this time is enough
FILE_AFTER_S = 0.3
TERM_S = 10.0


class _Ack(msgspec.Struct):
    id: int = 0


class _Answer(msgspec.Struct):
    ack: _Ack | None = None


_answer = msgspec.json.Decoder(_Answer).decode


def client_name() -> str:
    """Who asks, for the journal: user and terminal."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a uid without a name, as in containers
        user = str(os.getuid())
    return f"{user}/console-{os.getpid()}"


def _line(kind: str, body: dict[str, Any]) -> bytes:
    return msgspec.json.encode({kind: body}) + b"\n"


async def send(link: Client, name: str, reason: str = "") -> str:
    """One command over an attached client. Returns the run's state; raises ControlError when it was
    refused or nobody answered.
    """
    try:
        async with asyncio.timeout(ACK_TIMEOUT_S):
            ack = await link.command(name, reason)
    except TimeoutError as e:
        raise ControlError(
            f"{name}: the engine did not acknowledge in {ACK_TIMEOUT_S:.0f} s"
        ) from e
    if not ack.get("ok"):
        raise ControlError(str(ack.get("error") or f"{name}: refused"))
    return str(ack.get("state", ""))


class HaltChannel:
    """`fire` may be called from any thread, any number of times; it never waits for an answer.

    `armed` is True while a ping was answered, False when the link is lost (the HALT file still
    works).
    """

    def __init__(self, run: RunDir, on_change: Callable[[bool], None] | None = None) -> None:
        self._run = run
        self._on_change = on_change or (lambda armed: None)
        self._socket: socket.socket | None = None
        self._send_lock = threading.Lock()
        self._stop = threading.Event()
        self._last_fire = float("-inf")
        self._thread = threading.Thread(target=self._serve, name="halt-link", daemon=True)
        self.armed = False
        self.fired = 0
        self.acknowledged = threading.Event()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._drop()

    def fire(self, source: str) -> bool:
        """HALT: one line on the open socket, then the HALT file. Returns whether the socket took
        it.
        """
        now = time.monotonic()
        if now - self._last_fire < REPEAT_S:
            return True
        self._last_fire = now
        self.fired += 1
        # Pings have odd ids, halts even ones.
        sent = self._send(
            _line("command", {"id": 2 * self.fired, "name": "halt", "reason": source})
        )
        # In a thread: a stuck network file system must not hold the next key.
        touch = threading.Thread(
            target=self._touch, args=(source, sent), name="halt-file", daemon=True
        )
        touch.start()
        return sent

    def _touch(self, source: str, sent: bool) -> None:
        """The HALT file, for an engine that does not hear. After a command it comes a moment later,
        so that the halt's account names who asked; and never for the engine's successor.
        """
        pid = engine_pid(self._run.path)
        if sent:
            self._stop.wait(FILE_AFTER_S)
            if not pid or engine_pid(self._run.path) != pid:
                return
        with contextlib.suppress(OSError):
            write_halt_file(self._run.path, f"{source} by {client_name()}")

    def _send(self, data: bytes) -> bool:
        held = self._socket
        if held is None:
            return False
        try:
            with self._send_lock:
                held.sendall(data)
        except OSError:
            return False
        return True

    def _serve(self) -> None:
        pings = 0
        while not self._stop.is_set():
            if self._socket is None and not self._connect():
                self._set(False)
                self._stop.wait(PING_S)
                continue
            pings += 1
            ident = 2 * pings + 1
            alive = self._send(_line("command", {"id": ident, "name": "ping", "reason": ""}))
            alive = alive and self._await_ack(ident)
            self._set(alive)
            if not alive:
                self._drop()
            self._stop.wait(PING_S)

    def _connect(self) -> bool:
        candidate = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        candidate.settimeout(2 * PING_S)
        try:
            candidate.connect(str(recorded_socket_path(self._run.path)))
            hello = {
                "role": "halt",
                "client": client_name(),
                "api_version": ev.API_VERSION,
                "from_seq": 0,
            }
            candidate.sendall(_line("hello", hello))
        except OSError:
            candidate.close()
            return False
        self._buffer = b""
        self._socket = candidate
        return True

    def _await_ack(self, ident: int) -> bool:
        """Read until the answer to `ident`; acknowledged halts are noted on the way."""
        held = self._socket
        deadline = time.monotonic() + 2 * PING_S
        while held is not None and time.monotonic() < deadline:
            line, newline, rest = self._buffer.partition(b"\n")
            if not newline:
                try:
                    data = held.recv(65_536)
                except OSError:
                    return False
                if not data:
                    return False
                self._buffer += data
                continue
            self._buffer = rest
            ack = _acknowledged(line)
            if ack and ack % 2 == 0:
                self.acknowledged.set()
            if ack == ident:
                return True
        return False

    def _set(self, armed: bool) -> None:
        if armed != self.armed:
            self.armed = armed
            self._on_change(armed)

    def _drop(self) -> None:
        held, self._socket = self._socket, None
        if held is not None:
            held.close()


def _acknowledged(line: bytes) -> int:
    try:
        ack = _answer(line).ack
    except (msgspec.MsgspecError, ValueError):
        return 0
    return ack.id if ack else 0


def kill_engine(run: RunDir) -> str:
    """SIGTERM to the engine's process group, SIGKILL ten seconds later. Blocks; returns one line of
    what happened.
    """
    pid = engine_pid(run.path)
    if not pid:
        return "no engine of this run is alive on this host"
    try:
        group = os.getpgid(pid)
        os.killpg(group, signal.SIGTERM)
        deadline = time.monotonic() + TERM_S
        while time.monotonic() < deadline:
            if not engine_pid(run.path):
                return f"engine {pid} ended on SIGTERM"
            time.sleep(0.1)
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return f"engine {pid} is gone"
    except OSError as e:
        return f"engine {pid}: {e.strerror}"
    return f"engine {pid} did not end in {TERM_S:.0f} s and was killed"


def start_engine(run: RunDir, *words: str) -> str:
    """`eyas WORDS RUN`, for a run whose engine is gone, as a process of its own. Blocks until the
    engine's socket is bound; returns "" or one line of why not.
    """
    command = python_command("core", *words, str(run.path), "--detach")
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"{words[0]}: {e}"
    if done.returncode == 0:
        return ""
    lines = [text for text in (done.stderr or done.stdout).splitlines() if text.strip()]
    return lines[-1] if lines else f"{words[0]} ended with exit code {done.returncode}"
