"""Append-only JSONL: torn tails, corrupt middles, a full disk, group commit."""

import asyncio
import errno
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import DiskFull, StoreError
from core.store import (
    Appender,
    CorruptLine,
    LineFile,
    Reserve,
    encode_line,
    mend_tail,
    read_at,
    read_jsonl,
    read_placed,
)
from core.store.linefile import full_disk_named
from tests.conftest import SHARED

CASES = SHARED / "cases"
needs_cases = pytest.mark.skipif(not CASES.is_dir(), reason="the shared case files are not here")


class Row(msgspec.Struct, frozen=True):
    key: str
    text: str = ""


def rows(path: Path) -> list[Row]:
    return list(read_jsonl(path, Row))


@needs_cases
@pytest.mark.parametrize(
    ("name", "part"), [("C71.jsonl", ("done", "pending")), ("C71b.jsonl", ("b", "b"))]
)
def test_torn_tail_is_set_aside_and_its_prompt_pending(
    tmp_path: Path, name: str, part: Any
) -> None:
    expect = json.loads((CASES / "C71.expect.json").read_text())
    done = expect["done"] if part[0] == "done" else expect["b"]["done"]
    pending = expect["pending"] if part[0] == "done" else expect["b"]["pending"]
    path = tmp_path / "completions.jsonl"
    path.write_bytes((CASES / name).read_bytes())
    assert [r.key for r in rows(path)] == done
    side = mend_tail(path)
    assert side is not None and side.match("*.torn")
    assert pending[0].encode() in side.read_bytes()
    data = path.read_bytes()
    assert data.endswith(b"\n") and not data.endswith(b"\n\n")
    assert [r.key for r in rows(path)] == done
    assert mend_tail(path) is None


@needs_cases
def test_pending_prompts_are_found_by_id(tmp_path: Path) -> None:
    expect = json.loads((CASES / "C73.expect.json").read_text())
    done = {r.key for r in rows(CASES / "C73.jsonl")}
    wanted = [r.key for r in rows(CASES / "C73.inputs.jsonl")]
    assert [k for k in wanted if k not in done] == expect["pending"]


def test_corrupt_middle_line_is_reported_with_its_offset_and_does_not_stop(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"key":"a"}\n{"key":"b","te\n\n{"key":7}\n{"key":"c"}\n')
    seen: list[CorruptLine] = []
    assert [r.key for r in read_jsonl(path, Row, seen.append)] == ["a", "c"]
    assert [bad.offset for bad in seen] == [12, 28]
    assert mend_tail(path) is None
    assert path.read_bytes().count(b"\n") == 5


def test_whole_last_record_without_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"key":"a"}\n{"key":"b"}')
    assert mend_tail(path) is None
    assert path.read_bytes() == b'{"key":"a"}\n{"key":"b"}\n'


def test_second_torn_tail_does_not_overwrite_the_first(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"key":"a"}\n{"k1')
    first = mend_tail(path)
    path.write_bytes(path.read_bytes() + b'{"k2')
    second = mend_tail(path)
    assert first and second and first != second
    assert first.read_bytes() == b'{"k1' and second.read_bytes() == b'{"k2'


def test_missing_file_has_no_records(tmp_path: Path) -> None:
    assert rows(tmp_path / "none.jsonl") == []
    assert mend_tail(tmp_path / "none.jsonl") is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(), max_size=6), st.integers(0, 400))
