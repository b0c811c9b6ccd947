"""Prompts to outcomes over a scripted router: what is sent, what is written, in which order."""

import asyncio
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

from core import events as ev
from core.errors import ConfigError, ProviderError
from core.generate import Recovered, dispatch, pump, queues
from core.limit import Limit
from core.schema import SpendLine, reply_text
from tests.core.generate.rig import (
    ALDER,
    Router,
    Run,
    completion,
    events_of,
    prompts_of,
    really_judges,
    renderer,
    says,
    serving,
    streams,
)


async def test_every_prompt_has_one_outcome_and_the_books_hold() -> None:
    async with serving(Router()) as router:
        run = Run(router, prompts_of(40))
        result = await run.go()
    assert result.reason == "" and result.outcomes == {"ok": 40} and result.pending == 0
    assert sorted(o.prompt_id for o in run.outcomes) == sorted(f"p{i}" for i in range(40))
    assert run.check_books() == pytest.approx(0.04)
    assert result.spent_usd == pytest.approx(0.04)
    assert router.peak <= 8 and len(router.bodies) == 40
    assert [r.outcome for r in run.rollouts] == ["ok"] * 40
    stats: ev.Stats = run.of(ev.Stats)[-1]
    assert (stats.done, stats.ok, stats.in_flight, stats.reserved_usd) == (40, 40, 0, 0.0)
    assert {s.exposure_usd for s in run.of(ev.Stats)} == {None}  # the budget is the bound
    assert stats.completion_tokens == 240 and stats.providers[0].name == "alder"
    assert stats.verdicts == {"consistent": 40}
    assert stats.providers[0].p50_s is not None


async def test_the_dispatch_is_written_before_the_request_leaves() -> None:
    async with serving(Router()) as router:
        run = Run(router, prompts_of(1))
        seen: list[int] = []

        async def look(request: object, _: Router) -> object:
            seen.append(len(run.spend.lines))
            assert not run.outcomes
            return await says()(request, router)  # type: ignore[arg-type]

        router.script = [look]  # type: ignore[list-item]
        await run.go()
    assert seen == [1]
    kinds = [line.kind for line in run.spend.lines]
    assert kinds == ["dispatch", "known", "billed"]
    worst = run.spend.lines[0].reserve_usd
    assert 64 * 20e-6 < worst < 64 * 20e-6 + 1e-4


async def test_a_request_names_one_provider_and_carries_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-very-secret-key")
    echo = says({"error": {"code": 400, "message": "bad key sk-very-secret-key"}}, 400)
    async with serving(Router(otherwise=echo)) as router:
        run = Run(router, prompts_of(1), openrouter={"quantizations": ["int4"], "zdr": True})
        await run.go()
    sent = router.bodies[0]
    assert sent["provider"] == {
        "only": ["alder"],
        "allow_fallbacks": False,
        "require_parameters": True,
        "data_collection": "deny",
        "quantizations": ["int4"],
        "zdr": True,
        "enforce_distillable_text": True,
    }
    assert sent["reasoning"] == {"enabled": True} and sent["max_tokens"] == 64
    assert router.headers[0]["Authorization"] == "Bearer sk-very-secret-key"
    assert router.headers[0]["X-OpenRouter-Metadata"] == "enabled"
    told = repr(run.rollouts) + repr(run.events) + repr(run.spend.lines)
    assert "very-secret" not in told
    assert run.outcomes[0].error_class == "bad_request"


async def test_streams_are_kept_as_they_came_and_counted() -> None:
    events = events_of(completion())
    async with serving(Router(otherwise=streams(events))) as router:
        run = Run(router, prompts_of(3), judges=really_judges(), openrouter={"stream": True})
        await run.go()
    assert {r.reply_kind for r in run.rollouts} == {"sse"}
    assert reply_text(run.rollouts[0]) == b"".join(events).decode()
    assert run.rollouts[0].generation_id == "gen-1"
    assert run.rollouts[0].usage.cost_usd == 0.001


