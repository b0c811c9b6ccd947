"""The control socket of a run: who may speak, what is said, and that nobody who listens slows the
engine.

    client                                   server
    {"hello": {role, client, api_version, from_seq}}
                                             {"welcome": {api_version, run_id, state, seq, pid,
                                             role, consoles}}
                                             {"snapshot": RunView}          not for role "halt"
                                             {"event": {...}} ...           not for role "halt"
                                             {"gap": {from, to}} {"snapshot": RunView}
    {"command": {id, name, reason}}
                                             {"ack": {id, ok, state, error?}}

One JSON object a line. Roles: `operator` (all commands), `viewer` (ping only), `halt` (halt, sever,
ping; no events). The peer's uid is checked before a byte is parsed. Knows events and the view, not
what a command does."""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from core import events as ev
from core import view as vw
from core.errors import ControlError, EyasError
from core.halting import HaltError, private_runtime_dir, recorded_socket_path, socket_path_of
from core.store import RunDir, find_run

Role = Literal["operator", "viewer", "halt"]
CommandName = Literal["halt", "sever", "drain", "resume", "ping"]
ALLOWED: dict[str, frozenset[str]] = {
    "operator": frozenset({"halt", "sever", "drain", "resume", "ping"}),
    "viewer": frozenset({"ping"}),
    "halt": frozenset({"halt", "sever", "ping"}),
}
MAX_LINE_BYTES = 64 << 10
MAX_MESSAGE_BYTES = 64 << 20
BUFFER_BYTES = 256 << 10
HELLO_TIMEOUT_S = 5.0
FLUSH_S = 0.02  # events are sent together: at 1,000 outcomes/s one write a client, not a thousand
_PEERCRED = struct.Struct("3i")


class Hello(msgspec.Struct, kw_only=True):
    role: Role = "viewer"
    client: str = ""
    api_version: int = ev.API_VERSION
    from_seq: int = 0


class CommandRequest(msgspec.Struct, kw_only=True):
    id: int
    name: CommandName
    reason: str = ""


class _FirstLine(msgspec.Struct):
    hello: Hello


class _Line(msgspec.Struct):
    command: CommandRequest


class Peer(NamedTuple):
    uid: int
    pid: int
    role: Role
    client: str


Handler = Callable[[CommandRequest, Peer], str]
"""Carries out a command at once and returns the run's state; raises EyasError to refuse it."""


def socket_path(run: RunDir) -> Path:
    return socket_path_of(run.path)


def peer_credentials(sock: Any) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, from the kernel."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    pid, uid, _ = _PEERCRED.unpack(raw)
    return pid, uid


def uid_allowed(uid: int) -> bool:
    """The run's owner, and root, who can do everything anyway."""
    return uid in (os.geteuid(), 0)


class _Connection:
    """One client. Events are dropped while its buffer is full; then it gets a gap and a fresh
    snapshot."""

    def __init__(self, writer: asyncio.StreamWriter, peer: Peer) -> None:
        self.writer = writer
        self.peer = peer
        self.wants_events = peer.role != "halt"
        self.dropped_from = 0

    @property
    def buffered(self) -> int:
        return self.writer.transport.get_write_buffer_size()

    def send(self, kind: str, payload: bytes) -> None:
        self.writer.write(b'{"' + kind.encode() + b'":' + payload + b"}\n")


