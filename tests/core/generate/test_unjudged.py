"""A reply that waits, for its verdict or for its bill, is on disk meanwhile; after a kill it is
judged, not asked again."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core import events as ev
from core.audit.account import _made, _spent
from core.errors import DiskFull
from core.generate import Recovered, abandon, pump, recover
from core.pipeline.rebuild import final_replies
from core.schema import UNJUDGED, Prompt, Rollout, Sample, SpendLine, Usage
from core.store import Appender, RunDir, read_at, read_jsonl
from tests.core.generate.rig import (
    ALDER,
    NO_DELAYS,
    Router,
    Run,
    accepts,
    completion,
    prompts_of,
    really_judges,
    says,
    serving,
    waits,
)
from tests.core.generate.test_resume import spend, write


class Slow:
    """A judge that takes its time."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, rollout: Rollout, prompt: Prompt, ids: list[int]) -> Sample:
        await self.go.wait()
        return accepts(rollout, prompt, ids)


async def test_a_reply_that_waits_for_its_verdict_is_stored() -> None:
    slow = Slow()
    async with serving(Router()) as router:
        run = Run(router, prompts_of(3))
        run.generator._ports.judge = slow
        going = asyncio.create_task(run.go())
        await run.completions.until(3)
        early = list(run.rollouts)
        slow.go.set()
        result = await going
    assert {(r.outcome, r.error_class, r.final) for r in early} == {("aborted", UNJUDGED, False)}
    assert all(r.reply_raw and "Four." in r.reply_raw for r in early)
    assert result.outcomes == {"ok": 3} and len(run.outcomes) == 3
    assert [r.final for r in run.rollouts[3:]] == [True] * 3
    assert run.check_books() == pytest.approx(0.003)


async def test_a_reply_that_waits_for_its_bill_is_stored() -> None:
    body = completion()
    del body["usage"]
    router = Router(otherwise=says(body))
    router.lookups = {body["id"]: [(404, None)]}
    async with serving(router):
        run = Run(router, prompts_of(1), delays_s=(0.02,) * 500)
        going = asyncio.create_task(run.go())
        await run.completions.until(1)
        router.lookups = {body["id"]: [(200, {"total_cost": 0.0007})]}
        await going
    first, last = run.rollouts
    assert (first.error_class, first.bill, first.final) == (UNJUDGED, "", False)
    assert (last.outcome, last.bill, last.final) == ("ok", "looked_up", True)
    assert run.check_books() == pytest.approx(0.0007)


async def test_nothing_more_leaves_while_a_window_of_replies_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pump, "MOST_WAITING", 8)
    slow = Slow()
    async with serving(Router()) as router:
        run = Run(router, prompts_of(40), max_in_flight=8)
        run.generator._ports.judge = slow
        going = asyncio.create_task(run.go())
        await run.completions.until(8)
        waiting = len(router.bodies)  # the eighth has waited for longer than any answer takes
        slow.go.set()
        result = await going
    assert 8 <= waiting <= 16
    assert result.outcomes == {"ok": 40}


def kept(
    name: str,
    body: dict[str, Any],
    error_class: str | None = UNJUDGED,
    cost: float | None = None,
) -> Rollout:
    usage = body.get("usage", {})
    return Rollout(
        prompt_id=name,
        twin_id=name,
        dataset="d",
        arm="declared",
        attempt=1,
        outcome="aborted",
        error_class=error_class,
        final=False,
        backend="openrouter",
        provider="alder",
        status=200,
        reply_kind="json",
        reply_raw=json.dumps(body),
        usage=Usage(
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=usage.get("completion_tokens"),
            cost_usd=cost,
        ),
    )


