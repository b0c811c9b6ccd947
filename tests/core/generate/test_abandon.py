"""Giving up what is pending: nothing is sent, everybody has an outcome, the books are closed."""

from pathlib import Path

import pytest

from core import events as ev
from core.errors import StoreError
from core.generate import abandon, recover
from core.generate.abandon import ABANDONED
from core.generate.ports import Recovered
from core.schema import Rollout, SpendLine
from core.store import Appender, RunDir
from tests.core.generate.rig import NO_DELAYS, Router, Run, prompts_of, serving


def dispatch(prompt_id: str, generation_id: str | None) -> SpendLine:
    return SpendLine(
        ts=1.0,
        kind="dispatch",
        prompt_id=prompt_id,
        attempt=1,
        backend="openrouter",
        provider="alder",
        reserve_usd=0.25,
        generation_id=generation_id,
    )


async def test_everybody_has_one_outcome_and_the_books_are_closed() -> None:
    """Three finished, two open (one bill is known to the look-up), one never asked."""
    router = Router()
    router.lookups["gen-3"] = [(200, {"total_cost": 0.0625})]
    recovered = Recovered(
        finished={"p0", "p1", "p2"},
        outcomes={"ok": 2, "failed": 1},
        open=[dispatch("p3", "gen-3"), dispatch("p4", None)],
        attempts={"p3": 1, "p4": 1},
        spent_usd=1.0,
        cap_usd=1.0,
    )
    async with serving(router):
        run = Run(router, prompts_of(6), recovered=recovered)
        ports = run.generator._ports
        result = await abandon(run.config, prompts_of(6), ports, NO_DELAYS, NO_DELAYS)
    assert router.bodies == [] and router.looked_up == ["gen-3"]
    assert (result.reason, result.pending) == ("", 0)
    assert result.outcomes == {"ok": 2, "failed": 1, "refused": 3}
    assert result.spent_usd == pytest.approx(1.3125) and result.uncertain_usd == 0.25
    assert [(r.prompt_id, r.outcome, r.error_class, r.final) for r in run.rollouts] == [
        (f"p{i}", "refused", ABANDONED, True) for i in (3, 4, 5)
    ]
    closed = {(line.prompt_id, line.kind, line.cost_usd) for line in run.spend.lines}
    assert closed == {("p3", "looked_up", 0.0625), ("p4", "uncertain", 0.25)}
    assert [e.prompt_id for e in run.outcomes] == ["p3", "p4", "p5"]
    (stats,) = run.of(ev.Stats)
    assert (stats.prompts, stats.done, stats.refused) == (6, 6, 3)
    assert stats.forecast_usd is None and stats.eta_s is None


@pytest.mark.parametrize("file", ["completions", "spend"])
async def test_a_line_that_was_not_stored_is_no_success(file: str) -> None:
    async with serving(Router()) as router:
        recovered = Recovered(open=[dispatch("p0", None)], attempts={"p0": 1})
        run = Run(router, prompts_of(3), recovered=recovered)
        getattr(run, file).fault = StoreError("cannot be written")
        with pytest.raises(StoreError, match="cannot be written"):
            await abandon(run.config, prompts_of(3), run.generator._ports, NO_DELAYS, NO_DELAYS)
    assert run.outcomes == []


async def test_what_was_given_up_is_never_asked_again(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    async with serving(Router()) as router:
        first = Run(router, prompts_of(4))
        ports = first.generator._ports
        completions, spend = Appender(run_dir.completions), Appender(run_dir.spend)
        ports.completions, ports.spend = completions, spend
        await abandon(first.config, prompts_of(4), ports, NO_DELAYS, NO_DELAYS)
        completions.close()
        spend.close()
        found = recover(run_dir)
        assert found.finished == {"p0", "p1", "p2", "p3"} and found.open == []
        again = Run(router, prompts_of(5), recovered=found)  # an edited dataset has a new prompt
        result = await again.go()
    assert result.outcomes == {"refused": 4, "ok": 1}
    assert len(router.bodies) == 1


async def test_nothing_pending_is_nothing_to_do() -> None:
    async with serving(Router()) as router:
        recovered = Recovered(finished={"p0"}, outcomes={"ok": 1})
        run = Run(router, prompts_of(1), recovered=recovered)
        result = await abandon(run.config, prompts_of(1), run.generator._ports)
    rollouts: list[Rollout] = run.rollouts
    assert result.outcomes == {"ok": 1} and rollouts == [] and run.spend.lines == []