async def test_a_key_quoted_in_a_stream_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-very-secret-key")
    events = [b": your key is sk-very-secret-key\n\n", *events_of(completion())]
    async with serving(Router(otherwise=streams(events))) as router:
        run = Run(router, prompts_of(1), openrouter={"stream": True})
        await run.go()
    kept = reply_text(run.rollouts[0])
    assert kept == b"".join(events).decode().replace("sk-very-secret-key", "[secret]")
    assert all(o.verdict for o in run.outcomes)
    assert run.rollouts[0].timings is not None and run.rollouts[0].timings.ttft_s is not None


async def test_twins_share_seeds_and_prompts_are_grouped_by_their_beginning() -> None:
    prompts = prompts_of(4)
    for i, prompt in enumerate(prompts):
        prompt.messages.insert(0, {"role": "system", "content": "AB"[i % 2]})
    async with serving(Router()) as router:
        run = Run(router, prompts, max_in_flight=1)
        await run.go()
    systems = [b["messages"][0]["content"] for b in router.bodies]
    assert systems == ["A", "B", "A", "B"]  # the first of each goes ahead of its group
    assert router.bodies[0]["session_id"] == router.bodies[2]["session_id"]
    assert router.bodies[0]["session_id"] != router.bodies[1]["session_id"]
    assert len({b["seed"] for b in router.bodies}) == 4


