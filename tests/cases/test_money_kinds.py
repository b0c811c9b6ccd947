"""Kind d of the public fault reports: usage that is missing, costs that are none, attempts that
died, each in its other forms."""

import asyncio
import json
import math
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from core.providers.chat import usage_of
from core.providers.price import Price, cost_of
from core.schema import reply_text
from tests.core.generate.rig import (
    Handler,
    Router,
    Run,
    completion,
    events_of,
    prompts_of,
    really_judges,
    resets,
    says,
    serving,
    streams,
)

STREAM = {"openrouter": {"stream": True}}
PAID = Price(prompt=1e-6, completion=2e-5)
FOUND = (200, {"total_cost": 0.00123, "native_tokens_prompt": 24, "native_tokens_completion": 6})
NOTHING: list[tuple[int, Any]] = [
    (404, None),
    (500, None),
    (200, None),
    (200, {}),
    (200, {"total_cost": None}),
    (200, {"total_cost": "0.00123"}),
    (200, {"total_cost": -1}),
    (200, {"total_cost": 0.0, "is_byok": True, "upstream_inference_cost": None}),
    (200, [1]),
]


async def one(router: Router, **settings: Any) -> Run:
    async with serving(router):
        run = Run(router, prompts_of(1), judges=really_judges(), **settings)
        await run.go()
    return run


def closings(run: Run) -> list[tuple[str, float]]:
    opening = ("dispatch", "known", "account", "adjusted")
    return [(x.kind, x.cost_usd) for x in run.spend.lines if x.kind not in opening]


USAGES: dict[str, Any] = {
    "absent": "absent",
    "null": None,
    "empty": {},
    "zeros": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0, "cost": 0},
    "zeros with cost": {"prompt_tokens": 0, "completion_tokens": 0, "cost": 0.0},
    "tokens alone": {"prompt_tokens": 24, "completion_tokens": 6},
    "a list": [24, 6],
    "a text": "24/6",
    "zero cost": {"prompt_tokens": 24, "completion_tokens": 6, "cost": 0},
}


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("stream", [False, True])
async def test_c36_a_bill_that_is_not_said_is_looked_up_and_booked_once(
    usage: str, stream: bool
) -> None:
    body = completion(usage=USAGES[usage])
    if usage == "absent":
        del body["usage"]
    router = Router(streams(events_of(body)) if stream else says(body))
    router.lookups = {"gen-1": [(404, None), (404, None), FOUND]}
    run = await one(router, **(STREAM if stream else {}))
    assert len(router.looked_up) == 3
    assert closings(run) == [("looked_up", 0.00123)]
    assert run.rollouts[0].usage.completion_tokens == 6
    assert run.samples[0].billed_tokens == 6
    assert [o.outcome for o in run.outcomes] == ["ok"]


@pytest.mark.parametrize("said", NOTHING, ids=[f"{s} {json.dumps(d)}"[:40] for s, d in NOTHING])
async def test_c36_a_look_up_that_says_nothing_is_asked_again(said: tuple[int, Any]) -> None:
    body = completion()
    del body["usage"]
    router = Router(says(body))
    router.lookups = {"gen-1": [said, said, FOUND]}
    run = await one(router)
    assert closings(run) == [("looked_up", 0.00123)]
    router = Router(says(body))
    router.lookups = {"gen-1": [said]}
    run = await one(router)
    worst = run.spend.lines[0].reserve_usd
    assert closings(run) == [("uncertain", pytest.approx(worst))] and worst > 0


def dies(after: str) -> Handler:
    """A connection that dies: when, and whether a generation id was told before."""

    async def handler(request: web.Request, router: Router) -> web.StreamResponse:
        headers = {"Content-Type": "application/json"}
        if "id" in after:
            headers["X-Generation-Id"] = "gen-10"
        if "stream" in after:
            headers["Content-Type"] = "text/event-stream"
        reply = web.StreamResponse(headers=headers)
        await reply.prepare(request)
        if after == "half a body with id":
            await reply.write(json.dumps(completion(id="gen-10")).encode()[:90])
        if "events" in after:
            for event in events_of(completion(id="gen-10"))[:2]:
                await reply.write(event)
        await asyncio.sleep(0.02)  # what was written has left
        assert request.transport is not None
        request.transport.abort()
        return reply

    return handler


DEATHS = {
    "headers with id": "looked_up",
    "headers alone": "uncertain",
    "half a body with id": "looked_up",
    "stream headers with id": "looked_up",
    "stream headers alone": "uncertain",
    "stream events": "looked_up",
}


@pytest.mark.parametrize("after", DEATHS)
async def test_c38_what_was_accepted_is_settled_before_it_is_asked_again(after: str) -> None:
    """Two attempts, never at once, each booked once, one sample."""
    stream = "stream" in after
    body = completion(cost=0.0009, id="gen-11")
    router = Router(dies(after), streams(events_of(body)) if stream else says(body))
    router.lookups = {"gen-10": [(404, None), (200, {"total_cost": 0.0008})]}
    run = await one(router, **(STREAM if stream else {}))
    assert len(router.bodies) == 2 and router.peak == 1
    first, second = closings(run)
    assert first[0] == DEATHS[after] and second == ("billed", 0.0009)
    assert first[1] == (0.0008 if DEATHS[after] == "looked_up" else run.spend.lines[0].reserve_usd)
    dispatched = [i for i, x in enumerate(run.spend.lines) if x.kind == "dispatch"]
    closed = [i for i, x in enumerate(run.spend.lines) if x.kind == first[0]]
    assert closed[0] < dispatched[1]
    assert [o.outcome for o in run.outcomes] == ["ok"] and len(run.samples) == 1
    assert bool(reply_text(run.rollouts[0])) == ("body" in after or "events" in after)


