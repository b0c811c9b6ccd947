"""Recorded completions: which one, when, and what is refused."""

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.embedded.jobs import Ask, sample_key
from core.embedded.replay import ReplaySource
from core.embedded.replies import Mode, collect, parse
from core.errors import UsageError
from tests.core.embedded.serving import PLAIN, TWO_CALLS, ids_of, tokenizer, write_replay

MODE = Mode(calls=True)


def source(tmp_path: Path, *texts: str, rate: float = 0.0) -> ReplaySource:
    return ReplaySource.load(write_replay(tmp_path / "r.jsonl", texts), tokenizer(), rate)


async def test_a_tape_plays_to_its_end(tmp_path: Path) -> None:
    played = source(tmp_path, TWO_CALLS, rate=2_000.0)
    job = played.open(Ask([1]), MODE, True)
    deltas = []
    while True:
        finished = job.finish is not None
        deltas += job.take()
        if finished:
            break
        await job.advance()
    assert collect(deltas) == parse(TWO_CALLS, MODE)
    assert (job.finish, job.out, job.text()) == ("stop", ids_of(TWO_CALLS), TWO_CALLS)
    assert job.generated == len(ids_of(TWO_CALLS))
    assert played.active == 0


async def test_two_players_share_pieces_but_not_positions(tmp_path: Path) -> None:
    played = source(tmp_path, PLAIN)
    first, second = (played.open(Ask([1]), MODE, True) for _ in range(2))
    await asyncio.gather(first.done(), second.done())
    one, two = first.take(), second.take()
    assert one == two
    assert first.take() == []


async def test_cancel_freezes(tmp_path: Path) -> None:
    job = source(tmp_path, TWO_CALLS, rate=100.0).open(Ask([1]), MODE, True)
    while job.generated < 3:
        await job.advance()
    job.cancel()
    frozen = job.generated
    await job.done()
    assert job.finish == "abort"
    assert 3 <= frozen == len(job.out) < len(ids_of(TWO_CALLS))


async def test_max_tokens_cuts(tmp_path: Path) -> None:
    job = source(tmp_path, PLAIN).open(Ask([1], max_tokens=4), MODE, False)
    await job.done()
    assert (job.finish, job.out) == ("length", ids_of(PLAIN)[:4])
    assert collect(job.take()).content == ""


async def test_a_recorded_prompt_gets_its_completion(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    rows = [{"completion_ids": ids_of(f"</think>{n}"), "prompt_ids": [n, 7]} for n in range(5)]
    path.write_text("\n".join(map(json.dumps, rows)))
    played = ReplaySource.load(path, tokenizer())
    for n in range(5):
        assert played.pick(Ask([n, 7], seed=n)).ids == rows[n]["completion_ids"]
    assert played.needs_prompt
    assert played.prompt_tokens(Ask([3, 7])) == 2


def test_other_prompts_are_spread_by_content_and_seed(tmp_path: Path) -> None:
    played = source(tmp_path, *(f"</think>{n}" for n in range(8)))
    seen = {tuple(played.pick(Ask([1, 2], seed=s)).ids or ()) for s in range(100)}
    assert len(seen) == 8
    assert played.pick(Ask([1, 2], seed=4)) is played.pick(Ask([1, 2], seed=4))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "r.jsonl:2: not a recorded completion"),
        ('{"text": "x"}', "r.jsonl:2: give completion_ids"),
        ('{"completion_ids": ["a"]}', "r.jsonl:2"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"completion_ids": ids_of(PLAIN)}) + "\n" + line)
    with pytest.raises(UsageError, match=says.replace(".", r"\.")):
        ReplaySource.load(path, tokenizer())


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        ReplaySource.load(tmp_path / "none", None)
    (tmp_path / "empty").write_text("")
    with pytest.raises(UsageError, match="no recorded completion"):
        ReplaySource.load(tmp_path / "empty", None)


@given(st.binary(max_size=300), st.integers(0, 1 << 40))
def test_bytes_are_the_same_ids_as_a_list_of_them(content: bytes, seed: int) -> None:
    assert sample_key(seed, content) == sample_key(seed, list(content))


def test_the_key_of_known_ids_stays() -> None:
    """Recorded tapes are found by it."""
    assert sample_key(7, [1, 2, 163_585]) == 7_109_905_107_998_503_557