async def test_an_unjudged_reply_is_judged_by_the_next_life_and_not_asked_again(
    tmp_path: Path,
) -> None:
    disk = RunDir(tmp_path)
    names = ("p0", "p1", "p2", "p3")
    write(disk.spend, *[line for n in names for line in (spend(n, "dispatch"), spend(n, "known"))])
    cut = kept("p1", completion(), "cut_halt")
    empty = kept("p3", {**completion(), "choices": []})
    judged = kept("p2", completion(), "not_judged")
    write(disk.completions, kept("p0", completion()), cut, kept("p2", completion()), judged, empty)
    router = Router(otherwise=says(completion("Again.")))
    router.lookups = {"gen-7": [(200, {"total_cost": 0.0004, "native_tokens_completion": 3})]}
    async with serving(router):
        run = Run(router, prompts_of(5), judges=really_judges(), recovered=recover(disk))
        result = await run.go()
    asked = {b["messages"][0]["content"] for b in router.bodies}
    assert asked == {f"What is 2 + {i}?" for i in (1, 2, 3, 4)}
    first = [r for r in run.rollouts if r.prompt_id == "p0"]
    assert [(r.attempt, r.outcome, r.bill, r.final) for r in first] == [
        (1, "ok", "looked_up", True)
    ]
    assert first[0].usage.cost_usd == pytest.approx(0.0004)
    assert first[0].reply_raw and "Four." in first[0].reply_raw
    assert sum(result.outcomes.values()) == 5 and len({o.prompt_id for o in run.outcomes}) == 5
    (queue,), (lane,) = run.generator._queues.queues, run.generator._lanes
    assert (queue.taken, queue.ended, lane.pair("d").open) == (5, 5, 0)
    closed: list[SpendLine] = [x for x in run.spend.lines if x.kind == "looked_up"]
    assert sorted(x.prompt_id for x in closed) == ["p0", "p1", "p2", "p3"]


def test_only_the_last_line_of_a_prompt_counts(tmp_path: Path) -> None:
    disk = RunDir(tmp_path)
    later = Rollout(
        prompt_id="p0", twin_id="p0", dataset="d", arm="declared", attempt=1, outcome="ok",
        backend="openrouter",
    )  # fmt: skip
    write(disk.spend, spend("p0", "dispatch"), spend("p1", "dispatch"))
    write(disk.completions, kept("p0", completion()), kept("p1", completion()), later)
    found = recover(disk)
    assert set(found.unjudged) == {"p1"} and found.unjudged["p1"].attempt == 1
    assert found.reply(found.unjudged["p1"].at) == kept("p1", completion())


def waiting(disk: RunDir, *names: str, cost: float | None = None) -> Recovered:
    """An earlier life was killed while these replies waited for their verdicts."""
    write(disk.spend, *[line for n in names for line in (spend(n, "dispatch"), spend(n, "known"))])
    body = completion()
    if cost is None:
        del body["usage"]
    write(disk.completions, *[kept(n, body, cost=cost) for n in names])
    return recover(disk)


def on_disk(run: Run, disk: RunDir) -> list[Appender]:
    """The run's lines go to the files of the life before."""
    files = [Appender(disk.completions), Appender(disk.spend)]
    run.generator._ports.completions, run.generator._ports.spend = files
    run.generator._books._spend = files[1]
    return files


def finals(disk: RunDir) -> list[Rollout]:
    return [r for r in read_jsonl(disk.completions, Rollout) if r.final]


async def test_a_reply_that_says_its_cost_needs_no_look_up(tmp_path: Path) -> None:
    router = Router(otherwise=says(b"", 500))
    async with serving(router):
        run = Run(
            router, prompts_of(2), recovered=waiting(RunDir(tmp_path), "p0", "p1", cost=0.002)
        )
        result = await run.go()
    assert not router.bodies and not router.looked_up
    assert result.outcomes == {"ok": 2} and result.spent_usd == pytest.approx(0.004)
    assert [(x.kind, x.cost_usd) for x in run.spend.lines] == [("billed", 0.002)] * 2
    assert [(r.bill, r.final, r.usage.cost_usd) for r in run.rollouts] == [
        ("billed", True, 0.002)
    ] * 2


async def test_a_run_that_is_halted_at_once_judges_what_had_arrived(tmp_path: Path) -> None:
    router = Router()
    async with serving(router):
        recovered = waiting(RunDir(tmp_path), "p0", "p1", cost=0.002)
        run = Run(router, prompts_of(3), recovered=recovered)
        run.generator.halt("key", "")
        result = await run.go()
    assert not router.bodies and (result.reason, result.pending) == ("halted", 1)
    assert {(r.prompt_id, r.outcome, r.final) for r in run.rollouts} == {
        ("p0", "ok", True),
        ("p1", "ok", True),
    }


