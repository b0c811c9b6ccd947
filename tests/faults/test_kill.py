"""Three kills at random moments, then the books: the short form of `python -m
tests.faults.kill_rounds`."""

import random
from pathlib import Path

import pytest

from core.schema import Sample
from core.store import read_samples
from tests.faults.kill_rounds import one_run
from tests.faults.rig import Gateway, check, new_run, run_config


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kills_lose_nothing_and_book_everything(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, "--seed", "5", "--latency-scale", "3")
    try:
        run = new_run(run_config(gateway, limit=16), tmp_path, "killed")
        kills = one_run(run, random.Random(5), 3, ["generate"])
        assert kills.total() == 3
        books = check(run, gateway.bill())
    finally:
        gateway.close()
    samples: list[Sample] = list(read_samples(run))
    assert len(samples) == books.outcomes["ok"] + books.outcomes["rejected"] == 21
    assert len({s.sample_id for s in samples}) == 21
