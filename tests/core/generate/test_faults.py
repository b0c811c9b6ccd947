"""Public fault reports of kinds c, d and e against the whole generator, each for its whole kind."""

import asyncio
import gzip
import json
import subprocess
import sys
from typing import Any

import pytest
from aiohttp import web

from core import events as ev
from core.generate import landing
from core.limit import Refusals
from core.providers import base
from core.providers.http import FDS_KEPT_BACK
from core.schema import Sample, reply_text
from tests.conftest import SHARED
from tests.core.embedded.serving import until
from tests.core.generate.rig import (
    ALDER,
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
    waits,
)

CASES = SHARED / "cases"
needs_cases = pytest.mark.skipif(not CASES.exists(), reason=f"case files are not at {CASES}")


def case(name: str) -> dict[str, Any]:
    return dict(json.loads((CASES / f"{name}.json").read_text()))


async def one(router: Router, **settings: Any) -> Run:
    async with serving(router):
        run = Run(router, prompts_of(1), judges=really_judges(), **settings)
        await run.go()
    return run


@needs_cases
async def test_c27_missing_finish_is_looked_up_and_asked_once_more() -> None:
    reply = case("C27")["response"]["body"]
    router = Router(otherwise=says(reply))
    router.lookups = {reply["id"]: [(200, {"total_cost": 0.0007})]}
    run = await one(router)
    assert [r.error_class for r in run.rollouts] == ["finish_missing"] * 2
    assert [r.final for r in run.rollouts] == [False, True]
    assert run.check_books() == pytest.approx(0.0014)
    assert {x.kind for x in run.spend.lines} == {"dispatch", "known", "looked_up"}
    assert len(run.outcomes) == 1 and run.outcomes[0].outcome == "rejected"


@needs_cases
async def test_c28_error_in_a_200_waits_and_costs_nothing() -> None:
    limited = case("C28")["response"]["body"]
    router = Router(says(limited, headers={"Retry-After": "0.2"}))
    run = await one(router)
    first, second = run.rollouts
    assert (first.outcome, first.error_class, first.final) == ("failed", "rate_limited", False)
    assert first.reply_raw and json.loads(first.reply_raw) == limited
    assert second.final and run.outcomes[0].outcome == "ok"
    assert run.check_books() == pytest.approx(0.001)
    assert router.arrivals[1] - router.arrivals[0] >= 0.2


@needs_cases
async def test_c30_empty_choices_are_paid_once_and_asked_once_more() -> None:
    empty = case("C30")["response"]["body"]
    run = await one(Router(otherwise=says(empty)))
    assert [r.error_class for r in run.rollouts] == ["empty_choices"] * 2
    assert run.check_books() == pytest.approx(2 * 0.00025)
    assert run.outcomes[0].outcome == "failed" and not run.samples


@needs_cases
async def test_c32_a_truncated_reply_is_data_and_not_asked_again() -> None:
    run = await one(Router(otherwise=says(case("C32")["response"]["body"])))
    assert [r.error_class for r in run.rollouts] == ["truncated_length"]
    assert run.check_books() == pytest.approx(0.0004)
    (row,) = run.of(ev.Stats)[-1].errors  # what to open, where nothing was said
    assert (row.error_class, row.example) == ("truncated_length", "prompt p0")


@needs_cases
@pytest.mark.parametrize(
    ("name", "error_class"), [("truncated", "body_truncated"), ("html", "body_not_json")]
)
async def test_c34_cut_and_foreign_bodies_are_kept_and_settled_before_the_retry(
    name: str, error_class: str
) -> None:
    raw = (CASES / f"C34.{name}.txt").read_bytes()
    router = Router(says(raw))
    router.lookups = {"gen-3": [(404, None), (200, {"total_cost": 0.0002})]}
    run = await one(router)
    first, second = run.rollouts
    assert (first.error_class, first.reply_raw) == (error_class, raw.decode())
    assert second.outcome == "ok"
    kinds = [x.kind for x in run.spend.lines]
    settled = kinds.index("looked_up" if name == "truncated" else "uncertain")
    assert settled < [i for i, kind in enumerate(kinds) if kind == "dispatch"][1]
    assert ("gen-3" in router.looked_up) == (name == "truncated")