@pytest.mark.parametrize("stop", ["halt", "sever"])
async def test_a_halt_while_they_are_judged_lets_them_end(stop: str, tmp_path: Path) -> None:
    slow, router = Slow(), Router(otherwise=waits())
    names = [f"p{i}" for i in range(5)]
    async with serving(router):
        recovered = waiting(RunDir(tmp_path), *names, cost=0.002)
        run = Run(router, prompts_of(6), recovered=recovered, openrouter={"cancellable": []})
        run.generator._ports.judge = slow
        task = asyncio.create_task(run.go())
        await router.until(lambda r: r.held == 1)  # p5 alone is asked
        getattr(run.generator, stop)(*(("key", "") if stop == "halt" else ()))
        router.release.set()
        slow.go.set()
        result = await task
    judged = {r.prompt_id for r in run.rollouts if r.final and r.outcome == "ok"}
    assert judged == {*names} | ({"p5"} if stop == "halt" else set())
    assert len(router.bodies) == 1 and result.pending == (0 if stop == "halt" else 1)


async def test_a_kill_before_the_verdict_leaves_dispatch_and_reply_as_they_were(
    tmp_path: Path,
) -> None:
    """The bill is looked up, the judge is slow, the second life dies; the third asks nobody."""
    disk, slow = RunDir(tmp_path), Slow()
    router = Router()
    router.lookups = {"gen-7": [(200, {"total_cost": 0.0004, "native_tokens_completion": 3})]}
    async with serving(router):
        second = Run(router, prompts_of(1), recovered=waiting(disk, "p0"))
        files = on_disk(second, disk)
        second.generator._ports.judge = slow
        task = asyncio.create_task(second.go())
        await router.until(lambda r: len(r.looked_up) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for file in files:
            file.close()
        found = recover(disk)
        assert [x.prompt_id for x in found.open] == ["p0"] and set(found.unjudged) == {"p0"}
        third = Run(router, prompts_of(1), recovered=found)
        result = await third.go()
    assert result.outcomes == {"ok": 1} and not router.bodies
    (line,) = third.rollouts
    assert (line.bill, line.usage.completion_tokens) == ("looked_up", 3)


async def test_a_dataset_that_is_gone_is_told_and_one_that_comes_back_is_not_asked_again(
    tmp_path: Path,
) -> None:
    disk, router = RunDir(tmp_path), Router()
    router.lookups = {"gen-7": [(200, {"total_cost": 0.0004})]}
    async with serving(router):
        without = Run(router, prompts_of(3)[2:], recovered=waiting(disk, "p0", "p1"))
        files = on_disk(without, disk)
        assert (await without.go()).outcomes == {"ok": 1}
        for file in files:
            file.close()
        (said,) = [e.message for e in without.of(ev.Log) if e.level == "warn"]
        assert said.startswith("2 paid replies of prompts that the config no longer has stay")
        asked = len(router.bodies)
        found = recover(disk)
        assert found.open == [] and {k: v.cost_usd for k, v in found.billed.items()} == {
            ("p0", 1): 0.0004,
            ("p1", 1): 0.0004,
        }
        assert found.replies == {"p0": 0, "p1": 0, "p2": 1}
        again = Run(router, prompts_of(3), recovered=found)
        result = await again.go()
    assert len(router.bodies) == asked and result.outcomes == {"ok": 3}
    assert again.spend.lines == [] and result.spent_usd == pytest.approx(0.001 + 2 * 0.0004)
    told = [(r.bill, r.usage.cost_usd, r.usage.cap_usd) for r in again.rollouts]
    assert told == [("looked_up", 0.0004, 0.0004)] * 2


async def test_a_budget_that_is_used_up_does_not_keep_them_from_their_verdict(
    tmp_path: Path,
) -> None:
    async with serving(Router()) as router:
        recovered = waiting(RunDir(tmp_path), "p0", "p1", cost=0.002)
        run = Run(router, prompts_of(4), recovered=recovered, run={"budget_usd": 0.0041})
        result = await run.go()
    assert not router.bodies and result.reason == "budget"
    assert result.outcomes == {"ok": 2} and result.pending == 2


async def test_a_budget_for_all_does_not_count_them_twice(tmp_path: Path) -> None:
    """Each worst case is $0.00134; the first two are billed already."""
    async with serving(Router()) as router:
        recovered = waiting(RunDir(tmp_path), "p0", "p1", cost=0.0001)
        run = Run(
            router, prompts_of(3), recovered=recovered, reserve="all", run={"budget_usd": 0.002}
        )
        result = await run.go()
    assert result.outcomes == {"ok": 3} and len(router.bodies) == 1


async def test_a_provider_that_is_gone_leaves_the_canaries_of_others_alone(tmp_path: Path) -> None:
    router = Router(otherwise=waits())
    router.endpoints = [{**ALDER, "provider_name": "Birch", "tag": "birch"}]
    async with serving(router):
        recovered = waiting(RunDir(tmp_path), *[f"p{i}" for i in range(6)], cost=0.002)
        run = Run(router, prompts_of(12), recovered=recovered, canary=3)
        task = asyncio.create_task(run.go())
        await run.completions.until(6)
        await router.until(lambda r: r.held == 3)
        (lane,) = run.generator._lanes
        pair = lane.pair("d")
        assert (lane.name, pair.state, pair.open, pair.ended, lane.done) == (
            "birch",
            "running",
            3,
            0,
            0,
        )
        router.release.set()
        result = await task
    assert result.outcomes == {"ok": 12} and len(router.bodies) == 6


async def test_a_reply_that_cannot_be_read_any_more_is_asked_again(tmp_path: Path) -> None:
    def reply(at: int) -> Rollout:
        raise OSError("Input/output error")

    async with serving(Router()) as router:
        recovered = waiting(RunDir(tmp_path), "p0", cost=0.002)
        recovered.reply = reply
        run = Run(router, prompts_of(1), recovered=recovered)
        result = await run.go()
    assert result.outcomes == {"ok": 1} and len(router.bodies) == 1
    assert [(x.kind, x.attempt) for x in run.spend.lines if x.kind != "known"] == [
        ("billed", 1),
        ("dispatch", 2),
        ("billed", 2),
    ]


async def test_a_later_attempt_that_is_open_as_well_is_settled_for_itself(tmp_path: Path) -> None:
    """An engine that did not know of them asked again and was killed."""
    disk = RunDir(tmp_path)
    waiting(disk, "p0", cost=0.002)
    with disk.spend.open("ab") as file:
        file.write(msgspec.json.encode(spend("p0", "dispatch", attempt=2)) + b"\n")
    async with serving(Router()) as router:
        run = Run(router, prompts_of(1), recovered=recover(disk))
        result = await run.go()
    assert not router.bodies and result.outcomes == {"ok": 1}
    (line,) = run.rollouts
    assert (line.attempt, line.usage.cost_usd, line.bill) == (1, 0.002, "billed")
    assert sorted((x.kind, x.attempt) for x in run.spend.lines) == [("billed", 1), ("uncertain", 2)]


async def test_a_disk_that_is_full_while_they_are_kept_halts_and_loses_none(tmp_path: Path) -> None:
    """The appender holds what has no place; the lines come in their order once there is some."""
    slow = Slow()
    async with serving(Router()) as router:
        run = Run(router, prompts_of(4), max_in_flight=4)
        run.generator._ports.judge = slow
        run.completions.full_after = 2
        task = asyncio.create_task(run.go())
        await run.completions.until(4)
        slow.go.set()
        result = await task
    assert result.reason == "disk_full" and len(router.bodies) == 4
    by_prompt = {p: [r.final for r in run.rollouts if r.prompt_id == p] for p in ("p0", "p3")}
    assert by_prompt == {"p0": [False, True], "p3": [False, True]}
    assert run.check_books() == pytest.approx(0.004)


async def test_giving_up_judges_and_keeps_them(tmp_path: Path) -> None:
    disk, router = RunDir(tmp_path), Router()
    empty = kept("p1", {**completion(), "choices": []}, cost=0.002)
    write(disk.spend, *[spend(n, "dispatch") for n in ("p0", "p1", "p2")])
    write(disk.completions, kept("p0", completion(), cost=0.002), empty)
    async with serving(router):
        run = Run(router, prompts_of(4), judges=really_judges(), recovered=recover(disk))
        ports = run.generator._ports
        files = on_disk(run, disk)
        run.events.clear()
        result = await abandon(run.config, prompts_of(4), ports, NO_DELAYS, NO_DELAYS)
        for file in files:
            file.close()
    assert not router.bodies
    assert result.outcomes == {"ok": 1, "rejected": 1, "refused": 2}
    ended = {r.prompt_id: (r.outcome, r.error_class) for r in finals(disk)}
    assert ended == {
        "p0": ("ok", None),
        "p1": ("rejected", "empty_choices"),
        "p2": ("refused", "abandoned"),
        "p3": ("refused", "abandoned"),
    }
    assert [s.prompt_id for s in run.samples] == [o.prompt_id for o in run.outcomes[:2]]
    assert sorted(o.prompt_id for o in run.outcomes) == ["p0", "p1", "p2", "p3"]
    said = [e.message for e in run.of(ev.Log)][-1]
    assert said == (
        "abandoned: 2 prompts will not be asked; 2 replies that had only waited for their verdict "
        "are kept"
    )
    (stats,) = run.of(ev.Stats)
    assert (stats.done, stats.ok, stats.rejected, stats.refused) == (4, 1, 1, 2)
    found = recover(disk)
    assert found.open == [] and found.unjudged == {} and len(found.finished) == 4
    assert found.spent_usd == pytest.approx(0.002 + 0.002 + 0.01)


async def test_giving_up_with_a_full_disk_says_so_and_leaves_them(tmp_path: Path) -> None:
    async with serving(Router()) as router:
        recovered = waiting(RunDir(tmp_path), "p0", "p1", cost=0.002)
        run = Run(router, prompts_of(3), recovered=recovered)
        run.completions.full_after = 0
        with pytest.raises(DiskFull):
            await abandon(run.config, prompts_of(3), run.generator._ports, NO_DELAYS, NO_DELAYS)
    assert run.outcomes == [] and {x.kind for x in run.spend.lines} == {"billed"}


async def test_every_reader_counts_a_kept_and_judged_reply_once(tmp_path: Path) -> None:
    """Two lines of one attempt: samples, outcomes and money are those of the second alone."""
    disk, router = RunDir(tmp_path), Router()
    async with serving(router):
        run = Run(router, prompts_of(3), recovered=waiting(disk, "p0", "p1", cost=0.002))
        files = on_disk(run, disk)
        assert (await run.go()).outcomes == {"ok": 3}
        for file in files:
            file.close()
    lines = list(read_jsonl(disk.completions, Rollout))
    assert Counter(r.prompt_id for r in lines) == {"p0": 2, "p1": 2, "p2": 1}
    prompts = {p.prompt_id: p for p in prompts_of(3)}
    places, others = final_replies(disk.completions, prompts)
    replies = list(read_at(disk.completions, places, Rollout))
    assert [(r.prompt_id, r.final) for r in replies] == [("p0", True), ("p1", True), ("p2", True)]
    assert not others
    found = recover(disk)
    assert found.outcomes == {"ok": 3} and found.unjudged == {} and found.open == []
    assert found.spent_usd == pytest.approx(0.005)
    disk.prompts.write_bytes(b"".join(msgspec.json.encode(p) + b"\n" for p in prompts.values()))
    made, spent = _made(disk), _spent(disk)
    assert (made["prompts"], made["finished"]) == (3, 3)
    assert made["table"][0]["outcomes"] == {"ok": 3}
    assert spent["total_usd"] == pytest.approx(0.005) and spent["open"] == 0