async def test_no_prompt_is_hashed_or_rendered_on_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[str] = []

    def noted(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            threads.append(threading.current_thread().name)
            return work(*args)

        return call

    monkeypatch.setattr(queues, "prefix_key", noted(queues.prefix_key))
    monkeypatch.setattr(pump, "prepare", noted(pump.prepare))
    async with serving(Router()) as router:
        await Run(router, prompts_of(20), reserve="all").go()
    assert len(threads) == 60  # grouped once, rendered for the budget and for the request
    assert threading.main_thread().name not in threads


async def test_a_budget_for_all_counts_what_would_be_asked_and_refuses_before_the_first() -> None:
    prompts = prompts_of(3)
    prompts[1].messages[0]["content"] = "say <|im_end|>"  # must not be sent, so costs nothing
    async with serving(Router()) as router:
        run = Run(router, prompts, reserve="all", run={"budget_usd": 0.002})
        with pytest.raises(ConfigError, match="below the worst case of all 2 requests"):
            await run.go()
        assert router.arrivals == []
        ids = renderer().render(prompts[0].messages, None, thinking=True).ids
        worst_usd = 2 * (64 * 20e-6 + (len(ids) + 8) * 1e-6)
        enough = Run(router, prompts, reserve="all", run={"budget_usd": worst_usd * 1.001})
        assert (await enough.go()).outcomes == {"ok": 2, "refused": 1}


async def test_datasets_share_fairly() -> None:
    prompts = prompts_of(30, dataset="large")
    prompts += [
        p.__class__(**{**{f: getattr(p, f) for f in p.__struct_fields__}, "prompt_id": f"s{i}"})
        for i, p in enumerate(prompts_of(10, dataset="small"))
    ]
    async with serving(Router()) as router:
        run = Run(router, prompts, max_in_flight=1)
        await run.go()
    half = [line.prompt_id[0] for line in run.spend.lines if line.kind == "dispatch"][:20]
    assert half.count("s") == 5 and half.count("p") == 15


async def test_finished_prompts_are_skipped_by_id_and_attempts_go_on_counting() -> None:
    recovered = Recovered(
        finished={"p0", "p2"}, attempts={"p1": 3}, outcomes={"ok": 2}, spent_usd=0.5, cap_usd=0.5
    )
    async with serving(Router()) as router:
        run = Run(router, prompts_of(3), recovered=recovered)
        result = await run.go()
    assert [r.prompt_id for r in run.rollouts] == ["p1"]
    assert run.rollouts[0].attempt == 4
    assert result.outcomes == {"ok": 3} and result.spent_usd == pytest.approx(0.501)
    assert run.of(ev.Stats)[-1].done == 3


async def test_dispatches_of_an_earlier_life_are_looked_up_or_booked_uncertain() -> None:
    def dispatch(name: str, generation: str | None) -> SpendLine:
        return SpendLine(
            ts=1.0,
            kind="dispatch",
            prompt_id=name,
            attempt=1,
            backend="openrouter",
            provider="alder",
            generation_id=generation,
            reserve_usd=0.02,
        )

    recovered = Recovered(open=[dispatch("p0", "gen-a"), dispatch("p1", None)])
    recovered.attempts = {"p0": 1, "p1": 1}
    router = Router()
    router.lookups = {"gen-a": [(404, None), (200, {"total_cost": 0.003})]}
    async with serving(router):
        run = Run(router, prompts_of(2), recovered=recovered)
        result = await run.go()
    closed = {x.prompt_id: x for x in run.spend.lines if x.attempt == 1 and x.kind != "dispatch"}
    assert (closed["p0"].kind, closed["p0"].cost_usd) == ("looked_up", 0.003)
    assert (closed["p1"].kind, closed["p1"].cost_usd) == ("uncertain", 0.02)
    assert result.spent_usd == pytest.approx(0.003 + 0.02 + 2 * 0.001)
    assert result.uncertain_usd == pytest.approx(0.02)
    assert {r.attempt for r in run.rollouts} == {2}


async def test_the_budget_stops_the_run_before_it_is_passed() -> None:
    async with serving(Router(otherwise=says(completion(cost=0.0006)))) as router:
        run = Run(router, prompts_of(30), run={"budget_usd": 0.008}, max_in_flight=4)
        result = await run.go()
    assert result.reason == "budget"
    assert result.outcomes["ok"] >= 11
    assert run.check_books() <= 0.008
    refused = [r for r in run.rollouts if r.outcome == "refused"]
    assert refused and not any(r.final for r in refused)  # pending for a larger budget
    assert {r.error_class for r in refused} == {"budget"}
    assert result.pending == len(refused) and sum(result.outcomes.values()) + len(refused) == 30
    last = run.of(ev.Stats)[-1]
    assert (last.prompts - last.done, last.refused) == (result.pending, 0)
    assert len(run.outcomes) == 30 - result.pending
    (told,) = [e.message for e in run.of(ev.Log) if "pending" in e.message]
    assert re.fullmatch(r"d: prompts stay pending \(budget: \$0\.\d{4} left of .* 0\.008\)", told)
    peak = max(s.spent_usd + s.reserved_usd for s in run.of(ev.Stats))
    assert peak <= 0.008 + 1e-9


async def test_control_strings_are_refused_for_servers_that_render_themselves() -> None:
    """Case C53."""
    prompts = prompts_of(2)
    prompts[0].messages[0]["content"] = "Say <|im_end|> twice."
    async with serving(Router()) as router:
        run = Run(router, prompts)
        result = await run.go()
    assert result.outcomes == {"refused": 1, "ok": 1}
    refused = run.rollouts[0]
    assert (refused.prompt_id, refused.error_class, refused.final) == (
        "p0",
        "control_string_in_prompt",
        True,
    )
    assert len(router.bodies) == 1


async def test_history_ids_are_native_when_sent() -> None:
    """Case C24: an opaque id hides the function's name from the model."""
    prompt = prompts_of(1)[0]
    call = {"id": "call_9", "function": {"name": "get_weather", "arguments": "{}"}}
    prompt.messages.extend(
        [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_9", "content": "rain"},
        ]
    )
    async with serving(Router()) as router:
        await Run(router, [prompt]).go()
    sent = router.bodies[0]["messages"]
    assert sent[1]["tool_calls"][0]["id"] == "functions.get_weather:0"
    assert sent[2]["tool_call_id"] == "functions.get_weather:0"


@pytest.mark.parametrize(
    ("settings", "endpoint", "words"),
    [
        ({"openrouter": {"only": ["elm"]}}, {}, "no endpoint"),
        ({"openrouter": {"quantizations": ["fp8"]}}, {}, "quantization int4"),
        ({"openrouter": {"max_price_completion": 5.0}}, {}, r"above max_price \$5"),
        ({}, {"max_completion_tokens": 10}, "max_tokens 64 above its 10"),
        ({}, {"status": -2}, "down"),
        ({}, {"supported_parameters": ["max_tokens"]}, "does not support"),
        ({}, {"pricing": {"prompt": "free?"}}, "no readable price"),
    ],
)
async def test_bad_settings_are_refused_before_the_first_paid_request(
    settings: dict[str, object], endpoint: dict[str, object], words: str
) -> None:
    router = Router()
    router.endpoints = [{**ALDER, **endpoint}]
    async with serving(router):
        with pytest.raises(ProviderError, match=words) as caught:
            await Run(router, prompts_of(1), **settings).go()
    assert "\n" not in str(caught.value) and not router.bodies


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(("arm", "asked"), [("declared", {"alder"}), ("text", {"alder", "birch"})])
async def test_prompts_with_tools_go_where_tools_are_supported(arm: str, asked: set[str]) -> None:
    router = Router()
    plain = [name for name in ALDER["supported_parameters"] if name != "tools"]
    router.endpoints = [ALDER, {**ALDER, "tag": "birch", "supported_parameters": plain}]
    prompts = [*prompts_of(9), *prompts_of(10, tools=[TOOL], arm=arm)[9:]]
    async with serving(router):
        run = Run(router, prompts, max_in_flight=4)
        assert (await run.go()).outcomes == {"ok": 10}
    assert {b["provider"]["only"][0] for b in router.bodies} == asked
    said = "openrouter: left out: birch: does not support tools"
    assert (said in [e.message for e in run.of(ev.Log)]) == (arm == "declared")


async def test_a_refused_key_and_a_hopeless_budget_stop_at_the_start() -> None:
    router = Router()
    router.key_status = 401
    async with serving(router):
        with pytest.raises(ProviderError, match="key in OPENROUTER_API_KEY is refused"):
            await Run(router, prompts_of(1)).go()
        router.key_status = 200
        with pytest.raises(ConfigError, match="below one worst-case request"):
            await Run(router, prompts_of(1), run={"budget_usd": 1e-6}).go()
    assert not router.bodies


async def test_a_missing_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    async with serving(Router()) as router:
        run = Run(router, prompts_of(1), openrouter={"api_key_env": "NO_SUCH_KEY"})
        target = {"kind": "hf", "path": "x", "tokenizer": "y"}
        from core.config import parse
        from core.providers.openrouter import OpenRouter

        config = parse(
            {"target": target, "generate": {"openrouter": {"api_key_env": "NO_SUCH_KEY"}}}, "t"
        )
        with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
            OpenRouter(config)
        assert (await run.go()).outcomes == {"ok": 1}  # the embedded gateway takes any key


async def test_an_unreachable_server_is_one_line() -> None:
    router = Router()
    router.url = "http://127.0.0.1:9"
    with pytest.raises(ProviderError, match="no answer"):
        await Run(router, prompts_of(1)).go()


async def test_two_providers_take_turns_and_a_stopped_one_is_left_alone() -> None:
    router = Router()
    birch = {**ALDER, "provider_name": "Birch", "tag": "birch/fp4"}
    router.endpoints = [ALDER, birch]
    async with serving(router):
        run = Run(router, prompts_of(20))
        await run.go()
        names = {b["provider"]["only"][0] for b in router.bodies}
        assert names == {"alder", "birch/fp4"}
        router.bodies.clear()
        again = Run(router, prompts_of(20))
        task = asyncio.create_task(again.go())
        await router.until(lambda r: len(r.bodies) > 0)
        again.generator.stop_scope("provider", "birch/fp4", "tripped")
        seen = len(router.bodies)
        result = await task
    assert result.outcomes == {"ok": 20}
    assert {b["provider"]["only"][0] for b in router.bodies[seen + 8 :]} <= {"alder"}


async def test_price_order_prefers_the_cheap_one() -> None:
    router = Router()
    cheap = {**ALDER, "tag": "birch", "pricing": {"prompt": "1e-7", "completion": "1e-6"}}
    router.endpoints = [ALDER, cheap]
    router.otherwise = says(completion(cost=5e-5))
    async with serving(router):
        run = Run(router, prompts_of(10), openrouter={"sort": "price"})
        await run.go()
    assert {b["provider"]["only"][0] for b in router.bodies} == {"birch"}


async def test_a_stopped_dataset_stays_pending() -> None:
    async with serving(Router()) as router:
        run = Run(router, prompts_of(5))
        run.generator.stop_scope("dataset", "d", "tripped")
        result = await run.go()
    assert result.reason == "stopped" and result.pending == 5 and "tripped" in result.detail
    assert not router.bodies


async def test_a_failed_canary_stops_the_pair() -> None:
    bad = says(completion(choices=[{"finish_reason": None, "message": {"content": "x"}}]))
    async with serving(Router(otherwise=bad)) as router:
        run = Run(router, prompts_of(60), judges=really_judges(), canary=8, attempts_paid=1)
        result = await run.go()
    assert result.reason == "stopped" and "canary failed" in result.detail
    verdicts = run.of(ev.Canary)
    assert len(verdicts) == 1 and not verdicts[0].passed
    assert len(router.bodies) == 8  # never more than the canary before its verdict


async def test_a_verdict_from_outside_opens_the_pair() -> None:
    async with serving(Router()) as router:
        run = Run(router, prompts_of(12), canary=100)
        run.generator._ports.on_sample = lambda *_: run.generator.canary("alder", "d", True)
        result = await run.go()
    assert result.outcomes == {"ok": 12} and not run.of(ev.Canary)


async def test_a_defect_of_ours_ends_the_run_with_its_error() -> None:
    def broken(*_: object) -> object:
        raise RuntimeError("judge is broken")

    async with serving(Router()) as router:
        run = Run(router, prompts_of(60), judges=broken, max_in_flight=4)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="judge is broken"):
            await run.go()
    assert len(router.bodies) < 60


