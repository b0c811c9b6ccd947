"""Kinds c and e of the public fault reports through the whole generator: what each case shows once,
in its other forms (codes, places, cuts, encodings, boundary values)."""

import asyncio
import email.utils
import json
import time
from typing import Any

import pytest
from aiohttp import web

from core.providers.classify import classify_parsed, parsed_or_none
from core.schema import Rollout, reply_text
from tests.core.generate.rig import (
    Router,
    Run,
    completion,
    events_of,
    prompts_of,
    really_judges,
    says,
    serving,
    streams,
)

STREAM = {"openrouter": {"stream": True}}
ZERO = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


async def one(router: Router, **settings: Any) -> Run:
    async with serving(router):
        run = Run(router, prompts_of(1), judges=really_judges(), **settings)
        await run.go()
    return run


def classes(run: Run) -> list[str | None]:
    rollouts: list[Rollout] = run.rollouts
    return [r.error_class for r in rollouts]


def unfinished(finish: Any, usage: Any) -> dict[str, Any]:
    body = completion(usage=usage)
    choice = body["choices"][0]
    if finish == "absent":
        del choice["finish_reason"]
    else:
        choice["finish_reason"] = finish
    if usage == "absent":
        del body["usage"]
    return body


@pytest.mark.parametrize("finish", [None, "absent", ""])
@pytest.mark.parametrize("usage", [ZERO, {}, None, "absent"])
@pytest.mark.parametrize("stream", [False, True])
async def test_c27_no_finish_and_no_usage(finish: Any, usage: Any, stream: bool) -> None:
    body = unfinished(finish, usage)
    events = events_of({**body, "choices": [{**body["choices"][0], "finish_reason": None}]})
    answer = streams(events) if stream else says(body)
    router = Router(otherwise=answer)
    router.lookups = {"gen-1": [(200, {"total_cost": 0.0007})]}
    run = await one(router, **(STREAM if stream else {}))
    assert classes(run) == ["finish_missing"] * 2
    assert [r.final for r in run.rollouts] == [False, True]
    assert run.check_books() == pytest.approx(0.0014)
    assert [o.outcome for o in run.outcomes] == ["rejected"]


def wrong(code: Any, place: str) -> Any:
    """An answer of status 200 that is an error with this code, in one of its places."""
    error = {"code": code, "message": "limit reached", "metadata": {"provider_name": "Alder"}}
    body = completion(usage=ZERO)
    choice = {"index": 0, "delta": {"content": ""}, "finish_reason": "error"}
    if place == "beside":
        body["error"] = error
        body["choices"][0]["message"]["content"] = None
        return says(body)
    if place == "inside":
        body["choices"][0] |= {"error": error, "finish_reason": "error"}
        return says(body)
    if place == "alone":
        return says({"error": error})
    head = {"id": "gen-1", "provider": "Alder", "model": "m"}
    event = b"data: " + json.dumps({**head, "error": error, "choices": [choice]}).encode() + b"\n\n"
    before = [] if place == "first event" else events_of(completion())[:2]
    return streams([*before, event])


PLACES = ("beside", "inside", "alone", "first event", "mid-stream")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (429, "rate_limited"),
        ("429", "rate_limited"),
        (503, "provider_unavailable"),
        (529, "provider_unavailable"),
        (502, None),
        ("server_error", None),
        (None, None),
    ],
)
async def test_c28_errors_in_a_200(
    monkeypatch: pytest.MonkeyPatch, place: str, code: Any, kind: str | None
) -> None:
    """No sample, no cost, and the prompt is asked again; throttling uses up no attempt."""
    monkeypatch.setattr("core.limit.backoff_s", lambda failures, dice: 0.02)
    stream = place in ("first event", "mid-stream")
    good = streams(events_of(completion(id="gen-2"))) if stream else says(completion(id="gen-2"))
    router = Router(wrong(code, place), otherwise=good)
    run = await one(router, attempts_unpaid=1 if kind else 2, **(STREAM if stream else {}))
    first, second = run.rollouts
    assert (first.outcome, first.final, bool(reply_text(first))) == ("failed", False, True)
    assert first.error_class in ((kind,) if kind else ("upstream_error_midstream", "server_error"))
    assert second.final and [o.outcome for o in run.outcomes] == ["ok"]
    assert run.check_books() == pytest.approx(0.001)
    assert len(run.samples) == 1


@pytest.mark.parametrize("choices", [[], None, {}, "absent"])
@pytest.mark.parametrize("stream", [False, True])
async def test_c30_no_choices(choices: Any, stream: bool) -> None:
    """Billed once each, asked once more, no sample."""
    usage = {"prompt_tokens": 412, "completion_tokens": 0, "cost": 0.00025}
    body = {"id": "gen-2", "model": "m", "choices": choices, "usage": usage}
    if choices == "absent":
        del body["choices"]
    raw = b"data: " + json.dumps(body).encode() + b"\n\n"
    answer = streams([raw, b"data: [DONE]\n\n"]) if stream else says(body)
    run = await one(Router(otherwise=answer), **(STREAM if stream else {}))
    assert classes(run) == ["empty_choices"] * 2
    assert run.check_books() == pytest.approx(2 * 0.00025)
    assert len(run.outcomes) == 1 and not any(s.trainable for s in run.samples)