def test_any_cut_leaves_a_prefix_of_whole_records(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    data = b"".join(encode_line(Row(str(i), t)) for i, t in enumerate(texts))
    path.write_bytes(data[:cut])
    before = rows(path)
    side = mend_tail(path)
    after = rows(path)
    assert before == after
    assert after == [Row(str(i), t) for i, t in enumerate(texts)][: len(after)]
    kept = path.read_bytes()
    assert kept == b"" or kept.endswith(b"\n")
    torn = side.read_bytes() if side else b""
    assert (kept + torn).rstrip(b"\n") == data[:cut].rstrip(b"\n")


@pytest.mark.parametrize("text", ["\ud800 lone", "\x00 nul", "line\nbreak\r\u2028", "日本 🙂"])
def test_hostile_text_survives_the_disk(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(encode_line(Row("a", text)))
    assert path.read_bytes().count(b"\n") == 1
    assert rows(path) == [Row("a", text)]


def test_records_are_found_again_by_offset(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(encode_line(Row(str(i), "x" * i)) for i in range(20)))
    places = {record.key: at for at, record in read_placed(path, Row)}
    wanted = ["7", "0", "19"]
    assert [r.key for r in read_at(path, [places[k] for k in wanted], Row)] == wanted


async def test_appends_from_many_tasks_are_whole_and_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    writes, syncs = [0], [0]
    real_write, real_sync = os.write, os.fsync

    def write(fd: int, data: Any) -> int:
        writes[0] += 1
        return real_write(fd, data)

    def sync(fd: int) -> None:
        syncs[0] += 1
        real_sync(fd)

    appender = Appender(path)
    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "fsync", sync)
    await asyncio.gather(*(appender.append(Row(str(i)), durable=i % 2 == 0) for i in range(2_000)))
    assert len(rows(path)) == 2_000
    appender.close()
    assert {r.key for r in rows(path)} == {str(i) for i in range(2_000)}
    assert writes[0] < 500  # batches, not a call each
    assert 1 <= syncs[0] < 50  # group commit


async def test_lines_are_in_the_order_of_the_calls(tmp_path: Path) -> None:
    appender = Appender(tmp_path / "a.jsonl")
    for i in range(500):
        appender.post(Row(str(i)))
    await appender.append(Row("500"))
    appender.close()
    assert [r.key for r in rows(tmp_path / "a.jsonl")] == [str(i) for i in range(501)]
    with pytest.raises(StoreError, match="after close"):
        appender.post(Row("late"))


async def test_a_record_that_cannot_be_encoded_fails_alone(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(5_000):
        deep = [deep]
    appender = Appender(tmp_path / "a.jsonl")
    results = await asyncio.gather(
        appender.append(Row("a")),
        appender.append(object()),
        appender.append(deep),
        appender.append(Row("b")),
        return_exceptions=True,
    )
    appender.close()
    assert isinstance(results[1], StoreError) and isinstance(results[2], StoreError)
    assert [r.key for r in rows(tmp_path / "a.jsonl")] == ["a", "b"]


class FullDisk:
    """`os.write` on a disk with `room` bytes left; `free` gives more, as removing a file does."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, room: int, fault: int = errno.ENOSPC
    ) -> None:
        self.room = room
        self._fault = fault
        self._real = os.write
        monkeypatch.setattr(os, "write", self._write)

    def _write(self, fd: int, data: Any) -> int:
        if not self.room:
            raise OSError(self._fault, os.strerror(self._fault))
        take = min(self.room, len(data))
        self.room -= take
        return self._real(fd, bytes(data)[:take])


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EACCES, OSError)],
)
def test_a_full_disk_is_named_and_nothing_else_is(number: int, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught, full_disk_named():
        raise OSError(number, os.strerror(number), "stages.json")
    assert type(caught.value) is kind or kind is OSError
    assert ("stages.json: no space left; free some" in str(caught.value)) == (kind is DiskFull)


def test_enospc_truncates_back_to_the_last_newline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = LineFile(tmp_path / "a.jsonl")
    FullDisk(monkeypatch, room=30)
    lines = [encode_line(Row(str(i))) for i in range(5)]
    written, fault = file.write(lines)
    assert fault is not None and fault.errno == errno.ENOSPC
    assert written == 30 // len(lines[0])
    assert (tmp_path / "a.jsonl").read_bytes() == b"".join(lines[:written])
    file.close()


async def test_reserve_keeps_finished_answers_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = Reserve(tmp_path / ".reserve", 4_096)
    assert (tmp_path / ".reserve").stat().st_size == 4_096
    full: list[int] = []
    appender = Appender(tmp_path / "a.jsonl", reserve=reserve, on_full=lambda: full.append(1))
    disk = FullDisk(monkeypatch, room=40)
    release = reserve.release

    def released() -> bool:
        freed = release()
        disk.room += 4_096 if freed else 0
        return freed

    monkeypatch.setattr(reserve, "release", released)
    await asyncio.gather(*(appender.append(Row(str(i), "answer")) for i in range(10)))
    assert full == [1] and appender.full
    assert not (tmp_path / ".reserve").exists()
    assert [r.key for r in rows(tmp_path / "a.jsonl")] == [str(i) for i in range(10)]
    appender.close()


async def test_disk_full_is_raised_to_every_waiter_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    appender = Appender(path)
    disk = FullDisk(monkeypatch, room=45)
    results = await asyncio.gather(
        *(appender.append(Row(str(i), "answer"), durable=True) for i in range(10)),
        return_exceptions=True,
    )
    stored = {r.key for r in rows(path)}
    for i, result in enumerate(results):
        assert (result is None) == (str(i) in stored)
        assert result is None or isinstance(result, DiskFull)
    assert path.read_bytes().endswith(b"\n")
    disk.room = 1 << 20  # someone freed space
    appender.close()
    assert [r.key for r in rows(path)] == [str(i) for i in range(10)]


async def test_a_disk_that_stays_full_spools_and_the_next_appender_takes_it_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime_dir: Path
) -> None:
    path = tmp_path / "a.jsonl"
    appender = Appender(path)
    with monkeypatch.context() as patch:
        FullDisk(patch, room=0, fault=errno.EDQUOT)
        with pytest.raises(DiskFull, match="no space left"):
            await appender.append(Row("paid"))
        appender.close()
    assert rows(path) == []
    assert len(list((runtime_dir / "eyas").glob("*.spool"))) == 1
    again = Appender(path)
    again.close()
    assert [r.key for r in rows(path)] == ["paid"]
    assert list((runtime_dir / "eyas").glob("*.spool")) == []


async def test_other_faults_are_named_and_keep_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    appender = Appender(tmp_path / "a.jsonl")
    with monkeypatch.context() as patch:
        FullDisk(patch, room=0, fault=errno.EIO)
        with pytest.raises(StoreError, match="cannot be written") as caught:
            await appender.append(Row("a"))
        assert not isinstance(caught.value, DiskFull)
    appender.close()
    assert [r.key for r in rows(tmp_path / "a.jsonl")] == ["a"]


def test_a_file_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(StoreError, match=r"a\.jsonl: cannot be opened for writing \(Is a dir"):
        Appender(tmp_path / "a.jsonl")


def test_a_spool_in_a_folder_open_to_others_is_not_taken_in(
    tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    appender = Appender(tmp_path / "a.jsonl")
    with monkeypatch.context() as patch:
        FullDisk(patch, room=0)
        appender.post(Row("paid"))
        appender.close()
    (runtime_dir / "eyas").chmod(0o777)
    with pytest.raises(StoreError, match="not a private folder of this user"):
        Appender(tmp_path / "a.jsonl")


def test_a_reserve_that_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StoreError, match="cannot be set aside") as caught:
        Reserve(tmp_path / ".reserve", 1 << 20)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / ".reserve").exists()
