"""The generator against the embedded gateway with all faults mixed: exactly one outcome each, books
equal to the bill."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer

from core.embedded.corpus import examples
from core.embedded.gateway import Gateway, arguments
from core.generate import recover
from core.render.base import Renderer
from core.store import Appender, RunDir
from tests.core.generate.rig import Router, Run, corpus_prompts, really_judges, renderer

SMALL = {"first_event_timeout_s": 1.0, "idle_timeout_s": 1.0, "total_timeout_s": 3.0}
STREAMED = {"openrouter": {"stream": True}}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a back-off is has its own tests; here only what happens around it matters."""
    monkeypatch.setattr(
        "core.generate.landing.backoff_s", lambda failures, dice: 0.02 + dice * 0.02
    )
    monkeypatch.setattr("core.limit.backoff_s", lambda failures, dice: 0.02 + dice * 0.02)


def tape(path: Path, count: int) -> Path:
    """What a perfect model would answer to the corpus's held-out prompts."""
    render: Renderer = renderer()
    grammar, encode = render.grammar, render.tokenizer.encode_ordinary
    assert grammar is not None and grammar.think_close is not None
    lines = []
    for example in examples("heldout", 0, (), count):
        prompt = render.render(example.messages, example.tools, example.thinking)
        ids = [*encode(example.reasoning), grammar.think_close] if example.thinking else []
        ids += encode(example.content)
        if example.tool_calls:
            ids.append(grammar.section_begin)
            for call in example.tool_calls:
                ids += [grammar.call_begin, *encode(call.id), grammar.arguments_begin]
                ids += [*encode(call.arguments), grammar.call_end]
            ids.append(grammar.section_end)
        ids.append(grammar.end)
        lines.append(json.dumps({"completion_ids": ids, "prompt_ids": prompt.ids}) + "\n")
    path.write_text("".join(lines))
    return path


@asynccontextmanager
async def gateway(tmp_path: Path, count: int, faults: str, *more: str) -> AsyncIterator[Router]:
    """In this process; `url` is all of a Router that is used."""
    options = ["--replay", str(tape(tmp_path / "tape.jsonl", count)), "--latency-scale", "0"]
    made = Gateway(arguments([*options, "--lookup-lag-s", "0", "--faults", faults, *more]))
    async with TestServer(made.app()) as server:
        router = Router()
        router.url = str(server.make_url("")).rstrip("/")
        router.gateway = server  # type: ignore[attr-defined]
        yield router
    await made.desk.close()
    made.arrivals.close()


async def bill(router: Router) -> dict[str, Any]:
    from aiohttp import ClientSession

    async with ClientSession() as session, session.get(f"{router.url}/gateway/bill") as reply:
        return dict(await reply.json())