async def test_a_provider_that_bills_more_than_its_prices_allow_is_stopped() -> None:
    async with serving(Router(otherwise=says(completion(cost=0.1)))) as router:
        run = Run(router, prompts_of(20), max_in_flight=1)
        result = await run.go()
    assert result.reason == "stopped" and "more than its prices allow" in result.detail
    assert len(router.bodies) == 1  # nothing leaves between a reply and its bill
    assert run.check_books() == pytest.approx(0.1)


async def test_the_faster_mode_gives_nobody_up_who_only_waits_for_a_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After 120 replies the worst case does not fit any more, what answers have taken does."""
    monkeypatch.setattr(dispatch, "Limit", lambda ceiling, error_rate: Limit(2, error_rate))
    async with serving(Router()) as router:
        options = {"max_tokens": 4_000, "reserve": "p99", "run": {"budget_usd": 0.2}}
        result = await Run(router, prompts_of(160), max_in_flight=4, **options).go()
    assert (result.reason, result.outcomes, result.pending) == ("", {"ok": 160}, 0)


async def test_the_faster_mode_reserves_what_answers_have_taken() -> None:
    """After a hundred answers of six tokens far less than max_tokens is held, and the bound is
    shown."""
    async with serving(Router()) as router:
        run = Run(router, prompts_of(160), max_tokens=4_000, reserve="p99", max_in_flight=4)
        result = await run.go()
    assert result.outcomes == {"ok": 160}
    assert {s.exposure_usd for s in run.of(ev.Stats)} & {None} == set()
    last = run.of(ev.Stats)[-1]
    assert last.exposure_usd == pytest.approx(last.spent_usd) == pytest.approx(0.16)
    reserves = [x.reserve_usd for x in run.spend.lines if x.kind == "dispatch"]
    # The line on disk holds the worst case: what a kill would have to book.
    assert min(reserves) > 4_000 * 20e-6
    pump = run.generator._pump
    from core.generate.queues import Item

    item, lane = Item(prompts_of(1)[0]), run.generator._lanes[0]
    assert pump._reservation(item, lane) < 10 * 20e-6 < pump._worst(item.prepared, lane)
