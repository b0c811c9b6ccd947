"""Numbers for people: values, edges, and that nothing is rounded into a lie."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from console import format as f
from core.events import Halt


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (f.count(None), "–"),
        (f.count(0), "0"),
        (f.count(12_345.4), "12,345"),
        (f.count(1_230_000), "1.23M"),
        (f.short(987), "987"),
        (f.short(12_340), "12.3k"),
        (f.short(999_949), "1.00M"),
        (f.short(1.5), "1.5"),
        (f.usd(0), "$0.00"),
        (f.usd(0.00421), "$0.0042"),
        (f.usd(0.00004), "<$0.0001"),
        (f.usd(12.345), "$12.35"),
        (f.usd(12_345), "$12,345"),
        (f.usd(float("nan")), "–"),
        (f.usd_within(86.1, 2.308), "$86.10 ± $2.31"),
        (f.usd_within(86.1, None), "$86.10"),
        (f.usd_within(None, None), "–"),
        (f.duration_within(723, 41), "12:03 ± 0:41"),
        (f.duration_within(723, None), "12:03"),
        (f.percent(0.5), "50%"),
        (f.percent(1.0), "100%"),
        (f.percent(0.9999), ">99%"),
        (f.percent(0.0001, 1), "<0.1%"),
        (f.percent(0.0), "0%"),
        (f.duration(41), "0:41"),
        (f.duration(3723), "1:02:03"),
        (f.duration(3 * 86400 + 7200), "3d 02h"),
        (f.latency(0.0841), "84ms"),
        (f.latency(0.9996), "1.00s"),
        (f.latency(41.23), "41.2s"),
        (f.latency(312.4), "312s"),
        (f.size(41_200_000_000), "41.2 GB"),
        (f.size(512), "512 B"),
        (f.age(0.42), "0.4 s"),
        (f.age(14.2), "14 s"),
        (f.age(150), "2 min"),
        (f.clock(1_764_417_651), "12:00:51"),
    ],
)
def test_values(made: str, expected: str) -> None:
    assert made == expected


def test_a_stages_result_is_written_for_people() -> None:
    summary = {
        "outcomes": {"ok": 12_225, "rejected": 8},
        "classes": {},
        "spent_usd": 0.0170309,
        "sglang_bytes": 2_800_000,
        "seconds": 62.4,
        "argmax_match": 0.98630303,
        "why": "",
        "path": "/somewhere/export",
        "engines": ["sglang", "vllm"],
        "kept": True,
    }
    whole = (
        "ok 12,225, rejected 8, spent $0.0170, sglang 2.8 MB, 1:02, argmax match 0.9863, "
        "engines sglang vllm, kept True"
    )
    assert f.figures(summary, 200) == whole
    assert f.figures(summary, 40) == "ok 12,225, rejected 8, spent $0.0170"
    assert f.figures({"why": "a long word"}, 5) == "why a"


def test_the_halts_own_account() -> None:
    halt = Halt(source="key", cancelled=1_873, received=4, spent_usd=1.5, saved_usd=0.25)
    assert f.halt_account(halt) == ("1,873 cancelled, 4 received", "spent $1.50, saved $0.2500")
    severed = msgspec.structs.replace(halt, severed=3, uncertain_usd=0.01)
    assert f.halt_account(severed) == (
        "1,873 cancelled, 4 received, 3 severed",
        "spent $1.50, saved $0.2500, uncertain $0.0100",
    )


@given(st.floats(0, 1e12, allow_nan=False))
def test_short_numbers_fit_five_cells(value: float) -> None:
    assert len(f.short(value)) <= 5


@given(st.floats(0, 1e5, allow_nan=False))
def test_latencies_fit_seven_cells(value: float) -> None:
    assert len(f.latency(value)) <= 7


@given(st.floats(0, 1, allow_nan=False))
def test_a_share_is_never_rounded_to_all_or_nothing(share: float) -> None:
    if 0 < share < 1:
        assert f.percent(share) not in ("0%", "100%")
