"""The run's own eyes, with a generator that only remembers what it was told."""

from pathlib import Path

import pytest

from core import events as ev
from core.audit.live import Inspector
from core.config_sections import Config, Generate
from core.pipeline.watch import Halt, Watch
from core.store import RunDir
from tests.core.audit.builders import RENDERER, prompt, sample


class Scopes:
    def __init__(self, prices: dict[str, tuple[float, float]]) -> None:
        self.listed = prices
        self.stopped: list[tuple[str, str, str]] = []

    def stop_scope(self, kind: str, name: str, reason: str = "") -> None:
        self.stopped.append((kind, name, reason))

    def canary(self, provider: str, dataset: str, passed: bool) -> None:
        raise AssertionError("no canary was asked for")

    def prices(self) -> dict[str, tuple[float, float]]:
        return self.listed


@pytest.mark.parametrize(
    ("prices", "names"), [({"A": (1e-6, 1e-5)}, ["cost_per_kept_token"]), ({}, [])]
)
def test_a_provider_whose_replies_are_paid_and_not_kept_is_stopped(
    tmp_path: Path, prices: dict[str, tuple[float, float]], names: list[str]
) -> None:
    events: list[ev.Event] = []
    halts: list[Halt] = []
    config = Config(generate=Generate(canary=0))
    watch = Watch(RunDir(tmp_path), config, events.append, halts.append)
    watch.scopes = scopes = Scopes(prices)
    inspector = Inspector(RENDERER)
    for i in range(config.tripwires.min_samples):
        for provider, verdict in (("A", "unverifiable"), ("B", "consistent")):
            one = sample(
                sample_id=f"{provider}{i}", provider=provider, verdict=verdict, cost_usd=0.002
            )
            watch.sampled(inspector.inspect(one, prompt()))
    trips = [e for e in events if isinstance(e, ev.Tripwire)]
    assert [t.name for t in trips] == names and halts == []
    assert scopes.stopped == [("provider", "A", f"tripwire {name}") for name in names]
    assert watch.trips == [f"tripwire {name} (A)" for name in names]
