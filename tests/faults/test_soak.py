"""The short form of `python -m tests.faults.soak`: some hundred requests under all faults."""

from pathlib import Path

import pytest

from core.embedded.faults import KINDS
from tests.faults.soak import LEGS, LOCAL, NOT_MIXED, THROTTLES, fault_mix, soak


@pytest.mark.slow
@pytest.mark.parametrize("leg", [0, 1])  # streams, throttled; whole replies, not
def test_all_faults_mixed(tmp_path: Path, leg: int) -> None:
    total, _ = soak(tmp_path, requests=1, prompts=240, seed=leg, timeout_s=1.5)
    assert total.requests > total.prompts - total.outcomes["refused"] > 190
    assert total.outcomes.total() == total.prompts
    assert abs(total.booked_usd - total.billed_usd) < 1e-9 or total.unproven_usd > 0
    assert len(total.hits) > 30
    assert total.closings["billed"] > 80 and total.closings["looked_up"] > 3


def test_the_mix_leaves_no_fault_out() -> None:
    specs = " ".join(fault_mix(n) for n in range(len(LEGS)))
    assert all(f'"{name}' in specs for name in KINDS if name not in NOT_MIXED)
    assert all("@sglang" in fault_mix(0) and f'"{name}' in fault_mix(0) for name in LOCAL)
    assert KINDS.keys() > THROTTLES
