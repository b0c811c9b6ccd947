"""Prompts and the contexts of those who would answer them: a prompt goes where it fits with its
longest answer, and one that fits nowhere is not asked."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from core.generate.request import prepare
from core.schema import Prompt
from tests.core.generate.rig import ALDER, Handler, Router, Run, prompts_of, renderer, says, serving

MAX_TOKENS = 64
LONG = "p0"


def tokens(prompt: Prompt) -> int:
    return len(prepare(prompt, renderer(), True).ids) + MAX_TOKENS


def mixed(count: int) -> tuple[list[Prompt], int, int]:
    """The first prompt is the long one. Also what the short ones and the long one need."""
    prompts = prompts_of(count)
    prompts[0].messages[0]["content"] = "Add these up: " + "2 " * 100
    needs = [tokens(prompt) for prompt in prompts]
    assert needs[0] > max(needs[1:])
    return prompts, max(needs[1:]), needs[0]


def endpoints(**contexts: int) -> list[dict[str, Any]]:
    return [{**ALDER, "tag": tag, "context_length": most} for tag, most in contexts.items()]


def asked_of(router: Router, tag: str) -> list[str]:
    return [
        body["messages"][0]["content"]
        for body in router.bodies
        if body["provider"]["only"] == [tag]
    ]


def only(tag: str, then: Handler) -> Handler:
    async def handler(request: web.Request, router: Router) -> web.StreamResponse:
        body = await request.json()
        return await (then if body["provider"]["only"] == [tag] else says())(request, router)

    return handler


@pytest.mark.parametrize("missing", [0, 1])
async def test_a_prompt_that_fits_nowhere_is_refused_and_not_sent(missing: int) -> None:
    prompts, _, long = mixed(4)
    router = Router()
    router.endpoints = endpoints(alder=long - 1, birch=long - missing)
    async with serving(router):
        run = Run(router, prompts)
        result = await run.go()
    assert result.outcomes == ({"ok": 3, "refused": 1} if missing else {"ok": 4})
    assert len(router.bodies) == (3 if missing else 4) and not result.reason
    refused = [r for r in run.rollouts if r.outcome == "refused"]
    if missing:
        (one,) = refused
        assert (one.prompt_id, one.error_class, one.final) == (LONG, "prompt_too_long", True)
        length = long - MAX_TOKENS
        assert one.error == (
            f"{length} prompt tokens, generate.max_tokens leaves {length - 1} in the longest "
            "context; lower it"
        )
    else:
        assert not refused and not asked_of(router, "alder").count(
            prompts[0].messages[0]["content"]
        )


async def test_where_one_context_is_not_known_nobody_is_refused() -> None:
    prompts, short, _ = mixed(3)
    router = Router()
    router.endpoints = [*endpoints(alder=short), {**ALDER, "tag": "birch"}]
    async with serving(router):
        assert (await Run(router, prompts).go()).outcomes == {"ok": 3}
    assert prompts[0].messages[0]["content"] in asked_of(router, "birch")


async def test_a_long_prompt_that_waits_for_its_provider_holds_up_no_other() -> None:
    prompts, short, long = mixed(6)
    busy = says(
        {"error": {"code": 429, "metadata": {"provider_name": "B"}}}, 429, {"Retry-After": "900"}
    )
    router = Router(otherwise=only("birch", busy))
    router.endpoints = endpoints(alder=short, birch=long)
    async with serving(router):
        run = Run(router, prompts, max_in_flight=1, openrouter={"order": ["birch", "alder"]})
        task = asyncio.create_task(run.go())
        await router.until(lambda r: len(asked_of(r, "alder")) == 5)
        await run.completions.until(6)
        run.generator.halt("test", "")
        result = await task
    assert result.outcomes["ok"] == 5 and result.pending == 1
    assert asked_of(router, "birch") == [prompts[0].messages[0]["content"]]


async def test_a_prompt_whose_only_provider_is_stopped_is_left_for_the_next_life() -> None:
    prompts, short, long = mixed(6)
    router = Router(otherwise=only("birch", says({"error": {"message": "gone"}}, 404)))
    router.endpoints = endpoints(alder=short, birch=long)
    async with serving(router):
        run = Run(router, prompts, max_in_flight=1)
        task = asyncio.create_task(run.go())
        await router.until(lambda r: len(r.bodies) > 0)
        run.generator.stop_scope("provider", "birch", "told to")
        result = await task
    assert result.reason == "stopped" and result.pending == 1
    assert "only those hold its longest prompts: birch told to" in result.detail
    (left,) = [r for r in run.rollouts if r.outcome == "refused"]
    assert (left.prompt_id, left.error_class, left.final) == (LONG, "no_lane", False)
    run.check_books()


async def test_the_worst_of_all_counts_whom_it_asks() -> None:
    """The long prompt is refused, so that the budget need not cover it; or the dearest endpoint has
    no room for it."""
    prompts, short, long = mixed(3)
    worst = 2 * ((short - MAX_TOKENS + 8) * 1e-6 + MAX_TOKENS * 20e-6)
    router = Router()
    router.endpoints = endpoints(alder=short)
    async with serving(router):
        run = Run(router, prompts, reserve="all", run={"budget_usd": worst * 1.001})
        assert (await run.go()).outcomes == {"ok": 2, "refused": 1}
    worst += (long - MAX_TOKENS + 8) * 1e-6 + MAX_TOKENS * 1e-6
    cheap = {"pricing": {"prompt": "0.000001", "completion": "0.000001"}}
    router.endpoints += [{**endpoints(birch=long)[0], **cheap}]
    async with serving(router):
        run = Run(router, prompts, reserve="all", run={"budget_usd": worst * 1.001})
        assert (await run.go()).outcomes == {"ok": 3}
