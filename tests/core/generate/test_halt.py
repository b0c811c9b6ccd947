"""HALT, drain, sever, a full disk: what leaves, what is received, what it cost, what stays
pending."""

import asyncio
from typing import Any

import pytest

from core import events as ev
from core.generate.attempt import Attempts
from core.schema import reply_text
from tests.core.generate.rig import (
    Router,
    Run,
    completion,
    events_of,
    prompts_of,
    says,
    serving,
    streams,
    waits,
)

HEAD = events_of(completion(id="gen-9"))[:3]


async def test_streams_are_cut_where_that_stops_the_bill_and_keep_what_they_brought() -> None:
    router = Router(says(), otherwise=streams(HEAD, then="wait"))
    router.lookups = {"gen-9": [(200, {"total_cost": 0.0002, "cancelled": True})]}
    async with serving(router):
        run = Run(router, prompts_of(40), max_in_flight=6, openrouter={"stream": True})
        task = asyncio.create_task(run.go())
        await router.until(lambda r: r.streaming == 6)
        sent = len(router.bodies)
        run.generator.halt("key", "tester")
        result = await task
        assert len(router.bodies) == sent
    assert result.reason == "halted" and result.pending == 39
    aborted = [r for r in run.rollouts if r.outcome == "aborted"]
    assert len(aborted) == 6 and not any(r.final for r in aborted)
    assert all('"id": "gen-9"' in (reply_text(r) or "") for r in aborted)
    assert run.check_books() == pytest.approx(0.001 + 6 * 0.0002)
    assert router.gone == 6
    begin, end = run.of(ev.Halt)
    assert (begin.source, begin.by, begin.complete) == ("key", "tester", False)
    assert (end.cancelled, end.received, end.severed, end.complete) == (6, 0, 0, True)
    assert end.saved_usd == pytest.approx(
        6 * 0.0008
    )  # what the one whole reply cost, less the bill
    assert sorted(o.outcome for o in run.outcomes) == ["aborted"] * 6 + ["ok"]


@pytest.mark.parametrize("stop", ["halt", "sever", "timeout"])
async def test_a_stream_whose_answer_and_bill_are_there_is_whole_without_its_end(stop: str) -> None:
    """Asked again it would be paid twice."""
    events = events_of(completion())[:-1]  # no [DONE], and the connection stays open
    options = {"idle_timeout_s": 0.3} if stop == "timeout" else {}
    async with serving(Router(otherwise=streams(events, then="wait"))) as router:
        run = Run(router, prompts_of(3), openrouter={"stream": True}, **options)
        task = asyncio.create_task(run.go())
        await router.until(lambda r: r.streaming == 3)
        if stop != "timeout":
            run.generator.halt("key", "")
        if stop == "sever":
            run.generator.sever()
        result = await task
        assert len(router.bodies) == 3
    assert result.outcomes == {"ok": 3} and result.pending == 0
    assert run.check_books() == pytest.approx(0.003)


async def test_what_is_paid_for_anyway_is_received() -> None:
    router = Router(otherwise=waits())
    async with serving(router):
        run = Run(router, prompts_of(20), max_in_flight=5, openrouter={"cancellable": []})
        task = asyncio.create_task(run.go())
        await router.until(lambda r: r.held == 5)
        run.generator.halt("signal", "SIGTERM")
        router.release.set()
        result = await task
    assert result.outcomes == {"ok": 5} and result.pending == 15
    assert len(router.bodies) == 5 and run.check_books() == pytest.approx(0.005)
    assert run.of(ev.Halt)[-1].received == 5


async def test_sever_cuts_everything_and_books_the_worst_case() -> None:
    router = Router(otherwise=waits())
    async with serving(router):
        run = Run(router, prompts_of(20), max_in_flight=5, openrouter={"cancellable": []})
        task = asyncio.create_task(run.go())
        await router.until(lambda r: r.held == 5)
        run.generator.halt("key", "")
        run.generator.sever()
        result = await task
    assert result.reason == "severed" and result.outcomes == {"aborted": 5}
    assert result.uncertain_usd == pytest.approx(run.check_books())
    assert run.of(ev.Halt)[-1].severed == 5
    assert {x.kind for x in run.spend.lines} == {"dispatch", "uncertain"}


async def test_a_sever_ends_look_ups_that_wait_for_their_next_try() -> None:
    """HALT has cut the streams off, nobody knows their bills yet, the next try is an hour away."""
    router = Router(otherwise=streams(HEAD, then="wait"))
    delays_s = (0.0, 0.0, 0.0, 3600.0, 3600.0)
    router.usage = [7.0]
    async with serving(router):
        run = Run(
            router, prompts_of(8), max_in_flight=8, delays_s=delays_s, openrouter={"stream": True}
        )
        task = asyncio.create_task(run.go())
        await router.until(lambda r: r.streaming == 8)
        run.generator.halt("key", "tester")
        await router.until(lambda r: len(r.looked_up) == 8 * 4)
        run.generator.sever()
        result = await task
    assert len(router.looked_up) == 8 * 5
    assert (result.reason, result.outcomes) == ("severed", {"aborted": 8})
    assert {x.kind for x in run.spend.lines} == {"account", "dispatch", "known", "uncertain"}
    assert result.uncertain_usd == pytest.approx(run.check_books())
    (said,) = [e.message for e in run.of(ev.Log) if e.level == "warn"]
    assert "the account was not waited for; a resume asks it again" in said
    end = run.of(ev.Halt)[-1]
    assert (end.cancelled, end.severed, end.complete) == (8, 0, True)


