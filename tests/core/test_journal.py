"""The journal: numbers, rotation, snapshots, torn tails, a full disk, hostile text."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from core import events as ev
from core import journal as jn
from core import view as vw
from core.config import parse
from core.journal import Journal, load_view, read_journal
from core.store import RunDir, create_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return create_run(parse({"run": {"min_free_disk_bytes": 1}}, "test"), tmp_path, "alpha")


def outcome(i: int) -> ev.Outcome:
    return ev.Outcome(prompt_id=f"p{i}", dataset="d", arm="declared", backend="b", outcome="ok")


def seqs(run: RunDir, after: int = 0) -> list[int]:
    return [e.seq for e in read_journal(run, after)]


def parts(run: RunDir) -> list[str]:
    return sorted(p.name for p in run.journal.glob("*.jsonl"))


def test_events_are_numbered_stamped_and_folded(run: RunDir) -> None:
    journal = Journal(run)
    journal.emit(ev.StateChanged(state="running"))
    journal.emit(outcome(1))
    journal.close()
    first, second = read_journal(run)
    assert (first.v, first.seq, second.seq) == (ev.API_VERSION, 1, 2)
    assert second.t_ns >= first.t_ns > 0 and first.ts > 1e9
    assert isinstance(second, ev.Outcome) and second.prompt_id == "p1"
    assert journal.view.state == "running" and journal.view.seq == 2
    journal.emit(outcome(2))  # after close: ignored
    assert seqs(run) == [1, 2]


def test_rotation_and_reading_from_the_middle(run: RunDir) -> None:
    journal = Journal(run, rotate_bytes=2_000)
    for i in range(200):
        journal.emit(outcome(i))
        if i % 10 == 0:
            journal.flush()
    journal.close()
    assert len(parts(run)) > 5
    assert seqs(run) == list(range(1, 201))
    for after in (0, 1, 57, 199, 200):
        assert seqs(run, after) == list(range(after + 1, 201))


def test_reading_from_the_middle_of_one_large_part(run: RunDir) -> None:
    journal = Journal(run)
    for i in range(5_000):
        journal.emit(outcome(i))
    journal.close()
    assert len(parts(run)) == 1 and (run.journal / parts(run)[0]).stat().st_size > 5 << 16
    for after in (1, 2_500, 4_999):
        assert seqs(run, after) == list(range(after + 1, 5_001))


def test_a_second_life_goes_on_where_the_first_one_stopped(run: RunDir) -> None:
    journal = Journal(run)
    journal.emit(ev.StateChanged(state="running"))
    journal.close()
    part = run.journal / parts(run)[0]
    part.write_bytes(part.read_bytes() + b'{"type":"state","sta')
    assert seqs(run) == [1]  # a torn line is no event for a reader
    journal = Journal(run)
    assert journal.view.state == "running"
    journal.emit(ev.StateChanged(state="halted"))
    journal.close()
    assert seqs(run) == [1, 2]
    assert len(list(run.journal.glob("*.torn"))) == 1


def test_view_of_a_long_journal_is_a_snapshot_and_a_tail(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jn, "SNAPSHOT_EVENTS", 100)
    journal = Journal(run)
    for i in range(1_050):
        journal.emit(outcome(i))
    journal.flush()
    snapshots = sorted(int(p.stem) for p in run.state.glob("*.json"))
    assert len(snapshots) <= jn.KEEP_SNAPSHOTS and snapshots[-1] >= 900
    read: list[int] = []
    real = jn.read_journal

    def spy(of: RunDir, after_seq: int = 0) -> Any:
        read.append(after_seq)
        return real(of, after_seq)

    monkeypatch.setattr(jn, "read_journal", spy)
    view = load_view(run)
    assert read == [snapshots[-1]]
    assert vw.encode(view) == vw.encode(journal.view)
    journal.close()
    (run.state / "9999.json").write_bytes(b"{half")  # unreadable: the one before it serves
    assert vw.encode(load_view(run)) == vw.encode(journal.view)


def test_snapshot_by_time(run: RunDir) -> None:
    now = [0.0]
    journal = Journal(run, clock=lambda: now[0])
    journal.emit(outcome(1))
    now[0] = jn.SNAPSHOT_S
    journal.emit(outcome(2))
    journal.emit(outcome(3))
    journal.flush()
    journal.close()
    assert sorted(int(p.stem) for p in run.state.glob("*.json")) == [2, 3]


def test_lone_surrogates_become_escapes_everywhere(run: RunDir) -> None:
    journal = Journal(run)
    journal.emit(ev.Log(message="bad \ud800 text"))
    journal.close()
    (event,) = read_journal(run)
    assert isinstance(event, ev.Log) and event.message == "bad \\ud800 text"
    assert journal.view.log[0].message == event.message
    assert load_view(run).log[0].message == event.message


def test_emit_from_threads_loses_nothing(run: RunDir) -> None:
    journal = Journal(run)
    threads = [
        threading.Thread(target=lambda: [journal.emit(outcome(i)) for i in range(300)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    assert seqs(run) == list(range(1, 1_201))


def test_a_full_disk_does_not_stop_emit_and_events_follow_later(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(run)
    journal.emit(outcome(0))
    journal.flush()
    real = os.write

    def refuse(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", refuse)
    for i in range(1, 10):
        journal.emit(outcome(i))
    journal.flush()
    assert journal.full
    monkeypatch.setattr(os, "write", real)
    journal.emit(outcome(10))
    journal.close()
    assert seqs(run) == list(range(1, 12))


def test_flush_is_an_fsync(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fsync

    def sync(fd: int) -> None:
        synced.append(os.fstat(fd).st_size)
        real(fd)

    monkeypatch.setattr(os, "fsync", sync)
    journal = Journal(run)
    for i in range(50):
        journal.emit(outcome(i))
    journal.flush()
    size = (run.journal / parts(run)[0]).stat().st_size
    assert max(synced) == size and seqs(run) == list(range(1, 51))
    journal.close()
