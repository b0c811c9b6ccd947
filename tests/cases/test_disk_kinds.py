"""Kind h of the public fault reports: what a kill, a power cut or a full disk leaves of the files,
anywhere, and what is asked again."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import Config
from core.generate import recover
from core.prompts import load_prompts
from core.schema import Rollout, SpendLine
from core.store import Appender, RunDir, mend_tail, read_jsonl
from tests.core.generate.rig import Router, Run, completion, config_of, prompts_of, says, serving

COUNT = 6


async def live(disk: RunDir, router: Router, count: int = COUNT) -> Run:
    """One life over files on disk, opened before they are read, as the engine does."""
    completions, spend = Appender(disk.completions), Appender(disk.spend)
    try:
        run = Run(router, prompts_of(count), recovered=recover(disk), max_in_flight=1)
        ports = run.generator._ports
        ports.completions, ports.spend = completions, spend
        run.generator._books._spend = spend
        await run.go()
    finally:
        completions.close()
        spend.close()
    return run


def final_outcomes(disk: RunDir) -> list[str]:
    return [r.prompt_id for r in read_jsonl(disk.completions, Rollout) if r.final]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """The files of a finished run."""
    disk = RunDir(tmp_path_factory.mktemp("whole"))

    async def finish() -> None:
        async with serving(Router(otherwise=says(completion("四 🙂")))) as router:
            await live(disk, router)

    asyncio.run(finish())
    return disk.completions.read_bytes(), disk.spend.read_bytes()


JUNK = (b"", b"\n", b"\n\n\n", b"\0" * 700, b'{"prompt_id":"p', b"\xff\xfe\n", b"[1]\n", b"null")


async def test_c71_cut_anywhere_each_prompt_is_asked_at_most_once_more(
    whole: tuple[bytes, bytes], tmp_path: Path
) -> None:
    """Completions end anywhere, in anything that a crash leaves; spend is ahead of them or as far.
    Whatever has a whole line stays done, everything else is asked once."""
    dice = random.Random(4)
    completions, spend = whole
    for number in range(20):
        disk = RunDir(tmp_path / str(number))
        disk.path.mkdir()
        cut = dice.randrange(len(completions) + 1)
        kept = completions[:cut]
        done = kept.count(b"\n") + (cut < len(completions) and completions[cut : cut + 1] == b"\n")
        disk.completions.write_bytes(kept + dice.choice(JUNK))
        lines = spend.splitlines(keepends=True)
        at_least = 3 * done  # dispatch, known, billed of each reply
        ahead = b"".join(lines[: dice.randrange(at_least, len(lines) + 1)])
        disk.spend.write_bytes(ahead + dice.choice((b"", ahead[:37], b"\0" * 9)))
        async with serving(Router()) as router:
            run = await live(disk, router)
            asked = [b["messages"][0]["content"] for b in router.bodies]
        assert len(asked) == len(set(asked)) == COUNT - done, (number, cut, done)
        assert sorted(final_outcomes(disk)) == [f"p{i}" for i in range(COUNT)]
        assert not recover(disk).open
        for path in (disk.completions, disk.spend):
            data = path.read_bytes()
            assert data.endswith(b"\n") and not data.endswith(b"\n\n")
            assert all(isinstance(json.loads(line), dict) for line in data.splitlines())
        assert run.generator.stats().spent_usd == pytest.approx(recover(disk).spent_usd)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(max_size=30), max_size=5),
    st.binary(max_size=60).filter(lambda b: b"\n{" not in b and not b.startswith(b"{")),
)
def test_c71_any_bytes_behind_whole_lines_are_set_aside(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], tail: bytes
) -> None:
    path = tmp_path_factory.mktemp("tail") / "completions.jsonl"
    whole = b"".join(msgspec.json.encode({"key": t}) + b"\n" for t in texts)
    path.write_bytes(whole + tail)
    side = mend_tail(path)
    assert path.read_bytes() == whole
    assert (side is not None) == bool(tail.strip())
    if side is not None:
        assert side.name.endswith(".torn") and side.read_bytes() == tail


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(8)), st.integers(0, 8))
def test_c73_pending_is_what_has_no_outcome_whatever_the_order(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], finished: int
) -> None:
    disk = RunDir(tmp_path_factory.mktemp("order"))
    records = [
        Rollout(
            prompt_id=f"p{i}",
            twin_id=f"t{i}",
            dataset="d",
            arm="declared",
            attempt=1,
            outcome="ok",
            backend="openrouter",
        )
        for i in order[:finished]
    ]
    retried = [
        msgspec.structs.replace(r, outcome="failed", final=False, prompt_id=f"p{i}")
        for r, i in zip(records, order[finished:], strict=False)
    ]
    lines = [msgspec.json.encode(r) + b"\n" for r in (*records, *retried)]
    disk.completions.write_bytes(b"".join(lines))
    assert recover(disk).finished == {f"p{i}" for i in order[:finished]}


async def test_c73_only_what_is_pending_is_asked(tmp_path: Path) -> None:
    """The case itself, by the requests that leave."""
    disk = RunDir(tmp_path)
    async with serving(Router()) as router:
        await live(disk, router, 5)
        kept = disk.completions.read_bytes().splitlines(keepends=True)
        disk.completions.write_bytes(
            b"".join(k for k in kept if b'"p1"' not in k and b'"p3"' not in k)
        )
        spend = disk.spend.read_bytes().splitlines(keepends=True)
        disk.spend.write_bytes(b"".join(s for s in spend if b'"p1"' not in s and b'"p3"' not in s))
        router.bodies.clear()
        await live(disk, router, 5)
        asked = [b["messages"][0]["content"] for b in router.bodies]
    assert asked == ["What is 2 + 1?", "What is 2 + 3?"]


def ids(**settings: Any) -> set[str]:
    dataset = settings.pop("dataset", [{"name": "d", "kind": "embedded", "limit": 4}])
    config: Config = config_of("http://x", dataset=dataset, **settings)
    return {p.prompt_id for p in load_prompts(config)}


@pytest.mark.parametrize(
    "edit",
    [
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"max_tokens": 65},
        {"openrouter": {"model": "another/model"}},
        {"dataset": [{"name": "d", "kind": "embedded", "limit": 4, "arm": "text"}]},
        {"run": {"seed": 1}},
    ],
)
def test_c73_an_edited_input_is_a_new_item(edit: dict[str, Any]) -> None:
    assert ids().isdisjoint(ids(**edit))


ROW: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "tools": []}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "edit",
    [
        {"messages": [{"role": "user", "content": "What is 2 + 2? "}]},
        {"messages": [{"role": "system", "content": "Be brief."}, *ROW["messages"]]},
        {"tools": [TOOL]},
        {"thinking": False},
    ],
)
def test_c73_an_edited_prompt_is_a_new_item(tmp_path: Path, edit: dict[str, Any]) -> None:
    keys = []
    for number, row in enumerate((ROW, dict(reversed(ROW.items())), ROW | edit)):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(row) + "\n")
        (key,) = ids(dataset=[{"name": "d", "path": str(path)}])
        keys.append(key)
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    "edit", [{"max_in_flight": 3}, {"run": {"budget_usd": 7.0}}, {"canary": 9}]
)
def test_c73_what_does_not_change_the_answer_changes_no_key(edit: dict[str, Any]) -> None:
    assert ids() == ids(**edit)


def test_c71_a_corrupt_line_in_the_middle_is_told_with_its_offset(tmp_path: Path) -> None:
    disk = RunDir(tmp_path)
    line = msgspec.json.encode(SpendLine(ts=1, kind="free", prompt_id="a", attempt=1, backend="b"))
    disk.spend.write_bytes(line + b"\n" + b"\0" * 40 + b"\n" + line + b"\n")
    seen: list[Any] = []
    assert len(list(read_jsonl(disk.spend, SpendLine, seen.append))) == 2
    assert [bad.offset for bad in seen] == [len(line) + 1]
