"""Two kills with some dozen streams in flight: the short form of `python -m
tests.faults.kill_streams`."""

from pathlib import Path

import pytest

from tests.faults.kill_streams import rounds


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_among_streams_keep_every_reply(tmp_path: Path) -> None:
    kills = rounds(tmp_path, 2, seed=1, prompts=240, floor=40)
    assert len(kills) == 2
    assert all(k.in_flight >= 40 for k in kills)
    assert kills[-1].stored > 0