@needs_cases
async def test_c36_usage_is_recovered_by_look_up_and_booked_once() -> None:
    what = case("C36")
    reply = what["response"]["body"]
    router = Router(says(reply))
    rows = what["generation_lookup"]
    router.lookups = {reply["id"]: [(r["status"], r.get("body", {}).get("data")) for r in rows]}
    run = await one(router)
    assert len(router.looked_up) == what["expect"]["lookups"]
    assert run.check_books() == pytest.approx(what["expect"]["cost_booked"])
    rollout = run.rollouts[0]
    assert rollout.usage.completion_tokens == 6 and rollout.bill == "looked_up"
    assert run.samples[0].billed_tokens == 6


@needs_cases
async def test_c36_never_found_is_the_worst_case_and_never_zero() -> None:
    run = await one(Router(says(case("C36")["response"]["body"])))
    closing = run.spend.lines[-1]
    assert closing.kind == "uncertain"
    assert closing.cost_usd == pytest.approx(run.spend.lines[0].reserve_usd)
    assert run.samples[0].verdict == "unverifiable"


@pytest.mark.parametrize("then", ["cut", "end"])
async def test_c38_a_connection_that_died_after_the_headers(then: str) -> None:
    """Two attempts, never at once, each booked once."""
    died = streams([], headers={"X-Generation-Id": "gen-10"}, then=then)
    router = Router(died, says(completion(cost=0.0009, id="gen-11")))
    router.lookups = {"gen-10": [(200, {"total_cost": 0.0008})]}
    run = await one(router)
    assert len(router.bodies) == 2 and router.peak == 1
    assert run.check_books() == pytest.approx(0.0017)
    assert [o.outcome for o in run.outcomes] == ["ok"]


async def test_c38_before_the_headers_a_retry_is_free() -> None:
    router = Router(resets())
    run = await one(router)
    assert run.rollouts[0].error_class == "connection_lost"
    assert run.check_books() == pytest.approx(0.001)
    assert not router.looked_up


@pytest.mark.parametrize("status", [400, 403, 413, 422])
async def test_c38_deterministic_refusals_are_not_retried(status: int) -> None:
    body = {"error": {"code": status, "message": "no", "metadata": {"reasons": ["x"]}}}
    router = Router(otherwise=says(body, status))
    run = await one(router)
    assert len(router.bodies) == 1 and run.outcomes[0].outcome == "failed"
    assert run.check_books() == 0


@pytest.mark.parametrize(
    ("usage", "known"),
    [
        ({"cost": None}, None),
        ({"cost": "0.25"}, None),
        ({"cost": -1}, None),
        ({"cost": float("nan")}, None),
        ({"cost": 2.0**53}, None),
        ({"cost": 0, "is_byok": True, "cost_details": {"upstream_inference_cost": 0.0042}}, 0.0),
        ({"cost": 0.0003}, 0.0003),
    ],
)
async def test_c40_costs(usage: dict[str, Any], known: float | None) -> None:
    raw = json.dumps(completion(usage={"prompt_tokens": 20, "completion_tokens": 6, **usage}))
    run = await one(Router(says(raw.encode(), headers={"Content-Type": "application/json"})))
    closing = run.spend.lines[-1]
    if known is None:
        assert closing.kind == "uncertain" and closing.cost_usd > 0.00128
    else:
        assert (closing.kind, closing.cost_usd) == ("billed", known)
    if known == 0.0:
        assert closing.cap_usd == 0.0042


