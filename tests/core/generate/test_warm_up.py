"""Of prompts that begin alike one goes first; the others wait until its answer has begun, nobody
else does."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from core.generate import lanes
from core.generate.request import SHARED, prepare
from core.schema import Prompt
from tests.core.generate.rig import (
    Handler,
    Router,
    Run,
    completion,
    events_of,
    prompts_of,
    renderer,
    resets,
    says,
    serving,
    streams,
    waits,
)

LONG = "You are terse. " * 700


def long_prompts(count: int, system: str = LONG, dataset: str = "d") -> list[Prompt]:
    prompts = prompts_of(count, dataset=dataset)
    for i, prompt in enumerate(prompts):
        prompt.messages.insert(0, {"role": "system", "content": system})
        prompts[i] = Prompt(
            prompt_id=f"{dataset}-{system[:3]}-{i}",
            twin_id=f"{dataset}-{system[:3]}-{i}",
            dataset=dataset,
            messages=prompt.messages,
        )
    return prompts


def datasets(*names: str) -> dict[str, Any]:
    return {"dataset": [{"name": name, "kind": "embedded"} for name in names]}


def beginnings(router: Router) -> list[str]:
    """Of the requests that have arrived, in their order."""
    return [body["messages"][0]["content"][:3] for body in router.bodies]


def first_of(system: str, first: Handler, then: Handler) -> Handler:
    """`first` answers the first request of a beginning, `then` every other."""

    async def handler(request: web.Request, router: Router) -> web.StreamResponse:
        led = beginnings(router).count(system[:3]) == 1 and beginnings(router)[-1] == system[:3]
        return await (first if led else then)(request, router)

    return handler


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, what ends a wait is the answer."""
    monkeypatch.setattr(lanes, "WARM_UP_S", 3_600.0)


@pytest.mark.usefixtures("patient")
async def test_others_wait_for_the_first_reply_while_other_groups_and_datasets_leave() -> None:
    other = "Be kind. " * 900
    prompts = [*long_prompts(6), *long_prompts(4, other), *prompts_of(3, dataset="e")]
    async with serving(Router(otherwise=first_of(LONG, waits(), says()))) as router:
        run = Run(router, prompts, max_in_flight=8, **datasets("d", "e"))
        going = asyncio.create_task(run.go())
        await run.completions.until(7)
        assert router.held == 1 and beginnings(router).count("You") == 1
        router.release.set()
        result = await going
    assert result.outcomes == {"ok": 13}
    assert beginnings(router).count("You") == 6


@pytest.mark.usefixtures("patient")
async def test_the_first_event_of_a_stream_ends_the_wait() -> None:
    events = events_of(completion())
    first = streams(events[:1], then="wait")
    handler = first_of(LONG, first, streams(events))
    async with serving(Router(otherwise=handler)) as router:
        run = Run(router, long_prompts(6), max_in_flight=8, openrouter={"stream": True})
        going = asyncio.create_task(run.go())
        await run.completions.until(5)
        assert router.gone == 0  # the first is still streaming
        run.generator.halt("test", "")
        result = await going
    assert result.outcomes["ok"] == 5 and result.pending == 1
    assert len(router.bodies) == 6 and router.arrivals[1] > router.arrivals[0]


@pytest.mark.usefixtures("patient")
async def test_its_failure_ends_it_too() -> None:
    async with serving(Router(resets())) as router:
        run = Run(router, long_prompts(5), max_in_flight=8)
        result = await run.go()
    assert result.outcomes == {"ok": 5} and len(router.bodies) == 6


async def test_a_first_one_that_says_nothing_is_not_waited_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "WARM_UP_S", 0.05)
    async with serving(Router(otherwise=first_of(LONG, waits(), says()))) as router:
        run = Run(router, long_prompts(5), max_in_flight=8)
        going = asyncio.create_task(run.go())
        await run.completions.until(4)
        assert router.held == 1 and not router.release.is_set()
        router.release.set()
        assert (await going).outcomes == {"ok": 5}


@pytest.mark.usefixtures("patient")
async def test_short_beginnings_do_not_wait() -> None:
    async with serving(Router(otherwise=waits())) as router:
        run = Run(router, long_prompts(6, "You are terse."), max_in_flight=6)
        going = asyncio.create_task(run.go())
        await router.until(lambda r: r.held == 6)
        router.release.set()
        assert (await going).outcomes == {"ok": 6}


@pytest.mark.usefixtures("patient")
async def test_a_halt_leaves_those_that_wait_pending() -> None:
    async with serving(Router(otherwise=waits())) as router:
        run = Run(router, long_prompts(5), max_in_flight=8)
        going = asyncio.create_task(run.go())
        await router.until(lambda r: r.held == 1)
        run.generator.halt("test", "")
        router.release.set()
        result = await going
    assert len(router.bodies) == 1 and result.pending == 4 + (result.outcomes.get("ok", 0) == 0)


def test_beginnings_are_equal_where_so_many_tokens_are() -> None:
    one, two = (prepare(p, renderer(), True) for p in long_prompts(2))
    other, short = (
        prepare(long_prompts(1, system)[0], renderer(), True) for system in ("X" + LONG, "Hello.")
    )
    assert len(one.ids) > SHARED and one.ids != two.ids
    assert one.beginning == two.beginning != 0
    assert other.beginning not in (0, one.beginning)
    assert short.beginning == 0