@pytest.mark.parametrize(
    ("answer", "looked_up"),
    [
        (says({"error": {"code": 408, "message": "x"}}, 408, {"X-Generation-Id": "gen-10"}), True),
        (says(b"a timeout occurred", 524, {"X-Generation-Id": "gen-10"}), True),
        (says(b"", 504), False),
        (says(b"", 500, {"X-Generation-Id": "gen-10"}), False),
        (says(b"", 502), False),
        (resets(), False),
    ],
)
async def test_c38_gateways_that_gave_up_may_have_been_billed(
    answer: Handler, looked_up: bool
) -> None:
    router = Router(answer)
    router.lookups = {"gen-10": [(200, {"total_cost": 0.0008})]}
    run = await one(router)
    assert len(router.bodies) == 2 and router.peak == 1
    assert bool(router.looked_up) == looked_up
    assert [o.outcome for o in run.outcomes] == ["ok"]
    assert closings(run)[-1] == ("billed", 0.001)


async def test_c38_paid_deaths_end_after_their_attempts() -> None:
    router = Router(otherwise=dies("headers with id"))
    router.lookups = {"gen-10": [(200, {"total_cost": 0.0008})]}
    run = await one(router, attempts_paid=2, attempts_unpaid=9)
    assert len(router.bodies) == 2 and [o.outcome for o in run.outcomes] == ["failed"]
    assert run.check_books() == pytest.approx(0.0016)


COSTS = {
    "null": "null",
    "text": '"0.25"',
    "empty text": '""',
    "NaN": "NaN",
    "infinite": "Infinity",
    "minus infinite": "-Infinity",
    "beyond doubles": "1e400",
    "negative": "-0.0003",
    "true": "true",
    "list": "[0.0003]",
    "object": '{"usd": 0.0003}',
    "zero": "0",
    "minus zero": "-0.0",
}


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_c40_what_is_no_cost_is_unknown_and_reserved(cost: str, stream: bool) -> None:
    """Never zero: the spend cap must see it."""
    body = completion(cost="@")
    raw = json.dumps(body).replace('"@"', COSTS[cost]).encode()
    answer = says(raw, headers={"Content-Type": "application/json"})
    if stream:
        answer = streams([e.replace(b'"@"', COSTS[cost].encode()) for e in events_of(body)])
    run = await one(Router(answer), **(STREAM if stream else {}))
    worst = run.spend.lines[0].reserve_usd
    assert closings(run) == [("uncertain", pytest.approx(worst))] and worst > 0.00128
    assert run.generator.stats().uncertain_usd == pytest.approx(worst)


@pytest.mark.parametrize(
    ("upstream", "cap"),
    [(0.0042, 0.0042), (0, 0.0), (None, None), ("0.0042", None), (-1, None), ("absent", None)],
)
async def test_c40_byok_counts_what_somebody_else_bills(upstream: Any, cap: float | None) -> None:
    details = {} if upstream == "absent" else {"upstream_inference_cost": upstream}
    usage = {"prompt_tokens": 20, "completion_tokens": 6, "cost": 0, "is_byok": True}
    router = Router(says(completion(usage={**usage, "cost_details": details})))
    run = await one(router)
    line = run.spend.lines[-1]
    if cap is None:
        assert line.kind == "uncertain" and line.cap_usd == run.spend.lines[0].reserve_usd
    else:
        assert (line.kind, line.cost_usd, line.cap_usd) == ("billed", 0.0, cap)


async def test_c40_known_and_reserved_are_shown_apart() -> None:
    unsaid = completion(cost=None)
    async with serving(Router(says(), says(unsaid), otherwise=says())) as router:
        run = Run(router, prompts_of(3), max_in_flight=1)
        result = await run.go()
    stats = run.generator.stats()
    worst = next(x.cost_usd for x in run.spend.lines if x.kind == "uncertain")
    assert stats.uncertain_usd == result.uncertain_usd == pytest.approx(worst)
    assert stats.spent_usd - stats.uncertain_usd == pytest.approx(0.002)
    assert stats.reserved_usd == 0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(json_values, json_values, json_values, json_values)
def test_c40_any_usage_gives_a_sound_cost_or_none(
    cost: Any, byok: Any, details: Any, tokens: Any
) -> None:
    usage = {
        "cost": cost,
        "is_byok": byok,
        "cost_details": details,
        "prompt_tokens": tokens,
        "completion_tokens": 5,
    }
    known, cap = cost_of(usage, free=False)
    assert (known is None) == (cap is None)
    if known is not None and cap is not None:
        assert 0 <= known <= cap and math.isfinite(cap)
        assert byok is True or known > 0
    read = usage_of({"usage": usage}, PAID)
    assert read.cost_usd is None or read.cost_usd >= 0
    assert read.prompt_tokens is None or read.prompt_tokens >= 0