def of_corpus(router: Router, count: int, **more: Any) -> Run:
    dataset = [{"name": "d", "kind": "embedded", "limit": count, "twins": count // 5}]
    settings: dict[str, Any] = {
        "dataset": dataset,
        "sglang": {"urls": [router.url]},
        "max_in_flight": 16,
        "max_tokens": 400,
        **SMALL,
        **more,
    }
    recovered = settings.pop("recovered", None)
    return Run(
        router,
        corpus_prompts(router.url, **dict(settings)),
        judges=really_judges(),
        recovered=recovered,
        delays_s=(0.0, 0.05, 0.2),
        **dict(settings),
    )


@pytest.mark.parametrize("stream", [True, False])
async def test_without_faults_everything_is_exact_or_consistent(
    tmp_path: Path, stream: bool
) -> None:
    async with gateway(tmp_path, 60, "") as router:
        run = of_corpus(router, 60, openrouter={"stream": stream})
        result = await run.go()
        total = (await bill(router))["total_usd"]
    assert result.reason == "" and result.pending == 0
    verdicts = Counter((o.backend, o.verdict) for o in run.outcomes if o.verdict)
    assert {v for (backend, v) in verdicts if backend == "sglang"} == {"exact"}
    # Before a provider's stop-token offset is known its first replies are unverifiable; nothing is
    # wrong.
    assert {v for _, v in verdicts} <= {"exact", "consistent", "unverifiable"}
    assert verdicts["openrouter", "consistent"] > 3 * verdicts["openrouter", "unverifiable"]
    assert result.spent_usd == pytest.approx(total, abs=1e-9) and result.uncertain_usd == 0
    assert run.check_books() == pytest.approx(total, abs=1e-9)


FAULTS = [
    "rate_limited=0.05:0.1,unavailable=0.05:0.05,platform_limited=0.05:0.03",
    "server_error:0.05,bad_gateway:0.05,html_error:0.05,overloaded=0.05:0.05,reset:0.05",
    "error_in_200:0.05,choice_error:0.05,error_mid_stream:0.05,bad_request:0.03,forbidden:0.03",
    "cut_stream:0.1,no_done:0.1,silent_stream:0.05,no_finish:0.05",
    "no_usage:0.1,zero_usage:0.1,null_cost:0.1,string_cost:0.1,negative_cost:0.1,byok:0.1",
    "trim_reasoning:0.1,rewritten_ids:0.1,spaced_markers:0.1,lost_calls:0.1,wrong_usage:0.05",
]


@pytest.mark.parametrize("faults", FAULTS, ids=[f.split(":")[0] for f in FAULTS])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_under_faults_one_outcome_each_and_books_equal_to_the_bill(
    tmp_path: Path, faults: str, stream: bool
) -> None:
    async with gateway(tmp_path, 80, faults, "--seed", "3") as router:
        run = of_corpus(router, 80, openrouter={"stream": stream}, breaker_error_rate=1.0)
        result = await run.go()
        total = (await bill(router))["total_usd"]
    assert result.reason == "" and result.pending == 0
    assert sum(result.outcomes.values()) == len(run.outcomes) == result_count(run)
    assert len({o.prompt_id for o in run.outcomes}) == len(run.outcomes)
    assert run.check_books() == pytest.approx(result.spent_usd, abs=1e-9)
    # What could not be found out is booked at its worst case, so the books are never below the
    # bill.
    assert result.spent_usd - result.uncertain_usd <= total + 1e-9 <= result.spent_usd + 2e-9
    if result.uncertain_usd == 0:
        assert result.spent_usd == pytest.approx(total, abs=1e-9)


def result_count(run: Run) -> int:
    return int(run.generator.stats().prompts)


async def test_halt_and_resume_at_a_random_moment_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """Twelve lives of one run over a real disk, each halted somewhere; the last one finishes."""
    dice = random.Random(5)
    disk = RunDir(tmp_path / "run")
    disk.path.mkdir()
    outcomes: Counter[str] = Counter()
    faults = "rate_limited=0.02:0.05,server_error:0.05,cut_stream:0.05,no_usage:0.05"
    extra = ("--tokens-per-s", "400")
    async with gateway(tmp_path, 100, faults, *extra) as router:
        for life in range(12):
            found = recover(disk)
            run = of_corpus(router, 100, recovered=found, breaker_error_rate=1.0, **STREAMED)
            completions, spend = Appender(disk.completions), Appender(disk.spend)
            ports = run.generator._ports
            ports.completions, ports.spend = completions, spend
            run.generator._books._spend = spend
            if life < 11:
                stop = run.generator.sever if life % 3 == 2 else lambda: None
                loop = asyncio.get_running_loop()
                loop.call_later(
                    dice.uniform(0.05, 0.5), lambda r=run, s=stop: (r.generator.halt("t", ""), s())
                )
            result = await run.go()
            completions.close()
            spend.close()
            outcomes.update(o.prompt_id for o in run.outcomes if o.outcome != "aborted")
        total = (await bill(router))["total_usd"]
    assert result.pending == 0 and set(outcomes.values()) == {1}
    found = recover(disk)
    assert len(found.finished) == len(outcomes) == sum(result.outcomes.values())
    assert not found.open
    assert found.spent_usd == pytest.approx(result.spent_usd, abs=1e-9)
    assert found.spent_usd - found.uncertain_usd <= total + 1e-9 <= found.spent_usd + 2e-9
