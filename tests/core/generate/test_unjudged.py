"""A reply that waits, for its verdict or for its bill, is on disk meanwhile; after a kill it is
judged, not asked again."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from core.generate import pump, recover
from core.schema import UNJUDGED, Prompt, Rollout, Sample, SpendLine, Usage
from core.store import RunDir
from tests.core.generate.rig import (
    Router,
    Run,
    accepts,
    completion,
    prompts_of,
    really_judges,
    says,
    serving,
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


def kept(name: str, body: dict[str, Any], error_class: str | None = UNJUDGED) -> Rollout:
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
    closed: list[SpendLine] = [x for x in run.spend.lines if x.kind == "looked_up"]
    assert sorted(x.prompt_id for x in closed) == ["p0", "p1", "p2", "p3"]


def test_only_the_last_line_of_a_prompt_counts(tmp_path: Path) -> None:
    disk = RunDir(tmp_path)
    later = Rollout(
        prompt_id="p0", twin_id="p0", dataset="d", arm="declared", attempt=1, outcome="ok",
        backend="openrouter",
    )  # fmt: skip
    write(disk.completions, kept("p0", completion()), kept("p1", completion()), later)
    found = recover(disk)
    assert set(found.unjudged) == {"p1"} and found.reply is not None
    assert found.reply(found.unjudged["p1"]) == kept("p1", completion())
