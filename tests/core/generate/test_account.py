"""Books against the account: what a total proves, and what it does not."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import events as ev
from core.budget import PICO, to_pico
from core.generate import Recovered, recover
from core.generate.account import proven_rest
from core.generate.tally import Tally
from core.schema import SpendLine
from core.store import RunDir
from tests.core.generate.rig import Router, Run, completion, prompts_of, says, serving

WORST = 0.02
ANSWER = 0.001


def dispatch(name: str) -> SpendLine:
    return SpendLine(
        ts=1.0,
        kind="dispatch",
        prompt_id=name,
        attempt=1,
        backend="openrouter",
        provider="alder",
        reserve_usd=WORST,
    )


def killed(*names: str, start_usd: float | None = 7.0) -> Recovered:
    """An earlier life that left requests without an id."""
    tally = Tally(start_usd=start_usd, sent=len(names))
    return Recovered(
        open=[dispatch(name) for name in names],
        attempts=dict.fromkeys(names, 1),
        tallies={"openrouter": tally},
    )


async def life(usage: list[float], recovered: Recovered, **settings: object) -> Run:
    """Two prompts at $0.001 each, with what the account says, answer by answer (the first answer
    goes to the pre-flight)."""
    router = Router(otherwise=says(completion(cost=ANSWER)))
    router.usage = usage
    async with serving(router):
        run = Run(router, prompts_of(2), recovered=recovered, **settings)
        run.result = await run.go()  # type: ignore[attr-defined]
    return run


def lines(run: Run, kind: str) -> list[SpendLine]:
    return [x for x in run.spend.lines if x.kind == kind]


def booked(run: Run) -> float:
    """By the lines of this life, which the result must agree with."""
    usd: float = sum(x.cost_usd for x in run.spend.lines)
    assert usd == pytest.approx(run.of(ev.Stats)[-1].spent_usd, abs=1e-12)
    return usd


def warnings(run: Run) -> list[str]:
    return [e.message for e in run.of(ev.Log) if e.level == "warn"]


async def test_a_new_run_records_what_its_account_stands_at_before_the_first_request() -> None:
    run = await life([7.0], Recovered())
    first = run.spend.lines[0]
    assert (first.kind, first.account_usd, first.cost_usd) == ("account", 7.0, 0.0)
    assert len(lines(run, "account")) == 1 and not lines(run, "adjusted")
    assert booked(run) == pytest.approx(2 * ANSWER)


async def test_the_account_proves_what_requests_without_an_id_cost() -> None:
    """Two were killed: one was billed $0.004, the other never arrived."""
    run = await life([7.0, 7.006], killed("p0", "p1"))
    (line,) = lines(run, "adjusted")
    assert line.cost_usd == line.cap_usd == pytest.approx(0.004 - 2 * WORST, abs=1e-12)
    assert (line.prompt_id, line.attempt, line.backend) == ("", 0, "openrouter")
    assert run.spend.lines[-1] is line
    stats = run.of(ev.Stats)[-1]
    assert stats.spent_usd == pytest.approx(0.006, abs=1e-12) and stats.uncertain_usd == 0
    assert booked(run) == pytest.approx(0.006, abs=1e-12)
    assert run.result.uncertain_usd == 0  # type: ignore[attr-defined]
    assert run.generator._budget.spent_usd == pytest.approx(0.006, abs=1e-12)


async def test_nothing_arrived_means_nothing_was_spent() -> None:
    run = await life([7.0, 7.002], killed("p0"))
    assert booked(run) == pytest.approx(2 * ANSWER, abs=1e-12)


@pytest.mark.parametrize(
    "end",
    [7.0019, 7.5],
    ids=["the total lags", "somebody else spends from the same key"],
)
async def test_an_account_that_does_not_fit_proves_nothing(end: float) -> None:
    run = await life([7.0, end], killed("p0"))
    assert not lines(run, "adjusted")
    assert booked(run) == pytest.approx(WORST + 2 * ANSWER)
    assert run.of(ev.Stats)[-1].uncertain_usd == pytest.approx(WORST)
    (said,) = warnings(run)
    assert "does not fit the books" in said and "$0.020000" in said


async def test_a_total_that_still_moves_is_read_until_two_readings_agree() -> None:
    run = await life([7.0, 7.001, 7.003, 7.005, 7.005], killed("p0"))
    assert booked(run) == pytest.approx(0.005, abs=1e-12)


async def test_a_total_that_never_rests_proves_nothing() -> None:
    run = await life([7.0, *(7.003 + i / 1e4 for i in range(9))], killed("p0"))
    assert not lines(run, "adjusted") and len(warnings(run)) == 1


async def test_an_account_that_was_never_read_is_not_read_later() -> None:
    """The start is unknown once something has been sent: a run of an older version."""
    run = await life([7.0, 7.006], killed("p0", start_usd=None))
    assert not lines(run, "account") and not lines(run, "adjusted")
    assert run.of(ev.Stats)[-1].uncertain_usd == pytest.approx(WORST)


async def test_what_others_are_billed_stays_in_the_cap() -> None:
    """BYOK, case C40: the account's total does not hold what the upstream bills."""
    recovered = killed("p0")
    recovered.tallies["openrouter"].others_pay = True
    run = await life([7.0, 7.002], recovered)
    (line,) = lines(run, "adjusted")
    assert (line.cost_usd, line.cap_usd) == (pytest.approx(-WORST), 0.0)
    assert run.generator._budget.spent_usd == pytest.approx(WORST + 2 * ANSWER)