@pytest.mark.parametrize("choice", [None, {}, "x", {"message": None}, {"message": {}}, 7])
async def test_c30_choices_that_are_none(choice: Any) -> None:
    """Paid, so asked at most once more; never a traceback, never a sample."""
    body = completion()
    body["choices"] = [choice]
    run = await one(Router(otherwise=says(body)))
    assert 1 <= len(run.rollouts) <= 2 and len(run.outcomes) == 1
    assert run.outcomes[0].outcome in ("rejected", "failed")
    assert run.check_books() == pytest.approx(0.001 * len(run.rollouts))


@pytest.mark.parametrize(
    ("message", "finish"),
    [
        ({"reasoning": " First list them, then", "content": None}, {"finish_reason": "length"}),
        ({"reasoning": " Sum.", "content": "Fo"}, {"finish_reason": "length"}),
        ({"content": ""}, {"finish_reason": "length"}),
        ({"reasoning": " Sum.", "content": "Fo"}, {"native_finish_reason": "length"}),
        ({"reasoning": " Sum.", "content": "Fo"}, {"native_finish_reason": "MAX_TOKENS"}),
    ],
)
async def test_c32_truncation_is_data(message: dict[str, Any], finish: dict[str, Any]) -> None:
    body = completion()
    body["choices"][0] |= {"message": {"role": "assistant", **message}, **finish}
    run = await one(Router(otherwise=says(body)))
    assert classes(run) == ["truncated_length"]
    assert run.check_books() == pytest.approx(0.001)
    specials = {163607, 163586}
    assert not specials & set(run.samples[0].completion_ids[-1:])


BODY = json.dumps(completion("naïve 四 🙂"), ensure_ascii=False).encode()


def test_c34_a_body_cut_anywhere_is_truncated() -> None:
    for cut in range(len(BODY)):
        failure = classify_parsed(200, {}, BODY[:cut], parsed_or_none(BODY[:cut]), 0.0)
        assert failure is not None and failure.kind == "body_truncated", cut
    assert classify_parsed(200, {}, BODY, parsed_or_none(BODY), 0.0) is None


@pytest.mark.parametrize("cut", [0, 1, 12, 40, -40, -1])
@pytest.mark.parametrize("header", [True, False])
async def test_c34_what_was_cut_is_kept_and_settled_first(cut: int, header: bool) -> None:
    part = BODY[:cut] if cut else b""
    router = Router(says(part, headers={"X-Generation-Id": "gen-1"} if header else {}))
    router.lookups = {"gen-1": [(200, {"total_cost": 0.0004})]}
    router.otherwise = says(completion(id="gen-2"))
    run = await one(router)
    assert classes(run) == ["body_truncated", None]
    assert (reply_text(run.rollouts[0]) or "").encode("utf-8", "surrogateescape") == part
    known = header or b'"gen-1"' in part
    kinds = [x.kind for x in run.spend.lines if x.kind not in ("known", "dispatch")]
    assert kinds == ["looked_up" if known else "uncertain", "billed"]
    assert [x.attempt for x in run.spend.lines if x.kind == "dispatch"] == [1, 2]


@pytest.mark.parametrize(
    "body",
    [b"<!DOCTYPE html><html></html>", b"upstream connect error", b"[]", b"null", b"7", b'"ok"'],
)
async def test_c34_what_is_no_object_is_no_reply(body: bytes) -> None:
    run = await one(Router(says(body)))
    assert classes(run) == ["body_not_json", None]


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"\n         \n\n", b""), (b"", b"\r\n\r\n"), (b"\xef\xbb\xbf", b""), (b" \t\r\n", b" \n")],
)
async def test_c34_white_space_and_a_byte_order_mark_are_legal(before: bytes, after: bytes) -> None:
    run = await one(Router(otherwise=says(before + BODY + after)))
    assert classes(run) == [None]
    assert run.samples[0].verdict in ("consistent", "unverifiable", "mismatch")
    assert "naïve 四 🙂" in (reply_text(run.rollouts[0]) or "")


async def test_c43_five_hundred_on_fifty_slots() -> None:
    async def slow(request: web.Request, router: Router) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        return await says()(request, router)

    async with serving(Router(otherwise=slow)) as router:
        run = Run(router, prompts_of(500), max_in_flight=50, first_event_timeout_s=5.0)
        result = await run.go()
    assert result.outcomes == {"ok": 500}
    assert len(router.bodies) == 500 and router.peak <= 50
    assert all(x.kind in ("dispatch", "known", "billed") for x in run.spend.lines)


