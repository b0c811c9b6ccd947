"""A session against a real journal and control server: attach, commands, HALT, gaps, engines that
go and come.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from console.client import HaltChannel
from console.session import Session
from core import events as ev
from core.config import Config
from core.control import CommandRequest, ControlServer, Peer
from core.errors import ControlError, EyasError
from core.journal import Journal
from core.store import RunDir, make_manifest, write_manifest
from tests.console import recording
from tests.console.recorded_run import write_run


class Engine:
    def __init__(self, run: RunDir) -> None:
        self.run = run
        run.path.mkdir(exist_ok=True)
        write_manifest(run, make_manifest(run, Config(), ["eyas", "demo"]))
        self.journal = Journal(run)
        self.commands: list[tuple[str, str]] = []
        self.server = ControlServer(run, self.handle, lambda: self.journal.view, 1 << 20)

    def handle(self, request: CommandRequest, peer: Peer) -> str:
        self.commands.append((request.name, peer.role))
        if request.name == "drain":
            raise ControlError("drain: already draining")
        return self.journal.view.state

    async def start(self) -> None:
        await self.server.start()
        self.journal.subscribe(self.server.publish)

    async def stop(self) -> None:
        await self.server.close()
        self.journal.close()


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    engine = Engine(RunDir(tmp_path / "live"))
    await engine.start()
    for event in recording.events("generate"):
        engine.journal.emit(msgspec.structs.replace(event, seq=0))
    yield engine
    await engine.stop()


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(2_000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never: {what}")


async def test_attach_gives_snapshot_history_and_events(engine: Engine) -> None:
    session = Session(engine.run)
    session.start()
    await until(lambda: session.state.view.seq > 0, "the snapshot came")
    engine.journal.flush()
    await until(lambda: len(session.state.series.cpu) > 10, "the history was read")
    assert session.state.link == "live"
    assert session.state.view.stats is not None
    engine.journal.emit(
        msgspec.structs.replace(session.state.view.stats, seq=0, in_flight=3, done_per_min=77.0)
    )
    await until(lambda: session.state.view.stats.in_flight == 3, "an event came")  # type: ignore[union-attr]
    assert session.state.series.done_per_min[-1] == 77.0
    await session.stop()
    await until(lambda: engine.server.consoles == 0, "the engine noticed the leave")


async def test_halt_goes_over_its_own_armed_connection(engine: Engine) -> None:
    session = Session(engine.run)
    session.start()
    await until(
        lambda: session.halt_channel is not None and session.halt_channel.armed, "it is armed"
    )
    session.tick()
    assert session.state.halt_armed is True
    assert session.halt("key") == ""
    assert session.halt("key") == ""
    await until(lambda: bool(engine.commands), "the halt came")
    assert engine.commands == [("halt", "halt")]
    assert session.state.halt_shown
    file = engine.run.halt_file
    await until(lambda: file.exists() and "key by " in file.read_text(), "the file was left too")
    assert session.halt_channel is not None
    await until(session.halt_channel.acknowledged.is_set, "the acknowledgement was read")
    await session.stop()


async def test_commands_are_answered_or_refused(engine: Engine) -> None:
    session = Session(engine.run)
    session.start()
    await until(lambda: session.state.link == "live", "attached")
    assert await session.command("resume") == "running"
    with pytest.raises(ControlError, match="already draining"):
        await session.command("drain")
    assert engine.commands == [("resume", "operator"), ("drain", "operator")]
    await session.stop()
    viewer = Session(engine.run, read_only=True)
    viewer.start()
    await until(lambda: viewer.state.link == "live", "attached")
    assert viewer.halt_channel is None
    assert "read-only" in viewer.halt("key")
    with pytest.raises(ControlError, match="not for role viewer"):
        await viewer.command("drain")
    await viewer.stop()
    assert len(engine.commands) == 2


async def test_an_engine_that_goes_is_seen_and_one_that_comes_is_joined(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "live")
    first = Engine(run)
    await first.start()
    first.journal.emit(ev.RunStarted(run_id="live", stages=["generate"]))
    first.journal.emit(ev.StateChanged(state="running"))
    session = Session(run)
    session.start()
    await until(lambda: session.state.state == "running", "attached")
    await first.stop()
    manifest = json.loads(run.manifest.read_bytes())
    run.manifest.write_text(json.dumps(manifest | {"pid": 2**22 + 1}), encoding="utf-8")
    await until(lambda: session.state.state == "crashed", "the crash was seen")
    session.tick()
    assert session.state.halt_armed is None
    second = Engine(run)
    await second.start()
    second.journal.emit(ev.StateChanged(state="running", reason="resumed"))
    await until(lambda: session.state.link == "live", "joined again")
    await until(lambda: session.state.view.reason == "resumed", "up to date")
    assert session.state.state == "running"
    await session.stop()
    await second.stop()


async def test_resume_waits_for_the_stopped_engine_and_tells_why_it_cannot(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(engine.run)
    monkeypatch.setattr("console.session.LET_GO_S", 0.2)
    with pytest.raises(EyasError, match=f"engine {os.getpid()} has not ended yet"):
        await session.resume()
    gone = iter([os.getpid(), os.getpid(), 0])
    monkeypatch.setattr("console.session.engine_pid", lambda path: next(gone))
    with pytest.raises(EyasError, match="its engine is alive"):  # says the command that starts one
        await session.resume()
    assert next(gone, None) is None


async def test_a_finished_run_is_read_from_files_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path, "done")
    session = Session(run)
    session.start()
    await until(lambda: session.state.state == "done", "it was read")
    await until(lambda: len(session.state.series.cpu) > 10, "with its history")
    assert session.state.view.evaluated is not None
    assert session.halt_channel is None
    assert "nothing to halt" in session.halt("key")
    await session.stop()


async def test_a_run_on_another_host_is_followed_through_its_files(tmp_path: Path) -> None:
    run = write_run(tmp_path, "generate")
    session = Session(run)
    session.start()
    await until(lambda: session.state.link == "files", "files are read")
    assert session.state.state == "running"
    line = ev.StateChanged(seq=session.state.view.seq + 1, ts=recording.BASE_TS + 60, state="done")
    with (run.journal / "000001.jsonl").open("ab") as f:
        f.write(ev.encode(line)[:20])
        f.flush()
        await asyncio.sleep(0)
        f.write(ev.encode(line)[20:] + b"\n")
    await until(lambda: session.state.state == "done", "the appended event was seen")
    await session.stop()


async def test_replay_plays_the_journal_again(tmp_path: Path) -> None:
    run = write_run(tmp_path, "done")
    session = Session(run, replay_speed=1e6)
    session.start()
    await until(lambda: session.state.state == "done", "it was played to the end")
    assert session.state.link == "replay"
    assert session.halt_channel is None
    await session.stop()


async def test_a_lost_halt_link_is_told_and_the_file_still_works(engine: Engine) -> None:
    changes: list[bool] = []
    channel = HaltChannel(engine.run, changes.append)
    channel.start()
    await until(lambda: channel.armed, "armed")
    await engine.server.close()
    await until(lambda: changes == [True, False], "the loss was told")
    assert channel.fire("key") is False
    await until(engine.run.halt_file.exists, "the file was left")
    channel.stop()


async def test_a_note_of_skipped_events_is_forgotten_in_time(tmp_path: Path) -> None:
    now = [100.0]
    session = Session(write_run(tmp_path, "generate"), read_only=True, clock=lambda: now[0])
    session.on_link("live", "slow link: 12 events skipped")
    now[0] += 29.0
    assert session.tick() == ""
    assert session.state.link_note == "slow link: 12 events skipped"
    now[0] += 2.0
    session.tick()
    assert session.state.link_note == ""