async def test_drain_receives_all_and_sends_nothing() -> None:
    router = Router(otherwise=waits(streams(events_of(completion()))))
    async with serving(router):
        run = Run(router, prompts_of(20), max_in_flight=5, openrouter={"stream": True})
        task = asyncio.create_task(run.go())
        await router.until(lambda r: r.held == 5)
        run.generator.drain()
        router.release.set()
        result = await task
    assert result.reason == "drained" and result.outcomes == {"ok": 5}
    assert len(router.bodies) == 5


async def test_a_request_that_has_not_left_never_leaves() -> None:
    """The dispatch line is written, the gate closes: the line is closed as free and the prompt
    stays pending."""
    router = Router()
    async with serving(router):
        run = Run(router, prompts_of(4))
        append = run.spend.append

        async def slow(record: object, durable: bool = False) -> None:
            await append(record, durable)
            if getattr(record, "kind", "") == "dispatch":
                run.generator.halt("key", "")
                await asyncio.sleep(0)

        run.spend.append = slow  # type: ignore[method-assign,assignment]
        result = await run.go()
    assert result.pending == 4 and not router.bodies and not run.rollouts
    assert run.check_books() == 0
    assert {x.kind for x in run.spend.lines} == {"dispatch", "free"}


async def test_retries_are_not_sent_behind_a_closed_gate() -> None:
    router = Router(otherwise=waits(says(b"", 500)))
    async with serving(router):
        run = Run(router, prompts_of(3), openrouter={"cancellable": []})
        task = asyncio.create_task(run.go())
        await router.until(lambda r: r.held == 3)
        run.generator.halt("key", "")
        router.release.set()
        result = await task
    assert len(router.bodies) == 3 and result.pending == 3
    assert {o.outcome for o in run.outcomes} == {"aborted"}
    assert not any(r.final for r in run.rollouts)


async def test_halt_before_the_first_request() -> None:
    async with serving(Router()) as router:
        run = Run(router, prompts_of(3))
        run.generator.halt("file", "")
        result = await run.go()
    assert result.reason == "halted" and result.pending == 3 and not router.bodies


async def test_a_full_disk_stops_sending_and_keeps_what_arrives() -> None:
    """Case C75: nothing new leaves, everything in flight is handed to the appender, which keeps
    it."""
    router = Router(otherwise=waits())
    async with serving(router):
        run = Run(router, prompts_of(30), max_in_flight=5, openrouter={"cancellable": []})
        run.completions.full_after = 0
        task = asyncio.create_task(run.go())
        await router.until(lambda r: r.held == 5)
        router.release.set()
        result = await task
    assert result.reason == "disk_full"
    assert len(run.rollouts) == len(router.bodies) < 30
    assert run.check_books() == pytest.approx(0.001 * len(router.bodies))


async def test_a_disk_that_is_full_at_the_dispatch_sends_nothing() -> None:
    async with serving(Router()) as router:
        run = Run(router, prompts_of(3))
        run.spend.full_after = 0
        result = await run.go()
    assert result.reason == "disk_full" and not router.bodies and result.pending == 3
    run.check_books()


async def test_resume_after_a_halt_asks_only_what_is_open() -> None:
    from core.generate import Recovered

    async with serving(Router(*[says()] * 10, otherwise=waits())) as router:
        first = Run(router, prompts_of(20), max_in_flight=4)
        task = asyncio.create_task(first.go())
        await router.until(lambda r: r.held == 4)
        first.generator.drain()
        router.release.set()
        await task
        finished = {r.prompt_id for r in first.rollouts if r.final}
        assert len(finished) == 14
        recovered = Recovered(finished=finished, spent_usd=first.check_books())
        second = Run(router, prompts_of(20), recovered=recovered)
        await second.go()
    asked = [r.prompt_id for r in first.rollouts + second.rollouts]
    assert sorted(asked) == sorted(f"p{i}" for i in range(20))


async def test_halt_with_many_in_flight_is_one_tick() -> None:
    """Nothing that the router had not seen when `halt` returned is seen afterwards."""
    router = Router(otherwise=streams(HEAD, then="wait"))
    router.lookups = {"gen-9": [(200, {"total_cost": 0.0001})]}
    async with serving(router):
        run = Run(router, prompts_of(900), max_in_flight=300, openrouter={"stream": True})
        task = asyncio.create_task(run.go())
        await router.until(lambda r: r.streaming >= 200)
        run.generator.halt("key", "")
        left = sum(line.kind == "dispatch" for line in run.spend.lines)
        result = await task
    assert len(router.bodies) <= left
    assert sum(line.kind == "dispatch" for line in run.spend.lines) <= left + 1
    assert result.reason == "halted" and result.pending == 900
    run.check_books()


async def test_a_halt_between_launch_and_first_step_sends_nothing_and_closes_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The dispatch line is handed over with the launch, before its task has run."""
    launch = Attempts.launch

    def launched(self: Attempts, item: Any, lane: Any, now: float) -> Any:
        aloft = launch(self, item, lane, now)
        assert run.spend.lines[-1].prompt_id == item.prompt.prompt_id
        run.generator.halt("key", "me")
        return aloft

    monkeypatch.setattr(Attempts, "launch", launched)
    async with serving(Router()) as router:
        run = Run(router, prompts_of(3), max_in_flight=1)
        result = await run.go()
    assert not router.bodies and result.pending == 3 and result.reason == "halted"
    assert [(x.kind, x.prompt_id) for x in run.spend.lines] == [("dispatch", "p0"), ("free", "p0")]
    assert run.check_books() == 0