@pytest.mark.parametrize("stream", [False, True])
async def test_c43_no_wait_of_ours_is_a_timeout(stream: bool) -> None:
    """Waits for a throttled provider, for a canary and for money are longer than every timeout."""
    events = events_of(completion(cost=0.0012))
    good = streams(events) if stream else says(completion(cost=0.0012))
    limited = says({"error": {"code": 429, "message": "x"}}, 429, {"Retry-After": "1.2"})
    async with serving(Router(limited, otherwise=good)) as router:
        run = Run(
            router,
            prompts_of(12),
            run={"budget_usd": 0.017},  # one worst case at a time, near the end
            canary=2,
            total_timeout_s=0.8,
            first_event_timeout_s=0.8,
            idle_timeout_s=0.8,
            openrouter={"stream": stream},
        )
        result = await run.go()
    assert result.outcomes == {"ok": 12} and len(router.bodies) == 13
    assert classes(run).count("rate_limited") == 1


QUIET = {
    "comments": b": OPENROUTER PROCESSING\n\n",
    "comments with CRLF": b": OPENROUTER PROCESSING\r\n\r\n",
    "blank lines": b"\n",
    "an event that never ends": b'data: {"id"\n',
    "names without data": b"event: ping\nid: 7\n\n",
}


@pytest.mark.parametrize("what", QUIET)
@pytest.mark.parametrize("begun", [True, False])
async def test_c44_what_is_no_data_is_no_progress(what: str, begun: bool) -> None:
    async def quiet(request: web.Request, router: Router) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        reply.headers["X-Generation-Id"] = "gen-4"
        await reply.prepare(request)
        if begun:
            await reply.write(events_of(completion(id="gen-4"))[0])
        try:
            while True:
                await reply.write(QUIET[what])
                await asyncio.sleep(0.02)
        except (ConnectionResetError, asyncio.CancelledError):
            router.gone += 1
            raise

    router = Router(quiet, streams(events_of(completion(id="gen-5"))))
    router.lookups = {"gen-4": [(200, {"total_cost": 0.0002})]}
    run = await one(router, **STREAM, idle_timeout_s=0.3, first_event_timeout_s=0.4)
    assert classes(run) == ["stream_idle_timeout" if begun else "first_event_timeout", None]
    assert run.check_books() == pytest.approx(0.0012)
    assert router.gone == 1 and run.generator.stats().in_flight == 0


BURST_S = 0.3
"""What arrives in this time after the first is refused."""


def waits(form: str) -> tuple[dict[str, str], dict[str, Any], float]:
    """(headers, error, seconds that nobody may send before)."""
    error: dict[str, Any] = {"code": 429, "message": "x", "metadata": {"provider_name": "Alder"}}
    if form == "seconds":
        return {"Retry-After": "0.6"}, error, 0.6
    if form == "date":
        at = email.utils.formatdate(time.time() + 2, usegmt=True)
        return {"Retry-After": at}, error, 1.0
    if form == "their clock is late":
        now = time.time() - 3_600
        at = email.utils.formatdate(now + 2, usegmt=True)
        return {"Retry-After": at, "Date": email.utils.formatdate(now, usegmt=True)}, error, 1.0
    if form == "body":
        return {}, {**error, "availability": {"retry_after": 0.6}}, 0.6
    if form == "reset":
        return {"X-RateLimit-Reset": str(int((time.time() + 0.8) * 1_000))}, error, 0.6
    return {"Retry-After": {"zero": "0", "words": "soon"}[form]}, error, 1.0


@pytest.mark.parametrize(
    ("form", "status"),
    [
        *((form, 429) for form in ("seconds", "date", "their clock is late", "body", "reset")),
        *((form, 429) for form in ("zero", "words")),
        *((form, 503) for form in ("seconds", "body")),
    ],
)
async def test_c46_a_hundred_workers_wait(form: str, status: int) -> None:
    async def limited(request: web.Request, router: Router) -> web.StreamResponse:
        if router.arrivals[-1] - router.arrivals[0] > BURST_S:
            return await says()(request, router)
        await asyncio.sleep(0.2)  # until all that may leave have left
        headers, error, _ = waits(form)
        body = {"error": {**error, "code": status}}
        return web.json_response(body, status=status, headers=headers)

    async with serving(Router(otherwise=limited)) as router:
        run = Run(router, prompts_of(100), max_in_flight=100, attempts_unpaid=1)
        result = await run.go()
    assert result.outcomes == {"ok": 100}
    first = router.arrivals[0]
    burst = [t for t in router.arrivals if t - first <= BURST_S]
    assert 64 <= len(burst) == len([r for r in run.rollouts if r.error_class])
    assert min(t for t in router.arrivals if t - first > BURST_S) - first >= waits(form)[2] - 0.05
    assert run.check_books() == pytest.approx(0.1)
