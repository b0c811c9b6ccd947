"""The budget against the gateway's own bill: random prices, arrivals and faults that charge for
failed replies, hide their cost, bill somebody else, or lie.

At every moment at which the generator says anything: what the gateway has billed (others' bills of
BYOK requests included) is at most what the books hold spent and reserved, and that is at most the
budget; with the faster reserve, at most the exposure that is shown."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from aiohttp.test_utils import TestServer
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from core import events as ev
from core.budget import Budget
from core.embedded.billing import Provider, usd
from core.embedded.faults import plan_of
from core.embedded.gateway import Gateway, arguments
from core.generate import GenerateResult
from core.generate.request import prefix_key
from core.schema import Prompt
from tests.core.generate.rig import Router, Run, config_of, corpus_prompts, renderer
from tests.faults.scoring import corpus_tape

SHORT, LONG = 110, 40
MAX_TOKENS = 90
"""Some of the tape's replies are longer: they cost their worst case."""
CHARGING = (
    *("no_usage", "zero_usage", "null_cost", "string_cost", "nan_cost", "negative_cost", "no_cost"),
    *("byok", "byok=unsaid", "lookup_lost", "truncated_body", "truncated_body=hard", "cut_stream"),
    *("no_finish", "empty_choices", "no_done", "wrong_usage=-3", "wrong_prompt_usage=8"),
)
FREE = (
    *("error_mid_stream", "error_mid_stream=429", "server_error", "reset", "rate_limited=0.02"),
    *("choice_error", "error_in_200", "html_body", "no_credit", "edge_timeout"),
)
COMMON: dict[str, Any] = {
    "max_tokens": MAX_TOKENS,
    "first_event_timeout_s": 1.0,
    "idle_timeout_s": 1.0,
    "total_timeout_s": 3.0,
    "breaker_error_rate": 1.0,
}


TALK = ("code", "lists", "arithmetic", "greeting", "refusal")


def dataset(count: int) -> list[dict[str, Any]]:
    return [{"name": "d", "kind": "embedded", "limit": count, "families": ["discount", *TALK]}]


class World(NamedTuple):
    """A gateway in this process, a generator, and what the first one has billed."""

    gateway: Gateway
    run: Run
    cap: float
    broken: list[str]
    reserved_at: list[float]

    def billed(self) -> float:
        charges = self.gateway.desk.ledger.charges.values()
        return usd(sum((c.cost_pico or 0) + c.upstream_pico for c in charges))

    def look(self, event: ev.Event) -> None:
        budget, billed = self.run.generator._budget, self.billed()
        if billed > budget.exposure_usd + 1e-9:
            self.broken.append(f"billed {billed} above the exposure {budget.exposure_usd}")
        worst = self.run.config.generate.reserve == "worst_case"
        if worst and budget.exposure_usd > self.cap + 1e-9:
            self.broken.append(f"exposure {budget.exposure_usd} above the cap {self.cap}")


class Tape:
    """A tape and the prompts that it answers; `stepped`: of those with one beginning (which keeps
    their order), short answers and then long ones; `counts`: tokens of their prompts and
    answers."""

    def __init__(self, path: Path, prompts: list[Prompt]) -> None:
        self.path = path
        self.prompts = prompts
        rows = {tuple(r["prompt_ids"]): r for r in map(json.loads, path.read_text().splitlines())}
        common = Counter(map(prefix_key, prompts)).most_common(1)[0][0]
        self.stepped = [p for p in prompts if prefix_key(p) == common][: SHORT + LONG]
        self.counts = []
        for number, ids in enumerate(map(_ids, self.stepped)):
            answer = rows[ids]["completion_ids"][:30]
            rows[ids]["completion_ids"] = answer * 3 if number >= SHORT else answer
            self.counts.append((len(ids), len(rows[ids]["completion_ids"])))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))

    def cost(self, first: int, prompt: float, completion: float) -> float:
        """USD of the first so many of `stepped` at these prices."""
        return sum(p * prompt + c * completion for p, c in self.counts[:first]) / 1e6


def _ids(prompt: Prompt) -> tuple[int, ...]:
    return tuple(renderer().render(prompt.messages, prompt.tools, prompt.thinking).ids)


@pytest.fixture(scope="module")
def tape(tmp_path_factory: pytest.TempPathFactory) -> Tape:
    asked = {"dataset": dataset(400), "max_tokens": MAX_TOKENS}
    prompts = corpus_prompts("http://x", **dict(asked))
    path = tmp_path_factory.mktemp("tape") / "tape.jsonl"
    return Tape(corpus_tape(path, prompts, config_of("http://x", **dict(asked))), prompts)


@contextmanager
def short_waits(reserved: list[float]) -> Iterator[None]:
    """Back-off of hundredths; every reservation is noted with the exposure that it leads to."""
    reserve = Budget.reserve

    def noting(self: Budget, *args: Any, **kwargs: Any) -> bool:
        done = reserve(self, *args, **kwargs)
        reserved.append(self.exposure_usd)
        return done

    def brief(failures: int, dice: float) -> float:
        return 0.01

    with (
        mock.patch.object(Budget, "reserve", noting),
        mock.patch("core.generate.landing.backoff_s", brief),
        mock.patch("core.limit.backoff_s", brief),
    ):
        yield


