"""What an earlier life left in its files, and records on a real disk."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from core import events as ev
from core.errors import ProviderError
from core.generate import Recovered, recover
from core.generate.account import bill_clients
from core.generate.tally import Tally
from core.schema import Rollout, SpendLine, Usage
from core.store import Appender, RunDir
from tests.core.generate.rig import (
    Router,
    Run,
    completion,
    config_of,
    prompts_of,
    really_judges,
    says,
    serving,
)
from tests.core.generate.test_two_servers import questions, two


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


def left_open(generation: str | None) -> Recovered:
    """A prompt of a paid backend, finished since, whose dispatch no line closes."""
    line = msgspec.structs.replace(spend("p9", "dispatch"), generation_id=generation)
    tally = Tally(start_usd=7.0, sent=1)
    return Recovered(open=[line], attempts={"p9": 1}, tallies={"openrouter": tally})


async def with_local_prompts_left(router: Router, recovered: Recovered) -> Run:
    """A resume in which only a local server is asked."""
    async with two() as (servers, urls), serving(router):
        run = Run(router, questions(2), sglang={"urls": urls}, recovered=recovered)
        result = await run.go()
    assert result.outcomes == {"ok": 2} and sum(len(s.asked) for s in servers) == 2
    return run


def closings_and_warnings(run: Run) -> tuple[list[tuple[str, float]], list[str]]:
    closed = [(x.kind, x.cost_usd) for x in run.spend.lines if x.prompt_id == "p9"]
    return closed, [e.message for e in run.of(ev.Log) if e.level == "warn"]


@pytest.mark.parametrize("status", [200, 401])
async def test_a_backend_that_is_only_settled_needs_no_pre_flight(status: int) -> None:
    """Its key may be good for bills or for nothing; the local prompts are asked."""
    router = Router()
    router.endpoints, router.key_status, router.usage = [], status, [7.0, 7.003]
    router.lookups = {"gen-7": [(status, {"total_cost": 0.003})]}
    closed, warned = closings_and_warnings(
        await with_local_prompts_left(router, left_open("gen-7"))
    )
    if status == 200:
        assert (closed, warned) == ([("looked_up", 0.003)], [])
        return
    assert closed == [("uncertain", 0.01)] and router.looked_up == ["gen-7"]
    (line,) = warned
    assert "the key in OPENROUTER_API_KEY is refused (HTTP 401); bills that" in line


def test_a_key_that_is_gone_is_told_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    config = config_of("http://nowhere.invalid")
    target = msgspec.structs.replace(config.target, kind="hf", path="/nowhere")
    config = msgspec.structs.replace(config, target=target)
    said: list[tuple[str, str]] = []
    lines = left_open("gen-7").open
    assert bill_clients(config, lines, lambda *words: said.append(words)) == {}
    ((level, line),) = said
    assert level == "warn" and line.startswith("OPENROUTER_API_KEY is not set;")
    assert line.endswith("open bills of openrouter are booked at their worst case")


async def test_a_backend_with_prompts_left_still_has_its_pre_flight() -> None:
    router = Router()
    router.key_status = 401
    async with serving(router):
        run = Run(router, prompts_of(1), recovered=left_open("gen-7"))
        with pytest.raises(ProviderError, match="is refused"):
            await run.go()


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


ENDLESS = b"1e999"


@pytest.mark.parametrize("amount", [ENDLESS, b"-5", b"-1e999"])
def test_an_amount_that_cannot_be_counts_as_not_written(tmp_path: Path, amount: bytes) -> None:
    run = RunDir(tmp_path)
    write(run.spend, spend("a", "dispatch"), spend("a", "billed", cost=0.004))
    run.spend.write_bytes(run.spend.read_bytes().replace(b"0.004", amount))
    found = recover(run)
    assert found.spent_usd == 0.0
    assert [(line.prompt_id, line.reserve_usd) for line in found.open] == [("a", 0.01)]


@pytest.mark.parametrize("amount", [ENDLESS, b"-5"])
def test_a_reply_whose_cost_cannot_be_settles_no_dispatch(tmp_path: Path, amount: bytes) -> None:
    run = RunDir(tmp_path)
    write(run.spend, spend("a", "dispatch"))
    write(run.completions, rollout("a"))
    run.completions.write_bytes(run.completions.read_bytes().replace(b"0.002", amount))
    found = recover(run)
    assert [line.prompt_id for line in found.open] == ["a"] and not found.replied
    assert found.finished == {"a"} and not found.retried_usd


def test_a_closing_line_whose_dispatch_line_is_lost_is_booked_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    closing = spend("a", "billed", cost=0.004)
    write(run.spend, closing, closing, spend("a", "dispatch"), closing)
    found = recover(run)
    assert found.spent_usd == 0.004 and not found.open and found.replies == {"a": 1}


def test_a_paid_reply_that_the_books_do_not_know_is_an_open_dispatch(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write(run.completions, rollout("a"), rollout("b"), rollout("b", attempt=2))
    write(run.spend, spend("b", "dispatch"), spend("b", "billed", cost=0.002))
    found = recover(run)
    assert [(x.prompt_id, x.attempt, x.backend, x.reserve_usd) for x in found.open] == [
        ("a", 1, "openrouter", 0.002),
        ("b", 2, "openrouter", 0.002),
    ]
    assert found.replied.keys() == {("a", 1), ("b", 2)} and found.finished == {"a", "b"}