async def test_a_halted_run_is_settled_too() -> None:
    """Halted at once: nothing is asked, the open dispatch of the life before is closed."""
    router = Router()
    router.usage = [7.0, 7.003]
    async with serving(router):
        run = Run(router, prompts_of(2), recovered=killed("p0"))
        run.generator.halt("key", "")
        result = await run.go()
    assert result.reason == "halted" and not router.bodies
    assert run.of(ev.Halt)[-1].uncertain_usd == 0
    assert booked(run) - run.of(ev.Halt)[-1].spent_usd == pytest.approx(0, abs=1e-12)
    assert result.spent_usd == pytest.approx(0.003, abs=1e-12)


async def test_twice_resumed(tmp_path: Path) -> None:
    """A second kill after a first correction; then a life with nothing left to ask, whose account
    has caught up with a bill that came late."""
    disk = RunDir(tmp_path)
    disk.spend.write_bytes(
        _encoded(
            SpendLine(
                ts=0.0,
                kind="account",
                prompt_id="",
                attempt=0,
                backend="openrouter",
                account_usd=7.0,
            ),
            dispatch("p0"),
        )
    )
    first = await life([7.0, 7.004], recover(disk))
    assert booked(first) == pytest.approx(0.004, abs=1e-12)
    _keep(disk, first)
    with disk.spend.open("ab") as file:
        file.write(_encoded(dispatch("p9")))
    found = recover(disk)
    assert found.uncertain_usd == 0 and found.spent_usd == pytest.approx(0.004, abs=1e-12)
    second = await life([7.0, 7.006], found)
    (line,) = lines(second, "adjusted")
    assert line.cost_usd == pytest.approx(-WORST, abs=1e-12)
    _keep(disk, second)
    found = recover(disk)
    assert found.spent_usd == pytest.approx(0.006, abs=1e-12) and found.uncertain_usd == 0
    found.finished = {"p0", "p1"}
    third = await life([7.009], found)
    (line,) = lines(third, "adjusted")
    assert line.cost_usd == pytest.approx(0.003, abs=1e-12)
    assert third.result.spent_usd == pytest.approx(0.009, abs=1e-12)  # type: ignore[attr-defined]
    _keep(disk, third)
    later = recover(disk)
    later.finished = {"p0", "p1"}
    fourth = await life([8.0], later)
    assert not fourth.spend.lines and not warnings(fourth)


def _encoded(*records: SpendLine) -> bytes:
    return b"".join(msgspec.json.encode(r) + b"\n" for r in records)


def _keep(disk: RunDir, run: Run) -> None:
    with disk.spend.open("ab") as file:
        file.write(_encoded(*run.spend.lines))


USD = st.integers(0, 50_000_000_000).map(lambda pico: pico / PICO)


@given(
    start=st.floats(0, 10_000),
    billed=st.lists(USD, max_size=20),
    unknown=st.lists(st.tuples(USD, st.floats(0, 1)), min_size=1, max_size=20),
    later=st.lists(st.tuples(USD, st.floats(0, 1)), max_size=5),
)
def test_the_books_equal_the_account_whatever_the_unknown_ones_cost(
    start: float,
    billed: list[float],
    unknown: list[tuple[float, float]],
    later: list[tuple[float, float]],
) -> None:
    """Each unknown request costs any share of its worst case; corrected once, and again after more
    of them."""
    tally, account, booked = Tally(start_usd=start), start, 0

    def add(kind: str, usd: float) -> None:
        nonlocal booked
        line = SpendLine(
            ts=0.0,
            kind=kind,  # type: ignore[arg-type]
            prompt_id="p",
            attempt=1,
            backend="b",
            cost_usd=usd,
            cap_usd=usd,
        )
        tally.add(line)
        booked += to_pico(usd)

    for usd in billed:
        add("billed", usd)
        account += usd
    for part in (unknown, later):
        for worst, share in part:
            add("uncertain", worst)
            account += worst * share
        rest = proven_rest(start, account, tally)
        assert rest is not None
        add("adjusted", tally.correction(rest) / PICO)
        assert booked / PICO == pytest.approx(account - start, abs=2e-6)
        assert tally.unproven == 0
    assert proven_rest(start, account + tally.worst / PICO + 1e-5, tally) is None