def test_c41_the_window_is_capped_by_descriptors() -> None:
    """In a process of its own: limits cannot be raised again."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256));"
        "from core.providers.http import raise_fd_limit; print(raise_fd_limit())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) == 256 - FDS_KEPT_BACK == 192


async def test_c41_the_cap_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.generate.dispatch.raise_fd_limit", lambda: 3)
    async with serving(Router()) as router:
        run = Run(router, prompts_of(12), max_in_flight=5_000)
        await run.go()
    assert router.peak <= 3
    assert any("concurrency_capped_by_nofile" in e.message for e in run.of(_log()))


async def test_c41_running_out_of_descriptors_fails_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from core.providers.openrouter import OpenRouter

    complete = OpenRouter.complete
    out = [0]

    async def sometimes(
        self: OpenRouter, request: base.CompletionRequest, flight: base.Flight
    ) -> base.Reply:
        if out[0] < 5:
            out[0] += 1
            return base.Reply(request={}, failure=base.LocalEmfile("too many open files"))
        return await complete(self, request, flight)

    monkeypatch.setattr(OpenRouter, "complete", sometimes)
    async with serving(Router()) as router:
        run = Run(router, prompts_of(20), attempts_unpaid=1)
        result = await run.go()
    assert result.outcomes == {"ok": 20}
    assert run.check_books() == pytest.approx(0.02)
    assert run.of(_stats())[-1].providers[0].limit < 8


async def test_c43_waiting_for_a_slot_is_no_timeout() -> None:
    """The queue takes longer than any timeout; no request does."""

    async def slow(request: Any, router: Router) -> Any:
        await asyncio.sleep(0.15)
        return await says()(request, router)

    async with serving(Router(otherwise=slow)) as router:
        run = Run(
            router, prompts_of(60), max_in_flight=4, first_event_timeout_s=1.5, total_timeout_s=1.5
        )
        result = await run.go()
    assert result.outcomes == {"ok": 60} and len(router.bodies) == 60
    assert router.peak <= 4
    assert router.arrivals[-1] - router.arrivals[0] > 1.5


async def test_c44_a_stream_that_only_sends_comments_is_idle() -> None:
    """Comments do not reset the clock; the slot is freed, the bill looked up, the prompt asked
    again."""
    head = events_of(completion(id="gen-4"))[:1]
    router = Router(streams(head, then="wait"), streams(events_of(completion(id="gen-5"))))
    router.lookups = {"gen-4": [(200, {"total_cost": 0.0002})]}
    run = await one(
        router, openrouter={"stream": True}, idle_timeout_s=0.3, first_event_timeout_s=5.0
    )
    assert run.rollouts[0].error_class == "stream_idle_timeout"
    assert "OPENROUTER PROCESSING" in (reply_text(run.rollouts[0]) or "")
    assert run.outcomes[0].outcome == "ok"
    assert run.check_books() == pytest.approx(0.0012)
    assert router.gone == 1


async def test_c44_a_stream_that_never_begins_has_its_own_clock() -> None:
    router = Router(streams([], then="wait"), streams(events_of(completion())))
    run = await one(
        router, openrouter={"stream": True}, first_event_timeout_s=0.3, idle_timeout_s=5.0
    )
    assert run.rollouts[0].error_class == "first_event_timeout"
    assert run.outcomes[0].outcome == "ok"


async def test_c44_slow_but_steady_streams_are_left_alone() -> None:
    events = events_of(completion(content="word " * 12), parts=12)

    async def steady(request: Any, router: Router) -> Any:
        from aiohttp import web

        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for event in events:
            await reply.write(event)
            await asyncio.sleep(0.1)
        return reply

    run = await one(Router(steady), openrouter={"stream": True}, idle_timeout_s=0.8)
    assert [r.outcome for r in run.rollouts] == ["ok"]


@pytest.mark.parametrize("header", ["0.4", None])
async def test_c46_nobody_sends_before_the_wait_is_over(header: str | None) -> None:
    headers = {"Retry-After": header} if header else {}
    limited = says({"error": {"code": 429, "metadata": {"provider_name": "A"}}}, 429, headers)
    async with serving(Router(*[limited] * 8)) as router:
        run = Run(router, prompts_of(24), attempts_unpaid=1)
        result = await run.go()
    assert result.outcomes == {"ok": 24}  # 429s use up no attempt, or one would have been too many
    first = router.arrivals[:8]
    assert min(router.arrivals[8:]) - max(first) >= (0.4 if header else 1.0)
    assert run.check_books() == pytest.approx(0.024)


async def test_a_platform_limit_holds_every_provider() -> None:
    limited = says({"error": {"code": 429, "message": "slow"}}, 429, {"Retry-After": "0.4"})
    router = Router(limited)
    router.endpoints = [ALDER, {**ALDER, "tag": "birch", "provider_name": "Birch"}]
    async with serving(router):
        run = Run(router, prompts_of(4), max_in_flight=1)
        await run.go()
    assert router.arrivals[1] - router.arrivals[0] >= 0.4


async def test_402_lowers_the_window_and_gives_up_only_when_alone() -> None:
    """Money comes back as replies end: nothing is lost while others are in flight."""
    broke = says({"error": {"code": 402, "message": "can only afford 30104"}}, 402)
    async with serving(Router(says(), broke, otherwise=says())) as router:
        run = Run(router, prompts_of(6), max_in_flight=2, attempts_unpaid=1)
        result = await run.go()
        assert result.outcomes == {"ok": 6}
        router.otherwise = broke
        router.script = []
        result = await (poor := Run(router, prompts_of(3), max_in_flight=1)).go()
    assert result.reason == "stopped" and result.pending == 3
    assert "credits do not cover" in result.detail
    assert poor.check_books() == 0


async def test_402_waits_as_long_as_it_says() -> None:
    broke = says({"error": {"code": 402, "message": "no"}}, 402, {"Retry-After": "900"})
    async with serving(Router(waits(), broke, otherwise=waits())) as router:
        run = Run(router, prompts_of(3), max_in_flight=2)
        task = asyncio.create_task(run.go())
        await run.spend.until(3)  # two dispatches, one of them refused
        (row,) = run.generator.stats().providers
        run.generator.halt("test", "")
        router.release.set()
        await task
    assert 800 < row.backoff_s <= 900 and len(router.bodies) == 2


async def test_a_key_that_is_revoked_stops_and_leaves_the_rest_pending() -> None:
    async with serving(Router(says(), otherwise=says(b"", 401))) as router:
        run = Run(router, prompts_of(10), max_in_flight=1)
        result = await run.go()
    assert result.reason == "stopped" and "key refused" in result.detail
    assert result.outcomes == {"ok": 1} and result.pending == 9


@pytest.mark.parametrize("status", [403, 404])
async def test_a_provider_that_refuses_everything_is_stopped(status: int) -> None:
    async with serving(Router(says(), otherwise=says(b"", status))) as router:
        run = Run(router, prompts_of(10), max_in_flight=1)
        result = await run.go()
    assert result.reason == "stopped" and result.pending == 9 and len(router.bodies) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_that_come_before_the_first_answers_stop_nobody(stream: bool) -> None:
    """A refusal comes at once, an answer in its time: at the start every reply there is may be
    one."""
    refused = says(b"", 403)
    answer = streams(events_of(completion())) if stream else says()
    router = Router(*[waits(answer)] * 2, *[refused] * 6, *[waits(answer)] * 4, otherwise=answer)
    async with serving(router):
        run = Run(router, prompts_of(12), max_in_flight=8, openrouter={"stream": stream})
        going = asyncio.create_task(run.go())
        await router.until(lambda r: r.held >= 2)
        await run.completions.until(6)
        sent = len(router.bodies)
        router.release.set()
        result = await going
    assert (result.reason, result.outcomes) == ("", {"ok": 12})
    assert 8 <= sent <= 10, "with three refusals nothing more leaves before somebody answers"
    assert run.check_books() == pytest.approx(0.012)


@pytest.mark.parametrize(("cost", "bill"), [(0.0003, "looked_up"), (None, "free")])
async def test_a_limit_that_is_hit_in_the_middle_of_a_stream_is_looked_up(
    cost: float | None, bill: str
) -> None:
    """Something was sampled; where nobody knows a bill, it is insured."""
    error = {"code": 429, "message": "slow down", "availability": {"retry_after": 0.01}}
    end = b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
    router = Router(
        streams([*events_of(completion(id="gen-5"))[:3], end]),
        otherwise=streams(events_of(completion())),
    )
    if cost is not None:
        router.lookups = {"gen-5": [(200, {"total_cost": cost})]}
    run = await one(router, openrouter={"stream": True})
    assert router.looked_up[0] == "gen-5"
    assert [(r.outcome, r.error_class, r.bill) for r in run.rollouts] == [
        ("failed", "rate_limited", bill),
        ("ok", None, "billed"),
    ]
    assert run.check_books() == pytest.approx(0.001 + (cost or 0.0))


async def test_limits_that_are_hit_in_the_middle_are_not_paid_for_without_end() -> None:
    error = {"code": 429, "message": "slow down", "availability": {"retry_after": 0.01}}
    end = b"data: " + json.dumps({"error": error, **completion()}).encode() + b"\n\n"
    cut = streams([*events_of(completion())[:3], end])
    router = Router(*[cut] * 4, otherwise=streams(events_of(completion())))
    run = await one(router, openrouter={"stream": True}, attempts_paid=3)
    assert len(router.bodies) == 3 and run.outcomes[0].error_class == "rate_limited"
    assert run.check_books() == pytest.approx(0.003)


async def test_a_stream_that_has_begun_clears_its_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end may be minutes away."""
    monkeypatch.setattr(landing, "backoff_s", lambda *_: 0.0)
    begun = streams(events_of(completion())[:1], then="wait")

    async def refused(request: web.Request, router: Router) -> web.StreamResponse:
        return await (says() if router.release.is_set() else says(b"", 404))(request, router)

    async with serving(Router(waits(begun), otherwise=refused)) as router:
        run = Run(router, prompts_of(7), max_in_flight=5, openrouter={"stream": True})
        going = asyncio.create_task(run.go())

        async def doubted() -> bool:
            lanes = run.generator._lanes
            return bool(lanes) and lanes[0].refusals.in_doubt and lanes[0].limit.in_flight == 1

        await until(doubted)
        router.release.set()

        async def answered() -> bool:
            return sum(r.outcome == "ok" for r in run.rollouts) == 6

        await until(answered)
        run.generator.sever()
        result = await going
    assert result.outcomes == {"ok": 6, "aborted": 1}


