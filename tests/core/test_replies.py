"""Replies on disk: packed streams, and the heads that a resume reads of them."""

import errno
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import DiskFull
from core.generate.resume import recover
from core.reconstruct.reply import read_reply
from core.schema import Rollout, RolloutHead, Usage, pack_reply, reply_text
from core.store import Appender, RunDir, encode_line, read_jsonl
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


def test_a_head_is_read_past_request_and_reply(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    whole = rollout(1, reply_kind="json", reply_raw='\ud83d "usage":', reply_zlib=msgspec.UNSET)
    path.write_bytes(encode_line(rollout(0, outcome="aborted", final=False)) + encode_line(whole))
    assert list(read_jsonl(path, RolloutHead)) == [
        RolloutHead(
            prompt_id="p0",
            attempt=1,
            backend="openrouter",
            outcome="aborted",
            final=False,
            bill="billed",
            usage=Usage(completion_tokens=0),
        ),
        RolloutHead(
            prompt_id="p1",
            attempt=2,
            backend="openrouter",
            outcome="ok",
            bill="billed",
            usage=Usage(completion_tokens=1),
        ),
    ]


async def test_a_spooled_reply_is_finished_in_the_next_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime_dir: Path
) -> None:
    run = RunDir(tmp_path)
    file = Appender(run.completions)
    await file.append(rollout(0))
    with monkeypatch.context() as patch:
        FullDisk(patch, room=0, fault=errno.ENOSPC)
        with pytest.raises(DiskFull, match="no space left"):
            await file.append(rollout(1))
        file.close()
    assert recover(run).finished == {"p0"}
    Appender(run.completions).close()
    assert recover(run).finished == {"p0", "p1"}
    texts = [reply_text(r) for r in read_jsonl(run.completions, Rollout)]
    assert texts == [STREAM.decode()] * 2
