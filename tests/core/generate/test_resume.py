"""What an earlier life left in its files, and records on a real disk."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from core.generate import recover
from core.schema import Rollout, SpendLine, Usage
from core.store import Appender, RunDir
from tests.core.generate.rig import (
    Router,
    Run,
    completion,
    prompts_of,
    really_judges,
    says,
    serving,
)


def rollout(name: str, outcome: str = "ok", final: bool = True, attempt: int = 1) -> Rollout:
    return Rollout(
        prompt_id=name,
        twin_id=name,
        dataset="d",
        arm="declared",
        attempt=attempt,
        outcome=outcome,  # type: ignore[arg-type]
        final=final,
        backend="openrouter",
        bill="billed",
        usage=Usage(cost_usd=0.002, cap_usd=0.002),
    )


def spend(name: str, kind: str, attempt: int = 1, cost: float = 0.0) -> SpendLine:
    return SpendLine(
        ts=1.0,
        kind=kind,  # type: ignore[arg-type]
        prompt_id=name,
        attempt=attempt,
        backend="openrouter",
        reserve_usd=0.01 if kind == "dispatch" else 0.0,
        generation_id="gen-7" if kind == "known" else None,
        cost_usd=cost,
        cap_usd=cost,
    )


def write(path: Path, *records: object, tail: bytes = b"") -> None:
    path.write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in records) + tail)


def test_recover_reads_by_id_and_leaves_torn_lines_out(tmp_path: Path) -> None:
    """Cases C71 and C73."""
    run = RunDir(tmp_path)
    write(
        run.completions,
        rollout("k0"),
        rollout("k2"),
        rollout("k4", "failed", final=False),
        rollout("k4", attempt=2),
        rollout("k5", "aborted", final=False),
        rollout("k6", "refused", final=False),
        tail=b'{"prompt_id":"k3","outc',
    )
    found = recover(run)
    assert found.finished == {"k0", "k2", "k4"}
    assert found.outcomes == {"ok": 3}
    assert found.attempts["k4"] == 2


def test_recover_finds_open_dispatches_and_replies_whose_books_were_not_closed(
    tmp_path: Path,
) -> None:
    run = RunDir(tmp_path)
    write(
        run.spend,
        spend("a", "dispatch"),
        spend("a", "known"),
        spend("a", "billed", cost=0.003),
        spend("b", "dispatch"),
        spend("b", "known"),
        spend("c", "dispatch"),
        spend("d", "dispatch"),
        spend("d", "uncertain", cost=0.01),
        spend("e", "dispatch"),
        spend("e", "free"),
    )
    write(run.completions, rollout("c"))
    found = recover(run)
    assert {(x.prompt_id, x.generation_id) for x in found.open} == {("b", "gen-7"), ("c", None)}
    assert set(found.replied) == {("c", 1)}
    assert found.spent_usd == pytest.approx(0.013) and found.uncertain_usd == pytest.approx(0.01)
    assert found.replies == {"a": 1, "d": 1}
    assert recover(RunDir(tmp_path / "none")).finished == set()


async def test_a_stored_reply_closes_its_own_dispatch(tmp_path: Path) -> None:
    """Killed between the reply's line and the spend line: the reply says what it cost, nobody has
    to ask."""
    disk = RunDir(tmp_path)
    write(disk.spend, spend("p0", "dispatch"))
    write(disk.completions, rollout("p0"))
    async with serving(Router()) as router:
        run = Run(router, prompts_of(1), recovered=recover(disk))
        result = await run.go()
    assert not router.bodies and not router.looked_up
    closing = run.spend.lines[0]
    assert (closing.kind, closing.cost_usd) == ("billed", 0.002)
    assert result.spent_usd == pytest.approx(0.002)


async def test_files_of_a_whole_run_are_read_back(tmp_path: Path) -> None:
    disk = RunDir(tmp_path)
    async with serving(Router()) as router:
        run = Run(router, prompts_of(25))
        completions, books = Appender(disk.completions), Appender(disk.spend)
        ports = run.generator._ports
        ports.completions, ports.spend = completions, books
        run.generator._books._spend = books
        result = await run.go()
        completions.close()
        books.close()
        found = recover(disk)
        assert len(found.finished) == 25 and not found.open
        assert found.spent_usd == pytest.approx(result.spent_usd)
        again = Run(router, prompts_of(25), recovered=found)
        assert (await again.go()).outcomes == {"ok": 25}
    assert len(router.bodies) == 25


def without_finish(cost: float) -> dict[str, Any]:
    body = completion(cost=cost)
    body["choices"][0]["finish_reason"] = None
    return body


async def test_the_forecast_counts_every_attempt_of_a_prompt() -> None:
    """Each prompt's first reply is paid for and of no use: $0.0004, then $0.001."""

    async def second_is_whole(request: web.Request, router: Router) -> web.StreamResponse:
        asked = [b["messages"][0]["content"] for b in router.bodies]
        first = asked.count(asked[-1]) == 1
        return await says(without_finish(0.0004) if first else completion())(request, router)

    async with serving(Router(otherwise=second_is_whole)) as router:
        run = Run(router, prompts_of(3), judges=really_judges(), max_in_flight=1)
        result = await run.go()
    assert result.outcomes == {"ok": 3} and run.check_books() == pytest.approx(0.0042)
    assert run.generator._board.forecast.mean_usd("d") == pytest.approx(0.0014)


async def test_the_forecast_knows_paid_attempts_of_earlier_lives_but_not_the_price_of_a_halt(
    tmp_path: Path,
) -> None:
    disk = RunDir(tmp_path)
    cost = {"usage": Usage(cost_usd=0.0004), "bill": "billed"}
    write(
        disk.completions,
        msgspec.structs.replace(rollout("p0", "failed", final=False), **cost),
        msgspec.structs.replace(rollout("p0", "rejected", final=False, attempt=2), **cost),
        rollout("p1", "aborted", final=False),
        rollout("p2"),
    )
    found = recover(disk)
    assert found.retried_usd == {"p0": pytest.approx(0.0008)}
    async with serving(Router()) as router:
        run = Run(router, prompts_of(3), recovered=found)
        await run.go()
    assert run.generator._board.forecast.mean_usd("d") == pytest.approx((0.0018 + 0.001) / 2)