async def test_streams_that_began_before_a_model_was_withdrawn_clear_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They go on to their ends; whoever is asked now is refused."""
    monkeypatch.setattr(Refusals, "TOGETHER_S", 0.0)
    old = streams(events_of(completion(), parts=40), pause_s=0.02)
    router = Router(old, old, otherwise=says(b"", 404))
    async with serving(router):
        run = Run(router, prompts_of(60), max_in_flight=8, openrouter={"stream": True})
        result = await run.go()
    assert result.reason == "stopped" and "not_served" in result.detail
    assert result.outcomes == {"ok": 2} and result.pending == 58
    assert len(router.bodies) < 20


async def test_a_prompt_that_nobody_serves_stops_nobody() -> None:
    router = Router(otherwise=says(b"", 403))
    run = await one(router, attempts_unpaid=4)
    assert len(router.bodies) == 4
    assert [o.error_class for o in run.outcomes] == ["forbidden"] and run.check_books() == 0


async def test_server_errors_end_after_their_attempts() -> None:
    router = Router(otherwise=says(b"", 500))
    run = await one(router, attempts_unpaid=2)
    assert len(router.bodies) == 2
    assert run.outcomes[0].error_class == "server_error" and run.check_books() == 0


async def test_an_error_in_mid_stream_is_free_when_no_bill_is_found() -> None:
    head = events_of(completion())[:2]
    bad = {"error": {"code": 502, "message": "x"}, "choices": [{"finish_reason": "error"}]}
    router = Router(
        streams([*head, b"data: " + json.dumps(bad).encode() + b"\n\n"]),
        streams(events_of(completion(id="gen-2"))),
    )
    run = await one(router, openrouter={"stream": True})
    assert run.rollouts[0].error_class == "upstream_error_midstream"
    assert run.check_books() == pytest.approx(0.001)


def _log() -> Any:
    from core.events import Log

    return Log


def _stats() -> Any:
    from core.events import Stats

    return Stats


DEEP = b'{"choices": ' + b"[" * 5_000 + b"]" * 5_000 + b"}"
HUGE = {"prompt_tokens": 10**400, "completion_tokens": 1e300, "cost": 1e300}


@pytest.mark.parametrize(
    ("answer", "error_class"),
    [
        (says(DEEP), "body_too_deep"),
        (streams([b"data: " + DEEP + b"\n\n", b"data: [DONE]\n\n"]), "body_too_deep"),
        (says(completion(usage=HUGE)), None),
    ],
)
async def test_a_hostile_body_is_data_and_stops_nothing(
    answer: Any, error_class: str | None
) -> None:
    router = Router(answer)
    router.lookups = {"gen-1": [(200, {"total_cost": 0.002})]}
    async with serving(router):
        run = Run(router, prompts_of(2), judges=really_judges(), max_in_flight=1)
        result = await run.go()
    assert result.reason == ""
    classes = {r.prompt_id: r.error_class for r in run.rollouts}  # stored as they are settled
    assert classes == {"p0": error_class, "p1": None}
    assert len(run.rollouts) == 2 and all(r.final for r in run.rollouts)
    assert 0 < run.check_books() < 1


@pytest.mark.parametrize("status", [429, 500])
async def test_a_provider_that_never_answers_is_given_up(status: int) -> None:
    """Without an end, the probes of an open breaker would go on for days."""
    router = Router(otherwise=says({"error": {"code": status, "message": "no"}}, status))
    async with serving(router):
        run = Run(router, prompts_of(3), attempts_unpaid=50, patience_s=1e-9)
        result = await run.go()
    assert (result.reason, result.pending, len(run.outcomes)) == ("stopped", 3, 0)
    assert any("no answer for" in e.message for e in run.of(ev.Log))
    assert run.check_books() == 0


async def test_a_backend_that_never_answered_is_given_up_at_the_start() -> None:
    """Every lane of it at once, in one line that names the failure; an answer makes it wait."""
    dead = says({"error": {"code": 500, "message": "no model loaded"}}, 500)
    router = Router(otherwise=dead)
    router.endpoints = [ALDER, {**ALDER, "provider_name": "Birch", "tag": "birch"}]
    settings: dict[str, Any] = {"attempts_unpaid": 2, "patience_at_start_s": 1e-9}
    async with serving(router):
        run = Run(router, prompts_of(40), **settings)
        result = await run.go()
        assert result.reason == "stopped" and result.pending > 0
        assert "not one answer in 0 s" in result.detail and "no model loaded" in result.detail
        assert "alder" in result.detail and "birch" in result.detail
        router.script = [says(completion())]
        again = Run(router, prompts_of(3), max_in_flight=1, **settings)
        result = await again.go()
    assert (result.reason, result.outcomes) == ("", {"ok": 1, "failed": 2})


async def test_one_answer_renews_the_patience() -> None:
    """Failures with an answer between them are no silence."""
    answer, failure = says(completion()), says({"error": {"code": 500, "message": "no"}}, 500)
    router = Router(failure, answer, failure, answer)
    async with serving(router):
        run = Run(router, prompts_of(2), max_in_flight=1, patience_s=1e-9)
        result = await run.go()
    assert (result.reason, result.pending) == ("", 0)
    assert len(router.bodies) == 4


@pytest.mark.parametrize("shape", ["json", "lines", "one line", "gzip"])
async def test_a_reply_without_end_is_read_no_further_and_its_bill_is_looked_up(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "LEAST_LIMIT_BYTES", 200_000)
    monkeypatch.setattr(base, "KEPT_OF_TOO_LARGE", 1_000)
    head = b'{"id":"gen-big","provider":"Alder","choices":[{"index":0,"delta":{"content":"'
    event = b"data: " + head + b'x"}}]}\n\n'
    if shape == "json":
        large = says(head + b"x" * 4_000_000)
    elif shape == "gzip":
        packed = gzip.compress(head + b"x" * 4_000_000)
        large = says(packed, headers={"Content-Encoding": "gzip"})
    else:
        large = streams([event, *[event * 40_000 if shape == "lines" else b"x" * 4_000_000]])
    router = Router(large)
    router.lookups = {"gen-big": [(200, {"total_cost": 0.0003})]}
    run = await one(router)
    first, second = run.rollouts
    assert (first.outcome, first.error_class) == ("failed", "reply_too_large")
    assert (first.bill, first.usage.cost_usd) == ("looked_up", 0.0003)
    assert len(reply_text(first) or "") == 1_000
    assert second.outcome == "ok"
    assert run.check_books() == pytest.approx(0.0013)


async def test_a_head_that_cannot_be_read_may_have_been_paid_for() -> None:
    run = await one(Router(says(b"{}", headers={"X-Long": "y" * 100_000})))
    first, second = run.rollouts
    assert (first.error_class, first.bill) == ("connection_lost", "uncertain")
    assert second.outcome == "ok"


async def test_a_name_of_a_megabyte_is_no_name() -> None:
    long = "n" * 1_000_000
    run = await one(Router(says(completion(id=long, provider=long, model=long))))
    (rollout,) = run.rollouts
    assert (rollout.provider, rollout.model, rollout.generation_id) == ("alder", None, None)
    assert rollout.outcome == "ok"


async def test_a_reply_that_our_judge_breaks_on_is_kept_and_booked() -> None:
    def breaks(*_: Any) -> Sample:
        raise AttributeError("a defect of ours")

    router = Router()
    async with serving(router):
        run = Run(router, prompts_of(1), judges=breaks)
        with pytest.raises(AttributeError, match="a defect of ours"):
            await run.go()
    (rollout,) = run.rollouts
    assert (rollout.outcome, rollout.error_class, rollout.final) == ("aborted", "not_judged", False)
    assert json.loads(reply_text(rollout) or "") == completion()
    assert run.check_books() == pytest.approx(0.001)
    assert not run.outcomes