class ControlServer:
    """Serves one run on the engine's loop. `handler` and `snapshot` are called on the loop and must
    be quick."""

    def __init__(
        self,
        run: RunDir,
        handler: Handler,
        snapshot: Callable[[], vw.RunView],
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self.path = socket_path(run)
        self._run_id = run.run_id
        self._handler = handler
        self._snapshot = snapshot
        self._buffer_bytes = buffer_bytes
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._tasks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._pending: list[tuple[int, bytes]] = []
        self._flush_handle: asyncio.TimerHandle | None = None

    @property
    def consoles(self) -> int:
        return sum(1 for c in self._connections if c.wants_events)

    async def start(self) -> None:
        """Bind. Raises ControlError when another engine of this run is listening, or the folder is
        not private."""
        try:
            private_runtime_dir()
        except HaltError as e:
            raise ControlError(str(e)) from e
        if self.path.exists():
            await self._remove_if_dead()
        previous = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(
                self._serve, path=self.path, limit=MAX_LINE_BYTES
            )
        except OSError as e:
            raise ControlError(f"{self.path}: control socket cannot be bound ({e.strerror})") from e
        finally:
            os.umask(previous)
        self.path.chmod(0o600)

    async def _remove_if_dead(self) -> None:
        try:
            _, writer = await asyncio.open_unix_connection(self.path)
        except OSError:
            self.path.unlink(missing_ok=True)
            return
        writer.close()
        await writer.wait_closed()
        raise ControlError(
            f"{self.path}: an engine of this run is already listening; "
            f"`eyas attach {self._run_id}` opens it"
        )

    async def close(self) -> None:
        """Send what is pending, then close; a client that does not take it in a second is cut
        off."""
        if self._flush_handle:
            self._flush_handle.cancel()
        self._flush()
        if self._server:
            self._server.close()
        for task, writer in list(self._tasks.items()):
            writer.close()
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        for writer in self._tasks.values():
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server:
            self.path.unlink(missing_ok=True)

    def publish(self, event: ev.Event, line: bytes) -> None:
        """A Journal subscriber: queue for all clients. Call on the loop."""
        if not self._connections:
            return
        self._pending.append((event.seq, line.rstrip(b"\n")))
        if self._flush_handle is None:
            self._flush_handle = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._flush_handle = None
        pending, self._pending = self._pending, []
        listeners = [c for c in self._connections if c.wants_events]
        if pending and listeners:
            data = b"".join(b'{"event":' + line + b"}\n" for _, line in pending)
            for connection in listeners:
                self._offer(connection, pending[0][0], pending[-1][0], data)

    def _offer(self, connection: _Connection, first: int, last: int, data: bytes) -> None:
        if connection.dropped_from:
            if connection.buffered == 0:
                gap = msgspec.json.encode({"from": connection.dropped_from, "to": last})
                connection.dropped_from = 0
                connection.send("gap", gap)
                connection.send("snapshot", vw.encode(self._snapshot()))
        elif connection.buffered + len(data) > self._buffer_bytes:
            connection.dropped_from = first
        else:
            connection.writer.write(data)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = writer
        connection = None
        try:
            pid, uid = peer_credentials(writer.get_extra_info("socket"))
            if not uid_allowed(uid):
                return
            connection = await self._greet(reader, writer, pid, uid)
            if connection is not None:
                await self._listen(reader, connection)
        except (
            ConnectionError,
            TimeoutError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
        ):
            pass  # the client is gone or does not keep to the protocol
        except asyncio.CancelledError:
            pass  # close(): nothing is left to do for this client
        finally:
            if connection is not None:
                self._connections.discard(connection)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()
            del self._tasks[task]

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int, uid: int
    ) -> _Connection | None:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            line = await reader.readuntil(b"\n")
        try:
            hello = msgspec.json.decode(line, type=_FirstLine).hello
        except (msgspec.MsgspecError, ValueError) as e:
            writer.write(msgspec.json.encode({"error": f"hello expected: {e}"}) + b"\n")
            return None
        connection = _Connection(writer, Peer(uid, pid, hello.role, hello.client[:80]))
        self._flush()  # what is pending is in the snapshot already
        view = self._snapshot()
        connection.send(
            "welcome",
            msgspec.json.encode(
                {
                    "api_version": ev.API_VERSION,
                    "run_id": self._run_id,
                    "state": view.state,
                    "seq": view.seq,
                    "pid": os.getpid(),
                    "role": hello.role,
                    "consoles": self.consoles + (1 if connection.wants_events else 0),
                }
            ),
        )
        if connection.wants_events:
            connection.send("snapshot", vw.encode(view))
        self._connections.add(connection)
        return connection

    async def _listen(self, reader: asyncio.StreamReader, connection: _Connection) -> None:
        while True:
            line = await reader.readuntil(b"\n")
            try:
                request = msgspec.json.decode(line, type=_Line).command
            except (msgspec.MsgspecError, ValueError) as e:
                ack: dict[str, Any] = {
                    "id": 0,
                    "ok": False,
                    "state": "",
                    "error": f"not a command: {e}",
                }
            else:
                ack = self._answer(request, connection.peer)
            connection.send("ack", msgspec.json.encode(ack))

    def _answer(self, request: CommandRequest, peer: Peer) -> dict[str, Any]:
        state = self._snapshot().state
        if request.name not in ALLOWED[peer.role]:
            error = f"{request.name}: not for role {peer.role}; attach without --read-only"
            return {"id": request.id, "ok": False, "state": state, "error": error}
        if request.name == "ping":
            return {"id": request.id, "ok": True, "state": state}
        try:
            return {"id": request.id, "ok": True, "state": self._handler(request, peer)}
        except EyasError as e:
            return {"id": request.id, "ok": False, "state": state, "error": str(e)}