async def spend(
    tape: Tape, prices: list[tuple[float, float]], cap: float, **options: Any
) -> tuple[World, GenerateResult]:
    """All prompts (the first `count`) against providers of these prices, USD per million tokens."""
    faults, seed = options.pop("faults", []), options.pop("seed", 0)
    count = options.pop("count", 40)
    prompts = tape.stepped if options.get("reserve") == "p99" else tape.prompts[:count]
    speed = ("--tokens-per-s", "3000") if options.get("openrouter", {}).get("stream") else ()
    made = Gateway(
        arguments(
            ["--replay", str(tape.path), "--latency-scale", "0", "--lookup-lag-s", "0", *speed]
        )
    )
    made.desk.plan = plan_of({"faults": faults, "seed": seed})
    made.desk.providers = [
        Provider(
            name=f"P{n}",
            tag=f"p{n}",
            price_prompt=prompt,
            price_completion=completion,
            stop_offset=-(n % 2),
            supports_cancel=n != 1,
        )
        for n, (prompt, completion) in enumerate(prices)
    ]
    async with TestServer(made.app()) as server:
        router = Router()
        router.url = str(server.make_url("")).rstrip("/")
        run = Run(
            router,
            prompts,
            delays_s=(0.0, 0.01),
            dataset=dataset(count),
            run={"budget_usd": cap},
            **COMMON | options,
        )
        world = World(made, run, cap, [], [])
        run.generator._ports.emit = world.look
        with short_waits(world.reserved_at):
            result = await run.go()
        world.look(ev.Log(level="info", message="the end", stage="generate"))
    await made.desk.close()
    made.arrivals.close()
    return world, result


price = st.tuples(
    st.floats(0.05, 4.0).map(lambda x: round(x, 2)), st.floats(0.1, 20.0).map(lambda x: round(x, 2))
)
mixes = st.lists(
    st.tuples(st.sampled_from(CHARGING + FREE), st.floats(0.02, 0.5)), min_size=1, max_size=6
)
FEW = settings(
    max_examples=20,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking whole runs takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.slow
@FEW
@given(
    prices=st.lists(price, min_size=1, max_size=3),
    mix=mixes,
    worsts=st.floats(1.1, 25.0),
    window=st.integers(1, 24),
    stream=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_bill_never_passes_the_cap(
    tape: Tape,
    prices: list[tuple[float, float]],
    mix: list[tuple[str, float]],
    worsts: float,
    window: int,
    stream: bool,
    seed: int,
) -> None:
    """`worsts`: the budget in worst cases of the dearest provider; it binds."""
    cap = (
        worsts * max(600 * prompt + MAX_TOKENS * completion for prompt, completion in prices) / 1e6
    )
    world, result = asyncio.run(
        spend(
            tape,
            prices,
            cap,
            faults=[f"{name}:{rate:.3f}" for name, rate in mix],
            seed=seed,
            max_in_flight=window,
            openrouter={"stream": stream},
        )
    )
    assert world.broken == []
    assert world.billed() <= cap + 1e-9
    booked = world.run.check_books()
    assert booked == pytest.approx(result.spent_usd, abs=1e-9)
    account = usd(world.gateway.desk.ledger.spent_pico)
    assert account <= booked + 1e-9
    if not result.uncertain_usd:
        assert account == pytest.approx(booked, abs=1e-9)
    assert result.pending + sum(result.outcomes.values()) >= 40


@pytest.mark.slow
@settings(FEW, max_examples=8)
@example(prices=[(0.1, 10.0)], mix=[("no_done", 0.02)], seed=0)
@given(prices=st.lists(price, min_size=1, max_size=2), mix=mixes, seed=st.integers(0, 99))
def test_the_faster_reserve_never_passes_what_it_states(
    tape: Tape,
    prices: list[tuple[float, float]],
    mix: list[tuple[str, float]],
    seed: int,
) -> None:
    """The exposure that is shown is the bound, also where later answers are longer than the first
    hundred: no bill is above the largest that a reservation has led to."""
    dearest = max(prices, key=lambda p: 150 * p[0] + MAX_TOKENS * p[1])
    cap = tape.cost(SHORT + 12, *dearest)
    world, _ = asyncio.run(
        spend(
            tape,
            prices,
            cap,
            faults=[f"{name}:{rate / 4:.3f}" for name, rate in mix],
            seed=seed,
            count=400,
            max_in_flight=24,
            reserve="p99",
        )
    )
    assert world.broken == []
    assert world.billed() <= max(world.reserved_at) + 1e-9


@pytest.mark.parametrize("factor", [1.5, 8.0])
@pytest.mark.parametrize("honest", [False, True])
async def test_a_provider_that_bills_above_its_prices_is_left_at_once(
    tape: Tape, factor: float, honest: bool
) -> None:
    """Nobody can hold a budget against prices that lie; but what was sent before the first such
    bill is all that can be overcharged."""
    prices = [(1.0, 10.0), (1.0, 10.0)][: 1 + honest]
    cap, window = 0.02, 4
    world, result = await spend(
        tape, prices, cap, faults=[f"overcharge={factor}@P0"], max_in_flight=window
    )
    charges = world.gateway.desk.ledger.charges.values()
    lied = [c for c in charges if c.provider == "P0"]
    over = [c for c in lied if (c.cost_pico or 0) > c.hold_pico * 1.05]
    if not over:  # dearer than listed, and still within what had been reserved for each
        assert factor == 1.5 and world.billed() <= cap
        return
    first = min(c.finished for c in over)
    assert sum(c.created > first + 0.05 for c in lied) == 0
    assert world.billed() <= cap + sum((c.cost_pico or 0) - c.hold_pico for c in over) / 1e12
    assert (result.reason == "stopped") == (not honest)
    if honest:
        assert result.pending == 0 or "budget" in str(result.reason)
