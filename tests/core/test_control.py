"""The control socket: greeting, roles, acks, slow clients, foreign users, two engines, the
standard-library client."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from core import control
from core import events as ev
from core.config import parse
from core.control import Client, CommandRequest, ControlServer, Peer, connect, socket_path
from core.errors import ControlError, UsageError
from core.halting import HaltError, HaltLink, halt_now, private_runtime_dir, runtime_dir
from core.journal import Journal
from core.store import RunDir, create_run, make_manifest, write_manifest

CONFIG = parse({"run": {"min_free_disk_bytes": 1}}, "test")


class Rig:
    """A server on a real journal, with a handler that remembers."""

    def __init__(self, run: RunDir, buffer_bytes: int = control.BUFFER_BYTES) -> None:
        self.run = run
        self.journal = Journal(run)
        self.seen: list[tuple[CommandRequest, Peer]] = []
        self.server = ControlServer(run, self.handle, lambda: self.journal.view, buffer_bytes)
        self.journal.subscribe(self.server.publish)

    def handle(self, request: CommandRequest, peer: Peer) -> str:
        self.seen.append((request, peer))
        if request.name == "resume":
            raise ControlError("resume: not now")
        self.journal.emit(ev.StateChanged(state="halting"))
        return "halting"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = create_run(CONFIG, tmp_path, "alpha")
    write_manifest(run, make_manifest(run, CONFIG, []))
    return run


@asynccontextmanager
async def served(run: RunDir, buffer_bytes: int = control.BUFFER_BYTES) -> AsyncIterator[Rig]:
    rig = Rig(run, buffer_bytes)
    await rig.server.start()
    try:
        yield rig
    finally:
        await rig.server.close()
        rig.journal.close()


class Reader:
    """Reads a client's messages in the background."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.messages: list[tuple[str, Any]] = []
        self._more = asyncio.Condition()
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self.client.messages():
            async with self._more:
                self.messages.append(message)
                self._more.notify_all()

    async def until(self, kind: str, count: int = 1) -> list[Any]:
        async with asyncio.timeout(10), self._more:
            await self._more.wait_for(lambda: len(self.of(kind)) >= count)
        return self.of(kind)

    def of(self, kind: str) -> list[Any]:
        return [payload for k, payload in self.messages if k == kind]

    async def close(self) -> None:
        await self.client.close()
        await self._task


async def test_welcome_snapshot_events(run: RunDir) -> None:
    async with served(run) as rig:
        rig.journal.emit(ev.StateChanged(state="running"))
        client = await connect(run, "viewer", "test")
        assert client.welcome == {
            "api_version": ev.API_VERSION,
            "run_id": "alpha",
            "state": "running",
            "seq": 1,
            "pid": os.getpid(),
            "role": "viewer",
            "consoles": 1,
        }
        reader = Reader(client)
        (snapshot,) = await reader.until("snapshot")
        assert (snapshot.seq, snapshot.state) == (1, "running")
        for i in range(3):
            rig.journal.emit(ev.Log(message=str(i)))
        events = await reader.until("event", 3)
        assert [e.seq for e in events] == [2, 3, 4]
        await reader.close()


async def test_socket_is_private_and_goes_with_the_server(run: RunDir) -> None:
    async with served(run) as rig:
        path = socket_path(run)
        assert rig.server.path == path
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert len(os.fsencode(path)) <= 107
    assert not path.exists()


async def test_commands_are_acknowledged_with_who_and_why(run: RunDir) -> None:
    async with served(run) as rig:
        reader = Reader(await connect(run, "operator", "ops"))
        ack = await reader.client.command("drain", "smells")
        assert ack == {"id": 1, "ok": True, "state": "halting"}
        request, peer = rig.seen[0]
        assert (request.name, request.reason) == ("drain", "smells")
        assert (peer.uid, peer.pid, peer.client) == (os.getuid(), os.getpid(), "ops")
        ack = await reader.client.command("resume")
        assert (ack["ok"], ack["error"]) == (False, "resume: not now")
        await reader.close()


@pytest.mark.parametrize(
    ("role", "name", "allowed"),
    [
        ("viewer", "halt", False),
        ("viewer", "ping", True),
        ("halt", "halt", True),
        ("halt", "sever", True),
        ("halt", "drain", False),
        ("operator", "sever", True),
    ],
)
async def test_the_server_knows_what_a_role_may(
    run: RunDir, role: control.Role, name: str, allowed: bool
) -> None:
    async with served(run) as rig:
        reader = Reader(await connect(run, role, "c"))
        ack = await reader.client.command(name)
        assert ack["ok"] is allowed
        assert [r.name for r, _ in rig.seen] == ([name] if allowed and name != "ping" else [])
        if not allowed:
            assert f"not for role {role}" in ack["error"]
        await reader.close()


async def test_nonsense_is_answered_or_dropped_and_the_server_lives(run: RunDir) -> None:
    async with served(run) as rig:
        path = socket_path(run)
        for junk in (b"GET / HTTP/1.1\r\n\r\n", b'{"hello":{"role":"root"}}\n', b"\xff\xfe\n", b""):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(junk)
            writer.write_eof()
            answer = await reader.read()
            assert answer == b"" or b"hello expected" in answer
            writer.close()
            await writer.wait_closed()
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b'{"hello":{"role":"operator"}}\n{"command":{"id":1,"name":"explode"}}\n')
        answers = [json.loads(await reader.readline()) for _ in range(3)]
        assert "not a command" in answers[2]["ack"]["error"]
        writer.write(b"x" * (control.MAX_LINE_BYTES + 10))  # no newline: cut off, not buffered
        assert await reader.read() == b""
        writer.close()
        assert rig.seen == []