class Client:
    """An attached asyncio client: iterate for messages, `command` from any task meanwhile.

    A message is ("snapshot", RunView), ("event", Event) or ("gap", (from_seq, to_seq)).
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, welcome: dict[str, Any]
    ) -> None:
        self.welcome = welcome
        self._reader = reader
        self._writer = writer
        self._next_id = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def messages(self) -> AsyncIterator[tuple[str, Any]]:
        """Until the engine closes the socket. Acks are routed to `command`: keep iterating while
        one is awaited."""
        try:
            while (line := await self._reader.readline()).endswith(b"\n"):
                message = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
                kind, payload = next(iter(message.items()))
                if kind == "event":
                    yield kind, ev.decode(payload)
                elif kind == "snapshot":
                    yield kind, vw.decode(payload)
                elif kind == "gap":
                    gap = msgspec.json.decode(payload, type=dict[str, int])
                    yield kind, (gap["from"], gap["to"])
                elif kind == "ack":
                    ack = msgspec.json.decode(payload, type=dict[str, Any])
                    if (future := self._waiting.pop(ack.get("id", 0), None)) and not future.done():
                        future.set_result(ack)
        except ConnectionError:
            return
        finally:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(ControlError("the run closed its control socket"))
            self._waiting.clear()

    async def command(self, name: str, reason: str = "") -> dict[str, Any]:
        """The ack `{"id","ok","state","error"?}`. Raises ControlError when the connection ends
        first."""
        self._next_id += 1
        ident = self._next_id
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[ident] = future
        try:
            self._writer.write(
                msgspec.json.encode({"command": {"id": ident, "name": name, "reason": reason}})
                + b"\n"
            )
            await self._writer.drain()
        except ConnectionError as e:
            self._waiting.pop(ident, None)
            raise ControlError(f"{name}: the run's control socket is closed") from e
        return await future

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


async def connect(run: RunDir | str, role: Role = "viewer", client: str = "") -> Client:
    """Attach to a running engine. Raises UsageError (no such run) or ControlError (no engine
    answers)."""
    run = find_run(run) if isinstance(run, str) else run
    path = recorded_socket_path(run.path)
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=MAX_MESSAGE_BYTES)
        hello = Hello(role=role, client=client)
        writer.write(msgspec.json.encode({"hello": hello}) + b"\n")
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            line = await reader.readline()
        welcome = msgspec.json.decode(line or b"{}", type=dict[str, Any]).get("welcome")
    except (OSError, TimeoutError, msgspec.MsgspecError) as e:
        raise ControlError(
            f"{run.run_id}: no engine answers on {path} ({e}); the run is read from its files"
        ) from e
    if not isinstance(welcome, dict):
        writer.close()
        raise ControlError(f"{run.run_id}: {path} does not speak the control protocol")
    return Client(reader, writer, welcome)
