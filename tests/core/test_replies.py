"""Replies on disk: packed streams, and the heads that a resume reads instead of replies."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import DiskFull
from core.generate.resume import recover
from core.reconstruct.reply import read_reply
from core.schema import Rollout, Usage, pack_reply, reply_text
from core.store import CorruptLine, RunDir, encode_line, read_at, read_jsonl
from core.store.replies import Head, ReplyFile, read_heads
from tests.core.test_lines import FullDisk

EVENT = b'data: {"id":"gen-1","choices":[{"index":0,"delta":{"content":"four"}}]}\n\n'
STREAM = EVENT * 50


def rollout(number: int = 0, **fields: Any) -> Rollout:
    about: dict[str, Any] = {
        "prompt_id": f"p{number}",
        "twin_id": "t",
        "dataset": "b1",
        "arm": "declared",
        "attempt": 1 + number % 2,
        "outcome": "ok",
        "backend": "openrouter",
        "provider": "Alder",
        "request": {"messages": [{"role": "user", "content": '"reply_zlib":"" reply_raw'}]},
        "reply_kind": "sse",
        "reply_zlib": pack_reply(STREAM),
        "usage": Usage(completion_tokens=number),
        "bill": "billed",
    }
    return Rollout(**about | fields)


async def written(run: RunDir, rollouts: list[Rollout]) -> None:
    file = ReplyFile(run)
    for one in rollouts:
        await file.append(one)
    file.close()


def unindexed(run: RunDir) -> list[Head]:
    """Heads from the file itself."""
    aside = run.heads.rename(run.path / "aside") if run.heads.exists() else None
    heads = list(read_heads(run))
    if aside is not None:
        aside.rename(run.heads)
    return heads


def from_index(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether reading the heads reads no reply."""
    with monkeypatch.context() as patch:
        patch.setattr(
            "core.store.replies._from_file", lambda *_: iter([Head(prompt_id="", outcome="")])
        )
        return [h.prompt_id for h in read_heads(run)] != [""]


@given(st.binary(max_size=300))
def test_a_stream_comes_back_as_it_was_received(stream: bytes) -> None:
    kept = rollout(reply_zlib=pack_reply(stream))
    line = encode_line(kept)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    again = msgspec.json.decode(line, type=Rollout)
    assert again == kept and again.reply_raw is None
    assert reply_text(again) == stream.decode("utf-8", "surrogateescape")


def test_a_packed_stream_is_small_and_whole_bodies_are_not_packed() -> None:
    assert len(encode_line(rollout())) < len(STREAM) / 4
    plain = rollout(reply_kind="json", reply_raw="{}", reply_zlib=msgspec.UNSET)
    assert "reply_zlib" not in json.loads(encode_line(plain))
    assert reply_text(plain) == "{}"


def test_a_stream_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    plain = rollout(reply_raw=STREAM.decode(), reply_zlib=msgspec.UNSET)
    path.write_bytes(encode_line(plain) + encode_line(rollout()))
    assert [reply_text(r) for r in read_jsonl(path, Rollout)] == [STREAM.decode()] * 2


def test_a_damaged_packing_is_judged_as_a_stream_that_was_cut_off() -> None:
    damaged = rollout(reply_zlib=pack_reply(STREAM)[:-9])
    assert reply_text(damaged) == ""
    assert "stream_incomplete" in read_reply("sse", reply_text(damaged), 200, {}).problems


async def test_heads_of_a_closed_file_come_from_its_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    rollouts = [rollout(i, outcome="ok" if i % 3 else "failed", error="e\ud83d") for i in range(9)]
    await written(run, rollouts[:5])
    await written(run, rollouts[5:])  # a second life goes on with the same index
    assert from_index(run, monkeypatch)
    heads = [msgspec.structs.replace(h, end=0) for h in read_heads(run)]
    assert heads == unindexed(run)
    assert [h.usage.completion_tokens for h in heads] == list(range(9))
    assert list(read_at(run.completions, [h.at for h in heads], Rollout)) == rollouts
    assert recover(run).finished == {f"p{i}" for i in range(9)}


@pytest.mark.parametrize(
    "harm",
    ["torn index", "no index", "line behind it", "changed in place", "torn line", "rewritten"],
)
async def test_an_index_that_does_not_cover_the_file_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    run = RunDir(tmp_path)
    await written(run, [rollout(i) for i in range(4)])
    data, before = run.completions.read_bytes(), run.completions.stat().st_mtime_ns - 1
    ids = {f"p{i}" for i in range(4)}
    match harm:
        case "torn index":
            run.heads.write_bytes(run.heads.read_bytes()[:-20])
        case "no index":
            run.heads.unlink()
        case "line behind it":
            run.completions.write_bytes(data + encode_line(rollout(4)))
            ids |= {"p4"}
        case "changed in place":
            run.completions.write_bytes(data.replace(b'"p2"', b'"x2"'))
            os.utime(run.heads, ns=(before, before))  # times of files may be 4 ms coarse
            ids = ids - {"p2"} | {"x2"}
        case "torn line":
            run.completions.write_bytes(data + b'{"prompt_id":"p9"')
        case "rewritten":
            run.completions.write_bytes(b"".join(data.splitlines(keepends=True)[1:]))
            ids -= {"p0"}
    assert not from_index(run, monkeypatch)
    assert recover(run).finished == ids
    ReplyFile(run).close()  # the next life makes it again
    assert from_index(run, monkeypatch)
    assert recover(run).finished == ids


async def test_corrupt_lines_are_met_by_every_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    lines = [encode_line(rollout(i)) for i in range(3)]
    run.completions.write_bytes(lines[0] + b"{broken\n" + lines[1])
    await written(run, [rollout(2)])
    assert not run.heads.exists()
    corrupt: list[CorruptLine] = []
    assert [h.prompt_id for h in read_heads(run, corrupt.append)] == ["p0", "p1", "p2"]
    assert [bad.offset for bad in corrupt] == [len(lines[0])]


async def test_a_full_disk_costs_the_index_and_no_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    file = ReplyFile(run)
    disk = FullDisk(monkeypatch, room=len(encode_line(rollout(0))) + 20)
    await file.append(rollout(0))  # the reply fits, its head does not
    assert not run.heads.exists()
    disk.room = 1 << 20
    await file.append(rollout(1))
    file.close()
    assert recover(run).finished == {"p0", "p1"}


async def test_a_spooled_reply_is_in_the_heads_of_the_next_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime_dir: Path
) -> None:
    run = RunDir(tmp_path)
    file = ReplyFile(run)
    await file.append(rollout(0))
    with monkeypatch.context() as patch:
        FullDisk(patch, room=0, fault=errno.ENOSPC)
        with pytest.raises(DiskFull, match="no space left"):
            await file.append(rollout(1))
        file.close()
    assert recover(run).finished == {"p0"}
    ReplyFile(run).close()
    assert recover(run).finished == {"p0", "p1"}
    texts = [reply_text(r) for r in read_jsonl(run.completions, Rollout)]
    assert texts == [STREAM.decode()] * 2