async def test_slow_client_gets_a_gap_and_a_snapshot_and_costs_no_memory(run: RunDir) -> None:
    async with served(run, buffer_bytes=16 << 10) as rig:
        client = await connect(run, "viewer", "stalled")
        fast = Reader(await connect(run, "viewer", "fast"))
        (slow,) = [c for c in rig.server._connections if c.peer.client == "stalled"]
        client._reader._transport.pause_reading()  # type: ignore[attr-defined]
        filler = "x" * 2_000
        sent = 0
        while not slow.dropped_from:
            rig.journal.emit(ev.Log(message=filler))
            sent += 1
            await fast.until("event", sent)
            assert sent < 5_000
        for _ in range(50):
            rig.journal.emit(ev.Log(message=filler))
            sent += 1
            await fast.until("event", sent)
        assert slow.buffered < (16 << 10) + 64_000
        client._reader._transport.resume_reading()  # type: ignore[attr-defined]
        reader = Reader(client)
        while not reader.of("gap"):
            rig.journal.emit(ev.Log(message="awake"))
            sent += 1
            await fast.until("event", sent)
        snapshots = await reader.until("snapshot", 2)
        first, last = reader.of("gap")[0]
        before = [e.seq for e in reader.of("event") if e.seq < first]
        assert before == list(range(1, first))
        assert snapshots[1].seq >= last > first
        rig.journal.emit(ev.Log(message="after"))
        await reader.until("event", len(before) + 1)
        assert reader.of("event")[-1].seq == snapshots[1].seq + 1
        assert [e.seq for e in fast.of("event")][:sent] == list(range(1, sent + 1))
        await reader.close()
        await fast.close()


async def test_halt_link_of_the_standard_library(run: RunDir) -> None:
    async with served(run) as rig:
        link = await asyncio.to_thread(HaltLink, socket_path(run), "tap")
        assert link.welcome["run_id"] == "alpha"
        assert (await asyncio.to_thread(link.command, "ping"))["ok"]
        ack = await asyncio.to_thread(link.command, "halt", "smell")
        assert ack["ok"] and ack["state"] == "halting"
        assert rig.seen[0][0].reason == "smell" and rig.seen[0][1].role == "halt"
        rig.journal.emit(ev.Log(message="not for a halt link"))
        assert (await asyncio.to_thread(link.command, "ping"))["ok"]
        assert rig.server.consoles == 0
        link.close()
        state = await asyncio.to_thread(halt_now, run.path, True, "again")
        assert state == "halting" and rig.seen[1][0].name == "sever"
        assert run.halt_file.read_text() == "again\n"


async def test_halt_without_engine_leaves_the_file(run: RunDir) -> None:
    assert await asyncio.to_thread(halt_now, run.path) == ""
    assert run.halt_file.exists()
    with pytest.raises(HaltError, match="does not answer"):
        await asyncio.to_thread(HaltLink, socket_path(run), "tap")


async def test_a_second_engine_is_refused_and_a_dead_socket_is_not_in_the_way(run: RunDir) -> None:
    async with served(run) as rig:
        other = ControlServer(run, rig.handle, lambda: rig.journal.view)
        with pytest.raises(ControlError, match="already listening"):
            await other.start()
        await other.close()
        assert socket_path(run).exists()
    socket_path(run).touch()
    async with served(run):
        await (await connect(run, "viewer")).close()


async def test_the_recorded_path_finds_an_engine_of_another_environment(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(run):
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        client = await connect(run, "viewer")
        assert client.welcome["run_id"] == "alpha"
        await client.close()


async def test_no_engine_is_one_line(run: RunDir) -> None:
    with pytest.raises(ControlError, match="no engine answers") as caught:
        await connect(run, "viewer")
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="no such run"):
        await connect("nobody", "viewer")


def test_an_open_runtime_folder_is_refused(runtime_dir: Path) -> None:
    private_runtime_dir().chmod(0o755)
    with pytest.raises(HaltError, match="not a private folder"):
        private_runtime_dir()


def test_a_long_runtime_path_falls_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    assert runtime_dir() == Path(f"/tmp/eyas-{os.getuid()}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_is_cut_off_before_a_byte_is_parsed(run: RunDir) -> None:
    async with served(run) as rig:
        path = socket_path(run)
        path.chmod(0o666)  # even if the modes were wrong
        path.parent.chmod(0o711)
        path.parent.parent.chmod(0o711)
        code = (
            "import os, socket, sys\n"
            "os.setgid(65534); os.setuid(65534)\n"
            "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
            's.sendall(b\'{"hello":{"role":"operator"}}\\n{"command":{"id":1,"name":"halt"}}\\n\')\n'
            "print(len(s.recv(10)))\n"
        )
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", code, str(path)], capture_output=True, text=True
        )
        assert rig.seen == []
        assert (
            done.stdout.strip() == "0"
            or "ConnectionReset" in done.stderr
            or "BrokenPipe" in done.stderr
        )
        assert not control.uid_allowed(65534) and control.uid_allowed(os.geteuid())
